//! Storage types of the kernels. Arithmetic is always f32. A type only defines how a value is
//! stored.

use half::bf16;
use storm_graph::{E4M3_VALUES, encode_e4m3};

/// A storage type that converts to f32 exactly and from f32 with one rounding.
///
/// The conversions are plain bit operations, so that loops over them vectorize.
pub trait Element: Copy + Send + Sync + 'static {
    /// Values per 32 bits: one f32, two bf16 (upper halves of f32 values) with the first in the low
    /// bits, or four codes.
    const PER_WORD: usize;

    /// The value, exactly.
    fn to_f32(self) -> f32;
    /// The nearest representable value, ties to even. NaN stays NaN.
    fn from_f32(value: f32) -> Self;

    /// The values if they are bf16.
    #[inline(always)]
    fn as_bf16(_values: &[Self]) -> Option<&[bf16]> {
        None
    }

    /// The same for values that are written.
    #[inline(always)]
    fn as_bf16_mut(_values: &mut [Self]) -> Option<&mut [bf16]> {
        None
    }

    /// The address, if it is that of an f32.
    #[inline(always)]
    fn as_f32_address(_address: *mut Self) -> Option<*mut f32> {
        None
    }

    /// The values of a vector, exactly.
    #[inline(always)]
    fn widen(values: [Self; 16]) -> [f32; 16] {
        let mut wide = [0.0; 16];
        for (wide, value) in wide.iter_mut().zip(values) {
            *wide = value.to_f32();
        }
        wide
    }
}

impl Element for f32 {
    const PER_WORD: usize = 1;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn as_f32_address(address: *mut f32) -> Option<*mut f32> {
        Some(address)
    }

    // Without this, the compiler splits the array into elements and assembles it again.
    #[inline(always)]
    fn widen(values: [Self; 16]) -> [f32; 16] {
        values
    }
}

impl Element for bf16 {
    const PER_WORD: usize = 2;

    #[inline(always)]
    fn as_bf16(values: &[bf16]) -> Option<&[bf16]> {
        Some(values)
    }

    #[inline(always)]
    fn as_bf16_mut(values: &mut [bf16]) -> Option<&mut [bf16]> {
        Some(values)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        // Adding just under half a unit of the last kept bit, plus one if that bit is set, rounds
        // to nearest even. A carry out of the mantissa goes to the exponent, which is correct.
        let odd = (bits >> 16) & 1;
        let rounded = bits.wrapping_add(0x7fff + odd) >> 16;
        // This addition could change a NaN to an infinity: truncate NaN and set the quiet bit.
        let quiet_nan = (bits >> 16) | 0x40;
        let is_nan = (bits & 0x7fff_ffff) > 0x7f80_0000;
        bf16::from_bits(if is_nan { quiet_nan } else { rounded } as u16)
    }
}

/// A code of an 8-bit float, without the scale of its tensor.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct E4m3(pub u8);

impl Element for E4m3 {
    const PER_WORD: usize = 4;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        E4M3_VALUES[usize::from(self.0)]
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        E4m3(encode_e4m3(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_matches_the_half_crate() {
        // Every exponent and sign, with low halves around the rounding boundaries.
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(((high as u32) << 16) | low);
                let ours = <bf16 as Element>::from_f32(value);
                let reference = bf16::from_f32(value);
                assert_eq!(ours.to_bits(), reference.to_bits(), "{value:e}");
                assert_eq!(Element::to_f32(ours).to_bits() << 1, reference.to_f32().to_bits() << 1);
            }
        }
    }
}
