//! Optimizer moments: their memory layout, and the arithmetic of 8-bit moments.
//!
//! The elements of a parameter are divided into consecutive groups of [`MOMENT_GROUP`]. A group is
//! stored as one byte per element, followed by an f32 scale, the largest magnitude of the group. So
//! any range of whole groups is contiguous. Codes are finer near zero, where most elements are: a
//! first moment is a sign and a level `z / (2 − z)` with `z = code / 127`, the inverse of the
//! softsign `2y / (1 + y)`. A second moment is a level `(code / 255)⁴`. A value between two levels
//! is rounded to one of them at random, in proportion, so that it is preserved on average. All
//! operations are f32 sums, products, quotients and square roots, each rounded separately: every
//! device gives the same bits.
//!
//! A small first moment may be rounded up while its second moment is rounded down to zero. Their
//! quotient would give a step dozens of times too long. [`AdamWParameters::first_moment_bound`] is
//! a bound that no sequence of gradients exceeds. First moments are clipped to it.

use crate::{AdamWParameters, DType, Shape};

/// Elements that share a scale.
pub const MOMENT_GROUP: usize = 128;

/// Bytes of a group: the codes, then the scale.
pub const MOMENT_GROUP_BYTES: usize = MOMENT_GROUP + 4;

/// Elements per block of an observed update, which sums over blocks.
pub const OBSERVED_BLOCK: usize = 2048;

/// Elements in a row that are observed or not: what a warp has on CUDA.
pub const OBSERVED_RUN: usize = 256;

/// One run in this many is observed. A cosine needs no more, and observing an element costs as much as updating it.
pub const OBSERVED_SHARE: usize = 4;

/// Whether a run of a block is observed. Blocks differ in their runs, so that all columns of a wide matrix are seen.
pub fn is_observed(block: usize, run: usize) -> bool {
    (block + run).is_multiple_of(OBSERVED_SHARE)
}

/// Number of sums per block of an observed update: the sums of `u²`, `u · p`, `p²` and `w²` over the
/// runs that are observed. Here `u` is the change of an element without weight decay, `p` the change that the moments before the
/// update would give at the same rate, and `w` the element before the update. They are f32 stored
/// as i32 words, so that the dtype distinguishes them from moments.
pub const OBSERVED_SUMS: usize = 4;

/// Pieces of a parameter with an observed update begin at multiples of this many elements, so that
/// their sums are aligned.
pub const OBSERVED_PIECE_ALIGNMENT: usize = 16 * OBSERVED_BLOCK;

/// The storage format of a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MomentFormat {
    /// One element for each element of the parameter.
    Elements(DType),
    /// Groups of 8-bit codes.
    Int8,
    /// Not a moment: sums over an update, see [`OBSERVED_SUMS`].
    Observed,
}

impl MomentFormat {
    /// The format of a moment stored with this dtype.
    pub fn of(dtype: DType) -> MomentFormat {
        match dtype {
            DType::U8 => MomentFormat::Int8,
            DType::I32 => MomentFormat::Observed,
            other => MomentFormat::Elements(other),
        }
    }

    /// The dtype in memory.
    pub fn dtype(self) -> DType {
        match self {
            MomentFormat::Elements(dtype) => dtype,
            MomentFormat::Int8 => DType::U8,
            MomentFormat::Observed => DType::I32,
        }
    }

    /// The shape of a moment for a parameter, or for a piece of one that begins at a group
    /// boundary.
    pub fn shape(self, parameter: &Shape) -> Shape {
        match self {
            MomentFormat::Elements(_) => parameter.clone(),
            MomentFormat::Int8 => {
                Shape::from([parameter.elements().div_ceil(MOMENT_GROUP), MOMENT_GROUP_BYTES])
            }
            MomentFormat::Observed => {
                Shape::from([parameter.elements().div_ceil(OBSERVED_BLOCK), OBSERVED_SUMS])
            }
        }
    }

    /// Bytes of a moment with this many elements, starting at a group boundary.
    pub fn size_bytes(self, elements: usize) -> usize {
        match self {
            MomentFormat::Elements(dtype) => elements * dtype.size_bytes(),
            MomentFormat::Int8 => elements.div_ceil(MOMENT_GROUP) * MOMENT_GROUP_BYTES,
            MomentFormat::Observed => {
                elements.div_ceil(OBSERVED_BLOCK) * OBSERVED_SUMS * size_of::<f32>()
            }
        }
    }
}

