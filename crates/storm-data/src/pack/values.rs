//! Records in JSON files: an array of values, or one or more values in sequence.

use super::records::{RECORD_BYTES_MAX, Raw, Records, too_long};
use super::stream::{Buffered, Stream};
use crate::{DataError, RecordPlace};

const BYTE_ORDER_MARK: [u8; 3] = [0xef, 0xbb, 0xbf];

/// The values of a file, counted from 1. This only finds where each value ends. Whether it is valid
/// JSON is checked when it is parsed.
pub(super) struct Values {
    input: Buffered,
    number: u64,
    place: Place,
    /// State of the value being read or skipped.
    scan: Scan,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// At the start of the file.
    Start,
    /// Before a value of an array, or its end.
    Array,
    /// Before a top-level value, or the end of the file.
    Sequence,
    /// After the array.
    End,
}

/// The scanner's state within a value.
#[derive(Clone, Copy, Default)]
struct Scan {
    /// Open brackets.
    depth: u64,
    is_string: bool,
    is_escape: bool,
    /// It is too long, and the rest of it is still to be skipped.
    is_passed_over: bool,
}

impl Values {
    pub(super) fn new(stream: Stream) -> Values {
        Values {
            input: Buffered::new(stream),
            number: 0,
            place: Place::Start,
            scan: Scan::default(),
        }
    }

    fn bad(&self, problem: String) -> DataError {
        DataError::input(self.input.stream().path(), problem)
    }

    /// Takes one byte.
    fn next_byte(&mut self) -> Result<Option<u8>, DataError> {
        let byte = self.input.peek()?;
        self.input.consume(usize::from(byte.is_some()));
        Ok(byte)
    }

    /// The next byte that is not white space, without taking it.
    fn peek_value(&mut self) -> Result<Option<u8>, DataError> {
        while let Some(byte) = self.input.peek()? {
            match byte {
                b' ' | b'\t' | b'\r' | b'\n' => self.input.consume(1),
                _ => return Ok(Some(byte)),
            }
        }
        Ok(None)
    }

    /// Moves to the start of the next value. Returns false at the end.
    fn find_value(&mut self) -> Result<bool, DataError> {
        if self.place == Place::Start {
            if self.input.bytes()?.starts_with(&BYTE_ORDER_MARK) {
                self.input.consume(BYTE_ORDER_MARK.len());
            }
            self.place = match self.peek_value()? {
                Some(b'[') => Place::Array,
                _ => Place::Sequence,
            };
            if self.place == Place::Array {
                self.input.consume(1);
            }
        }
        let next = self.peek_value()?;
        let number = self.number;
        match (self.place, next) {
            (Place::Sequence | Place::End, None) => Ok(false),
            (Place::Sequence, Some(_)) => Ok(true),
            (Place::Array, Some(b']')) => {
                self.input.consume(1);
                self.place = Place::End;
                self.find_value()
            }
            (Place::Array, Some(b',')) if number > 0 => {
                self.input.consume(1);
                match self.peek_value()? {
                    Some(b',' | b']') | None => {
                        Err(self.bad(format!("no value follows the comma after record {number}")))
                    }
                    Some(_) => Ok(true),
                }
            }
            (Place::Array, Some(_)) if number == 0 => Ok(true),
            (Place::Array, Some(_)) => {
                Err(self.bad(format!("neither a comma nor `]` follows record {number}")))
            }
            (Place::Array, None) => {
                Err(self.bad(format!("the file ends inside of its array, after record {number}")))
            }
            _ => Err(self.bad("something follows the end of its array".to_owned())),
        }
    }

    /// Takes bytes of a value until it ends or is too long.
    fn read_value(&mut self, to: &mut Vec<u8>) -> Result<(), DataError> {
        loop {
            let Some(byte) = self.input.peek()? else { return Ok(()) };
            let scan = &mut self.scan;
            let is_bare = scan.depth == 0 && !scan.is_string;
            let is_first = is_bare && to.is_empty() && !scan.is_passed_over;
            // A number or literal ends before the byte that follows it. It cannot be a record, but
            // still counts as one.
            if is_bare
                && !is_first
                && matches!(byte, b',' | b']' | b'}' | b' ' | b'\n' | b'\r' | b'\t')
            {
                return Ok(());
            }
            self.next_byte()?;
            if !self.scan.is_passed_over {
                to.push(byte);
            }
            if self.scan.ends_with(byte) {
                return Ok(());
            }
            if to.len() as u64 > RECORD_BYTES_MAX {
                self.scan.is_passed_over = true;
                return Ok(());
            }
        }
    }
}

impl Scan {
    /// Scans the next byte. Returns whether the value ends with it.
    fn ends_with(&mut self, byte: u8) -> bool {
        if self.is_string {
            match byte {
                _ if self.is_escape => self.is_escape = false,
                b'\\' => self.is_escape = true,
                b'"' => self.is_string = false,
                _ => {}
            }
            return !self.is_string && self.depth == 0;
        }
        match byte {
            b'"' => self.is_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

impl Records for Values {
    fn taken(&self) -> u64 {
        self.input.stream().taken()
    }

    fn next(&mut self) -> Result<Option<Raw>, DataError> {
        if self.scan.is_passed_over {
            self.read_value(&mut Vec::new())?;
        }
        self.scan = Scan::default();
        if !self.find_value()? {
            return Ok(None);
        }
        self.number += 1;
        let place = RecordPlace::Record(self.number);
        let mut value = Vec::new();
        self.read_value(&mut value)?;
        let bytes = value.len() as u64;
        let json = match self.scan.is_passed_over {
            true => Err(too_long()),
            false => String::from_utf8(value).map_err(|_| "is not UTF-8 text".to_owned()),
        };
        Ok(Some(Raw { place, bytes, json }))
    }
}
