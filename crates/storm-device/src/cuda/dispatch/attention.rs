//! Attention and its gradient. For bf16 heads of 64 and 128: `wgmma` on Hopper, `mma.sync` on other
//! cards. For those of 96, 192 and 256: `mma.sync`. Plain kernels otherwise.

use super::{Definitions, count, grid, small, types, unsupported};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::{KernelChoice, Planner};
use crate::placed::View;
use storm_graph::{AttentionSums, DType, HeadLayout, Mask, Op};

const HOPPER: KernelSource = KernelSource {
    name: "attention_hopper.cu",
    text: include_str!("../kernels/attention_hopper.cu"),
    only_for: Some("sm_90a"),
};
const HOPPER_GRAD: KernelSource = KernelSource {
    name: "attention_hopper_grad.cu",
    text: include_str!("../kernels/attention_hopper_grad.cu"),
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

/// Widths of heads that the kernels support.
const HOPPER_DIMS: [usize; 2] = [64, 128];
const TENSOR_CORE_DIMS: [usize; 5] = [64, 96, 128, 192, 256];
/// Widest head that the plain kernels support.
const SIMPLE_DIM_MAX: usize = 256;
/// Rows of a tile of the plain kernels, and threads of their blocks.
const SIMPLE_TILE: usize = 16;
const SIMPLE_THREADS: u32 = 256;
/// Threads of the Hopper kernels' blocks.
const HOPPER_THREADS: u32 = 384;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    let mut kernels = Vec::new();
    kernels.extend(HOPPER_DIMS.map(|dim| (HOPPER_GRAD, head_definition(dim))));
    for dim in TENSOR_CORE_DIMS {
        for sight in [Sight::All, Sight::Before, Sight::Window(1)] {
            for segments in [false, true] {
                kernels.push((TENSOR_CORES, tensor_core_definitions(dim, sight, segments)));
                if HOPPER_DIMS.contains(&dim) {
                    kernels.push((HOPPER, hopper_definitions(dim, sight, segments)));
                }
            }
        }
    }
    kernels.extend([DType::F32, DType::BF16].map(|dtype| (SIMPLE, simple_definitions(dtype))));
    kernels
}

/// How a kernel of attention.cu is launched.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBlock {
    /// The kernel.
    pub name: &'static str,
    /// Queries or keys of a block.
    pub rows: usize,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: usize,
}

/// Blocks of attention.cu for heads of `dim`: forward, gradient of keys and values, gradient of
/// queries. The tiles are those of the source, which checks the bytes.
pub fn attention_blocks(dim: usize, segments: bool) -> [AttentionBlock; 3] {
    let row = dim * 2;
    // Segment numbers of the block's own tokens, and of two tiles on the other side.
    let ids = |own: usize, other: usize| if segments { (own + 2 * other) * 4 } else { 0 };
    let forward = {
        let queries = if dim <= 96 { 128 } else { 64 };
        let keys = if matches!(dim, 64 | 128) && !segments { 64 } else { 32 };
        let room = (3 * keys).max(queries + keys) * row;
        AttentionBlock {
            name: "attention_forward",
            rows: queries,
            threads: 128,
            shared_bytes: room + ids(queries, keys),
        }
    };
    let grad_kv = {
        let (keys, queries) = (if dim == 64 { 128 } else { 64 }, 32);
        let weights = if dim == 64 { 0 } else { keys * queries * 4 };
        let room = (4 * queries).max(2 * keys) * row;
        AttentionBlock {
            name: "attention_grad_kv",
            rows: keys,
            threads: if dim <= 128 { 128 } else { 256 },
            shared_bytes: room + weights + 4 * queries * 4 + ids(keys, queries),
        }
    };
    let grad_q = {
        let (queries, keys) = match dim {
            64 => (128, 32),
            256 => (128, 16),
            _ => (64, 32),
        };
        let rows = if dim == 256 { queries + 4 * keys } else { (2 * queries).max(4 * keys) };
        AttentionBlock {
            name: "attention_grad_q",
            rows: queries,
            threads: if dim == 256 { 256 } else { 128 },
            shared_bytes: rows * row + ids(queries, keys),
        }
    };
    [forward, grad_kv, grad_q]
}

fn tensor_core_definitions(dim: usize, sight: Sight, segments: bool) -> Definitions {
    let names = ["FORWARD_SHARED", "GRAD_KV_SHARED", "GRAD_Q_SHARED"];
    let bytes = attention_blocks(dim, segments).map(|block| block.shared_bytes.to_string());
    let mut definitions = hopper_definitions(dim, sight, segments);
    definitions.extend(names.into_iter().zip(bytes));
    definitions
}

fn head_definition(dim: usize) -> Definitions {
    vec![("HEAD_DIM", dim.to_string())]
}

fn hopper_definitions(dim: usize, sight: Sight, segments: bool) -> Definitions {
    let mut definitions = head_definition(dim);
    definitions.push(("CAUSAL", u8::from(sight != Sight::All).to_string()));
    definitions.push(("SEGMENTS", u8::from(segments).to_string()));
    if let Sight::Window(_) = sight {
        definitions.push(("WINDOW", "1".to_owned()));
    }
    definitions
}

