//! One step: the pieces saved in it, in order, and those in flight.

use super::Framework;
use super::Source;
use super::piece::{Piece, Place};
use super::recorder::{Peak, Recorder};
use crate::plan::{Fate, Recording, SavedPlan};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// How a step is run.
pub(super) enum Mode {
    /// Everything is offloaded, one piece at a time. The memory use then shows what the rest of the
    /// step needs.
    Recorded(Recorder),
    /// Follows a recording and its plan.
    Planned { recording: u64, plan: Arc<SavedPlan>, next_fetch: usize, surprises: u32 },
    /// Everything is offloaded, with a limited number of bytes in flight, and fetched in reverse
    /// order.
    Unplanned,
}

/// Memory and its version.
type MemoryVersion = (usize, u64);

/// A range of memory and the index of its piece.
type HeldRange = (Range<usize>, usize);

pub(super) struct Step<W: Framework> {
    pub(super) mode: Mode,
    pub(super) pieces: Vec<Piece<W>>,
    /// The pieces of each memory and version, with their ranges.
    index: HashMap<MemoryVersion, Vec<HeldRange>>,
    /// Pieces being offloaded, oldest first.
    pub(super) leaving: VecDeque<usize>,
    /// Pieces that something else still held at the last check.
    watched: Vec<usize>,
    /// Number of pieces needed so far.
    pub(super) needs: usize,
    /// Number of names held.
    pub(super) holders: u64,
}

impl<W: Framework> Step<W> {
    pub(super) fn new(mode: Mode) -> Step<W> {
        Step {
            mode,
            pieces: Vec::new(),
            index: HashMap::new(),
            leaving: VecDeque::new(),
            watched: Vec::new(),
            needs: 0,
            holders: 0,
        }
    }

    /// The current position, from the number of saves and needs so far.
    pub(super) fn position(&self) -> usize {
        (self.pieces.len() + self.needs).saturating_sub(1)
    }

    pub(super) fn is_backward(&self) -> bool {
        self.needs > 0
    }

    /// Finds a piece that contains the bytes of `source`, in memory of this size. Its copy may be
    /// older than the memory's current contents.
    pub(super) fn find(&self, source: &Source, memory_bytes: usize) -> Option<usize> {
        let found = self.index.get(&(source.memory, source.version))?;
        let range = &source.range;
        let holds = |held: &Range<usize>| {
            held.start <= range.start && range.end <= held.end && held.end <= memory_bytes
        };
        let found = found.iter().filter(|(held, _)| holds(held)).map(|(_, piece)| *piece);
        found.into_iter().find(|&piece| self.pieces[piece].holders > 0)
    }

    pub(super) fn add(
        &mut self,
        memory: usize,
        version: u64,
        range: Range<usize>,
        piece: Piece<W>,
    ) {
        let index = self.pieces.len();
        self.index.entry((memory, version)).or_default().push((range, index));
        self.pieces.push(piece);
        if matches!(self.mode, Mode::Recorded(_)) {
            self.watched.push(index);
        }
    }

    /// Where the plan sends a piece that is still on the device because it was saved less often
    /// than recorded.
    pub(super) fn unsent(&self, index: usize) -> Option<usize> {
        let Mode::Planned { plan, .. } = &self.mode else { return None };
        let piece = &self.pieces[index];
        let is_here = matches!(piece.place, Place::Here(..));
        match plan.fates.get(index) {
            Some(&Fate::Move { host_offset }) if is_here && !piece.moved && !piece.fixed => {
                Some(host_offset)
            }
            _ => None,
        }
    }

    /// Whether all pieces that the plan moves are offloaded.
    pub(super) fn all_sent(&self) -> bool {
        let mut held = (0..self.pieces.len()).filter(|&index| self.pieces[index].holders > 0);
        held.all(|index| self.unsent(index).is_none())
    }

    /// Begins a position. In a recorded step, also records the memory use during the previous one.
    pub(super) fn record_position(&mut self, framework: &W, position: usize) {
        if !matches!(self.mode, Mode::Recorded(_)) {
            return;
        }
        let given_up_bytes = self.watch(framework, position);
        let held_bytes = self.pieces.iter().map(Piece::held_bytes).sum();
        if let Mode::Recorded(recorder) = &mut self.mode {
            recorder.begin(framework.memory_use(Peak::Forget), held_bytes, given_up_bytes);
        }
    }

    /// Records which pieces were released before `position`. Returns how many of their bytes were
    /// freed only by offloading.
    fn watch(&mut self, framework: &W, position: usize) -> u64 {
        let pieces = &mut self.pieces;
        let mut given_up_bytes = 0;
        self.watched.retain(|&index| {
            let piece = &mut pieces[index];
            let alive = framework.is_alive(&piece.origin);
            if !alive {
                piece.given_up = Some(position);
                // A piece that stayed on the device was freed because it is no longer needed. The
                // same will happen in later steps.
                if !piece.fixed {
                    given_up_bytes += piece.bytes as u64;
                }
            }
            alive
        });
        given_up_bytes
    }

    /// Bytes being offloaded, without those that the forward pass still holds.
    pub(super) fn leaving_bytes(&self, given_up: impl Fn(usize) -> bool) -> u64 {
        let counted = self.leaving.iter().filter(|&&index| given_up(index));
        counted.map(|&index| self.pieces[index].bytes as u64).sum()
    }

    /// The recording, if this step was recorded and had a backward pass.
    pub(super) fn recording(&self) -> Option<Recording> {
        let Mode::Recorded(recorder) = &self.mode else { return None };
        if !self.is_backward() {
            return None;
        }
        let other_bytes = recorder.other_bytes();
        let end = other_bytes.len() - 1;
        Some(Recording {
            pieces: self.pieces.iter().map(|piece| piece.recorded(end)).collect(),
            other_bytes,
            baseline_bytes: recorder.baseline_bytes(),
        })
    }

    /// Pieces and bytes that stayed, and those that were moved.
    pub(super) fn sums(&self) -> ((u64, u64), (u64, u64)) {
        let mut sums = ((0, 0), (0, 0));
        for piece in &self.pieces {
            let sum = if piece.moved { &mut sums.1 } else { &mut sums.0 };
            sum.0 += 1;
            sum.1 += piece.bytes as u64;
        }
        sums
    }

    /// Whether none of its pieces can be needed again.
    pub(super) fn is_over(&self) -> bool {
        self.holders == 0
    }

    /// Whether the next save belongs to this step: its backward pass has not begun, and part of its
    /// graph is alive.
    pub(super) fn goes_on(&self) -> bool {
        !self.is_backward() && (self.holders > 0 || self.pieces.is_empty())
    }
}
