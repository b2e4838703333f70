//! Plans of several ranks: estimates count what ranks send each other, and guide the planner.

use crate::models::{FAMILIES, budget, gib, planned, profile, real_options, small_card, tiny};
use storm_model::{ModelConfig, preset};
use storm_plan::{
    CollectiveKind, Forced, HardwareProfile, Lanes, Lowering, MachineLink, RankLink, RankPlace,
    Task, Tier, UpdateTime, Work, instruction_seconds, plan, random_decisions, simulate,
};
use storm_train::{TrainOptions, rank_task};

const RAM: u64 = 110 << 30;

fn linked(profile: HardwareProfile, bandwidth: f64, share: f64) -> HardwareProfile {
    let link = RankLink { ranks: 4, bandwidth, latency_seconds: 1e-5, share, machines: None };
    HardwareProfile { ranks: Some(link), ..profile }
}

fn task_of(config: &ModelConfig, options: &TrainOptions, steps: usize, ranks: u32) -> Task {
    task_on_machines(config, options, steps, (ranks, ranks))
}

/// The same on machines of `machine` ranks.
fn task_on_machines(
    config: &ModelConfig,
    options: &TrainOptions,
    steps: usize,
    (ranks, machine): (u32, u32),
) -> Task {
    let place = RankPlace::on_machines(ranks - 1, ranks, machine);
    rank_task(config, options, steps, place).expect("a valid model")
}

/// A model with parameters in several pieces, so that ranks own parts of them.
fn in_pieces() -> ModelConfig {
    let mut config = tiny("llama-3.2-1b");
    (config.hidden_size, config.head_dim, config.intermediate_size) = (128, 32, 1200);
    config.vocab_size = 2500;
    config
}

/// Compares the estimate of random decisions with the simulation of their plans.
#[test]
fn estimates_with_ranks_are_close_to_their_simulation() {
    // First the link between ranks is the limit, then kernels, then collectives that slow kernels.
    for (bandwidth, share) in [(1e6, 0.0), (1e9, 0.0), (1e7, 0.2)] {
        let profile = linked(small_card(1e9, 1e8), bandwidth, share);
        let models = FAMILIES.into_iter().map(tiny).chain([in_pieces()]);
        for (number, config) in models.enumerate() {
            let mut ratios = Vec::new();
            for seed in 0..18 {
                let (machines, lanes) = [
                    ((2, 2), "2"),
                    ((2, 2), "4"),
                    ((4, 4), "4"),
                    ((2, 2), "2x4"),
                    ((4, 2), "2x2"),
                    ((4, 2), "4x2"),
                ][seed as usize % 6];
                let lanes: Lanes = lanes.parse().expect("lanes");
                let options = TrainOptions { lanes, ..crate::models::tiny_options() };
                let task = task_on_machines(&config, &options, 2 * lanes.count(), machines);
                let decisions = random_decisions(&task, seed);
                let lowering = Lowering::new(&task, &profile).expect("a lowering");
                let plan = lowering.lower(&decisions).expect("decisions that work");
                let estimate = lowering.estimate_seconds(&decisions).expect("the same");
                ratios.push(estimate / simulate(&plan, &profile).step_seconds);
            }
            let off = |ratio: &f64| (ratio - 1.0).abs();
            let worst = ratios.iter().map(off).fold(0.0, f64::max);
            let mean = ratios.iter().map(off).sum::<f64>() / ratios.len() as f64;
            let about = format!("model {number}, {bandwidth} B/s: {mean}, {worst}: {ratios:?}");
            // A step that mostly waits for the link shows what the estimate leaves out: which
            // pieces of a block come first.
            let (worst_max, mean_max) = if bandwidth > 1e6 { (0.04, 0.01) } else { (0.12, 0.06) };
            assert!(worst < worst_max && mean < mean_max, "{about}");
        }
    }
}

/// Four ranks of a machine send one f32 sum of their lanes to the other machine, instead of four
/// lanes in bf16.
#[test]
fn two_levels_halve_what_machines_of_four_exchange() {
    let config = preset("qwen2.5-1.5b").expect("a preset");
    let lanes = "2x4".parse().expect("lanes");
    let options = TrainOptions { lanes, ..real_options(8) };
    let mut profile = linked(profile("h200"), 1e15, 0.0);
    let link = profile.ranks.as_mut().expect("a link");
    link.latency_seconds = 0.0;
    link.machines = Some(MachineLink { ranks: 4, bandwidth: 1e9 });
    let seconds = |machine: u32| -> f64 {
        let task = task_on_machines(&config, &options, 8, (8, machine));
        let decisions = random_decisions(&task, 1);
        let lowering = Lowering::new(&task, &profile).expect("a lowering");
        let plan = lowering.lower(&decisions).expect("decisions that work");
        let timed = plan.instructions.iter().zip(instruction_seconds(&plan, &profile));
        let exchanges = timed.filter(|(instruction, _)| {
            matches!(&instruction.work,
                Work::Collective(collective) if collective.kind != CollectiveKind::Gather)
        });
        exchanges.map(|(_, seconds)| seconds).sum()
    };
    let (flat, levels) = (seconds(8), seconds(4));
    assert!((flat / levels - 2.0).abs() < 0.05, "{flat} s and {levels} s");
}

