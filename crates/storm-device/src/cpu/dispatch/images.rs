//! Pooling, and the augmentation of images.

use super::super::kernels::{augment, pool};
use super::{Access, planes};
use crate::placed::View;
use half::bf16;
use storm_graph::{DType, Op};

pub(super) fn execute(op: &Op<View>, outputs: &[View], access: &Access<'_, '_>) {
    match op {
        Op::MaxPool { x, window } => with_float!(x.dtype, E => {
            let planes = planes(&x.shape, *window);
            pool::max_pool::<E>(&planes, access.get(x), access.out(&outputs[0]));
        }),
        Op::MaxPoolGrad { dy, x, window } => with_float!(x.dtype, E => {
            let planes = planes(&x.shape, *window);
            let (dy, x) = (access.get::<E>(dy), access.get(x));
            pool::max_pool_grad(&planes, dy, x, access.out(&outputs[0]));
        }),
        Op::AveragePool { x, window } => with_float!(x.dtype, E => {
            let planes = planes(&x.shape, *window);
            pool::average_pool::<E>(&planes, access.get(x), access.out(&outputs[0]));
        }),
        Op::AveragePoolGrad { dy, window, input } => with_float!(dy.dtype, E => {
            let planes = planes(input, *window);
            pool::average_pool_grad::<E>(&planes, access.get(dy), access.out(&outputs[0]));
        }),
        Op::Augment { images, samples, phase, settings, dtype } => with_float!(*dtype, E => {
            let &[_, height, width, channels] = images.shape.axes() else { unreachable!("its rank") };
            let (phase, axes) = (access.phase(phase), [height, width, channels]);
            let (images, samples) = (access.get(images), access.get(samples));
            augment::augment::<E>(settings, phase, axes, images, samples, access.out(&outputs[0]));
        }),
        _ => unreachable!("not an op of images"),
    }
}
