//! Attacks on the `storm` binary: kills, failing system calls, damaged files, random command lines,
//! and two processes on one run.
//!
//! By default, the campaigns are short. `STORM_LONG_TESTS=1` runs them in full. docs/reliability.md
//! says what must hold, and has the command.

mod campaign;
mod commands;
mod disk_full;
mod inject;
mod kills;
mod made;
mod mutate;
mod mutation;
mod outcome;
mod random;
mod shim;
mod stock;
#[path = "../train/support.rs"]
#[allow(dead_code, reason = "shared with the tests of `storm train`, which use all of it")]
mod support;
mod two_processes;
