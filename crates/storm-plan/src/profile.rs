//! What a machine can do, as numbers: measured by `storm probe` or taken from published figures.

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

/// A card and its link to the host.
#[derive(Clone, Debug, PartialEq)]
pub struct HardwareProfile {
    /// Short: `h200`.
    pub name: String,
    /// Where the figures come from: a command and a date, or the publications.
    pub source: String,
    /// How far off predicted step times may be, as a fraction, if the figures are from a data sheet; none if
    /// they were measured.
    pub uncertainty: Option<f64>,
    /// All memory of the card.
    pub memory_bytes: u64,
    /// What the process holds on the card besides the plan's block: context, code, workspaces.
    pub overhead_bytes: u64,
    /// If known, the model includes what small kernels lose: idle multiprocessors, short sums, and kernel start.
    /// Otherwise a kernel is assumed to be as efficient with few rows as with many.
    pub multiprocessors: Option<u32>,
    /// Dense bf16 matrix products, floating-point operations per second, for products without a nearby measured
    /// point.
    pub gemm_flops: f64,
    /// Dense f32 matrix products.
    pub gemm_f32_flops: f64,
    /// Dense products of 8-bit floats; none if they were not measured, or the device has no faster ones than those of bf16.
    pub gemm_fp8_flops: Option<f64>,
    /// Attention forward; a causal square counts half.
    pub attention_forward_flops: f64,
    /// Attention backward; five products count.
    pub attention_backward_flops: f64,
    /// Bytes per second that elementwise kernels move, reads plus writes.
    pub memory_bandwidth: f64,
    /// Which tiers copies can go between, and how fast. Host and device are always linked.
    pub links: Vec<LinkProfile>,
    /// Bytes per second that the data of a run is read and decoded at. Not known before a run has read some of
    /// it: then reading takes no time.
    pub data_bandwidth: Option<f64>,
    /// The least time from a kernel's start to the start of the next.
    pub kernel_seconds: f64,
    /// What issuing one instruction costs the host.
    pub launch_seconds: f64,
    /// Allocation of pinned host memory.
    pub pinned_seconds_per_gib: f64,
    /// Measured matrix products.
    pub gemm: Vec<GemmPoint>,
    /// Measured attention.
    pub attention: Vec<AttentionPoint>,
    /// Measured kernels that are limited by memory rather than compute.
    pub elementwise: Vec<ElementwisePoint>,
    /// How fast a disk of this machine reads records, if that was measured.
    pub disk: Option<DiskProfile>,
    /// What connects the ranks of a step. None if it is not known: then collectives take no time.
    pub ranks: Option<RankLink>,
}

/// What a product of typical size loses; rates given for all products include it.
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

/// Bytes per second of an op, operands plus outputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ElementwisePoint {
    /// The op's name: `Norm`, `SwiGlu`, `AdamW`.
    pub op: String,
    /// Bytes per second.
    pub bandwidth: f64,
}

/// How fast records are read from a disk and decoded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskProfile {
    /// The directory that it was measured in.
    pub directory: String,
    /// How it was read, in words: `io_uring O_DIRECT`.
    pub reading_path: String,
    /// Bytes per second of groups of neighbouring blocks, on all cores.
    pub sequential_bytes_per_second: f64,
    /// Single pages per second from anywhere, on all cores.
    pub random_reads_per_second: f64,
    /// Bytes per second that one core decompresses from zstd, with checksums.
    pub decode_bytes_per_second: f64,
}

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// Not JSON of this form.
    #[error("not a hardware profile: {0}")]
    Json(#[from] serde_json::Error),
    /// A number that no machine has.
    #[error("`{field}` is {value}; it must be positive and finite")]
    Number {
        /// Which.
        field: &'static str,
        /// What it was.
        value: f64,
    },
    /// An invalid list of links.
    #[error(
        "`links` joins {near} and {far}: `near` must be a tier before `far`, and no two links may be alike"
    )]
    Link {
        /// The tier given as closer to the kernels.
        near: Tier,
        /// The other.
        far: Tier,
    },
    /// No built-in profile of that name.
    #[error(
        "unknown hardware `{name}`: built in are {known}; or give the path of a profile that `storm probe` wrote"
    )]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
}

/// Ops that a profile may lack: each with one like it, and its rate as a share of that one's.
const SIMILAR: &[(&str, &str, f64)] = &[
    // Bound by quotients and roots, not by memory.
    (storm_graph::ADAMW_INT8, "AdamW", 0.4),
];

impl HardwareProfile {
    /// Reads a profile.
    ///
    /// # Errors
    /// Not a profile, or an invalid number.
    pub fn from_json(text: &str) -> Result<HardwareProfile, ProfileError> {
        serde_json::from_str::<ProfileFile>(text)?.into_profile()
    }

    /// The profile as `storm probe` writes it.
    ///
    /// # Panics
    /// If host and device have no link.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(&ProfileFile::new(self)).expect("plain data");
        text.push('\n');
        text
    }

    /// What a link can do; none if the machine does not have it.
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

    /// Time of a copy that is alone in its queue.
    ///
    /// # Panics
    /// If the machine does not have the link.
    pub fn copy_seconds(&self, bytes: usize, link: Link) -> f64 {
        let LinkRates { bandwidth, latency_seconds, .. } = self.link(link);
        latency_seconds + bytes as f64 / bandwidth
    }

    /// Time of reading data from its source.
    pub fn read_seconds(&self, bytes: usize) -> f64 {
        self.data_bandwidth.map_or(0.0, |bandwidth| bytes as f64 / bandwidth)
    }

    /// Time of an op, given its operands and outputs.
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

    /// The rate of the closest measured product of the same kind and dtype. If the number of multiprocessors is
    /// known, the model includes what a smaller product loses against it; otherwise every extent must be within
    /// a factor of four.
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

    /// How many times as fast products of 8-bit floats are as those of bf16. One figure for all shapes.
    pub(crate) fn fp8_share(&self) -> f64 {
        self.gemm_fp8_flops.map_or(1.0, |flops| flops / self.gemm_flops)
    }

    /// Attention is measured in bf16. In f32 it is assumed to slow down by the same factor as products.
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

    /// Time for the bytes that an op's kernels move and that its arithmetic does not hide.
    fn moving_seconds(&self, op: &Op<&Tensor>, outputs: &[&Tensor]) -> f64 {
        let bytes = op.moved_bytes(outputs);
        if bytes == 0 {
            return 0.0;
        }
        bytes as f64 / self.bandwidth(op.timed_as())
    }

    /// Bytes per second of an op, by its name.
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
