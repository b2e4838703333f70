//! The arithmetic of θ + τ·d.
//!
//! Values are always computed from the base, which is θ before the first jump, with the sum of all
//! accepted τ. So the weights after a jump depend only on base, direction and τ, and returning to
//! an earlier τ reproduces the same bits.
//!
//! `x = base + τ · d` in f32, with product and sum rounded separately, and `x = base` for τ = 0.
//! How x is stored:
//! - f32 weights: x.
//! - bf16 weights with f32 masters: x in the master, and the nearest bf16 in the weight.
//! - bf16 weights alone: stochastic rounding, with bits that depend on (seed, updates, tensor,
//!   element) but not on τ. A jump is often shorter than the bf16 spacing and would be lost in
//!   rounding to nearest.

use super::direction::{Course, RandomWords};
use half::bf16;
use rayon::prelude::*;
use storm_graph::random::round_to_bf16;

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    F32,
    /// With an f32 master, which is what the copies hold.
    Bf16AndMaster,
    /// Without a master.
    Bf16,
}

impl Form {
    /// Bytes of an element in copies of the weights.
    pub(super) fn copied_bytes(self) -> usize {
        match self {
            Form::F32 | Form::Bf16AndMaster => size_of::<f32>(),
            Form::Bf16 => size_of::<bf16>(),
        }
    }

    /// An element of a copy.
    pub(super) fn read(self, bytes: &[u8], index: usize) -> f32 {
        match self {
            Form::F32 | Form::Bf16AndMaster => f32_at(bytes, index),
            Form::Bf16 => {
                let [low, high] = [bytes[2 * index], bytes[2 * index + 1]];
                bf16::from_ne_bytes([low, high]).to_f32()
            }
        }
    }

    /// Bytes of an element of the parameter.
    pub(super) fn parameter_bytes(self) -> usize {
        match self {
            Form::F32 => size_of::<f32>(),
            Form::Bf16AndMaster | Form::Bf16 => size_of::<bf16>(),
        }
    }

    /// Bytes of an element of the master.
    pub(super) fn master_bytes(self) -> usize {
        match self {
            Form::F32 | Form::Bf16 => 0,
            Form::Bf16AndMaster => size_of::<f32>(),
        }
    }

    /// The value after storing, rounded with a random word.
    fn stored(self, value: f32, word: u32) -> f32 {
        match self {
            Form::F32 | Form::Bf16AndMaster => value,
            Form::Bf16 => round_to_bf16(value, word as u16).to_f32(),
        }
    }
}

/// An f32 element of a copy.
pub(super) fn f32_at(bytes: &[u8], index: usize) -> f32 {
    let at = size_of::<f32>() * index;
    f32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Writes an element into a slice.
fn put<const N: usize>(bytes: &mut [u8], index: usize, value: [u8; N]) {
    bytes[N * index..N * (index + 1)].copy_from_slice(&value);
}

/// A slice of a tensor's copies.
#[derive(Clone)]
pub(super) struct Piece<'a> {
    pub(super) form: Form,
    /// θ before the first jump.
    pub(super) base: &'a [u8],
    /// θ at the start of the window.
    pub(super) reference: &'a [u8],
    /// f32. `None` for directions without state.
    pub(super) state: Option<&'a [u8]>,
    /// The random words of the tensor.
    pub(super) words: RandomWords,
    /// Index of its first element in the tensor.
    pub(super) first_element: usize,
}

impl Piece<'_> {
    /// Writes θ + τ·d to the parameter and to its master, which is empty if there is none. `before`
    /// is the τ of the previous jump. Returns the sum of squared changes of the stored weights
    /// since then.
    fn fill(
        &self,
        course: &Course,
        tau: f32,
        before: f32,
        parameter: &mut [u8],
        master: &mut [u8],
    ) -> f64 {
        let needs_words = self.form == Form::Bf16 || matches!(course, Course::Signs(_));
        let mut words = self.words.clone();
        let mut moved = 0.0;
        for index in 0..self.base.len() / self.form.copied_bytes() {
            let word = if needs_words { words.at(self.first_element + index) } else { 0 };
            let base = self.form.read(self.base, index);
            let reference = self.form.read(self.reference, index);
            let state = self.state.map_or(0.0, |state| f32_at(state, index));
            let direction = course.at(base, reference, state, word);
            let at = |tau: f32| match tau == 0.0 {
                true => base,
                false => self.form.stored(base + tau * direction, word),
            };
            let value = at(tau);
            moved += (f64::from(value) - f64::from(at(before))).powi(2);
            match self.form {
                Form::F32 => put(parameter, index, value.to_ne_bytes()),
                Form::Bf16 => put(parameter, index, bf16::from_f32(value).to_ne_bytes()),
                Form::Bf16AndMaster => {
                    put(master, index, value.to_ne_bytes());
                    put(parameter, index, bf16::from_f32(value).to_ne_bytes());
                }
            }
        }
        moved
    }
}

/// Elements per thread at a time: a multiple of four, because random words are drawn in fours.
const CHUNK: usize = 1 << 14;

