//! What goes wrong in a collective.

use std::fmt;
use std::ops::Range;
use thiserror::Error;

/// A kind of collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Every rank sends a part to every other.
    Exchange,
    /// Every rank sends its part to all.
    Gather,
    /// One rank sends to all.
    Broadcast,
    /// All take the largest of numbers.
    Agree,
    /// All wait for all.
    Barrier,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Collective::Exchange => "exchange",
            Collective::Gather => "gather",
            Collective::Broadcast => "broadcast",
            Collective::Agree => "agree",
            Collective::Barrier => "barrier",
        })
    }
}

/// Why a collective failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RankError {
    /// A list has not one entry per rank.
    #[error("{given} ranges for {ranks} ranks")]
    Ranges {
        /// Entries.
        given: usize,
        /// Ranks.
        ranks: u32,
    },
    /// A range is not inside its buffer.
    #[error("bytes {}..{} of rank {rank} are outside a buffer of {length} bytes", .range.start, .range.end)]
    Outside {
        /// Whose range.
        rank: u32,
        /// The range.
        range: Range<usize>,
        /// Bytes of the buffer.
        length: usize,
    },
    /// Two ranges of a buffer that is written overlap.
    #[error("the bytes received from ranks {first} and {second} overlap")]
    Overlap {
        /// A rank.
        first: u32,
        /// The other one.
        second: u32,
    },
    /// There is no such rank.
    #[error("there is no rank {rank}, only {ranks} ranks")]
    NoSuchRank {
        /// The number.
        rank: u32,
        /// Ranks.
        ranks: u32,
    },
    /// A rank sent another number of bytes than was expected.
    #[error("{collective}: rank {from} sent {sent} bytes where {expected} were expected")]
    Length {
        /// What was under way.
        collective: Collective,
        /// Who sent.
        from: u32,
        /// Bytes that came.
        sent: usize,
        /// Bytes that were expected.
        expected: usize,
    },
    /// Ranks do not call the same collectives in the same order.
    #[error(
        "rank {other} is at another collective than this rank's {collective}: the ranks do not run the same plan"
    )]
    OutOfStep {
        /// What this rank is at.
        collective: Collective,
        /// The rank that is elsewhere.
        other: u32,
    },
    /// A rank ended the run.
    #[error("rank {rank} ended the run: {reason}")]
    Aborted {
        /// Which.
        rank: u32,
        /// Why.
        reason: String,
    },
    /// A rank is gone.
    #[error("rank {rank} is gone")]
    Gone {
        /// Which.
        rank: u32,
    },
}
