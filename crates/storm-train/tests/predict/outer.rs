//! Jumps that always stay: an outer optimizer, compared with plain arithmetic on runs without it.

use crate::support::{Case, F32, HeldOut, always, cases, whole};
use storm_train::{Controller, Direction, PredictOptions, Verdict};

/// Weights and moments after this many plain steps, as f32 numbers by name.
fn plain(case: &Case, steps: u64) -> Vec<(String, Vec<f32>)> {
    numbers(whole(case, steps, None).0.state)
}

fn numbers(state: Vec<(String, Vec<u8>)>) -> Vec<(String, Vec<f32>)> {
    let of = |bytes: &[u8]| {
        let chunks = bytes.chunks_exact(4);
        chunks.map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    state.into_iter().map(|(name, bytes)| (name, of(&bytes))).collect()
}

/// Whether it is a tensor of optimizer state, which stays.
fn is_moment(name: &str) -> bool {
    name.ends_with("_moment")
}

/// Compares the end of a run of seven steps, with a jump after the last, with the expected weights.
fn check(direction: Direction, tau: f32, expected: impl Fn(&[Vec<f32>; 5], usize) -> f32) {
    let (end, heard) = whole(&F32, 7, Some((always(direction, tau), HeldOut::Alike)));
    assert_eq!(heard.jumps.len(), 1, "no step is left to correct in, and none is needed");
    let (step, jump) = heard.jumps[0];
    assert!(step == 7 && jump.verdict == Verdict::Accepted && jump.distance > 0.0, "{jump:?}");
    assert!(jump.loss.is_nan() && jump.loss_before.is_nan(), "nothing is measured");
    assert!(heard.judgements.is_empty());
    let after = [3, 4, 5, 6, 7].map(|steps| plain(&F32, steps));
    let mut moved = 0;
    for (tensor, (name, found)) in numbers(end.state).into_iter().enumerate() {
        let weights: [Vec<f32>; 5] = after.each_ref().map(|state| state[tensor].1.clone());
        assert_eq!(after[0][tensor].0, name);
        if is_moment(&name) {
            assert!(found == weights[4], "{name} changed");
            continue;
        }
        for (at, value) in found.iter().enumerate() {
            assert_eq!(value.to_bits(), expected(&weights, at).to_bits(), "{name} {at}");
            moved += usize::from(*value != weights[4][at]);
        }
    }
    assert!(moved > 100, "{moved} weights moved");
}

#[test]
fn lookahead_goes_half_the_way_back() {
    check(Direction::Difference { window: 4 }, -0.5, |weights, at| {
        weights[4][at] + -0.5 * (weights[4][at] - weights[0][at])
    });
}

#[test]
fn an_average_of_weights_is_that() {
    check(Direction::WeightAverage { window: 2 }, 1.0, |weights, at| {
        let sum = (1..5).fold(0.0, |sum, step| 0.5 * sum + 0.5 * weights[step][at]);
        let factor = (1.0 / (1.0 - 0.5_f64.powi(4))) as f32;
        weights[4][at] + 1.0 * (factor * sum - weights[4][at])
    });
}

#[test]
fn outer_steps_go_on_from_one_another() {
    for case in cases() {
        let outer = Direction::Outer { window: 4, momentum: 0.5 };
        let (_, heard) = whole(&case, 24, Some((always(outer, 1.0), HeldOut::Alike)));
        let steps: Vec<u64> = heard.jumps.iter().map(|(step, _)| *step).collect();
        assert_eq!(steps, [7, 11, 15, 19, 23], "no phase of correction is between them");
        assert!(heard.jumps.iter().all(|(_, jump)| jump.distance > 0.0), "{case:?}");
        assert!(heard.phases.iter().all(|(_, phase)| *phase != "correct"));
    }
}

#[test]
fn weights_that_are_not_finite_do_not_stay() {
    let huge = PredictOptions {
        controller: Controller::Constant { tau: 3e38 },
        ..always(Direction::Difference { window: 4 }, 1.0)
    };
    // Differences of more than one, so that the product is too large for f32.
    let case = Case { learning_rate: 2.0, ..F32 };
    let (end, heard) = whole(&case, 7, Some((huge, HeldOut::Alike)));
    assert_eq!(heard.jumps[0].1.verdict, Verdict::NotFinite);
    assert_eq!(end.state, whole(&case, 7, None).0.state);
}

/// The differences of the last four steps by least squares, and what the recurrence adds in the
/// next four. All in f64, from the definition.
fn modes(weights: &[Vec<f32>; 5]) -> Vec<f64> {
    let x: Vec<Vec<f64>> = weights
        .windows(2)
        .map(|pair| {
            pair[0].iter().zip(&pair[1]).map(|(a, b)| f64::from(*b) - f64::from(*a)).collect()
        })
        .collect();
    let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    // Gram-Schmidt: x3 in the basis of x0, x1, x2.
    let mut basis: Vec<(Vec<f64>, [f64; 3])> = Vec::new();
    let mut c = [0.0; 3];
    for j in 0..3 {
        let (mut rest, mut of) = (x[j].clone(), [0.0; 3]);
        of[j] = 1.0;
        for _ in 0..2 {
            for (unit, known) in &basis {
                let along = dot(&rest, unit);
                rest.iter_mut().zip(unit).for_each(|(r, u)| *r -= along * u);
                of.iter_mut().zip(known).for_each(|(o, k)| *o -= along * k);
            }
        }
        let norm = dot(&rest, &rest).sqrt();
        rest.iter_mut().for_each(|r| *r /= norm);
        of.iter_mut().for_each(|o| *o /= norm);
        let along = dot(&x[3], &rest);
        c.iter_mut().zip(of).for_each(|(c, o)| *c += along * o);
        basis.push((rest, of));
    }
    let mut all = x;
    let mut sum = vec![0.0; all[0].len()];
    for n in 4..8 {
        let next: Vec<f64> =
            (0..sum.len()).map(|i| (0..3).map(|j| c[j] * all[n - 3 + j][i]).sum()).collect();
        sum.iter_mut().zip(&next).for_each(|(sum, x)| *sum += x);
        all.push(next);
    }
    sum
}

#[test]
fn modes_lead_where_a_recurrence_of_differences_does() {
    let dmd = Direction::Dmd { window: 4 };
    let (end, heard) = whole(&F32, 7, Some((always(dmd, 0.5), HeldOut::Alike)));
    assert_eq!(heard.jumps[0].1.verdict, Verdict::Accepted);
    let after = [3, 4, 5, 6, 7].map(|steps| plain(&F32, steps));
    for (tensor, (name, found)) in numbers(end.state).into_iter().enumerate() {
        let weights: [Vec<f32>; 5] = after.each_ref().map(|state| state[tensor].1.clone());
        if is_moment(&name) {
            continue;
        }
        let expected = modes(&weights);
        let largest = expected.iter().fold(0.0, |most: f64, d| most.max(d.abs()));
        assert!(largest > 1e-3, "{name} moves");
        for (at, value) in found.iter().enumerate() {
            let moved = f64::from(*value) - f64::from(weights[4][at]);
            let error = (moved - 0.5 * expected[at]).abs();
            assert!(error < 1e-4 * largest, "{name} {at}: {moved}, not half of {}", expected[at]);
        }
    }
}
