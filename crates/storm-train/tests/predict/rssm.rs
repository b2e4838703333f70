//! Runs whose jumps a recurrent model chooses.

use crate::resume::killed_anywhere;
use crate::support::{
    Case, F32, Heard, HeldOut, RSSM, cases, end, predict, run, run_options, whole,
};
use std::path::Path;
use storm_plan::UpdateTime;
use storm_train::{
    Controller, Direction, Jump, PhaseLengths, Precision, PredictOptions, PredictionCost, Stop,
    Verdict, predict_bytes, prediction_seconds,
};

const STEPS: u64 = 48;

const SEEN: Case = Case { observes: true, ..F32 };

/// Decisions after every other step, so that there are more than the first ones, which try each
/// length.
fn learned() -> PredictOptions {
    PredictOptions {
        lengths: PhaseLengths { warm_up: 2, full: 2, correct: 1 },
        controller: RSSM,
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
        assert!(expected.gain.is_finite() && expected.disagreement > 0.0, "{jump:?}");
        if jump.verdict == Verdict::Accepted {
            assert!(jump.distance > 0.0 && jump.loss < jump.loss_before, "{jump:?}");
        }
    }
    // It learns: its expectation for the same length changes.
    let of_one: Vec<f64> = heard
        .jumps
        .iter()
        .filter(|(_, jump)| jump.tau == 1.0)
        .filter_map(|(_, jump)| Some(jump.expected?.acceptance))
        .collect();
    assert!(of_one.windows(2).all(|pair| pair[0] != pair[1]), "{of_one:?}");
}

/// A dear prediction promises less, and nothing else of the run differs until a choice does.
#[test]
fn a_jump_must_gain_more_than_a_prediction_costs() {
    let first = |cost: f64| {
        let controller = Controller::Rssm { tau: 1.0, cost: PredictionCost::Steps(cost) };
        let options = PredictOptions { controller, ..learned() };
        let (_, heard) = whole(&SEEN, STEPS, Some((options, HeldOut::Alike)));
        heard.jumps[0].1
    };
    let [free, cheap, dear] = [0.0, 1.0, 3.0].map(first);
    let gain = |jump: Jump| jump.expected.expect("it learns").gain;
    let of_one = gain(free) - gain(cheap);
    assert!(of_one > 0.0, "{free:?} {cheap:?}");
    let of_three = gain(free) - gain(dear);
    assert!((of_three / of_one - 3.0).abs() < 1e-6, "{of_three} {of_one}");
    assert_eq!((free.loss_before, free.loss), (dear.loss_before, dear.loss));
}

