//! Operands of products in 8-bit floats: E4M3 codes with one scale per tensor.
//!
//! A code has a sign, four exponent bits (bias 7) and three mantissa bits. Values go up to 448.
//! There is no infinity, and `0x7f` and `0xff` are NaN. Values are multiplied by a power of two
//! before they are rounded to the nearest code, ties to even. It is the largest power that keeps
//! the tensor's largest magnitude at 448 or below. So scaling is exact, no code saturates, and a
//! product of codes times both scales equals the product of the decoded values, rounded as in f32.
//!
//! A tensor of zeros has scale 1. A tensor with an infinity or NaN has scale NaN, so every element
//! of its products is NaN and the step is canceled.
//!
//! Codes are stored as rows of a u8 tensor. One more row follows, which begins with the scale: the
//! f32 factor that converts codes to values. The rest of that row is zero.

use crate::Shape;

/// Rows and columns of operands are multiples of this, because tensor cores read 16 bytes at a
/// time.
pub const FP8_MULTIPLE: usize = 16;

/// Exponent of the largest factor. The product of two operands' scales is then a normal f32.
const EXPONENT_MAX: i32 = 63;

/// The layout of the codes of a tensor (.., K), viewed as R rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8Form {
    /// (R + 1, K): for products that sum over a row's elements.
    Rows,
    /// (K + 1, R), the transpose: for products that sum over rows.
    Columns,
    /// Both, in this order.
    Both,
}

impl Fp8Form {
    /// Whether it includes codes in rows.
    pub fn has_rows(self) -> bool {
        self != Fp8Form::Columns
    }

    /// Whether it includes codes in columns.
    pub fn has_columns(self) -> bool {
        self != Fp8Form::Rows
    }
}

/// The shape of the codes of a matrix, including the row of the scale.
pub fn fp8_shape(rows: usize, columns: usize) -> Shape {
    Shape::from([rows + 1, columns])
}

/// Whether a product (rows, inner) · (inner, columns) and its two gradients can use 8-bit floats.
/// This depends only on shapes.
pub fn fp8_suits(rows: usize, columns: usize, inner: usize) -> bool {
    [rows, columns, inner].iter().all(|extent| *extent > 0 && extent.is_multiple_of(FP8_MULTIPLE))
}

/// The exponent of the factor for a tensor's values. `None` if its largest magnitude is not finite.
fn exponent(largest: f32) -> Option<i32> {
    let bits = largest.to_bits() & 0x7fff_ffff;
    if bits >= 0x7f80_0000 {
        return None;
    }
    if bits == 0 {
        return Some(0);
    }
    // 448 is 1.75 · 2^8.
    let above = i32::from(bits & 0x007f_ffff > 0x0060_0000);
    Some((8 - ((bits >> 23) as i32 - 127) - above).min(EXPONENT_MAX))
}

fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// The factor applied to a tensor's values before rounding, given its largest magnitude.
pub fn fp8_factor(largest: f32) -> f32 {
    exponent(largest).map_or(f32::NAN, power_of_two)
}

/// The factor that converts codes to values, given the tensor's largest magnitude.
pub fn fp8_scale(largest: f32) -> f32 {
    exponent(largest).map_or(f32::NAN, |exponent| power_of_two(-exponent))
}

/// The nearest code, ties to even. Larger magnitudes become the largest code. NaN becomes `0x7f`.
#[inline(always)]
pub fn encode_e4m3(value: f32) -> u8 {
    let bits = value.to_bits();
    let (sign, magnitude) = ((bits >> 24 & 0x80) as u8, bits & 0x7fff_ffff);
    if magnitude > 0x7f80_0000 {
        return 0x7f;
    }
    // Above 448, the next code would be NaN.
    if magnitude >= 0x43e0_0000 {
        return sign | 0x7e;
    }
    // Below 2^-6, codes are multiples of 2^-9. Adding 2^14 rounds to these and puts them in the
    // last bits of an f32.
    if magnitude < 0x3c80_0000 {
        let rounded = f32::from_bits(magnitude) + 16384.0;
        return sign | (rounded.to_bits() & 0xff) as u8;
    }
    let odd = magnitude >> 20 & 1;
    let rounded = (magnitude + 0x0007_ffff + odd) >> 20;
    // f32 has an exponent bias of 127, E4M3 of 7.
    sign | (rounded - (120 << 3)) as u8
}

