//! Norms of channels over a batch.

use super::reduce::{self, Columns};
use super::{Definitions, PACK, THREADS, count, flag, grid, kernel, types};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::Planner;
use crate::placed::View;
use storm_graph::{
    DType, NormActivation, Op, ParameterGradients, STATISTICS_GROUP, STATISTICS_GROUPS,
    STATISTICS_LANES, STATISTICS_ROWS, Shape,
};

const SOURCE: KernelSource = KernelSource {
    name: "batch_norm.cu",
    text: include_str!("../kernels/batch_norm.cu"),
    only_for: None,
};

/// Channels of a block, whose threads each take a group of rows and a pack of channels.
pub(super) const CHANNELS: usize = THREADS / STATISTICS_GROUPS * PACK;
/// Channels that a block finishes.
const FINISHED: usize = 8;

// The kernels have these numbers as constants.
const _: () = assert!(STATISTICS_GROUP == 8 && STATISTICS_GROUPS == 32 && STATISTICS_LANES == 128);

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    combinations().map(|definitions| (SOURCE, definitions)).to_vec()
}

/// Every choice of types.
pub(super) fn combinations() -> [Definitions; 3] {
    [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::BF16, DType::BF16)]
        .map(|(x, weight)| definitions(x, weight))
}

pub(super) fn definitions(x: DType, weight: DType) -> Definitions {
    types([("E", x), ("W", weight)])
}

/// Launches over blocks of rows and blocks of channels.
fn launch_blocks(
    planner: &mut Planner<'_>,
    name: &str,
    definitions: Definitions,
    (rows, width): (usize, usize),
    arguments: Vec<Argument>,
) -> Result<(), DeviceError> {
    let grid = grid(planner, rows.div_ceil(STATISTICS_ROWS), width.div_ceil(CHANNELS))?;
    planner.launch(kernel(SOURCE, name, definitions), grid, THREADS as u32, arguments)
}

/// Launches over channels.
fn launch_finish(
    planner: &mut Planner<'_>,
    name: &str,
    definitions: Definitions,
    width: usize,
    arguments: Vec<Argument>,
) -> Result<(), DeviceError> {
    let grid = grid(planner, width.div_ceil(FINISHED), 1)?;
    let threads = (STATISTICS_LANES * FINISHED) as u32;
    planner.launch(kernel(SOURCE, name, definitions), grid, threads, arguments)
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let outputs = &planner.node.outputs;
    match &planner.node.op {
        Op::BatchStatistics { x, running_mean, running_variance, phase } => {
            let (rows, width) = (x.shape.rows(), x.shape.width());
            let definitions = definitions(x.dtype, x.dtype);
            let arguments = vec![
                planner.pointer(x),
                planner.pointer(phase),
                planner.output(3),
                count(rows),
                count(width),
            ];
            let size = (rows, width);
            launch_blocks(planner, "batch_statistics", definitions.clone(), size, arguments)?;
            let arguments = vec![
                planner.output(3),
                planner.pointer(phase),
                planner.pointer(running_mean),
                planner.pointer(running_variance),
                planner.output(0),
                planner.output(1),
                planner.output(2),
                count(rows),
                count(width),
            ];
            launch_finish(planner, "batch_statistics_finish", definitions, width, arguments)
        }
        Op::BatchNorm { x, mean, variance, weight, bias, addend, epsilon, activation } => {
            let (rows, width) = (x.shape.rows(), x.shape.width());
            let arguments = vec![
                planner.pointer(x),
                planner.maybe(addend),
                planner.pointer(mean),
                planner.pointer(variance),
                planner.pointer(weight),
                planner.pointer(bias),
                planner.output(0),
                count(rows),
                count(width),
                Argument::F32(*epsilon),
                flag(*activation == NormActivation::Relu),
            ];
            let definitions = definitions(x.dtype, weight.dtype);
            launch_blocks(planner, "batch_norm", definitions, (rows, width), arguments)
        }
        Op::BatchNormGrad {
            dy,
            x,
            addend,
            mean,
            variance,
            weight,
            bias,
            weight_accumulator,
            bias_accumulator,
            epsilon,
            activation,
            parameters,
            ..
        } => {
            let (rows, width) = (x.shape.rows(), x.shape.width());
            let definitions = definitions(x.dtype, weight.dtype);
            let compute = *parameters == ParameterGradients::Compute;
            let partials = &outputs[if compute { 3 } else { 1 }];
            let d_addend = addend.is_some().then(|| outputs[outputs.len() - 1].clone());
            let relu = *activation == NormActivation::Relu;
            let by_channel = [mean, variance, weight, bias].map(|view| planner.pointer(view));
            let mut arguments =
                vec![planner.pointer(dy), planner.pointer(x), planner.maybe(addend)];
            arguments.extend(by_channel.clone());
            arguments.extend([
                planner.pointer(partials),
                planner.maybe(&d_addend),
                count(rows),
                count(width),
                Argument::F32(*epsilon),
                flag(relu),
            ]);
            let size = (rows, width);
            launch_blocks(planner, "batch_norm_grad_sums", definitions.clone(), size, arguments)?;
            let arguments = vec![planner.pointer(partials), count(rows), count(width)];
            let name = "batch_norm_grad_finish";
            launch_finish(planner, name, definitions.clone(), width, arguments)?;
            // The sums are the last row: dz, then dz · x̂.
            let sums = last_row(partials);
            if compute {
                let (weight, bias) = (weight_accumulator.is_some(), bias_accumulator.is_some());
                let gradients = [
                    Columns { first: width, out: &outputs[1], adds: weight },
                    Columns { first: 0, out: &outputs[2], adds: bias },
                ];
                reduce::finish(planner, &sums, &gradients)?;
            }
            // The gradient of the addend is already zero where the ReLU was off.
            let masked = d_addend.is_some();
            let mut arguments =
                vec![planner.pointer(d_addend.as_ref().unwrap_or(dy)), planner.pointer(x)];
            arguments.extend(by_channel);
            arguments.extend([
                planner.pointer(&sums),
                planner.output(0),
                count(rows),
                count(width),
                Argument::F32(*epsilon),
                flag(relu && !masked),
            ]);
            launch_blocks(planner, "batch_norm_grad", definitions, size, arguments)
        }
        _ => unreachable!("not a batch norm"),
    }
}

/// The last row of a tensor.
fn last_row(view: &View) -> View {
    let (rows, width) = (view.shape.rows(), view.shape.width());
    let offset = view.offset + (rows - 1) * width * view.dtype.size_bytes();
    View { offset, shape: Shape::from([1, width]), dtype: view.dtype }
}
