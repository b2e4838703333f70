//! The gates of a GRU. Its products are those of `linear`.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{GraphError, Op, Tensor, TensorId};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    let of_state =
        |suffix: &'static str, x: &Tensor| Output::activation(suffix, x.shape.clone(), x.dtype);
    match op {
        Op::GruReset { gate, hidden } => {
            rules::float("hidden", hidden)?;
            rules::like("gate", gate, "hidden", hidden)?;
            Ok(vec![of_state("", hidden)])
        }
        Op::GruResetGrad { dy, gate, hidden } => {
            rules::float("hidden", hidden)?;
            rules::like("gate", gate, "hidden", hidden)?;
            rules::like("dy", dy, "hidden", hidden)?;
            Ok(vec![of_state("gate", hidden), of_state("hidden", hidden)])
        }
        Op::GruState { gate, candidate, hidden } => {
            rules::float("hidden", hidden)?;
            rules::like("gate", gate, "hidden", hidden)?;
            rules::like("candidate", candidate, "hidden", hidden)?;
            Ok(vec![of_state("", hidden)])
        }
        Op::GruStateGrad { dy, gate, candidate, hidden } => {
            rules::float("hidden", hidden)?;
            rules::like("gate", gate, "hidden", hidden)?;
            rules::like("candidate", candidate, "hidden", hidden)?;
            rules::like("dy", dy, "hidden", hidden)?;
            Ok(["gate", "candidate", "hidden"].map(|suffix| of_state(suffix, hidden)).to_vec())
        }
        _ => unreachable!("not a recurrent op"),
    }
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    let (operands, gradient) = match *op {
        Op::GruReset { gate, hidden } => {
            (vec![gate, hidden], Op::GruResetGrad { dy, gate, hidden })
        }
        Op::GruState { gate, candidate, hidden } => {
            (vec![gate, candidate, hidden], Op::GruStateGrad { dy, gate, candidate, hidden })
        }
        _ => unreachable!("not a recurrent op"),
    };
    let gradients = ctx.apply("grad", gradient)?;
    for (operand, gradient) in operands.into_iter().zip(gradients) {
        ctx.add_gradient(operand, gradient)?;
    }
    Ok(())
}
