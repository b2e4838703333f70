//! Matrices in 8 bits, frozen weights or activations: how one lies in memory, and the arithmetic of one row.
//!
//! A row has its codes first and then a scale for each group of [`GROUP`] of them, so that any range of rows is a matrix of
//! its own. A value is its code times the scale of its group. Scales are bf16 and codes have 7 bits and a sign, so that the product is
//! exact in f32: every device gives the same bits. A group with a value that is not finite has a scale that is not, so each of its
//! values comes back as NaN.

use half::bf16;

/// Values that share a scale.
pub const GROUP: usize = 128;

/// The largest code.
const CODE_MAX: f32 = 127.0;

/// Codes and scales of a row begin at a multiple of this, in bytes.
const ALIGNMENT: usize = 16;

/// The form of a row of so many values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizedRow {
    /// Values.
    pub columns: usize,
}

impl QuantizedRow {
    /// Of so many values.
    pub fn new(columns: usize) -> QuantizedRow {
        QuantizedRow { columns }
    }

    /// Groups, the last of which may be smaller.
    pub fn groups(self) -> usize {
        self.columns.div_ceil(GROUP)
    }

    /// Where the scales begin.
    pub fn scales_at(self) -> usize {
        self.columns.next_multiple_of(ALIGNMENT)
    }

    /// The whole row.
    pub fn bytes(self) -> usize {
        (self.scales_at() + 2 * self.groups()).next_multiple_of(ALIGNMENT)
    }

    /// Quantizes a row of values, which `value` gives by their columns.
    pub fn quantize(self, value: impl Fn(usize) -> f32, row: &mut [u8]) {
        assert_eq!(row.len(), self.bytes(), "a row of another form");
        row.fill(0);
        let (codes, scales) = row.split_at_mut(self.scales_at());
        let groups = codes[..self.columns].chunks_mut(GROUP).zip(scales.chunks_exact_mut(2));
        for (group, (codes, scale_bytes)) in groups.enumerate() {
            let first = group * GROUP;
            let scale = quantize_group(|at| value(first + at), codes);
            scale_bytes.copy_from_slice(&scale.to_le_bytes());
        }
    }

    /// The codes and the scale of a group of a row.
    pub fn group(self, row: &[u8], group: usize) -> (&[u8], bf16) {
        let codes = group * GROUP..((group + 1) * GROUP).min(self.columns);
        let scale = self.scales_at() + 2 * group;
        (&row[codes], bf16::from_le_bytes([row[scale], row[scale + 1]]))
    }

    /// Hands each value of a row to `put`, with its column.
    pub fn dequantize(self, row: &[u8], mut put: impl FnMut(usize, f32)) {
        assert_eq!(row.len(), self.bytes(), "a row of another form");
        let (codes, scales) = row.split_at(self.scales_at());
        let groups = codes[..self.columns].chunks(GROUP).zip(scales.chunks_exact(2));
        for (group, (codes, scale)) in groups.enumerate() {
            let scale = bf16::from_le_bytes([scale[0], scale[1]]);
            dequantize_group(codes, scale, |at, value| put(group * GROUP + at, value));
        }
    }
}

/// The codes of at most [`GROUP`] values, which `value` gives by their places, and their scale. Each code is the nearest; the
/// scale is rounded up, so that no code is cut off. It is not finite if a value is not.
pub fn quantize_group(value: impl Fn(usize) -> f32, codes: &mut [u8]) -> bf16 {
    // As integers, magnitudes are in order, with NaN above all numbers.
    let magnitudes = (0..codes.len()).map(|at| value(at).abs().to_bits());
    let scale = rounded_up(f32::from_bits(magnitudes.max().unwrap_or(0)) / CODE_MAX);
    let divisor = scale.to_f32();
    if divisor > 0.0 && divisor.is_finite() {
        for (at, code) in codes.iter_mut().enumerate() {
            let nearest = (value(at) / divisor).round_ties_even();
            *code = (nearest.clamp(-CODE_MAX, CODE_MAX) as i8).cast_unsigned();
        }
    } else {
        codes.fill(0);
    }
    scale
}

