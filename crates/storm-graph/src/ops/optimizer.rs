//! Sums and norms of gradients, and parameter updates. Updates overwrite their operands.

use super::reduce::block_partials;
use super::rules;
use crate::graph::Output;
use crate::{
    AdamWParameters, DType, MomentFormat, MomentumDirection, Op, Rounding, SgdParameters, Shape,
    StepScalars, Tensor,
};

/// Pieces of a parameter that are updated one by one begin at multiples of this many elements. A
/// piece is then aligned for every kernel, also with 8-bit moments (64 groups are 33 times 256
/// bytes), and begins with whole random words.
pub const PIECE_ALIGNMENT: usize = 8192;

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::Accumulate { sum, x } => {
            rules::float("sum", sum)?;
            match sum.dtype {
                DType::F32 => {
                    rules::float("x", x)?;
                    rules::shape("x", x, &sum.shape)?;
                }
                _ => rules::like("x", x, "sum", sum)?,
            }
            let (shape, dtype, class) = (sum.shape.clone(), sum.dtype, sum.class);
            Ok(vec![Output { suffix: "", shape, dtype, class }])
        }
        Op::SumOfSquares { x } => {
            rules::float("x", x)?;
            Ok(vec![Output::activation("", Shape::scalar(), DType::F32), block_partials(x)])
        }
        Op::SumOfPartials { partials } => {
            rules::dtype("partials", partials, DType::F32)?;
            Ok(vec![Output::activation("", Shape::scalar(), DType::F32)])
        }
        Op::GlobalNorm { parts } => {
            if parts.is_empty() {
                return Err("`parts` is empty: there is no gradient to take the norm of".into());
            }
            parts.iter().try_for_each(|part| rules::scalar("parts", part))?;
            Ok(vec![
                Output::activation("", Shape::scalar(), DType::F32),
                Output::scratch("running", Shape::from([2]), DType::F32),
            ])
        }
        Op::ClipScale { norm, max_norm } => {
            rules::scalar("norm", norm)?;
            if max_norm.is_nan() || *max_norm <= 0.0 {
                return Err(format!("max_norm must be positive, not {max_norm}"));
            }
            Ok(vec![Output::activation("", Shape::scalar(), DType::F32)])
        }
        Op::AdamW {
            parameter,
            gradient,
            first_moment,
            second_moment,
            master,
            scalars,
            clip,
            random,
            observed,
            hyper,
            rounding,
            moment_rounding,
            first_element,
            ..
        } => {
            check_piece(*first_element)?;
            check_update(parameter, gradient, scalars, clip.as_ref(), random.as_ref(), *rounding)?;
            let format = MomentFormat::of(first_moment.dtype);
            rules::shape("first_moment", first_moment, &format.shape(&parameter.shape))?;
            rules::like("second_moment", second_moment, "first_moment", first_moment)?;
            rules::maybe("master", master.as_ref(), &parameter.shape, DType::F32)?;
            match format {
                MomentFormat::Elements(_) => {
                    rules::float("first_moment", first_moment)?;
                    let has_random = random.is_some();
                    check_rounding("first_moment", first_moment, has_random, *moment_rounding)?;
                }
                MomentFormat::Int8 => check_int8(hyper, random.is_some(), *moment_rounding)?,
                MomentFormat::Observed => {
                    return Err(format!("moments are floats or u8, not {}", first_moment.dtype));
                }
            }
            let sums = MomentFormat::Observed;
            let shape = sums.shape(&parameter.shape);
            rules::maybe("observed", observed.as_ref(), &shape, sums.dtype())?;
            if master.is_some() && *rounding == Rounding::Stochastic {
                return Err("stochastic rounding is for parameters without a master copy".into());
            }
            let operands = [
                Some(parameter),
                Some(first_moment),
                Some(second_moment),
                master.as_ref(),
                observed.as_ref(),
            ];
            let suffixes = ["", "first_moment", "second_moment", "master", "observed"];
            Ok(operands
                .into_iter()
                .zip(suffixes)
                .filter_map(|(operand, suffix)| operand.map(|t| over(suffix, t)))
                .collect())
        }
        Op::Sgd {
            parameter,
            gradient,
            momentum,
            master,
            scalars,
            clip,
            random,
            hyper,
            rounding,
            moment_rounding,
            first_element,
            ..
        } => {
            check_piece(*first_element)?;
            check_update(parameter, gradient, scalars, clip.as_ref(), random.as_ref(), *rounding)?;
            check_sgd(hyper, momentum.is_some())?;
            if let Some(momentum) = momentum {
                rules::float("momentum", momentum)?;
                rules::shape("momentum", momentum, &parameter.shape)?;
                check_rounding("momentum", momentum, random.is_some(), *moment_rounding)?;
            }
            rules::maybe("master", master.as_ref(), &parameter.shape, DType::F32)?;
            if master.is_some() && *rounding == Rounding::Stochastic {
                return Err("stochastic rounding is for parameters without a master copy".into());
            }
            let operands = [
                ("", Some(parameter)),
                ("momentum", momentum.as_ref()),
                ("master", master.as_ref()),
            ];
            Ok(operands
                .into_iter()
                .filter_map(|(suffix, operand)| operand.map(|t| over(suffix, t)))
                .collect())
        }
        _ => unreachable!("not an optimizer op"),
    }
}

