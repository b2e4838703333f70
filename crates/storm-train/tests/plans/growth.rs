//! Planning a deep model takes little more per layer than planning a shallow one. The tests do not
//! compare seconds, but how often tensors, values, instructions, and ranges of memory are visited.

use crate::models::{small_card, tiny, tiny_task};
use rayon::ThreadPoolBuilder;
use storm_graph::work::work_of;
use storm_plan::{
    Budget, Decisions, Forced, HardwareProfile, Lowering, PerTier, PlanError, Task, Tier, plan,
    simulate, verify,
};

/// More plans than a search builds and simulates, however deep the model.
const PLANS_MAX: u64 = 250;

const UNLIMITED: PerTier<usize> = PerTier::of_each(usize::MAX);

fn task(layers: usize) -> Task {
    let mut config = tiny("qwen2.5-0.5b");
    config.layer_count = layers;
    tiny_task(&config, 4)
}

/// Visits of each part of planning.
#[derive(Debug)]
struct Work {
    lowering: u64,
    memory: u64,
    checking: u64,
    simulating: u64,
}

impl Work {
    /// The work for one plan.
    fn of(task: &Task, profile: &HardwareProfile, decisions: &Decisions) -> Work {
        let lowering = Lowering::new(task, profile).expect("a valid task");
        // Lowered once before, because sections are visited once for all plans.
        lowering.lower(decisions).expect("valid decisions");
        let (plan, lowered) = work_of(|| lowering.lower(decisions).expect("valid decisions"));
        let (_, memory) = work_of(|| lowering.memory(decisions).expect("valid decisions"));
        let (_, checking) = work_of(|| verify(&plan, UNLIMITED).expect("a safe plan"));
        let (_, simulating) = work_of(|| simulate(&plan, profile));
        Work { lowering: lowered, memory, checking, simulating }
    }
}

#[test]
fn a_plan_takes_work_in_proportion_to_its_layers() {
    let [few, many] = [48usize, 192];
    let allowed = {
        let n_log_n = |layers: usize| layers as f64 * (layers as f64).log2();
        n_log_n(many) / n_log_n(few)
    };
    let card = small_card(1e9, 1e6);
    let [small, large] = [few, many].map(|layers| {
        let task = task(layers);
        [Decisions::resident(&task), Decisions::streamed(&task)]
            .map(|decisions| Work::of(&task, &card, &decisions))
    });
    for (small, large) in small.iter().zip(&large) {
        for (part, small, large) in [
            ("lowering", small.lowering, large.lowering),
            ("memory", small.memory, large.memory),
            ("checking", small.checking, large.checking),
            ("simulating", small.simulating, large.simulating),
        ] {
            let grown = large as f64 / small.max(1) as f64;
            assert!(grown <= allowed, "{part} grows {grown:.1} times: {small} to {large}");
        }
    }
}

#[test]
fn a_search_tries_as_many_plans_however_deep_the_model_is() {
    let card = small_card(1e9, 1e6);
    // One thread, so that it counts all.
    let pool = ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    for layers in [8, 32] {
        let task = task(layers);
        let search = |vram_bytes: u64| {
            let budget = Budget::new(vram_bytes, 1 << 40);
            pool.install(|| work_of(|| plan(&task, &card, budget, &Forced::default())))
        };
        let (refused, _) = search(0);
        let Err(PlanError::TooSmall(least)) = refused else { panic!("nothing fits into nothing") };
        let (planned, searching) = search(least.min_bytes[Tier::DEVICE] + (layers << 10) as u64);
        let planned = planned.expect("it fits");
        let one = Work::of(&task, &card, &planned.decisions);
        let plans = searching / (one.lowering + one.simulating);
        assert!(plans <= PLANS_MAX, "{layers} layers: the work of {plans} plans");
    }
}
