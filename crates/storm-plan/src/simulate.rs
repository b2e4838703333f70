//! Predicts the time of a plan.
//!
//! The host issues instructions one after another. Each queue runs its own in that order, so an instruction that waits
//! delays all those behind it. Waits only refer back in issue order, so a single pass finds every start and end.

mod cost;
mod queues;
mod repeat;

use crate::check::host::HostWork;
use crate::plan::{InstructionId, Plan, Run, SegmentId};
use crate::profile::HardwareProfile;
use crate::queue::{PerQueue, Queue};
pub use cost::instruction_seconds;
use queues::Queues;
use storm_graph::{TensorClass, Training};

/// All classes, in the order of [`Simulation::transfers`].
const CLASSES: [TensorClass; 9] = [
    TensorClass::Input,
    TensorClass::Parameter(Training::Trainable),
    TensorClass::Parameter(Training::Frozen),
    TensorClass::Parameter(Training::Running),
    TensorClass::Gradient,
    TensorClass::OptimizerState,
    TensorClass::Cache,
    TensorClass::Activation,
    TensorClass::Scratch,
];

/// The simulated execution of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// From empty queues to empty queues.
    pub step_seconds: f64,
    /// The same for a flush, if the plan has one.
    pub flush_seconds: Option<f64>,
    /// The same for the evaluation of a group of micro-batches, if the plan has one.
    pub evaluation_seconds: Option<f64>,
    /// Busy time of each queue in a step.
    pub busy_seconds: PerQueue<f64>,
    /// Why the compute queue is idle.
    pub stalls: Stalls,
    /// Copies of a step, by queue and class, without empty entries.
    pub transfers: Vec<Transfer>,
    /// In the order of [`Plan::step`]. They sum to the step.
    pub segments: Vec<SegmentTime>,
    /// Every instruction that was followed, in issue order; empty unless requested. Repetitions
    /// equal to those before them are left out, and so is the flush.
    pub timeline: Vec<Span>,
}

/// Idle time of the compute queue, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stalls {
    /// Waiting for copies of each queue: to fetch an operand, or to free its bytes.
    pub copy_seconds: PerQueue<f64>,
    /// Waiting for the host to issue the next kernel.
    pub launch_seconds: f64,
    /// Waiting for other ranks.
    pub rank_seconds: f64,
    /// At the end of the step, waiting for the last copies.
    pub drain_seconds: f64,
    /// After that, waiting for the data of the next step.
    pub data_seconds: f64,
    /// The part of all this that the disk causes. Kernels never wait for the disk itself, but for copies that do, so
    /// this is contained in the other times.
    pub disk_seconds: f64,
}

impl Stalls {
    /// The total. The disk's part is contained in the other times.
    pub fn total_seconds(&self) -> f64 {
        let copies: f64 = self.copy_seconds.iter().map(|(_, seconds)| seconds).sum();
        copies + self.launch_seconds + self.rank_seconds + self.drain_seconds + self.data_seconds
    }
}

/// Copies of one class over one link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transfer {
    /// The class of tensors.
    pub class: TensorClass,
    /// The link's queue.
    pub queue: Queue,
    /// In a step.
    pub bytes: u64,
    /// Time they take.
    pub busy_seconds: f64,
    /// Time that the compute queue waits for them, including at the end of the step.
    pub exposed_seconds: f64,
}

impl Transfer {
    /// The fraction hidden behind compute, 0 to 1.
    pub fn hidden_share(&self) -> f64 {
        match self.busy_seconds > 0.0 {
            true => (1.0 - self.exposed_seconds / self.busy_seconds).clamp(0.0, 1.0),
            false => 1.0,
        }
    }
}

/// The time of a run of a segment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SegmentTime {
    /// The segment.
    pub segment: SegmentId,
    /// The number of runs.
    pub times: usize,
    /// From the end of the compute queue's work before it to the end of its own; the last one ends
    /// with the step.
    pub seconds: f64,
}

