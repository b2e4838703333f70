use std::sync::atomic::{AtomicU64, Ordering};

/// A failure on purpose: every so many accesses, one goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScratchFault {
    /// Which accesses count.
    pub access: ScratchAccess,
    /// One of this many fails; at least 1.
    pub every: u64,
    /// How.
    pub kind: ScratchFaultKind,
}

/// Reading or writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScratchAccess {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

/// How an access goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScratchFaultKind {
    /// The system reports an error.
    Error,
    /// The system reports that the disk is full, as file systems that copy on write may.
    Full,
    /// Only some of the bytes are transferred, which the system may do at any time.
    Short,
    /// Other bytes arrive.
    Damage,
    /// The system refuses io_uring from then on.
    NoRing,
}

/// Counts accesses.
#[derive(Debug)]
pub(super) struct Faults {
    fault: Option<ScratchFault>,
    count: AtomicU64,
}

impl Faults {
    pub(super) fn new(fault: Option<ScratchFault>) -> Faults {
        Faults { fault, count: AtomicU64::new(0) }
    }

    /// How the next access goes wrong, if it does.
    pub(super) fn next(&self, access: ScratchAccess) -> Option<ScratchFaultKind> {
        let fault = self.fault.filter(|fault| fault.access == access)?;
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        count.is_multiple_of(fault.every.max(1)).then_some(fault.kind)
    }
}
