//! Random changes of pictures.

use super::{Definitions, THREADS, all_types, count, flag, kernel, launch_flat, small, types};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::Planner;
use storm_graph::{AugmentSettings, Border, Flip, Op};

const SOURCE: KernelSource = KernelSource {
    name: "augment.cu",
    text: include_str!("../kernels/augment.cu"),
    only_for: None,
};

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let Op::Augment { images, samples, phase, settings, dtype } = &planner.node.op else {
        unreachable!("not an image op");
    };
    let &[batch, height, width, channels] = images.shape.axes() else { unreachable!("its rank") };
    let pixels = batch * height * width;
    let mut arguments = vec![
        planner.pointer(images),
        planner.pointer(samples),
        planner.pointer(phase),
        planner.output(0),
        count(pixels),
        small(height),
        small(width),
        small(channels),
        small(settings.padding),
        flag(settings.border == Border::Reflect),
        flag(settings.flip == Flip::Horizontal),
        small(settings.cutout),
    ];
    let mut factors = [(0.0, 0.0); AugmentSettings::CHANNELS_MAX];
    for (channel, factors) in factors[..channels].iter_mut().enumerate() {
        *factors = settings.normalization(channel);
    }
    arguments.extend(factors.map(|(factor, _)| Argument::F32(factor)));
    arguments.extend(factors.map(|(_, summand)| Argument::F32(summand)));
    let choice = kernel(SOURCE, "augment", types([("E", *dtype)]));
    launch_flat(planner, choice, pixels, THREADS, arguments)
}
