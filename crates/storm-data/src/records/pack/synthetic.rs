//! Synthetic records of any shape and count, each with its index.

use super::{Sink, Source};
use crate::records::column::{Column, ColumnType, RECORD_BYTES_MAX};
use crate::{DataError, Split};
use std::path::PathBuf;
use storm_graph::random::Random;

/// Records of pseudo-random bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Synthetic {
    /// How many records.
    pub count: u64,
    /// The shape of column `images`, of u8.
    pub shape: Vec<usize>,
    /// Values of column `targets` are below this.
    pub classes: u32,
}

impl Synthetic {
    pub(super) fn words(&self) -> String {
        let shape: Vec<String> = self.shape.iter().map(ToString::to_string).collect();
        format!("{} synthetic records of {}", self.count, shape.join(" × "))
    }

    pub(super) fn checked(self) -> Result<Synthetic, DataError> {
        let refuse =
            |option, problem: &str| Err(DataError::Option { option, problem: problem.to_owned() });
        if self.count == 0 || self.count > 1 << 48 {
            return refuse("synthetic", "between 1 and 2^48 records");
        }
        if self.classes == 0 || i32::try_from(self.classes).is_err() {
            return refuse("classes", "between 1 and 2^31 - 1");
        }
        match self.bytes() {
            Some(1..=RECORD_BYTES_MAX) => Ok(self),
            _ => refuse("shape", "a record has between 1 byte and 64 MiB"),
        }
    }

    fn bytes(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |bytes, &length| bytes.checked_mul(length as u64))
    }
}

impl Source for Synthetic {
    fn columns(&self) -> Vec<Column> {
        vec![
            Column::fixed("images", ColumnType::U8, &self.shape),
            Column::label("targets", self.classes),
            // The record's index, as low and high half.
            Column::fixed("index", ColumnType::I32, &[2]),
        ]
    }

    fn has_parts(&self) -> bool {
        false
    }

    fn size(&self) -> (u64, u64) {
        (0, self.count.saturating_mul(self.bytes().unwrap_or(0)))
    }

    fn read(&mut self, sink: &mut Sink<'_>) -> Result<(), DataError> {
        let bytes = self.bytes().unwrap_or(0) as usize;
        let mut image = vec![0; bytes];
        for number in 0..self.count {
            let mut random = Random(number);
            // Every word is repeated, so that a codec has something to compress.
            let mut twice = || {
                let word = u128::from(random.bits());
                (word << 64 | word).to_le_bytes()
            };
            let (pairs, rest) = image.as_chunks_mut::<16>();
            pairs.iter_mut().for_each(|pair| *pair = twice());
            if !rest.is_empty() {
                rest.copy_from_slice(&twice()[..rest.len()]);
            }
            let label = (random.bits() % u64::from(self.classes)) as i32;
            let values: [&[u8]; 3] = [&image, &label.to_le_bytes(), &number.to_le_bytes()];
            sink.push(Split::Train, &values, bytes as u64, || {
                (PathBuf::from("synthetic records"), format!("record {number}: "))
            })?;
        }
        Ok(())
    }
}
