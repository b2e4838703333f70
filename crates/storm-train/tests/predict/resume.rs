//! Runs that stop in any phase, or are killed at any moment, and resume.

use crate::support::{
    Case, DIRECTIONS, F32, Heard, HeldOut, STEPS, always, cases, end, predict, run, run_options,
    whole,
};
use storm_train::{Direction, PredictOptions, RunOptions, Stop};

/// Settings with which some jumps stay and some are undone.
pub(crate) fn mixed(direction: Direction) -> Vec<(PredictOptions, HeldOut)> {
    vec![
        (predict(direction), HeldOut::Alike),
        (PredictOptions { margin: 0.0, ..predict(direction) }, HeldOut::Opposed),
    ]
}

#[test]
fn a_run_that_stops_after_any_step_goes_on_bit_by_bit() {
    // Every direction in another case, stopped after other steps. Long tests stop after every step of each.
    let every = if std::env::var_os("STORM_LONG_TESTS").is_some() { 1 } else { 6 };
    let mut first_steps = (1..=every).cycle();
    for (direction, case) in DIRECTIONS.into_iter().zip(cases().into_iter().cycle()) {
        let mut settings = mixed(direction);
        // Directions that keep something between jumps.
        if let Direction::Outer { .. } | Direction::WeightAverage { .. } = direction {
            settings.push((always(direction, -0.5), HeldOut::Alike));
        }
        for settings in settings {
            let first_step = first_steps.next().expect("a cycle") as u64;
            stopped_after(&case, settings, (first_step..STEPS).step_by(every));
        }
    }
}

/// Stops the run after each of these steps, and resumes it.
pub(crate) fn stopped_after(
    case: &Case,
    settings: (PredictOptions, HeldOut),
    steps: impl Iterator<Item = u64>,
) {
    let (expected, all) = whole(case, STEPS, Some(settings));
    for step in steps {
        let folder = tempfile::tempdir().expect("a folder");
        let options = run_options(case, STEPS);
        let mut first = run(folder.path(), case, options.clone(), Some(settings));
        let mut heard = Heard { stop_after: Some(step), ..Heard::default() };
        let stop = heard.stop.clone();
        first.train(&stop, &mut heard).expect("a run");
        drop(first);
        let mut second = run(folder.path(), case, options, Some(settings));
        assert_eq!(second.resume(&mut heard).expect("a checkpoint"), Some(step));
        second.train(&Stop::new(), &mut heard).expect("a run");
        assert!(end(&mut second) == expected, "{settings:?} {case:?} stopped at {step}");
        // As text, in which NaN equals itself.
        assert_eq!(format!("{:?}", heard.jumps), format!("{:?}", all.jumps));
        // Their times differ.
        let judged = |heard: &Heard| -> Vec<(u64, u64, u64, bool)> {
            let bits = |(step, j): &(u64, storm_train::Judgement)| {
                (*step, j.loss.to_bits(), j.expected.to_bits(), j.kept)
            };
            heard.judgements.iter().map(bits).collect()
        };
        assert_eq!(judged(&heard), judged(&all));
    }
}

#[test]
fn a_run_that_is_killed_anywhere_goes_on_bit_by_bit() {
    let is_long = std::env::var_os("STORM_LONG_TESTS").is_some();
    let cases = if is_long { cases() } else { vec![F32, cases()[3]] };
    for case in cases {
        let direction = Direction::Outer { window: 3, momentum: 0.5 };
        for settings in mixed(direction) {
            killed_anywhere(&case, settings, if is_long { 1 } else { 7 });
        }
    }
}

/// Kills the run at every `every`-th step or event, also in the middle of predictions.
pub(crate) fn killed_anywhere(case: &Case, settings: (PredictOptions, HeldOut), every: usize) {
    let (expected, _) = whole(case, STEPS, Some(settings));
    let options = RunOptions { save_every: Some(3), ..run_options(case, STEPS) };
    for moment in (0..).step_by(every) {
        let folder = tempfile::tempdir().expect("a folder");
        let mut first = run(folder.path(), case, options.clone(), Some(settings));
        let mut heard = Heard { fail_after: Some(moment), ..Heard::default() };
        if first.train(&Stop::new(), &mut heard).is_ok() {
            assert!(moment > 50, "only {moment} things were told");
            return;
        }
        drop(first);
        let mut second = run(folder.path(), case, options.clone(), Some(settings));
        second.resume(&mut Heard::default()).expect("a checkpoint, or none");
        second.train(&Stop::new(), &mut Heard::default()).expect("a run");
        assert!(end(&mut second) == expected, "{settings:?} {case:?} killed at {moment}");
    }
}
