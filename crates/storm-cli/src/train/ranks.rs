//! Several ranks of a run, which `mpirun` started. The first one is the run, as it would be by itself; the others compute lanes for it.

use super::cards::Cards;
use super::data::DataForm;
use super::device::{CpuUse, DeviceKind, Machine, Share, Trains};
use super::model::Outline;
use super::options::Settings;
use super::{Prepared, config, setup, signals};
use crate::disk_tier::DiskTier;
use crate::joined::Joined;
use crate::{UsageError, machines, memory_limits};
use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, OnceLock};
use storm_device::DiskOptions;
use storm_device::cpu::CpuPlanDevice;
use storm_device::cuda::CudaPlanDevice;
use storm_model::{Packing, Unit};
use storm_plan::{Budget, Decisions, HardwareProfile, Lanes, RankPlace};
use storm_ranks::nccl::Id;
use storm_ranks::{Engine, Launch, Launcher, Place};
use storm_train::{
    AnyBatch, Exchange, Heard, Launch as TrainLaunch, LaunchRequest, LaunchSite, Notice, Ranks,
    RunError, StepPlan, StepSize, Trainer,
};

/// What a run knows of its ranks.
#[derive(Clone)]
pub(crate) struct Crew {
    pub(super) ranks: Ranks,
    /// What this one has of its machine.
    pub(super) share: Share,
    /// What started it.
    pub(super) launch: Launch,
    /// The machine of each rank, as a number.
    machines: Arc<[u32]>,
    /// The GPUs, once they are connected; never on the CPU device.
    cards: Arc<OnceLock<Cards>>,
}

impl Crew {
    pub(super) fn count(&self) -> usize {
        self.ranks.place().ranks as usize
    }

    /// How they exchange the gradients of such lanes.
    pub(super) fn exchange(&self, lanes: Lanes) -> Exchange {
        Exchange::new(lanes, &self.machines)
    }

    /// Which of them this is.
    pub(super) fn place(&self, exchange: Exchange) -> RankPlace {
        let Place { rank, ranks } = self.ranks.place();
        exchange.place(rank, ranks)
    }

    /// Whether several machines have them.
    pub(super) fn has_machines(&self) -> bool {
        self.machines.iter().any(|&machine| machine != self.machines[0])
    }

    /// The GPUs of all ranks; none on the CPU device.
    pub(super) fn cards(&self) -> Option<&Cards> {
        self.cards.get()
    }

    /// The first rank: connects the GPUs of all.
    pub(super) fn connect_cards(&self) -> Result<()> {
        let id = Cards::new_id()?;
        self.say(&Said::Cards { id: id.to_bytes() })?;
        self.join_cards(id)
    }

    fn join_cards(&self, id: Id) -> Result<()> {
        let cards = Cards::connect(&self.ranks, &self.launch, id)?;
        // Once for each run, so that nothing is there yet.
        let _ = self.cards.set(cards);
        Ok(())
    }

    fn say(&self, said: &Said) -> Result<()> {
        Ok(self.ranks.say(&serde_json::to_vec(said)?)?)
    }
}

/// What the first rank tells the others before the first step.
#[derive(Serialize, Deserialize)]
enum Said {
    /// To connect their GPUs, with this id of NCCL.
    Cards { id: Vec<u8> },
    /// What is trained.
    Begin(Box<Told>),
}

