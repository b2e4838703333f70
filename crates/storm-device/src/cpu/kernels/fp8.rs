//! Operands of products with 8-bit floats.

use super::element::{E4m3, Element};
use super::gemm::Matrix;
use half::bf16;
use rayon::prelude::*;
use storm_graph::{encode_e4m3, fp8_factor, fp8_scale};

/// Elements per task in the search for the largest magnitude.
const PART: usize = 1 << 16;

/// Columns that one task transposes.
const BAND: usize = 16;

/// Writes the codes of `x` (rows of `width`) by rows and by columns, each followed by the scale.
pub fn to_fp8(x: &[bf16], width: usize, rows: Option<&mut [u8]>, columns: Option<&mut [u8]>) {
    // Compared as integers, magnitudes keep their order, and NaN is above all numbers.
    let magnitude = |value: &bf16| value.to_bits() & 0x7fff;
    let part = |part: &[bf16]| part.iter().map(magnitude).max().unwrap_or(0);
    let largest = x.par_chunks(PART).map(part).max().unwrap_or(0);
    let largest = f32::from_bits(u32::from(largest) << 16);
    let (factor, scale) = (fp8_factor(largest), fp8_scale(largest));
    let code = |value: bf16| encode_e4m3(Element::to_f32(value) * factor);
    if let Some(rows) = rows {
        let (codes, last) = rows.split_at_mut(x.len());
        codes.par_chunks_mut(width).zip(x.par_chunks(width)).for_each(|(codes, x)| {
            for (to, from) in codes.iter_mut().zip(x) {
                *to = code(*from);
            }
        });
        write_scale(last, scale);
    }
    if let Some(columns) = columns {
        let height = x.len() / width;
        let (codes, last) = columns.split_at_mut(x.len());
        codes.par_chunks_mut(BAND * height).enumerate().for_each(|(band, codes)| {
            for (row, x) in x.chunks_exact(width).enumerate() {
                for (column, from) in x[band * BAND..].iter().take(codes.len() / height).enumerate()
                {
                    codes[column * height + row] = code(*from);
                }
            }
        });
        write_scale(last, scale);
    }
}

fn write_scale(row: &mut [u8], scale: f32) {
    let (first, rest) = row.split_at_mut(size_of::<f32>());
    first.copy_from_slice(&scale.to_le_bytes());
    rest.fill(0);
}

/// Codes as a matrix, and its scale.
pub fn operand(codes: &[E4m3], width: usize) -> (Matrix<'_, E4m3>, f32) {
    let (codes, last) = codes.split_at(codes.len() - width);
    let scale = f32::from_le_bytes(std::array::from_fn(|i| last[i].0));
    (Matrix::row_major(codes, codes.len() / width, width), scale)
}
