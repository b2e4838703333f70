//! Attention and its gradient: tensor cores for bf16 heads of 64 and 128, plain kernels otherwise.

use super::{Definitions, count, grid, small, types, unsupported};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::{KernelChoice, Planner};
use crate::placed::View;
use storm_graph::{DType, HeadLayout, Mask, Op};

const TENSOR_CORES: KernelSource =
    KernelSource { name: "attention.cu", text: include_str!("../kernels/attention.cu") };
const SIMPLE: KernelSource = KernelSource {
    name: "attention_simple.cu",
    text: include_str!("../kernels/attention_simple.cu"),
};

/// Largest head that the plain kernels take.
const SIMPLE_DIM_MAX: usize = 256;
/// Rows of a tile of the plain kernels, and threads of their blocks.
const SIMPLE_TILE: usize = 16;
const SIMPLE_THREADS: u32 = 256;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    let mut kernels = Vec::new();
    for dim in [64, 128] {
        for causal in [false, true] {
            for segments in [false, true] {
                kernels.push((TENSOR_CORES, tensor_core_definitions(dim, causal, segments)));
            }
        }
    }
    kernels.extend([DType::F32, DType::BF16].map(|dtype| (SIMPLE, simple_definitions(dtype))));
    kernels
}

fn tensor_core_definitions(dim: usize, causal: bool, segments: bool) -> Definitions {
    vec![
        ("HEAD_DIM", dim.to_string()),
        ("CAUSAL", u8::from(causal).to_string()),
        ("SEGMENTS", u8::from(segments).to_string()),
    ]
}

fn simple_definitions(dtype: DType) -> Definitions {
    types([("ELEMENT", dtype)])
}

/// What forward and backward have in common.
struct Attention<'a> {
    heads: &'a HeadLayout,
    mask: Mask,
    segments: &'a Option<View>,
    scale: f32,
    batch: usize,
    seq: usize,
    dtype: DType,
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let node = planner.node;
    let (qkv, attention) = match &node.op {
        Op::Attention { qkv, segments, heads, mask, scale }
        | Op::AttentionGrad { qkv, segments, heads, mask, scale, .. } => {
            let axes = qkv.shape.axes();
            let (mask, scale, dtype) = (*mask, *scale, qkv.dtype);
            let (batch, seq) = (axes[0], axes[1]);
            (qkv, Attention { heads, mask, segments, scale, batch, seq, dtype })
        }
        _ => unreachable!("not an attention op"),
    };
    // Both kinds of kernel take the scale into an exponent base 2, as a positive factor.
    if attention.scale.is_nan() || attention.scale <= 0.0 {
        return Err(unsupported(planner, "its scale is not positive"));
    }
    if attention.heads.head_dim > SIMPLE_DIM_MAX {
        let reason = format!("heads are wider than {SIMPLE_DIM_MAX}");
        return Err(unsupported(planner, reason));
    }
    match &node.op {
        Op::Attention { .. } => {
            let arguments = vec![
                planner.pointer(qkv),
                planner.maybe(attention.segments),
                planner.output(0),
                planner.output(1),
            ];
            attention.forward(planner, arguments)
        }
        Op::AttentionGrad { dy, y, log_sum_exp, .. } => {
            attention.delta(planner, dy, y)?;
            let arguments = vec![
                planner.pointer(dy),
                planner.pointer(qkv),
                planner.pointer(log_sum_exp),
                planner.output(1),
                planner.maybe(attention.segments),
                planner.output(0),
            ];
            attention.backward(planner, arguments)
        }
        _ => unreachable!("not an attention op"),
    }
}

