//! Matrices in 8 bits. They are frozen: there is no gradient.

use super::rules;
use crate::graph::Output;
use crate::{DType, Op, QuantizedRow, Shape, Tensor};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::Quantize { x } => {
            rules::float("x", x)?;
            rules::rank("x", x, 2)?;
            let row_bytes = QuantizedRow::new(x.shape.width()).bytes();
            let shape = Shape::from([x.shape.rows(), row_bytes]);
            Ok(vec![Output::activation("", shape, DType::U8)])
        }
        Op::Dequantize { rows, columns, dtype } => {
            rules::dtype("rows", rows, DType::U8)?;
            rules::rank("rows", rows, 2)?;
            if !dtype.is_float() {
                return Err(format!("makes an f32 or bf16 matrix, not {dtype}"));
            }
            let wanted = QuantizedRow::new(*columns).bytes();
            if rows.shape.width() != wanted || *columns == 0 {
                return Err(format!(
                    "`rows` has {} bytes a row; one of {columns} values has {wanted}",
                    rows.shape.width()
                ));
            }
            let shape = Shape::from([rows.shape.rows(), *columns]);
            Ok(vec![Output::activation("", shape, *dtype)])
        }
        _ => unreachable!("not an op of 8 bits"),
    }
}