/// Levels of a first moment, by the magnitude of its code.
pub static FIRST_MOMENT_LEVELS: [f32; 128] = {
    let mut levels = [0.0; 128];
    let mut code = 0;
    while code < levels.len() {
        let z = code as f32 / 127.0;
        levels[code] = z / (2.0 - z);
        code += 1;
    }
    levels
};

/// Levels of a second moment, by its code.
pub static SECOND_MOMENT_LEVELS: [f32; 256] = {
    let mut levels = [0.0; 256];
    let mut code = 0;
    while code < levels.len() {
        let root = code as f32 / 255.0;
        let square = root * root;
        levels[code] = square * square;
        code += 1;
    }
    levels
};

/// The code whose level is just below or just above a value, given a guess of the one below. `bits`
/// decide the rounding.
#[inline(always)]
fn rounded(levels: &[f32], guess: f32, value: f32, bits: u16) -> usize {
    let low = (guess as usize).min(levels.len() - 2);
    let (below, above) = (levels[low], levels[low + 1]);
    let share = (f32::from(bits) + 0.5) * (1.0 / 65536.0);
    low + usize::from(value - below > share * (above - below))
}

/// Encodes a first moment in 8 bits. `scale` is at least its magnitude. `bits` decide the rounding.
#[inline(always)]
pub fn encode_first_moment(value: f32, scale: f32, bits: u16) -> u8 {
    if scale == 0.0 {
        return 0;
    }
    let y = value.abs() / scale;
    let code = rounded(&FIRST_MOMENT_LEVELS, (y + y) / (1.0 + y) * 127.0, y, bits) as i8;
    (if value < 0.0 { -code } else { code }).cast_unsigned()
}

/// Decodes a first moment.
#[inline(always)]
pub fn decode_first_moment(code: u8, scale: f32) -> f32 {
    let code = code.cast_signed();
    let value = FIRST_MOMENT_LEVELS[usize::from(code.unsigned_abs()).min(127)] * scale;
    if code < 0 { -value } else { value }
}

/// Encodes a second moment in 8 bits. `scale` is at least as large. `bits` decide the rounding.
#[inline(always)]
pub fn encode_second_moment(value: f32, scale: f32, bits: u16) -> u8 {
    if scale == 0.0 {
        return 0;
    }
    let y = value / scale;
    rounded(&SECOND_MOMENT_LEVELS, y.sqrt().sqrt() * 255.0, y, bits) as u8
}

/// Decodes a second moment.
#[inline(always)]
pub fn decode_second_moment(code: u8, scale: f32) -> f32 {
    SECOND_MOMENT_LEVELS[usize::from(code)] * scale
}

/// The scale of a group.
pub fn moment_scale(group: &[u8]) -> f32 {
    let bytes = &group[MOMENT_GROUP..MOMENT_GROUP_BYTES];
    f32::from_le_bytes(bytes.try_into().expect("four bytes"))
}

