//! How jumps affect the bits of a run.

use crate::support::{
    Case, DIRECTIONS, End, F32, Heard, HeldOut, STEPS, cases, end, predict, run, run_options, whole,
};
use storm_plan::UpdateTime;
use storm_train::{Controller, Direction, Precision, PredictOptions, Stop, Verdict};

pub(crate) fn state_is_equal(case: &Case, found: &End, expected: &End) {
    for ((name, found), (other, expected)) in found.state.iter().zip(&expected.state) {
        assert_eq!(name, other);
        assert!(found == expected, "{name} differs: {case:?}");
    }
    let position = |end: &End| (end.progress.updates, end.progress.data.clone());
    assert_eq!(position(found), position(expected), "{case:?}");
}

#[test]
fn refused_jumps_leave_every_bit() {
    for case in cases() {
        let (plain, _) = whole(&case, STEPS, None);
        for direction in DIRECTIONS {
            // No change exceeds its noise by that much, except one without noise.
            let options = PredictOptions { noise: 1e9, ..predict(direction) };
            let (end, heard) = whole(&case, STEPS, Some((options, HeldOut::Alike)));
            state_is_equal(&case, &end, &plain);
            assert_eq!(heard.jumps.len(), 4, "after 7, 11, 15 and 19 steps; at 23 it is too late");
            let is_null = matches!(direction, Direction::None { .. });
            for (_, jump) in &heard.jumps {
                let expected = if is_null { Verdict::Unmoved } else { Verdict::Refused };
                assert_eq!(jump.verdict, expected, "{direction:?} {case:?}");
                assert_eq!(jump.distance == 0.0, is_null, "{direction:?} {case:?}");
                assert_eq!(jump.loss == jump.loss_before, is_null, "the probe sees the jump");
            }
            assert!(heard.judgements.is_empty());
        }
    }
}

#[test]
fn accepted_jumps_move_weights_and_lower_the_probe_loss() {
    for case in cases() {
        let (plain, _) = whole(&case, STEPS, None);
        let mut accepted = 0;
        for direction in DIRECTIONS {
            let (end, heard) = whole(&case, STEPS, Some((predict(direction), HeldOut::Alike)));
            let mut count = 0;
            for (_, jump) in heard.jumps.iter().filter(|(_, j)| j.verdict == Verdict::Accepted) {
                assert!(jump.distance > 0.0 && jump.loss < jump.loss_before, "{jump:?}");
                count += 1;
            }
            let moved: u32 = heard.predictions.iter().map(|(_, p)| p.accepted).sum();
            assert_eq!(moved, count);
            let is_null = matches!(direction, Direction::None { .. });
            assert!(count == 0 || !is_null, "{direction:?}");
            if heard.kept() > 0 {
                assert!(end.state != plain.state, "{direction:?} {case:?}");
            }
            accepted += count;
        }
        assert!(accepted >= 6, "{accepted} jumps: {case:?}");
    }
}

#[test]
fn undone_jumps_leave_every_bit() {
    for case in cases() {
        let mut undone = 0;
        for direction in [Direction::LastUpdate, Direction::Difference { window: 4 }] {
            let options = PredictOptions { margin: 0.0, ..predict(direction) };
            let (end, heard) = whole(&case, STEPS, Some((options, HeldOut::Opposed)));
            if heard.kept() > 0 {
                continue;
            }
            undone += heard.judgements.len();
            // The rate is constant, so each undo costs the steps of its correction, and nothing
            // else.
            let lost = 2 * heard.judgements.len() as u64;
            let (plain, _) = whole(&case, STEPS - lost, None);
            state_is_equal(&case, &end, &plain);
            assert_eq!(end.progress.step, STEPS, "a step that was undone was made");
        }
        // Adapters move little in so few steps. Their jumps are undone below.
        assert!(undone > 0 || case.lora, "nothing was undone: {case:?}");
    }
}