impl Attention<'_> {
    fn uses_tensor_cores(&self) -> bool {
        self.dtype == DType::BF16 && matches!(self.heads.head_dim, 64 | 128)
    }

    /// Shared memory for the segments of a tile.
    fn segment_bytes(&self) -> usize {
        if self.segments.is_some() { 768 } else { 0 }
    }

    /// A kernel of the chosen source; `fast` and `simple` are its bytes of shared memory.
    fn kernel(&self, name: &'static str, fast: usize, simple: usize) -> KernelChoice<'static> {
        if self.uses_tensor_cores() {
            let causal = self.mask == Mask::Causal;
            let definitions =
                tensor_core_definitions(self.heads.head_dim, causal, self.segments.is_some());
            KernelChoice { source: TENSOR_CORES, name, definitions, shared_bytes: fast }
        } else {
            let name = match name {
                "attention_forward" => "attention_simple_forward",
                "attention_delta" => "attention_simple_delta",
                "attention_grad_kv" => "attention_simple_grad_kv",
                _ => "attention_simple_grad_q",
            };
            let definitions = simple_definitions(self.dtype);
            KernelChoice { source: SIMPLE, name, definitions, shared_bytes: simple }
        }
    }

    /// Sizes as every kernel but the delta takes them, after its pointers.
    fn sizes(&self, arguments: &mut Vec<Argument>) {
        let HeadLayout { query_heads, key_value_heads, head_dim } = *self.heads;
        arguments.extend([small(self.seq), small(query_heads), small(key_value_heads)]);
        if !self.uses_tensor_cores() {
            let causal = i32::from(self.mask == Mask::Causal);
            arguments.extend([small(head_dim), Argument::I32(causal)]);
        }
        arguments.push(Argument::F32(self.scale));
    }

    /// Launches a kernel over tiles of `fast_rows` (or the plain kernels' 16) rows per head.
    fn launch(
        &self,
        planner: &mut Planner<'_>,
        choice: KernelChoice<'_>,
        heads: usize,
        fast_rows: usize,
        mut arguments: Vec<Argument>,
    ) -> Result<(), DeviceError> {
        self.sizes(&mut arguments);
        let (rows, threads) = match self.uses_tensor_cores() {
            true => (fast_rows, 128),
            false => (SIMPLE_TILE, SIMPLE_THREADS),
        };
        let grid = grid(planner, self.batch * heads, self.seq.div_ceil(rows))?;
        planner.launch(choice, grid, threads, arguments)
    }

    fn forward(
        &self,
        planner: &mut Planner<'_>,
        arguments: Vec<Argument>,
    ) -> Result<(), DeviceError> {
        let dim = self.heads.head_dim;
        let keys = if self.segments.is_some() { 32 } else { 64 };
        let choice = self.kernel(
            "attention_forward",
            (128 + 4 * keys) * dim * 2 + 2048 + self.segment_bytes(),
            (3 * SIMPLE_TILE * (dim + 1) + 256) * 4,
        );
        self.launch(planner, choice, self.heads.query_heads, 128, arguments)
    }

    fn delta(&self, planner: &mut Planner<'_>, dy: &View, y: &View) -> Result<(), DeviceError> {
        let HeadLayout { query_heads, head_dim, .. } = *self.heads;
        let rows = self.batch * self.seq * query_heads;
        let mut arguments = vec![
            planner.pointer(dy),
            planner.pointer(y),
            planner.output(1),
            count(rows),
            small(self.seq),
            small(query_heads),
        ];
        let blocks = if self.uses_tensor_cores() {
            (rows * (head_dim / 8)).div_ceil(256)
        } else {
            arguments.push(small(head_dim));
            rows.div_ceil(SIMPLE_TILE)
        };
        let grid = grid(planner, blocks, 1)?;
        planner.launch(self.kernel("attention_delta", 0, 0), grid, 256, arguments)
    }

    fn backward(
        &self,
        planner: &mut Planner<'_>,
        arguments: Vec<Argument>,
    ) -> Result<(), DeviceError> {
        let HeadLayout { query_heads, key_value_heads, head_dim: dim } = *self.heads;
        let choice = self.kernel(
            "attention_grad_kv",
            5 * 64 * dim * 2 + 17_408 + self.segment_bytes(),
            (4 * SIMPLE_TILE * (dim + 1) + 512) * 4,
        );
        self.launch(planner, choice, key_value_heads, 64, arguments.clone())?;
        let choice = self.kernel(
            "attention_grad_q",
            (2 * 128 + 4 * 32) * dim * 2 + self.segment_bytes(),
            (4 * SIMPLE_TILE * (dim + 1) + 256) * 4,
        );
        self.launch(planner, choice, query_heads, 128, arguments)
    }
}
