//! Checks that results are bit-identical under every plan, on any device.

use crate::fp8::multiplies_fp8;
use crate::models::{LEARNING_RATE, batch, configs, options, run_batches};
use std::sync::Arc;
use storm_device::{Device, DeviceError, PlanDevice};
use storm_model::ModelConfig;
use storm_plan::{
    Budget, CheckedPlan, Forced, HardwareProfile, Lanes, Lowering, PlanError, Tier, check, plan,
    random_decisions,
};
use storm_train::{Batch, Precision, Snapshot, TrainError, TrainOptions, Trainer, training_task};

/// Results for one family.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanReport {
    /// Model type, such as `qwen3`.
    pub family: &'static str,
    /// Training precision.
    pub precision: Precision,
    /// Plans tested.
    pub plans: usize,
    /// Steps per plan.
    pub steps: usize,
    /// Plans whose bits differ from the resident run, or whose snapshot differs from their state.
    /// Named by the seed of a random plan, or by the budget.
    pub differing: Vec<String>,
}

impl PlanReport {
    /// Whether every plan gave the same bits.
    pub fn passed(&self) -> bool {
        self.differing.is_empty()
    }
}

const MICRO_BATCHES: usize = 4;

/// Groups per step and lanes per group, in turn for each family.
const LANES: [(usize, usize); 4] = [(1, 1), (1, 2), (1, 4), (2, 2)];

/// How many budgets the planner's own choice is tested with.
const BUDGETS: u64 = 3;

/// Trains small models of every family under `plans` random plans and under the planner's choice at
/// three budgets. Compares losses, norms and final parameters bit for bit with a resident run, and
/// snapshots of the final state with that state. `device` returns the options of a device that
/// delays its work at random, from a seed.
///
/// # Errors
/// A device failed, or a plan could not be built.
pub fn verify_plans<R: Device, P: PlanDevice>(
    plans: usize,
    steps: usize,
    profile: &HardwareProfile,
    open: impl Fn(usize) -> Result<R, DeviceError>,
    device: impl Fn(u64) -> P::Options,
    mut progress: impl FnMut(&str),
) -> Result<Vec<PlanReport>, TrainError> {
    let mut reports = Vec::new();
    let configs = configs()?;
    // The overhead of the process is not tested here.
    let profile = HardwareProfile { overhead_bytes: 0, ..profile.clone() };
    let mut cases: Vec<(&ModelConfig, Precision)> = Vec::new();
    for (number, config) in configs.iter().enumerate() {
        let precision = match number % 2 {
            0 => Precision::Bf16Stochastic,
            _ => Precision::Bf16Master,
        };
        cases.push((config, precision));
    }
    if multiplies_fp8(&open)? {
        // Two families: with biases, and with gated units.
        cases.extend([0, 1].map(|family| (&configs[family], Precision::Fp8)));
    }
    let families = cases.len();
    for (number, &(config, precision)) in cases.iter().enumerate() {
        let family = config.family.model_type();
        let batches: Vec<Batch> =
            (0..MICRO_BATCHES).map(|m| batch(config, 20 + m as u64)).collect();
        let (groups, in_group) = LANES[number % LANES.len()];
        let lanes = Lanes::in_groups(groups, in_group).unwrap_or(Lanes::ONE);
        let options = TrainOptions { lanes, ..options(precision) };
        let expected = run_batches(config, &options, steps, &batches, &open)?;
        let task = training_task(config, &options, MICRO_BATCHES)?;
        let lowering = Lowering::new(&task, &profile)?;
        let mut candidates: Vec<(String, CheckedPlan)> = Vec::new();
        for index in 0..plans.div_ceil(families) {
            let seed = (number + families * index) as u64;
            let plan = lowering.lower(&random_decisions(&task, seed))?;
            let budget = plan.bytes;
            let plan = check(plan, budget)
                .map_err(|error| PlanError::Unsafe { problem: error.to_string() })?;
            candidates.push((format!("random decisions {seed}"), plan));
        }
        let ample = Budget::new(1 << 40, 1 << 40);
        let forced = Forced::default();
        let everything = plan(&task, &profile, ample, &forced)?;
        let (most, least) =
            (everything.prediction.peak_bytes[Tier::DEVICE], everything.vram_min_bytes);
        for part in 0..BUDGETS {
            let vram_bytes = least + (most - least) * part / (BUDGETS - 1);
            let chosen = plan(&task, &profile, ample.with(Tier::DEVICE, vram_bytes), &forced)?;
            candidates.push((format!("budget of {vram_bytes} bytes"), chosen.plan));
        }
        let mut differing = Vec::new();
        let count = candidates.len();
        for (index, (what, plan)) in candidates.into_iter().enumerate() {
            progress(&format!("{family} {precision:?}, plan {} of {count}", index + 1));
            let (plan, device) = (Arc::new(plan), device(index as u64));
            let mut trainer = Trainer::<P>::new(config, options.clone(), plan, device)?;
            let found = run_planned(&mut trainer, steps, &batches)?;
            if found != expected {
                differing.push(what.clone());
            }
            if !is_snapshot_exact(&mut trainer, &batches)? {
                differing.push(format!("{what}, its snapshot"));
            }
        }
        reports.push(PlanReport { family, precision, plans: count, steps, differing });
    }
    Ok(reports)
}

/// All losses, norms and final parameters of a run under a plan.
fn run_planned<P: PlanDevice>(
    trainer: &mut Trainer<P>,
    steps: usize,
    batches: &[Batch],
) -> Result<Vec<u32>, TrainError> {
    let mut bits = Vec::new();
    for _ in 0..steps {
        let report = trainer.step(batches, LEARNING_RATE)?;
        bits.extend([report.loss.to_bits(), report.gradient_norm.to_bits()]);
    }
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    for name in names {
        bits.extend(trainer.read(&name)?.into_iter().map(f32::to_bits));
    }
    Ok(bits)
}

/// Whether a snapshot right after a step matches the state, twice with the same memory.
fn is_snapshot_exact<P: PlanDevice>(
    trainer: &mut Trainer<P>,
    batches: &[Batch],
) -> Result<bool, TrainError> {
    let mut snapshot = Snapshot::new(trainer)?;
    for _ in 0..2 {
        trainer.step(batches, LEARNING_RATE)?;
        snapshot.take(trainer)?;
        if !snapshot.is_of(trainer)? {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_device::cpu::{CpuDevice, CpuPlanDevice, CpuPlanOptions};

    #[test]
    fn plans_on_the_cpu_are_exact() {
        let profile = HardwareProfile::builtin("reference").expect("built in");
        let device = |seed| CpuPlanOptions { chaos_seed: Some(seed), ..CpuPlanOptions::default() };
        let reports =
            verify_plans::<_, CpuPlanDevice>(5, 1, &profile, CpuDevice::new, device, |_| {})
                .expect("it runs");
        // Five families, two of them also in fp8.
        assert_eq!(reports.len(), 7);
        for report in reports {
            assert!(report.passed() && report.plans == 4, "{report:?}");
        }
    }
}
