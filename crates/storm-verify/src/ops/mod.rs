//! Checks a device against the CPU device, op by op.
//!
//! Each case is a small graph with its backward pass over random shapes and data. Both devices run
//! it node by node. Before every node the other device receives the CPU's operands, so errors do
//! not propagate and appear only where they originate.

mod cases;
mod chunks;
mod compare;
mod image_cases;

use cases::Case;
use cases::families;
pub use chunks::{ChunkReport, verify_row_chunks};
use compare::{Difference, compare};
use std::collections::BTreeMap;
use storm_device::cpu::CpuDevice;
use storm_device::{Device, DeviceError};
use storm_exec::ExecError;
use storm_graph::{DType, Family, Node, Op, TensorId};
use storm_plan::ALIGNMENT;

/// Results for one op at one dtype.
#[derive(Clone, Debug, PartialEq)]
pub struct OpReport {
    /// The op.
    pub op: &'static str,
    /// Storage type of its floats.
    pub dtype: DType,
    /// Nodes compared.
    pub nodes: usize,
    /// The largest error, as a fraction of the tolerance. At most 1 passes.
    pub worst: f64,
    /// Location of the largest error: family, seed, tensor.
    pub place: String,
    /// Set if a second run of some node gave different bits.
    pub unstable: Option<String>,
}

impl OpReport {
    /// Whether the op is correct and deterministic.
    pub fn passed(&self) -> bool {
        self.worst <= 1.0 && self.unstable.is_none()
    }
}

/// Runs every family of cases with `seeds` seeds in f32 and bf16, on devices that `open` creates.
///
/// # Errors
/// The device failed: a kernel is missing or failed, or memory ran out.
pub fn verify_ops<D: Device>(
    seeds: u64,
    open: impl Fn(usize) -> Result<D, DeviceError>,
) -> Result<Vec<OpReport>, ExecError> {
    let mut reports: BTreeMap<(&'static str, DType), OpReport> = BTreeMap::new();
    let mut pair: Option<Pair<D>> = None;
    for family in families() {
        for &dtype in dtypes(family) {
            for seed in 0..seeds {
                let case = Case::build(family, dtype, seed)?;
                // One pair of devices serves all cases that fit, because opening a GPU is slow.
                let enough = pair.as_ref().is_some_and(|pair| pair.capacity >= case.size_bytes());
                if !enough {
                    drop(pair.take());
                    let capacity = case.size_bytes().max(64 << 20).next_multiple_of(ALIGNMENT);
                    let (cpu, other) = (CpuDevice::new(capacity)?, open(capacity)?);
                    pair = Some(Pair { cpu, other, capacity });
                }
                let pair = pair.as_mut().expect("opened above");
                pair.check(&case, &mut reports)?;
            }
        }
    }
    Ok(reports.into_values().collect())
}

/// Storage types that a family is checked with.
fn dtypes(family: &str) -> &'static [DType] {
    // Only attention of bf16 tensors has sums in memory.
    match family.starts_with("attention_sums") {
        true => &[DType::BF16],
        false => &[DType::F32, DType::BF16],
    }
}

/// Attention has a line of its own for each head size with kernels on tensor cores, and for the
/// gradients that have sums in memory.
fn attention_line(node: &Node) -> Option<&'static str> {
    let of = |dim: usize| ATTENTION_LINES.into_iter().find(|line| line.0 == dim);
    match &node.op {
        Op::AttentionGrad { heads, .. } if node.outputs.len() > 2 => {
            SUMS_LINES.into_iter().find(|line| line.0 == heads.head_dim).map(|line| line.1)
        }
        Op::Attention { heads, .. } => of(heads.head_dim).map(|(_, forward, _)| forward),
        Op::AttentionGrad { heads, .. } => of(heads.head_dim).map(|(_, _, backward)| backward),
        _ => None,
    }
}

const ATTENTION_LINES: [(usize, &str, &str); 5] = [
    (64, "Attention64", "AttentionGrad64"),
    (96, "Attention96", "AttentionGrad96"),
    (128, "Attention128", "AttentionGrad128"),
    (192, "Attention192", "AttentionGrad192"),
    (256, "Attention256", "AttentionGrad256"),
];

/// Those with [`AttentionSums`](storm_graph::AttentionSums).
const SUMS_LINES: [(usize, &str); 2] = [(64, "AttentionGradSums64"), (128, "AttentionGradSums128")];

struct Pair<D> {
    cpu: CpuDevice,
    other: D,
    capacity: usize,
}

