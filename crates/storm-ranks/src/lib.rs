//! Processes that train together.
//!
//! [`Launch`] detects the launcher, this process's rank and the number of ranks. An [`Engine`]
//! moves bytes between ranks: [`Mpi`] between processes started by `mpirun`, [`Sockets`] between
//! other processes, and [`in_process`] between threads, as the reference for tests. [`nccl`] moves
//! bytes between GPUs in stream order. [`rendezvous`] sends a small message from rank 0 to all
//! other ranks before any engine runs, and [`Watch`] detects lost ranks.
//!
//! Building this crate needs no MPI or NCCL. Both are loaded on first use.

mod address;
mod engine;
mod error;
mod folders;
mod hello;
pub mod in_process;
mod launch;
mod measure;
mod mpi;
pub mod nccl;
pub mod rendezvous;
mod sockets;
mod watch;

pub use address::Address;
pub use engine::{Engine, Place};
pub use error::{Collective, RankError};
pub use hello::host_name;
pub use launch::{Launch, LaunchError, Launcher, Variables, process_variables};
pub use measure::{
    Carrier, HostCarrier, LinkMeasurement, LinkPoint, MachineMeasurement, machines_of_ranks,
    measure_cards, measure_link,
};
pub use mpi::{Mpi, MpiError};
pub use sockets::Sockets;
pub use watch::{Cause, Loss, Pace, Watch, end_on_loss};
