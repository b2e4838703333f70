//! Losses of rows with numeric targets.

use super::element::Element;
use super::math::{exp, sigmoid};
use super::simd::lane_sum;
use rayon::prelude::*;

/// Rows per task.
const ROWS: usize = 64;

/// Half the squared distance of each row from its target.
pub fn squared_error<E: Element>(width: usize, x: &[E], target: &[E], out: &mut [f32]) {
    let row = |row: usize| {
        let place = row * width..(row + 1) * width;
        lane_sum([&x[place.clone()], &target[place]], |[x, target]| {
            let off = x - target;
            off * off
        })
    };
    let rows = out.par_iter_mut().with_min_len(ROWS).enumerate();
    rows.for_each(|(number, out)| *out = 0.5 * row(number));
}

/// Gradient of `x` of [`squared_error`].
pub fn squared_error_grad<E: Element>(
    width: usize,
    d_row_loss: &[f32],
    x: &[E],
    target: &[E],
    out: &mut [E],
) {
    let step = width.max(1);
    let rows = x.par_chunks(step).zip(target.par_chunks(step)).zip(d_row_loss);
    let rows = out.par_chunks_mut(step).zip(rows).with_min_len(ROWS);
    rows.for_each(|(out, ((x, target), gradient))| {
        for ((out, x), target) in out.iter_mut().zip(x).zip(target) {
            *out = E::from_f32(gradient * (x.to_f32() - target.to_f32()));
        }
    });
}

/// Targets of [`outcome_loss`], one of each per row.
#[derive(Clone, Copy, Debug)]
pub struct Outcomes<'a> {
    /// The change.
    pub change: &'a [f32],
    /// 1 if it was accepted, else 0.
    pub accepted: &'a [f32],
}

/// Negative log likelihood of each row's outcome.
pub fn outcome_loss<E: Element>(heads: &[E], outcomes: Outcomes<'_>, out: &mut [f32]) {
    let rows = out.par_iter_mut().zip(heads.par_chunks(3)).with_min_len(ROWS).enumerate();
    rows.for_each(|(row, (out, heads))| {
        let [mean, log_variance, logit] = [0, 1, 2].map(|at| heads[at].to_f32());
        let off = outcomes.change[row] - mean;
        let of_change = 0.5 * (log_variance + off * off * exp(-log_variance));
        // ln(1 + e^x), without overflow.
        let softplus = logit.max(0.0) + exp(-logit.abs()).ln_1p();
        *out = of_change + (softplus - outcomes.accepted[row] * logit);
    });
}

/// Gradient of the heads of [`outcome_loss`].
pub fn outcome_loss_grad<E: Element>(
    d_row_loss: &[f32],
    heads: &[E],
    outcomes: Outcomes<'_>,
    out: &mut [E],
) {
    let rows = out.par_chunks_mut(3).zip(heads.par_chunks(3)).with_min_len(ROWS).enumerate();
    rows.for_each(|(row, (out, heads))| {
        let [mean, log_variance, logit] = [0, 1, 2].map(|at| heads[at].to_f32());
        let (off, precision) = (outcomes.change[row] - mean, exp(-log_variance));
        let gradients = [
            -off * precision,
            0.5 * (1.0 - off * off * precision),
            sigmoid(logit) - outcomes.accepted[row],
        ];
        for (out, gradient) in out.iter_mut().zip(gradients) {
            *out = E::from_f32(d_row_loss[row] * gradient);
        }
    });
}
