//! The op set: what a node can compute.
//!
//! An op is generic over how its operands are represented: `Op<TensorId>` in a graph, `Op<&Tensor>` in
//! a shape rule, `Op<View>` on a device. All of them read operands by name. Each op is declared with its family and
//! with what its time follows from: planner and profile know no more of it.

use crate::attributes::*;
use crate::{AugmentSettings, DType, Fp8Form, QuantizedFormat, QuantizedRow, Shape, Window};

/// An operand that is always there.
type One<T> = T;
/// An operand that may be left out.
type Maybe<T> = Option<T>;
/// Any number of operands.
type Many<T> = Vec<T>;

/// Ops whose rules are in one file of `ops/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Lookups in tables.
    Embedding,
    /// Matrix products.
    Linear,
    /// Convolutions.
    Convolution,
    /// Largest values and means of windows.
    Pool,
    /// Element by element.
    Elementwise,
    /// Norms of rows and of heads.
    Norm,
    /// Norms of channels, over a batch or over the rows of a sample.
    BatchNorm,
    /// Pictures.
    Image,
    /// Attention and positions.
    Attention,
    /// The head and its loss.
    Loss,
    /// Sums.
    Reduce,
    /// Other shapes, other dtypes, constants.
    Reshape,
    /// Matrices in 8 or 4 bits.
    Quantize,
    /// Operands in 8-bit floats, and products of them.
    Fp8,
    /// What follows the last backward pass of a step: tied gradients, norm, update.
    Optimizer,
}

/// What the time of an op follows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// The arithmetic of matrix products; reads and writes hide behind it.
    Product,
    /// Products whose result, a chunk of logits at a time, goes through memory several times.
    Logits,
    /// Products of which an operand or the result, a chunk of columns at a time, goes through memory.
    Columns,
    /// Rows of a table that are read, and written once.
    TableRows,
    /// Rows of a gradient that are read, and added to rows of a table.
    GradientRows,
    /// Nothing moves.
    View,
    /// Every operand is read and every output is written once.
    Bytes,
    /// Operands are read twice, once for sums and once with them; outputs are written once.
    BytesTwice,
}

macro_rules! map_slot {
    (One, $operand:ident, $f:ident) => {
        $f(stringify!($operand), $operand)
    };
    (Maybe, $operand:ident, $f:ident) => {
        $operand.map(|t| $f(stringify!($operand), t))
    };
    (Many, $operand:ident, $f:ident) => {
        $operand.into_iter().map(|t| $f(stringify!($operand), t)).collect()
    };
}

