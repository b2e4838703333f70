//! Repeats the records of a dataset, for tests at scale.

use super::{Sink, Source};
use crate::records::column::{Column, Place};
use crate::records::set::RecordSet;
use crate::{DataError, Split};
use std::path::PathBuf;

/// A dataset whose training part is repeated up to `count` records. Each pass covers all records,
/// so blocks compress as well as those of the dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repeated {
    /// The dataset.
    pub dir: PathBuf,
    /// How many records to create.
    pub count: u64,
}

impl Repeated {
    pub(super) fn words(&self) -> String {
        format!("{} records of {}, repeated", self.count, self.dir.display())
    }

    pub(super) fn open(&self) -> Result<RepeatedSet, DataError> {
        if self.count == 0 || self.count > 1 << 48 {
            let problem = "between 1 and 2^48 records".to_owned();
            return Err(DataError::Option { option: "count", problem });
        }
        Ok(RepeatedSet { set: RecordSet::open(&self.dir)?, count: self.count })
    }
}

pub(super) struct RepeatedSet {
    set: RecordSet,
    count: u64,
}

impl RepeatedSet {
    fn record_bytes(&self) -> u64 {
        let counts = &self.set.manifest().counts;
        counts.raw_bytes.div_ceil(counts.records.max(1))
    }
}

impl Source for RepeatedSet {
    fn columns(&self) -> Vec<Column> {
        self.set.columns().to_vec()
    }

    fn class_names(&self) -> Vec<String> {
        self.set.manifest().class_names.clone()
    }

    fn has_parts(&self) -> bool {
        false
    }

    fn size(&self) -> (u64, u64) {
        (0, self.count.saturating_mul(self.record_bytes()))
    }

    fn read(&mut self, sink: &mut Sink<'_>) -> Result<(), DataError> {
        let (layout, bytes) = (self.set.layout(), self.record_bytes());
        let mut made = 0;
        while made < self.count {
            let before = made;
            self.set.each_record(Split::Train, &mut |record| {
                if made == self.count {
                    return Ok(());
                }
                let value = |place: &Place| match *place {
                    Place::Fixed { at, bytes } => Some(&record[at..at + bytes]),
                    Place::Varying { number } => layout.varying(record, number),
                };
                let values: Option<Vec<&[u8]>> = layout.places().iter().map(value).collect();
                let number = made - before;
                made += 1;
                sink.push(Split::Train, &values.unwrap_or_default(), bytes, || {
                    (self.set.dir().to_owned(), format!("record {number}: "))
                })
            })?;
            if made == before {
                // Nothing to repeat.
                return Ok(());
            }
        }
        Ok(())
    }
}