/// One instruction's time on its queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Which.
    pub instruction: InstructionId,
    /// Where.
    pub queue: Queue,
    /// From the start of the step.
    pub start_seconds: f64,
    /// The same.
    pub end_seconds: f64,
    /// The last instruction it waited for; `None` if its own queue or the host delayed it.
    pub waited_for: Option<InstructionId>,
}

impl Simulation {
    /// The share of the step in which a queue is busy, 0 to 1.
    pub fn busy_share(&self, queue: Queue) -> f64 {
        match self.step_seconds > 0.0 {
            true => self.busy_seconds[queue] / self.step_seconds,
            false => 0.0,
        }
    }

    /// Bytes that a queue copies in a step.
    pub fn bytes(&self, queue: Queue) -> u64 {
        self.transfers.iter().filter(|t| t.queue == queue).map(|t| t.bytes).sum()
    }
}

/// Predicts a step of a plan that the checker accepts.
///
/// # Panics
/// The plan refers to something that does not exist, or copies over a link that the profile lacks.
pub fn simulate(plan: &Plan, profile: &HardwareProfile) -> Simulation {
    run(plan, profile, None)
}

/// [`simulate`], with [`Simulation::timeline`].
///
/// # Panics
/// Like [`simulate`].
pub fn simulate_with_timeline(plan: &Plan, profile: &HardwareProfile) -> Simulation {
    run(plan, profile, Some(Vec::new()))
}

fn run(plan: &Plan, profile: &HardwareProfile, timeline: Option<Vec<Span>>) -> Simulation {
    let seconds = cost::instruction_seconds(plan, profile);
    let host_work = HostWork::new(plan);
    let mut queues = Queues::new(plan, &host_work, &seconds, profile.launch_seconds, timeline);
    let mut segments = Vec::with_capacity(plan.step.len());
    for run in &plan.step {
        let before = queues.compute_end();
        queues.repeat(run);
        let &Run { segment, times } = run;
        segments.push(SegmentTime { segment, times, seconds: queues.compute_end() - before });
    }
    let waited = *queues.waited();
    let data_seconds = queues.data_seconds();
    let drain_seconds = queues.drain() - data_seconds;
    if let Some(last) = segments.last_mut() {
        last.seconds += drain_seconds + data_seconds;
    }
    let alone = |segment| {
        let mut queues = Queues::new(plan, &host_work, &seconds, profile.launch_seconds, None);
        queues.repeat(&Run { segment, times: 1 });
        queues.end()
    };
    let (flush_seconds, evaluation_seconds) = (plan.flush.map(alone), plan.evaluation.map(alone));
    let step_seconds = queues.end();
    let stalls = Stalls {
        copy_seconds: waited.exposed.map(|by_class| by_class.iter().sum()),
        launch_seconds: waited.launch,
        rank_seconds: waited.ranks,
        drain_seconds,
        data_seconds,
        disk_seconds: disk_seconds(plan, &host_work, &seconds, profile, step_seconds),
    };
    Simulation {
        step_seconds,
        flush_seconds,
        evaluation_seconds,
        busy_seconds: cost::busy_seconds(plan, &seconds),
        stalls,
        transfers: cost::transfers(plan, &seconds, queues.waited()),
        segments,
        timeline: queues.into_timeline(),
    }
}

/// How much shorter a step would be if the disk took no time.
fn disk_seconds(
    plan: &Plan,
    host_work: &HostWork,
    seconds: &[f64],
    profile: &HardwareProfile,
    step_seconds: f64,
) -> f64 {
    if !plan.queues().any(|queue| plan.links.is_disk(queue)) {
        return 0.0;
    }
    let without = |(id, &seconds)| match plan.links.is_disk(plan.queue(id)) {
        true => 0.0,
        false => seconds,
    };
    let seconds: Vec<f64> = plan.ids().zip(seconds).map(without).collect();
    let mut queues = Queues::new(plan, host_work, &seconds, profile.launch_seconds, None);
    plan.step.iter().for_each(|run| queues.repeat(run));
    (step_seconds - queues.end()).max(0.0)
}