macro_rules! define_ops {
    ($(
        $(#[$doc:meta])*
        $name:ident [$family:ident, $cost:ident] {
            $($operand:ident: $kind:ident),*; $($attribute:ident: $ty:ty),*
        }
    )*) => {
        /// One computation: operands first, attributes after them. Each variant says what it
        /// yields, in order. `(.., C)` is any number of rows of width `C`.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)] // operands and attributes are explained at their variant
        pub enum Op<T> {
            $( $(#[$doc])* $name { $($operand: $kind<T>,)* $($attribute: $ty,)* }, )*
        }

        impl<T> Op<T> {
            /// The op's name, as messages and traces print it.
            pub fn name(&self) -> &'static str {
                match self { $( Op::$name { .. } => stringify!($name), )* }
            }

            /// Which file of `ops/` has its rules.
            pub fn family(&self) -> Family {
                match self { $( Op::$name { .. } => Family::$family, )* }
            }

            /// What its time follows from.
            pub fn cost(&self) -> Cost {
                match self { $( Op::$name { .. } => Cost::$cost, )* }
            }

            /// The same op over other operands: `f` gets each operand's name and what stood there.
            pub fn map<U>(self, mut f: impl FnMut(&'static str, T) -> U) -> Op<U> {
                match self {
                    $( Op::$name { $($operand,)* $($attribute,)* } => Op::$name {
                        $($operand: map_slot!($kind, $operand, f),)*
                        $($attribute,)*
                    }, )*
                }
            }
        }
    };
}

define_ops! {
    // ---- tables and projections -------------------------------------------------------------
    /// Rows of `table` (V, C) picked by `ids` (..): yields (.., C).
    Embedding [Embedding, TableRows] { ids: One, table: One; }
    /// Gradient of `table`: rows of `dy` summed by id. `order` lists the rows of `ids` sorted by
    /// (id, row), so that each table row is one segment, reduced in order. Yields (V, C) in
    /// `dtype`; `accumulator`, where given, is added to and overwritten.
    EmbeddingGrad [Embedding, GradientRows] { dy: One, ids: One, order: One, accumulator: Maybe; table_rows: usize, dtype: DType }
    /// `x · weightᵀ + bias + addend`: x (.., K), weight (N, K), bias (N), addend (.., N).
    /// Yields (.., N), rounded once.
    Linear [Linear, Product] { x: One, weight: One, bias: Maybe, addend: Maybe; }
    /// `dy · weight + addend`: yields (.., K).
    LinearInputGrad [Linear, Product] { dy: One, weight: One, addend: Maybe; }
    /// `dyᵀ · x` over all rows, added to `accumulator` in the same rounding. Yields (N, K) in `dtype`.
    LinearWeightGrad [Linear, Product] { dy: One, x: One, accumulator: Maybe; dtype: DType }
    /// The codes of a bf16 tensor (.., K) in 8-bit floats, see [`Fp8Form`](crate::Fp8Form), in u8; and partial maxima as
    /// scratch.
    ToFp8 [Fp8, BytesTwice] { x: One; form: Fp8Form }
    /// `x · weightᵀ + bias + addend` of codes of [`Op::ToFp8`]: x (R + 1, K), weight (N + 1, K), bias (N), addend and result
    /// `output`, R rows of N in bf16. Sums are f32; the result is rounded once. With codes of `dy` in rows and of `weight` in
    /// columns it is the gradient of `x`.
    Fp8Linear [Fp8, Product] { x: One, weight: One, bias: Maybe, addend: Maybe; output: Shape }
    /// Gradient of the weight of [`Op::Fp8Linear`] from codes in columns: dy (N + 1, R), x (K + 1, R), added to `accumulator` in
    /// the same rounding. Yields (N, K) in `dtype`.
    Fp8WeightGrad [Fp8, Product] { dy: One, x: One, accumulator: Maybe; dtype: DType }
    /// Sum over rows, added to `accumulator`. Yields (C) in `dtype`, and partial sums as scratch.
    ColumnSum [Reduce, Bytes] { x: One, accumulator: Maybe; dtype: DType }

    // ---- images -----------------------------------------------------------------------------
    /// Each window of `x` (B, H, W, I) times `weight` (O, KH·KW·I), whose rows are in the order (kh, kw, i), plus `bias`
    /// (O): yields (B, OH, OW, O), rounded once. Unless the window is [pointwise](Window::is_pointwise), also yields
    /// scratch: columns, the rows that windows cover, of [some images at a time](crate::Planes::images_per_chunk), and the
    /// weight in rows as wide as columns where its own are not.
    Conv2d [Convolution, Columns] { x: One, weight: One, bias: Maybe; window: Window }
    /// Gradient of `x` of [`Op::Conv2d`]: `dy · weight` is the gradient of columns, rounded to the dtype of `dy`; each
    /// position of the input adds up its own in the order (kh, kw), then `addend`. Kernels
    /// [without columns](crate::Planes::suit_tensor_cores) round only the result. Yields `input` and the scratch of
    /// [`Op::Conv2d`], where the weight may be in any arrangement.
    Conv2dInputGrad [Convolution, Columns] { dy: One, weight: One, addend: Maybe; window: Window, input: Shape }
    /// Gradient of `weight` of [`Op::Conv2d`]: `dyᵀ · columns`, summed in f32 chunk by chunk in order, then added to
    /// `accumulator` and rounded once. Yields (O, KH·KW·I) in `dtype`; unless the window is pointwise, also a chunk of
    /// columns and the sum as scratch, or sums of [parts](crate::GradientParts) of all positions.
    Conv2dWeightGrad [Convolution, Columns] { dy: One, x: One, accumulator: Maybe; window: Window, dtype: DType }
    /// The largest of each window of `x` (B, H, W, C), or NaN if there is one: yields (B, OH, OW, C).
    MaxPool [Pool, Bytes] { x: One; window: Window }
    /// Gradient of `x` of [`Op::MaxPool`]. A window passes its gradient to the first of its largest elements in the order
    /// (kh, kw), or to its last NaN, as PyTorch does. Yields (B, H, W, C).
    MaxPoolGrad [Pool, Bytes] { dy: One, x: One; window: Window }
    /// The sum of each window of `x` (B, H, W, C), divided by KH·KW: yields (B, OH, OW, C).
    AveragePool [Pool, Bytes] { x: One; window: Window }
    /// Gradient of `x` of [`Op::AveragePool`]: yields `input`.
    AveragePoolGrad [Pool, Bytes] { dy: One; window: Window, input: Shape }

    // ---- elementwise ------------------------------------------------------------------------
    /// `a + b`, same shape.
    Add [Elementwise, Bytes] { a: One, b: One; }
    /// `sum + x`, same shape, over `sum`, which has the dtype of `x` or f32. Has no gradient.
    Accumulate [Optimizer, Bytes] { sum: One, x: One; }
    /// `average + momentum · (x − average)`, both f32 of one shape, over `average`, a parameter of
    /// [`Training::Running`](crate::Training::Running). Runs once per micro-batch of a training step. Has no gradient.
    MovingAverage [Elementwise, Bytes] { average: One, x: One; momentum: f32 }
    /// `a · b`, same shape.
    Mul [Elementwise, Bytes] { a: One, b: One; }
    /// `factor · x`.
    Scale [Elementwise, Bytes] { x: One; factor: f32 }
    /// `x` with a share of `rate` of its elements zero and the others divided by `1 - rate`, plus `addend`. `random`
    /// ([`DropoutWords`](crate::random::DropoutWords)) says where in the step its rows are, or that nothing is dropped; which
    /// elements are zero depends on it, `stream`, the block and the element alone. Its gradient is the op itself.
    Dropout [Elementwise, Bytes] { x: One, random: One, addend: Maybe; rate: f32, stream: u16 }
    /// GELU (either form), ReLU or SiLU.
    Activation [Elementwise, Bytes] { x: One; function: ActivationFunction }
    /// `dy · f'(x)`, over `x`.
    ActivationGrad [Elementwise, Bytes] { dy: One, x: One; function: ActivationFunction }
    /// The gated unit `f(gate) · up`, where `gate_up` (.., 2F) holds the gate in its first half: yields (.., F). With
    /// SiLU, as in most models, it is the SwiGLU that it is named after; with GELU a GeGLU, with ReLU a ReGLU.
    SwiGlu [Elementwise, Bytes] { gate_up: One; function: ActivationFunction }
    /// Gradient of `gate_up` (.., 2F) from `dy` (.., F), over `gate_up`: the largest activation of a
    /// layer is needed once. With a `codec`, the values of `gate_up` are taken as they come back from it.
    SwiGluGrad [Elementwise, Bytes] { dy: One, gate_up: One; function: ActivationFunction, codec: ActivationCodec }
    /// [`Op::SwiGluGrad`] for a backward pass that did not keep what [`Op::SwiGlu`] made: also yields that, over
    /// `dy`, so that `gate_up` is read once for both.
    SwiGluGradAndOutput [Elementwise, Bytes] { dy: One, gate_up: One; function: ActivationFunction, codec: ActivationCodec }
    /// [`Op::SwiGlu`], which also yields the halves of each row of `gate_up` in 8 bits, in the form of
    /// [`QuantizedRow`](crate::QuantizedRow): two rows of F values, one after the other, in u8. The first output is that of
    /// [`Op::SwiGlu`], bit by bit.
    SwiGluCoded [Elementwise, Bytes] { gate_up: One; function: ActivationFunction }
    /// Gradient of `gate_up` (.., 2F) from `dy` (.., F) and the `code` of [`Op::SwiGluCoded`]. With `output: Compute` also
    /// `f(gate) · up` of the values that the code stands for, over `dy`: what [`Op::SwiGluGradAndOutput`] yields with
    /// [`ActivationCodec::Int8`], bit by bit.
    SwiGluCodedGrad [Elementwise, Bytes] { dy: One, code: One; function: ActivationFunction, output: UnitOutput }

    // ---- norms ------------------------------------------------------------------------------
    /// Layer norm or RMS norm of `x + delta` over the width. Yields y (.., C), rstd (..) f32, then
    /// mean (..) f32 for a layer norm, then the sum `x + delta` where `delta` is given. The norm is
    /// of the sum as stored, so that it can be recomputed from it.
    Norm [Norm, Bytes] { x: One, delta: Maybe, weight: One, bias: Maybe; kind: NormKind, epsilon: f32 }
    /// Backward of [`Op::Norm`]; `x` is what was normalized (the sum). Yields dx + addend (.., C);
    /// with `parameters: Compute` also d_weight (C), d_bias (C) where there is a bias (both in
    /// `dtype`, added to their accumulators), and partial sums as scratch.
    NormGrad [Norm, Bytes] {
        dy: One, x: One, weight: One, bias: Maybe, rstd: One, mean: Maybe, addend: Maybe,
        weight_accumulator: Maybe, bias_accumulator: Maybe;
        kind: NormKind, parameters: ParameterGradients, dtype: DType
    }
    /// RMS norm of each query and key head of `qkv` (B, T, (Q+2K)·D), values copied; weights (D).
    /// Yields the same shape, and rstd (B, T, Q+K) f32.
    QkNorm [Norm, Bytes] { qkv: One, query_weight: One, key_weight: One; heads: HeadLayout, epsilon: f32 }
    /// Backward of [`Op::QkNorm`]: yields d_qkv; with `parameters: Compute` also the gradients of
    /// both weights (D) in `dtype`, and partial sums as scratch.
    QkNormGrad [Norm, Bytes] {
        dy: One, qkv: One, query_weight: One, key_weight: One, rstd: One,
        query_accumulator: Maybe, key_accumulator: Maybe;
        heads: HeadLayout, parameters: ParameterGradients, dtype: DType
    }

    /// Mean and variance of each channel of `x` (.., C) over all rows. In a training step (see
    /// [`PhaseWords`](crate::random::PhaseWords)) they are those of the batch; in an evaluation, those of `running_mean` and
    /// `running_variance` (C) f32, which a training step does not read. Yields mean (C), variance (C) and the variance
    /// without bias (C), all f32, and partial sums as scratch. The first two normalize; running statistics are moved
    /// towards the first and the third. One row has a variance of 0.
    BatchStatistics [BatchNorm, Bytes] { x: One, running_mean: One, running_variance: One, phase: One; }
    /// `f(weight · (x − mean) / √(variance + epsilon) + bias + addend)` for each channel of `x` (.., C), rounded once:
    /// norm, residual sum and activation in one pass. `mean` and `variance` are those of [`Op::BatchStatistics`].
    BatchNorm [BatchNorm, Bytes] {
        x: One, mean: One, variance: One, weight: One, bias: One, addend: Maybe;
        epsilon: f32, activation: NormActivation
    }
    /// Backward of [`Op::BatchNorm`] and [`Op::BatchStatistics`] in a training step: mean and variance depend on `x`. Where a
    /// ReLU is off follows from `x` again, and from `addend`, which is given if there are both: so what was made, which the
    /// next block has, is neither kept nor read. Yields dx (.., C); with `parameters: Compute` d_weight (C) and d_bias (C),
    /// both in `dtype` and added to their accumulators; sums as scratch; and with `addend` its gradient.
    BatchNormGrad [BatchNorm, BytesTwice] {
        dy: One, x: One, addend: Maybe, mean: One, variance: One, weight: One, bias: One,
        weight_accumulator: Maybe, bias_accumulator: Maybe;
        epsilon: f32, activation: NormActivation, parameters: ParameterGradients, dtype: DType
    }

    /// [`Op::BatchNorm`] by statistics of each sample of `x` (B, .., C) and of each of `groups` groups of neighbouring channels:
    /// the same in a step and in an evaluation. Yields y, mean (B, groups) f32, one over the deviation (B, groups) f32, and
    /// statistics of channels as scratch.
    GroupNorm [BatchNorm, BytesTwice] {
        x: One, weight: One, bias: One, addend: Maybe;
        groups: usize, epsilon: f32, activation: NormActivation
    }
    /// Backward of [`Op::GroupNorm`]. Operands and outputs are as in [`Op::BatchNormGrad`].
    GroupNormGrad [BatchNorm, BytesTwice] {
        dy: One, x: One, addend: Maybe, mean: One, rstd: One, weight: One, bias: One,
        weight_accumulator: Maybe, bias_accumulator: Maybe;
        groups: usize, activation: NormActivation, parameters: ParameterGradients, dtype: DType
    }

    // ---- attention --------------------------------------------------------------------------
    /// Cosines and sines of P pairs for `positions` (B, T): yields (B, T, P, 2) f32.
    RotaryTable [Attention, Bytes] { positions: One; frequencies: RotaryFrequencies }
    /// Rotates the query and key heads of `qkv` (B, T, (Q+2K)·D) by a `table` (B, T, P, 2); values are
    /// copied. Element i pairs with i + P, as in Llama; elements from 2P on are copied.
    Rotary [Attention, Bytes] { qkv: One, table: One; heads: HeadLayout, direction: RotaryDirection }
    /// `softmax(scale · q kᵀ) v` per head, in blocks: no (T, T) tensor. `segments` (B, T) keeps
    /// packed samples apart: a query sees keys of its own segment only. Yields (B, T, Q·D) and the
    /// log-sum-exp (B, Q, T) f32.
    Attention [Attention, Product] { qkv: One, segments: Maybe; heads: HeadLayout, mask: Mask, scale: f32 }
    /// Backward of [`Op::Attention`]: yields d_qkv, and `Σ dy·y` per query (B, Q, T) f32 as scratch.
    AttentionGrad [Attention, Product] {
        dy: One, qkv: One, y: One, log_sum_exp: One, segments: Maybe;
        heads: HeadLayout, mask: Mask, scale: f32
    }
    /// Attention of new tokens to themselves and to those before them, for text that is generated token
    /// by token. `qkv` (B, T, (Q+2K)·D) is of the new tokens, `positions` (B, T) says where they stand
    /// in their sequence, all different and below W; `cache` (B, W, 2K·D) holds keys, then values, of
    /// the positions so far. The new ones are added in place; a query sees positions up to
    /// its own, as far back as `mask` says, which is not [`Mask::Full`]. Yields (B, T, Q·D), the cache, and what parts of
    /// the keys yield (see [`CacheParts`]) as scratch. Has no gradient.
    CachedAttention [Attention, Bytes] { qkv: One, cache: One, positions: One; heads: HeadLayout, mask: Mask, scale: f32 }

    // ---- loss -------------------------------------------------------------------------------
    /// Cross-entropy of `hidden · weightᵀ` against `targets` (..), divided by `denominator`
    /// (scalar f32); a target of [`IGNORE_INDEX`] costs nothing. Logits exist `chunk_rows` rows at a
    /// time. With `label_smoothing`, that share of the target's weight is spread evenly over all classes. Yields the loss of
    /// each row (..) f32; with `accuracy: Compute` for each row 1 if its largest logit (the first of equal ones) is its target,
    /// else 0, in f32, where an ignored row is not right; and the chunk of logits as scratch.
    HeadLoss [Loss, Logits] {
        hidden: One, weight: One, targets: One, denominator: One;
        chunk_rows: usize, label_smoothing: f32, accuracy: Accuracy
    }
    /// Backward of [`Op::HeadLoss`], which also yields the loss, so that training computes the
    /// logits once: row losses (..) f32, d_hidden, the chunk as scratch, with
    /// `weight_gradient: Compute` d_weight in `dtype`, and with `accuracy: Compute` what is right, as there.
    HeadLossGrad [Loss, Logits] {
        hidden: One, weight: One, targets: One, denominator: One, d_row_loss: One,
        accumulator: Maybe;
        chunk_rows: usize, label_smoothing: f32, accuracy: Accuracy,
        weight_gradient: ParameterGradients, dtype: DType
    }

    // ---- images -----------------------------------------------------------------------------
    /// `images` (B, H, W, C) in u8, normalized, and in a training step also moved, flipped and cut as `settings` say. Yields
    /// (B, H, W, C) in `dtype`. `samples` (B, 3) i32 has the low and the high half of a sample's id, and its epoch: they
    /// and the seed in `phase` ([`PhaseWords`](crate::random::PhaseWords)) decide what happens to it. The same bits on every
    /// device. Has no gradient.
    Augment [Image, Bytes] { images: One, samples: One, phase: One; settings: AugmentSettings, dtype: DType }

    // ---- reductions, shapes, constants ------------------------------------------------------
    /// Sum of all elements: a scalar f32, and partial sums as scratch.
    Sum [Reduce, Bytes] { x: One; }
    /// A scalar repeated into `shape` as `dtype`.
    Broadcast [Reduce, Bytes] { x: One; shape: Shape, dtype: DType }
    /// The same elements under another shape.
    Reshape [Reshape, View] { x: One; shape: Shape }
    /// Axes in another order: axis `i` of the result is axis `axes[i]` of `x`.
    Transpose [Reshape, Bytes] { x: One; axes: Vec<usize> }
    /// The same values stored as `dtype`, rounded to nearest.
    Convert [Reshape, Bytes] { x: One; dtype: DType }
    /// A matrix of `shape` as `dtype` that is zero except where `places` put `parts`, each multiplied by the factor of its
    /// place. Parts lie below each other, in the order of their rows. Each is rounded once.
    BlockMatrix [Reshape, Bytes] { parts: Many; places: Vec<BlockPlace>, shape: Shape, dtype: DType }
    /// Gradient of a part of [`Op::BlockMatrix`]: the block of `dy` at `place`, multiplied by its factor and added to
    /// `accumulator`. Yields `shape` in `dtype`.
    BlockGrad [Reshape, Bytes] { dy: One, accumulator: Maybe; place: BlockPlace, shape: Shape, dtype: DType }
    /// The rows of a matrix in 8 or 4 bits, see [`QuantizedRow`](crate::QuantizedRow). Yields (N, bytes of a row) in u8.
    Quantize [Quantize, Bytes] { x: One; format: QuantizedFormat }
    /// The values of rows that [`Op::Quantize`] made: yields (N, columns of `form`) in `dtype`.
    Dequantize [Quantize, Bytes] { rows: One; form: QuantizedRow, dtype: DType }
    /// Every element is `value`.
    Fill [Reshape, Bytes] { ; shape: Shape, dtype: DType, value: f32 }
    /// Normal values with mean 0; the random bits depend on `random` (seed), `stream` and the
    /// element alone.
    RandomNormal [Reshape, Bytes] { random: One; shape: Shape, dtype: DType, deviation: f32, stream: u16 }

    // ---- optimizer --------------------------------------------------------------------------
    /// Sum of squares: a scalar f32, and partial sums as scratch.
    SumOfSquares [Optimizer, Bytes] { x: One; }
    /// The sum of partial sums of blocks: a scalar f32. If pieces of a tensor begin at multiples of [`SUM_BLOCK`](crate::SUM_BLOCK)
    /// elements and `partials` (f32) are what [`Op::SumOfSquares`] left as scratch for each, in order, it has the bits of the whole.
    SumOfPartials [Optimizer, Bytes] { partials: One; }
    /// Square root of the sum of `parts` (scalars), in order: a scalar f32, and 8 bytes of scratch
    /// for the partial sum.
    GlobalNorm [Optimizer, Bytes] { parts: Many; }
    /// `min(1, max_norm / norm)`: a scalar f32. A non-finite norm gives 0, which cancels the
    /// update.
    ClipScale [Optimizer, Bytes] { norm: One; max_norm: f32 }
    /// One AdamW update in place. `scalars` (f32, see [`StepScalars`]) has the learning rate and the
    /// bias corrections; `clip` multiplies the gradient. A `clip` of 0 (see [`Op::ClipScale`]) or
    /// scalars of no update ([`StepScalars::NONE`]) leave everything as it is. With `master` (f32) the update is made
    /// there and `parameter` is its rounding. bf16 moments should round stochastically: at
    /// `beta2 = 0.999` a step's change is less than half of the last place. A parameter may be
    /// updated in pieces: `first_element`, a multiple of [`PIECE_ALIGNMENT`](crate::PIECE_ALIGNMENT),
    /// is where the piece begins in it, so that random bits are those of the whole. Moments of dtype u8 are in 8 bits, see
    /// [`MomentFormat`](crate::MomentFormat): rounded stochastically, and a first moment beyond
    /// [`AdamWParameters::first_moment_bound`] is cut off. Yields the
    /// parameter, both moments, and the master where there is one, each over its operand. With `observed`, it also yields
    /// sums over this and the previous update, see [`OBSERVED_SUMS`](crate::OBSERVED_SUMS); no other result changes by that.
    AdamW [Optimizer, Bytes] {
        parameter: One, gradient: One, first_moment: One, second_moment: One, master: Maybe,
        scalars: One, clip: Maybe, random: Maybe, observed: Maybe;
        hyper: AdamWParameters, rounding: Rounding, moment_rounding: Rounding, stream: u16,
        first_element: usize
    }
    /// One step of stochastic gradient descent in place, as PyTorch defines it: `g = clip · gradient + weight_decay · p`,
    /// `m = momentum · m + g`, and `p − rate · d`, where `d` is `m` or, after Nesterov, `g + momentum · m`. `momentum` is
    /// given if there is some, f32 or bf16. With `master` (f32) the update is made there and `parameter` is its
    /// rounding. What leaves everything as it is, and `first_element`, are as in [`Op::AdamW`]. Yields the parameter, the
    /// momentum and the master, where there are any, each over its operand.
    Sgd [Optimizer, Bytes] {
        parameter: One, gradient: One, momentum: Maybe, master: Maybe, scalars: One, clip: Maybe, random: Maybe;
        hyper: SgdParameters, rounding: Rounding, moment_rounding: Rounding, stream: u16, first_element: usize
    }
}

impl<T> Op<T> {
    /// Whether it belongs to what follows the last backward pass of a step: tied gradients, norm, update.
    pub fn is_update(&self) -> bool {
        self.family() == Family::Optimizer
    }
}

impl<T: Clone> Op<T> {
    /// All operands in order, each with its name.
    pub fn operands(&self) -> Vec<(&'static str, T)> {
        let mut operands = Vec::new();
        self.clone().map(|name, operand| operands.push((name, operand)));
        operands
    }

    /// Operands that the op reads in evaluations only. What it yields in a training step does not depend on them, so a
    /// recomputation may see other values there.
    pub fn read_by_evaluations(&self) -> Vec<T> {
        match self {
            Op::BatchStatistics { running_mean, running_variance, .. } => {
                vec![running_mean.clone(), running_variance.clone()]
            }
            _ => Vec::new(),
        }
    }

    /// Which outputs overwrite which operand: (operand, output index). The two share memory.
    pub fn in_place(&self) -> Vec<(T, usize)> {
        let pairs: Vec<(Option<&T>, usize)> = match self {
            Op::EmbeddingGrad { accumulator, .. }
            | Op::LinearWeightGrad { accumulator, .. }
            | Op::Fp8WeightGrad { accumulator, .. }
            | Op::Conv2dWeightGrad { accumulator, .. }
            | Op::BlockGrad { accumulator, .. }
            | Op::ColumnSum { accumulator, .. } => vec![(accumulator.as_ref(), 0)],
            Op::ActivationGrad { x: operand, .. } | Op::SwiGluGrad { gate_up: operand, .. } => {
                vec![(Some(operand), 0)]
            }
            Op::SwiGluGradAndOutput { dy, gate_up, .. } => vec![(Some(gate_up), 0), (Some(dy), 1)],
            Op::SwiGluCodedGrad { dy, output: UnitOutput::Compute, .. } => vec![(Some(dy), 1)],
            Op::NormGrad { weight_accumulator, bias_accumulator, .. }
            | Op::BatchNormGrad { weight_accumulator, bias_accumulator, .. }
            | Op::GroupNormGrad { weight_accumulator, bias_accumulator, .. } => {
                vec![(weight_accumulator.as_ref(), 1), (bias_accumulator.as_ref(), 2)]
            }
            Op::QkNormGrad { query_accumulator, key_accumulator, .. } => {
                vec![(query_accumulator.as_ref(), 1), (key_accumulator.as_ref(), 2)]
            }
            Op::HeadLossGrad { accumulator, .. } => vec![(accumulator.as_ref(), 3)],
            Op::AdamW { parameter, first_moment, second_moment, master, observed, .. } => vec![
                (Some(parameter), 0),
                (Some(first_moment), 1),
                (Some(second_moment), 2),
                (master.as_ref(), 3),
                (observed.as_ref(), 3 + usize::from(master.is_some())),
            ],
            Op::Sgd { parameter, momentum, master, .. } => vec![
                (Some(parameter), 0),
                (momentum.as_ref(), 1),
                (master.as_ref(), 1 + usize::from(momentum.is_some())),
            ],
            Op::Accumulate { sum, .. } => vec![(Some(sum), 0)],
            Op::MovingAverage { average, .. } => vec![(Some(average), 0)],
            Op::CachedAttention { cache, .. } => vec![(Some(cache), 1)],
            Op::Embedding { .. }
            | Op::Linear { .. }
            | Op::LinearInputGrad { .. }
            | Op::ToFp8 { .. }
            | Op::Fp8Linear { .. }
            | Op::Conv2d { .. }
            | Op::Conv2dInputGrad { .. }
            | Op::MaxPool { .. }
            | Op::MaxPoolGrad { .. }
            | Op::AveragePool { .. }
            | Op::AveragePoolGrad { .. }
            | Op::Add { .. }
            | Op::Mul { .. }
            | Op::Scale { .. }
            | Op::Dropout { .. }
            | Op::Activation { .. }
            | Op::SwiGlu { .. }
            | Op::SwiGluCoded { .. }
            | Op::SwiGluCodedGrad { output: UnitOutput::Skip, .. }
            | Op::Norm { .. }
            | Op::QkNorm { .. }
            | Op::BatchStatistics { .. }
            | Op::Augment { .. }
            | Op::BatchNorm { .. }
            | Op::GroupNorm { .. }
            | Op::RotaryTable { .. }
            | Op::Rotary { .. }
            | Op::Attention { .. }
            | Op::AttentionGrad { .. }
            | Op::HeadLoss { .. }
            | Op::Sum { .. }
            | Op::Broadcast { .. }
            | Op::Reshape { .. }
            | Op::Transpose { .. }
            | Op::Convert { .. }
            | Op::BlockMatrix { .. }
            | Op::Quantize { .. }
            | Op::Dequantize { .. }
            | Op::Fill { .. }
            | Op::RandomNormal { .. }
            | Op::SumOfSquares { .. }
            | Op::SumOfPartials { .. }
            | Op::GlobalNorm { .. }
            | Op::ClipScale { .. } => Vec::new(),
        };
        pairs.into_iter().filter_map(|(operand, output)| Some((operand?.clone(), output))).collect()
    }
}
