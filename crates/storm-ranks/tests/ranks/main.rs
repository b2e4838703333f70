//! Ranks that real launchers start: `mpirun` of MPICH and of Open MPI, and `torchrun`; and processes with Slurm's
//! variables.
//!
//! `cargo xtask test` installs them in its Python environment and sets STORM_REQUIRE_LAUNCHERS. Without that, a test
//! whose launcher is missing says so.

mod launchers;
mod mpirun;
mod nccl;
mod reference;
mod slurm;
mod sockets;
mod torchrun;
mod worker;