/// Refuses what several ranks cannot do.
pub(super) fn check(
    launch: &Launch,
    settings: &Settings,
    kind: DeviceKind,
    unit: Unit,
) -> Result<(), UsageError> {
    let (ranks, lanes) = (launch.ranks as usize, settings.lanes.count());
    let refuse = |problem: String| Err(UsageError(problem));
    let has_mpi = !matches!(launch.launcher, Launcher::Torchrun | Launcher::Slurm);
    if kind == DeviceKind::Cpu && !has_mpi {
        return refuse(format!(
            "{} does not connect ranks on the CPU device: start them by mpirun -n {ranks} storm train …",
            launch.launcher
        ));
    }
    if unit != Unit::Tokens {
        return refuse(format!(
            "{ranks} ranks train language models only; start storm train by itself for an image classifier"
        ));
    }
    if !lanes.is_multiple_of(ranks) {
        return refuse(format!(
            "{ranks} ranks cannot share the {lanes} lanes of a step evenly: mpirun -n must divide lanes"
        ));
    }
    let alone = [("predict", settings.predict.is_some()), ("disk", settings.disk.is_some())];
    match alone.iter().find(|(_, is_given)| *is_given) {
        Some((key, _)) => refuse(format!("{key} is for runs on one rank; leave it out")),
        None => Ok(()),
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
    /// What rank 0 has decided by. Plans depend on it, too: updates are spread by the time of kernels.
    profile: String,
}

/// What this rank has of its machine. Of host memory all have as much as the one with the least: they have one plan.
fn share(joined: &mut Joined) -> Result<Share> {
    let local_ranks = joined.launch.local_ranks as usize;
    let own = memory_limits::host(None).map_or(0, |limit| limit.bytes / local_ranks as u64);
    let mut most = [-(own as i64)];
    joined.engine.agree(&mut most)?;
    Ok(Share { local_ranks, ram_bytes: most[0].unsigned_abs() })
}

/// A run on all ranks. Returns on the first rank only.
pub(super) fn run(
    mut joined: Joined,
    prepared: Result<Prepared>,
    start: impl FnOnce(Prepared, &Crew) -> Result<()>,
) -> Result<()> {
    let share = share(&mut joined)?;
    // What is wrong with it is said with what is wrong with the settings.
    let given = machines::given(joined.launch.ranks);
    let machines = machines::of_ranks(&mut joined.engine, *given.as_ref().unwrap_or(&None))?;
    let prepared = given.map_err(Into::into).and(prepared);
    let ranks = Ranks::new(Box::new(joined.engine.clone()));
    let launch = joined.launch;
    let crew = Crew { ranks, share, launch, machines: machines.into(), cards: Arc::default() };
    let place = crew.ranks.place();
    let own = match &prepared {
        Ok(prepared) => Ok(format!("{:?}", prepared.words())),
        Err(error) => Err(format!("{error:#}")),
    };
    let compared = joined.compare(&own);
    if place.rank == 0 {
        let compared = prepared.and_then(|prepared| Ok(compared.map(|()| prepared)?));
        let Err(error) = compared.and_then(|prepared| start(prepared, &crew)) else {
            crew.ranks.end(0)?;
            return joined.leave();
        };
        // Printed before any other rank ends: launchers kill this one when another fails.
        let code = crate::print_error(&error);
        // A second error would only hide the first.
        if crew.ranks.end(code).is_ok() {
            let _ = joined.leave();
        }
        std::process::exit(i32::from(code))
    }
    // The first rank says what is wrong with this one.
    let code = match follow(&crew) {
        Ok(code) => code,
        Err(error) => {
            let reason = format!("rank {}: {error:#}", place.rank);
            crew.ranks.abort(&reason);
            bail!(reason);
        }
    };
    joined.leave()?;
    std::process::exit(i32::from(code))
}

/// The first rank: tells the others what is trained.
pub(super) fn tell(
    crew: &Crew,
    config: String,
    form: &DataForm,
    packing: Packing,
    plan: &StepPlan,
    profile: &HardwareProfile,
) -> Result<()> {
    let DataForm::Tokens { vocabulary, .. } = *form else {
        bail!("several ranks train language models only");
    };
    let told = Told {
        config,
        vocabulary,
        segments: packing == Packing::Segments,
        batch: plan.batch,
        accumulate: plan.accumulate,
        decisions: plan.planned.decisions.clone(),
        profile: profile.to_json(),
    };
    crew.say(&Said::Begin(Box::new(told)))
}

/// Any other rank: computes lanes until the run is over.
fn follow(crew: &Crew) -> Result<u8> {
    signals::pass_on(crew.ranks.stop())?;
    loop {
        let message = match crew.ranks.hear()? {
            Heard::Message(message) => message,
            Heard::End(code) => return Ok(code),
        };
        match serde_json::from_slice(&message).context("rank 0 says something else")? {
            Said::Cards { id } => {
                let id = Id::from_bytes(&id).context("rank 0 says something else")?;
                // If it fails, it fails on rank 0 as well, which says so and ends the run.
                let _ = crew.join_cards(id);
            }
            Said::Begin(told) if crew.cards().is_some() => {
                return follow_on::<CudaPlanDevice>(crew, DeviceKind::Cuda, *told);
            }
            Said::Begin(told) => return follow_on::<CpuPlanDevice>(crew, DeviceKind::Cpu, *told),
        }
    }
}

/// Computes lanes on a device.
fn follow_on<D: Trains>(crew: &Crew, kind: DeviceKind, told: Told) -> Result<u8> {
    match trainer::<D>(crew, kind, told) {
        Ok(trainer) => Ok(trainer.follow(&crew.ranks)?),
        Err(error) => Ok(crew.ranks.refuse(&format!("{error:#}"))?),
    }
}

fn trainer<D: Trains>(crew: &Crew, kind: DeviceKind, told: Told) -> Result<Trainer<D>> {
    let settings = config::parse(&told.config).map_err(|problem| anyhow!(problem))?.resolve();
    let outline = Outline::new(&settings)?;
    let form = DataForm::Tokens { vocabulary: told.vocabulary, is_packed: true };
    let model = outline.for_data(&settings, &form)?;
    let profile = HardwareProfile::from_json(&told.profile)?;
    let asked = (&settings).into();
    let mut machine = Machine::shared(kind, &asked, Some(crew.share), Some(profile))?;
    if let Some(cards) = crew.cards() {
        cards.share(&mut machine, &settings);
    }
    let cpu = machine.cpu;
    let packing = if told.segments { Packing::Segments } else { Packing::Single };
    let options = setup::train_options(&settings, &model, packing);
    let mut request = setup::request(&settings, &outline.name, model, options, machine, 0)?;
    request.rank = crew.place(crew.exchange(request.options.lanes));
    request.step = StepSize::MicroBatches(told.accumulate);
    request.options.batch = told.batch;
    let request_of_launch = LaunchRequest { decided: Some(told.decisions), ..request.launch(None) };
    let mut launch = TrainLaunch::new(request_of_launch)?;
    let mut site = Quiet { cpu, disk: DiskTier::options(request.disk.as_ref()), crew };
    Ok(launch.start::<D>(&mut site, None)?.trainer)
}

/// A launch of which nothing is said: the first rank says it.
struct Quiet<'a> {
    cpu: CpuUse,
    disk: Option<DiskOptions>,
    crew: &'a Crew,
}