/// Hands each value of a group to `put`, with its place.
pub fn dequantize_group(codes: &[u8], scale: bf16, mut put: impl FnMut(usize, f32)) {
    let scale = scale.to_f32();
    for (at, code) in codes.iter().enumerate() {
        put(at, f32::from(code.cast_signed()) * scale);
    }
}

/// The smallest bf16 that is not below a number that is not negative. NaN stays NaN, one and the same.
fn rounded_up(value: f32) -> bf16 {
    if value.is_nan() {
        return bf16::NAN;
    }
    let bits = value.to_bits();
    let dropped = bits & 0xffff != 0;
    bf16::from_bits((bits >> 16) as u16 + u16::from(dropped))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn rows_are_aligned() {
        for columns in [1, 15, 16, 127, 128, 129, 896, 1536, 5120] {
            let row = QuantizedRow::new(columns);
            assert!(row.scales_at() >= columns && row.scales_at().is_multiple_of(16));
            assert!(row.bytes() >= row.scales_at() + 2 * row.groups());
            assert!(row.bytes().is_multiple_of(16));
        }
        // 1 byte a value, 2 for each 128 of them.
        assert_eq!(QuantizedRow::new(5120).bytes(), 5120 + 80);
    }

    #[test]
    fn scales_are_rounded_up() {
        for (value, bits) in [(0.0, 0), (1.0, 0x3f80), (1.000_001, 0x3f81), (1e-45, 1)] {
            assert_eq!(rounded_up(value).to_bits(), bits, "{value}");
        }
    }

    /// The error is at most half a step, the largest value keeps its sign and nearly its size, and zeros stay zeros.
    #[test]
    fn codes_are_the_nearest() {
        let mut random = Random(4);
        for columns in [1, 128, 200, 515] {
            let form = QuantizedRow::new(columns);
            let mut values: Vec<f32> =
                (0..columns).map(|_| (random.unit() as f32 - 0.5) * 3.0).collect();
            let largest = columns / 2;
            values[largest] = -7.25;
            let mut row = vec![0xff; form.bytes()];
            form.quantize(|column| values[column], &mut row);
            let mut back = vec![f32::NAN; columns];
            form.dequantize(&row, |column, value| back[column] = value);
            for (group, (values, back)) in values.chunks(GROUP).zip(back.chunks(GROUP)).enumerate()
            {
                let top = values.iter().fold(0.0f32, |top, value| top.max(value.abs()));
                let at = form.scales_at() + 2 * group;
                let scale = bf16::from_le_bytes([row[at], row[at + 1]]).to_f32();
                assert!(scale * 127.0 >= top && scale * 127.0 <= top * 1.01, "{scale} for {top}");
                for (value, back) in values.iter().zip(back) {
                    assert!((value - back).abs() <= scale * 0.500_01, "{value} became {back}");
                }
            }
            assert!((back[largest] + 7.25).abs() < 0.04);
            form.quantize(|_| 0.0, &mut row);
            assert!(row.iter().all(|&byte| byte == 0));
        }
    }

    /// A number that is lost is seen: all of its group comes back as NaN, and no other group does.
    #[test]
    fn what_is_not_finite_stays_visible() {
        let form = QuantizedRow::new(3 * GROUP);
        for bad in [f32::NAN, f32::from_bits(0xffff_ffff), f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, GROUP - 1, GROUP + 5, 3 * GROUP - 1] {
                let mut row = vec![0xff; form.bytes()];
                let value = |column: usize| if column == place { bad } else { column as f32 };
                form.quantize(value, &mut row);
                form.dequantize(&row, |column, value| {
                    let is_lost = column / GROUP == place / GROUP;
                    assert_eq!(value.is_nan(), is_lost, "{bad} at {place}: {value} at {column}");
                });
            }
        }
    }

    #[test]
    fn products_are_exact() {
        for code in -127i8..=127 {
            for bits in [0x3f80u16, 0x3f81, 0x3fff, 0x0080, 0x7b7f] {
                let scale = bf16::from_bits(bits).to_f32();
                let exact = f64::from(code) * f64::from(scale);
                assert_eq!(f64::from(f32::from(code) * scale), exact);
            }
        }
    }
}
