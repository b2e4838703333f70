//! Which blocks stay in memory, and for how long.

use super::recent::{Recent, Search};
use crate::DataError;
use crate::records::block::Block;
use crate::records::order::{Part, WindowOrder};
use crate::records::set::{Reader, RecordSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// How blocks are kept in memory.
#[derive(Clone, Debug)]
pub(super) enum Residence {
    /// All blocks of the part stay in memory once read.
    Whole(Arc<[Slot]>),
    /// The blocks of a window stay as long as the window is in use.
    Windows,
    /// Each record is read separately.
    SingleRecords,
    /// The block of each record is read, unless it is in the cache.
    Recent(Arc<Recent>),
}

impl Residence {
    pub(super) fn whole(part: &Part) -> Residence {
        Residence::Whole(slots(part.blocks.len()))
    }

    pub(super) fn recent(blocks: usize, search: Search) -> Residence {
        Residence::Recent(Arc::new(Recent::new(blocks, search)))
    }
}

/// A slot for a block. The lock is held while the block is read, so that other threads wait for it
/// instead of reading it too.
#[derive(Debug, Default)]
pub(super) struct Slot(Mutex<Option<Arc<Block>>>);

impl Slot {
    /// Locks the slot if it is empty and no other thread is filling it. Never waits, because a
    /// thread may hold several slots, and two threads could deadlock.
    pub(super) fn claim(&self) -> Option<MutexGuard<'_, Option<Arc<Block>>>> {
        let held = match self.0.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(held)) => held.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        held.is_none().then_some(held)
    }

    /// The block, read if missing.
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

/// A window in use: its order, and the blocks read so far.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) order: WindowOrder,
    part: Arc<Part>,
    residence: Residence,
    /// Slots of this window. Empty unless blocks are kept per window.
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

    /// Number of blocks worth prefetching.
    pub(super) fn prefetchable(&self) -> usize {
        match self.residence {
            Residence::Whole(_) | Residence::Windows => self.order.blocks.len(),
            Residence::SingleRecords | Residence::Recent(_) => 0,
        }
    }

    fn slot(&self, at: usize) -> Option<&Slot> {
        match &self.residence {
            Residence::Whole(slots) => Some(&slots[self.order.blocks[at]]),
            Residence::Windows => Some(&self.slots[at]),
            Residence::SingleRecords | Residence::Recent(_) => None,
        }
    }

    /// The number of a block in the dataset.
    fn number(&self, at: usize) -> u32 {
        self.part.blocks[self.order.blocks[at]]
    }

    /// Reads missing blocks of the window while `is_wanted`, with as many reads in flight as the
    /// reader allows. Errors are ignored here: the read is repeated when a record of the block is
    /// copied.
    pub(super) fn fetch(
        &self,
        blocks: impl IntoIterator<Item = usize>,
        set: &RecordSet,
        reader: &mut Reader,
        is_wanted: impl Fn() -> bool,
    ) {
        let empty = blocks
            .into_iter()
            .take_while(|_| is_wanted())
            .filter_map(|at| Some((self.number(at), self.slot(at)?.claim()?)));
        let fill = |mut place: MutexGuard<'_, Option<Arc<Block>>>, loaded| {
            *place = Result::ok(loaded).map(Arc::new);
            Ok(())
        };
        set.load_each(empty, reader, fill).ok();
    }

    /// The record at a position, where rows are records.
    pub(super) fn record_at(&self, place: u64) -> Wanted {
        let (at, record) = self.order.at(place);
        Wanted { at, number: self.number(at), record }
    }

    /// A record of the window's blocks, by its number in the dataset.
    pub(super) fn record(&self, set: &RecordSet, record: u64) -> Wanted {
        let (number, record) = set.place_of(record);
        let block = self.part.blocks.partition_point(|&block| block < number);
        Wanted { at: self.order.find(block), number, record }
    }

    /// Calls `with` with each wanted record and its paired value.
    pub(super) fn read<T>(
        &self,
        wanted: impl Iterator<Item = (Wanted, T)> + Clone,
        set: &RecordSet,
        reader: &mut Reader,
        mut with: impl FnMut(Wanted, T, &[u8]) -> Result<(), String>,
    ) -> Result<(), DataError> {
        let mut with = |(wanted, extra): (Wanted, T), bytes: &[u8]| {
            with(wanted, extra, bytes).map_err(|problem| {
                let Wanted { number, record, .. } = wanted;
                set.damaged_block(number, format!("its record {record}: {problem}"))
            })
        };
        match &self.residence {
            Residence::Whole(_) | Residence::Windows => {
                self.fetch(wanted.clone().map(|(wanted, _)| wanted.at), set, reader, || true);
                for (wanted, extra) in wanted {
                    let Some(slot) = self.slot(wanted.at) else { continue };
                    let block = slot.get(|| set.load(wanted.number, reader))?;
                    let bytes = block.record(wanted.record as usize, set.layout());
                    with((wanted, extra), bytes)?;
                }
                Ok(())
            }
            Residence::SingleRecords => {
                let wanted = wanted.map(|(one, extra)| (one.number, one.record, (one, extra)));
                set.load_each_record(wanted, reader, with)
            }
            Residence::Recent(recent) => {
                let wanted = wanted.map(|(one, extra)| (one.number, (one, extra)));
                recent.each(wanted, set, reader, |(one, extra), block| {
                    let bytes = block.record(one.record as usize, set.layout());
                    with((one, extra), bytes)
                })
            }
        }
    }
}

/// A record to copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// Position of its block in the window.
    at: usize,
    /// Number of its block in the dataset.
    pub(super) number: u32,
    pub(super) record: u32,
}
