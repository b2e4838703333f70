//! Ops on single elements, and gated units on the two halves of rows.

use super::element::Element;
use super::math::{
    gelu, gelu_derivative, gelu_tanh, gelu_tanh_derivative, silu, silu_derivative, tanh,
};
use crate::simd_dispatch;
use rayon::prelude::*;
use storm_graph::ActivationFunction;

/// Elements per task: large enough to hide the cost of a task, small enough for the second-level
/// cache.
pub(super) const CHUNK: usize = 1 << 14;

simd_dispatch! {
    fn add_chunk[E: Element](a: &[E], b: &[E], out: &mut [E]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = E::from_f32(a.to_f32() + b.to_f32());
        }
    }

    fn accumulate_chunk[E: Element, S: Element](x: &[E], sum: &mut [S]) {
        for (sum, x) in sum.iter_mut().zip(x) {
            *sum = S::from_f32(sum.to_f32() + x.to_f32());
        }
    }

    fn moving_average_chunk(x: &[f32], momentum: f32, average: &mut [f32]) {
        for (average, x) in average.iter_mut().zip(x) {
            *average = momentum.mul_add(x - *average, *average);
        }
    }

    fn mul_chunk[E: Element](a: &[E], b: &[E], out: &mut [E]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = E::from_f32(a.to_f32() * b.to_f32());
        }
    }

    fn scale_chunk[E: Element](x: &[E], factor: f32, out: &mut [E]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = E::from_f32(x.to_f32() * factor);
        }
    }

    fn gelu_chunk[E: Element](x: &[E], out: &mut [E]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = E::from_f32(gelu(x.to_f32()));
        }
    }

    fn gelu_grad_chunk[E: Element](dy: &[E], x: &mut [E]) {
        for (x, dy) in x.iter_mut().zip(dy) {
            *x = E::from_f32(dy.to_f32() * gelu_derivative(x.to_f32()));
        }
    }

    fn relu_chunk[E: Element](x: &[E], out: &mut [E]) {
        for (out, x) in out.iter_mut().zip(x) {
            // NaN stays NaN.
            *out = if x.to_f32() < 0.0 { E::from_f32(0.0) } else { *x };
        }
    }

    fn relu_grad_chunk[E: Element](dy: &[E], x: &mut [E]) {
        for (x, dy) in x.iter_mut().zip(dy) {
            *x = if x.to_f32() <= 0.0 { E::from_f32(0.0) } else { *dy };
        }
    }

    fn gelu_tanh_chunk[E: Element](x: &[E], out: &mut [E]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = E::from_f32(gelu_tanh(x.to_f32()));
        }
    }

    fn gelu_tanh_grad_chunk[E: Element](dy: &[E], x: &mut [E]) {
        for (x, dy) in x.iter_mut().zip(dy) {
            *x = E::from_f32(dy.to_f32() * gelu_tanh_derivative(x.to_f32()));
        }
    }

    fn silu_chunk[E: Element](x: &[E], out: &mut [E]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = E::from_f32(silu(x.to_f32()));
        }
    }

    fn silu_grad_chunk[E: Element](dy: &[E], x: &mut [E]) {
        for (x, dy) in x.iter_mut().zip(dy) {
            *x = E::from_f32(dy.to_f32() * silu_derivative(x.to_f32()));
        }
    }

    fn tanh_chunk[E: Element](x: &[E], out: &mut [E]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = E::from_f32(tanh(x.to_f32()));
        }
    }

    fn tanh_grad_chunk[E: Element](dy: &[E], y: &[E], out: &mut [E]) {
        for ((out, dy), y) in out.iter_mut().zip(dy).zip(y) {
            let y = y.to_f32();
            *out = E::from_f32(dy.to_f32() * (1.0 - y * y));
        }
    }

    fn gated_row[E: Element, F: Function](function: F, gate: &[E], up: &[E], out: &mut [E]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = E::from_f32(function.value(gate.to_f32()) * up.to_f32());
        }
    }

    fn gated_grad_row[E: Element, F: Function](function: F, dy: &[E], gate: &mut [E], up: &mut [E]) {
        for ((gate, up), dy) in gate.iter_mut().zip(up).zip(dy) {
            let (dy, g, u) = (dy.to_f32(), gate.to_f32(), up.to_f32());
            *gate = E::from_f32(dy * u * function.slope(g));
            *up = E::from_f32(dy * function.value(g));
        }
    }

    fn gated_grad_and_output_row[E: Element, F: Function](
        function: F, dy: &mut [E], gate: &mut [E], up: &mut [E]
    ) {
        for ((gate, up), dy) in gate.iter_mut().zip(up).zip(dy) {
            let (d, g, u) = (dy.to_f32(), gate.to_f32(), up.to_f32());
            let value = function.value(g);
            *gate = E::from_f32(d * u * function.slope(g));
            *up = E::from_f32(d * value);
            *dy = E::from_f32(value * u);
        }
    }
}

