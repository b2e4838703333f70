//! Updates of parameters, in place.

use super::{
    Definitions, PACK, THREADS, all_types, count, flag, kernel, launch_flat, stream_word, types,
};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::Planner;
use storm_graph::{DType, MomentFormat, MomentumDirection, Op, Rounding};

const SOURCE: KernelSource = KernelSource {
    name: "optimizer.cu",
    text: include_str!("../kernels/optimizer.cu"),
    only_for: None,
};

const INT8_SOURCE: KernelSource = KernelSource {
    name: "optimizer_int8.cu",
    text: include_str!("../kernels/optimizer_int8.cu"),
    only_for: None,
};

/// Elements that a block covers: a pack for each thread.
const PER_BLOCK: usize = THREADS * PACK;

/// Arguments of `adamw` that the tensors of a launch have in common: scalars, clip, seed, betas, epsilon and both kinds of
/// rounding.
const ADAMW_COMMON: &[usize] = &[5, 6, 7, 9, 10, 11, 13, 14];

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    let plain = [all_types(SOURCE, ["P", "G", "M"]), all_types(INT8_SOURCE, ["P", "G"])].concat();
    let observing = plain.iter().map(|(source, definitions)| (*source, observes(definitions)));
    let observing: Vec<_> = observing.collect();
    [plain, observing].concat()
}

/// The same kernels with sums over the update.
fn observes(definitions: &Definitions) -> Definitions {
    let mut definitions = definitions.clone();
    definitions.push(("OBSERVES", "1".to_owned()));
    definitions
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let node = planner.node;
    let stochastic = |rounding: Rounding| flag(rounding == Rounding::Stochastic);
    match &node.op {
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
            stream,
            first_element,
        } => {
            let elements = parameter.shape.elements();
            let format = MomentFormat::of(first_moment.dtype);
            let mut arguments = vec![
                planner.pointer(parameter),
                planner.pointer(gradient),
                planner.pointer(first_moment),
                planner.pointer(second_moment),
                planner.maybe(master),
                planner.pointer(scalars),
                planner.maybe(clip),
                planner.maybe(random),
                count(elements),
                Argument::F32(hyper.beta1),
                Argument::F32(hyper.beta2),
                Argument::F32(hyper.epsilon),
                Argument::F32(hyper.weight_decay),
            ];
            let mut stored = vec![("P", parameter.dtype), ("G", gradient.dtype)];
            let (source, name) = match format {
                MomentFormat::Elements(dtype) => {
                    stored.push(("M", dtype));
                    arguments.extend([stochastic(*rounding), stochastic(*moment_rounding)]);
                    (SOURCE, "adamw")
                }
                MomentFormat::Int8 => {
                    let bound = hyper.first_moment_bound().expect("checked with the graph");
                    arguments.extend([Argument::F32(bound), stochastic(*rounding)]);
                    (INT8_SOURCE, "adamw_int8")
                }
                MomentFormat::Observed => unreachable!("refused with the graph"),
            };
            arguments.extend([stream_word(*stream, node.layer), count(*first_element)]);
            let mut definitions = types(stored);
            if let Some(observed) = observed {
                arguments.push(planner.pointer(observed));
                definitions = observes(&definitions);
            }
            let choice = kernel(source, name, definitions.clone());
            launch_flat(planner, choice, elements, PER_BLOCK, arguments)?;
            match format {
                MomentFormat::Elements(_) => {
                    let several = kernel(source, "adamw_several", definitions);
                    planner.let_join(several, ADAMW_COMMON)
                }
                MomentFormat::Int8 | MomentFormat::Observed => Ok(()),
            }
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
            stream,
            first_element,
        } => {
            let elements = parameter.shape.elements();
            let arguments = vec![
                planner.pointer(parameter),
                planner.pointer(gradient),
                planner.maybe(momentum),
                planner.maybe(master),
                planner.pointer(scalars),
                planner.maybe(clip),
                planner.maybe(random),
                count(elements),
                Argument::F32(hyper.momentum),
                flag(hyper.direction == MomentumDirection::Nesterov),
                Argument::F32(hyper.weight_decay),
                stochastic(*rounding),
                flag(momentum.is_some() && *moment_rounding == Rounding::Stochastic),
                stream_word(*stream, node.layer),
                count(*first_element),
            ];
            // Without a momentum, any type works.
            let moments = momentum.as_ref().map_or(DType::F32, |momentum| momentum.dtype);
            let definitions =
                types([("P", parameter.dtype), ("G", gradient.dtype), ("M", moments)]);
            let choice = kernel(SOURCE, "sgd", definitions);
            launch_flat(planner, choice, elements, PER_BLOCK, arguments)
        }
        _ => unreachable!("not an update"),
    }
}
