//! Matrices in 8 or 4 bits. They are frozen and have no gradient.

use super::rules;
use crate::graph::Output;
use crate::{DType, Op, QuantizedRow, Shape, Tensor};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::Quantize { x, format } => {
            rules::float("x", x)?;
            rules::rank("x", x, 2)?;
            let row_bytes = QuantizedRow::new(*format, x.shape.width()).bytes();
            let shape = Shape::from([x.shape.rows(), row_bytes]);
            Ok(vec![Output::activation("", shape, DType::U8)])
        }
        Op::Dequantize { rows, form, dtype } => {
            rules::dtype("rows", rows, DType::U8)?;
            rules::rank("rows", rows, 2)?;
            if !dtype.is_float() {
                return Err(format!("makes an f32 or bf16 matrix, not {dtype}"));
            }
            if rows.shape.width() != form.bytes() || form.columns == 0 {
                return Err(format!(
                    "`rows` has {} bytes a row; one of {} values in {} has {}",
                    rows.shape.width(),
                    form.columns,
                    form.format,
                    form.bytes()
                ));
            }
            let shape = Shape::from([rows.shape.rows(), form.columns]);
            Ok(vec![Output::activation("", shape, *dtype)])
        }
        _ => unreachable!("not an op of quantized matrices"),
    }
}
