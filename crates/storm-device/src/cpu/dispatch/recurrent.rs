//! Recurrent cells, categorical latents, and the losses of their heads.

use super::super::kernels::categorical::{self, DivergenceGradInput, Mixture};
use super::super::kernels::row_loss::{self, Outcomes};
use super::super::kernels::{elementwise, recurrent};
use super::Access;
use crate::placed::View;
use half::bf16;
use storm_graph::random::Stream;
use storm_graph::{DType, Op};

pub(super) fn execute(op: &Op<View>, outputs: &[View], layer: u16, access: &Access<'_, '_>) {
    match op {
        Op::Tanh { x } => with_float!(x.dtype, E => {
            elementwise::hyperbolic_tangent::<E>(access.get(x), access.out(&outputs[0]));
        }),
        Op::TanhGrad { dy, y } => with_float!(y.dtype, E => {
            let (dy, y) = (access.get::<E>(dy), access.get(y));
            elementwise::hyperbolic_tangent_grad(dy, y, access.out(&outputs[0]));
        }),
        Op::GruReset { gate, hidden } => with_float!(hidden.dtype, E => {
            let (gate, hidden) = (access.get::<E>(gate), access.get(hidden));
            recurrent::gru_reset(gate, hidden, access.out(&outputs[0]));
        }),
        Op::GruResetGrad { dy, gate, hidden } => with_float!(hidden.dtype, E => {
            let (dy, gate, hidden) = (access.get::<E>(dy), access.get(gate), access.get(hidden));
            let (d_gate, d_hidden) = (access.out(&outputs[0]), access.out(&outputs[1]));
            recurrent::gru_reset_grad(dy, gate, hidden, d_gate, d_hidden);
        }),
        Op::GruState { gate, candidate, hidden } => with_float!(hidden.dtype, E => {
            let [gate, candidate, hidden] = [gate, candidate, hidden].map(|x| access.get::<E>(x));
            recurrent::gru_state(gate, candidate, hidden, access.out(&outputs[0]));
        }),
        Op::GruStateGrad { dy, gate, candidate, hidden } => with_float!(hidden.dtype, E => {
            let operands = [gate, candidate, hidden].map(|x| access.get::<E>(x));
            let gradients = [0, 1, 2].map(|at| access.out(&outputs[at]));
            recurrent::gru_state_grad(access.get(dy), operands, gradients);
        }),
        Op::Categorical { logits, classes, uniform } => with_float!(logits.dtype, E => {
            let mixture = Mixture { classes: *classes, uniform: *uniform };
            categorical::categorical::<E>(mixture, access.get(logits), access.out(&outputs[0]));
        }),
        Op::CategoricalGrad { dy, logits, classes, uniform } => with_float!(logits.dtype, E => {
            let mixture = Mixture { classes: *classes, uniform: *uniform };
            let (dy, logits) = (access.get::<E>(dy), access.get(logits));
            categorical::categorical_grad(mixture, dy, logits, access.out(&outputs[0]));
        }),
        Op::SampleClass { probabilities, random, classes, stream } => {
            with_float!(probabilities.dtype, E => {
                let random = (access.seed(random), Stream { tensor: *stream, layer });
                let probabilities = access.get::<E>(probabilities);
                categorical::sample(random, *classes, probabilities, access.out(&outputs[0]));
            })
        }
        Op::Divergence { posterior, prior, free, .. } => with_float!(posterior.dtype, E => {
            let width = posterior.shape.width();
            let (posterior, prior) = (access.get::<E>(posterior), access.get(prior));
            categorical::divergence(width, *free, posterior, prior, access.out(&outputs[0]));
        }),
        Op::DivergenceGrad { d_divergence, divergence, posterior, prior, free, balance } => {
            with_float!(posterior.dtype, E => {
                let input = DivergenceGradInput::<E> {
                    d_divergence: access.get(d_divergence),
                    divergence: access.get(divergence),
                    posterior: access.get(posterior),
                    prior: access.get(prior),
                    free: *free,
                    balance: *balance,
                };
                let (d_posterior, d_prior) = (access.out(&outputs[0]), access.out(&outputs[1]));
                let width = posterior.shape.width();
                categorical::divergence_grad(width, input, d_posterior, d_prior);
            })
        }
        Op::SquaredError { x, target } => with_float!(x.dtype, E => {
            let (width, target) = (x.shape.width(), access.get::<E>(target));
            row_loss::squared_error(width, access.get(x), target, access.out(&outputs[0]));
        }),
        Op::SquaredErrorGrad { d_row_loss, x, target } => with_float!(x.dtype, E => {
            let (width, gradients) = (x.shape.width(), access.get(d_row_loss));
            let (x, target) = (access.get::<E>(x), access.get(target));
            row_loss::squared_error_grad(width, gradients, x, target, access.out(&outputs[0]));
        }),
        Op::OutcomeLoss { heads, change, accepted } => with_float!(heads.dtype, E => {
            let outcomes = Outcomes { change: access.get(change), accepted: access.get(accepted) };
            row_loss::outcome_loss::<E>(access.get(heads), outcomes, access.out(&outputs[0]));
        }),
        Op::OutcomeLossGrad { d_row_loss, heads, change, accepted } => {
            with_float!(heads.dtype, E => {
                let outcomes =
                    Outcomes { change: access.get(change), accepted: access.get(accepted) };
                let (gradients, heads) = (access.get(d_row_loss), access.get::<E>(heads));
                row_loss::outcome_loss_grad(gradients, heads, outcomes, access.out(&outputs[0]));
            })
        }
        _ => unreachable!("not an op of recurrent cells"),
    }
}
