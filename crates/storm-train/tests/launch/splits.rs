//! Sizes of micro-batches: which are tried, and which is chosen.

use crate::virtual_device::{Site, Truth, VirtualDevice};
use std::rc::Rc;
use std::sync::LazyLock;
use storm_device::PlanDevice;
use storm_model::{ModelConfig, preset};
use storm_plan::{Budget, CheckedPlan, Forced, HardwareProfile, RankPlace};
use storm_train::{
    Launch, LaunchRequest, Launched, Precision, StepSize, TrainOptions, TrialOptions,
};

const SEQUENCE: usize = 1024;
const SEQUENCES: usize = 64;

fn h200() -> HardwareProfile {
    HardwareProfile::builtin("h200").expect("built in")
}

/// Layers of a model of 1B parameters.
fn config() -> ModelConfig {
    let mut config = preset("llama-3.2-1b").expect("a preset");
    (config.layer_count, config.vocab_size) = (2, 4096);
    config
}

fn request(step: StepSize, splits: usize) -> LaunchRequest {
    LaunchRequest {
        rank: RankPlace::default(),
        decided: None,
        model: config().into(),
        options: TrainOptions::new(4, SEQUENCE, Precision::Bf16Stochastic),
        step,
        profile: h200(),
        budget: Budget::new(60 << 30, 64 << 30),
        forced: Forced::default(),
        trial: Some(TrialOptions { warm_up: 1, splits }),
    }
}

const TOKENS: StepSize = StepSize::Tokens(SEQUENCES * SEQUENCE);

/// Sequences in a micro-batch of a plan.
fn batch(plan: &CheckedPlan) -> usize {
    let is_tokens = |name: &str| name == "tokens";
    let input = plan.inputs.iter().find(|input| is_tokens(&input.tensor.name));
    input.expect("it reads tokens").tensor.shape.elements() / SEQUENCE
}

struct Outcome {
    /// The size that is predicted to be the fastest.
    predicted: usize,
    launch: Launch,
    launched: Launched<VirtualDevice>,
    site: Site,
}

/// Planned for the given tokens of a step, to be tried with up to three sizes.
fn launch() -> Launch {
    static LAUNCH: LazyLock<Launch> =
        LazyLock::new(|| Launch::new(request(TOKENS, 3)).expect("a plan"));
    LAUNCH.clone()
}

fn start(mut launch: Launch, truth: impl FnOnce(usize) -> Truth) -> Outcome {
    let predicted = launch.plan().batch;
    let mut site = Site::new(truth(predicted), SEQUENCE);
    let launched = launch.start(&mut site, None).expect("a trainer");
    assert_eq!(batch(&launch.plan().planned.plan), launch.plan().batch);
    assert_eq!(launched.trainer.options().batch, launch.plan().batch);
    assert_eq!(launched.trainer.device().now().as_nanos(), 0, "it has made no step");
    Outcome { predicted, launch, launched, site }
}

/// Steps with micro-batches of some sizes are slower, for a reason that no profile knows of.
fn slow(is_slow: impl Fn(usize) -> bool + 'static) -> Truth {
    let factor = move |plan: &CheckedPlan| if is_slow(batch(plan)) { 1.5 } else { 1.0 };
    Truth::new(h200(), factor)
}

#[test]
fn the_size_that_is_fastest_on_the_device_is_taken() {
    let Outcome { predicted, launch, launched, .. } =
        start(launch(), |predicted| slow(move |batch| batch == predicted));
    let splits = &launched.splits;
    assert!((2..=3).contains(&splits.len()), "{splits:?}");
    assert_eq!(splits[0].batch, predicted);
    assert_ne!(launch.plan().batch, predicted, "{splits:?}");
    let fastest = splits.iter().min_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds));
    assert_eq!(fastest.map(|split| split.batch), Some(launch.plan().batch));
    for split in splits {
        assert_eq!(split.batch * split.accumulate, SEQUENCES);
    }
    // The chosen one is as predicted, so nothing is corrected.
    assert_eq!(launched.correction, None);
}

#[test]
fn a_prediction_that_holds_is_kept() {
    let Outcome { launch, launched, .. } = start(launch(), |_| slow(|_| false));
    let best = launched
        .splits
        .iter()
        .min_by(|a, b| a.predicted_seconds.total_cmp(&b.predicted_seconds))
        .expect("one is tried");
    assert_eq!(launch.plan().batch, best.batch, "{:?}", launched.splits);
    assert!(launched.splits.len() <= 3);
}

#[test]
fn others_are_tried_only_if_asked_for() {
    let truth = |predicted: usize| slow(move |batch| batch == predicted);
    let Outcome { predicted, launch, launched, .. } =
        start(Launch::new(request(TOKENS, 1)).expect("a plan"), truth);
    assert_eq!((launch.plan().batch, launched.splits.len()), (predicted, 1));
    assert!(launched.correction.is_some(), "the plan itself is tried all the same");
    // A given size stays, too, such as that of a resumed run.
    let given = request(StepSize::MicroBatches(SEQUENCES / 4), 3);
    let Outcome { launch, launched, .. } = start(Launch::new(given).expect("a plan"), truth);
    assert_eq!((launch.plan().batch, launched.splits.len()), (4, 1));
}

#[test]
fn a_size_without_memory_is_passed_over() {
    let truth = |predicted: usize| Truth {
        refuses: Rc::new(move |plan| batch(plan) != predicted),
        ..slow(move |batch| batch == predicted)
    };
    let Outcome { predicted, launch, launched, site } = start(launch(), truth);
    assert_eq!((launch.plan().batch, launched.splits.len()), (predicted, 1));
    assert!(!site.not_tried.is_empty() && !site.not_tried.contains(&predicted));
}

/// Few rows leave multiprocessors idle, and mean more kernel launches and shorter sums.
#[test]
fn micro_batches_of_few_rows_are_priced() {
    let seconds = |batch: usize, multiprocessors: Option<u32>| {
        let mut request = request(StepSize::MicroBatches(SEQUENCES / batch), 1);
        (request.options.batch, request.profile.multiprocessors) = (batch, multiprocessors);
        request.plan().expect("it fits").predicted_seconds()
    };
    let known = h200().multiprocessors;
    assert_eq!(known, Some(132));
    let [one, four, sixteen] = [1, 4, 16].map(|batch| seconds(batch, known));
    assert!(one > 1.15 * four, "{one} and {four}");
    assert!(four < 1.1 * sixteen, "{four} and {sixteen}");
    // Sixteen sequences are many rows, so what was measured for them holds either way.
    let [one, sixteen_unpriced] = [1, 16].map(|batch| seconds(batch, None));
    assert!((sixteen / sixteen_unpriced - 1.0).abs() < 0.03, "{sixteen} and {sixteen_unpriced}");
    assert!(one < 1.1 * sixteen_unpriced, "{one} and {sixteen_unpriced}");
}
