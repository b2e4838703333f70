//! The op set: what a node can compute.
//!
//! An op is generic over the representation of its operands: `Op<TensorId>` in a graph,
//! `Op<&Tensor>` in a shape rule, `Op<View>` on a device. All of them access operands by name. Each
//! op is declared with its family and with its cost class, which is all that planner and profile
//! know about it.

use crate::attributes::*;
use crate::{AugmentSettings, DType, Fp8Form, QuantizedFormat, QuantizedRow, Shape, Window};

/// A required operand.
type One<T> = T;
/// An optional operand.
type Maybe<T> = Option<T>;
/// Any number of operands.
type Many<T> = Vec<T>;

/// A group of ops whose rules are in one file of `ops/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Table lookups.
    Embedding,
    /// Matrix products.
    Linear,
    /// Convolutions.
    Convolution,
    /// Maxima and means of windows.
    Pool,
    /// Element by element.
    Elementwise,
    /// Norms of rows and of heads.
    Norm,
    /// Norms of channels, over a batch or over the rows of a sample.
    BatchNorm,
    /// Image augmentation.
    Image,
    /// Attention and positions.
    Attention,
    /// Gates of recurrent cells.
    Recurrent,
    /// Categorical distributions: samples of them, and how they differ.
    Categorical,
    /// The head and its loss.
    Loss,
    /// Sums.
    Reduce,
    /// Changes of shape, order or dtype, and constants.
    Reshape,
    /// Matrices in 8 or 4 bits.
    Quantize,
    /// Operands in 8-bit floats, and products of them.
    Fp8,
    /// The end of a step: tied gradients, norm, update.
    Optimizer,
}

