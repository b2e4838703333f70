//! Gradients of gated units from an operand in 8 bits: from its stored code, or from the operand
//! itself, which they round to 8 bits and overwrite. Both give the same bits.

use super::element::Element;
use super::elementwise::{CHUNK, Function, with_function};
use crate::simd_dispatch;
use rayon::prelude::*;
use storm_graph::{ActivationFunction, QUANTIZED_GROUP, QuantizedFormat, QuantizedRow};

/// The format of codes.
const FORMAT: QuantizedFormat = QuantizedFormat::Int8;

simd_dispatch! {
    /// Writes the gradients of a group of gates and ups. The unit's output overwrites `gate`.
    fn grad_group[E: Element, F: Function](
        function: F, dy: &[f32], gate: &mut [f32], up: &[f32], d_gate: &mut [E], d_up: &mut [E]
    ) {
        let places = d_gate.iter_mut().zip(d_up).zip(gate).zip(up).zip(dy);
        for ((((d_gate, d_up), gate), up), dy) in places {
            let value = function.value(*gate);
            *d_gate = E::from_f32(dy * up * function.slope(*gate));
            *d_up = E::from_f32(dy * value);
            *gate = value * up;
        }
    }
}

/// [`grad_group`] for an activation.
type Group<E> = fn(&[f32], &mut [f32], &[f32], &mut [E], &mut [E]);

fn group_of<E: Element>(function: ActivationFunction) -> Group<E> {
    with_function!(function, F => |dy, gate, up, d_gate, d_up| grad_group(F, dy, gate, up, d_gate, d_up))
}

/// The gradient of a unit's output.
enum Incoming<'a, E> {
    /// It is only read.
    Stays(&'a [E]),
    /// The unit's output replaces it.
    Replaced(&'a mut [E]),
}

/// One row: the gradient overwrites `gate_up`, whose values are used only without a `code`.
fn row<E: Element>(
    grad: Group<E>,
    mut dy: Incoming<'_, E>,
    code: Option<&[u8]>,
    gate_up: &mut [E],
) {
    let width = gate_up.len() / 2;
    let form = QuantizedRow::new(FORMAT, width);
    let code = code.map(|code| code.split_at(form.bytes()));
    let (gates, ups) = gate_up.split_at_mut(width);
    let halves = gates.chunks_mut(QUANTIZED_GROUP).zip(ups.chunks_mut(QUANTIZED_GROUP));
    for (group, (gates, ups)) in halves.enumerate() {
        let count = gates.len();
        let columns = group * QUANTIZED_GROUP..group * QUANTIZED_GROUP + count;
        let mut values = [[0f32; QUANTIZED_GROUP]; 3];
        let [gate, up, d] = &mut values;
        match code {
            Some((gate_code, up_code)) => {
                let (codes, scale) = form.group(gate_code, group);
                FORMAT.dequantize_group(count, codes, scale, |at, value| gate[at] = value);
                let (codes, scale) = form.group(up_code, group);
                FORMAT.dequantize_group(count, codes, scale, |at, value| up[at] = value);
            }
            None => {
                round(gates, gate);
                round(ups, up);
            }
        }
        let incoming = match &dy {
            Incoming::Stays(dy) => &dy[columns.clone()],
            Incoming::Replaced(dy) => &dy[columns.clone()],
        };
        d.iter_mut().zip(incoming).for_each(|(d, dy)| *d = dy.to_f32());
        grad(&d[..count], &mut gate[..count], &up[..count], gates, ups);
        if let Incoming::Replaced(dy) = &mut dy {
            let made = gate.iter().map(|&value| E::from_f32(value));
            dy[columns].iter_mut().zip(made).for_each(|(dy, made)| *dy = made);
        }
    }
}

/// The values of a group, rounded to 8 bits and decoded.
fn round<E: Element>(values: &[E], rounded: &mut [f32; QUANTIZED_GROUP]) {
    let mut codes = [0; QUANTIZED_GROUP];
    let (count, codes) = (values.len(), &mut codes[..values.len()]);
    let scale = FORMAT.quantize_group(count, |at| values[at].to_f32(), codes);
    FORMAT.dequantize_group(count, codes, scale, |at, value| rounded[at] = value);
}

/// Rows per task.
fn rows_of(width: usize) -> usize {
    (CHUNK / width.max(1)).max(1)
}

/// Gradient of a gated unit from its code.
pub fn coded_grad<E: Element>(
    function: ActivationFunction,
    width: usize,
    dy: &[E],
    code: &[u8],
    gradient: &mut [E],
) {
    let (rows, bytes) = (rows_of(width), 2 * QuantizedRow::new(FORMAT, width).bytes());
    let grad = group_of::<E>(function);
    let tasks = gradient.par_chunks_mut(rows * 2 * width).zip(code.par_chunks(rows * bytes));
    tasks.zip(dy.par_chunks(rows * width)).for_each(|((gradient, code), dy)| {
        let of_row = gradient.chunks_mut(2 * width).zip(code.chunks(bytes)).zip(dy.chunks(width));
        for ((gradient, code), dy) in of_row {
            row(grad, Incoming::Stays(dy), Some(code), gradient);
        }
    });
}

/// [`coded_grad`], and the unit's output from the values of its code, in place of `dy`.
pub fn coded_grad_and_output<E: Element>(
    function: ActivationFunction,
    width: usize,
    dy: &mut [E],
    code: &[u8],
    gradient: &mut [E],
) {
    let (rows, bytes) = (rows_of(width), 2 * QuantizedRow::new(FORMAT, width).bytes());
    let grad = group_of::<E>(function);
    let tasks = gradient.par_chunks_mut(rows * 2 * width).zip(code.par_chunks(rows * bytes));
    tasks.zip(dy.par_chunks_mut(rows * width)).for_each(|((gradient, code), dy)| {
        let dy = dy.chunks_mut(width);
        let of_row = gradient.chunks_mut(2 * width).zip(code.chunks(bytes)).zip(dy);
        for ((gradient, code), dy) in of_row {
            row(grad, Incoming::Replaced(dy), Some(code), gradient);
        }
    });
}

/// The result of [`coded_grad`] with the code of `gate_up`, in place of `gate_up`.
pub fn rounded_grad<E: Element>(
    function: ActivationFunction,
    width: usize,
    dy: &[E],
    gate_up: &mut [E],
) {
    let (rows, grad) = (rows_of(width), group_of::<E>(function));
    let tasks = gate_up.par_chunks_mut(rows * 2 * width).zip(dy.par_chunks(rows * width));
    tasks.for_each(|(gate_up, dy)| {
        for (gate_up, dy) in gate_up.chunks_mut(2 * width).zip(dy.chunks(width)) {
            row(grad, Incoming::Stays(dy), None, gate_up);
        }
    });
}

/// The results of [`coded_grad_and_output`] with the code of `gate_up`, in place of `gate_up` and
/// `dy`.
pub fn rounded_grad_and_output<E: Element>(
    function: ActivationFunction,
    width: usize,
    dy: &mut [E],
    gate_up: &mut [E],
) {
    let (rows, grad) = (rows_of(width), group_of::<E>(function));
    let tasks = gate_up.par_chunks_mut(rows * 2 * width).zip(dy.par_chunks_mut(rows * width));
    tasks.for_each(|(gate_up, dy)| {
        for (gate_up, dy) in gate_up.chunks_mut(2 * width).zip(dy.chunks_mut(width)) {
            row(grad, Incoming::Replaced(dy), None, gate_up);
        }
    });
}
