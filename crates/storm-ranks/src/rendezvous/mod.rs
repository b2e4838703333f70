//! Sends a small message from rank 0 to all others before an engine connects them: the NCCL ID, or
//! the address of rank 0's [`crate::Watch`].
//!
//! The method depends on the launcher: an MPI broadcast, `torchrun`'s store, or a port on the first
//! host of a Slurm step.

mod slurm;
mod store;

use crate::engine::Engine;
use crate::error::RankError;
use crate::launch::{Launch, Launcher, Variables};
use std::io;
use std::time::Duration;
use thiserror::Error;

/// Maximum message length.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Why a rendezvous failed.
#[derive(Debug, Error)]
pub enum RendezvousError {
    /// A launcher's variable is missing or invalid.
    #[error("{launcher} started this process, but {variable} is {problem}")]
    Variable {
        /// The launcher.
        launcher: Launcher,
        /// The variable's name.
        variable: &'static str,
        /// The problem.
        problem: String,
    },
    /// `torchrun` provides no store.
    #[error(
        "this torchrun keeps no store for the processes that it starts. Use PyTorch 2.4 or newer, with --standalone \
         or with --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT"
    )]
    NoAgentStore,
    /// The store failed.
    #[error("torchrun's store at {host}:{port} failed: {source}")]
    Store {
        /// Its host.
        host: String,
        /// Its port.
        port: u16,
        /// The cause.
        source: io::Error,
    },
    /// The port derived from the Slurm job and step cannot be used.
    #[error(
        "port {port} on {host}, which follows from Slurm's job and step, cannot be used: {source}. Set \
         STORM_RENDEZVOUS_PORT to a free one, for all ranks"
    )]
    Port {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// The cause.
        source: io::Error,
    },
    /// Rank 0 is not on the first host.
    #[error(
        "the first rank runs on {host}, but the first host of Slurm's step is {first}. Use srun's default --distribution"
    )]
    NotFirstHost {
        /// The host of rank 0.
        host: String,
        /// The first host, where the other ranks look for it.
        first: String,
    },
    /// Ranks cannot be connected by sockets.
    #[error("ranks cannot be connected: {0}")]
    Sockets(io::Error),
    /// Not all ranks connected.
    #[error("{missing} of {ranks} ranks did not connect to the first one within {} s", .time.as_secs())]
    Missing {
        /// Number of missing ranks.
        missing: u32,
        /// Number of ranks.
        ranks: u32,
        /// The timeout.
        time: Duration,
    },
    /// The message is too long.
    #[error("a message of {0} bytes; at most {MESSAGE_BYTES_MAX} are allowed")]
    TooLong(u64),
    /// A broadcast failed.
    #[error(transparent)]
    Rank(#[from] RankError),
    /// The launcher needs no rendezvous: there is none, or it connects its processes through MPI.
    #[error("{0} needs no rendezvous")]
    NotNeeded(Launcher),
}

/// A method of sending a message from rank 0 to all.
pub enum Rendezvous<'a> {
    /// A running engine.
    Engine(&'a mut dyn Engine),
    /// `torchrun`'s store.
    Store(store::StoreMeeting),
    /// A port on the first host of a Slurm step.
    Slurm(slurm::SlurmMeeting),
}

impl Rendezvous<'static> {
    /// The method for `torchrun` or `srun`, configured from their variables.
    pub fn of_launcher(
        launch: &Launch,
        variables: &Variables,
        time: Duration,
    ) -> Result<Rendezvous<'static>, RendezvousError> {
        match launch.launcher {
            Launcher::Torchrun => store::StoreMeeting::new(variables, time).map(Rendezvous::Store),
            Launcher::Slurm => slurm::SlurmMeeting::new(variables, time).map(Rendezvous::Slurm),
            other => Err(RendezvousError::NotNeeded(other)),
        }
    }
}

impl Rendezvous<'_> {
    /// Returns rank 0's message on every rank. The messages of other ranks are ignored. Each
    /// message of a run needs a unique `name`.
    pub fn share(
        &mut self,
        launch: &Launch,
        name: &str,
        message: &[u8],
    ) -> Result<Vec<u8>, RendezvousError> {
        if launch.rank == 0 && message.len() > MESSAGE_BYTES_MAX {
            return Err(RendezvousError::TooLong(message.len() as u64));
        }
        match self {
            Rendezvous::Engine(engine) => share_by_engine(*engine, message),
            Rendezvous::Store(meeting) => meeting.share(launch, name, message),
            Rendezvous::Slurm(meeting) => meeting.share(launch, name, message),
        }
    }
}

fn share_by_engine(engine: &mut dyn Engine, message: &[u8]) -> Result<Vec<u8>, RendezvousError> {
    let mut length = (message.len() as u64).to_le_bytes();
    engine.broadcast(0, &mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MESSAGE_BYTES_MAX as u64 {
        return Err(RendezvousError::TooLong(length));
    }
    let mut bytes = message.to_vec();
    bytes.resize(length as usize, 0);
    engine.broadcast(0, &mut bytes)?;
    Ok(bytes)
}

/// The value of a launcher's variable, which must be set.
fn required<'a>(
    launcher: Launcher,
    variables: &'a Variables,
    variable: &'static str,
) -> Result<&'a str, RendezvousError> {
    let missing =
        || RendezvousError::Variable { launcher, variable, problem: "not set".to_owned() };
    variables
        .get(variable)
        .map(String::as_str)
        .filter(|value| !value.is_empty())
        .ok_or_else(missing)
}

/// Parses the port in a variable.
fn port(launcher: Launcher, variable: &'static str, value: &str) -> Result<u16, RendezvousError> {
    value.parse().ok().filter(|port| *port != 0).ok_or_else(|| {
        let value: String = value.chars().take(40).collect();
        RendezvousError::Variable { launcher, variable, problem: format!("`{value}`, not a port") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::in_process;

    #[test]
    fn an_engine_brings_the_first_ranks_message() {
        let threads: Vec<_> = (0..)
            .zip(in_process::connect(3))
            .map(|(rank, mut engine)| {
                std::thread::spawn(move || {
                    let launch = Launch { rank, ranks: 3, ..Launch::ALONE };
                    let own = vec![rank as u8; 5 + rank as usize];
                    Rendezvous::Engine(&mut engine).share(&launch, "id", &own).unwrap()
                })
            })
            .collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), [0; 5]);
        }
    }

    #[test]
    fn long_messages_are_refused() {
        let mut engine = in_process::connect(1).remove(0);
        let message = vec![0; MESSAGE_BYTES_MAX + 1];
        let shared = Rendezvous::Engine(&mut engine).share(&Launch::ALONE, "id", &message);
        assert!(matches!(shared, Err(RendezvousError::TooLong(_))));
    }
}