/// An activation that is known at compile time, so that loops have no branch.
pub(super) trait Function: Copy {
    fn value(self, x: f32) -> f32;
    fn slope(self, x: f32) -> f32;
}

macro_rules! functions {
    ($($name:ident: $value:expr, $slope:expr;)+) => {$(
        #[derive(Clone, Copy)]
        pub(super) struct $name;
        impl Function for $name {
            #[inline(always)]
            fn value(self, x: f32) -> f32 {
                $value(x)
            }
            #[inline(always)]
            fn slope(self, x: f32) -> f32 {
                $slope(x)
            }
        }
    )+};
}

functions! {
    Silu: silu, silu_derivative;
    Gelu: gelu, gelu_derivative;
    GeluTanh: gelu_tanh, gelu_tanh_derivative;
    // NaN stays NaN.
    Relu: |x| if x < 0.0 { 0.0 } else { x }, |x| if x <= 0.0 { 0.0 } else { 1.0 };
}

/// Runs `$body` with `$name` as the [`Function`] of an [`ActivationFunction`].
macro_rules! with_function {
    ($function:expr, $name:ident => $body:expr) => {
        match $function {
            ActivationFunction::Silu => {
                use $crate::cpu::kernels::elementwise::Silu;
                const $name: Silu = Silu;
                $body
            }
            ActivationFunction::Gelu => {
                use $crate::cpu::kernels::elementwise::Gelu;
                const $name: Gelu = Gelu;
                $body
            }
            ActivationFunction::GeluTanh => {
                use $crate::cpu::kernels::elementwise::GeluTanh;
                const $name: GeluTanh = GeluTanh;
                $body
            }
            ActivationFunction::Relu => {
                use $crate::cpu::kernels::elementwise::Relu;
                const $name: Relu = Relu;
                $body
            }
        }
    };
}
pub(super) use with_function;

fn unary<E: Element>(x: &[E], out: &mut [E], f: impl Fn(&[E], &mut [E]) + Sync) {
    out.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).for_each(|(out, x)| f(x, out));
}

fn binary<E: Element>(a: &[E], b: &[E], out: &mut [E], f: impl Fn(&[E], &[E], &mut [E]) + Sync) {
    out.par_chunks_mut(CHUNK)
        .zip(a.par_chunks(CHUNK))
        .zip(b.par_chunks(CHUNK))
        .for_each(|((out, a), b)| f(a, b, out));
}

/// `out = a + b`.
pub fn add<E: Element>(a: &[E], b: &[E], out: &mut [E]) {
    binary(a, b, out, add_chunk);
}

/// `sum += x`, computed in f32, then rounded to the type of `sum`.
pub fn accumulate<E: Element, S: Element>(x: &[E], sum: &mut [S]) {
    let chunks = sum.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK));
    chunks.for_each(|(sum, x)| accumulate_chunk(x, sum));
}

/// `average += momentum · (x − average)`.
pub fn moving_average(x: &[f32], momentum: f32, average: &mut [f32]) {
    unary(x, average, |x, average| moving_average_chunk(x, momentum, average));
}

/// `out = a · b`.
pub fn mul<E: Element>(a: &[E], b: &[E], out: &mut [E]) {
    binary(a, b, out, mul_chunk);
}

/// `out = factor · x`.
pub fn scale<E: Element>(x: &[E], factor: f32, out: &mut [E]) {
    unary(x, out, |x, out| scale_chunk(x, factor, out));
}

/// `out = f(x)`.
pub fn activation<E: Element>(function: ActivationFunction, x: &[E], out: &mut [E]) {
    match function {
        ActivationFunction::Gelu => unary(x, out, gelu_chunk),
        ActivationFunction::GeluTanh => unary(x, out, gelu_tanh_chunk),
        ActivationFunction::Relu => unary(x, out, relu_chunk),
        ActivationFunction::Silu => unary(x, out, silu_chunk),
    }
}

/// `dy · f'(x)`, in place of `x`.
pub fn activation_grad<E: Element>(function: ActivationFunction, dy: &[E], x: &mut [E]) {
    match function {
        ActivationFunction::Gelu => unary(dy, x, gelu_grad_chunk),
        ActivationFunction::GeluTanh => unary(dy, x, gelu_tanh_grad_chunk),
        ActivationFunction::Relu => unary(dy, x, relu_grad_chunk),
        ActivationFunction::Silu => unary(dy, x, silu_grad_chunk),
    }
}

/// `out = tanh(x)`.
pub fn hyperbolic_tangent<E: Element>(x: &[E], out: &mut [E]) {
    unary(x, out, tanh_chunk);
}

