//! Products of 8-bit floats. The backward pass uses the decoded operands. Rounding to codes passes
//! gradients through unchanged.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{DType, FP8_MULTIPLE, Fp8Form, GraphError, Op, Shape, Tensor, TensorId, fp8_shape};

/// Maximum number of parts of a tensor whose largest magnitudes are computed in parallel.
pub const FP8_PARTIALS: usize = 512;

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::ToFp8 { x, form } => {
            rules::dtype("x", x, DType::BF16)?;
            rules::rank_at_least("x", x, 2)?;
            let (rows, columns) = (x.shape.rows(), x.shape.width());
            check_extents("x", rows, columns)?;
            let codes = |suffix, shape| Output::activation(suffix, shape, DType::U8);
            let mut outputs = Vec::new();
            if form.has_rows() {
                outputs.push(codes("rows", fp8_shape(rows, columns)));
            }
            if form.has_columns() {
                outputs.push(codes("columns", fp8_shape(columns, rows)));
            }
            outputs.push(Output::scratch("largest", Shape::from([FP8_PARTIALS]), DType::F32));
            Ok(outputs)
        }
        Op::Fp8Linear { x, weight, bias, addend, output } => {
            let [rows, columns] = check_operands(("x", x), ("weight", weight))?;
            if (output.rows(), output.width()) != (rows, columns) || output.rank() < 2 {
                return Err(format!("yields {rows} rows of {columns}, which is not {output}"));
            }
            rules::maybe("bias", bias.as_ref(), &Shape::from([columns]), DType::BF16)?;
            rules::maybe("addend", addend.as_ref(), output, DType::BF16)?;
            Ok(vec![Output::activation("", output.clone(), DType::BF16)])
        }
        Op::Fp8WeightGrad { dy, x, accumulator, dtype } => {
            let [rows, columns] = check_operands(("dy", dy), ("x", x))?;
            rules::gradient_dtype(*dtype)?;
            let weight = Shape::from([rows, columns]);
            rules::maybe("accumulator", accumulator.as_ref(), &weight, *dtype)?;
            Ok(vec![Output::gradient("", weight, *dtype)])
        }
        _ => unreachable!("not an op of 8-bit floats"),
    }
}

fn check_extents(role: &str, rows: usize, columns: usize) -> Result<(), String> {
    let fits = |extent: usize| extent > 0 && extent.is_multiple_of(FP8_MULTIPLE);
    if fits(rows) && fits(columns) {
        return Ok(());
    }
    Err(format!(
        "`{role}` is {rows} rows of {columns}: in 8-bit floats both must be multiples of {FP8_MULTIPLE}"
    ))
}

/// Checks the operands and returns the rows and columns of their product.
fn check_operands(a: (&str, &Tensor), b: (&str, &Tensor)) -> Result<[usize; 2], String> {
    for (role, codes) in [a, b] {
        rules::dtype(role, codes, DType::U8)?;
        rules::rank(role, codes, 2)?;
        check_extents(role, codes.shape.rows().saturating_sub(1), codes.shape.width())?;
    }
    let (wide, wanted) = (a.1.shape.width(), b.1.shape.width());
    if wide != wanted {
        return Err(format!("`{}` is {wide} wide, but `{}` takes {wanted}", a.0, b.0));
    }
    Ok([a.1.shape.rows() - 1, b.1.shape.rows() - 1])
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Op::Fp8Linear { x, weight, bias, addend, .. } = *op else {
        unreachable!("not a product of 8-bit floats")
    };
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    let (x, x_columns) = source(ctx, x)?;
    let (weight, _) = source(ctx, weight)?;
    if let Some(bias) = bias.filter(|&bias| ctx.wants(bias)) {
        let (accumulator, dtype) = ctx.parameter_accumulator(bias);
        let gradient = ctx.apply("bias.grad", Op::ColumnSum { x: dy, accumulator, dtype })?;
        ctx.set_parameter_gradient(bias, gradient[0])?;
    }
    if let Some(addend) = addend {
        ctx.add_gradient(addend, dy)?;
    }
    let form = match (ctx.wants(x), ctx.wants(weight)) {
        (true, true) => Fp8Form::Both,
        (true, false) => Fp8Form::Rows,
        (false, true) => Fp8Form::Columns,
        (false, false) => return Ok(()),
    };
    let codes = ctx.apply("dy", Op::ToFp8 { x: dy, form })?;
    if ctx.wants(weight) {
        let Some(x) = x_columns else { return Err(ctx.not_differentiable()) };
        let dy = codes[usize::from(form.has_rows())];
        let (accumulator, dtype) = ctx.parameter_accumulator(weight);
        let op = Op::Fp8WeightGrad { dy, x, accumulator, dtype };
        let gradient = ctx.apply("weight.grad", op)?;
        ctx.set_parameter_gradient(weight, gradient[0])?;
    }
    if ctx.wants(x) {
        let form = Fp8Form::Columns;
        let weight = ctx.apply("weight", Op::ToFp8 { x: weight, form })?[0];
        let (addend, output) = (ctx.take_gradient(x), ctx.tensor(x).shape.clone());
        let op = Op::Fp8Linear { x: codes[0], weight, bias: None, addend, output };
        let dx = ctx.apply("x.grad", op)?;
        ctx.add_gradient(x, dx[0])?;
    }
    Ok(())
}

/// The source tensor of codes in rows, and its codes in columns if they were also computed.
fn source(ctx: &Backward<'_>, codes: TensorId) -> Result<(TensorId, Option<TensorId>), GraphError> {
    match ctx.producer(codes) {
        Some((&Op::ToFp8 { x, form }, outputs)) if outputs[0] == codes && form.has_rows() => {
            Ok((x, form.has_columns().then(|| outputs[1])))
        }
        _ => Err(ctx.not_differentiable()),
    }
}