#[test]
fn an_undo_lengthens_the_next_full_phase() {
    let options = PredictOptions { margin: 0.0, ..predict(Direction::LastUpdate) };
    let (_, heard) = whole(&F32, STEPS, Some((options, HeldOut::Opposed)));
    assert_eq!(heard.kept(), 0);
    let steps: Vec<u64> = heard.predictions.iter().map(|(step, _)| *step).collect();
    // Three steps of warm-up and four full ones. Then two of correction, undone, and twice four.
    assert_eq!(steps, [7, 17]);
    let judged: Vec<u64> = heard.judgements.iter().map(|(step, _)| *step).collect();
    assert_eq!(judged, [9, 19]);
    let phase = |step: u64| heard.phases[step as usize - 1];
    assert_eq!(phase(3), (3, "warm-up"));
    assert_eq!((phase(4), phase(7)), ((4, "full"), (7, "full")));
    assert_eq!((phase(8), phase(9), phase(10)), ((8, "correct"), (9, "correct"), (10, "full")));
}

#[test]
fn no_plan_changes_a_bit_of_a_prediction() {
    for precision in [Precision::F32, Precision::Bf16Stochastic] {
        for direction in [Direction::Average { window: 3 }, Direction::Random { window: 2 }] {
            let of = |update: UpdateTime, device_bytes: u64| {
                let case = Case { precision, update, device_bytes, ..F32 };
                let (end, heard) = whole(&case, STEPS, Some((predict(direction), HeldOut::Alike)));
                (end, heard.jumps, heard.judgements.len())
            };
            let roomy = of(UpdateTime::EndOfStep, 1 << 40);
            assert!(roomy.1.iter().any(|(_, jump)| jump.verdict == Verdict::Accepted));
            // Two of three layers do not stay on the device.
            for other in [of(UpdateTime::NextStep, 1 << 40), of(UpdateTime::NextStep, 28_000)] {
                assert!(other == roomy, "{precision:?} {direction:?}");
            }
        }
    }
}

#[test]
fn a_jump_to_no_finite_loss_is_rolled_back_and_counted() {
    for case in cases() {
        let (plain, _) = whole(&case, STEPS, None);
        let mut not_finite = 0;
        for tau in [1e12, 1e20, 1e30, 3e38] {
            let controller = Controller::Constant { tau };
            let options = PredictOptions { controller, ..predict(Direction::LastUpdate) };
            let (end, heard) = whole(&case, STEPS, Some((options, HeldOut::Alike)));
            state_is_equal(&case, &end, &plain);
            assert_eq!(heard.jumps.len(), 4);
            for (_, jump) in heard.jumps {
                let is_finite = jump.loss.is_finite() && jump.distance.is_finite();
                let expected = if is_finite { Verdict::Refused } else { Verdict::NotFinite };
                assert_eq!(jump.verdict, expected, "{jump:?}");
                not_finite += usize::from(!is_finite);
            }
        }
        assert!(not_finite > 0, "{case:?}");
    }
}

#[test]
fn a_step_without_a_finite_loss_after_jumps_undoes_them() {
    for case in cases() {
        let folder = tempfile::tempdir().expect("a folder");
        let options = predict(Direction::LastUpdate);
        let held_out = Some((options, HeldOut::Alike));
        let mut run = run(folder.path(), &case, run_options(&case, STEPS), held_out);
        // The first step of the first correction.
        let mut heard = Heard { stop_after: Some(8), ..Heard::default() };
        let stop = heard.stop.clone();
        run.train(&stop, &mut heard).expect("a run");
        assert_eq!(heard.phases.last(), Some(&(8, "correct")), "{case:?}");
        let names: Vec<String> = run.trainer().parameter_names().map(str::to_owned).collect();
        let name = names.iter().find(|name| name.contains("lora") || !case.lora).expect("one");
        let values = run.trainer().read(name).expect("a parameter");
        run.trainer().write(name, &vec![f32::NAN; values.len()]).expect("a parameter");
        let mut heard = Heard { stop_after: Some(10), ..Heard::default() };
        let stop = heard.stop.clone();
        run.train(&stop, &mut heard).expect("it recovers");
        assert_eq!(heard.judgements.len(), 1);
        let (step, judgement) = heard.judgements[0];
        assert!(step == 9 && !judgement.kept && judgement.loss.is_nan(), "{judgement:?}");
        // Seven steps, two that were undone, and the eighth.
        let (plain, _) = whole(&case, 8, None);
        state_is_equal(&case, &end(&mut run), &plain);
        assert_eq!(run.progress().step, 10);
        run.train(&Stop::new(), &mut Heard::default()).expect("it goes on");
    }
}