impl AdamWParameters {
    /// The maximum of a first moment as a multiple of the square root of its second moment, for any
    /// gradients: by Cauchy–Schwarz `(1 − β1) / √((1 − β2)(1 − β1²/β2))`. `None` unless `β1² < β2`,
    /// because there is no bound otherwise.
    pub fn first_moment_bound(&self) -> Option<f32> {
        let (beta1, beta2) = (f64::from(self.beta1), f64::from(self.beta2));
        if beta1 == 0.0 {
            return Some((1.0 / (1.0 - beta2).sqrt()) as f32);
        }
        let rest = 1.0 - beta1 * beta1 / beta2;
        (beta1 * beta1 < beta2).then(|| ((1.0 - beta1) / ((1.0 - beta2) * rest).sqrt()) as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn groups_lie_one_after_another() {
        let int8 = MomentFormat::Int8;
        assert_eq!(int8.shape(&Shape::from([3, 100])), Shape::from([3, 132]));
        for (elements, bytes) in [(1, 132), (128, 132), (129, 264), (1024, 1056)] {
            assert_eq!(int8.size_bytes(elements), bytes);
            let shape = int8.shape(&Shape::from([elements]));
            assert_eq!(shape.elements() * int8.dtype().size_bytes(), bytes);
        }
        let float = MomentFormat::Elements(DType::BF16);
        assert_eq!((float.size_bytes(129), MomentFormat::of(DType::BF16)), (258, float));
        assert_eq!(MomentFormat::of(int8.dtype()), int8);
        let observed = MomentFormat::Observed;
        assert_eq!(MomentFormat::of(observed.dtype()), observed);
        assert_eq!(observed.shape(&Shape::from([3, 2048])), Shape::from([3, 4]));
        assert_eq!(
            (observed.size_bytes(2049), observed.size_bytes(OBSERVED_PIECE_ALIGNMENT)),
            (32, 256)
        );
    }

    #[test]
    fn levels_rise_from_zero_to_one() {
        for levels in [&FIRST_MOMENT_LEVELS[..], &SECOND_MOMENT_LEVELS[..]] {
            assert_eq!((levels[0], levels[levels.len() - 1]), (0.0, 1.0));
            assert!(levels.windows(2).all(|pair| pair[0] < pair[1]));
        }
    }

    /// A level is encoded exactly for any bits. A value between two levels goes to one of them and
    /// is preserved on average.
    #[test]
    fn values_are_kept_on_average() {
        for scale in [1.0, 3.7e-12, 2.5e8, 1e-44] {
            for code in 0..=127u8 {
                let value = decode_first_moment(code, scale);
                for bits in [0, 1, 40_000, u16::MAX].into_iter().filter(|_| scale > 1e-30) {
                    assert_eq!(encode_first_moment(value, scale, bits), code, "{value} of {scale}");
                    let negative = encode_first_moment(-value, scale, bits);
                    assert_eq!(decode_first_moment(negative, scale), -value);
                }
            }
            assert_eq!(decode_first_moment(encode_first_moment(-scale, scale, 9), scale), -scale);
            assert_eq!(decode_second_moment(encode_second_moment(scale, scale, 9), scale), scale);
        }
        for code in 0..=255u8 {
            let value = decode_second_moment(code, 1.0);
            for bits in [0, u16::MAX] {
                assert_eq!(encode_second_moment(value, 1.0, bits), code);
            }
        }
        let mut random = Random(8);
        for _ in 0..200 {
            let value = random.unit() as f32;
            let value = value * value * value;
            let (mut first, mut second) = (0.0, 0.0);
            let count = 1 << 12;
            for part in 0..count {
                let bits = (part * 16 + 7) as u16;
                first += f64::from(decode_first_moment(encode_first_moment(value, 1.0, bits), 1.0));
                let code = encode_second_moment(value, 1.0, bits);
                second += f64::from(decode_second_moment(code, 1.0));
            }
            for mean in [first, second].map(|sum| sum / f64::from(count)) {
                assert!((mean - f64::from(value)).abs() < 2e-5, "{value} became {mean}");
            }
        }
    }

    #[test]
    fn nothing_stays_nothing() {
        for bits in [0, u16::MAX] {
            assert_eq!(encode_first_moment(0.0, 0.0, bits), 0);
            assert_eq!(encode_first_moment(-0.0, 2.0, bits), 0);
            assert_eq!(encode_second_moment(0.0, 0.0, bits), 0);
            assert_eq!(encode_second_moment(0.0, 2.0, bits), 0);
        }
        assert_eq!(decode_first_moment(0, 5.0).to_bits(), 0);
    }

    /// With gradients chosen to reach the bound, Adam in f64 comes close to it and does not exceed
    /// it.
    #[test]
    fn the_bound_holds_and_is_the_least() {
        let hyper =
            |beta1, beta2| AdamWParameters { beta1, beta2, epsilon: 1e-8, weight_decay: 0.0 };
        for (beta1, beta2) in [(0.9, 0.95), (0.9, 0.999), (0.0, 0.9), (0.8, 0.99)] {
            let bound = hyper(beta1, beta2).first_moment_bound().expect("there is one");
            let (beta1, beta2) = (f64::from(beta1), f64::from(beta2));
            // Equality in Cauchy–Schwarz: gradients that grow by beta2 / beta1 per step.
            let (mut first, mut second, mut gradient) = (0.0, 0.0, 1e-100);
            let mut most: f64 = 0.0;
            for _ in 0..400 {
                first = beta1 * first + (1.0 - beta1) * gradient;
                second = beta2 * second + (1.0 - beta2) * gradient * gradient;
                most = most.max(first / f64::sqrt(second));
                gradient *= if beta1 > 0.0 { beta2 / beta1 } else { 1.0 };
            }
            let share = most / f64::from(bound);
            assert!((0.999..1.000_001).contains(&share), "{beta1} {beta2}: {share} of {bound}");
        }
        assert_eq!(hyper(0.95, 0.9).first_moment_bound(), None);
        assert_eq!(hyper(0.9, 0.0).first_moment_bound(), None);
    }
}
