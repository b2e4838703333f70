use super::ScratchFault;
use std::fmt;

/// The fastest way to the disk that may be used. Where the system refuses it, the next one is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScratchWay {
    /// Past the page cache, by io_uring.
    #[default]
    Ring,
    /// Past the page cache, by positioned reads and writes.
    Direct,
    /// Through the page cache, by positioned reads and writes.
    PageCache,
}

impl ScratchWay {
    /// All of them, the fastest first.
    pub const ALL: [ScratchWay; 3] = [ScratchWay::Ring, ScratchWay::Direct, ScratchWay::PageCache];

    /// As users name it.
    pub fn name(self) -> &'static str {
        match self {
            ScratchWay::Ring => "io_uring",
            ScratchWay::Direct => "direct",
            ScratchWay::PageCache => "cached",
        }
    }
}

/// How a scratch file is accessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScratchOptions {
    /// The fastest way that may be used.
    pub way: ScratchWay,
    /// Make reads or writes go wrong.
    pub fault: Option<ScratchFault>,
}

/// How bytes get to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScratchPath {
    /// Past the page cache, by io_uring.
    Ring {
        /// Whether the kernel keeps the memory at hand that they go from and to.
        is_registered: bool,
    },
    /// Past the page cache, by positioned reads and writes.
    Direct,
    /// Through the page cache. What is written stays there until the system writes it.
    PageCache,
}

/// For people: `io_uring and O_DIRECT`.
impl fmt::Display for ScratchPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ScratchPath::Ring { is_registered: true } => {
                "io_uring and O_DIRECT with registered memory"
            }
            ScratchPath::Ring { is_registered: false } => "io_uring and O_DIRECT",
            ScratchPath::Direct => "O_DIRECT without io_uring",
            ScratchPath::PageCache => "the page cache, without O_DIRECT",
        })
    }
}
