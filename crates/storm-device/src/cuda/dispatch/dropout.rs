//! Dropout.

use super::{Definitions, THREADS, all_types, count, kernel, launch_flat, stream_word, types};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::Planner;
use storm_graph::Op;
use storm_graph::random::drop_threshold;

const SOURCE: KernelSource = KernelSource {
    name: "dropout.cu",
    text: include_str!("../kernels/dropout.cu"),
    only_for: None,
};

/// Random words that a thread draws at once.
const WORDS: usize = 4;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let (node, out) = (planner.node, &planner.node.outputs[0]);
    let Op::Dropout { x, random, addend, rate, stream } = &node.op else {
        unreachable!("not dropout");
    };
    let elements = out.shape.elements();
    let arguments = vec![
        planner.pointer(x),
        planner.maybe(addend),
        planner.pointer(random),
        planner.pointer(out),
        count(elements),
        Argument::I32(drop_threshold(*rate) as i32),
        Argument::F32(1.0 / (1.0 - rate)),
        stream_word(*stream, node.layer),
    ];
    let choice = kernel(SOURCE, "dropout", types([("E", out.dtype)]));
    // A micro-batch may begin within a block of words.
    launch_flat(planner, choice, elements.div_ceil(WORDS) + 1, THREADS, arguments)
}
