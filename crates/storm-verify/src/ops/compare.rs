//! Tolerances for the difference of two results.

use super::cases::Case;
use half::bf16;
use storm_device::Device;
use storm_exec::ExecError;
use storm_graph::{DType, Node, Op, Tensor, TensorId};

/// A tensor and its largest error, as a fraction of the tolerance.
pub(super) struct Difference {
    pub(super) tensor: String,
    pub(super) share: f64,
}

/// One rounding to bf16, with room for a second.
const BF16_TOLERANCE: f64 = 1.6e-2;
/// Updates must match bit for bit, because a wrong random bit changes only the last place. So must
/// images, codes and samples.
const EXACT: f64 = 1e-12;
/// A few f32 roundings per term.
const F32_TOLERANCE: f64 = 1.3e-6;
/// Hopper's tensor cores keep about 14 bits of a sum of FP8 products before it is added in f32.
const FP8_SUM_TOLERANCE: f64 = 2e-3;

/// Compares every output of a node except scratch.
pub(super) fn compare<D: Device>(
    case: &Case,
    node: &Node,
    cpu: &impl Device,
    other: &D,
) -> Result<Vec<Difference>, ExecError> {
    let mut differences = Vec::new();
    for &output in &node.outputs {
        if !case.lasts(output) {
            continue;
        }
        let tensor = case.graph.tensor(output);
        let want = read(cpu, case.offset(output), tensor)?;
        let got = read(other, case.offset(output), tensor)?;
        let tolerance = tolerance(case, node, output);
        // Relative to the value, or to the RMS of the tensor if the value is small.
        let typical = (want.iter().map(|x| x * x).sum::<f64>() / want.len().max(1) as f64).sqrt();
        let share = want.iter().zip(&got).fold(0.0f64, |worst, (want, got)| {
            let share = if want.to_bits() == got.to_bits() || want == got {
                0.0
            } else {
                (want - got).abs() / (tolerance * want.abs().max(typical).max(1e-30))
            };
            if share.is_nan() || worst.is_nan() { f64::NAN } else { worst.max(share) }
        });
        differences.push(Difference { tensor: tensor.to_string(), share });
    }
    Ok(differences)
}

/// The rounding tolerance, given by the storage types of result and operands, and for f32 by the
/// number of terms in a sum.
fn tolerance(case: &Case, node: &Node, output: TensorId) -> f64 {
    let exact = matches!(
        node.op,
        Op::AdamW { .. }
            | Op::Sgd { .. }
            | Op::Augment { .. }
            | Op::ToFp8 { .. }
            | Op::SampleClass { .. }
    );
    if exact {
        return EXACT;
    }
    let operands_are_bf16 = node
        .op
        .operands()
        .iter()
        .any(|(_, operand)| case.graph.tensor(*operand).dtype == DType::BF16);
    if let Op::Attention { qkv, .. } | Op::AttentionGrad { qkv, .. } = node.op
        && operands_are_bf16
    {
        // Early queries average few values: compared with the RMS of a long sequence, both their
        // results and their errors are large.
        let long = case.graph.tensor(qkv).shape.axes()[1] > 512;
        let gradient = matches!(node.op, Op::AttentionGrad { .. });
        // On tensor cores, probabilities and their gradients are rounded to bf16 twice in a row.
        return BF16_TOLERANCE * if gradient { 2.5 } else { 1.0 } * if long { 2.0 } else { 1.0 };
    }
    if case.graph.tensor(output).dtype == DType::BF16 {
        return BF16_TOLERANCE;
    }
    if matches!(node.op, Op::Fp8WeightGrad { .. }) {
        return FP8_SUM_TOLERANCE;
    }
    // Logits are stored as bf16 before the loss sees them.
    if operands_are_bf16 && matches!(node.op, Op::HeadLoss { .. } | Op::HeadLossGrad { .. }) {
        return BF16_TOLERANCE;
    }
    F32_TOLERANCE * (terms(case, node) as f64).sqrt().max(1.0) * 4.0
}

/// Terms of the longest sum that an element of the result depends on.
fn terms(case: &Case, node: &Node) -> usize {
    let shape = |id: &TensorId| &case.graph.tensor(*id).shape;
    match &node.op {
        Op::Linear { x, .. } => shape(x).width(),
        Op::LinearInputGrad { dy, .. } => shape(dy).width(),
        Op::LinearWeightGrad { dy, .. } => shape(dy).rows(),
        Op::Fp8Linear { x, .. } | Op::Fp8WeightGrad { x, .. } => shape(x).width(),
        Op::Conv2d { weight, .. } => shape(weight).width(),
        Op::Conv2dInputGrad { dy, window, .. } => shape(dy).width() * window.taps(),
        Op::Conv2dWeightGrad { dy, .. } => shape(dy).rows(),
        Op::AveragePool { window, .. } | Op::AveragePoolGrad { window, .. } => window.taps(),
        Op::ColumnSum { x, .. } => shape(x).rows(),
        Op::Norm { x, .. } => shape(x).width(),
        Op::NormGrad { x, .. } => shape(x).width().max(shape(x).rows()),
        Op::BatchStatistics { x, .. } | Op::BatchNormGrad { x, .. } => shape(x).rows(),
        Op::GroupNorm { x, .. } | Op::GroupNormGrad { x, .. } => shape(x).elements(),
        Op::QkNormGrad { qkv, .. } => shape(qkv).rows() * shape(qkv).width(),
        Op::EmbeddingGrad { dy, .. } => shape(dy).rows(),
        Op::Attention { qkv, .. } | Op::AttentionGrad { qkv, .. } => shape(qkv).elements(),
        // Scores and sums over the keys: a dozen roundings per key.
        Op::CachedAttention { cache, .. } => 16 * shape(cache).axes()[1],
        Op::HeadLoss { weight, .. } | Op::HeadLossGrad { weight, .. } => shape(weight).elements(),
        Op::CategoricalGrad { classes, .. } => *classes,
        Op::Divergence { posterior, .. } => shape(posterior).width(),
        Op::SquaredError { x, .. } => shape(x).width(),
        Op::Sum { x } | Op::SumOfSquares { x } => shape(x).elements(),
        // Box–Muller with different math libraries.
        Op::RandomNormal { .. } => 10_000,
        _ => 16,
    }
}

fn read(device: &impl Device, offset: usize, tensor: &Tensor) -> Result<Vec<f64>, ExecError> {
    let elements = tensor.shape.elements();
    Ok(match tensor.dtype {
        DType::BF16 => {
            let mut values = vec![bf16::ZERO; elements];
            device.read(offset, &mut values)?;
            values.into_iter().map(f64::from).collect()
        }
        DType::F32 => {
            let mut values = vec![0.0f32; elements];
            device.read(offset, &mut values)?;
            values.into_iter().map(f64::from).collect()
        }
        DType::I32 => {
            let mut values = vec![0i32; elements];
            device.read(offset, &mut values)?;
            values.into_iter().map(f64::from).collect()
        }
        DType::I8 | DType::U8 => {
            let mut values = vec![0u8; elements];
            device.read(offset, &mut values)?;
            values.into_iter().map(f64::from).collect()
        }
    })
}
