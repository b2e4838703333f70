//! Makes one system call of a command fail, by loading `shim.c` into it.

use crate::outcome::Call;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Kinds of calls, in the order of `shim.c`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Open,
    Read,
    Write,
    Sync,
    Rename,
    Mkdir,
    Unlink,
    Map,
    Thread,
    Stat,
    Truncate,
    Lock,
    Spawn,
    /// A write at a given offset of a file.
    Positioned,
    /// Allocation of space for a file.
    Allocate,
}

impl Kind {
    pub(crate) const ALL: [Kind; 15] = [
        Kind::Open,
        Kind::Read,
        Kind::Write,
        Kind::Sync,
        Kind::Rename,
        Kind::Mkdir,
        Kind::Unlink,
        Kind::Map,
        Kind::Thread,
        Kind::Stat,
        Kind::Truncate,
        Kind::Lock,
        Kind::Spawn,
        Kind::Positioned,
        Kind::Allocate,
    ];
}

/// How a call fails. `Errno` has the number on Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Errno(&'static str, i32),
    /// Only half of the bytes.
    Short,
    /// The process is killed instead.
    Kill,
}

pub(crate) const EINTR: Fault = Fault::Errno("EINTR", 4);
pub(crate) const EIO: Fault = Fault::Errno("EIO", 5);
pub(crate) const EAGAIN: Fault = Fault::Errno("EAGAIN", 11);
pub(crate) const ENOMEM: Fault = Fault::Errno("ENOMEM", 12);
pub(crate) const EACCES: Fault = Fault::Errno("EACCES", 13);
pub(crate) const EMFILE: Fault = Fault::Errno("EMFILE", 24);
pub(crate) const ENOSPC: Fault = Fault::Errno("ENOSPC", 28);
pub(crate) const ENOLCK: Fault = Fault::Errno("ENOLCK", 37);
pub(crate) const EOPNOTSUPP: Fault = Fault::Errno("EOPNOTSUPP", 95);

impl Fault {
    fn value(self) -> String {
        match self {
            Fault::Errno(_, number) => number.to_string(),
            Fault::Short => "SHORT".to_owned(),
            Fault::Kill => "KILL".to_owned(),
        }
    }

    pub(crate) fn name(self) -> String {
        match self {
            Fault::Errno(name, _) => name.to_owned(),
            other => other.value(),
        }
    }
}

/// The call that fails: number `at` of its kind, from 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Injection {
    pub(crate) kind: Kind,
    pub(crate) at: u64,
    pub(crate) fault: Fault,
}

/// What the shim counted in a command and everything that it started.
pub(crate) struct Counts(Vec<u64>);

impl Counts {
    /// Whether the call that was to fail occurred.
    pub(crate) fn was_injected(&self) -> bool {
        self.0[0] > 0
    }

    pub(crate) fn of(&self, kind: Kind) -> u64 {
        self.0[1 + kind as usize]
    }
}

/// The compiled shim.
pub(crate) struct Shim {
    folder: TempDir,
}

impl Shim {
    pub(crate) fn new() -> Shim {
        let folder = TempDir::new().expect("a folder");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/faults/shim.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-shared", "-fPIC", "-o"]).arg(folder.path().join("shim.so"));
        let status = compiler.args([source, "-ldl"]).status();
        let status = status.expect("the C compiler `cc` starts: this test needs one");
        assert!(status.success(), "{source} does not compile");
        Shim { folder }
    }

    fn library(&self) -> PathBuf {
        self.folder.path().join("shim.so")
    }

    /// Prepares a call whose system calls are counted in a file, and of which one fails.
    pub(crate) fn load(&self, call: Call, counts: &Path, injection: Option<Injection>) -> Call {
        fs::write(counts, [0; 8 * (1 + Kind::ALL.len())]).expect("a file of counts");
        let call = call.env("LD_PRELOAD", self.library()).env("STORM_SHIM_COUNTS", counts);
        let Some(Injection { kind, at, fault }) = injection else { return call };
        call.env("STORM_SHIM_KIND", (kind as usize).to_string())
            .env("STORM_SHIM_AT", at.to_string())
            .env("STORM_SHIM_FAULT", fault.value())
    }

    /// Reads the counts.
    pub(crate) fn counts(file: &Path) -> Counts {
        let bytes = fs::read(file).expect("counts");
        let (counts, _) = bytes.as_chunks::<8>();
        Counts(counts.iter().map(|count| u64::from_ne_bytes(*count)).collect())
    }
}
