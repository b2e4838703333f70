//! This process as one of several ranks, which `mpirun` started.

use crate::UsageError;
use anyhow::{Context, Result, anyhow, bail};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use storm_ranks::{
    Address, Engine, Launch, Mpi, Pace, Place, RankError, Watch, end_on_loss, process_variables,
};

/// Bytes that a rank tells of itself: a digest, and why it cannot start, as far as that fits.
const CARD_BYTES: usize = 512;
const DIGEST_BYTES: usize = 32;

/// One of several ranks, with a way to the others.
pub(crate) struct Joined {
    pub(crate) mpi: SharedMpi,
    /// How many of the ranks share this machine.
    pub(crate) local_ranks: usize,
    watch: Watch,
}

/// The engine, which is finished when the run is over, whoever else holds it.
#[derive(Clone)]
pub(crate) struct SharedMpi(Arc<Mutex<Option<Mpi>>>, Place);

impl SharedMpi {
    fn lock(&self) -> MutexGuard<'_, Option<Mpi>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Name and version of the library.
    pub(crate) fn version(&self) -> String {
        self.lock().as_ref().map_or_else(String::new, |mpi| mpi.version().to_owned())
    }

    fn with<T>(&self, call: impl FnOnce(&mut Mpi) -> Result<T, RankError>) -> Result<T, RankError> {
        let rank = self.1.rank;
        self.lock().as_mut().map_or(Err(RankError::Gone { rank }), call)
    }
}

impl Engine for SharedMpi {
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
        self.with(|mpi| mpi.exchange(send, sends, receive, receives))
    }

    fn gather(
        &mut self,
        piece: &[u8],
        all: &mut [u8],
        ranges: &[Range<usize>],
    ) -> Result<(), RankError> {
        self.with(|mpi| mpi.gather(piece, all, ranges))
    }

    fn broadcast(&mut self, from: u32, bytes: &mut [u8]) -> Result<(), RankError> {
        self.with(|mpi| mpi.broadcast(from, bytes))
    }

    fn agree(&mut self, numbers: &mut [i64]) -> Result<(), RankError> {
        self.with(|mpi| mpi.agree(numbers))
    }

    fn barrier(&mut self) -> Result<(), RankError> {
        self.with(Mpi::barrier)
    }

    fn abort(&mut self, reason: &str) {
        if let Some(mpi) = self.lock().as_mut() {
            mpi.abort(reason);
        }
    }
}

/// Joins the other ranks; none if there are no others. Where that fails, it fails on all, and the first says why.
pub(crate) fn join() -> Result<Option<Joined>> {
    let launch = Launch::of_this_process().map_err(|error| UsageError(error.to_string()))?;
    if launch.ranks == 1 {
        return Ok(None);
    }
    match Mpi::start(&launch, &process_variables()) {
        Ok(mpi) => Ok(Some(connect(mpi, launch.local_ranks as usize)?)),
        Err(_) if launch.rank != 0 => std::process::exit(2),
        Err(error) => {
            Err(UsageError(format!("{} started {} ranks: {error}", launch.launcher, launch.ranks))
                .into())
        }
    }
}

fn connect(mut mpi: Mpi, local_ranks: usize) -> Result<Joined> {
    let place = mpi.place();
    let (mut own, mut address) = (None, Vec::new());
    if place.rank == 0 {
        let (watch, listening) = Watch::listen(place, Pace::default(), end_on_loss(place))
            .context("cannot watch the other ranks")?;
        (own, address) = (Some(watch), listening.to_bytes());
    }
    let mut length = (address.len() as u64).to_le_bytes();
    mpi.broadcast(0, &mut length)?;
    address.resize(u64::from_le_bytes(length).min(1 << 16) as usize, 0);
    mpi.broadcast(0, &mut address)?;
    let watch = match own {
        Some(watch) => watch,
        None => {
            let address = Address::from_bytes(&address).context("the first rank has no address")?;
            Watch::join(place, &address, Pace::default(), end_on_loss(place))
                .context("cannot reach the first rank")?
        }
    };
    let mpi = SharedMpi(Arc::new(Mutex::new(Some(mpi))), place);
    Ok(Joined { mpi, local_ranks, watch })
}

impl Joined {
    /// Whether all ranks were started alike: `own` is all that must be the same, or why this one cannot start.
    pub(crate) fn compare(&mut self, own: &Result<String, String>) -> Result<(), UsageError> {
        let all = self.cards(own).map_err(|error| UsageError(error.to_string()))?;
        let own = &all[self.mpi.place().rank as usize];
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

    /// What this rank has made, once all others have made theirs. If one has not, the error is the same on all that have.
    pub(crate) fn together<T>(&mut self, made: Result<T>) -> Result<T> {
        let own = made.as_ref().map(|_| String::new()).map_err(|error| format!("{error:#}"));
        let all = self.cards(&own)?;
        let made = made?;
        match all.iter().enumerate().find_map(|(rank, card)| Some((rank, card.reason.as_ref()?))) {
            Some((rank, reason)) => bail!("rank {rank}: {reason}"),
            None => Ok(made),
        }
    }

    /// What every rank says of itself.
    fn cards(&mut self, own: &Result<String, String>) -> Result<Vec<Card>, RankError> {
        let count = self.mpi.place().ranks as usize;
        let mut all = vec![0; count * CARD_BYTES];
        let ranges: Vec<Range<usize>> =
            (0..count).map(|rank| rank * CARD_BYTES..(rank + 1) * CARD_BYTES).collect();
        self.mpi.gather(&card(own), &mut all, &ranges)?;
        Ok(all.chunks(CARD_BYTES).map(Card::of_bytes).collect())
    }

    /// Ends MPI, once all ranks are here.
    pub(crate) fn leave(self) -> Result<()> {
        self.watch.finish();
        let mpi = self.mpi.lock().take();
        mpi.map_or(Ok(()), Mpi::finish).map_err(|error| anyhow!(error))
    }
}

/// What a rank says of itself.
struct Card {
    digest: Vec<u8>,
    /// Why it cannot go on.
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