/// Which keys of a sequence a query sees.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sight {
    All,
    /// Its own key and those before it.
    Before,
    /// The same, but at most this many, which is fewer than the sequence has.
    Window(usize),
}

impl Sight {
    /// A window that hides nothing uses the kernels without one.
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

/// What the forward and the backward pass have in common.
struct Attention<'a> {
    heads: &'a HeadLayout,
    sight: Sight,
    segments: &'a Option<View>,
    scale: f32,
    batch: usize,
    seq: usize,
    kind: Kind,
}

/// Which kernels are used.
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
            let hopper = planner.card().capability == (9, 0);
            let kind = match (qkv.dtype, heads.head_dim) {
                (DType::BF16, dim) if hopper && HOPPER_DIMS.contains(&dim) => Kind::Hopper,
                (DType::BF16, dim) if TENSOR_CORE_DIMS.contains(&dim) => Kind::TensorCores,
                (dtype, _) => Kind::Simple(dtype),
            };
            (qkv, Attention { heads, sight, segments, scale, batch, seq, kind })
        }
        _ => unreachable!("not an attention op"),
    };
    // All kernels take the scale into an exponent base 2, as a positive factor.
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
            if let Some(sums) = attention.sums(planner) {
                return attention.backward_in_one(planner, sums, dy, log_sum_exp, qkv);
            }
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
    fn hopper(&self, name: &'static str, shared_bytes: usize) -> KernelChoice<'static> {
        let definitions =
            hopper_definitions(self.heads.head_dim, self.sight, self.segments.is_some());
        KernelChoice { source: HOPPER, name, definitions, shared_bytes }
    }

    fn tensor_cores(&self, name: &'static str, shared_bytes: usize) -> KernelChoice<'static> {
        let definitions =
            tensor_core_definitions(self.heads.head_dim, self.sight, self.segments.is_some());
        KernelChoice { source: TENSOR_CORES, name, definitions, shared_bytes }
    }

    fn simple(
        &self,
        dtype: DType,
        name: &'static str,
        shared_bytes: usize,
    ) -> KernelChoice<'static> {
        KernelChoice { source: SIMPLE, name, definitions: simple_definitions(dtype), shared_bytes }
    }

    /// Launches a kernel of attention.cu over all heads, of which there are `heads` in all
    /// sequences.
    fn launch_block(
        &self,
        planner: &mut Planner<'_>,
        block: AttentionBlock,
        heads: usize,
        arguments: Vec<Argument>,
    ) -> Result<(), DeviceError> {
        let AttentionBlock { name, rows, threads, shared_bytes } = block;
        let choice = self.tensor_cores(name, shared_bytes);
        self.launch(planner, choice, (heads, self.seq.div_ceil(rows)), threads, arguments)
    }

    /// Appends the arguments that follow the pointers, in the order of the kernels, and launches.
    fn launch(
        &self,
        planner: &mut Planner<'_>,
        choice: KernelChoice<'_>,
        (blocks, parts): (usize, usize),
        threads: u32,
        mut arguments: Vec<Argument>,
    ) -> Result<(), DeviceError> {
        let HeadLayout { query_heads, key_value_heads, head_dim } = *self.heads;
        arguments.extend([small(self.seq), small(query_heads), small(key_value_heads)]);
        if let Kind::Simple(_) = self.kind {
            let causal = i32::from(self.sight != Sight::All);
            let window = match self.sight {
                Sight::Window(window) => small(window),
                Sight::All | Sight::Before => Argument::I32(i32::MAX),
            };
            arguments.extend([small(head_dim), Argument::I32(causal), window]);
        }
        arguments.push(Argument::F32(self.scale));
        if let (Kind::Hopper | Kind::TensorCores, Sight::Window(window)) = (self.kind, self.sight) {
            arguments.push(small(window));
        }
        let grid = grid(planner, blocks, parts)?;
        planner.launch(choice, grid, threads, arguments)
    }

    /// The number of blocks of a Hopper kernel whose blocks process tiles of 128 queries one after
    /// another. With segments, tiles differ in work, so each block has one tile.
    fn hopper_blocks(&self, planner: &Planner<'_>) -> usize {
        let tiles = self.batch * self.heads.query_heads * self.seq.div_ceil(128);
        if self.segments.is_some() { tiles } else { tiles.min(planner.card().multiprocessors) }
    }

    /// Query heads of all sequences. These kernels count their tiles by them.
    fn query_rows(&self) -> Argument {
        small(self.batch * self.heads.query_heads)
    }

    fn blocks(&self) -> [AttentionBlock; 3] {
        attention_blocks(self.heads.head_dim, self.segments.is_some())
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
                let choice = self.hopper("attention_hopper_forward", 768 * dim * 2 + 80);
                let blocks = self.hopper_blocks(planner);
                self.launch(planner, choice, (blocks, 1), HOPPER_THREADS, arguments)
            }
            Kind::TensorCores => {
                let [block, ..] = self.blocks();
                self.launch_block(planner, block, heads, arguments)
            }
            Kind::Simple(dtype) => {
                let shared = (3 * SIMPLE_TILE * (dim + 1) + 256) * 4;
                let choice = self.simple(dtype, "attention_simple_forward", shared);
                let grid = (heads, self.seq.div_ceil(SIMPLE_TILE));
                self.launch(planner, choice, grid, SIMPLE_THREADS, arguments)
            }
        }
    }

    /// Computes `Σ dy·y` of every query and head, which both parts of the backward pass read.
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
                let lanes = if head_dim % 3 == 0 { head_dim / 24 } else { head_dim / 8 };
                (self.tensor_cores("attention_delta", 0), (rows * lanes).div_ceil(256))
            }
            Kind::Simple(dtype) => {
                arguments.push(small(head_dim));
                let choice = self.simple(dtype, "attention_simple_delta", 0);
                (choice, rows.div_ceil(SIMPLE_TILE))
            }
        };
        let grid = grid(planner, blocks, 1)?;
        planner.launch(choice, grid, 256, arguments)
    }

    /// The sums of the kernel that computes the whole gradient, if it runs.
    fn sums(&self, planner: &Planner<'_>) -> Option<AttentionSums> {
        if self.kind != Kind::Hopper {
            return None;
        }
        let mask = match self.sight {
            Sight::All => Mask::Full,
            Sight::Before => Mask::Causal,
            Sight::Window(window) => Mask::Sliding { window },
        };
        let segments = self.segments.is_some();
        let sums =
            AttentionSums::of(DType::BF16, self.batch, self.seq, self.heads, mask, segments)?;
        (sums.items <= planner.card().multiprocessors).then_some(sums)
    }

    /// Computes the gradient in one kernel, behind another that clears its counters.
    fn backward_in_one(
        &self,
        planner: &mut Planner<'_>,
        sums: AttentionSums,
        dy: &View,
        log_sum_exp: &View,
        qkv: &View,
    ) -> Result<(), DeviceError> {
        let choice = |name, shared_bytes| KernelChoice {
            source: HOPPER_GRAD,
            name,
            definitions: head_definition(self.heads.head_dim),
            shared_bytes,
        };
        let memory = &planner.node.outputs[2];
        let totals = planner.pointer_to(memory, sums.sums_at());
        let clear = vec![planner.output(2), small(sums.counters)];
        let blocks = grid(planner, sums.counters.div_ceil(256), 1)?;
        planner.launch(choice("attention_hopper_grad_begin", 0), blocks, 256, clear)?;
        let arguments = vec![
            planner.pointer(dy),
            planner.pointer(qkv),
            planner.pointer(log_sum_exp),
            planner.output(1),
            planner.output(0),
            planner.output(2),
            totals,
            small(sums.ring),
        ];
        let shared_bytes = if self.heads.head_dim == 128 { 230_528 } else { 231_552 };
        let choice = choice("attention_hopper_grad", shared_bytes);
        let blocks = self.batch * self.heads.key_value_heads * sums.items;
        self.launch(planner, choice, (blocks, 1), HOPPER_THREADS, arguments)
    }

    fn backward(
        &self,
        planner: &mut Planner<'_>,
        arguments: Vec<Argument>,
    ) -> Result<(), DeviceError> {
        let HeadLayout { query_heads, key_value_heads, head_dim: dim } = *self.heads;
        let (q_heads, kv_heads) = (self.batch * query_heads, self.batch * key_value_heads);
        match self.kind {
            Kind::Hopper => {
                let choice = self.hopper("attention_hopper_grad_kv", 640 * dim * 2 + 1584);
                let grid = (kv_heads, self.seq.div_ceil(128));
                self.launch(planner, choice, grid, HOPPER_THREADS, arguments.clone())?;
                let mut arguments = arguments;
                arguments.push(self.query_rows());
                let choice = self.hopper("attention_hopper_grad_q", 768 * dim * 2 + 64);
                let blocks = self.hopper_blocks(planner);
                self.launch(planner, choice, (blocks, 1), HOPPER_THREADS, arguments)
            }
            Kind::TensorCores => {
                let [_, grad_kv, grad_q] = self.blocks();
                self.launch_block(planner, grad_kv, kv_heads, arguments.clone())?;
                self.launch_block(planner, grad_q, q_heads, arguments)
            }
            Kind::Simple(dtype) => {
                let tiles = self.seq.div_ceil(SIMPLE_TILE);
                let shared = (4 * SIMPLE_TILE * (dim + 1) + 512) * 4;
                let choice = self.simple(dtype, "attention_simple_grad_kv", shared);
                let grid = (kv_heads, tiles);
                self.launch(planner, choice, grid, SIMPLE_THREADS, arguments.clone())?;
                let shared = (4 * SIMPLE_TILE * (dim + 1) + 256) * 4;
                let choice = self.simple(dtype, "attention_simple_grad_q", shared);
                self.launch(planner, choice, (q_heads, tiles), SIMPLE_THREADS, arguments)
            }
        }
    }
}
