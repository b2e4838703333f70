//! Head projection and cross-entropy, a chunk of rows at a time.

use super::element::Element;
use super::gemm::{Accumulate, Bf16Products, Epilogue, Matrix, MatrixMut};
use super::math::exp;
use super::simd::lane_sum;
use crate::simd_dispatch;
use rayon::prelude::*;
use storm_graph::IGNORE_INDEX;

/// Operands of both directions.
#[derive(Clone, Copy)]
pub struct HeadInput<'a, E> {
    /// Rows of width C.
    pub hidden: &'a [E],
    /// (V, C).
    pub weight: &'a [E],
    /// One per row.
    pub targets: &'a [i32],
    /// Divisor of the sum of losses.
    pub denominator: f32,
    /// C.
    pub width: usize,
    /// Rows of logits that are in memory at a time.
    pub chunk_rows: usize,
    /// The share of a target's weight that is spread over all classes.
    pub label_smoothing: f32,
    /// How products of bf16 operands are summed.
    pub products: Bf16Products,
}

/// Outputs for each row.
pub struct RowOutput<'a> {
    /// The loss.
    pub losses: &'a mut [f32],
    /// 1 if the largest logit is that of the target, else 0.
    pub correct: Option<&'a mut [f32]>,
}

simd_dispatch! {
    fn max_and_sum[E: Element](logits: &[E]) -> (f32, f32) {
        let mut lanes = [f32::NEG_INFINITY; 16];
        for chunk in logits.chunks(16) {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                let x = x.to_f32();
                // A later value may replace a NaN here. It reaches the loss through the sum.
                *lane = if *lane >= x { *lane } else { x };
            }
        }
        let mut max = f32::NEG_INFINITY;
        for lane in lanes {
            max = if max >= lane { max } else { lane };
        }
        (max, lane_sum([logits], |[x]| exp(x - max)))
    }

    fn to_gradient[E: Element](logits: &mut [E], log_sum: f32, spread: f32, scale: f32) {
        for x in logits.iter_mut() {
            *x = E::from_f32((exp(x.to_f32() - log_sum) - spread) * scale);
        }
    }

    fn average[E: Element](logits: &[E]) -> f32 {
        lane_sum([logits], |[x]| x) / logits.len() as f32
    }
}

/// Loss of one row, and the logarithm of the sum of its exponentials.
fn row_loss<E: Element>(
    logits: &[E],
    target: usize,
    smoothing: f32,
    denominator: f32,
) -> (f32, f32) {
    let (max, sum) = max_and_sum(logits);
    let log_sum = max + sum.ln();
    let at_target = logits[target].to_f32();
    let expected = match smoothing {
        0.0 => at_target,
        _ => (1.0 - smoothing) * at_target + smoothing * average(logits),
    };
    ((log_sum - expected) / denominator, log_sum)
}

/// Whether the target is the first of the largest logits. False if any logit is NaN.
fn is_correct<E: Element>(logits: &[E], target: usize) -> bool {
    let at_target = logits[target].to_f32();
    logits[..target].iter().all(|x| x.to_f32() < at_target)
        && logits[target..].iter().all(|x| x.to_f32() <= at_target)
}

fn target_of(target: i32) -> Option<usize> {
    (target != IGNORE_INDEX).then(|| {
        usize::try_from(target).unwrap_or_else(|_| panic!("target {target} is not a token"))
    })
}

impl<'a, E: Element> HeadInput<'a, E> {
    fn vocabulary(&self) -> usize {
        self.weight.len() / self.width
    }

    fn weight(&self) -> Matrix<'a, E> {
        Matrix::row_major(self.weight, self.vocabulary(), self.width)
    }

    fn project(&self, hidden: &[E], logits: &mut [E]) {
        let rows = hidden.len() / self.width;
        self.products.gemm(
            Matrix::row_major(hidden, rows, self.width),
            self.weight().transposed(),
            MatrixMut::row_major(logits, rows, self.vocabulary()),
            Epilogue::default(),
        );
    }
}

