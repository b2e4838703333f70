//! Attention and its gradient. For bf16 heads of 64 and 128: `wgmma` on Hopper, `mma.sync` on other
//! cards; plain kernels otherwise.

use super::{Definitions, count, grid, small, types, unsupported};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::{KernelChoice, Planner};
use crate::placed::View;
use storm_graph::{DType, HeadLayout, Mask, Op};

const HOPPER: KernelSource = KernelSource {
    name: "attention_hopper.cu",
    text: include_str!("../kernels/attention_hopper.cu"),
    only_for: Some("sm_90a"),
};
const TENSOR_CORES: KernelSource = KernelSource {
    name: "attention.cu",
    text: include_str!("../kernels/attention.cu"),
    only_for: None,
};
const SIMPLE: KernelSource = KernelSource {
    name: "attention_simple.cu",
    text: include_str!("../kernels/attention_simple.cu"),
    only_for: None,
};

/// Largest head that the plain kernels take.
const SIMPLE_DIM_MAX: usize = 256;
/// Rows of a tile of the plain kernels, and threads of their blocks.
const SIMPLE_TILE: usize = 16;
const SIMPLE_THREADS: u32 = 256;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    let mut kernels = Vec::new();
    for dim in [64, 128] {
        for sight in [Sight::All, Sight::Before, Sight::Window(1)] {
            for segments in [false, true] {
                let definitions = tensor_core_definitions(dim, sight, segments);
                kernels.push((TENSOR_CORES, definitions.clone()));
                kernels.push((HOPPER, definitions));
            }
        }
    }
    kernels.extend([DType::F32, DType::BF16].map(|dtype| (SIMPLE, simple_definitions(dtype))));
    kernels
}

fn tensor_core_definitions(dim: usize, sight: Sight, segments: bool) -> Definitions {
    let mut definitions = vec![
        ("HEAD_DIM", dim.to_string()),
        ("CAUSAL", u8::from(sight != Sight::All).to_string()),
        ("SEGMENTS", u8::from(segments).to_string()),
    ];
    if let Sight::Window(_) = sight {
        definitions.push(("WINDOW", "1".to_owned()));
    }
    definitions
}

/// Which keys of a sequence a query sees.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sight {
    All,
    /// Its own and those before.
    Before,
    /// The same, so many at most, and fewer than the sequence has.
    Window(usize),
}

impl Sight {
    /// A window that hides nothing takes the kernels without one.
    fn new(mask: Mask, seq: usize) -> Sight {
        match mask {
            Mask::Full => Sight::All,
            Mask::Sliding { window } if window < seq => Sight::Window(window),
            Mask::Causal | Mask::Sliding { .. } => Sight::Before,
        }
    }
}

fn simple_definitions(dtype: DType) -> Definitions {
    types([("ELEMENT", dtype)])
}

/// What forward and backward have in common.
struct Attention<'a> {
    heads: &'a HeadLayout,
    sight: Sight,
    segments: &'a Option<View>,
    scale: f32,
    batch: usize,
    seq: usize,
    kind: Kind,
}

