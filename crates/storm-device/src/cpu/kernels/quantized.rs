//! Matrices in 8 bits.

use super::element::Element;
use rayon::prelude::*;
use storm_graph::QuantizedRow;

/// Quantizes the rows of `x`, `columns` wide.
pub fn quantize<E: Element>(x: &[E], columns: usize, out: &mut [u8]) {
    let form = QuantizedRow::new(columns);
    let rows = x.par_chunks(columns).zip(out.par_chunks_mut(form.bytes()));
    rows.for_each(|(x, row)| form.quantize(|column| x[column].to_f32(), row));
}

/// The values of rows of `columns`.
pub fn dequantize<E: Element>(rows: &[u8], columns: usize, out: &mut [E]) {
    let form = QuantizedRow::new(columns);
    let rows = rows.par_chunks(form.bytes()).zip(out.par_chunks_mut(columns));
    rows.for_each(|(row, out)| {
        form.dequantize(row, |column, value| out[column] = E::from_f32(value));
    });
}
