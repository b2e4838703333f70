//! Several ranks of a run, which `mpirun` started. The first one is the run, as it would be by itself; the others compute lanes for it.

use super::data::DataForm;
use super::device::{CpuUse, DeviceKind, Machine, Trains};
use super::model::Outline;
use super::options::Settings;
use super::{Prepared, config, setup};
use crate::UsageError;
use crate::disk_tier::DiskTier;
use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use storm_device::DiskOptions;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_model::Packing;
use storm_plan::{Budget, Decisions, RankPlace};
use storm_ranks::{
    Address, Engine, Launch, Mpi, Pace, Place, RankError, Watch, end_on_loss, process_variables,
};
use storm_train::{
    AnyBatch, Heard, Launch as TrainLaunch, LaunchRequest, LaunchSite, Notice, Ranks, RunError,
    StepPlan, StepSize,
};

/// Bytes that a rank tells of itself: a digest, and why it cannot start, as far as that fits.
const CARD_BYTES: usize = 512;
const DIGEST_BYTES: usize = 32;

/// This process as one of several ranks.
pub(super) struct Joined {
    pub(super) crew: Crew,
    mpi: SharedMpi,
    watch: Watch,
}

/// What a run knows of its ranks.
#[derive(Clone)]
pub(super) struct Crew {
    pub(super) ranks: Ranks,
    /// How many of them share this machine.
    local_ranks: usize,
}

impl Crew {
    pub(super) fn count(&self) -> usize {
        self.ranks.place().ranks as usize
    }

    /// A machine without what other ranks on it take, unless the user said how much each may have.
    pub(super) fn share(&self, mut machine: Machine, settings: &Settings) -> Machine {
        let share = self.local_ranks as u64;
        if settings.ram.is_none() {
            machine.ram.bytes /= share;
        }
        if settings.vram.is_none() {
            machine.vram.bytes /= share;
        }
        if settings.threads.is_none() {
            machine.cpu.threads = (machine.cpu.threads / self.local_ranks).max(1);
        }
        machine
    }

    /// Which of them this is.
    pub(super) fn place(&self) -> RankPlace {
        let Place { rank, ranks } = self.ranks.place();
        RankPlace { rank, ranks }
    }

    /// Refuses what several ranks cannot do.
    pub(super) fn check(&self, settings: &Settings, kind: DeviceKind) -> Result<(), UsageError> {
        let (ranks, lanes) = (self.count(), settings.lanes.get());
        let refuse = |problem: String| Err(UsageError(problem));
        if kind != DeviceKind::Cpu {
            return refuse(format!(
                "{ranks} ranks train on the CPU device only; give --device cpu, or start storm train by itself"
            ));
        }
        if !lanes.is_multiple_of(ranks) {
            return refuse(format!(
                "{ranks} ranks cannot share the {lanes} lanes of a step evenly: mpirun -n must divide lanes"
            ));
        }
        let alone = [("predict", settings.predict.is_some()), ("disk", settings.disk.is_some())];
        if let Some((key, _)) = alone.iter().find(|(_, is_given)| *is_given) {
            return refuse(format!("{key} is for runs on one rank; leave it out"));
        }
        Ok(())
    }
}

/// What the other ranks must know before the first step.
#[derive(Serialize, Deserialize)]
struct Told {
    /// As in config.toml.
    config: String,
    vocabulary: usize,
    /// Whether rows hold several samples.
    segments: bool,
    /// Sequences of a micro-batch, micro-batches of a step, and what rank 0 has decided for all.
    batch: usize,
    accumulate: usize,
    decisions: Decisions,
}

/// The engine, which is finished when the run is over, whoever else holds it.
#[derive(Clone)]
struct SharedMpi(Arc<Mutex<Option<Mpi>>>, Place);

