//! Matrices in 8 or 4 bits, for frozen weights or activations: the memory layout, and the
//! arithmetic of one row.
//!
//! A row contains its codes and then a scale for each group of them, so that any range of rows is
//! itself a matrix. A value is its decoded code times the scale of its group. Scales are bf16,
//! rounded up, in every format. Quantizing divides and compares, and dequantizing is one f32
//! product. IEEE 754 defines these exactly, so every device gives the same bits. If a value is not
//! finite, the scale of its group is not either, and all values of the group are dequantized to
//! NaN.

use half::bf16;
use std::fmt;
use std::ops::Range;

/// The format of a row's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantizedFormat {
    /// 8-bit integers from -127 to 127, in groups of 128. The product with a scale is exact in f32.
    Int8,
    /// The 4-bit code points of NF4 (Dettmers et al., 2023), in groups of 64 whose scale is the
    /// largest magnitude. A byte contains two codes, the first in its upper half.
    Nf4,
}

/// Values of [`QuantizedFormat::Int8`] that share a scale.
pub const GROUP: usize = 128;

/// The largest code of [`QuantizedFormat::Int8`].
const CODE_MAX: f32 = 127.0;

/// The code points of [`QuantizedFormat::Nf4`]: quantiles of a normal distribution, with an exact
/// zero.
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Byte alignment of the codes and scales of a row.
const ALIGNMENT: usize = 16;

impl QuantizedFormat {
    /// All formats.
    pub const ALL: [QuantizedFormat; 2] = [QuantizedFormat::Int8, QuantizedFormat::Nf4];

    /// Values that share a scale.
    pub fn group(self) -> usize {
        match self {
            QuantizedFormat::Int8 => GROUP,
            QuantizedFormat::Nf4 => 64,
        }
    }

    /// Bytes of this many codes.
    fn code_bytes(self, codes: usize) -> usize {
        match self {
            QuantizedFormat::Int8 => codes,
            QuantizedFormat::Nf4 => codes.div_ceil(2),
        }
    }

    /// The scale of a group with this largest magnitude.
    fn scale(self, largest: f32) -> bf16 {
        match self {
            QuantizedFormat::Int8 => rounded_up(largest / CODE_MAX),
            QuantizedFormat::Nf4 => rounded_up(largest),
        }
    }

    /// The nearest code of a value divided by its scale. The 4-bit format rounds ties down.
    fn code(self, value: f32) -> u8 {
        match self {
            QuantizedFormat::Int8 => {
                let nearest = value.round_ties_even();
                (nearest.clamp(-CODE_MAX, CODE_MAX) as i8).cast_unsigned()
            }
            QuantizedFormat::Nf4 => {
                NF4.windows(2).filter(|pair| value > 0.5 * (pair[0] + pair[1])).count() as u8
            }
        }
    }

    /// Quantizes a group of values, which `value` returns by index. Returns the scale, which is
    /// rounded up so that no code is clipped. It is not finite if a value is not.
    pub fn quantize_group(
        self,
        count: usize,
        value: impl Fn(usize) -> f32,
        codes: &mut [u8],
    ) -> bf16 {
        // As integers, magnitudes keep their order, with NaN above all numbers.
        let magnitudes = (0..count).map(|at| value(at).abs().to_bits());
        let stored = self.scale(f32::from_bits(magnitudes.max().unwrap_or(0)));
        let scale = stored.to_f32();
        codes.fill(0);
        for at in 0..count {
            let code = self.code(if scale > 0.0 { value(at) / scale } else { 0.0 });
            match self {
                QuantizedFormat::Int8 => codes[at] = code,
                QuantizedFormat::Nf4 => codes[at / 2] |= code << (4 * (1 - at % 2)),
            }
        }
        stored
    }

    /// Calls `put` with the index and value of each element of a group.
    pub fn dequantize_group(
        self,
        count: usize,
        codes: &[u8],
        scale: bf16,
        mut put: impl FnMut(usize, f32),
    ) {
        let scale = scale.to_f32();
        for at in 0..count {
            let code = match self {
                QuantizedFormat::Int8 => codes[at],
                QuantizedFormat::Nf4 => codes[at / 2] >> (4 * (1 - at % 2)),
            };
            put(at, self.value(code) * scale);
        }
    }

