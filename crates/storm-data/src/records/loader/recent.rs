//! A cache of recently read blocks, for records in random order.

use crate::DataError;
use crate::records::block::Block;
use crate::records::counters::Count;
use crate::records::set::{Reader, RecordSet};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Blocks that a worker may hold per read in flight: those being read, and those already in memory
/// that wait behind a read. [`super::memory::Memory`] accounts for them.
pub(super) const AT_HAND: usize = 2;

/// The blocks read last. Reuse is random, so the oldest is evicted.
#[derive(Debug)]
pub(super) struct Recent {
    blocks_max: usize,
    search: Search,
    held: Mutex<Held>,
}

/// Whether cached blocks are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Search {
    Usual,
    /// For measuring reads: every wanted block is read, unless the same thread is reading it or
    /// just used it.
    NeverFound,
}

#[derive(Debug, Default)]
struct Held {
    blocks: HashMap<u32, Arc<Block>>,
    /// The numbers of all cached blocks, oldest first.
    order: VecDeque<u32>,
}

/// A wanted block.
enum Begun {
    Here(Arc<Block>),
    /// Its read was started.
    Reading,
    /// Its read was already started for an earlier record.
    Again,
}

impl Recent {
    pub(super) fn new(blocks_max: usize, search: Search) -> Recent {
        Recent { blocks_max, search, held: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, number: u32) -> Option<Arc<Block>> {
        match self.search {
            Search::Usual => self.lock().blocks.get(&number).cloned(),
            Search::NeverFound => None,
        }
    }

    /// Caches a block, and evicts the oldest if the cache is full.
    fn keep(&self, number: u32, block: &Arc<Block>) {
        let mut held = self.lock();
        // Evicted blocks are freed after the lock is released.
        let before = held.blocks.insert(number, Arc::clone(block));
        if before.is_none() {
            held.order.push_back(number);
        }
        let oldest = match held.order.len() > self.blocks_max {
            true => held.order.pop_front().and_then(|oldest| held.blocks.remove(&oldest)),
            false => None,
        };
        drop(held);
        drop((before, oldest));
    }

    /// Calls `with` with the block of each wanted record and its paired value, in order. Keeps as
    /// many reads in flight as the reader allows. Other threads are not blocked, so two may read
    /// the same block.
    pub(super) fn each<T>(
        &self,
        wanted: impl Iterator<Item = (u32, T)>,
        set: &RecordSet,
        reader: &mut Reader,
        mut with: impl FnMut(T, &Block) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut wanted = wanted.fuse();
        let mut begun: VecDeque<(u32, T, Begun)> = VecDeque::new();
        // Consecutive rows of tokens often share a block, so the last one is reused even with
        // [`Search::NeverFound`].
        let mut last: Option<(u32, Arc<Block>)> = None;
        loop {
            while reader.has_room()
                && begun.len() < AT_HAND * reader.depth()
                && let Some((number, extra)) = wanted.next()
            {
                let is_begun = begun
                    .iter()
                    .any(|(other, _, state)| *other == number && matches!(state, Begun::Reading));
                let here = last.as_ref().filter(|(last, _)| *last == number);
                let here = here.map(|(_, block)| Arc::clone(block));
                let state = match here.or_else(|| self.find(number)) {
                    Some(block) => Begun::Here(block),
                    None if is_begun => Begun::Again,
                    None => {
                        set.begin(number, reader);
                        Begun::Reading
                    }
                };
                if !matches!(state, Begun::Reading) {
                    reader.counters.add(Count::Found, 1);
                }
                begun.push_back((number, extra, state));
            }
            let Some((number, extra, state)) = begun.pop_front() else { return Ok(()) };
            let block = match state {
                Begun::Here(block) => block,
                Begun::Again => unreachable!("it came with the read before"),
                Begun::Reading => {
                    let block = set.finish(number, reader).inspect_err(|_| reader.clear())?;
                    let block = Arc::new(block);
                    self.keep(number, &block);
                    for (other, _, state) in &mut begun {
                        if *other == number && matches!(state, Begun::Again) {
                            *state = Begun::Here(Arc::clone(&block));
                        }
                    }
                    block
                }
            };
            with(extra, &block).inspect_err(|_| reader.clear())?;
            last = Some((number, block));
        }
    }
}
