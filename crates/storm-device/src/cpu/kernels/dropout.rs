//! Dropout, and its gradient, which is the same function.

use super::element::Element;
use rayon::prelude::*;
use storm_graph::random::{DropoutWords, Purpose, Stream, drop_threshold, words};

/// Elements per task.
const CHUNK: usize = 1 << 14;

/// Defines which elements are dropped.
#[derive(Clone, Copy, Debug)]
pub struct Mask {
    /// Seed, number of the micro-batch, and whether dropout is enabled.
    pub words: DropoutWords,
    /// Stream of the node and its block.
    pub stream: Stream,
    /// The fraction of elements to drop.
    pub rate: f32,
}

/// `out = x ∘ mask / (1 - rate) + addend`.
pub fn dropout<E: Element>(mask: Mask, x: &[E], addend: Option<&[E]>, out: &mut [E]) {
    let Mask { words: DropoutWords { seed, micro_batch, drops }, stream, rate } = mask;
    let (threshold, scale) = (drop_threshold(rate), 1.0 / (1.0 - rate));
    // Elements are counted through the whole step, so the first one here may be inside a block of
    // random words.
    let first = u64::from(micro_batch) * x.len() as u64;
    out.par_chunks_mut(CHUNK).enumerate().for_each(|(task, out)| {
        let start = task * CHUNK;
        let mut block = [0; 4];
        for (at, out) in out.iter_mut().enumerate() {
            let place = start + at;
            let mut value = x[place].to_f32();
            if drops {
                let element = first + place as u64;
                if at == 0 || element.is_multiple_of(4) {
                    block = words(seed, Purpose::Dropout, stream, element / 4);
                }
                let is_kept = block[(element % 4) as usize] >= threshold;
                value = if is_kept { value * scale } else { 0.0 };
            }
            *out = E::from_f32(addend.map_or(value, |addend| value + addend[place].to_f32()));
        }
    });
}
