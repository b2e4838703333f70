//! Small products of f32 rows, on the calling thread, for kernels that chain several of them.

use super::gemm::{Accumulate, Bf16Products, Bias, Epilogue, Matrix, MatrixMut};

/// What a product is added to.
#[derive(Clone, Copy, Debug)]
pub enum Onto<'a> {
    /// Nothing.
    Zero,
    /// A bias.
    Bias(&'a [f32]),
    /// A bias, then the old contents of the output.
    Output {
        /// The bias.
        bias: &'a [f32],
    },
}

/// `out = x · weightᵀ` for each row of `x`, added to `onto`. Rows of `x` and of the weight are
/// `width` wide. Bit-identical to [`Op::Linear`](storm_graph::Op::Linear).
pub fn project(width: usize, x: &[f32], weight: &[f32], onto: Onto<'_>, out: &mut [f32]) {
    let (rows, outputs) = (x.len() / width, weight.len() / width);
    let (bias, accumulate) = match onto {
        Onto::Zero => (None, Accumulate::Replace),
        Onto::Bias(bias) => (Some(Bias::from(bias)), Accumulate::Replace),
        Onto::Output { bias } => (Some(Bias::from(bias)), Accumulate::Add),
    };
    Bf16Products::Fma.gemm_on_this_thread(
        Matrix::row_major(x, rows, width),
        Matrix::row_major(weight, outputs, width).transposed(),
        MatrixMut::row_major(out, rows, outputs),
        Epilogue { bias, accumulate, ..Epilogue::default() },
    );
}