    /// The value of a code.
    fn value(self, code: u8) -> f32 {
        match self {
            QuantizedFormat::Int8 => f32::from(code.cast_signed()),
            QuantizedFormat::Nf4 => NF4[usize::from(code & 15)],
        }
    }
}

impl fmt::Display for QuantizedFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            QuantizedFormat::Int8 => "int8",
            QuantizedFormat::Nf4 => "nf4",
        })
    }
}

/// The layout of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizedRow {
    /// The format of its codes.
    pub format: QuantizedFormat,
    /// Number of values.
    pub columns: usize,
}

impl QuantizedRow {
    /// The layout of a row with this many values.
    pub fn new(format: QuantizedFormat, columns: usize) -> QuantizedRow {
        QuantizedRow { format, columns }
    }

    /// Number of groups. The last may be smaller.
    pub fn groups(self) -> usize {
        self.columns.div_ceil(self.format.group())
    }

    /// Byte offset of the scales.
    pub fn scales_at(self) -> usize {
        self.format.code_bytes(self.columns).next_multiple_of(ALIGNMENT)
    }

    /// Bytes of the whole row.
    pub fn bytes(self) -> usize {
        (self.scales_at() + 2 * self.groups()).next_multiple_of(ALIGNMENT)
    }

    /// Quantizes a row of values, which `value` returns by column.
    pub fn quantize(self, value: impl Fn(usize) -> f32, row: &mut [u8]) {
        assert_eq!(row.len(), self.bytes(), "a row of another form");
        row.fill(0);
        let (codes, scales) = row.split_at_mut(self.scales_at());
        for (group, scale_bytes) in scales.chunks_exact_mut(2).enumerate().take(self.groups()) {
            let columns = self.columns_of(group);
            let codes = &mut codes[self.codes_of(group)];
            let value = |at: usize| value(columns.start + at);
            let scale = self.format.quantize_group(columns.len(), value, codes);
            scale_bytes.copy_from_slice(&scale.to_le_bytes());
        }
    }

    /// The codes and the scale of a group of a row.
    pub fn group(self, row: &[u8], group: usize) -> (&[u8], bf16) {
        let scale = self.scales_at() + 2 * group;
        (&row[self.codes_of(group)], bf16::from_le_bytes([row[scale], row[scale + 1]]))
    }

    /// Calls `put` with the column and value of each element of a row.
    pub fn dequantize(self, row: &[u8], mut put: impl FnMut(usize, f32)) {
        assert_eq!(row.len(), self.bytes(), "a row of another form");
        for group in 0..self.groups() {
            let (codes, scale) = self.group(row, group);
            let columns = self.columns_of(group);
            let put = |at: usize, value: f32| put(columns.start + at, value);
            self.format.dequantize_group(columns.len(), codes, scale, put);
        }
    }

    fn columns_of(self, group: usize) -> Range<usize> {
        let size = self.format.group();
        group * size..self.columns.min((group + 1) * size)
    }

    fn codes_of(self, group: usize) -> Range<usize> {
        let columns = self.columns_of(group);
        let first = self.format.code_bytes(columns.start);
        first..first + self.format.code_bytes(columns.len())
    }
}