/// What determines the time of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// The arithmetic of matrix products. Reads and writes are hidden behind it.
    Product,
    /// Products whose result, a chunk of logits at a time, passes through memory several times.
    Logits,
    /// Products with an operand or result that passes through memory, a chunk of columns at a time.
    Columns,
    /// Rows of a table, which are read and written once.
    TableRows,
    /// Rows of a gradient, which are read and added to rows of a table.
    GradientRows,
    /// No data is moved.
    View,
    /// Every operand is read and every output is written once.
    Bytes,
    /// Operands are read twice, once to compute sums and once to use them. Outputs are written
    /// once.
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
        /// One operation: operands first, then attributes. Each variant documents its outputs, in
        /// order. `(.., C)` means any number of rows of width `C`.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)] // operands and attributes are explained at their variant
        pub enum Op<T> {
            $( $(#[$doc])* $name { $($operand: $kind<T>,)* $($attribute: $ty,)* }, )*
        }

        impl<T> Op<T> {
            /// The op's name in messages and traces.
            pub fn name(&self) -> &'static str {
                match self { $( Op::$name { .. } => stringify!($name), )* }
            }

            /// The file of `ops/` that contains its rules.
            pub fn family(&self) -> Family {
                match self { $( Op::$name { .. } => Family::$family, )* }
            }

            /// What determines its time.
            pub fn cost(&self) -> Cost {
                match self { $( Op::$name { .. } => Cost::$cost, )* }
            }

            /// Replaces the operands: `f` gets the name and value of each.
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
    /// Rows of `table` (V, C) selected by `ids` (..). Yields (.., C).
    Embedding [Embedding, TableRows] { ids: One, table: One; }
    /// Gradient of `table`: rows of `dy` summed by ID. `order` lists the rows of `ids` sorted by
    /// (id, row), so that each table row is one segment, reduced in order. Yields (V, C) in
    /// `dtype`. If given, `accumulator` is added and overwritten.
    EmbeddingGrad [Embedding, GradientRows] { dy: One, ids: One, order: One, accumulator: Maybe; table_rows: usize, dtype: DType }
    /// `x · weightᵀ + bias + addend`: x (.., K), weight (N, K), bias (N), addend (.., N).
    /// Yields (.., N), rounded once.
    Linear [Linear, Product] { x: One, weight: One, bias: Maybe, addend: Maybe; }
    /// `dy · weight + addend`. Yields (.., K).
    LinearInputGrad [Linear, Product] { dy: One, weight: One, addend: Maybe; }
    /// `dyᵀ · x` over all rows plus `accumulator`, rounded once. Yields (N, K) in `dtype`.
    LinearWeightGrad [Linear, Product] { dy: One, x: One, accumulator: Maybe; dtype: DType }
    /// The 8-bit float codes of a bf16 tensor (.., K) in u8, see [`Fp8Form`](crate::Fp8Form), and
    /// partial maxima as scratch.
    ToFp8 [Fp8, BytesTwice] { x: One; form: Fp8Form }
    /// `x · weightᵀ + bias + addend` for codes of [`Op::ToFp8`]: x (R + 1, K), weight (N + 1, K),
    /// bias (N). The addend and the result have shape `output`, R rows of N in bf16. Sums are f32,
    /// and the result is rounded once. With codes of `dy` in rows and of `weight` in columns, this
    /// computes the gradient of `x`.
    Fp8Linear [Fp8, Product] { x: One, weight: One, bias: Maybe, addend: Maybe; output: Shape }
    /// Gradient of the weight of [`Op::Fp8Linear`] from codes in columns: dy (N + 1, R), x (K + 1,
    /// R). `accumulator` is added before rounding. Yields (N, K) in `dtype`.
    Fp8WeightGrad [Fp8, Product] { dy: One, x: One, accumulator: Maybe; dtype: DType }
    /// Sum over rows plus `accumulator`. Yields (C) in `dtype`, and partial sums as scratch.
    ColumnSum [Reduce, Bytes] { x: One, accumulator: Maybe; dtype: DType }

    // ---- images -----------------------------------------------------------------------------
    /// Each window of `x` (B, H, W, I) times `weight` (O, KH·KW·I), whose rows are in the order
    /// (kh, kw, i), plus `bias` (O). Yields (B, OH, OW, O), rounded once. Unless the window is
    /// [pointwise](Window::is_pointwise), also yields scratch: the columns (the contents of
    /// windows) of [some images at a time](crate::Planes::images_per_chunk), and, if its rows are
    /// narrower than columns, the weight padded to their width.
    Conv2d [Convolution, Columns] { x: One, weight: One, bias: Maybe; window: Window }
    /// Gradient of `x` of [`Op::Conv2d`]. `dy · weight` is the gradient of columns, rounded to the
    /// dtype of `dy`. Each input position sums its own in the order (kh, kw), then adds `addend` or
    /// `accumulator`, which the result overwrites. Kernels [without
    /// columns](crate::Planes::suit_tensor_cores) round only the result. Yields `input` and the
    /// scratch of [`Op::Conv2d`], where the weight may be in any layout.
    Conv2dInputGrad [Convolution, Columns] {
        dy: One, weight: One, addend: Maybe, accumulator: Maybe; window: Window, input: Shape
    }
    /// Gradient of `weight` of [`Op::Conv2d`]: `dyᵀ · columns`, summed in f32 chunk by chunk in
    /// order, then added to `accumulator` and rounded once. Yields (O, KH·KW·I) in `dtype`. Unless
    /// the window is pointwise, also yields as scratch a chunk of columns and the sum, or the sums
    /// of [parts](crate::GradientParts) of all positions.
    Conv2dWeightGrad [Convolution, Columns] { dy: One, x: One, accumulator: Maybe; window: Window, dtype: DType }
    /// The maximum of each window of `x` (B, H, W, C), or NaN if there is one. Yields (B, OH, OW,
    /// C).
    MaxPool [Pool, Bytes] { x: One; window: Window }
    /// Gradient of `x` of [`Op::MaxPool`]. A window passes its gradient to the first of its largest
    /// elements in the order (kh, kw), or to its last NaN, as in PyTorch. Yields (B, H, W, C).
    /// It overwrites `x` where windows do not overlap.
    MaxPoolGrad [Pool, Bytes] { dy: One, x: One; window: Window }
    /// The sum of each window of `x` (B, H, W, C), divided by KH·KW. Yields (B, OH, OW, C).
    AveragePool [Pool, Bytes] { x: One; window: Window }
    /// Gradient of `x` of [`Op::AveragePool`]. Yields `input`.
    AveragePoolGrad [Pool, Bytes] { dy: One; window: Window, input: Shape }

    // ---- elementwise ------------------------------------------------------------------------
    /// `a + b`, same shape.
    Add [Elementwise, Bytes] { a: One, b: One; }
    /// `sum + x`, same shape, overwriting `sum`, which is f32 or has the dtype of `x`. Has no
    /// gradient.
    Accumulate [Optimizer, Bytes] { sum: One, x: One; }
    /// `average + momentum · (x − average)`, both f32 of the same shape, overwriting `average`, a
    /// parameter of [`Training::Running`](crate::Training::Running). Runs once per micro-batch of a
    /// training step. Has no gradient.
    MovingAverage [Elementwise, Bytes] { average: One, x: One; momentum: f32 }
    /// `a · b`, same shape.
    Mul [Elementwise, Bytes] { a: One, b: One; }
    /// `factor · x`.
    Scale [Elementwise, Bytes] { x: One; factor: f32 }
    /// `x` with a fraction `rate` of its elements set to zero and the others divided by `1 - rate`,
    /// plus `addend`. `random` ([`DropoutWords`](crate::random::DropoutWords)) gives the position
    /// of the rows in the step, or disables dropout. Which elements are zero depends only on
    /// `random`, `stream`, the block and the element. The gradient uses the same op.
    Dropout [Elementwise, Bytes] { x: One, random: One, addend: Maybe; rate: f32, stream: u16 }
    /// GELU (either form), ReLU or SiLU.
    Activation [Elementwise, Bytes] { x: One; function: ActivationFunction }
    /// `dy · f'(x)`, overwriting `x`.
    ActivationGrad [Elementwise, Bytes] { dy: One, x: One; function: ActivationFunction }
    /// `tanh(x)`.
    Tanh [Elementwise, Bytes] { x: One; }
    /// Gradient of `x` of [`Op::Tanh`] from its output: `dy · (1 − y²)`.
    TanhGrad [Elementwise, Bytes] { dy: One, y: One; }
    /// The gated unit `f(gate) · up`, where the first half of `gate_up` (.., 2F) is the gate.
    /// Yields (.., F). With SiLU, as in most models, this is SwiGLU. With GELU it is GeGLU, with
    /// ReLU ReGLU.
    SwiGlu [Elementwise, Bytes] { gate_up: One; function: ActivationFunction }
    /// Gradient of `gate_up` (.., 2F) from `dy` (.., F), overwriting `gate_up`, the largest
    /// activation of a layer, so that it is needed only once. With a `codec`, `gate_up` is encoded
    /// and decoded first.
    SwiGluGrad [Elementwise, Bytes] { dy: One, gate_up: One; function: ActivationFunction, codec: ActivationCodec }
    /// [`Op::SwiGluGrad`] for a backward pass that did not keep the output of [`Op::SwiGlu`]. Also
    /// yields that output, overwriting `dy`, so that `gate_up` is read once for both.
    SwiGluGradAndOutput [Elementwise, Bytes] { dy: One, gate_up: One; function: ActivationFunction, codec: ActivationCodec }
    /// [`Op::SwiGlu`] that also yields the halves of each row of `gate_up` in 8 bits, in the form
    /// of [`QuantizedRow`](crate::QuantizedRow): two rows of F values, one after the other, in u8.
    /// The first output is bit-identical to that of [`Op::SwiGlu`].
    SwiGluCoded [Elementwise, Bytes] { gate_up: One; function: ActivationFunction }
    /// Gradient of `gate_up` (.., 2F) from `dy` (.., F) and the `code` of [`Op::SwiGluCoded`]. With
    /// `output: Compute`, also yields `f(gate) · up` of the decoded values, overwriting `dy`.
    /// Bit-identical to [`Op::SwiGluGradAndOutput`] with [`ActivationCodec::Int8`].
    SwiGluCodedGrad [Elementwise, Bytes] { dy: One, code: One; function: ActivationFunction, output: UnitOutput }

    // ---- norms ------------------------------------------------------------------------------
    /// Layer norm or RMS norm of `x + delta` over the width. Yields y (.., C), rstd (..) f32, then
    /// mean (..) f32 for a layer norm, then the sum `x + delta` if `delta` is given. The norm uses
    /// the sum as stored, so that it can be recomputed from it.
    Norm [Norm, Bytes] { x: One, delta: Maybe, weight: One, bias: Maybe; kind: NormKind, epsilon: f32 }
    /// Backward of [`Op::Norm`]. `x` is the normalized tensor (the sum). Yields dx + addend (..,
    /// C). With `parameters: Compute`, also d_weight (C), d_bias (C) if there is a bias (both in
    /// `dtype`, added to their accumulators), and partial sums as scratch.
    NormGrad [Norm, Bytes] {
        dy: One, x: One, weight: One, bias: Maybe, rstd: One, mean: Maybe, addend: Maybe,
        weight_accumulator: Maybe, bias_accumulator: Maybe;
        kind: NormKind, parameters: ParameterGradients, dtype: DType
    }
    /// RMS norm of each query and key head of `qkv` (B, T, (Q+2K)·D). Values are copied. Weights
    /// are (D). With a `table` (B, T, P, 2), the normalized heads, rounded to the type of `qkv`, are
    /// then rotated as by [`Op::Rotary`]. Yields the same shape, and rstd (B, T, Q+K) f32.
    QkNorm [Norm, Bytes] {
        qkv: One, query_weight: One, key_weight: One, table: Maybe;
        heads: HeadLayout, epsilon: f32
    }
    /// Backward of [`Op::QkNorm`]. Yields d_qkv. With `parameters: Compute`, also the gradients of
    /// both weights (D) in `dtype`, and partial sums as scratch.
    QkNormGrad [Norm, Bytes] {
        dy: One, qkv: One, query_weight: One, key_weight: One, table: Maybe, rstd: One,
        query_accumulator: Maybe, key_accumulator: Maybe;
        heads: HeadLayout, parameters: ParameterGradients, dtype: DType
    }

    /// Mean and variance of each channel of `x` (.., C) over all rows. In a training step (see
    /// [`PhaseWords`](crate::random::PhaseWords)) they are those of the batch. In an evaluation,
    /// they are `running_mean` and `running_variance` (C) f32, which a training step does not read.
    /// Yields mean (C), biased variance (C) and unbiased variance (C), all f32, and partial sums as
    /// scratch. The first two are used to normalize. Running statistics move toward the first and
    /// the third. The variance of a single row is 0.
    BatchStatistics [BatchNorm, Bytes] { x: One, running_mean: One, running_variance: One, phase: One; }
    /// `f(weight · (x − mean) / √(variance + epsilon) + bias + addend)` for each channel of `x`
    /// (.., C), rounded once: norm, residual sum and activation in one pass. `mean` and `variance`
    /// come from [`Op::BatchStatistics`].
    BatchNorm [BatchNorm, Bytes] {
        x: One, mean: One, variance: One, weight: One, bias: One, addend: Maybe;
        epsilon: f32, activation: NormActivation
    }
    /// Backward of [`Op::BatchNorm`] and [`Op::BatchStatistics`] in a training step, where mean and
    /// variance depend on `x`. The mask of a ReLU is recomputed from `x`, and from `addend`, which
    /// is given if there are both. So the output, which belongs to the next block, is neither kept
    /// nor read. Yields dx (.., C), which overwrites `x`. With `parameters: Compute`, d_weight (C)
    /// and d_bias (C), both in `dtype` and added to their accumulators. Then sums as scratch, and
    /// with `addend` its gradient.
    BatchNormGrad [BatchNorm, BytesTwice] {
        dy: One, x: One, addend: Maybe, mean: One, variance: One, weight: One, bias: One,
        weight_accumulator: Maybe, bias_accumulator: Maybe;
        epsilon: f32, activation: NormActivation, parameters: ParameterGradients, dtype: DType
    }

    /// [`Op::BatchNorm`] with the statistics of each sample of `x` (B, .., C) and of each of
    /// `groups` groups of adjacent channels. It is the same in training and evaluation. Yields y,
    /// mean (B, groups) f32, rstd (B, groups) f32, and statistics of channels as scratch.
    GroupNorm [BatchNorm, BytesTwice] {
        x: One, weight: One, bias: One, addend: Maybe;
        groups: usize, epsilon: f32, activation: NormActivation
    }
    /// Backward of [`Op::GroupNorm`]. Operands and outputs are as in [`Op::BatchNormGrad`], but `x`
    /// is kept.
    GroupNormGrad [BatchNorm, BytesTwice] {
        dy: One, x: One, addend: Maybe, mean: One, rstd: One, weight: One, bias: One,
        weight_accumulator: Maybe, bias_accumulator: Maybe;
        groups: usize, activation: NormActivation, parameters: ParameterGradients, dtype: DType
    }

    // ---- attention --------------------------------------------------------------------------
    /// Cosines and sines of P pairs for `positions` (B, T). Yields (B, T, P, 2) f32.
    RotaryTable [Attention, Bytes] { positions: One; frequencies: RotaryFrequencies }
    /// Rotates the query and key heads of `qkv` (B, T, (Q+2K)·D) by a `table` (B, T, P, 2). Values
    /// are copied. Element i is paired with i + P, as in Llama. Elements from 2P on are copied.
    Rotary [Attention, Bytes] { qkv: One, table: One; heads: HeadLayout, direction: RotaryDirection }
    /// `softmax(scale · q kᵀ) v` per head, computed in blocks without a (T, T) tensor. `segments`
    /// (B, T) separates packed samples: a query attends only to keys of its own segment. Yields (B,
    /// T, Q·D) and the log-sum-exp (B, Q, T) f32.
    Attention [Attention, Product] { qkv: One, segments: Maybe; heads: HeadLayout, mask: Mask, scale: f32 }
    /// Backward of [`Op::Attention`]. Yields d_qkv, and `Σ dy·y` per query (B, Q, T) f32 as
    /// scratch. Where a GPU gains by them, also [`AttentionSums`](crate::AttentionSums) as scratch.
    AttentionGrad [Attention, Product] {
        dy: One, qkv: One, y: One, log_sum_exp: One, segments: Maybe;
        heads: HeadLayout, mask: Mask, scale: f32
    }
    /// Attention of new tokens to themselves and to earlier tokens, for generating text token by
    /// token. `qkv` (B, T, (Q+2K)·D) belongs to the new tokens. `positions` (B, T) are their
    /// positions in the sequence, all different and below W. `cache` (B, W, 2K·D) holds keys, then
    /// values, of the positions so far. The new ones are added in place. A query attends to
    /// positions up to its own, as limited by `mask`, which must not be [`Mask::Full`]. Yields (B,
    /// T, Q·D), the cache, and the results of parts of the keys (see [`CacheParts`]) as scratch.
    /// Has no gradient.
    CachedAttention [Attention, Bytes] { qkv: One, cache: One, positions: One; heads: HeadLayout, mask: Mask, scale: f32 }

    // ---- recurrent cells and categorical latents ----------------------------------------------
    /// What a GRU shows its candidate of the old state: `sigmoid(gate) · hidden`, same shape.
    GruReset [Recurrent, Bytes] { gate: One, hidden: One; }
    /// Backward of [`Op::GruReset`]. Yields d_gate and d_hidden.
    GruResetGrad [Recurrent, Bytes] { dy: One, gate: One, hidden: One; }
    /// The new state of a GRU: `u · hidden + (1 − u) · tanh(candidate)` with `u = sigmoid(gate)`,
    /// same shape.
    GruState [Recurrent, Bytes] { gate: One, candidate: One, hidden: One; }
    /// Backward of [`Op::GruState`]. Yields d_gate, d_candidate and d_hidden.
    GruStateGrad [Recurrent, Bytes] { dy: One, gate: One, candidate: One, hidden: One; }
    /// Categorical distributions, one for each group of `classes` neighbors in a row of `logits`:
    /// the softmax with weight `1 − uniform`, mixed with the uniform distribution.
    Categorical [Categorical, Bytes] { logits: One; classes: usize, uniform: f32 }
    /// Gradient of `logits` of [`Op::Categorical`].
    CategoricalGrad [Categorical, Bytes] { dy: One, logits: One; classes: usize, uniform: f32 }
    /// Samples a class of each group of `probabilities`, as 1 among zeros: the first class at which
    /// the sum of probabilities exceeds a uniform number, or the last one. The number depends only
    /// on `random` (seed), `stream`, the block and the group. The gradient is straight-through: that
    /// of the sample is that of the probabilities.
    SampleClass [Categorical, Bytes] { probabilities: One, random: One; classes: usize, stream: u16 }
    /// The KL divergence of each row of distributions, `Σ q ln(q / p)` for the posterior q and the
    /// prior p, or the amount `free` if that is larger. Yields (..) f32. The gradient is zero where
    /// the amount is larger, and is weighted by `balance`.
    Divergence [Categorical, Bytes] { posterior: One, prior: One; free: f32, balance: KlBalance }
    /// Backward of [`Op::Divergence`], which yielded `divergence` (..). Yields d_posterior and
    /// d_prior.
    DivergenceGrad [Categorical, Bytes] {
        d_divergence: One, divergence: One, posterior: One, prior: One; free: f32, balance: KlBalance
    }

    // ---- loss -------------------------------------------------------------------------------
    /// Half the squared distance of each row of `x` from that of `target`, same shape. Yields (..)
    /// f32. `target` has no gradient.
    SquaredError [Loss, Bytes] { x: One, target: One; }
    /// Gradient of `x` of [`Op::SquaredError`].
    SquaredErrorGrad [Loss, Bytes] { d_row_loss: One, x: One, target: One; }
    /// Negative log likelihood of an outcome: of a change, under a normal distribution without its
    /// constant, and of whether it was accepted. A row of `heads` (.., 3) is the mean, the log
    /// variance and the logit of acceptance. `change` (..) and `accepted` (..), which is 1 or 0, are
    /// f32 and have no gradient. Yields (..) f32.
    OutcomeLoss [Loss, Bytes] { heads: One, change: One, accepted: One; }
    /// Gradient of `heads` of [`Op::OutcomeLoss`].
    OutcomeLossGrad [Loss, Bytes] { d_row_loss: One, heads: One, change: One, accepted: One; }
    /// Cross-entropy of `hidden · weightᵀ` against `targets` (..), divided by `denominator` (scalar
    /// f32). Targets of [`IGNORE_INDEX`] do not count. Logits are computed `chunk_rows` rows at a
    /// time. With `label_smoothing`, that share of the target's weight is spread evenly over all
    /// classes. Yields the loss of each row (..) f32. With `accuracy: Compute`, also yields 1 for
    /// each row whose largest logit (the first of equal ones) is its target, else 0, in f32.
    /// Ignored rows are not correct. Last, yields the chunk of logits as scratch.
    HeadLoss [Loss, Logits] {
        hidden: One, weight: One, targets: One, denominator: One;
        chunk_rows: usize, label_smoothing: f32, accuracy: Accuracy
    }
    /// Backward of [`Op::HeadLoss`], which also yields the loss, so that training computes the
    /// logits once. Yields row losses (..) f32, d_hidden, the chunk as scratch, with
    /// `weight_gradient: Compute` d_weight in `dtype`, and with `accuracy: Compute` the correct
    /// rows, as in the forward op.
    HeadLossGrad [Loss, Logits] {
        hidden: One, weight: One, targets: One, denominator: One, d_row_loss: One,
        accumulator: Maybe;
        chunk_rows: usize, label_smoothing: f32, accuracy: Accuracy,
        weight_gradient: ParameterGradients, dtype: DType
    }

    // ---- images -----------------------------------------------------------------------------
    /// Normalizes `images` (B, H, W, C) in u8, and in a training step also shifts, flips and cuts
    /// them according to `settings`. Yields (B, H, W, C) in `dtype`. `samples` (B, 3) i32 contains
    /// the low and high half of a sample's ID, and its epoch. They and the seed in `phase`
    /// ([`PhaseWords`](crate::random::PhaseWords)) determine the augmentation. Bit-identical on
    /// every device. Has no gradient.
    Augment [Image, Bytes] { images: One, samples: One, phase: One; settings: AugmentSettings, dtype: DType }

    // ---- reductions, shapes, constants ------------------------------------------------------
    /// Sum of all elements: a scalar f32, and partial sums as scratch.
    Sum [Reduce, Bytes] { x: One; }
    /// A scalar repeated to `shape` as `dtype`.
    Broadcast [Reduce, Bytes] { x: One; shape: Shape, dtype: DType }
    /// The same elements under another shape.
    Reshape [Reshape, View] { x: One; shape: Shape }
    /// Permutes the axes: axis `i` of the result is axis `axes[i]` of `x`.
    Transpose [Reshape, Bytes] { x: One; axes: Vec<usize> }
    /// The same values stored as `dtype`, rounded to nearest.
    Convert [Reshape, Bytes] { x: One; dtype: DType }
    /// A matrix of `shape` as `dtype` with `parts` at `places`, each multiplied by the factor of
    /// its place, and zero elsewhere. Parts are stacked, in the order of their rows. Each is
    /// rounded once.
    BlockMatrix [Reshape, Bytes] { parts: Many; places: Vec<BlockPlace>, shape: Shape, dtype: DType }
    /// Gradient of a part of [`Op::BlockMatrix`]: the block of `dy` at `place`, multiplied by its
    /// factor and added to `accumulator`. Yields `shape` in `dtype`.
    BlockGrad [Reshape, Bytes] { dy: One, accumulator: Maybe; place: BlockPlace, shape: Shape, dtype: DType }
    /// Quantizes the rows of a matrix to 8 or 4 bits, see [`QuantizedRow`](crate::QuantizedRow).
    /// Yields (N, bytes of a row) in u8.
    Quantize [Quantize, Bytes] { x: One; format: QuantizedFormat }
    /// Dequantizes rows of [`Op::Quantize`]. Yields (N, columns of `form`) in `dtype`.
    Dequantize [Quantize, Bytes] { rows: One; form: QuantizedRow, dtype: DType }
    /// A tensor with every element equal to `value`.
    Fill [Reshape, Bytes] { ; shape: Shape, dtype: DType, value: f32 }
    /// Normal values with mean 0. The random bits depend only on `random` (seed), `stream` and the
    /// element.
    RandomNormal [Reshape, Bytes] { random: One; shape: Shape, dtype: DType, deviation: f32, stream: u16 }

    // ---- optimizer --------------------------------------------------------------------------
    /// Sum of squares: a scalar f32, and partial sums as scratch.
    SumOfSquares [Optimizer, Bytes] { x: One; }
    /// The sum of partial sums of blocks: a scalar f32. If the pieces of a tensor begin at
    /// multiples of [`SUM_BLOCK`](crate::SUM_BLOCK) elements and `partials` (f32) are the scratch
    /// outputs of [`Op::SumOfSquares`] for each, in order, the result is bit-identical to that of
    /// the whole.
    SumOfPartials [Optimizer, Bytes] { partials: One; }
    /// Square root of the sum of `parts` (scalars), in order: a scalar f32, and 8 bytes of scratch
    /// for the partial sum.
    GlobalNorm [Optimizer, Bytes] { parts: Many; }
    /// `min(1, max_norm / norm)`: a scalar f32. A norm that is not finite gives 0, which cancels
    /// the update.
    ClipScale [Optimizer, Bytes] { norm: One; max_norm: f32 }
    /// One AdamW update in place. `scalars` (f32, see [`StepScalars`]) contains the learning rate
    /// and the bias corrections. `clip` multiplies the gradient. A `clip` of 0 (see
    /// [`Op::ClipScale`]) or [`StepScalars::NONE`] leaves everything unchanged. With `master`
    /// (f32), the update applies to it, and `parameter` is its rounded value. bf16 moments should
    /// round stochastically: at `beta2 = 0.999` the change per step is less than half a unit in the
    /// last place. A parameter may be updated in pieces: `first_element`, a multiple of
    /// [`PIECE_ALIGNMENT`](crate::PIECE_ALIGNMENT), is the start of the piece, so that random bits
    /// are those of the whole. Moments of dtype u8 have 8 bits, see
    /// [`MomentFormat`](crate::MomentFormat). They are rounded stochastically, and first moments
    /// are clipped to [`AdamWParameters::first_moment_bound`]. Yields the parameter, both moments,
    /// and the master if there is one, each overwriting its operand. With `observed`, also yields
    /// sums over this and the previous update, see [`OBSERVED_SUMS`](crate::OBSERVED_SUMS). This
    /// does not change the other results.
    AdamW [Optimizer, Bytes] {
        parameter: One, gradient: One, first_moment: One, second_moment: One, master: Maybe,
        scalars: One, clip: Maybe, random: Maybe, observed: Maybe;
        hyper: AdamWParameters, rounding: Rounding, moment_rounding: Rounding, stream: u16,
        first_element: usize
    }
    /// One step of stochastic gradient descent in place, as in PyTorch: `g = clip · gradient +
    /// weight_decay · p`, `m = momentum · m + g`, and `p − rate · d`, where `d` is `m` or, with
    /// Nesterov, `g + momentum · m`. The operand `momentum`, f32 or bf16, is given if momentum is
    /// used. With `master` (f32), the update applies to it, and `parameter` is its rounded value.
    /// Canceled updates and `first_element` are as in [`Op::AdamW`]. Yields the parameter, then the
    /// momentum and the master if given, each overwriting its operand.
    Sgd [Optimizer, Bytes] {
        parameter: One, gradient: One, momentum: Maybe, master: Maybe, scalars: One, clip: Maybe, random: Maybe;
        hyper: SgdParameters, rounding: Rounding, moment_rounding: Rounding, stream: u16, first_element: usize
    }
}

impl<T> Op<T> {
    /// Whether it belongs to the end of a step: tied gradients, norm, update.
    pub fn is_update(&self) -> bool {
        self.family() == Family::Optimizer
    }
}

impl<T: Clone> Op<T> {
    /// All operands in order, with their names.
    pub fn operands(&self) -> Vec<(&'static str, T)> {
        let mut operands = Vec::new();
        self.clone().map(|name, operand| operands.push((name, operand)));
        operands
    }

    /// Operands that the op reads only in evaluations. Its outputs in a training step do not depend
    /// on them, so their values may differ in a recomputation.
    pub fn read_by_evaluations(&self) -> Vec<T> {
        match self {
            Op::BatchStatistics { running_mean, running_variance, .. } => {
                vec![running_mean.clone(), running_variance.clone()]
            }
            _ => Vec::new(),
        }
    }

    /// The outputs that overwrite an operand: (operand, output index). The two share memory.
    pub fn in_place(&self) -> Vec<(T, usize)> {
        let pairs: Vec<(Option<&T>, usize)> = match self {
            Op::EmbeddingGrad { accumulator, .. }
            | Op::LinearWeightGrad { accumulator, .. }
            | Op::Fp8WeightGrad { accumulator, .. }
            | Op::Conv2dInputGrad { accumulator, .. }
            | Op::Conv2dWeightGrad { accumulator, .. }
            | Op::BlockGrad { accumulator, .. }
            | Op::ColumnSum { accumulator, .. } => vec![(accumulator.as_ref(), 0)],
            Op::ActivationGrad { x: operand, .. } | Op::SwiGluGrad { gate_up: operand, .. } => {
                vec![(Some(operand), 0)]
            }
            Op::MaxPoolGrad { x, window, .. } if !window.overlaps() => vec![(Some(x), 0)],
            Op::SwiGluGradAndOutput { dy, gate_up, .. } => vec![(Some(gate_up), 0), (Some(dy), 1)],
            Op::SwiGluCodedGrad { dy, output: UnitOutput::Compute, .. } => vec![(Some(dy), 1)],
            Op::BatchNormGrad { x, weight_accumulator, bias_accumulator, .. } => {
                vec![(Some(x), 0), (weight_accumulator.as_ref(), 1), (bias_accumulator.as_ref(), 2)]
            }
            Op::NormGrad { weight_accumulator, bias_accumulator, .. }
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
            | Op::MaxPool { .. }
            | Op::MaxPoolGrad { .. }
            | Op::AveragePool { .. }
            | Op::AveragePoolGrad { .. }
            | Op::Add { .. }
            | Op::Mul { .. }
            | Op::Scale { .. }
            | Op::Dropout { .. }
            | Op::Activation { .. }
            | Op::Tanh { .. }
            | Op::TanhGrad { .. }
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
            | Op::GruReset { .. }
            | Op::GruResetGrad { .. }
            | Op::GruState { .. }
            | Op::GruStateGrad { .. }
            | Op::Categorical { .. }
            | Op::CategoricalGrad { .. }
            | Op::SampleClass { .. }
            | Op::Divergence { .. }
            | Op::DivergenceGrad { .. }
            | Op::SquaredError { .. }
            | Op::SquaredErrorGrad { .. }
            | Op::OutcomeLoss { .. }
            | Op::OutcomeLossGrad { .. }
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
