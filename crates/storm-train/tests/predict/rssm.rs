//! Runs whose jumps a recurrent model chooses.

use crate::support::{Case, F32, Heard, HeldOut, cases, end, predict, run, run_options, whole};
use storm_train::{
    Controller, Direction, PhaseLengths, PredictOptions, Stop, Verdict, predict_bytes,
};

const STEPS: u64 = 48;

const SEEN: Case = Case { observes: true, ..F32 };

/// Decisions after every other step, so that more than the first ones, which try each length, are made.
fn learned() -> PredictOptions {
    PredictOptions {
        lengths: PhaseLengths { warm_up: 2, full: 2, correct: 1 },
        controller: Controller::Rssm { tau: 1.0 },
        ..predict(Direction::Difference { window: 2 })
    }
}

#[test]
fn it_tries_every_length_and_says_what_it_expects() {
    let (_, heard) = whole(&SEEN, STEPS, Some((learned(), HeldOut::Alike)));
    let mut first: Vec<f32> = heard.jumps[..5].iter().map(|(_, jump)| jump.tau).collect();
    first.sort_by(f32::total_cmp);
    assert_eq!(first, [0.25, 0.5, 1.0, 2.0, 4.0]);
    for (_, jump) in &heard.jumps {
        let expected = jump.expected.expect("it learns");
        assert!((0.0..=1.0).contains(&expected.acceptance), "{jump:?}");
        assert!(expected.change.is_finite() && expected.deviation > 0.0, "{jump:?}");
        if jump.verdict == Verdict::Accepted {
            assert!(jump.distance > 0.0 && jump.loss < jump.loss_before, "{jump:?}");
        }
    }
    // It learns: what it expects of the same length changes.
    let of_one: Vec<f64> = heard
        .jumps
        .iter()
        .filter(|(_, jump)| jump.tau == 1.0)
        .filter_map(|(_, jump)| Some(jump.expected?.acceptance))
        .collect();
    assert!(of_one.windows(2).all(|pair| pair[0] != pair[1]), "{of_one:?}");
}

#[test]
fn a_run_that_stops_after_any_step_makes_the_same_choices() {
    let long = std::env::var_os("STORM_LONG_TESTS").is_some();
    let all: Vec<Case> = if long { cases() } else { vec![cases()[3]] };
    for case in all {
        let case = Case { observes: true, ..case };
        let settings = (learned(), HeldOut::Alike);
        let (expected, all) = whole(&case, STEPS, Some(settings));
        for step in (1..STEPS).step_by(if long { 1 } else { 11 }) {
            let folder = tempfile::tempdir().expect("a folder");
            let options = run_options(&case, STEPS);
            let mut first = run(folder.path(), &case, options.clone(), Some(settings));
            let mut heard = Heard { stop_after: Some(step), ..Heard::default() };
            let stop = heard.stop.clone();
            first.train(&stop, &mut heard).expect("a run");
            drop(first);
            let mut second = run(folder.path(), &case, options, Some(settings));
            assert_eq!(second.resume(&mut heard).expect("a checkpoint"), Some(step));
            second.train(&Stop::new(), &mut heard).expect("a run");
            assert!(end(&mut second) == expected, "{case:?} stopped at {step}");
            assert_eq!(heard.jumps, all.jumps, "{case:?} stopped at {step}");
        }
    }
}

#[test]
fn a_run_does_not_go_on_with_another_controller() {
    let other = PredictOptions { controller: Controller::Constant { tau: 1.0 }, ..learned() };
    let folder = tempfile::tempdir().expect("a folder");
    let options = run_options(&F32, STEPS);
    let mut first = run(folder.path(), &F32, options.clone(), Some((other, HeldOut::Alike)));
    let mut heard = Heard { stop_after: Some(3), ..Heard::default() };
    let stop = heard.stop.clone();
    first.train(&stop, &mut heard).expect("a run");
    drop(first);
    let mut second = run(folder.path(), &F32, options, Some((learned(), HeldOut::Alike)));
    let error = second.resume(&mut Heard::default()).expect_err("it has no state").to_string();
    assert!(error.contains("the state of its controller"), "{error}");
}

#[test]
fn its_state_is_in_the_price() {
    let price = |controller| {
        let options = PredictOptions { controller, ..learned() };
        let case = SEEN;
        predict_bytes(crate::support::tiny(false), &crate::support::train_options(&case), &options)
            .expect("a model")
    };
    let more = price(Controller::Rssm { tau: 1.0 }) - price(Controller::Constant { tau: 1.0 });
    assert!((500_000..2_000_000).contains(&more), "{more}");
    let folder = tempfile::tempdir().expect("a folder");
    let mut run = run(folder.path(), &SEEN, run_options(&SEEN, STEPS), None);
    let mut source = crate::support::Made { next: 0, shift: 0 };
    let mut batches = vec![storm_train::AnyBatch::default(); 4];
    for batch in &mut batches {
        storm_train::BatchSource::next_batch(&mut source, batch).expect("a batch");
    }
    let taken = run.predict(learned(), batches).expect("memory");
    assert_eq!(taken, price(Controller::Rssm { tau: 1.0 }));
}