impl<D: Trains> LaunchSite<D> for Quiet<'_> {
    fn device(&mut self, budget: Budget, _: &StepPlan, before: Option<D>) -> D::Options {
        D::options(self.cpu, budget, self.disk.clone(), 0.0, before, Some(self.crew))
    }

    fn batches(&mut self, _: usize, _: usize) -> Result<Vec<AnyBatch>, RunError> {
        Ok(Vec::new())
    }

    fn notice(&mut self, _: Notice<'_>) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::options::Given;

    fn launch(launcher: Launcher) -> Launch {
        Launch { launcher, rank: 0, ranks: 4, local_rank: 0, local_ranks: 4 }
    }

    fn refused(config: &str, kind: DeviceKind, unit: Unit) -> Option<String> {
        let given: Given = config::parse(config).expect("a config");
        check(&launch(Launcher::Mpich), &given.resolve(), kind, unit)
            .err()
            .map(|UsageError(problem)| problem)
    }

    #[test]
    fn what_ranks_cannot_do_is_refused() {
        let lanes = "lanes = 8\n";
        let devices = [DeviceKind::Cpu, DeviceKind::Cuda];
        for kind in devices {
            assert_eq!(refused(lanes, kind, Unit::Tokens), None);
            for (more, unit, part) in [
                ("", Unit::Images, "4 ranks train language models only"),
                ("disk = \"/tmp\"", Unit::Tokens, "disk is for runs on one rank"),
                ("predict = { direction = \"last-update\" }", Unit::Tokens, "predict is for"),
            ] {
                let problem = refused(&format!("{lanes}{more}"), kind, unit).expect("a refusal");
                assert!(problem.contains(part), "{problem}");
            }
        }
        let given: Given = config::parse(lanes).expect("a config");
        let settings = given.resolve();
        let by_torchrun =
            devices.map(|kind| check(&launch(Launcher::Torchrun), &settings, kind, Unit::Tokens));
        assert!(by_torchrun[1].is_ok(), "GPUs");
        let [Err(UsageError(problem)), _] = by_torchrun else { panic!("torchrun on the CPU") };
        assert!(problem.contains("mpirun -n 4 storm train"), "{problem}");
        let problem = refused("lanes = 6", DeviceKind::Cpu, Unit::Tokens).expect("6 lanes");
        assert!(problem.contains("4 ranks cannot share the 6 lanes"), "{problem}");
    }
}