impl<D: Device> Pair<D> {
    fn check(
        &mut self,
        case: &Case,
        reports: &mut BTreeMap<(&'static str, DType), OpReport>,
    ) -> Result<(), ExecError> {
        case.write_sources(&mut self.cpu)?;
        for node in case.graph.nodes() {
            // Both start from the same memory, with poisoned outputs.
            for &output in &node.outputs {
                if !case.is_in_place(node, output) {
                    case.poison(&mut self.cpu, output)?;
                }
            }
            let touched: Vec<_> = node
                .op
                .operands()
                .into_iter()
                .map(|(_, id)| id)
                .chain(node.outputs.clone())
                .collect();
            case.copy(&self.cpu, &mut self.other, &touched)?;
            let before = case.snapshot(&self.cpu, &touched)?;
            let instruction =
                self.cpu.prepare(&case.graph, node, |id| case.offset(id), case.layer)?;
            self.cpu.run(&instruction)?;
            let prepared = self.other.prepare(&case.graph, node, |id| case.offset(id), case.layer);
            let instruction = match prepared {
                // Older GPUs do not support FP8, and report it when a run asks for it.
                Err(DeviceError::Unsupported { .. }) if node.op.family() == Family::Fp8 => continue,
                prepared => prepared?,
            };
            self.other.run(&instruction)?;
            self.other.synchronize()?;
            // Scratch contents may depend on the order of threads.
            let lasting: Vec<TensorId> =
                node.outputs.iter().copied().filter(|&id| case.lasts(id)).collect();
            let first = case.snapshot(&self.other, &lasting)?;

            let op = match attention_line(node) {
                Some(line) => line,
                None => node.op.clone().map(|_, id| case.graph.tensor(id)).timed_as(),
            };
            let key = (op, case.dtype);
            let report = reports.entry(key).or_insert_with(|| OpReport {
                op,
                dtype: case.dtype,
                nodes: 0,
                worst: 0.0,
                place: String::new(),
                unstable: None,
            });
            report.nodes += 1;
            for Difference { tensor, share } in compare(case, node, &self.cpu, &self.other)? {
                if share > report.worst || share.is_nan() {
                    report.worst = if share.is_nan() { f64::INFINITY } else { share };
                    report.place = format!("{} seed {}: {tensor}", case.family, case.seed);
                }
            }

            case.restore(&mut self.other, &touched, &before)?;
            self.other.run(&instruction)?;
            if case.snapshot(&self.other, &lasting)? != first {
                report.unstable = Some(format!("{} seed {}", case.family, case.seed));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The CPU against itself: no errors, and every op is covered.
    #[test]
    fn the_cpu_agrees_with_itself() {
        let reports = verify_ops(8, CpuDevice::new).expect("it runs");
        for report in &reports {
            assert!(report.passed() && report.worst == 0.0, "{report:?}");
        }
        let ops: std::collections::BTreeSet<&str> =
            reports.iter().map(|report| report.op).collect();
        for op in [
            "Embedding",
            "EmbeddingGrad",
            "Linear",
            "LinearInputGrad",
            "LinearWeightGrad",
            "ToFp8",
            "Fp8Linear",
            "Fp8WeightGrad",
            "ColumnSum",
            "Conv2d",
            "Conv2dInputGrad",
            "Conv2dWeightGrad",
            "MaxPool",
            "MaxPoolGrad",
            "AveragePool",
            "AveragePoolGrad",
            "Add",
            "Mul",
            "Scale",
            "Dropout",
            "Activation",
            "ActivationGrad",
            "Tanh",
            "TanhGrad",
            "SwiGlu",
            "SwiGluGrad",
            "SwiGluGradAndOutput",
            "SwiGluCoded",
            "SwiGluCodedGrad",
            "Norm",
            "NormGrad",
            "QkNorm",
            "QkNormGrad",
            "RotaryTable",
            "Rotary",
            "Attention",
            "AttentionGrad",
            "CachedAttention",
            "GruReset",
            "GruResetGrad",
            "GruState",
            "GruStateGrad",
            "Categorical",
            "CategoricalGrad",
            "SampleClass",
            "Divergence",
            "DivergenceGrad",
            "SquaredError",
            "SquaredErrorGrad",
            "OutcomeLoss",
            "OutcomeLossGrad",
            "HeadLoss",
            "HeadLossGrad",
            "Accumulate",
            "Sum",
            "Broadcast",
            "Reshape",
            "Transpose",
            "Convert",
            "BlockMatrix",
            "BlockGrad",
            "Quantize",
            "Dequantize",
            "Fill",
            "RandomNormal",
            "SumOfSquares",
            "SumOfPartials",
            "GlobalNorm",
            "ClipScale",
            "AdamW",
            "AdamWInt8",
            "Sgd",
            "BatchStatistics",
            "BatchNorm",
            "BatchNormGrad",
            "GroupNorm",
            "GroupNormGrad",
            "Augment",
        ] {
            assert!(ops.contains(op), "{op} is not verified");
        }
        for (_, forward, backward) in ATTENTION_LINES {
            assert!(ops.contains(forward) && ops.contains(backward), "{forward} is not verified");
        }
        for (_, line) in SUMS_LINES {
            assert!(ops.contains(line), "{line} is not verified");
        }
    }
}
