//! Convolutions, pooling, and the augmentation of images.

use super::super::kernels::gemm::{Bf16Products, Bias, Epilogue, Matrix, MatrixMut};
use super::super::kernels::{augment, pool};
use super::{Access, linear, mode, planes, weight_grad};
use crate::placed::View;
use half::bf16;
use storm_graph::{DType, Op};

pub(super) fn execute(
    op: &Op<View>,
    outputs: &[View],
    products: Bf16Products,
    access: &Access<'_, '_>,
) {
    match op {
        Op::Conv2d { x, weight, bias, window } => with_float!(x.dtype, E => {
            let y = access.out::<E>(&outputs[0]);
            let bias = access.maybe::<E>(bias).map(Bias::from);
            if window.is_pointwise() {
                let weight = access.matrix::<E>(weight).transposed();
                return linear(products, access.matrix(x), weight, bias, None, y);
            }
            let (x_data, weight) = (access.get(x), access.get(weight));
            let mut columns = access.columns(&x.shape, *window, &outputs[1], products);
            columns.forward(x_data, weight, bias, y);
        }),
        Op::Conv2dInputGrad { dy, weight, addend, accumulator, window, input } => {
            with_float!(dy.dtype, E => {
                let dx = access.out::<E>(&outputs[0]);
                let (addend, accumulate) = (access.maybe::<E>(addend), mode(accumulator));
                if window.is_pointwise() {
                    let (dy, weight) = (access.matrix::<E>(dy), access.matrix::<E>(weight));
                    let out = MatrixMut::row_major(dx, dy.rows(), weight.cols());
                    let addend =
                        addend.map(|addend| Matrix::row_major(addend, dy.rows(), weight.cols()));
                    let epilogue = Epilogue { addend, accumulate, ..Epilogue::default() };
                    return products.gemm(dy, weight, out, epilogue);
                }
                let (dy, weight) = (access.get(dy), access.get(weight));
                let mut columns = access.columns(input, *window, &outputs[1], products);
                columns.input_grad(dy, weight, addend, accumulate, dx);
            })
        }
        Op::Conv2dWeightGrad { dy, x, accumulator, window, dtype } => {
            with_float!(dy.dtype, E => with_float!(*dtype, G => {
                let (out, accumulate) = (access.out::<G>(&outputs[0]), mode(accumulator));
                if window.is_pointwise() {
                    let (dy, x) = (access.matrix(dy), access.matrix(x));
                    return weight_grad::<E, G>(products, dy, x, accumulate, out);
                }
                let mut columns = access.columns::<E>(&x.shape, *window, &outputs[1], products);
                let (dy, x, sum) = (access.get(dy), access.get(x), access.out(&outputs[2]));
                columns.weight_grad(dy, x, accumulate, sum, out);
            }))
        }
        Op::MaxPool { x, window } => with_float!(x.dtype, E => {
            let planes = planes(&x.shape, *window);
            pool::max_pool::<E>(&planes, access.get(x), access.out(&outputs[0]));
        }),
        Op::MaxPoolGrad { dy, x, window } => with_float!(x.dtype, E => {
            let planes = planes(&x.shape, *window);
            let (dy, out) = (access.get::<E>(dy), access.out(&outputs[0]));
            match window.overlaps() {
                true => pool::max_pool_grad(&planes, dy, access.get(x), out),
                false => pool::max_pool_grad_in_place(&planes, dy, out),
            }
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
