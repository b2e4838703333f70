//! Hardware performance as numbers: measured by `storm probe`, or taken from data sheets.

mod file;
mod link;
mod product;
mod ranks;
mod refine;

use crate::queue::Link;
use crate::tier::Tier;
use file::ProfileFile;
pub use link::{LinkProfile, LinkRates};
use product::{Multiprocessors, Product};
pub use ranks::{MachineLink, RankLink};
use serde::{Deserialize, Serialize};
use storm_graph::{DType, Op, Tensor};

/// The performance of a GPU and its links.
#[derive(Clone, Debug, PartialEq)]
pub struct HardwareProfile {
    /// Short name: `h200`.
    pub name: String,
    /// Where the numbers come from: a command and a date, or data sheets.
    pub source: String,
    /// Possible error of predicted step times, as a fraction, if the numbers are from a data sheet; `None` if measured.
    pub uncertainty: Option<f64>,
    /// Total memory of the GPU.
    pub memory_bytes: u64,
    /// Device memory the process holds besides the plan: context, code, workspaces.
    pub overhead_bytes: u64,
    /// If known, the model includes the losses of small kernels: idle multiprocessors, short sums, and kernel start.
    /// Otherwise kernels are assumed to be as efficient with few rows as with many.
    pub multiprocessors: Option<u32>,
    /// Dense bf16 matrix products, floating-point operations per second, for products without a nearby measured
    /// point.
    pub gemm_flops: f64,
    /// Dense f32 matrix products.
    pub gemm_f32_flops: f64,
    /// Dense fp8 matrix products; `None` if not measured, or if the device is no faster with fp8 than with bf16.
    pub gemm_fp8_flops: Option<f64>,
    /// Attention forward; causal attention counts half the products of the full square.
    pub attention_forward_flops: f64,
    /// Attention backward; counts five products.
    pub attention_backward_flops: f64,
    /// Bytes per second that elementwise kernels move, reads plus writes.
    pub memory_bandwidth: f64,
    /// The links between tiers and their speed. Host and device are always linked.
    pub links: Vec<LinkProfile>,
    /// Bytes per second at which data is read and decoded. Unknown before a run has read some data; reading then counts
    /// as free.
    pub data_bandwidth: Option<f64>,
    /// The least time from a kernel's start to the start of the next.
    pub kernel_seconds: f64,
    /// Host time to issue one instruction.
    pub launch_seconds: f64,
    /// Time to allocate pinned host memory.
    pub pinned_seconds_per_gib: f64,
    /// Measured matrix products.
    pub gemm: Vec<GemmPoint>,
    /// Measured attention.
    pub attention: Vec<AttentionPoint>,
    /// Measured kernels that are limited by memory rather than compute.
    pub elementwise: Vec<ElementwisePoint>,
    /// Read speed for records on a disk of this machine, if measured.
    pub disk: Option<DiskProfile>,
    /// The link between the ranks of a step. If `None`, collectives count as free.
    pub ranks: Option<RankLink>,
}

/// Typical loss of a product of common size, which rates for all products include.
const USUAL_WASTE: f64 = 1.1;

/// The three products of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GemmKind {
    /// `x · weightᵀ`.
    Forward,
    /// `dy · weight`.
    InputGradient,
    /// `dyᵀ · x`.
    WeightGradient,
}

/// One matrix product under sustained load: (rows, inner) times (inner, columns).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmPoint {
    /// Which product.
    pub kind: GemmKind,
    /// Rows of the result.
    pub rows: u64,
    /// Columns of the result.
    pub columns: u64,
    /// Length of each sum.
    pub inner: u64,
    /// bf16 operands; f32 otherwise.
    pub bf16: bool,
    /// Floating-point operations per second.
    pub flops: f64,
}

impl GemmPoint {
    fn product(&self) -> Product {
        let GemmPoint { kind, rows, columns, inner, .. } = *self;
        Product { kind, rows, columns, inner }
    }
}

/// Causal attention of one shape under sustained load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionPoint {
    /// T.
    pub sequence: u64,
    /// D.
    pub head_dim: u64,
    /// Floating-point operations per second, forward.
    pub forward_flops: f64,
    /// The same, backward.
    pub backward_flops: f64,
}

/// Measured bandwidth of an op, operands plus outputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ElementwisePoint {
    /// The op's name: `Norm`, `SwiGlu`, `AdamW`.
    pub op: String,
    /// Bytes per second.
    pub bandwidth: f64,
}

