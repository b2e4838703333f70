use super::ScratchFault;
use std::fmt;

/// The fastest I/O method that may be used. If the system refuses it, the next one is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScratchWay {
    /// O_DIRECT with io_uring.
    #[default]
    Ring,
    /// O_DIRECT with `pread` and `pwrite`.
    Direct,
    /// The page cache, with `pread` and `pwrite`.
    PageCache,
}

impl ScratchWay {
    /// All methods, fastest first.
    pub const ALL: [ScratchWay; 3] = [ScratchWay::Ring, ScratchWay::Direct, ScratchWay::PageCache];

    /// Its name in the user interface.
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
    /// The fastest method that may be used.
    pub way: ScratchWay,
    /// Injected fault.
    pub fault: Option<ScratchFault>,
}

/// The I/O method in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScratchPath {
    /// O_DIRECT with io_uring.
    Ring {
        /// Whether the memory is registered with the kernel.
        is_registered: bool,
    },
    /// O_DIRECT with `pread` and `pwrite`.
    Direct,
    /// The page cache. Written data stays there until the system flushes it.
    PageCache,
}

/// For display, such as `io_uring and O_DIRECT`.
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
