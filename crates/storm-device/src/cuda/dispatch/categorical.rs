//! Categorical distributions.

use super::{
    Definitions, THREADS, all_types, count, grid, kernel, launch_flat, small, stream_word, types,
};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::Planner;
use storm_graph::Op;

const SOURCE: KernelSource = KernelSource {
    name: "categorical.cu",
    text: include_str!("../kernels/categorical.cu"),
    only_for: None,
};

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let node = planner.node;
    match &node.op {
        Op::Categorical { logits, classes, uniform } => {
            let mut arguments = vec![planner.pointer(logits), planner.output(0)];
            arguments.push(Argument::F32(*uniform));
            by_group(planner, "categorical", *classes, arguments)
        }
        Op::CategoricalGrad { dy, logits, classes, uniform } => {
            let mut arguments =
                vec![planner.pointer(dy), planner.pointer(logits), planner.output(0)];
            arguments.push(Argument::F32(*uniform));
            by_group(planner, "categorical_grad", *classes, arguments)
        }
        Op::SampleClass { probabilities, random, classes, stream } => {
            let arguments = vec![
                planner.pointer(probabilities),
                planner.pointer(random),
                planner.output(0),
                stream_word(*stream, node.layer),
            ];
            by_group(planner, "sample_class", *classes, arguments)
        }
        Op::Divergence { posterior, prior, free, .. } => {
            let arguments = vec![
                planner.pointer(posterior),
                planner.pointer(prior),
                planner.output(0),
                count(posterior.shape.width()),
                Argument::F32(*free),
            ];
            let grid = grid(planner, posterior.shape.rows(), 1)?;
            let choice = kernel(SOURCE, "divergence", types([("E", posterior.dtype)]));
            planner.launch(choice, grid, THREADS as u32, arguments)
        }
        Op::DivergenceGrad { d_divergence, divergence, posterior, prior, free, balance } => {
            let elements = posterior.shape.elements();
            let operands = [d_divergence, divergence, posterior, prior];
            let mut arguments: Vec<Argument> =
                operands.iter().map(|operand| planner.pointer(operand)).collect();
            arguments.extend([planner.output(0), planner.output(1)]);
            arguments.extend([count(elements), count(posterior.shape.width())]);
            arguments.extend([*free, balance.posterior, balance.prior].map(Argument::F32));
            let choice = kernel(SOURCE, "divergence_grad", types([("E", posterior.dtype)]));
            launch_flat(planner, choice, elements, THREADS, arguments)
        }
        _ => unreachable!("not an op of distributions"),
    }
}

/// Launches a thread per group, and appends the number of groups and of classes.
fn by_group(
    planner: &mut Planner<'_>,
    name: &str,
    classes: usize,
    mut arguments: Vec<Argument>,
) -> Result<(), DeviceError> {
    let out = &planner.node.outputs[0];
    let groups = out.shape.elements() / classes;
    arguments.extend([count(groups), small(classes)]);
    let choice = kernel(SOURCE, name, types([("E", out.dtype)]));
    launch_flat(planner, choice, groups, THREADS, arguments)
}
