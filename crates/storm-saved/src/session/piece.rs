//! One piece of saved memory, and where it is.

use super::Framework;
use crate::plan::RecordedPiece;
use storm_device::foreign::{Coming, Leaving, Slot};

pub(super) struct Piece<W: Framework> {
    pub(super) bytes: usize,
    /// Its first byte in the memory that it was saved from.
    pub(super) offset: usize,
    pub(super) origin: W::Origin,
    pub(super) place: Place<W>,
    /// Where it is in host memory, once offloaded.
    pub(super) slot: Option<Slot>,
    /// Whether it was ever offloaded.
    pub(super) moved: bool,
    /// How often it was saved. Its bytes are at least as new as the last save.
    pub(super) saves: u32,
    /// After how many saves it may be offloaded.
    pub(super) saves_expected: u32,
    /// How many names of it are held.
    pub(super) holders: u32,
    /// How many names of it were issued, not counting those released unused.
    pub(super) names: u32,
    /// How many of these were used.
    pub(super) used: u32,
    /// After how many uses it is no longer needed, as far as is known.
    pub(super) uses_expected: Option<u32>,
    pub(super) given_up: Option<usize>,
    pub(super) needed: Option<(usize, usize)>,
    /// Something else also holds it, or it could not be offloaded: it counts as memory that cannot be
    /// moved.
    pub(super) fixed: bool,
}

/// How often a piece will be saved and used, as far as is known.
#[derive(Clone, Copy)]
pub(super) struct Expected {
    pub(super) saves: u32,
    pub(super) uses: Option<u32>,
}

impl Expected {
    /// It is offloaded immediately, and stays in host memory until its last name is used.
    pub(super) const NOTHING: Expected = Expected { saves: 1, uses: None };
}

/// Where the framework can find it.
pub(super) enum Place<W: Framework> {
    /// In memory that begins at this byte of the original.
    Here(W::Memory, usize),
    /// In its original memory, which a copy reads.
    Leaving(Leaving<W::Memory>),
    /// In host memory only.
    Away,
    /// In memory that a copy fills.
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

    /// Bytes of the framework's memory that it takes, and that moving it would free.
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

    /// As it was seen, for a plan.
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
