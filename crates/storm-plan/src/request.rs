//! The planner's interface: requests and results.

use crate::choice::DiskChoice;
use crate::graph_memory::graph_bytes;
use crate::queue::{Link, PerQueue, Queue};
use crate::search::{Activations, Found, Search};
use crate::tier::{PerTier, Tier};
use crate::too_small::TooSmall;
use crate::{
    Bottleneck, CheckedPlan, Decisions, HardwareProfile, Lowering, PlanError, Simulation, Storage,
    Task, UpdateTime, check,
};
use serde::Serialize;

/// Where a class of tensors lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// On the device.
    Resident,
    /// In host memory, fetched as needed.
    Streamed,
}

/// What to keep on disk even if host memory has room for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnDisk {
    /// The second moments of layers whose state is not on the device.
    SecondMoments,
    /// First and second moments of those layers.
    Moments,
    /// The frozen weights of layers whose weights are not on the device.
    FrozenWeights,
    /// Moments and frozen weights.
    All,
}

/// Decisions forced by the user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forced {
    /// What layers save for their backward pass.
    pub activations: Option<Storage>,
    /// Keep nothing of a layer on the device between its forward and backward pass: offload or recompute everything.
    pub nothing_kept: bool,
    /// The inputs of layers.
    pub layer_inputs: Option<Placement>,
    /// Store only the input of every n-th layer; the layers between are rerun.
    pub checkpoint_every: Option<usize>,
    /// Parameters of layers.
    pub weights: Option<Placement>,
    /// Their gradients.
    pub gradients: Option<Placement>,
    /// Their optimizer state.
    pub states: Option<Placement>,
    /// What to keep on disk. If `None`, as much as host memory cannot hold.
    pub on_disk: Option<OnDisk>,
    /// When gradients are applied.
    pub update: Option<UpdateTime>,
    /// Micro-batches that run through a layer together.
    pub group: Option<usize>,
}

/// Memory limits of a run in each tier, everything included: on the device, what the driver counts for the process; on
/// the host, pinned memory.
pub type Budget = PerTier<u64>;

/// A fixed policy for comparison, with its prediction.
#[derive(Clone, Debug, Serialize)]
pub struct Policy {
    /// For example `keep-all`.
    pub name: &'static str,
    /// A description in one sentence.
    pub description: &'static str,
    /// Its prediction; none if no variant fits the budget.
    pub prediction: Option<Prediction>,
}

/// The simulated performance of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Peak memory of the process in each tier: the plan's, and on the device also the process's overhead.
    pub peak_bytes: PerTier<u64>,
    /// Time of one step.
    pub step_seconds: f64,
    /// Fraction of the step in which each queue is busy.
    pub busy: PerQueue<f64>,
    /// Fraction of compute time spent on recomputation.
    pub recompute_fraction: f64,
    /// FLOPs of recomputed matrix products in a step.
    pub recompute_flops: f64,
    /// Bytes that each queue copies per step.
    pub copied_bytes: PerQueue<u64>,
}

/// A checked plan within the budget, with its predictions.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: CheckedPlan,
    /// The decisions behind it.
    pub decisions: Decisions,
    /// Its predicted performance.
    pub prediction: Prediction,
    /// The detailed simulation.
    pub simulation: Simulation,
    /// The smallest device budget that works, everything included.
    pub vram_min_bytes: u64,
    /// Plans built and simulated to find this one. Many more decisions were compared by an estimate.
    pub plans_built: usize,
}

impl Planned {
    /// The resource that limits its speed.
    pub fn bottleneck(&self) -> Bottleneck {
        Bottleneck::of(&self.prediction, &self.simulation)
    }
}

/// The largest group that a user may request.
const GROUP_MAX: usize = 1024;

