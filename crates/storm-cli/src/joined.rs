//! Joins this process to the other ranks that a launcher started.

use crate::UsageError;
use anyhow::{Context, Result, anyhow, bail};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use storm_ranks::rendezvous::{Rendezvous, RendezvousError};
use storm_ranks::{
    Address, Engine, Launch, Launcher, Mpi, Pace, Place, RankError, Sockets, Watch, end_on_loss,
    process_variables,
};

/// Size of the message each rank sends about itself: a digest, and the reason it cannot start, truncated to fit.
const CARD_BYTES: usize = 512;
const DIGEST_BYTES: usize = 32;

/// This process as one of several ranks, connected to the others.
pub(crate) struct Joined {
    pub(crate) engine: SharedEngine,
    /// How this rank was launched.
    pub(crate) launch: Launch,
    watch: Watch,
}

/// The transport between ranks.
enum Connection {
    /// For ranks started by `mpirun`, and for CPU ranks of any launcher.
    Mpi(Mpi),
    /// For ranks started by `torchrun` or Slurm, unless they use the CPU.
    Sockets(Sockets),
}

impl Connection {
    fn engine(&mut self) -> &mut dyn Engine {
        match self {
            Connection::Mpi(mpi) => mpi,
            Connection::Sockets(sockets) => sockets,
        }
    }

    fn finish(self) -> Result<()> {
        match self {
            Connection::Mpi(mpi) => mpi.finish().map_err(|error| anyhow!(error)),
            Connection::Sockets(sockets) => sockets.finish().map_err(|error| anyhow!(error)),
        }
    }
}

/// The shared transport. `leave` closes it at the end of the run even if others still hold a clone.
#[derive(Clone)]
pub(crate) struct SharedEngine(Arc<Mutex<Option<Connection>>>, Place);

impl SharedEngine {
    fn lock(&self) -> MutexGuard<'_, Option<Connection>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Name and version of the transport library.
    pub(crate) fn version(&self) -> String {
        match &*self.lock() {
            Some(Connection::Mpi(mpi)) => mpi.version().to_owned(),
            Some(Connection::Sockets(_)) => "sockets".to_owned(),
            None => String::new(),
        }
    }

    fn with<T>(
        &self,
        call: impl FnOnce(&mut dyn Engine) -> Result<T, RankError>,
    ) -> Result<T, RankError> {
        let rank = self.1.rank;
        match self.lock().as_mut() {
            Some(connection) => call(connection.engine()),
            None => Err(RankError::Gone { rank }),
        }
    }
}

impl Engine for SharedEngine {
    fn place(&self) -> Place {
        self.1
    }

    fn exchange(
        &mut self,
        send: &[u8],
        sends: &[Range<usize>],
        receive: &mut [u8],
        receives: &[Range<usize>],
    ) -> Result<(), RankError> {
        self.with(|engine| engine.exchange(send, sends, receive, receives))
    }

    fn gather(
        &mut self,
        piece: &[u8],
        all: &mut [u8],
        ranges: &[Range<usize>],
    ) -> Result<(), RankError> {
        self.with(|engine| engine.gather(piece, all, ranges))
    }

    fn broadcast(&mut self, from: u32, bytes: &mut [u8]) -> Result<(), RankError> {
        self.with(|engine| engine.broadcast(from, bytes))
    }

    fn agree(&mut self, numbers: &mut [i64]) -> Result<(), RankError> {
        self.with(|engine| engine.agree(numbers))
    }

    fn barrier(&mut self) -> Result<(), RankError> {
        self.with(|engine| engine.barrier())
    }

    fn abort(&mut self, reason: &str) {
        if let Some(connection) = self.lock().as_mut() {
            connection.engine().abort(reason);
        }
    }
}

/// The devices that ranks will use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Devices {
    /// CPU ranks are connected by MPI only.
    Cpu,
    /// GPUs, or whatever is found.
    Any,
}

/// Joins the other ranks; `None` if there are none. Every rank that fails says why: ranks that are not connected cannot
/// leave that to one of them.
pub(crate) fn join(devices: Devices) -> Result<Option<Joined>> {
    let launch = Launch::of_this_process().map_err(|error| UsageError(error.to_string()))?;
    if launch.ranks == 1 {
        return Ok(None);
    }
    let has_mpi = !matches!(launch.launcher, Launcher::Torchrun | Launcher::Slurm);
    let connected = match has_mpi || devices == Devices::Cpu {
        true => Mpi::start(&launch, &process_variables())
            .map(Connection::Mpi)
            .map_err(|error| error.to_string()),
        false => by_sockets(&launch).map_err(|error| error.to_string()),
    };
    match connected {
        Ok(connection) => Ok(Some(connect(connection, launch)?)),
        Err(error) => Err(UsageError(format!(
            "{} started {} ranks, and rank {} cannot join the others: {error}",
            launch.launcher, launch.ranks, launch.rank
        ))
        .into()),
    }
}