/// The cost is measured with the weights that training starts from, and leaves them.
#[test]
fn measuring_the_cost_changes_no_bit() {
    for case in cases() {
        let case = Case { observes: true, ..case };
        let settings = Some((learned(), HeldOut::Alike));
        let (expected, _) = whole(&case, 12, settings);
        let folder = tempfile::tempdir().expect("a folder");
        let mut measured = run(folder.path(), &case, run_options(&case, 12), settings);
        let seconds =
            prediction_seconds(measured.trainer(), learned(), 12, HeldOut::Alike.batches(), None);
        let seconds = seconds.expect("a time");
        assert!(seconds > 0.0 && seconds.is_finite());
        measured.train(&Stop::new(), &mut Heard::default()).expect("a run");
        assert!(end(&mut measured) == expected, "{case:?}");
    }
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
fn a_run_that_is_killed_anywhere_makes_the_same_choices() {
    let long = std::env::var_os("STORM_LONG_TESTS").is_some();
    let all = if long { cases() } else { vec![cases()[3]] };
    for case in all {
        let case = Case { observes: true, ..case };
        killed_anywhere(&case, (learned(), HeldOut::Alike), if long { 1 } else { 13 });
    }
}

#[test]
fn no_plan_changes_a_choice() {
    for precision in [Precision::F32, Precision::Bf16Stochastic] {
        let of = |update: UpdateTime, device_bytes: u64| {
            let case = Case { precision, update, device_bytes, ..SEEN };
            let (end, heard) = whole(&case, STEPS, Some((learned(), HeldOut::Alike)));
            (end, heard.jumps)
        };
        let roomy = of(UpdateTime::EndOfStep, 1 << 40);
        // More than the lengths that it tries first.
        assert!(roomy.1.len() > 5, "{} jumps", roomy.1.len());
        for other in [of(UpdateTime::NextStep, 1 << 40), of(UpdateTime::NextStep, 32_000)] {
            assert!(other == roomy, "{precision:?}");
        }
    }
}

#[test]
fn refused_jumps_of_its_choice_leave_every_bit() {
    // Enough for each length once, and a choice.
    let steps = 20;
    for case in cases() {
        let case = Case { observes: true, ..case };
        let (plain, _) = whole(&case, steps, None);
        let options = PredictOptions { noise: 1e9, ..learned() };
        let (end, heard) = whole(&case, steps, Some((options, HeldOut::Alike)));
        assert!(heard.jumps.len() >= 5, "{case:?}");
        assert!(heard.jumps.iter().all(|(_, jump)| jump.verdict == Verdict::Refused), "{case:?}");
        assert!(end.state == plain.state, "{case:?}");
        assert_eq!(end.progress.updates, plain.progress.updates);
    }
}

/// Rewrites the state of the controller four bytes shorter, with correct hashes.
fn shorten_controller(checkpoint: &Path) {
    let path = checkpoint.join("controller.safetensors");
    let bytes = std::fs::read(&path).expect("a file");
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().expect("eight")) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + header_bytes]).expect("text");
    let data = &bytes[8 + header_bytes..bytes.len() - 4];
    let [before, after] = [data.len() + 4, data.len()].map(|bytes| bytes.to_string());
    let mut header = header.replace(&before, &after);
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let mut short = (header.len() as u64).to_le_bytes().to_vec();
    short.extend_from_slice(header.as_bytes());
    short.extend_from_slice(data);
    std::fs::write(&path, &short).expect("a file");
    let path = checkpoint.join("manifest.json");
    let text = std::fs::read_to_string(&path).expect("a file");
    let (_, manifest) = text.split_once("\"manifest\":").expect("a manifest");
    let hash = |bytes: &[u8]| blake3::hash(bytes).to_hex().to_string();
    let manifest = manifest
        .replace(&hash(&bytes), &hash(&short))
        .replace(&format!("\"bytes\": {},", bytes.len()), &format!("\"bytes\": {},", short.len()));
    let hash = hash(manifest.as_bytes());
    std::fs::write(&path, format!("{{\"blake3\":\"{hash}\",\"manifest\":{manifest}"))
        .expect("a file");
}

#[test]
fn a_controller_of_another_shape_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = Some((learned(), HeldOut::Alike));
    let options = run_options(&SEEN, STEPS);
    let mut first = run(folder.path(), &SEEN, options.clone(), settings);
    let mut heard = Heard { stop_after: Some(3), ..Heard::default() };
    let stop = heard.stop.clone();
    first.train(&stop, &mut heard).expect("a run");
    drop(first);
    let checkpoint = std::fs::read_dir(folder.path())
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .find(|path| path.join("controller.safetensors").is_file())
        .expect("a checkpoint");
    shorten_controller(&checkpoint);
    let mut second = run(folder.path(), &SEEN, options, settings);
    let error = second.resume(&mut Heard::default()).expect_err("another shape").to_string();
    assert!(error.contains("controller.safetensors") && error.contains("another shape"), "{error}");
    assert!(error.contains("name another run"), "{error}");
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
        predict_bytes(crate::support::tiny(&case), &crate::support::train_options(&case), &options)
            .expect("a model")
    };
    let more = price(RSSM) - price(Controller::Constant { tau: 1.0 });
    assert!((500_000..2_000_000).contains(&more), "{more}");
    let folder = tempfile::tempdir().expect("a folder");
    let mut run = run(folder.path(), &SEEN, run_options(&SEEN, STEPS), None);
    let taken = run.predict(learned(), HeldOut::Alike.batches(), None).expect("memory");
    assert_eq!(taken, price(RSSM));
}