/// [`Piece::fill`] on all cores. The sum has the same bits for any number of cores.
pub(super) fn fill(
    piece: &Piece<'_>,
    course: &Course,
    tau: f32,
    before: f32,
    parameter: &mut [u8],
    master: &mut [u8],
) -> f64 {
    let form = piece.form;
    let size = form.copied_bytes();
    let elements = piece.base.len() / size;
    // Empty slices for a weight without a master.
    let mut masters = master.chunks_mut(CHUNK * form.master_bytes().max(1));
    let chunks: Vec<(usize, &mut [u8], &mut [u8])> = parameter
        .chunks_mut(CHUNK * form.parameter_bytes())
        .enumerate()
        .map(|(number, parameter)| (number * CHUNK, parameter, masters.next().unwrap_or_default()))
        .collect();
    let moved: Vec<f64> = chunks
        .into_par_iter()
        .map(|(first, parameter, master)| {
            let end = elements.min(first + CHUNK);
            let part = Piece {
                base: &piece.base[first * size..end * size],
                reference: &piece.reference[first * size..end * size],
                state: piece.state.map(|state| &state[4 * first..4 * end]),
                first_element: piece.first_element + first,
                ..piece.clone()
            };
            part.fill(course, tau, before, parameter, master)
        })
        .collect();
    moved.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_graph::random::{Seed, Stream};

    fn words() -> RandomWords {
        RandomWords::new(Seed { seed: 5, step: 9 }, Stream { tensor: 3, layer: 1 })
    }

    fn f32_bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    fn bf16_bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|&value| bf16::from_f32(value).to_ne_bytes()).collect()
    }

    struct Filled {
        parameter: Vec<u8>,
        master: Vec<u8>,
        moved: f64,
    }

    fn filled(piece: &Piece<'_>, course: Course, tau: f32, before: f32) -> Filled {
        let count = piece.base.len() / piece.form.copied_bytes();
        let mut parameter = vec![1; count * piece.form.parameter_bytes()];
        let mut master = vec![1; count * piece.form.master_bytes()];
        let moved = fill(piece, &course, tau, before, &mut parameter, &mut master);
        Filled { parameter, master, moved }
    }

    #[test]
    fn f32_weights_are_the_sum() {
        let (base, reference) = (f32_bytes(&[1.0, -2.0, 0.1]), f32_bytes(&[0.5, 0.0, 0.3]));
        let piece = Piece {
            form: Form::F32,
            base: &base,
            reference: &reference,
            state: None,
            words: words(),
            first_element: 8,
        };
        let found = filled(&piece, Course::Difference, 2.0, 0.0);
        let third = 0.1_f32 + 2.0 * (0.1_f32 - 0.3_f32);
        assert_eq!(found.parameter, f32_bytes(&[2.0, -6.0, third]));
        assert!(found.master.is_empty());
        let moved = 1.0 + 16.0 + (f64::from(third) - f64::from(0.1_f32)).powi(2);
        assert_eq!(found.moved, moved);
        // From one jump to the next, and back to the base.
        assert_eq!(filled(&piece, Course::Difference, 2.0, 2.0).moved, 0.0);
        assert_eq!(filled(&piece, Course::Difference, 0.0, 2.0).parameter, base);
        // A non-finite direction does not change the base.
        assert_eq!(filled(&piece, Course::Signs(f32::INFINITY), 0.0, 0.0).parameter, base);
    }

    #[test]
    fn masters_are_exact_and_weights_the_nearest() {
        let (base, reference) = (f32_bytes(&[1.0, 1.0]), f32_bytes(&[0.999, 1.0]));
        let state = f32_bytes(&[0.5, -1e-4]);
        let piece = Piece {
            form: Form::Bf16AndMaster,
            base: &base,
            reference: &reference,
            state: Some(&state),
            words: words(),
            first_element: 0,
        };
        let found = filled(&piece, Course::State(0.5), 1.0, 0.0);
        let expected = [1.25, 1.0 + 0.5 * -1e-4_f32];
        assert_eq!(found.master, f32_bytes(&expected));
        assert_eq!(found.parameter, bf16_bytes(&expected));
        // The second did not reach the next bf16 number, but its master moved.
        assert_eq!(found.parameter[2..], bf16_bytes(&[1.0])[..]);
        assert!(found.moved > 0.0625);
    }

    #[test]
    fn bf16_weights_round_to_a_neighbour_and_are_right_in_the_mean() {
        // A hundredth of the distance to the next number.
        let step = 2.0_f32.powi(-7) / 100.0;
        let count = 20_000;
        let base = bf16_bytes(&vec![1.0; count]);
        let state = f32_bytes(&vec![step; count]);
        let jump = |first: usize, base: &[u8], state: &[u8], tau: f32| {
            let (form, reference) = (Form::Bf16, base);
            let state = Some(state);
            let piece =
                Piece { form, base, reference, state, words: words(), first_element: first };
            filled(&piece, Course::State(1.0), tau, 0.0)
        };
        let Filled { parameter: whole, moved, .. } = jump(0, &base, &state, 1.0);
        let read = |bytes: &[u8], index: usize| Form::Bf16.read(bytes, index);
        let up = (0..count).filter(|&i| read(&whole, i) > 1.0).count();
        assert!((0..count).all(|i| [1.0, 1.0 + 2.0_f32.powi(-7)].contains(&read(&whole, i))));
        assert!((150..250).contains(&up), "{up} of {count}");
        assert_eq!(moved, up as f64 * 2.0_f64.powi(-14));
        // The same in pieces.
        let of = |bytes: &[u8], size: usize, first: usize| {
            bytes[size * first..size * (first + 1000)].to_vec()
        };
        let pieces = (0..count).step_by(1000).flat_map(|first| {
            jump(first, &of(&base, 2, first), &of(&state, 4, first), 1.0).parameter
        });
        assert!(pieces.eq(whole.iter().copied()));
        // With a larger τ, weights that were rounded up stay up, because random words do not depend
        // on τ.
        let further = jump(0, &base, &state, 2.0).parameter;
        assert!((0..count).all(|i| read(&further, i) >= read(&whole, i)));
        // Values that bf16 represents exactly are not rounded.
        let nowhere = jump(0, &base, &f32_bytes(&vec![0.0; count]), 1.0);
        assert_eq!(nowhere.moved, 0.0);
        assert!(nowhere.parameter == base);
    }
}