fn by_sockets(launch: &Launch) -> Result<Connection, RendezvousError> {
    let time = Pace::default().join;
    let mut rendezvous = Rendezvous::of_launcher(launch, &process_variables(), time)?;
    Sockets::connect(launch, &mut rendezvous, time).map(Connection::Sockets)
}

fn connect(mut connection: Connection, launch: Launch) -> Result<Joined> {
    let place = connection.engine().place();
    let (mut own, mut address) = (None, Vec::new());
    if place.rank == 0 {
        let (watch, listening) = Watch::listen(place, Pace::default(), end_on_loss(place))
            .context("cannot watch the other ranks")?;
        (own, address) = (Some(watch), listening.to_bytes());
    }
    let address = Rendezvous::Engine(connection.engine()).share(&launch, "watch", &address)?;
    let watch = match own {
        Some(watch) => watch,
        None => {
            let address = Address::from_bytes(&address).context("the first rank has no address")?;
            Watch::join(place, &address, Pace::default(), end_on_loss(place))
                .context("cannot reach the first rank")?
        }
    };
    let engine = SharedEngine(Arc::new(Mutex::new(Some(connection))), place);
    Ok(Joined { engine, launch, watch })
}

impl Joined {
    /// Checks that all ranks were started alike. `own` holds everything that must match, or the reason this rank cannot
    /// start.
    pub(crate) fn compare(&mut self, own: &Result<String, String>) -> Result<(), UsageError> {
        let all = self.cards(own).map_err(|error| UsageError(error.to_string()))?;
        let own = &all[self.engine.place().rank as usize];
        for (rank, card) in all.iter().enumerate() {
            if let Some(reason) = &card.reason {
                return Err(UsageError(format!("rank {rank}: {reason}")));
            }
            if card.digest != own.digest {
                return Err(UsageError(format!(
                    "rank {rank} was started with another version or with other settings than rank 0; start all ranks alike"
                )));
            }
        }
        Ok(())
    }

    /// Returns this rank's result once all ranks have one. If one failed, the others get the same error.
    pub(crate) fn together<T>(&mut self, made: Result<T>) -> Result<T> {
        let own = made.as_ref().map(|_| String::new()).map_err(|error| format!("{error:#}"));
        let all = self.cards(&own)?;
        let made = made?;
        match all.iter().enumerate().find_map(|(rank, card)| Some((rank, card.reason.as_ref()?))) {
            Some((rank, reason)) => bail!("rank {rank}: {reason}"),
            None => Ok(made),
        }
    }

    /// Exchanges the messages of all ranks.
    fn cards(&mut self, own: &Result<String, String>) -> Result<Vec<Card>, RankError> {
        let count = self.engine.place().ranks as usize;
        let mut all = vec![0; count * CARD_BYTES];
        let ranges: Vec<Range<usize>> =
            (0..count).map(|rank| rank * CARD_BYTES..(rank + 1) * CARD_BYTES).collect();
        self.engine.gather(&card(own), &mut all, &ranges)?;
        Ok(all.chunks(CARD_BYTES).map(Card::of_bytes).collect())
    }

    /// Disconnects once all ranks have arrived here.
    pub(crate) fn leave(self) -> Result<()> {
        self.watch.finish();
        let connection = self.engine.lock().take();
        connection.map_or(Ok(()), Connection::finish)
    }
}

/// What a rank reports about itself.
struct Card {
    digest: Vec<u8>,
    /// Why the rank cannot continue.
    reason: Option<String>,
}

impl Card {
    fn of_bytes(bytes: &[u8]) -> Card {
        let (digest, reason) = bytes.split_at(DIGEST_BYTES);
        let reason = String::from_utf8_lossy(reason);
        let reason = reason.trim_end_matches('\0');
        let reason = (!reason.is_empty()).then(|| reason.to_owned());
        Card { digest: digest.to_vec(), reason }
    }
}

fn card(own: &Result<String, String>) -> Vec<u8> {
    let mut card = vec![0; CARD_BYTES];
    match own {
        Ok(words) => {
            let mut hasher = blake3::Hasher::new();
            for part in [env!("CARGO_PKG_VERSION"), words] {
                hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
            }
            card[..DIGEST_BYTES].copy_from_slice(hasher.finalize().as_bytes());
        }
        Err(reason) => {
            let end = reason.floor_char_boundary(CARD_BYTES - DIGEST_BYTES);
            card[DIGEST_BYTES..DIGEST_BYTES + end].copy_from_slice(&reason.as_bytes()[..end]);
        }
    }
    card
}
