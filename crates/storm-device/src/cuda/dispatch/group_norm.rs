//! Norms of groups of channels of each sample.

use super::batch_norm::{CHANNELS, combinations, definitions};
use super::reduce::{self, Columns};
use super::{Definitions, THREADS, count, flag, grid, kernel, launch_flat, small};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::Planner;
use storm_graph::{NormActivation, Op, ParameterGradients, STATISTICS_ROWS};

const SOURCE: KernelSource = KernelSource {
    name: "group_norm.cu",
    text: include_str!("../kernels/group_norm.cu"),
    only_for: None,
};

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    combinations().map(|definitions| (SOURCE, definitions)).to_vec()
}

/// Launches over `blocks` blocks of rows, and blocks of channels.
fn launch_blocks(
    planner: &mut Planner<'_>,
    name: &str,
    definitions: Definitions,
    (blocks, width): (usize, usize),
    arguments: Vec<Argument>,
) -> Result<(), DeviceError> {
    let grid = grid(planner, blocks, width.div_ceil(CHANNELS))?;
    planner.launch(kernel(SOURCE, name, definitions), grid, THREADS as u32, arguments)
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let outputs = &planner.node.outputs;
    match &planner.node.op {
        Op::GroupNorm { x, weight, bias, addend, groups, epsilon, activation } => {
            let (samples, width) = (x.shape.axes()[0], x.shape.width());
            let rows = x.shape.rows() / samples;
            let definitions = definitions(x.dtype, weight.dtype);
            let arguments = vec![planner.pointer(x), planner.output(3), count(rows), count(width)];
            let size = (samples, width);
            launch_blocks(planner, "group_statistics", definitions.clone(), size, arguments)?;
            let arguments = vec![
                planner.output(3),
                planner.output(1),
                planner.output(2),
                count(samples),
                small(rows),
                count(width),
                small(*groups),
                Argument::F32(*epsilon),
            ];
            let choice = kernel(SOURCE, "group_statistics_finish", definitions.clone());
            launch_flat(planner, choice, samples * groups, THREADS, arguments)?;
            let blocks = rows.div_ceil(STATISTICS_ROWS);
            let arguments = vec![
                planner.pointer(x),
                planner.maybe(addend),
                planner.output(1),
                planner.output(2),
                planner.pointer(weight),
                planner.pointer(bias),
                planner.output(0),
                count(rows),
                count(width),
                small(*groups),
                small(blocks),
                flag(*activation == NormActivation::Relu),
            ];
            launch_blocks(planner, "group_norm", definitions, (samples * blocks, width), arguments)
        }
        Op::GroupNormGrad {
            dy,
            x,
            addend,
            mean,
            rstd,
            weight,
            bias,
            weight_accumulator,
            bias_accumulator,
            groups,
            activation,
            parameters,
            ..
        } => {
            let (samples, width) = (x.shape.axes()[0], x.shape.width());
            let rows = x.shape.rows() / samples;
            let definitions = definitions(x.dtype, weight.dtype);
            let compute = *parameters == ParameterGradients::Compute;
            let partials = &outputs[if compute { 3 } else { 1 }];
            let d_addend = addend.is_some().then(|| outputs[outputs.len() - 1].clone());
            let relu = *activation == NormActivation::Relu;
            let statistics = [mean, rstd, weight, bias].map(|view| planner.pointer(view));
            let mut arguments =
                vec![planner.pointer(dy), planner.pointer(x), planner.maybe(addend)];
            arguments.extend(statistics.clone());
            arguments.extend([
                planner.pointer(partials),
                planner.maybe(&d_addend),
                count(rows),
                count(width),
                small(*groups),
                flag(relu),
            ]);
            let size = (samples, width);
            launch_blocks(planner, "group_norm_grad_sums", definitions.clone(), size, arguments)?;
            let arguments = vec![
                planner.pointer(partials),
                planner.pointer(weight),
                count(samples),
                count(width),
                small(*groups),
            ];
            let choice = kernel(SOURCE, "group_norm_grad_finish", definitions.clone());
            launch_flat(planner, choice, samples * groups, THREADS, arguments)?;
            if compute {
                let (weight, bias) = (weight_accumulator.is_some(), bias_accumulator.is_some());
                let gradients = [
                    Columns { first: width, out: &outputs[1], adds: weight },
                    Columns { first: 0, out: &outputs[2], adds: bias },
                ];
                reduce::finish(planner, partials, &gradients)?;
            }
            let (blocks, masked) = (rows.div_ceil(STATISTICS_ROWS), d_addend.is_some());
            let mut arguments =
                vec![planner.pointer(d_addend.as_ref().unwrap_or(dy)), planner.pointer(x)];
            arguments.extend(statistics);
            arguments.extend([
                planner.pointer(partials),
                planner.output(0),
                count(rows),
                count(width),
                small(*groups),
                small(blocks),
                flag(relu && !masked),
            ]);
            let size = (samples * blocks, width);
            launch_blocks(planner, "group_norm_grad", definitions, size, arguments)
        }
        _ => unreachable!("not a group norm"),
    }
}