impl Forced {
    fn check(&self, task: &Task) -> Result<(), PlanError> {
        let refuse = |problem: String| Err(PlanError::Decisions { problem });
        let stages = task.program().stages().iter();
        let layers = stages.map(|stage| stage.repeat).max().unwrap_or(1);
        if let Some(group) = self.group.filter(|&group| group > GROUP_MAX) {
            return refuse(format!(
                "groups of {group} micro-batches are too large: a plan grows with the group, and at most \
                 {GROUP_MAX} go together"
            ));
        }
        if let Some(group) = self.group
            && (group == 0 || !task.lane_micro_batches().is_multiple_of(group))
        {
            let of_lane = if task.lanes > 1 { " of a lane" } else { "" };
            return refuse(format!(
                "groups of {group} do not divide {} micro-batches{of_lane}",
                task.lane_micro_batches()
            ));
        }
        if self.update == Some(UpdateTime::InBackward) {
            let group = self.group.unwrap_or(task.micro_batches);
            if let Some(problem) = task.in_backward_problem(group) {
                return refuse(problem);
            }
            if group > GROUP_MAX {
                return refuse(format!(
                    "updates in the backward pass need all micro-batches of a step in one group, of at most {GROUP_MAX}, not {group}"
                ));
            }
        }
        match self.checkpoint_every {
            Some(0) => refuse("a checkpoint every 0 layers is none at all".to_owned()),
            Some(every) if every > layers => refuse(format!(
                "a checkpoint every {every} layers needs that many; there are {layers}"
            )),
            _ => Ok(()),
        }
    }
}