fn check_sgd(hyper: &SgdParameters, has_momentum: bool) -> Result<(), String> {
    let SgdParameters { momentum, direction, .. } = *hyper;
    if !(0.0..1.0).contains(&momentum) {
        return Err(format!("the momentum must be at least 0 and less than 1, not {momentum}"));
    }
    if hyper.has_momentum() != has_momentum {
        return Err("`momentum` is given if there is one, and only then".into());
    }
    if direction == MomentumDirection::Nesterov && !has_momentum {
        return Err("Nesterov's direction needs a momentum".into());
    }
    Ok(())
}

/// The output that overwrites `tensor`.
fn over(suffix: &'static str, tensor: &Tensor) -> Output {
    Output { suffix, shape: tensor.shape.clone(), dtype: tensor.dtype, class: tensor.class }
}

fn check_piece(first_element: usize) -> Result<(), String> {
    if first_element.is_multiple_of(PIECE_ALIGNMENT) {
        return Ok(());
    }
    Err(format!(
        "first_element must be a multiple of {PIECE_ALIGNMENT}, not {first_element}: cut the \
         parameter there"
    ))
}

fn check_update(
    parameter: &Tensor,
    gradient: &Tensor,
    scalars: &Tensor,
    clip: Option<&&Tensor>,
    random: Option<&&Tensor>,
    rounding: Rounding,
) -> Result<(), String> {
    rules::float("parameter", parameter)?;
    rules::float("gradient", gradient)?;
    rules::shape("gradient", gradient, &parameter.shape)?;
    rules::dtype("scalars", scalars, DType::F32)?;
    rules::shape("scalars", scalars, &Shape::from([StepScalars::LEN]))?;
    rules::maybe("clip", clip, &Shape::scalar(), DType::F32)?;
    rules::maybe("random", random, &Shape::from([crate::random::SEED_WORDS]), DType::I32)?;
    check_rounding("parameter", parameter, random.is_some(), rounding)
}

fn check_rounding(
    role: &str,
    tensor: &Tensor,
    has_random: bool,
    rounding: Rounding,
) -> Result<(), String> {
    if rounding == Rounding::Stochastic {
        rules::dtype(role, tensor, DType::BF16)
            .map_err(|problem| format!("stochastic rounding is for bf16: {problem}"))?;
        if !has_random {
            return Err("stochastic rounding needs `random`".into());
        }
    }
    Ok(())
}

fn check_int8(hyper: &AdamWParameters, has_random: bool, rounding: Rounding) -> Result<(), String> {
    if rounding != Rounding::Stochastic || !has_random {
        return Err("moments in 8 bits are rounded stochastically and need `random`".into());
    }
    match hyper.first_moment_bound() {
        Some(_) => Ok(()),
        None => Err(format!(
            "moments in 8 bits need beta1 squared to be less than beta2, not {} and {}",
            hyper.beta1, hyper.beta2
        )),
    }
}
