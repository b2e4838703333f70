//! The shape rule and the backward rule of each op family.
//!
//! A new op is declared in [`Op`]. It needs its two rules in a file here, and a kernel per device.

mod attention;
mod augment;
mod batch_norm;
mod blocks;
mod categorical;
mod convolution;
mod dropout;
mod elementwise;
mod embedding;
mod fp8;
mod group_norm;
mod linear;
mod loss;
mod norm;
mod optimizer;
mod pool;
mod quantize;
mod recurrent;
mod reduce;
mod reshape;
mod row_loss;
mod rules;

use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{Family, GraphError, Op, Tensor, TensorId};

pub use batch_norm::{STATISTICS_GROUP, STATISTICS_GROUPS, STATISTICS_LANES, STATISTICS_ROWS};
pub use fp8::FP8_PARTIALS;
pub use optimizer::PIECE_ALIGNMENT;
pub use reduce::{ROWS_PER_PARTIAL, SUM_BLOCK, norm_rows_per_partial};

/// The outputs of an op for its operands, or why the operands are not valid.
pub(crate) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op.family() {
        Family::Embedding => embedding::infer(op),
        Family::Linear => linear::infer(op),
        Family::Convolution => convolution::infer(op),
        Family::Pool => pool::infer(op),
        Family::Elementwise => elementwise::infer(op),
        Family::Norm => norm::infer(op),
        Family::BatchNorm => match op {
            Op::GroupNorm { .. } | Op::GroupNormGrad { .. } => group_norm::infer(op),
            _ => batch_norm::infer(op),
        },
        Family::Image => augment::infer(op),
        Family::Attention => attention::infer(op),
        Family::Recurrent => recurrent::infer(op),
        Family::Categorical => categorical::infer(op),
        Family::Loss => match op {
            Op::HeadLoss { .. } | Op::HeadLossGrad { .. } => loss::infer(op),
            _ => row_loss::infer(op),
        },
        Family::Reduce => reduce::infer(op),
        Family::Reshape => reshape::infer(op),
        Family::Quantize => quantize::infer(op),
        Family::Fp8 => fp8::infer(op),
        Family::Optimizer => optimizer::infer(op),
    }
}

/// Adds the backward nodes of one forward node.
pub(crate) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    match op {
        Op::Embedding { .. } => embedding::backward(op, ctx),
        Op::Linear { .. } => linear::backward(op, ctx),
        Op::Fp8Linear { .. } => fp8::backward(op, ctx),
        Op::Conv2d { .. } => convolution::backward(op, ctx),
        Op::MaxPool { .. } | Op::AveragePool { .. } => pool::backward(op, ctx),
        Op::Add { .. }
        | Op::Mul { .. }
        | Op::Scale { .. }
        | Op::Activation { .. }
        | Op::Tanh { .. }
        | Op::SwiGlu { .. } => elementwise::backward(op, ctx),
        Op::Dropout { .. } => dropout::backward(op, ctx),
        Op::Norm { .. } | Op::QkNorm { .. } => norm::backward(op, ctx),
        Op::BatchNorm { .. } => batch_norm::backward(op, ctx),
        Op::GroupNorm { .. } => group_norm::backward(op, ctx),
        Op::Rotary { .. } | Op::Attention { .. } => attention::backward(op, ctx),
        Op::GruReset { .. } | Op::GruState { .. } => recurrent::backward(op, ctx),
        Op::Categorical { .. } | Op::SampleClass { .. } | Op::Divergence { .. } => {
            categorical::backward(op, ctx)
        }
        Op::SquaredError { .. } | Op::OutcomeLoss { .. } => row_loss::backward(op, ctx),
        Op::HeadLoss { .. } => loss::backward(op, ctx),
        Op::ColumnSum { .. } | Op::Sum { .. } | Op::Broadcast { .. } => reduce::backward(op, ctx),
        Op::Reshape { .. } | Op::Transpose { .. } | Op::Convert { .. } => {
            reshape::backward(op, ctx)
        }
        Op::BlockMatrix { .. } => blocks::backward(op, ctx),
        // Gradients of gradients, of updates and of text generation are not supported. Constants
        // have no operands that could need a gradient.
        Op::EmbeddingGrad { .. }
        | Op::LinearInputGrad { .. }
        | Op::LinearWeightGrad { .. }
        | Op::ToFp8 { .. }
        | Op::Fp8WeightGrad { .. }
        | Op::Conv2dInputGrad { .. }
        | Op::Conv2dWeightGrad { .. }
        | Op::MaxPoolGrad { .. }
        | Op::AveragePoolGrad { .. }
        | Op::Accumulate { .. }
        | Op::MovingAverage { .. }
        | Op::ActivationGrad { .. }
        | Op::TanhGrad { .. }
        | Op::SwiGluGrad { .. }
        | Op::SwiGluGradAndOutput { .. }
        | Op::SwiGluCoded { .. }
        | Op::SwiGluCodedGrad { .. }
        | Op::NormGrad { .. }
        | Op::QkNormGrad { .. }
        | Op::BatchStatistics { .. }
        | Op::Augment { .. }
        | Op::BatchNormGrad { .. }
        | Op::GroupNormGrad { .. }
        | Op::RotaryTable { .. }
        | Op::AttentionGrad { .. }
        | Op::CachedAttention { .. }
        | Op::GruResetGrad { .. }
        | Op::GruStateGrad { .. }
        | Op::CategoricalGrad { .. }
        | Op::DivergenceGrad { .. }
        | Op::SquaredErrorGrad { .. }
        | Op::OutcomeLossGrad { .. }
        | Op::HeadLossGrad { .. }
        | Op::BlockGrad { .. }
        | Op::Quantize { .. }
        | Op::Dequantize { .. }
        | Op::Fill { .. }
        | Op::RandomNormal { .. }
        | Op::SumOfSquares { .. }
        | Op::SumOfPartials { .. }
        | Op::GlobalNorm { .. }
        | Op::ClipScale { .. }
        | Op::AdamW { .. }
        | Op::Sgd { .. } => Err(ctx.not_differentiable()),
    }
}