/// Sets `correct` for each row of a chunk of logits.
fn mark_correct<E: Element>(correct: &mut [f32], targets: &[i32], logits: &[E]) {
    let vocabulary = logits.len() / targets.len().max(1);
    let rows = correct.par_iter_mut().zip(targets).zip(logits.par_chunks(vocabulary));
    rows.for_each(|((correct, &target), logits)| {
        let is_correct = target_of(target).is_some_and(|target| is_correct(logits, target));
        *correct = f32::from(u8::from(is_correct));
    });
}

/// The loss of each row. It is 0 for ignored rows.
pub fn head_loss<E: Element>(input: HeadInput<'_, E>, logits: &mut [E], output: RowOutput<'_>) {
    let RowOutput { losses, mut correct } = output;
    let (vocabulary, chunk) = (input.vocabulary(), input.chunk_rows);
    let chunks = losses.chunks_mut(chunk).zip(input.targets.chunks(chunk));
    let chunks = chunks.zip(input.hidden.chunks(chunk * input.width)).enumerate();
    for (index, ((losses, targets), hidden)) in chunks {
        let logits = &mut logits[..losses.len() * vocabulary];
        input.project(hidden, logits);
        if let Some(correct) = &mut correct {
            let first = index * chunk;
            mark_correct(&mut correct[first..first + targets.len()], targets, logits);
        }
        losses.par_iter_mut().zip(targets).zip(logits.par_chunks(vocabulary)).for_each(
            |((loss, &target), logits)| {
                *loss = target_of(target).map_or(0.0, |target| {
                    row_loss(logits, target, input.label_smoothing, input.denominator).0
                });
            },
        );
    }
}

/// The loss of each row, the gradient of `hidden` and, if requested, that of the weight. Logits are
/// replaced by their gradients in place.
pub fn head_loss_grad<E: Element, G: Element>(
    input: HeadInput<'_, E>,
    d_losses: &[f32],
    logits: &mut [E],
    output: RowOutput<'_>,
    d_hidden: &mut [E],
    mut d_weight: Option<(&mut [G], Accumulate)>,
) {
    let RowOutput { losses, mut correct } = output;
    let (vocabulary, width, chunk) = (input.vocabulary(), input.width, input.chunk_rows);
    let smoothing = input.label_smoothing;
    let spread = smoothing / vocabulary as f32;
    if losses.is_empty()
        && let Some((d_weight, Accumulate::Replace)) = &mut d_weight
    {
        d_weight.fill(G::from_f32(0.0));
    }
    let chunks = losses
        .chunks_mut(chunk)
        .zip(input.targets.chunks(chunk))
        .zip(d_losses.chunks(chunk))
        .zip(input.hidden.chunks(chunk * width))
        .zip(d_hidden.chunks_mut(chunk * width))
        .enumerate();
    for (index, ((((losses, targets), d_losses), hidden), d_hidden)) in chunks {
        let rows = losses.len();
        let logits = &mut logits[..rows * vocabulary];
        input.project(hidden, logits);
        if let Some(correct) = &mut correct {
            let first = index * chunk;
            mark_correct(&mut correct[first..first + rows], targets, logits);
        }
        losses
            .par_iter_mut()
            .zip(targets)
            .zip(d_losses)
            .zip(logits.par_chunks_mut(vocabulary))
            .for_each(|(((loss, &target), d_loss), logits)| {
                let Some(target) = target_of(target) else {
                    *loss = 0.0;
                    return logits.fill(E::from_f32(0.0));
                };
                let scale = d_loss / input.denominator;
                let (row_loss, log_sum) = row_loss(logits, target, smoothing, input.denominator);
                *loss = row_loss;
                let at_target = exp(logits[target].to_f32() - log_sum) - spread - (1.0 - smoothing);
                to_gradient(logits, log_sum, spread, scale);
                logits[target] = E::from_f32(at_target * scale);
            });
        let d_logits = Matrix::row_major(&*logits, rows, vocabulary);
        input.products.gemm(
            d_logits,
            input.weight(),
            MatrixMut::row_major(d_hidden, rows, width),
            Epilogue::default(),
        );
        if let Some((d_weight, accumulate)) = &mut d_weight {
            input.products.gemm(
                d_logits.transposed(),
                Matrix::row_major(hidden, rows, width),
                MatrixMut::row_major(d_weight, vocabulary, width),
                Epilogue { accumulate: *accumulate, ..Epilogue::default() },
            );
            *accumulate = Accumulate::Add;
        }
    }
}
