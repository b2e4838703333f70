//! A quick, block-level estimate of how long decisions take.
//!
//! The order of kernels and copies is that of a plan (see [`super::flow`]), with the same rings. But consecutive
//! kernels of a block are one item, memory is slots and pieces instead of bytes, and nothing has a name or an
//! address. A test compares sketches of random decisions with the simulation of their plans.

mod parts;
mod queues;
mod tables;
mod walk;

use super::Lowering;
use super::layout::Layout;
use crate::Decisions;
use foldhash::HashMap;
use parts::{BlockParts, Part, Streams, forward_parts};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use tables::Tables;
use walk::Buffers;

/// What all sketches of a task share, for one piece size.
pub(crate) struct Sketch<'a> {
    lowering: &'a Lowering<'a>,
    tables: Tables,
    training: RwLock<HashMap<Streams, Arc<BlockParts>>>,
    /// By stage: forward passes that save nothing.
    forward: Vec<OnceLock<Vec<Part>>>,
    /// As many as sketches ran at once.
    buffers: Mutex<Vec<Buffers>>,
}

/// A sketch's estimate for decisions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Estimate {
    /// Of a step.
    pub(crate) seconds: f64,
    /// The work it took: items that were made, and items that were followed.
    pub(crate) items: usize,
}

impl<'a> Sketch<'a> {
    pub(crate) fn new(lowering: &'a Lowering<'a>, piece_elements: usize) -> Sketch<'a> {
        let tables = Tables::new(lowering, piece_elements);
        let forward = vec![const { OnceLock::new() }; tables.stages.len()];
        let training = RwLock::default();
        Sketch { lowering, tables, training, forward, buffers: Mutex::default() }
    }

    /// About how long a step takes.
    pub(crate) fn step_seconds(&self, decisions: &Decisions, layout: &Layout) -> Estimate {
        walk::step_seconds(self, decisions, layout)
    }

    /// Buffers that no other sketch is using.
    fn buffers(&self) -> Buffers {
        // The list is consistent even if a thread panicked while holding the lock.
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    fn give_back(&self, buffers: Buffers) {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).push(buffers);
    }

    fn block_parts(&self, streams: Streams) -> Arc<BlockParts> {
        // The map is consistent even if a thread panicked while holding the lock.
        let known = self.training.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(parts) = known.get(&streams) {
            return Arc::clone(parts);
        }
        drop(known);
        let parts = Arc::new(BlockParts::new(self.lowering, &self.tables, &streams));
        let mut known = self.training.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry(streams).or_insert(parts))
    }

    fn forward_parts(&self, stage: usize) -> &[Part] {
        self.forward[stage].get_or_init(|| {
            let variant = self.lowering.forward_variant(stage);
            forward_parts(self.lowering, &self.tables, stage, &variant)
        })
    }
}
