//! Translates a placed node into kernels and matrix products: one arm per op, one file per family.
//!
//! The order of every sum depends on shapes alone. So does launch geometry, except for attention on
//! Hopper, where a block for each multiprocessor takes tiles in turn.

mod attention;
mod attention_cached;
mod augment;
mod batch_norm;
mod categorical;
mod convolution;
mod convolution_tiles;
mod dropout;
mod elementwise;
mod embedding;
mod fp8;
mod gated_coded;
mod group_norm;
mod heads;
mod layout;
mod linear;
mod loss;
mod norm;
mod optimizer;
mod pool;
mod quantized;
mod recurrent;
mod reduce;
mod row_loss;
mod rows;

pub use attention::{AttentionBlock, attention_blocks};
pub(super) use elementwise::silu_unit;
pub(super) use fp8::CAPABILITY as FP8_CAPABILITY;

use super::context::Argument;
use super::plan::{KernelChoice, Planner, type_name};
use super::{KernelSource, delay, gather, gemm};
use crate::DeviceError;
use storm_graph::{DType, Op};

/// `-D` definitions of a kernel source.
pub(super) type Definitions = Vec<(&'static str, String)>;

/// Elements that a kernel loads or stores at once, `PACK` in the sources.
const PACK: usize = 8;

/// Threads of a warp.
const WARP: usize = 32;

/// Threads of a block, by default.
const THREADS: usize = 256;

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    match &planner.node.op {
        Op::Embedding { .. } | Op::EmbeddingGrad { .. } => embedding::plan(planner),
        Op::Linear { .. } | Op::LinearInputGrad { .. } | Op::LinearWeightGrad { .. } => {
            linear::plan(planner)
        }
        Op::ToFp8 { .. } | Op::Fp8Linear { .. } | Op::Fp8WeightGrad { .. } => fp8::plan(planner),
        Op::Conv2d { .. } | Op::Conv2dInputGrad { .. } | Op::Conv2dWeightGrad { .. } => {
            convolution::plan(planner)
        }
        Op::MaxPool { .. }
        | Op::MaxPoolGrad { .. }
        | Op::AveragePool { .. }
        | Op::AveragePoolGrad { .. } => pool::plan(planner),
        Op::Add { .. }
        | Op::Accumulate { .. }
        | Op::MovingAverage { .. }
        | Op::Mul { .. }
        | Op::Scale { .. }
        | Op::Activation { .. }
        | Op::ActivationGrad { .. }
        | Op::Tanh { .. }
        | Op::TanhGrad { .. }
        | Op::SwiGlu { .. }
        | Op::SwiGluGrad { .. }
        | Op::SwiGluGradAndOutput { .. } => elementwise::plan(planner),
        Op::SwiGluCoded { .. } | Op::SwiGluCodedGrad { .. } => gated_coded::plan(planner),
        Op::Dropout { .. } => dropout::plan(planner),
        Op::Norm { .. } | Op::NormGrad { .. } => norm::plan(planner),
        Op::QkNorm { .. } | Op::QkNormGrad { .. } | Op::RotaryTable { .. } | Op::Rotary { .. } => {
            heads::plan(planner)
        }
        Op::BatchStatistics { .. } | Op::BatchNorm { .. } | Op::BatchNormGrad { .. } => {
            batch_norm::plan(planner)
        }
        Op::GroupNorm { .. } | Op::GroupNormGrad { .. } => group_norm::plan(planner),
        Op::Augment { .. } => augment::plan(planner),
        Op::Attention { .. } | Op::AttentionGrad { .. } => attention::plan(planner),
        Op::CachedAttention { .. } => attention_cached::plan(planner),
        Op::GruReset { .. }
        | Op::GruResetGrad { .. }
        | Op::GruState { .. }
        | Op::GruStateGrad { .. } => recurrent::plan(planner),
        Op::Categorical { .. }
        | Op::CategoricalGrad { .. }
        | Op::SampleClass { .. }
        | Op::Divergence { .. }
        | Op::DivergenceGrad { .. } => categorical::plan(planner),
        Op::SquaredError { .. }
        | Op::SquaredErrorGrad { .. }
        | Op::OutcomeLoss { .. }
        | Op::OutcomeLossGrad { .. } => row_loss::plan(planner),
        Op::HeadLoss { .. } | Op::HeadLossGrad { .. } => loss::plan(planner),
        Op::ColumnSum { .. }
        | Op::Sum { .. }
        | Op::SumOfSquares { .. }
        | Op::SumOfPartials { .. }
        | Op::GlobalNorm { .. }
        | Op::ClipScale { .. } => reduce::plan(planner),
        Op::Broadcast { .. }
        | Op::Reshape { .. }
        | Op::Transpose { .. }
        | Op::Convert { .. }
        | Op::BlockMatrix { .. }
        | Op::BlockGrad { .. }
        | Op::Fill { .. }
        | Op::RandomNormal { .. } => layout::plan(planner),
        Op::Quantize { .. } | Op::Dequantize { .. } => quantized::plan(planner),
        Op::AdamW { .. } | Op::Sgd { .. } => optimizer::plan(planner),
    }
}

