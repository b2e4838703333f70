//! Matrices in 8 or 4 bits.

use super::element::Element;
use rayon::prelude::*;
use storm_graph::QuantizedRow;

/// Quantizes the rows of `x`.
pub fn quantize<E: Element>(form: QuantizedRow, x: &[E], out: &mut [u8]) {
    let rows = x.par_chunks(form.columns).zip(out.par_chunks_mut(form.bytes()));
    rows.for_each(|(x, row)| form.quantize(|column| x[column].to_f32(), row));
}

/// The values of quantized rows.
pub fn dequantize<E: Element>(form: QuantizedRow, rows: &[u8], out: &mut [E]) {
    let rows = rows.par_chunks(form.bytes()).zip(out.par_chunks_mut(form.columns));
    rows.for_each(|(row, out)| {
        form.dequantize(row, |column, value| out[column] = E::from_f32(value));
    });
}
