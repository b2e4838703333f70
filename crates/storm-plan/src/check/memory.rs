//! What each byte of a tier holds, and which threads touched it.

use crate::plan::ValueId;
use crate::queue::Queue;
use std::collections::BTreeMap;
use std::ops::Range;
use storm_graph::work;

/// The host as a thread, numbered after the queues.
pub(super) const HOST: usize = Queue::COUNT_MAX;

/// Queues and the host.
pub(super) const THREADS: usize = HOST + 1;

/// How many actions of each thread are known to be done.
pub(super) type Clock = [u32; THREADS];

/// Merges in what another thread knows.
pub(super) fn join(clock: &mut Clock, other: &Clock) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}

/// An action: its thread, and its number in that thread, from 1. Number 0 stands for no action and
/// is before everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) thread: usize,
    pub(super) count: u32,
}

impl Stamp {
    pub(super) fn is_before(self, clock: &Clock) -> bool {
        self.count <= clock[self.thread]
    }
}

/// A byte of a value, as some compute instruction (or the host) wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) value: ValueId,
    /// How many times the value had been written.
    pub(super) version: u32,
    /// Which byte of the value.
    pub(super) position: usize,
}

impl Content {
    fn advanced(self, by: usize) -> Content {
        Content { position: self.position + by, ..self }
    }
}

/// A range of bytes with one history; its start is its key.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    end: usize,
    /// Content of the first byte; the other bytes follow it.
    content: Option<Content>,
    written: Stamp,
    /// By thread: its last read since the write. A thread's earlier reads are before its last.
    read: Clock,
}

/// Two accesses in no order.
#[derive(Clone, Debug)]
pub(super) struct Conflict {
    pub(super) bytes: Range<usize>,
    pub(super) with: Stamp,
    pub(super) was_write: bool,
}

/// Bytes with one content, and the action that wrote it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Part {
    pub(super) bytes: Range<usize>,
    /// Of the first byte; the other bytes follow it.
    pub(super) content: Option<Content>,
    pub(super) written: Stamp,
}

/// All bytes of a tier. Bytes in no cell were never touched.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    cells: BTreeMap<usize, Cell>,
}

