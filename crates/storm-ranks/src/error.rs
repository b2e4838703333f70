//! Errors of collectives.

use std::fmt;
use std::ops::Range;
use thiserror::Error;

/// A kind of collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Every rank sends a different part to every other rank.
    Exchange,
    /// Every rank sends its part to all others.
    Gather,
    /// One rank sends to all.
    Broadcast,
    /// Elementwise maximum of numbers over all ranks.
    Agree,
    /// All ranks wait for each other.
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
    /// A list does not have one range per rank.
    #[error("{given} ranges for {ranks} ranks")]
    Ranges {
        /// Number of ranges.
        given: usize,
        /// Number of ranks.
        ranks: u32,
    },
    /// A range is not inside its buffer.
    #[error("bytes {}..{} of rank {rank} are outside a buffer of {length} bytes", .range.start, .range.end)]
    Outside {
        /// The rank of the range.
        rank: u32,
        /// The range.
        range: Range<usize>,
        /// Buffer size in bytes.
        length: usize,
    },
    /// Two receive ranges overlap.
    #[error("the bytes received from ranks {first} and {second} overlap")]
    Overlap {
        /// The first rank.
        first: u32,
        /// The second rank.
        second: u32,
    },
    /// There is no such rank.
    #[error("there is no rank {rank}, only {ranks} ranks")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// Number of ranks.
        ranks: u32,
    },
    /// A rank sent an unexpected number of bytes.
    #[error("{collective}: rank {from} sent {sent} bytes where {expected} were expected")]
    Length {
        /// The collective.
        collective: Collective,
        /// The sender.
        from: u32,
        /// Bytes received.
        sent: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// Ranks do not call the same collectives in the same order.
    #[error(
        "rank {other} is at another collective than this rank's {collective}: the ranks do not run the same plan"
    )]
    OutOfStep {
        /// The collective of this rank.
        collective: Collective,
        /// The rank that is at a different collective.
        other: u32,
    },
    /// A rank ended the run.
    #[error("rank {rank} ended the run: {reason}")]
    Aborted {
        /// The rank.
        rank: u32,
        /// The reason.
        reason: String,
    },
    /// A rank is gone.
    #[error("rank {rank} is gone")]
    Gone {
        /// The rank.
        rank: u32,
    },
}
