//! Categorical distributions in groups of neighbors, samples of them, and their KL divergence.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::random::SEED_WORDS;
use crate::{DType, GraphError, KlBalance, Op, Shape, Tensor, TensorId};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    let like = |suffix: &'static str, x: &Tensor| {
        vec![Output::activation(suffix, x.shape.clone(), x.dtype)]
    };
    match op {
        Op::Categorical { logits, classes, uniform } => {
            check_groups("logits", logits, *classes)?;
            check_uniform(*uniform)?;
            Ok(like("", logits))
        }
        Op::CategoricalGrad { dy, logits, classes, uniform } => {
            check_groups("logits", logits, *classes)?;
            check_uniform(*uniform)?;
            rules::like("dy", dy, "logits", logits)?;
            Ok(like("", logits))
        }
        Op::SampleClass { probabilities, random, classes, .. } => {
            check_groups("probabilities", probabilities, *classes)?;
            rules::dtype("random", random, DType::I32)?;
            rules::shape("random", random, &Shape::from([SEED_WORDS]))?;
            Ok(like("", probabilities))
        }
        Op::Divergence { posterior, prior, free, balance } => {
            let rows = check_divergence(posterior, prior, *free, *balance)?;
            Ok(vec![Output::activation("", rows, DType::F32)])
        }
        Op::DivergenceGrad { d_divergence, divergence, posterior, prior, free, balance } => {
            let rows = check_divergence(posterior, prior, *free, *balance)?;
            for (role, tensor) in [("d_divergence", d_divergence), ("divergence", divergence)] {
                rules::shape(role, tensor, &rows)?;
                rules::dtype(role, tensor, DType::F32)?;
            }
            Ok([like("posterior", posterior), like("prior", prior)].concat())
        }
        _ => unreachable!("not an op of distributions"),
    }
}

fn check_groups(role: &str, tensor: &Tensor, classes: usize) -> rules::Check {
    rules::float(role, tensor)?;
    rules::rank_at_least(role, tensor, 1)?;
    match tensor.shape.width() {
        width if classes > 0 && width % classes == 0 => Ok(()),
        width => Err(format!("`{role}` is {width} wide, which is not groups of {classes} classes")),
    }
}

fn check_uniform(uniform: f32) -> rules::Check {
    match (0.0..=1.0).contains(&uniform) {
        true => Ok(()),
        false => Err(format!("the weight of the uniform part must be from 0 to 1, not {uniform}")),
    }
}

/// Checks the operands and returns the shape of the divergences.
fn check_divergence(
    posterior: &Tensor,
    prior: &Tensor,
    free: f32,
    balance: KlBalance,
) -> Result<Shape, String> {
    rules::float("posterior", posterior)?;
    rules::rank_at_least("posterior", posterior, 1)?;
    rules::like("prior", prior, "posterior", posterior)?;
    let numbers = [free, balance.posterior, balance.prior];
    if !numbers.iter().all(|number| number.is_finite() && *number >= 0.0) {
        return Err(format!("the free amount and the balance must not be negative: {numbers:?}"));
    }
    Ok(posterior.shape.row_shape())
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    match *op {
        Op::Categorical { logits, classes, uniform } => {
            let op = Op::CategoricalGrad { dy, logits, classes, uniform };
            let gradient = ctx.apply("grad", op)?;
            ctx.add_gradient(logits, gradient[0])
        }
        // Straight-through.
        Op::SampleClass { probabilities, .. } => ctx.add_gradient(probabilities, dy),
        Op::Divergence { posterior, prior, free, balance } => {
            let (d_divergence, divergence) = (dy, ctx.outputs()[0]);
            let op =
                Op::DivergenceGrad { d_divergence, divergence, posterior, prior, free, balance };
            let gradients = ctx.apply("grad", op)?;
            ctx.add_gradient(posterior, gradients[0])?;
            ctx.add_gradient(prior, gradients[1])
        }
        _ => unreachable!("not an op of distributions"),
    }
}
