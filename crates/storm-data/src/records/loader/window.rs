//! Which blocks are in memory, and for how long.

use crate::DataError;
use crate::records::block::Block;
use crate::records::order::{Part, WindowOrder};
use crate::records::set::{Reader, RecordSet};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Where records come from.
#[derive(Clone, Debug)]
pub(super) enum Residence {
    /// All blocks of the part stay in memory once they were read.
    Whole(Arc<[Slot]>),
    /// The blocks of a window stay as long as it is in use.
    Windows,
    /// Each record is read on its own.
    SingleRecords,
    /// Each record's block is read, unless it was read recently.
    Recent(Arc<Recent>),
}

impl Residence {
    pub(super) fn whole(part: &Part) -> Residence {
        Residence::Whole(slots(part.blocks.len()))
    }

    pub(super) fn recent(blocks: usize) -> Residence {
        Residence::Recent(Arc::new(Recent { blocks_max: blocks, held: Mutex::default() }))
    }
}

/// A place for a block. The lock is held while the block is read, so that others wait for it instead of reading it too.
#[derive(Debug, Default)]
pub(super) struct Slot(Mutex<Option<Arc<Block>>>);

impl Slot {
    /// The block, read if it is not there.
    fn get(
        &self,
        read: impl FnOnce() -> Result<Block, DataError>,
    ) -> Result<Arc<Block>, DataError> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(block) = &*held {
            return Ok(Arc::clone(block));
        }
        let block = Arc::new(read()?);
        *held = Some(Arc::clone(&block));
        Ok(block)
    }
}

fn slots(count: usize) -> Arc<[Slot]> {
    (0..count).map(|_| Slot::default()).collect()
}

/// Blocks that were used last.
#[derive(Debug)]
pub(super) struct Recent {
    blocks_max: usize,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    clock: u64,
    blocks: HashMap<u32, (u64, Arc<Block>)>,
}

impl Recent {
    fn get(
        &self,
        number: u32,
        read: impl FnOnce() -> Result<Block, DataError>,
    ) -> Result<Arc<Block>, DataError> {
        let lock = || self.held.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let mut held = lock();
            held.clock += 1;
            let clock = held.clock;
            if let Some((used, block)) = held.blocks.get_mut(&number) {
                *used = clock;
                return Ok(Arc::clone(block));
            }
        }
        // Other threads go on while this one reads; two may read the same block.
        let block = Arc::new(read()?);
        let mut held = lock();
        if held.blocks.len() >= self.blocks_max
            && let Some(&oldest) =
                held.blocks.iter().min_by_key(|(_, (used, _))| used).map(|(number, _)| number)
        {
            held.blocks.remove(&oldest);
        }
        let clock = held.clock;
        held.blocks.insert(number, (clock, Arc::clone(&block)));
        Ok(block)
    }
}

/// A window in use: its order, and its blocks as far as they were read.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) order: WindowOrder,
    part: Arc<Part>,
    residence: Residence,
    /// Of this window alone.
    slots: Arc<[Slot]>,
}

impl Window {
    pub(super) fn new(order: WindowOrder, part: &Arc<Part>, residence: &Residence) -> Window {
        let own = match residence {
            Residence::Windows => order.blocks.len(),
            _ => 0,
        };
        Window { order, part: Arc::clone(part), residence: residence.clone(), slots: slots(own) }
    }

    /// Blocks that are worth reading before their records are wanted.
    pub(super) fn prefetchable(&self) -> usize {
        match self.residence {
            Residence::Whole(_) | Residence::Windows => self.order.blocks.len(),
            Residence::SingleRecords | Residence::Recent(_) => 0,
        }
    }

    /// Reads a block of the window, if it is not there.
    pub(super) fn block(
        &self,
        at: usize,
        set: &RecordSet,
        reader: &mut Reader,
    ) -> Result<Arc<Block>, DataError> {
        let in_part = self.order.blocks[at];
        let number = self.part.blocks[in_part];
        let mut read = || set.load(number, reader);
        match &self.residence {
            Residence::Whole(slots) => slots[in_part].get(read),
            Residence::Windows => self.slots[at].get(read),
            Residence::Recent(recent) => recent.get(number, read),
            Residence::SingleRecords => Ok(Arc::new(read()?)),
        }
    }

    /// Calls `with` with the record at a place, and its number in the dataset.
    pub(super) fn record(
        &self,
        place: u64,
        set: &RecordSet,
        reader: &mut Reader,
        with: impl FnOnce(&[u8], u64) -> Result<(), String>,
    ) -> Result<(), DataError> {
        let (at, record) = self.order.at(place);
        let number = self.part.blocks[self.order.blocks[at]];
        let in_set = set.block(number).first_record + u64::from(record);
        let used = match self.residence {
            Residence::SingleRecords => with(set.load_record(number, record, reader)?, in_set),
            _ => {
                let block = self.block(at, set, reader)?;
                with(block.record(record as usize, set.layout()), in_set)
            }
        };
        used.map_err(|problem| set.damaged_block(number, format!("its record {record}: {problem}")))
    }
}
