//! A piece of saved memory and its location.

use super::Framework;
use crate::plan::RecordedPiece;
use storm_device::foreign::{Coming, Leaving, Slot};

pub(super) struct Piece<W: Framework> {
    pub(super) bytes: usize,
    /// Offset in the memory that it was saved from.
    pub(super) offset: usize,
    pub(super) origin: W::Origin,
    pub(super) place: Place<W>,
    /// Its slot in host memory, once offloaded.
    pub(super) slot: Option<Slot>,
    /// Whether it was ever offloaded.
    pub(super) moved: bool,
    /// Number of saves. Its bytes are at least as new as the last save.
    pub(super) saves: u32,
    /// Number of saves after which it may be offloaded.
    pub(super) saves_expected: u32,
    /// Number of its names that are held.
    pub(super) holders: u32,
    /// Number of its names that were issued, not counting those released unused.
    pub(super) names: u32,
    /// Number of these that were used.
    pub(super) used: u32,
    /// Number of uses after which it is no longer needed, if known.
    pub(super) uses_expected: Option<u32>,
    pub(super) given_up: Option<usize>,
    pub(super) needed: Option<(usize, usize)>,
    /// Something else also holds it, or it could not be offloaded. It counts as memory that cannot
    /// be moved.
    pub(super) fixed: bool,
}

/// The expected number of saves and uses of a piece, as far as known.
#[derive(Clone, Copy)]
pub(super) struct Expected {
    pub(super) saves: u32,
    pub(super) uses: Option<u32>,
}

impl Expected {
    /// Offload immediately, and keep in host memory until the last name is used.
    pub(super) const NOTHING: Expected = Expected { saves: 1, uses: None };
}

/// Where a piece is.
pub(super) enum Place<W: Framework> {
    /// In device memory that begins at this offset of the original.
    Here(W::Memory, usize),
    /// In its original memory, while it is copied to the host.
    Leaving(Leaving<W::Memory>),
    /// In host memory only.
    Away,
    /// In new device memory, while it is copied back.
    Coming(Coming<W::Memory>),
}

impl<W: Framework> Piece<W> {
    pub(super) fn new(
        bytes: usize,
        offset: usize,
        origin: W::Origin,
        memory: W::Memory,
        expected: Expected,
    ) -> Piece<W> {
        Piece {
            bytes,
            offset,
            origin,
            place: Place::Here(memory, 0),
            slot: None,
            moved: false,
            saves: 1,
            saves_expected: expected.saves,
            holders: 1,
            names: 1,
            used: 0,
            uses_expected: expected.uses,
            given_up: None,
            needed: None,
            fixed: false,
        }
    }

    /// Bytes of the framework's memory that it occupies and that moving it would free.
    pub(super) fn held_bytes(&self) -> u64 {
        match self.place {
            Place::Away => 0,
            _ if self.fixed => 0,
            _ => self.bytes as u64,
        }
    }

    pub(super) fn is_finished(&self) -> bool {
        self.used >= self.uses_expected.unwrap_or(self.names).min(self.names)
    }

    /// The record of this piece, for a plan.
    pub(super) fn recorded(&self, end: usize) -> RecordedPiece {
        let given_up = self.given_up.or(self.needed.map(|(first, _)| first)).unwrap_or(end);
        RecordedPiece {
            bytes: self.bytes,
            given_up: given_up.min(end),
            needed: self.needed,
            saves: self.saves,
            uses: self.used,
            fixed: self.fixed,
        }
    }
}
