//! Processes that train together.
//!
//! [`Launch`] says what started this process and which rank of how many it is. An [`Engine`] moves bytes between
//! ranks: [`Mpi`] between processes that `mpirun` started, [`Sockets`] between others, and [`in_process`] between threads, as
//! the reference for tests.
//! [`nccl`] does it between GPUs, in the order of a stream. [`rendezvous`] brings a small message from the first rank
//! to all others before any engine runs, and [`Watch`] notices when a rank is gone.
//!
//! No library is needed to build this crate. MPI and NCCL are loaded when they are first used.

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