/// Measured speed of reading records from a disk and decoding them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskProfile {
    /// The directory used for the measurement.
    pub directory: String,
    /// The I/O path, for display: `io_uring O_DIRECT`.
    pub reading_path: String,
    /// Bytes per second when reading groups of neighboring blocks, on all cores.
    pub sequential_bytes_per_second: f64,
    /// Random single-page reads per second, on all cores.
    pub random_reads_per_second: f64,
    /// Bytes per second that one core decompresses with zstd, including checksums.
    pub decode_bytes_per_second: f64,
}

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The text is not a profile in JSON.
    #[error("not a hardware profile: {0}")]
    Json(#[from] serde_json::Error),
    /// A number is not positive and finite.
    #[error("`{field}` is {value}; it must be positive and finite")]
    Number {
        /// The field.
        field: &'static str,
        /// Its value.
        value: f64,
    },
    /// The list of links is invalid.
    #[error(
        "`links` joins {near} and {far}: `near` must be a tier before `far`, and no two links may be alike"
    )]
    Link {
        /// The tier given as closer to the kernels.
        near: Tier,
        /// The other tier.
        far: Tier,
    },
    /// No built-in profile has this name.
    #[error(
        "unknown hardware `{name}`: built in are {known}; or give the path of a profile that `storm probe` wrote"
    )]
    Unknown {
        /// The requested name.
        name: String,
        /// The built-in names.
        known: String,
    },
}

/// Ops that a profile may lack: each with a similar op, and its bandwidth as a fraction of that op's.
const SIMILAR: &[(&str, &str, f64)] = &[
    // Limited by divisions and square roots, not by memory.
    (storm_graph::ADAMW_INT8, "AdamW", 0.4),
];

impl HardwareProfile {
    /// Parses a profile.
    ///
    /// # Errors
    /// The text is not a profile, or a number is invalid.
    pub fn from_json(text: &str) -> Result<HardwareProfile, ProfileError> {
        serde_json::from_str::<ProfileFile>(text)?.into_profile()
    }