impl SharedMpi {
    fn lock(&self) -> MutexGuard<'_, Option<Mpi>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
pub(super) fn join() -> Result<Option<Joined>> {
    let launch = Launch::of_this_process().map_err(|error| UsageError(error.to_string()))?;
    if launch.ranks == 1 {
        return Ok(None);
    }
    match Mpi::start(&launch, &process_variables()) {
        Ok(mpi) => Ok(Some(connect(mpi, launch.local_ranks as usize)?)),
        Err(_) if launch.rank != 0 => std::process::exit(2),
        Err(error) => Err(UsageError(format!(
            "{} started {} ranks of this run: {error}",
            launch.launcher, launch.ranks
        ))
        .into()),
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
    let crew = Crew { ranks: Ranks::new(Box::new(mpi.clone())), local_ranks };
    Ok(Joined { crew, mpi, watch })
}

impl Joined {
    /// A run on all ranks. Returns on the first rank only.
    pub(super) fn run(
        mut self,
        prepared: Result<Prepared>,
        start: impl FnOnce(Prepared, &Crew) -> Result<()>,
    ) -> Result<()> {
        let place = self.crew.ranks.place();
        let compared = self.compare(prepared);
        if place.rank == 0 {
            let result = compared.and_then(|prepared| start(prepared, &self.crew));
            let code = result.as_ref().map_or_else(crate::code_of, |_| 0);
            self.crew.ranks.end(code)?;
            self.leave()?;
            return result;
        }
        // The first rank says what is wrong with this one.
        let code = match follow(&self.crew) {
            Ok(code) => code,
            Err(error) => {
                let reason = format!("rank {}: {error:#}", place.rank);
                self.crew.ranks.abort(&reason);
                bail!(reason);
            }
        };
        self.leave()?;
        std::process::exit(i32::from(code))
    }

    /// Whether all ranks were started alike. Only the first one learns of it.
    fn compare(&mut self, prepared: Result<Prepared>) -> Result<Prepared> {
        let own = card(&prepared);
        let count = self.crew.count();
        let mut all = vec![0; count * CARD_BYTES];
        let ranges: Vec<Range<usize>> =
            (0..count).map(|rank| rank * CARD_BYTES..(rank + 1) * CARD_BYTES).collect();
        self.mpi.gather(&own, &mut all, &ranges)?;
        let prepared = prepared?;
        for (rank, card) in all.chunks(CARD_BYTES).enumerate().skip(1) {
            let (digest, reason) = card.split_at(DIGEST_BYTES);
            let reason = String::from_utf8_lossy(reason);
            let reason = reason.trim_end_matches('\0');
            if !reason.is_empty() {
                return Err(UsageError(format!("rank {rank}: {reason}")).into());
            }
            if digest != &own[..DIGEST_BYTES] {
                return Err(UsageError(format!(
                    "rank {rank} was started with another version or with other settings than rank 0; start all ranks alike"
                ))
                .into());
            }
        }
        Ok(prepared)
    }

    /// Ends MPI, once all ranks are here.
    fn leave(self) -> Result<()> {
        self.watch.finish();
        let mpi = self.mpi.lock().take();
        mpi.map_or(Ok(()), Mpi::finish).map_err(|error| anyhow!(error))
    }
}

/// What a rank tells the others of itself.
fn card(prepared: &Result<Prepared>) -> Vec<u8> {
    let mut card = vec![0; CARD_BYTES];
    match prepared {
        Ok(prepared) => {
            let mut hasher = blake3::Hasher::new();
            for part in [env!("CARGO_PKG_VERSION"), &format!("{:?}", prepared.words())] {
                hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
            }
            card[..DIGEST_BYTES].copy_from_slice(hasher.finalize().as_bytes());
        }
        Err(error) => {
            let reason = format!("{error:#}");
            let mut end = reason.len().min(CARD_BYTES - DIGEST_BYTES);
            while !reason.is_char_boundary(end) {
                end -= 1;
            }
            card[DIGEST_BYTES..DIGEST_BYTES + end].copy_from_slice(&reason.as_bytes()[..end]);
        }
    }
    card
}

/// The first rank: tells the others what is trained.
pub(super) fn tell(
    crew: &Crew,
    config: String,
    form: &DataForm,
    packing: Packing,
    plan: &StepPlan,
) -> Result<()> {
    let DataForm::Tokens { vocabulary, .. } = *form else {
        let problem = "several ranks train language models only; start storm train by itself";
        return Err(UsageError(problem.to_owned()).into());
    };
    let told = Told {
        config,
        vocabulary,
        segments: packing == Packing::Segments,
        batch: plan.batch,
        accumulate: plan.accumulate,
        decisions: plan.planned.decisions.clone(),
    };
    Ok(crew.ranks.say(&serde_json::to_vec(&told)?)?)
}

/// Any other rank: computes lanes until the run is over.
fn follow(crew: &Crew) -> Result<u8> {
    // Ctrl-C reaches every rank. The first one ends the run.
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    let message = match crew.ranks.hear()? {
        Heard::Message(message) => message,
        Heard::End(code) => return Ok(code),
    };
    let told: Told = serde_json::from_slice(&message).context("rank 0 says something else")?;
    let settings = config::parse(&told.config).map_err(|problem| anyhow!(problem))?.resolve();
    let outline = Outline::new(&settings)?;
    let form = DataForm::Tokens { vocabulary: told.vocabulary, is_packed: true };
    let model = outline.for_data(&settings, &form)?;
    let machine = Machine::of_kind(DeviceKind::Cpu, &(&settings).into())?;
    let machine = crew.share(machine, &settings);
    let cpu = machine.cpu;
    let packing = if told.segments { Packing::Segments } else { Packing::Single };
    let options = setup::train_options(&settings, &model, packing);
    let mut request = setup::request(&settings, &outline.name, model, options, machine, 0)?;
    request.rank = crew.place();
    request.step = StepSize::MicroBatches(told.accumulate);
    request.options.batch = told.batch;
    let request_of_launch = LaunchRequest { decided: Some(told.decisions), ..request.launch(None) };
    let mut launch = TrainLaunch::new(request_of_launch)?;
    let mut site = Quiet { cpu, disk: DiskTier::options(request.disk.as_ref()) };
    let trainer = launch.start::<CpuPlanDevice>(&mut site, None)?.trainer;
    Ok(trainer.follow(&crew.ranks)?)
}

/// A launch of which nothing is said: the first rank says it.
struct Quiet {
    cpu: CpuUse,
    disk: Option<DiskOptions>,
}

impl LaunchSite<CpuPlanDevice> for Quiet {
    fn device(
        &mut self,
        budget: Budget,
        _: &StepPlan,
        before: Option<CpuPlanDevice>,
    ) -> CpuPlanOptions {
        CpuPlanDevice::options(self.cpu, budget, self.disk.clone(), 0.0, before)
    }

    fn batches(&mut self, _: usize, _: usize) -> Result<Vec<AnyBatch>, RunError> {
        Ok(Vec::new())
    }

    fn notice(&mut self, _: Notice<'_>) {}
}
