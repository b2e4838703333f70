//! The arithmetic cost of ops.

use crate::{Cost, GradientParts, Mask, MomentFormat, Op, ParameterGradients, Planes, Tensor};

/// The name of [`Op::AdamW`] with 8-bit moments in lists of kernel rates.
pub const ADAMW_INT8: &str = "AdamWInt8";

impl Op<&Tensor> {
    /// Floating-point operations of the matrix products in the op. A multiply-add counts as two.
    /// Everything else is memory-bound and counts as none. Causal attention counts half of its
    /// square, and with a window only the band within it.
    pub fn matrix_flops(&self) -> u128 {
        let product = |m: usize, n: usize, k: usize| 2 * m as u128 * n as u128 * k as u128;
        match self {
            Op::Linear { x, weight, .. } => {
                product(x.shape.rows(), weight.shape.rows(), x.shape.width())
            }
            Op::LinearInputGrad { dy, weight, .. } => {
                product(dy.shape.rows(), weight.shape.width(), dy.shape.width())
            }
            Op::LinearWeightGrad { dy, x, .. } => {
                product(dy.shape.width(), x.shape.width(), dy.shape.rows())
            }
            Op::Fp8Linear { .. } | Op::Fp8WeightGrad { .. } => {
                let [rows, columns, inner] = self.fp8_product().expect("one of them");
                product(rows, columns, inner)
            }
            Op::Conv2d { .. } | Op::Conv2dInputGrad { .. } | Op::Conv2dWeightGrad { .. } => {
                let [positions, outputs, covered] = self.convolution().expect("one of them");
                product(positions, outputs, covered)
            }
            Op::HeadLoss { hidden, weight, .. } => {
                product(hidden.shape.rows(), weight.shape.rows(), hidden.shape.width())
            }
            Op::HeadLossGrad { hidden, weight, weight_gradient, .. } => {
                let one = product(hidden.shape.rows(), weight.shape.rows(), hidden.shape.width());
                match weight_gradient {
                    ParameterGradients::Compute => 3 * one,
                    ParameterGradients::Skip => 2 * one,
                }
            }
            Op::Attention { qkv, heads, mask, .. } => {
                2 * attention_product(qkv, heads.query_width(), *mask)
            }
            Op::AttentionGrad { qkv, heads, mask, .. } => {
                5 * attention_product(qkv, heads.query_width(), *mask)
            }
            _ => {
                // Only ops declared without products may be missing above.
                debug_assert!(!matches!(self.cost(), Cost::Product | Cost::Logits | Cost::Columns));
                0
            }
        }
    }

    /// The extents [m, n, k] of an 8-bit float product. `None` for any other op.
    pub fn fp8_product(&self) -> Option<[usize; 3]> {
        // The last row of codes contains their scale.
        let (a, b) = match self {
            Op::Fp8Linear { x, weight, .. } => (x, weight),
            Op::Fp8WeightGrad { dy, x, .. } => (dy, x),
            _ => return None,
        };
        Some([a.shape.rows() - 1, b.shape.rows() - 1, a.shape.width()])
    }

    /// The extents of a convolution's product: window positions in all images, output channels, and
    /// elements covered by a window. `None` for any other op.
    pub fn convolution(&self) -> Option<[usize; 3]> {
        match self {
            Op::Conv2d { x, weight, window, .. } => {
                let &[images, height, width, _] = x.shape.axes() else { return None };
                let [high, wide] = window.positions([height, width]).ok()?;
                Some([images * high * wide, weight.shape.rows(), weight.shape.width()])
            }
            Op::Conv2dInputGrad { dy, weight, .. } => {
                Some([dy.shape.rows(), dy.shape.width(), weight.shape.width()])
            }
            Op::Conv2dWeightGrad { dy, x, window, .. } => {
                Some([dy.shape.rows(), dy.shape.width(), window.taps() * x.shape.width()])
            }
            _ => None,
        }
    }

    /// Whether a convolution copies the contents of its windows into columns. Pointwise
    /// convolutions and kernels on tensor cores do not.
    fn needs_columns(&self) -> bool {
        let (input, window, dtype) = match self {
            Op::Conv2d { x, window, .. } | Op::Conv2dWeightGrad { x, window, .. } => {
                (&x.shape, *window, x.dtype)
            }
            Op::Conv2dInputGrad { dy, window, input, .. } => (input, *window, dy.dtype),
            _ => return false,
        };
        let Ok(planes) = Planes::new(input, window) else { return false };
        let on_tensor_cores = match self {
            Op::Conv2dWeightGrad { dy, .. } => {
                GradientParts::apply(dtype, &planes, dy.shape.width())
            }
            Op::Conv2dInputGrad { dy, .. } => planes.suit_tensor_cores(dtype, dy.shape.width()),
            _ => planes.suit_tensor_cores(dtype, planes.channels),
        };
        !window.is_pointwise() && !on_tensor_cores
    }

    /// The name under which the op's rate is known. Most ops have one kernel. An update with 8-bit
    /// moments has a different kernel than one with float moments.
    pub fn timed_as(&self) -> &'static str {
        match self {
            Op::AdamW { first_moment, .. } => match MomentFormat::of(first_moment.dtype) {
                MomentFormat::Int8 => ADAMW_INT8,
                MomentFormat::Elements(_) | MomentFormat::Observed => self.name(),
            },
            _ => self.name(),
        }
    }

    /// Bytes that the op moves, without those hidden behind its arithmetic.
    pub fn moved_bytes(&self, outputs: &[&Tensor]) -> usize {
        let written: usize = outputs.iter().map(|tensor| tensor.size_bytes()).sum();
        let operands = || self.operands().into_iter().map(|(_, tensor)| tensor.size_bytes());
        match self.cost() {
            Cost::Product | Cost::View => 0,
            Cost::Logits => match self {
                // The logits of all rows: written, read, and read and written by the softmax.
                Op::HeadLoss { hidden, weight, .. } | Op::HeadLossGrad { hidden, weight, .. } => {
                    4 * hidden.shape.rows() * weight.shape.rows() * hidden.dtype.size_bytes()
                }
                _ => unreachable!("`{}` has no logits", self.name()),
            },
            Cost::Columns => {
                let [positions, _, covered] = self.convolution().expect("only they have columns");
                // Written and read.
                let passes = if self.needs_columns() { 2 } else { 0 };
                passes * positions * covered * self.operands()[0].1.dtype.size_bytes()
            }
            Cost::TableRows => 2 * written,
            // The first operand is the gradient.
            Cost::GradientRows => 3 * operands().next().unwrap_or(0),
            Cost::Bytes => operands().sum::<usize>() + written,
            Cost::BytesTwice => 2 * operands().sum::<usize>() + written,
        }
    }
}

/// FLOPs of one product of the (T, T) scores with vectors, over all heads.
fn attention_product(qkv: &Tensor, query_width: usize, mask: Mask) -> u128 {
    let (rows, time) = (qkv.shape.rows() as u128, qkv.shape.axes()[1] as u128);
    let full = 2 * rows * time * query_width as u128;
    match mask {
        Mask::Full => full,
        Mask::Causal => full / 2,
        // A band of width W below the diagonal: T·W minus the corner where it is cut off.
        Mask::Sliding { window } => {
            let window = (window as u128).min(time);
            rows * window * (2 * time - window) * query_width as u128 / time.max(1)
        }
    }
}