/// Rounds a nonnegative number up to bf16. Every NaN becomes the same NaN.
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
        for format in QuantizedFormat::ALL {
            for columns in [1, 15, 16, 127, 128, 129, 896, 1536, 5120] {
                let row = QuantizedRow::new(format, columns);
                assert!(row.scales_at() >= format.code_bytes(columns));
                assert!(row.scales_at().is_multiple_of(16) && row.bytes().is_multiple_of(16));
                assert!(row.bytes() >= row.scales_at() + 2 * row.groups());
            }
        }
        // 1 byte per value and 2 per 128 values, or half a byte per value and 2 per 64 values.
        assert_eq!(QuantizedRow::new(QuantizedFormat::Int8, 5120).bytes(), 5120 + 80);
        assert_eq!(QuantizedRow::new(QuantizedFormat::Nf4, 5120).bytes(), 2560 + 160);
    }

    #[test]
    fn scales_are_rounded_up() {
        for (value, bits) in [(0.0, 0), (1.0, 0x3f80), (1.000_001, 0x3f81), (1e-45, 1)] {
            assert_eq!(rounded_up(value).to_bits(), bits, "{value}");
        }
    }

    /// No other code is nearer, the largest value keeps its sign and nearly its size, and zeros
    /// stay zeros.
    #[test]
    fn codes_are_the_nearest() {
        let mut random = Random(4);
        for (format, columns) in QuantizedFormat::ALL
            .into_iter()
            .flat_map(|format| [1, 64, 128, 200, 515].map(|columns| (format, columns)))
        {
            let form = QuantizedRow::new(format, columns);
            let mut values: Vec<f32> =
                (0..columns).map(|_| (random.unit() as f32 - 0.5) * 3.0).collect();
            let largest = columns / 2;
            values[largest] = -7.25;
            let mut row = vec![0xff; form.bytes()];
            form.quantize(|column| values[column], &mut row);
            let mut back = vec![f32::NAN; columns];
            form.dequantize(&row, |column, value| back[column] = value);
            let points: Vec<f32> = match format {
                QuantizedFormat::Int8 => (-127..=127).map(|code| code as f32).collect(),
                QuantizedFormat::Nf4 => NF4.to_vec(),
            };
            let group = format.group();
            for (index, (values, back)) in values.chunks(group).zip(back.chunks(group)).enumerate()
            {
                let top = values.iter().fold(0.0f32, |top, value| top.max(value.abs()));
                let at = form.scales_at() + 2 * index;
                let scale = bf16::from_le_bytes([row[at], row[at + 1]]).to_f32();
                let reach = points[points.len() - 1] * scale;
                assert!(reach >= top && reach <= top * 1.01, "{scale} for {top}");
                for (value, back) in values.iter().zip(back) {
                    let errors = points.iter().map(|point| (value - point * scale).abs());
                    let least = errors.fold(f32::INFINITY, f32::min);
                    let error = (value - back).abs();
                    assert!(error <= least * 1.000_1 + 1e-6, "{value} became {back}");
                }
            }
            assert!((back[largest] + 7.25).abs() < 0.04);
            form.quantize(|_| 0.0, &mut row);
            form.dequantize(&row, |column, value| back[column] = value);
            assert!(back.iter().all(|&value| value == 0.0));
        }
    }

    /// A value that is not finite stays visible: its whole group becomes NaN, and no other group
    /// does.
    #[test]
    fn what_is_not_finite_stays_visible() {
        let form = QuantizedRow::new(QuantizedFormat::Int8, 3 * GROUP);
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
    fn products_in_8_bits_are_exact() {
        for code in -127i8..=127 {
            for bits in [0x3f80u16, 0x3f81, 0x3fff, 0x0080, 0x7b7f] {
                let scale = bf16::from_bits(bits).to_f32();
                let exact = f64::from(code) * f64::from(scale);
                assert_eq!(f64::from(f32::from(code) * scale), exact);
            }
        }
    }

    /// The sixteen points as published, each the nearest f32.
    #[test]
    fn code_points_rise_and_have_a_zero() {
        assert!(NF4.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!((NF4[0], NF4[7], NF4[15]), (-1.0, 0.0, 1.0));
        assert_eq!(f64::from(NF4[1]), -0.696_192_800_998_687_7);
        assert_eq!(f64::from(NF4[14]), 0.722_956_836_223_602_3);
        let codes = [-2.0, -0.9, -0.8, 0.03, 0.05, 2.0].map(|x| QuantizedFormat::Nf4.code(x));
        assert_eq!(codes, [0, 0, 1, 7, 8, 15]);
    }
}
