//! From a budget to a trainer that is ready: plans, puts the plan on a device, and plans anew where
//! the machine has less than was hoped for.

use crate::{TrainError, TrainOptions, Trainer, training_task};
use std::sync::Arc;
use storm_device::cuda::{CudaError, HostLimit};
use storm_device::{DeviceError, PlanDevice};
use storm_exec::ExecError;
use storm_model::ModelConfig;
use storm_plan::{
    Bottleneck, Budget, Decisions, Forced, HardwareProfile, Planned, Prediction, Tier, plan,
};

/// What is to be trained, and within what.
#[derive(Clone, Copy, Debug)]
pub struct Preparation<'a> {
    /// The model.
    pub config: &'a ModelConfig,
    /// How it is trained.
    pub options: &'a TrainOptions,
    /// Micro-batches per step.
    pub accumulate: usize,
    /// What the machine can do.
    pub profile: &'a HardwareProfile,
    /// What it may take.
    pub budget: Budget,
    /// What the planner may not decide.
    pub forced: &'a Forced,
}

/// A trainer that is ready for its first step.
pub struct Prepared<D: PlanDevice> {
    /// The trainer, with parameters as they start.
    pub trainer: Trainer<D>,
    /// What was decided.
    pub decisions: Decisions,
    /// What it will do.
    pub prediction: Prediction,
    /// What it would be faster with more of.
    pub bottleneck: Bottleneck,
}

/// What happens on the way, for people.
#[derive(Clone, Debug)]
pub enum Notice<'a> {
    /// A plan is made, and is about to be put on the device.
    Planned(&'a Prediction),
    /// The machine refused it; a plan within less follows.
    Refused {
        /// By whom and why.
        reason: &'a str,
        /// What is planned with now.
        budget: Budget,
    },
}

/// Other processes may take memory at the same time as this one, but not for ever.
const ATTEMPTS_MAX: usize = 4;

/// The share of memory that is kept clear of a limit just learned, and the most of it: the limit may
/// move a little.
const SLACK: u64 = 64;
const SLACK_BYTES_MAX: u64 = 64 << 20;

/// Plans a step, takes all memory for it, and initializes the model. Where page-locked host memory or
/// device memory is refused, or the process holds more of the device than the profile says, it plans
/// anew with what there is.
///
/// `device` makes the options of a device; they must bound it to the budget as given here, whatever
/// is planned with.
///
/// # Errors
/// [`PlanError::TooSmall`](storm_plan::PlanError::TooSmall) if what there is is not enough; what
/// planning or the device refuse otherwise.
pub fn prepare<D: PlanDevice>(
    preparation: &Preparation<'_>,
    mut device: impl FnMut() -> D::Options,
    mut tell: impl FnMut(Notice<'_>),
) -> Result<Prepared<D>, TrainError> {
    let Preparation { config, options, accumulate, profile, mut budget, forced } = *preparation;
    let task = training_task(config, options, accumulate)?;
    for attempt in 1.. {
        let planned = plan(&task, profile, budget, forced)?;
        let bottleneck = planned.bottleneck();
        let Planned { plan, decisions, prediction, .. } = planned;
        tell(Notice::Planned(&prediction));
        let plan = Arc::new(plan);
        let error = match Trainer::new(config, options.clone(), plan, device()) {
            Ok(trainer) => return Ok(Prepared { trainer, decisions, prediction, bottleneck }),
            Err(error) => error,
        };
        match smaller(&error, budget, &prediction) {
            Some(less) if attempt < ATTEMPTS_MAX => budget = less,
            _ => return Err(error),
        }
        tell(Notice::Refused { reason: &error.to_string(), budget });
    }
    unreachable!("attempts end")
}

/// What to plan with after an error; none if less memory would not help.
fn smaller(error: &TrainError, budget: Budget, planned: &Prediction) -> Option<Budget> {
    let TrainError::Exec(ExecError::Device(DeviceError::Cuda(error))) = error else { return None };
    let less = |bytes: u64, excess: u64| {
        let slack = (bytes / SLACK).min(SLACK_BYTES_MAX);
        bytes.saturating_sub(excess).saturating_sub(slack)
    };
    match error {
        CudaError::PinnedMemory { wanted_bytes, limit } => {
            let wanted = *wanted_bytes as u64;
            let available = match limit {
                HostLimit::LockedMemory { limit_bytes } | HostLimit::Given { limit_bytes } => {
                    *limit_bytes
                }
                // It did not say how much it would give.
                HostLimit::System { .. } => wanted / 8 * 7,
                HostLimit::Machine { available_bytes }
                | HostLimit::ControlGroup { available_bytes, .. } => *available_bytes,
            };
            let ram_bytes = less(planned.peak_bytes[Tier::HOST].min(available), 0);
            Some(budget.with(Tier::HOST, ram_bytes))
        }
        CudaError::OutOfMemory { wanted_bytes, free_bytes, .. } => {
            let missing = (*wanted_bytes as u64).saturating_sub(*free_bytes as u64);
            let vram_bytes = less(planned.peak_bytes[Tier::DEVICE], missing);
            Some(budget.with(Tier::DEVICE, vram_bytes))
        }
        CudaError::OverBudget { in_use, budget_bytes, .. } => {
            let excess = in_use.bytes.saturating_sub(*budget_bytes);
            let vram_bytes = less(planned.peak_bytes[Tier::DEVICE], excess);
            Some(budget.with(Tier::DEVICE, vram_bytes))
        }
        _ => None,
    }
}