/// `out = dy · (1 − y²)`.
pub fn hyperbolic_tangent_grad<E: Element>(dy: &[E], y: &[E], out: &mut [E]) {
    binary(dy, y, out, tanh_grad_chunk);
}

/// `out = f(gate) · up` over rows of `gate_up` that are `2 · width` wide.
pub fn gated<E: Element>(function: ActivationFunction, width: usize, gate_up: &[E], out: &mut [E]) {
    let rows = (CHUNK / width.max(1)).max(1);
    let row = with_function!(function, F => (|gate, up, out| gated_row(F, gate, up, out)) as fn(&[E], &[E], &mut [E]));
    out.par_chunks_mut(rows * width).zip(gate_up.par_chunks(rows * 2 * width)).for_each(
        |(out, gate_up)| {
            for (out, gate_up) in out.chunks_mut(width).zip(gate_up.chunks(2 * width)) {
                let (gate, up) = gate_up.split_at(width);
                row(gate, up, out);
            }
        },
    );
}

/// Gradient of [`gated`], in place of `gate_up`.
pub fn gated_grad<E: Element>(
    function: ActivationFunction,
    width: usize,
    dy: &[E],
    gate_up: &mut [E],
) {
    let rows = (CHUNK / width.max(1)).max(1);
    let row = with_function!(function, F => (|dy, gate, up| gated_grad_row(F, dy, gate, up)) as fn(&[E], &mut [E], &mut [E]));
    gate_up.par_chunks_mut(rows * 2 * width).zip(dy.par_chunks(rows * width)).for_each(
        |(gate_up, dy)| {
            for (gate_up, dy) in gate_up.chunks_mut(2 * width).zip(dy.chunks(width)) {
                let (gate, up) = gate_up.split_at_mut(width);
                row(dy, gate, up);
            }
        },
    );
}

/// [`gated_grad`], and [`gated`] in place of `dy`.
pub fn gated_grad_and_output<E: Element>(
    function: ActivationFunction,
    width: usize,
    dy: &mut [E],
    gate_up: &mut [E],
) {
    let rows = (CHUNK / width.max(1)).max(1);
    type Row<E> = fn(&mut [E], &mut [E], &mut [E]);
    let row = with_function!(function, F => (|dy, gate, up| gated_grad_and_output_row(F, dy, gate, up)) as Row<E>);
    gate_up.par_chunks_mut(rows * 2 * width).zip(dy.par_chunks_mut(rows * width)).for_each(
        |(gate_up, dy)| {
            for (gate_up, dy) in gate_up.chunks_mut(2 * width).zip(dy.chunks_mut(width)) {
                let (gate, up) = gate_up.split_at_mut(width);
                row(dy, gate, up);
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_graph::random::Random;

    #[test]
    fn a_moving_average_is_one_fused_step() {
        let mut random = Random(11);
        for count in [1, 7, 33, 70_001] {
            let mut value = || random.below(2001) as f32 / 100.0 - 10.0;
            let x: Vec<f32> = (0..count).map(|_| value()).collect();
            let before: Vec<f32> = (0..count).map(|_| value()).collect();
            for momentum in [0.0, 0.1, 1.0] {
                let mut average = before.clone();
                moving_average(&x, momentum, &mut average);
                for ((&found, &x), &before) in average.iter().zip(&x).zip(&before) {
                    let (difference, before) = (f64::from(x - before), f64::from(before));
                    let exact = before + f64::from(momentum) * difference;
                    assert_eq!(found.to_bits(), (exact as f32).to_bits(), "{before} to {x}");
                }
            }
        }
    }

    /// One kernel gives the bits of two.
    #[test]
    fn a_gated_unit_and_its_gradient_may_share_a_kernel() {
        let (rows, width) = (37, 129);
        let mut random = Random(5);
        let mut values = |count: usize| -> Vec<half::bf16> {
            let value = |bits: u64| half::bf16::from_f32((bits % 4001) as f32 / 400.0 - 5.0);
            (0..count).map(|_| value(random.bits())).collect()
        };
        let (dy, gate_up) = (values(rows * width), values(2 * rows * width));
        for function in [
            ActivationFunction::Silu,
            ActivationFunction::Gelu,
            ActivationFunction::GeluTanh,
            ActivationFunction::Relu,
        ] {
            let mut output = vec![half::bf16::ZERO; rows * width];
            gated(function, width, &gate_up, &mut output);
            let mut gradient = gate_up.clone();
            gated_grad(function, width, &dy, &mut gradient);

            let (mut together_output, mut together_gradient) = (dy.clone(), gate_up.clone());
            gated_grad_and_output(function, width, &mut together_output, &mut together_gradient);
            assert_eq!(together_output, output, "{function:?}");
            assert_eq!(together_gradient, gradient, "{function:?}");
        }
    }
}