/// Every kernel source, with every set of definitions that it is compiled with.
pub fn all_kernels() -> Vec<(KernelSource, Vec<(&'static str, String)>)> {
    [
        attention::kernels(),
        attention_cached::kernels(),
        augment::kernels(),
        batch_norm::kernels(),
        categorical::kernels(),
        convolution::kernels(),
        convolution_tiles::kernels(),
        dropout::kernels(),
        elementwise::kernels(),
        embedding::kernels(),
        fp8::kernels(),
        gated_coded::kernels(),
        group_norm::kernels(),
        heads::kernels(),
        layout::kernels(),
        linear::kernels(),
        loss::kernels(),
        norm::kernels(),
        optimizer::kernels(),
        pool::kernels(),
        quantized::kernels(),
        recurrent::kernels(),
        reduce::kernels(),
        row_loss::kernels(),
        rows::kernels(),
        gemm::own_kernels(),
        [delay::SOURCE, gather::SOURCE, gemm::TRIAL_SOURCE]
            .map(|source| (source, Definitions::new()))
            .to_vec(),
    ]
    .concat()
}

/// A kernel without dynamic shared memory.
fn kernel<'a>(source: KernelSource, name: &'a str, definitions: Definitions) -> KernelChoice<'a> {
    KernelChoice { source, name, definitions, shared_bytes: 0 }
}

/// Definitions of storage types, by their names in a source.
fn types(types: impl IntoIterator<Item = (&'static str, DType)>) -> Definitions {
    types.into_iter().map(|(name, dtype)| (name, type_name(dtype))).collect()
}

/// `source` with every combination of float types for `names`.
fn all_types<const N: usize>(
    source: KernelSource,
    names: [&'static str; N],
) -> Vec<(KernelSource, Definitions)> {
    (0..1 << N)
        .map(|choice: usize| {
            let dtype = |i: usize| if choice >> i & 1 == 0 { DType::F32 } else { DType::BF16 };
            (source, types((0..N).map(|i| (names[i], dtype(i)))))
        })
        .collect()
}

/// Threads of a block whose threads each take a pack of `width` elements: whole warps, at most
/// `most`.
fn threads_for(width: usize, most: usize) -> u32 {
    width.div_ceil(PACK).next_multiple_of(WARP).clamp(WARP, most) as u32
}

fn unsupported(planner: &Planner<'_>, reason: impl Into<String>) -> DeviceError {
    let node = planner.node;
    DeviceError::Unsupported { op: node.op.name(), node: node.name.clone(), reason: reason.into() }
}

/// A grid's extents. The first may be large; the second is for parts of a row.
fn grid(
    planner: &Planner<'_>,
    blocks: usize,
    parts_of_row: usize,
) -> Result<(u32, u32, u32), DeviceError> {
    const BLOCKS_MAX: usize = i32::MAX as usize;
    const PARTS_MAX: usize = u16::MAX as usize;
    if blocks > BLOCKS_MAX || parts_of_row > PARTS_MAX {
        let reason = format!(
            "it takes {blocks} × {parts_of_row} blocks, and a card allows {BLOCKS_MAX} × {PARTS_MAX}"
        );
        return Err(unsupported(planner, reason));
    }
    Ok((blocks as u32, parts_of_row as u32, 1))
}

/// Launches a kernel over all elements. A block covers `per_block` of them.
fn launch_flat(
    planner: &mut Planner<'_>,
    choice: KernelChoice<'_>,
    elements: usize,
    per_block: usize,
    arguments: Vec<Argument>,
) -> Result<(), DeviceError> {
    let grid = grid(planner, elements.div_ceil(per_block), 1)?;
    planner.launch(choice, grid, THREADS as u32, arguments)
}

fn count(value: usize) -> Argument {
    Argument::I64(value as i64)
}

/// A number that the shape rules keep small: heads, a head's width, rows of a partial sum.
fn small(value: usize) -> Argument {
    Argument::I32(value as i32)
}

fn flag(value: bool) -> Argument {
    Argument::I32(i32::from(value))
}

/// The tensor's stream of random bits.
fn stream_word(tensor: u16, layer: u16) -> Argument {
    Argument::I32((u32::from(tensor) << 16 | u32::from(layer)) as i32)
}