/// The value of each code, before scaling.
pub static E4M3_VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < values.len() {
        let magnitude = code as u32 & 0x7f;
        let value = match magnitude {
            0x7f => f32::NAN,
            0..8 => magnitude as f32 / 512.0,
            _ => f32::from_bits((magnitude << 20) + (120 << 23)),
        };
        values[code] = if code >= 128 { -value } else { value };
        code += 1;
    }
    values
};

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a code by definition.
    fn value(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match exponent {
            0 => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if code >= 128 { -magnitude } else { magnitude }
    }

    fn is_nan(code: u8) -> bool {
        code & 0x7f == 0x7f
    }

    #[test]
    fn every_code_has_its_value_and_comes_back() {
        for code in 0..=u8::MAX {
            let stands_for = E4M3_VALUES[usize::from(code)];
            if is_nan(code) {
                assert!(stands_for.is_nan());
                assert_eq!(encode_e4m3(stands_for), 0x7f);
                continue;
            }
            assert_eq!(f64::from(stands_for).to_bits(), value(code).to_bits(), "{code:#x}");
            assert_eq!(encode_e4m3(stands_for), code);
        }
        assert_eq!(E4M3_VALUES[0x7e], 448.0);
    }

    /// At every boundary between two codes: the f32 below it, the boundary, and the f32 above it.
    #[test]
    fn values_go_to_the_nearest_code_and_ties_to_even() {
        for code in 0..0x7eu8 {
            let (low, high) = (value(code), value(code + 1));
            let middle = (low + high) as f32 / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            for (x, want) in
                [(middle.next_down(), code), (middle, even), (middle.next_up(), code + 1)]
            {
                assert_eq!(encode_e4m3(x), want, "{x:e}");
                assert_eq!(encode_e4m3(-x), want | 0x80, "{x:e}");
            }
        }
        for x in [448.0, 464.0, 470.0, 1e9, f32::MAX, f32::INFINITY] {
            assert_eq!([encode_e4m3(x), encode_e4m3(-x)], [0x7e, 0xfe]);
        }
        assert_eq!([encode_e4m3(0.0), encode_e4m3(-0.0)], [0, 0x80]);
        assert_eq!(encode_e4m3(f32::MIN_POSITIVE), 0);
    }

    /// For every bf16 as the largest magnitude: the largest power of two that keeps it at 448 or
    /// below.
    #[test]
    fn a_scale_is_the_power_of_two_that_fits() {
        for bits in 1..0x7f80u32 {
            let largest = f32::from_bits(bits << 16);
            let (factor, scale) = (fp8_factor(largest), fp8_scale(largest));
            assert_eq!(factor * scale, 1.0, "{largest:e}");
            assert_eq!(factor.to_bits() & 0x007f_ffff, 0, "{largest:e}");
            let scaled = f64::from(largest) * f64::from(factor);
            assert!(scaled <= 448.0, "{largest:e}");
            let is_limited = factor == power_of_two(EXPONENT_MAX);
            assert!(is_limited || 2.0 * scaled > 448.0, "{largest:e}");
        }
        assert_eq!([fp8_factor(0.0), fp8_scale(0.0)], [1.0, 1.0]);
        for broken in [f32::INFINITY, f32::NAN] {
            assert!(fp8_factor(broken).is_nan() && fp8_scale(broken).is_nan());
        }
    }

    #[test]
    fn products_that_tensor_cores_cannot_read_do_not_suit() {
        assert!(fp8_suits(16, 32, 48) && !fp8_suits(0, 16, 16));
        for sizes in [(8, 16, 16), (16, 24, 16), (16, 16, 1)] {
            assert!(!fp8_suits(sizes.0, sizes.1, sizes.2), "{sizes:?}");
        }
    }
}