    /// Formats the profile as `storm probe` writes it.
    ///
    /// # Panics
    /// If host and device have no link.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(&ProfileFile::new(self)).expect("plain data");
        text.push('\n');
        text
    }

    /// The rates of a link; `None` if the machine lacks it.
    pub fn find_link(&self, link: Link) -> Option<LinkRates> {
        self.links.iter().find(|known| known.has(link)).map(|known| known.rates(link))
    }

    /// The rates of a link.
    ///
    /// # Panics
    /// If the machine does not have it.
    pub fn link(&self, link: Link) -> LinkRates {
        let found = self.find_link(link);
        found.unwrap_or_else(|| panic!("hardware `{}` has no link from {link}", self.name))
    }

    /// Time of a copy with no other copy in its queue.
    ///
    /// # Panics
    /// The machine lacks the link.
    pub fn copy_seconds(&self, bytes: usize, link: Link) -> f64 {
        let LinkRates { bandwidth, latency_seconds, .. } = self.link(link);
        latency_seconds + bytes as f64 / bandwidth
    }

    /// Time to read data from its source.
    pub fn read_seconds(&self, bytes: usize) -> f64 {
        self.data_bandwidth.map_or(0.0, |bandwidth| bytes as f64 / bandwidth)
    }

    /// Time of an op with these operands and outputs.
    pub fn op_seconds(&self, op: &Op<&Tensor>, outputs: &[&Tensor]) -> f64 {
        let work_seconds = self.matrix_seconds(op) + self.moving_seconds(op, outputs);
        self.kernel_seconds.max(work_seconds + self.start_seconds())
    }

    /// The fixed cost of every kernel.
    fn start_seconds(&self) -> f64 {
        self.multiprocessors.map_or(0.0, |_| self.kernel_seconds)
    }

    fn matrix_seconds(&self, op: &Op<&Tensor>) -> f64 {
        let flops = op.matrix_flops() as f64;
        if flops == 0.0 {
            return 0.0;
        }
        let rate = match op {
            Op::Attention { qkv, heads, .. } => {
                let point = self.attention_point(qkv, heads.head_dim);
                let rate = point.map_or(self.attention_forward_flops, |p| p.forward_flops);
                rate * self.attention_share(qkv)
            }
            Op::AttentionGrad { qkv, heads, .. } => {
                let point = self.attention_point(qkv, heads.head_dim);
                let rate = point.map_or(self.attention_backward_flops, |p| p.backward_flops);
                rate * self.attention_share(qkv)
            }
            Op::Linear { x, weight, .. } => self.gemm_rate(
                GemmKind::Forward,
                [x.shape.rows(), weight.shape.rows(), x.shape.width()],
                x.dtype,
            ),
            Op::LinearInputGrad { dy, weight, .. } => self.gemm_rate(
                GemmKind::InputGradient,
                [dy.shape.rows(), weight.shape.width(), dy.shape.width()],
                dy.dtype,
            ),
            Op::LinearWeightGrad { dy, x, .. } => self.gemm_rate(
                GemmKind::WeightGradient,
                [dy.shape.width(), x.shape.width(), dy.shape.rows()],
                dy.dtype,
            ),
            Op::Fp8Linear { .. } | Op::Fp8WeightGrad { .. } => {
                let kind = match op {
                    Op::Fp8Linear { .. } => GemmKind::Forward,
                    _ => GemmKind::WeightGradient,
                };
                let sizes = op.fp8_product().expect("one of them");
                self.gemm_rate(kind, sizes, DType::BF16) * self.fp8_share()
            }
            Op::Conv2d { x: of_rows, .. }
            | Op::Conv2dInputGrad { dy: of_rows, .. }
            | Op::Conv2dWeightGrad { dy: of_rows, .. } => {
                let [positions, outputs, covered] = op.convolution().expect("one of them");
                let (kind, sizes) = match op {
                    Op::Conv2d { .. } => (GemmKind::Forward, [positions, outputs, covered]),
                    Op::Conv2dInputGrad { .. } => {
                        (GemmKind::InputGradient, [positions, covered, outputs])
                    }
                    _ => (GemmKind::WeightGradient, [outputs, covered, positions]),
                };
                self.gemm_rate(kind, sizes, of_rows.dtype)
            }
            Op::HeadLoss { hidden, weight, .. } | Op::HeadLossGrad { hidden, weight, .. } => self
                .gemm_rate(
                    GemmKind::Forward,
                    [hidden.shape.rows(), weight.shape.rows(), hidden.shape.width()],
                    hidden.dtype,
                ),
            _ => self.gemm_flops,
        };
        flops / rate
    }

    /// The rate of the closest measured product of the same kind and dtype. If the number of multiprocessors is known,
    /// the model includes the losses of a smaller product; otherwise every extent must be within a factor of four.
    fn gemm_rate(&self, kind: GemmKind, [rows, columns, inner]: [usize; 3], dtype: DType) -> f64 {
        let bf16 = dtype == DType::BF16;
        let wanted =
            Product { kind, rows: rows as u64, columns: columns as u64, inner: inner as u64 };
        let closest = self
            .gemm
            .iter()
            .filter(|point| point.kind == kind && point.bf16 == bf16)
            .map(|point| (point.product().distance(&wanted), point))
            .filter(|((_, most), _)| self.multiprocessors.is_some() || *most <= 4f64.ln())
            .min_by(|((a, _), _), ((b, _), _)| a.total_cmp(b));
        let flops = if bf16 { self.gemm_flops } else { self.gemm_f32_flops };
        let Some(count) = self.multiprocessors else {
            return closest.map_or(flops, |(_, point)| point.flops);
        };
        let on = Multiprocessors {
            count: u64::from(count.max(1)),
            flops,
            bandwidth: self.memory_bandwidth,
            element_bytes: dtype.size_bytes() as f64,
        };
        match closest {
            Some((_, point)) => point.flops * point.product().waste(&on) / wanted.waste(&on),
            None => flops / (wanted.waste(&on) / USUAL_WASTE).max(1.0),
        }
    }

    /// Speed of fp8 products relative to bf16: one factor for all shapes.
    pub(crate) fn fp8_share(&self) -> f64 {
        self.gemm_fp8_flops.map_or(1.0, |flops| flops / self.gemm_flops)
    }

    /// Slowdown of attention by dtype. It is measured in bf16; f32 is assumed to slow down by the same factor as
    /// products.
    fn attention_share(&self, qkv: &Tensor) -> f64 {
        match qkv.dtype {
            DType::BF16 => 1.0,
            _ => (self.gemm_f32_flops / self.gemm_flops).min(1.0),
        }
    }

    fn attention_point(&self, qkv: &Tensor, head_dim: usize) -> Option<&AttentionPoint> {
        let time = qkv.shape.axes()[1].max(1) as f64;
        self.attention.iter().filter(|point| point.head_dim == head_dim as u64).min_by(|a, b| {
            let distance = |p: &AttentionPoint| (p.sequence.max(1) as f64 / time).ln().abs();
            distance(a).total_cmp(&distance(b))
        })
    }

    /// Time to move the bytes of an op's kernels that its arithmetic does not hide.
    fn moving_seconds(&self, op: &Op<&Tensor>, outputs: &[&Tensor]) -> f64 {
        let bytes = op.moved_bytes(outputs);
        if bytes == 0 {
            return 0.0;
        }
        bytes as f64 / self.bandwidth(op.timed_as())
    }

    /// Bandwidth of an op, by name.
    fn bandwidth(&self, op: &str) -> f64 {
        let measured = |op: &str| {
            let point = self.elementwise.iter().find(|point| point.op == op);
            point.map(|point| point.bandwidth)
        };
        let similar = || {
            let &(_, similar, share) = SIMILAR.iter().find(|&&(known, ..)| known == op)?;
            Some(share * measured(similar)?)
        };
        measured(op).or_else(similar).unwrap_or(self.memory_bandwidth)
    }
}