/// With everything on the device, the planner can only choose when to gather. Slow gathers run
/// beside the next forward pass.
#[test]
fn a_slow_link_defers_the_gather_of_weights() {
    let config = preset("qwen2.5-1.5b").expect("a preset");
    let options = TrainOptions { lanes: 4.into(), ..real_options(8) };
    let task = task_of(&config, &options, 4, 4);
    let updates = [UpdateTime::EndOfStep, UpdateTime::NextStep];
    let mut found = Vec::new();
    for bandwidth in [1e15, 1e11] {
        let mut linked = linked(profile("h200"), bandwidth, 0.0);
        linked.ranks.as_mut().expect("a link").latency_seconds = 0.0;
        let with = |update| {
            let forced = Forced { update, ..Forced::default() };
            plan(&task, &linked, budget(gib(60), RAM), &forced).expect("a plan")
        };
        let chosen = with(None);
        let forced = updates.map(|update| with(Some(update)).prediction.step_seconds);
        let seconds = chosen.prediction.step_seconds;
        assert!(forced.iter().all(|other| seconds <= other * 1.001), "{seconds}: {forced:?}");
        found.push((chosen.decisions.update, forced[0] / forced[1]));
    }
    assert_eq!([found[0].0, found[1].0], updates, "{found:?}");
    assert!(found[1].1 > 1.02, "{found:?}");
}

/// Streamed weights come from the host and from other ranks. The estimate of the chosen plan holds.
#[test]
fn estimates_of_chosen_plans_hold() {
    let config = preset("qwen2.5-1.5b").expect("a preset");
    let options = TrainOptions { lanes: 4.into(), ..real_options(8) };
    let task = task_of(&config, &options, 16, 4);
    for (bandwidth, vram) in [(3e11, 20), (1e10, 9)] {
        let profile = linked(profile("h200"), bandwidth, 0.05);
        let chosen = planned(&task, &profile, budget(gib(vram), RAM));
        let lowering = Lowering::new(&task, &profile).expect("a lowering");
        let estimate = lowering.estimate_seconds(&chosen.decisions).expect("they were planned");
        let ratio = estimate / chosen.prediction.step_seconds;
        assert!((ratio - 1.0).abs() < 0.01, "{bandwidth} B/s, {vram} GiB: {ratio}");
    }
}

/// If a lane is one group, host memory holds only the gradients that the rank owns.
#[test]
fn gradients_in_host_memory_are_those_that_a_rank_owns() {
    let config = preset("qwen2.5-7b").expect("a preset");
    let profile = linked(profile("h200"), 1e11, 0.0);
    let host_bytes = |ranks: u32, micro_batches: usize| {
        let options = TrainOptions { lanes: 8.into(), ..real_options(1) };
        let task = task_of(&config, &options, micro_batches, ranks);
        let lowering = Lowering::new(&task, &profile).expect("a lowering");
        let mut decisions = planned(&task, &profile, budget(gib(140), 4 * RAM)).decisions;
        for (stage, decided) in decisions.stages.iter_mut().enumerate() {
            let repeat = task.program().stages()[stage].repeat;
            decided.gradients = storm_plan::Streaming { pinned: 0, ring: repeat.min(2) };
        }
        decisions.update = UpdateTime::NextStep;
        for group in &mut decisions.groups {
            group.micro_batches = 1;
            group.times = micro_batches / 8;
        }
        decisions.groups.truncate(1);
        let plan = lowering.lower(&decisions).expect("decisions that work");
        let regions = plan.regions.iter().filter(|region| region.tier == Tier::HOST);
        let gradients = regions.filter(|region| region.name.starts_with("gradients of"));
        gradients.map(|region| region.bytes).sum::<usize>()
    };
    let (whole, own) = (host_bytes(8, 16), host_bytes(8, 8));
    assert!(own * 7 < whole, "{own} of {whole} bytes");
}