/// The part of a budget that is left for the plan.
fn limits(mut budget: Budget, profile: &HardwareProfile) -> PerTier<usize> {
    let device = &mut budget[Tier::DEVICE];
    *device = device.saturating_sub(profile.overhead_bytes);
    budget.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// The process's memory with a plan of this size.
fn with_overhead(bytes: PerTier<usize>, profile: &HardwareProfile) -> PerTier<u64> {
    let mut bytes = bytes.map(|bytes| bytes as u64);
    bytes[Tier::DEVICE] += profile.overhead_bytes;
    bytes
}

/// Finds the fastest plan within the budget, and proves it safe.
///
/// # Errors
/// [`PlanError::TooSmall`] if nothing fits; otherwise an invalid task or decisions.
pub fn plan(
    task: &Task,
    profile: &HardwareProfile,
    budget: Budget,
    forced: &Forced,
) -> Result<Planned, PlanError> {
    forced.check(task)?;
    let lowering = Lowering::new(task, profile)?;
    let limits = limits(budget, profile);
    // CUDA graphs have lower priority: if a plan fits only without them, it runs without them, and nothing moves to
    // disk to make room for them.
    let graphs = match limits[Tier::DISK] {
        0 => usize::try_from(graph_bytes(task, profile)).unwrap_or(usize::MAX),
        _ => 0,
    };
    let beside_graphs = limits.with(Tier::DEVICE, limits[Tier::DEVICE].saturating_sub(graphs));
    let mut best = fastest(&lowering, beside_graphs, forced)?;
    if best.is_none() && graphs > 0 {
        best = fastest(&lowering, limits, forced)?;
    }
    let too_small = || {
        // Put everything on disk that may be there.
        let disk = match limits[Tier::DISK] {
            0 => DiskChoice::default(),
            _ => DiskChoice {
                share: lowering.state_kinds() * DiskChoice::SHARES,
                ring: 2,
                frozen_share: DiskChoice::SHARES,
                frozen_ring: 2,
            },
        };
        let search = Search::new(&lowering, limits, forced, disk);
        let smallest = search.smallest()?;
        let min_bytes = with_overhead(smallest.bytes, profile);
        let decisions = search.decisions(&smallest.choice);
        let regions = lowering.regions(&decisions).into_iter();
        let mut consumers: Vec<(String, u64)> = regions
            .filter(|region| region.tier == Tier::DEVICE)
            .map(|region| (region.name, region.bytes as u64))
            .chain([("context and libraries".to_owned(), profile.overhead_bytes)])
            .collect();
        consumers.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        Err(PlanError::TooSmall(Box::new(TooSmall { budget, min_bytes, consumers })))
    };
    let Some((found, vram_min_bytes)) = best else { return too_small() };
    let prediction = predict(&lowering, &found);
    let Found { decisions, plan, simulation, plans_built } = found;
    let plan =
        check(plan, limits).map_err(|error| PlanError::Unsafe { problem: error.to_string() })?;
    Ok(Planned { plan, decisions, prediction, simulation, vram_min_bytes, plans_built })
}

/// The fastest plan within limits, and the smallest device budget that works, everything included; `None` if nothing
/// fits.
fn fastest(
    lowering: &Lowering<'_>,
    limits: PerTier<usize>,
    forced: &Forced,
) -> Result<Option<(Found, u64)>, PlanError> {
    let mut best: Option<(Found, u64)> = None;
    for disk in disk_choices(lowering, limits, forced)? {
        let search = Search::new(lowering, limits, forced, disk);
        let smallest = search.smallest()?;
        let Some(found) = search.run(&smallest.choice) else { continue };
        let known = best.as_ref().map(|(best, _)| best.simulation.step_seconds);
        if known.is_none_or(|known| found.simulation.step_seconds < known) {
            let min_bytes = with_overhead(smallest.bytes, lowering.profile);
            best = Some((found, min_bytes[Tier::DEVICE]));
        }
    }
    Ok(best)
}

/// Most pinned memory for staging state between disk and device, and most slots: from the fastest variant to one for
/// little host memory. Frozen weights get an eighth of it, because they are read at a steady rate.
const STAGING: [(usize, usize); 6] = [
    (8 << 30, usize::MAX),
    (4 << 30, usize::MAX),
    (2 << 30, usize::MAX),
    (STAGING_SMALL, usize::MAX),
    (STAGING_SMALL, 8),
    (STAGING_SMALL, 2),
];

/// Two variants are searched: the first that fits, and the first with no more than this, which leaves more host memory
/// for activations.
const STAGING_SMALL: usize = 1 << 30;
const DISK_CHOICES: usize = 2;

/// How much to keep on disk: nothing if host memory suffices, otherwise as little as possible. Empty if nothing fits.
fn disk_choices(
    lowering: &Lowering<'_>,
    limits: PerTier<usize>,
    forced: &Forced,
) -> Result<Vec<DiskChoice>, PlanError> {
    let fits_within = |limits: PerTier<usize>, disk: DiskChoice| -> Result<bool, PlanError> {
        let search = Search::new(lowering, limits, forced, disk);
        Ok(search.smallest()?.bytes.fits(&limits))
    };
    let fits = |disk: DiskChoice| fits_within(limits, disk);
    if forced.on_disk.is_none() && fits(DiskChoice::default())? {
        return Ok(vec![DiskChoice::default()]);
    }
    // First shares of state, then shares of frozen weights.
    let of_state = lowering.state_kinds() * DiskChoice::SHARES;
    let of_moments = of_state.min(2 * DiskChoice::SHARES);
    let of_frozen = if lowering.has_frozen() { DiskChoice::SHARES } else { 0 };
    let has_disk = lowering.profile.find_link(Link::DISK_TO_HOST).is_some();
    if limits[Tier::DISK] == 0 || !has_disk || of_state + of_frozen == 0 {
        return match forced.on_disk {
            Some(_) if of_state + of_frozen > 0 => Err(PlanError::Decisions {
                problem: "something on disk was asked for, and no disk was given".to_owned(),
            }),
            _ => Ok(Vec::new()),
        };
    }
    let mut choices: Vec<DiskChoice> = Vec::new();
    for (bytes, slots) in STAGING {
        if !choices.is_empty() && bytes > STAGING_SMALL {
            continue;
        }
        let choice = |share: usize, frozen_share: usize| {
            let slot = lowering.disk_slot_bytes(share.div_ceil(DiskChoice::SHARES)).max(1);
            let frozen_slot = lowering.frozen_slot_bytes().max(1);
            DiskChoice {
                share,
                ring: (bytes / slot).max(2).min(slots),
                frozen_share,
                frozen_ring: (bytes / 8 / frozen_slot).max(2).min(slots),
            }
        };
        let found = match forced.on_disk {
            Some(OnDisk::SecondMoments) => choice(of_moments.min(DiskChoice::SHARES), 0),
            Some(OnDisk::Moments) => choice(of_moments, 0),
            Some(OnDisk::FrozenWeights) => choice(0, of_frozen),
            Some(OnDisk::All) => choice(of_moments, of_frozen),
            None => {
                // With more on disk, less host memory is needed, so search for the least. Whether the disk has room for
                // it is checked later: more than the least would need even more room.
                let boundless = limits.with(Tier::DISK, usize::MAX);
                let of = |level: usize| choice(level.min(of_state), level.saturating_sub(of_state));
                let (mut low, mut high) = (1, of_state + of_frozen);
                while low < high {
                    let middle = low + (high - low) / 2;
                    match fits_within(boundless, of(middle))? {
                        true => high = middle,
                        false => low = middle + 1,
                    }
                }
                // State is written in each step and frozen weights never are, so if frozen weights suffice, move only
                // them.
                let share = low.saturating_sub(of_state);
                let mut found = of(low);
                for share in (share..=of_frozen).take(2).filter(|_| share > 0) {
                    if found.share > 0 && fits(choice(0, share))? {
                        found = choice(0, share);
                    }
                }
                found
            }
        };
        if !choices.contains(&found) && fits(found)? {
            choices.push(found);
        }
        if choices.len() == DISK_CHOICES {
            break;
        }
    }
    Ok(choices)
}

/// A rough step time of the fastest plan, in a fraction of the time of [`plan`]: good for comparing micro-batch sizes.
/// `None` if nothing fits.
///
/// # Errors
/// The task or the decisions are invalid.
pub fn guess_step_seconds(
    task: &Task,
    profile: &HardwareProfile,
    budget: Budget,
    forced: &Forced,
) -> Result<Option<f64>, PlanError> {
    forced.check(task)?;
    let lowering = Lowering::new(task, profile)?;
    let limits = limits(budget, profile);
    let disks = disk_choices(&lowering, limits, forced)?;
    let guess = |&disk: &DiskChoice| Search::new(&lowering, limits, forced, disk).guess();
    Ok(disks.first().and_then(guess))
}

/// Builds the plan for given decisions, and checks it against the budget.
///
/// # Errors
/// The decisions contradict each other, or the plan exceeds the budget.
pub fn plan_decided(
    task: &Task,
    profile: &HardwareProfile,
    budget: Budget,
    decisions: Decisions,
) -> Result<Planned, PlanError> {
    let lowering = Lowering::new(task, profile)?;
    let plan = lowering.lower_with_evaluation(&decisions)?;
    let simulation = crate::simulate(&plan, profile);
    let found = Found { decisions, plan, simulation, plans_built: 1 };
    let prediction = predict(&lowering, &found);
    let limits = limits(budget, profile);
    let vram_min_bytes = prediction.peak_bytes[Tier::DEVICE];
    let Found { decisions, plan, simulation, plans_built } = found;
    let plan =
        check(plan, limits).map_err(|error| PlanError::Unsafe { problem: error.to_string() })?;
    Ok(Planned { plan, decisions, prediction, simulation, vram_min_bytes, plans_built })
}

/// The performance of fixed policies for activations within the same budget, each with the fastest placement of
/// everything else.
///
/// # Errors
/// The task cannot be planned.
pub fn policies(
    task: &Task,
    profile: &HardwareProfile,
    budget: Budget,
) -> Result<Vec<Policy>, PlanError> {
    let lowering = Lowering::new(task, profile)?;
    let forced = Forced::default();
    let limits = limits(budget, profile);
    let disk = disk_choices(&lowering, limits, &forced)?.first().copied().unwrap_or_default();
    let search = Search::new(&lowering, limits, &forced, disk);
    let known = [
        ("keep-all", "every activation stays in device memory", Activations::KeepAll),
        (
            "recompute-all",
            "only layer inputs stay, the rest is recomputed",
            Activations::RecomputeAll,
        ),
        ("offload-all", "every activation waits in host memory", Activations::OffloadAll),
        ("sqrt-n", "the input of every √N-th layer stays", Activations::SquareRoot),
    ];
    Ok(known
        .into_iter()
        .map(|(name, description, activations)| {
            let prediction = search.run_fixed(activations).map(|found| predict(&lowering, &found));
            Policy { name, description, prediction }
        })
        .collect())
}

fn predict(lowering: &Lowering<'_>, found: &Found) -> Prediction {
    let Found { decisions, plan, simulation, .. } = found;
    let (recompute_seconds, recompute_flops) = lowering.recomputed(decisions);
    let computing = simulation.busy_seconds[Queue::COMPUTE];
    Prediction {
        peak_bytes: with_overhead(plan.bytes, lowering.profile),
        step_seconds: simulation.step_seconds,
        busy: PerQueue::from_fn(|queue| simulation.busy_share(queue)),
        recompute_fraction: recompute_seconds / computing.max(f64::MIN_POSITIVE),
        recompute_flops,
        copied_bytes: PerQueue::from_fn(|queue| simulation.bytes(queue)),
    }
}
