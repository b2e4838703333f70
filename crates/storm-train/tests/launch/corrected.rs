//! Plans whose steps do not take as long as predicted.

use crate::virtual_device::{Site, Truth, VirtualDevice};
use std::sync::LazyLock;
use storm_device::PlanDevice;
use storm_model::preset;
use storm_plan::{Budget, CheckedPlan, Forced, HardwareProfile, RankPlace};
use storm_train::{
    Launch, LaunchRequest, Launched, Precision, Replanned, StepSize, TrainOptions, TrialOptions,
};

const SEQUENCE: usize = 1024;

fn request(trial: Option<TrialOptions>) -> LaunchRequest {
    LaunchRequest {
        rank: RankPlace::default(),
        decided: None,
        model: preset("qwen2.5-0.5b").expect("a preset").into(),
        options: TrainOptions::new(8, SEQUENCE, Precision::Bf16Stochastic),
        step: StepSize::MicroBatches(2),
        profile: HardwareProfile::builtin("reference").expect("built in"),
        budget: Budget::new(4 << 30, 64 << 30),
        forced: Forced::default(),
        trial,
    }
}

/// Copies take `times` times as long as the profile says.
fn slow_copies(times: f64) -> HardwareProfile {
    let mut profile = request(None).profile;
    for link in &mut profile.links {
        link.to_near_bandwidth /= times;
        link.to_far_bandwidth /= times;
        link.duplex_bandwidth /= times;
    }
    profile
}

struct Outcome {
    launch: Launch,
    launched: Launched<VirtualDevice>,
    site: Site,
}

/// Planned, with a trial to come.
fn launch() -> Launch {
    static LAUNCH: LazyLock<Launch> =
        LazyLock::new(|| Launch::new(request(TRIAL)).expect("a plan"));
    LAUNCH.clone()
}

fn start(
    mut launch: Launch,
    profile: HardwareProfile,
    factor: impl Fn(&CheckedPlan) -> f64 + 'static,
) -> Outcome {
    let mut site = Site::new(Truth::new(profile, factor), SEQUENCE);
    let launched = launch.start(&mut site, None).expect("a trainer");
    assert_eq!(
        launched.trainer.plan().bytes,
        launch.plan().planned.plan.bytes,
        "the plan is the one that runs"
    );
    Outcome { launch, launched, site }
}

const TRIAL: Option<TrialOptions> = Some(TrialOptions { warm_up: 1, splits: 1 });

#[test]
fn a_prediction_that_holds_changes_nothing() {
    let before = launch();
    let Outcome { launch, launched, site } = start(launch(), request(None).profile, |_| 1.0);
    assert_eq!(launched.correction, None);
    assert_eq!(*launch.profile(), request(None).profile);
    assert_eq!(launch.plan().planned.decisions, before.plan().planned.decisions);
    // The trainer of the run is not the one that was tried.
    assert_eq!(site.committed.len(), 2);
    assert_eq!(launched.trainer.device().now().as_nanos(), 0);
}

#[test]
fn without_a_trial_nothing_is_tried() {
    let untried = Launch::new(request(None)).expect("a plan");
    let Outcome { launched, site, .. } = start(untried, slow_copies(8.0), |_| 1.0);
    assert_eq!((launched.correction, site.committed.len()), (None, 1));
    assert_eq!(TrialOptions::of_run(49), None);
    let splits = |steps| TrialOptions::of_run(steps).map(|trial| trial.splits);
    assert_eq!((splits(50), splits(199), splits(200)), (Some(2), Some(2), Some(3)));
}

#[test]
fn slow_copies_lead_to_another_plan() {
    let before = launch();
    let Outcome { launch, launched, site } = start(launch(), slow_copies(8.0), |_| 1.0);
    let correction = launched.correction.expect("copies are not as thought");
    assert_eq!(site.corrections, [correction]);
    assert_eq!(correction.outcome, Replanned::Other);
    assert_ne!(launch.plan().planned.decisions, before.plan().planned.decisions);
    assert!(correction.measured_seconds > 1.1 * correction.predicted_seconds, "{correction:?}");
    // The new plan is faster than the first was, and takes as long as predicted.
    assert!(correction.corrected_seconds < correction.measured_seconds, "{correction:?}");
}

#[test]
fn everything_slower_by_the_same_keeps_the_plan() {
    let before = launch();
    let Outcome { launch, launched, .. } = start(launch(), request(None).profile, |_| 1.5);
    let correction = launched.correction.expect("nothing is as thought");
    let kept = launch.plan().planned.decisions == before.plan().planned.decisions;
    assert_eq!(correction.outcome == Replanned::Other, !kept, "{correction:?}");
    // The new prediction is what was measured.
    let off = correction.corrected_seconds / correction.measured_seconds - 1.0;
    assert!(off.abs() < 0.02, "{correction:?}");
}

#[test]
fn time_between_kernels_is_part_of_the_step() {
    for factor in [0.7, 1.5] {
        let truth = Truth { recorded: 0.8, ..Truth::new(request(None).profile, move |_| factor) };
        let mut site = Site::new(truth, SEQUENCE);
        let launched = launch().start(&mut site, None).expect("a trainer");
        let correction = launched.correction.expect("nothing is as thought");
        // A recorded step shows four fifths of this time.
        let off = correction.corrected_seconds / correction.measured_seconds - 1.0;
        assert!(off.abs() < 0.02, "{correction:?}");
    }
}

#[test]
fn a_second_plan_that_is_slower_is_not_taken() {
    let before = launch();
    let first = before.plan().planned.plan.bytes;
    // Any other plan is slower for a reason that no profile knows of.
    let factor = move |plan: &CheckedPlan| if plan.bytes == first { 1.0 } else { 20.0 };
    let Outcome { launch, launched, site } = start(launch(), slow_copies(8.0), factor);
    let correction = launched.correction.expect("copies are not as thought");
    assert_eq!(correction.outcome, Replanned::Kept);
    assert_eq!(launch.plan().planned.decisions, before.plan().planned.decisions);
    assert_eq!(site.committed.len(), 3);
    assert_eq!(site.committed.first(), site.committed.last());
    // It is predicted by the corrected profile, not by the wrong one.
    let off = correction.corrected_seconds / correction.measured_seconds - 1.0;
    assert!(off.abs() < 0.1, "{correction:?}");
}
