//! The gates of a GRU, element by element.

use super::element::Element;
use super::elementwise::CHUNK;
use super::math::{sigmoid, tanh};
use crate::simd_dispatch;
use rayon::prelude::*;

simd_dispatch! {
    fn reset_chunk[E: Element](gate: &[E], hidden: &[E], out: &mut [E]) {
        for ((out, gate), hidden) in out.iter_mut().zip(gate).zip(hidden) {
            *out = E::from_f32(sigmoid(gate.to_f32()) * hidden.to_f32());
        }
    }

    fn reset_grad_chunk[E: Element](
        dy: &[E], gate: &[E], hidden: &[E], d_gate: &mut [E], d_hidden: &mut [E]
    ) {
        let outputs = d_gate.iter_mut().zip(d_hidden);
        for (((d_gate, d_hidden), dy), (gate, hidden)) in
            outputs.zip(dy).zip(gate.iter().zip(hidden))
        {
            let (dy, reset) = (dy.to_f32(), sigmoid(gate.to_f32()));
            *d_gate = E::from_f32(dy * hidden.to_f32() * (reset * (1.0 - reset)));
            *d_hidden = E::from_f32(dy * reset);
        }
    }

    fn state_chunk[E: Element](gate: &[E], candidate: &[E], hidden: &[E], out: &mut [E]) {
        for ((out, gate), (candidate, hidden)) in
            out.iter_mut().zip(gate).zip(candidate.iter().zip(hidden))
        {
            let (update, candidate) = (sigmoid(gate.to_f32()), tanh(candidate.to_f32()));
            *out = E::from_f32(update * hidden.to_f32() + (1.0 - update) * candidate);
        }
    }

    fn state_grad_chunk[E: Element](
        dy: &[E], operands: [&[E]; 3], gradients: [&mut [E]; 3]
    ) {
        let ([gate, candidate, hidden], [d_gate, d_candidate, d_hidden]) = (operands, gradients);
        for at in 0..dy.len() {
            let (dy, old) = (dy[at].to_f32(), hidden[at].to_f32());
            let (update, new) = (sigmoid(gate[at].to_f32()), tanh(candidate[at].to_f32()));
            d_gate[at] = E::from_f32(dy * (old - new) * (update * (1.0 - update)));
            d_candidate[at] = E::from_f32(dy * (1.0 - update) * (1.0 - new * new));
            d_hidden[at] = E::from_f32(dy * update);
        }
    }
}

/// `out = sigmoid(gate) · hidden`.
pub fn gru_reset<E: Element>(gate: &[E], hidden: &[E], out: &mut [E]) {
    let operands = gate.par_chunks(CHUNK).zip(hidden.par_chunks(CHUNK));
    out.par_chunks_mut(CHUNK)
        .zip(operands)
        .for_each(|(out, (gate, hidden))| reset_chunk(gate, hidden, out));
}

/// Gradients of the gate and of the old state of [`gru_reset`].
pub fn gru_reset_grad<E: Element>(
    dy: &[E],
    gate: &[E],
    hidden: &[E],
    d_gate: &mut [E],
    d_hidden: &mut [E],
) {
    let operands = dy.par_chunks(CHUNK).zip(gate.par_chunks(CHUNK)).zip(hidden.par_chunks(CHUNK));
    let outputs = d_gate.par_chunks_mut(CHUNK).zip(d_hidden.par_chunks_mut(CHUNK));
    outputs.zip(operands).for_each(|((d_gate, d_hidden), ((dy, gate), hidden))| {
        reset_grad_chunk(dy, gate, hidden, d_gate, d_hidden);
    });
}

/// `out = u · hidden + (1 − u) · tanh(candidate)` with `u = sigmoid(gate)`.
pub fn gru_state<E: Element>(gate: &[E], candidate: &[E], hidden: &[E], out: &mut [E]) {
    let operands =
        gate.par_chunks(CHUNK).zip(candidate.par_chunks(CHUNK)).zip(hidden.par_chunks(CHUNK));
    out.par_chunks_mut(CHUNK).zip(operands).for_each(|(out, ((gate, candidate), hidden))| {
        state_chunk(gate, candidate, hidden, out);
    });
}

/// Gradients of gate, candidate and old state of [`gru_state`].
pub fn gru_state_grad<E: Element>(
    dy: &[E],
    [gate, candidate, hidden]: [&[E]; 3],
    [d_gate, d_candidate, d_hidden]: [&mut [E]; 3],
) {
    let operands =
        gate.par_chunks(CHUNK).zip(candidate.par_chunks(CHUNK)).zip(hidden.par_chunks(CHUNK));
    let outputs = d_gate
        .par_chunks_mut(CHUNK)
        .zip(d_candidate.par_chunks_mut(CHUNK))
        .zip(d_hidden.par_chunks_mut(CHUNK));
    let chunks = outputs.zip(operands).zip(dy.par_chunks(CHUNK));
    chunks.for_each(|((((d_gate, d_candidate), d_hidden), ((gate, candidate), hidden)), dy)| {
        state_grad_chunk(dy, [gate, candidate, hidden], [d_gate, d_candidate, d_hidden]);
    });
}