impl Memory {
    /// Reads bytes: calls `see` for each range, with the content of its first byte.
    pub(super) fn read(
        &mut self,
        bytes: Range<usize>,
        reader: Stamp,
        clock: &Clock,
        mut see: impl FnMut(Range<usize>, Option<Content>),
    ) -> Result<(), Conflict> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.isolate(&bytes);
        for (&start, cell) in self.cells.range_mut(bytes) {
            work::count(1);
            if !cell.written.is_before(clock) {
                let (with, was_write) = (cell.written, true);
                return Err(Conflict { bytes: start..cell.end, with, was_write });
            }
            cell.read[reader.thread] = reader.count;
            see(start..cell.end, cell.content);
        }
        Ok(())
    }

    /// Overwrites bytes; `content` is that of the first one.
    pub(super) fn write(
        &mut self,
        bytes: Range<usize>,
        writer: Stamp,
        clock: &Clock,
        content: Option<Content>,
    ) -> Result<(), Conflict> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.isolate(&bytes);
        for (&start, cell) in self.cells.range(bytes.clone()) {
            work::count(1);
            let at = start..cell.end;
            if !cell.written.is_before(clock) {
                return Err(Conflict { bytes: at, with: cell.written, was_write: true });
            }
            if let Some(thread) = (0..THREADS).find(|&thread| cell.read[thread] > clock[thread]) {
                let with = Stamp { thread, count: cell.read[thread] };
                return Err(Conflict { bytes: at, with, was_write: false });
            }
        }
        let new = Cell { end: bytes.end, content, written: writer, read: [0; THREADS] };
        let old = self.cells.insert(bytes.start, new);
        let mut next = old.map_or(bytes.end, |cell| cell.end);
        while next < bytes.end {
            next = self.cells.remove(&next).map_or(bytes.end, |cell| cell.end);
        }
        Ok(())
    }

    /// The contents, in order, without counting as an access.
    pub(super) fn look(&self, bytes: Range<usize>) -> Vec<Part> {
        let first = self.cells.range(..bytes.start).next_back().map_or(bytes.start, |(&s, _)| s);
        let mut next = bytes.start;
        let mut parts = Vec::new();
        for (&start, cell) in self.cells.range(first..bytes.end) {
            if cell.end <= next {
                continue;
            }
            if start > next {
                parts.push(Part { bytes: next..start, ..Part::default() });
            }
            let from = start.max(bytes.start);
            let content = cell.content.map(|content| content.advanced(from - start));
            next = cell.end.min(bytes.end);
            parts.push(Part { bytes: from..next, content, written: cell.written });
        }
        if next < bytes.end {
            parts.push(Part { bytes: next..bytes.end, ..Part::default() });
        }
        parts
    }

    /// Everything in this memory, in as few ranges as possible.
    pub(super) fn contents(&self) -> Vec<(Range<usize>, Content)> {
        let mut all: Vec<(Range<usize>, Content)> = Vec::new();
        for (&start, cell) in &self.cells {
            let Some(content) = cell.content else { continue };
            if let Some((bytes, first)) = all.last_mut()
                && bytes.end == start
                && first.advanced(start - bytes.start) == content
            {
                bytes.end = cell.end;
                continue;
            }
            all.push((start..cell.end, content));
        }
        all
    }

    /// Splits cells so that `bytes` is covered by whole cells.
    fn isolate(&mut self, bytes: &Range<usize>) {
        if self.cells.get(&bytes.start).is_some_and(|cell| cell.end == bytes.end) {
            return;
        }
        self.split(bytes.start);
        self.split(bytes.end);
        let mut next = bytes.start;
        let mut holes = Vec::new();
        for (&start, cell) in self.cells.range(bytes.clone()) {
            if start > next {
                holes.push(next..start);
            }
            next = cell.end;
        }
        if next < bytes.end {
            holes.push(next..bytes.end);
        }
        for hole in holes {
            self.cells.insert(hole.start, Cell { end: hole.end, ..Cell::default() });
        }
    }

    /// Splits the cell that has `at` inside.
    fn split(&mut self, at: usize) {
        let Some((&start, cell)) = self.cells.range_mut(..at).next_back() else { return };
        if cell.end <= at {
            return;
        }
        let content = cell.content.map(|content| content.advanced(at - start));
        let rest = Cell { content, ..*cell };
        cell.end = at;
        self.cells.insert(at, rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERYTHING: Clock = [u32::MAX; THREADS];

    fn content(value: u32, position: usize) -> Option<Content> {
        Some(Content { value: ValueId(value), version: 1, position })
    }

    /// What is known of the first threads.
    fn clock(known: [u32; 3]) -> Clock {
        let mut clock = [0; THREADS];
        clock[..3].copy_from_slice(&known);
        clock
    }

    fn by(thread: usize, count: u32) -> Stamp {
        Stamp { thread, count }
    }

    #[test]
    fn overwriting_a_part_keeps_the_rest() {
        let mut memory = Memory::default();
        memory.write(0..100, by(0, 1), &EVERYTHING, content(7, 0)).unwrap();
        memory.write(40..60, by(0, 2), &EVERYTHING, content(8, 0)).unwrap();
        let part = |bytes, content, count| Part { bytes, content, written: by(0, count) };
        assert_eq!(
            memory.look(20..120),
            [
                part(20..40, content(7, 20), 1),
                part(40..60, content(8, 0), 2),
                part(60..100, content(7, 60), 1),
                part(100..120, None, 0),
            ]
        );
    }

    #[test]
    fn a_reader_of_untouched_bytes_is_remembered() {
        let mut memory = Memory::default();
        memory.read(10..20, by(1, 5), &EVERYTHING, |_, content| assert_eq!(content, None)).unwrap();
        let conflict = memory.write(0..15, by(0, 1), &[0; THREADS], None).unwrap_err();
        assert_eq!((conflict.bytes, conflict.with, conflict.was_write), (10..15, by(1, 5), false));
        memory.write(0..15, by(0, 1), &clock([0, 5, 0]), None).unwrap();
    }

    #[test]
    fn a_read_needs_the_write_before_it() {
        let mut memory = Memory::default();
        memory.write(0..10, by(2, 3), &[0; THREADS], content(1, 0)).unwrap();
        let early = memory.read(5..10, by(0, 1), &clock([1, 0, 2]), |_, _| {}).unwrap_err();
        assert!(early.was_write && early.with == by(2, 3) && early.bytes == (5..10));
        memory.read(5..10, by(0, 1), &clock([1, 0, 3]), |_, _| {}).unwrap();
    }

    #[test]
    fn contents_join_what_belongs_together() {
        let mut memory = Memory::default();
        memory.write(0..100, by(0, 1), &EVERYTHING, content(7, 0)).unwrap();
        memory.read(30..50, by(1, 1), &EVERYTHING, |_, _| {}).unwrap();
        assert_eq!(memory.contents(), [(0..100, content(7, 0).unwrap())]);
    }
}
