use std::sync::atomic::{AtomicU64, Ordering};

/// Fault injection: makes every n-th access fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScratchFault {
    /// Which accesses are counted.
    pub access: ScratchAccess,
    /// One access in this many fails, at least 1.
    pub every: u64,
    /// How it fails.
    pub kind: ScratchFaultKind,
}

/// Reading or writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScratchAccess {
    /// From disk.
    Read,
    /// To disk.
    Write,
}

/// How an access fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScratchFaultKind {
    /// The system reports an error.
    Error,
    /// The system reports a full disk, as copy-on-write file systems may.
    Full,
    /// A short transfer, which the system may return at any time.
    Short,
    /// The data is corrupted.
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

    /// The fault of the next access, if it has one.
    pub(super) fn next(&self, access: ScratchAccess) -> Option<ScratchFaultKind> {
        let fault = self.fault.filter(|fault| fault.access == access)?;
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        count.is_multiple_of(fault.every.max(1)).then_some(fault.kind)
    }
}
