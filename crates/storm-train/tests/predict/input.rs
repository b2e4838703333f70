//! What a run that predicts refuses.

use crate::support::{Case, F32, Heard, HeldOut, STEPS, predict, run, run_options};
use storm_train::{Controller, Direction, PhaseLengths, PredictOptions, RunOptions, Stop};

#[test]
fn too_little_held_out_data_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    for count in 0..4 {
        let mut run = run(folder.path(), &F32, run_options(&F32, STEPS), None);
        let mut batches = Vec::new();
        let mut source = crate::support::Made { next: 0, shift: 0 };
        for _ in 0..count {
            let mut batch = storm_train::AnyBatch::default();
            storm_train::BatchSource::next_batch(&mut source, &mut batch).expect("a batch");
            batches.push(batch);
        }
        let error =
            run.predict(predict(Direction::LastUpdate), batches, None).expect_err("too few");
        assert!(error.to_string().contains("at least 2"), "{error}");
    }
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let good = predict(Direction::LastUpdate);
    let lengths = PhaseLengths { full: 0, ..good.lengths };
    let bad = [
        (PredictOptions { lengths, ..good }, "full is 0"),
        (predict(Direction::Difference { window: 5 }), "window is 5"),
        (PredictOptions { controller: Controller::Constant { tau: 0.0 }, ..good }, "tau is 0"),
    ];
    for (options, expected) in bad {
        let mut run = run(folder.path(), &F32, run_options(&F32, STEPS), None);
        let error = run.predict(options, Vec::new(), None).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
    let mut run = run(folder.path(), &F32, run_options(&F32, 8), None);
    let error = run.predict(good, Vec::new(), None).expect_err("too short").to_string();
    assert!(error.contains("take 9 steps") && error.contains("has 8"), "{error}");
}

/// A run that was saved with some predictions and resumes with others.
#[test]
fn a_run_does_not_go_on_with_other_predictions() {
    let settings = |options: PredictOptions| Some((options, HeldOut::Alike));
    let outer = predict(Direction::Outer { window: 3, momentum: 0.5 });
    let shorter = PhaseLengths { correct: 1, ..outer.lengths };
    let cases = [
        (settings(outer), None, "is of a run that predicts"),
        (None, settings(outer), "is of a run that does not predict"),
        // In the middle of a correction of two steps.
        (settings(outer), settings(PredictOptions { lengths: shorter, ..outer }), "other lengths"),
        (
            settings(predict(Direction::LastUpdate)),
            settings(predict(Direction::Average { window: 3 })),
            "copies of weights or the state of its controller are missing",
        ),
    ];
    for (saved, resumed, expected) in cases {
        let folder = tempfile::tempdir().expect("a folder");
        let options: RunOptions = run_options(&F32, STEPS);
        let mut first = run(folder.path(), &F32, options.clone(), saved);
        let mut heard = Heard { stop_after: Some(7), ..Heard::default() };
        let stop = heard.stop.clone();
        first.train(&stop, &mut heard).expect("a run");
        drop(first);
        let mut second = run(folder.path(), &F32, options, resumed);
        let error = second.resume(&mut Heard::default()).expect_err(expected).to_string();
        assert!(error.contains(expected) && error.contains("--name"), "{error}");
    }
}

#[test]
fn copies_are_saved_with_a_pause_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let case = Case { ..F32 };
    let settings = Some((predict(Direction::LastUpdate), HeldOut::Alike));
    let mut run = run(folder.path(), &case, run_options(&case, STEPS), settings);
    let error = run.save_in_background().expect_err("they change during steps").to_string();
    assert!(error.starts_with("save-mode: "), "{error}");
    run.train(&Stop::new(), &mut Heard::default()).expect("a run");
}