/// Which kernels.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Hopper,
    TensorCores,
    Simple(DType),
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let node = planner.node;
    let (qkv, attention) = match &node.op {
        Op::Attention { qkv, segments, heads, mask, scale }
        | Op::AttentionGrad { qkv, segments, heads, mask, scale, .. } => {
            let axes = qkv.shape.axes();
            let (batch, seq, scale) = (axes[0], axes[1], *scale);
            let sight = Sight::new(*mask, seq);
            let kind = match (qkv.dtype, heads.head_dim) {
                (DType::BF16, 64 | 128) if planner.card().capability == (9, 0) => Kind::Hopper,
                (DType::BF16, 64 | 128) => Kind::TensorCores,
                (dtype, _) => Kind::Simple(dtype),
            };
            (qkv, Attention { heads, sight, segments, scale, batch, seq, kind })
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
    fn kernel(
        &self,
        source: KernelSource,
        name: &'static str,
        shared_bytes: usize,
    ) -> KernelChoice<'static> {
        let definitions = match self.kind {
            Kind::Simple(dtype) => simple_definitions(dtype),
            Kind::Hopper | Kind::TensorCores => {
                tensor_core_definitions(self.heads.head_dim, self.sight, self.segments.is_some())
            }
        };
        KernelChoice { source, name, definitions, shared_bytes }
    }

    /// Adds what follows the pointers, in the kernels' order, and launches.
    fn launch(
        &self,
        planner: &mut Planner<'_>,
        choice: KernelChoice<'_>,
        (blocks, parts): (usize, usize),
        mut arguments: Vec<Argument>,
    ) -> Result<(), DeviceError> {
        let HeadLayout { query_heads, key_value_heads, head_dim } = *self.heads;
        arguments.extend([small(self.seq), small(query_heads), small(key_value_heads)]);
        let threads = match self.kind {
            Kind::Hopper => 384,
            Kind::TensorCores => 128,
            Kind::Simple(_) => {
                let causal = i32::from(self.sight != Sight::All);
                let window = match self.sight {
                    Sight::Window(window) => small(window),
                    Sight::All | Sight::Before => Argument::I32(i32::MAX),
                };
                arguments.extend([small(head_dim), Argument::I32(causal), window]);
                SIMPLE_THREADS
            }
        };
        arguments.push(Argument::F32(self.scale));
        if let (Kind::Hopper | Kind::TensorCores, Sight::Window(window)) = (self.kind, self.sight) {
            arguments.push(small(window));
        }
        let grid = grid(planner, blocks, parts)?;
        planner.launch(choice, grid, threads, arguments)
    }

    /// Blocks of a Hopper kernel whose blocks take tiles of 128 queries one after another; with
    /// segments, whose tiles differ in work, each block has one.
    fn hopper_blocks(&self, planner: &Planner<'_>) -> usize {
        let tiles = self.batch * self.heads.query_heads * self.seq.div_ceil(128);
        if self.segments.is_some() { tiles } else { tiles.min(planner.card().multiprocessors) }
    }

    /// Query heads of all sequences, which those kernels count their tiles by.
    fn query_rows(&self) -> Argument {
        small(self.batch * self.heads.query_heads)
    }

    /// Shared memory for the segments of a tile.
    fn segment_bytes(&self) -> usize {
        if self.segments.is_some() { 768 } else { 0 }
    }

    fn forward(
        &self,
        planner: &mut Planner<'_>,
        mut arguments: Vec<Argument>,
    ) -> Result<(), DeviceError> {
        let HeadLayout { query_heads, head_dim: dim, .. } = *self.heads;
        let heads = self.batch * query_heads;
        match self.kind {
            Kind::Hopper => {
                arguments.push(self.query_rows());
                let choice = self.kernel(HOPPER, "attention_hopper_forward", 768 * dim * 2 + 80);
                let blocks = self.hopper_blocks(planner);
                self.launch(planner, choice, (blocks, 1), arguments)
            }
            Kind::TensorCores => {
                let keys = if self.segments.is_some() { 32 } else { 64 };
                let shared = (128 + 4 * keys) * dim * 2 + 2048 + self.segment_bytes();
                let choice = self.kernel(TENSOR_CORES, "attention_forward", shared);
                self.launch(planner, choice, (heads, self.seq.div_ceil(128)), arguments)
            }
            Kind::Simple(_) => {
                let shared = (3 * SIMPLE_TILE * (dim + 1) + 256) * 4;
                let choice = self.kernel(SIMPLE, "attention_simple_forward", shared);
                self.launch(planner, choice, (heads, self.seq.div_ceil(SIMPLE_TILE)), arguments)
            }
        }
    }

    /// `Σ dy·y` of every query and head, which both parts of the backward pass read.
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
        let (choice, blocks) = match self.kind {
            Kind::Hopper | Kind::TensorCores => {
                let blocks = (rows * (head_dim / 8)).div_ceil(256);
                (self.kernel(TENSOR_CORES, "attention_delta", 0), blocks)
            }
            Kind::Simple(_) => {
                arguments.push(small(head_dim));
                (self.kernel(SIMPLE, "attention_simple_delta", 0), rows.div_ceil(SIMPLE_TILE))
            }
        };
        let grid = grid(planner, blocks, 1)?;
        planner.launch(choice, grid, 256, arguments)
    }

    fn backward(
        &self,
        planner: &mut Planner<'_>,
        arguments: Vec<Argument>,
    ) -> Result<(), DeviceError> {
        let HeadLayout { query_heads, key_value_heads, head_dim: dim } = *self.heads;
        let key_blocks = |rows: usize| (self.batch * key_value_heads, self.seq.div_ceil(rows));
        let query_blocks = |rows: usize| (self.batch * query_heads, self.seq.div_ceil(rows));
        match self.kind {
            Kind::Hopper => {
                let choice = self.kernel(HOPPER, "attention_hopper_grad_kv", 640 * dim * 2 + 1584);
                self.launch(planner, choice, key_blocks(128), arguments.clone())?;
                let mut arguments = arguments;
                arguments.push(self.query_rows());
                let choice = self.kernel(HOPPER, "attention_hopper_grad_q", 768 * dim * 2 + 64);
                let blocks = self.hopper_blocks(planner);
                self.launch(planner, choice, (blocks, 1), arguments)
            }
            Kind::TensorCores => {
                let shared = 5 * 64 * dim * 2 + 17_408 + self.segment_bytes();
                let choice = self.kernel(TENSOR_CORES, "attention_grad_kv", shared);
                self.launch(planner, choice, key_blocks(64), arguments.clone())?;
                let shared = (2 * 128 + 4 * 32) * dim * 2 + self.segment_bytes();
                let choice = self.kernel(TENSOR_CORES, "attention_grad_q", shared);
                self.launch(planner, choice, query_blocks(128), arguments)
            }
            Kind::Simple(_) => {
                let shared = (4 * SIMPLE_TILE * (dim + 1) + 512) * 4;
                let choice = self.kernel(SIMPLE, "attention_simple_grad_kv", shared);
                self.launch(planner, choice, key_blocks(SIMPLE_TILE), arguments.clone())?;
                let shared = (4 * SIMPLE_TILE * (dim + 1) + 256) * 4;
                let choice = self.kernel(SIMPLE, "attention_simple_grad_q", shared);
                self.launch(planner, choice, query_blocks(SIMPLE_TILE), arguments)
            }
        }
    }
}
