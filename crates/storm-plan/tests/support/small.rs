//! Plans of a few instructions, written out one by one. All tensors are 256 bytes.

use storm_graph::{DType, Graph, Op, Shape, Tensor, TensorClass, Training};
use storm_plan::{
    Compute, Copy, Fetch, GraphId, Input, Instruction, InstructionId, Lasting, Link, Operand,
    PerTier, Place, Plan, PlanResult, ReadAhead, Run, Segment, SegmentId, TensorKind, Tier, Value,
    ValueId, Work,
};

/// Size of every tensor and value.
pub(crate) const BLOCK: usize = 256;

/// Kernels that a small plan may use, as positions in its graph.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kernel {
    /// `y = x / 2`.
    Scale,
    /// `y = a + b`.
    Add,
    /// `sum += x`, in place, with a scratch output.
    Accumulate,
}

/// A plan without instructions: a graph, and blocks of memory in both tiers.
pub(crate) fn empty(device_blocks: usize, host_blocks: usize) -> Plan {
    let mut graph = Graph::new();
    let shape = [1, BLOCK / 4];
    let [a, b, c] = ["a", "b", "c"].map(|name| graph.input(name, shape, DType::F32));
    let sum = graph.input("sum", [BLOCK / 4], DType::F32);
    let nodes = [
        ("scale", Op::Scale { x: a, factor: 0.5 }),
        ("add", Op::Add { a, b }),
        ("accumulate", Op::ColumnSum { x: c, accumulator: Some(sum), dtype: DType::F32 }),
    ];
    for (name, op) in nodes {
        graph.apply(name, op).expect("shapes agree");
    }
    Plan {
        graphs: vec![graph.into()],
        bytes: PerTier::new(device_blocks * BLOCK, host_blocks * BLOCK),
        ..Plan::default()
    }
}

/// Adds a value.
pub(crate) fn value(plan: &mut Plan, name: &str, class: TensorClass) -> ValueId {
    plan.values.push(Value { name: name.to_owned(), size_bytes: BLOCK, class });
    ValueId(plan.values.len() as u32 - 1)
}

/// Adds a copy of values that lie in consecutive blocks. Of its two tiers the near one is that which
/// is closer to the kernels.
pub(crate) fn copy(
    plan: &mut Plan,
    link: Link,
    near_block: usize,
    far_block: usize,
    values: &[ValueId],
    waits: &[InstructionId],
) -> InstructionId {
    let place = |(block, &value)| Operand { value, offset: block * BLOCK };
    let end = |tier: Tier| {
        let block = if tier == link.from.min(link.to) { near_block } else { far_block };
        Place { tier, offset: block * BLOCK }
    };
    let work = Work::Copy(Copy {
        from: end(link.from),
        to: end(link.to),
        bytes: values.len() * BLOCK,
        values: values.iter().enumerate().map(place).collect(),
        kind: TensorKind::Weights,
    });
    push(plan, work, waits)
}

/// Adds a kernel over values at blocks of device memory.
pub(crate) fn kernel(
    plan: &mut Plan,
    kernel: Kernel,
    reads: &[(ValueId, usize)],
    writes: &[(ValueId, usize)],
    waits: &[InstructionId],
) -> InstructionId {
    let place = |&(value, block): &(ValueId, usize)| Operand { value, offset: block * BLOCK };
    let work = Work::Compute(Compute {
        graph: GraphId(0),
        node: kernel as u32,
        layer: 0,
        places: reads.iter().chain(writes).map(|&(_, block)| block * BLOCK).collect(),
        reads: reads.iter().map(place).collect(),
        writes: writes.iter().map(place).collect(),
    });
    push(plan, work, waits)
}

/// Adds a fetch of an input, and a read of as much data.
pub(crate) fn fetch(plan: &mut Plan, input: usize, waits: &[InstructionId]) -> [InstructionId; 2] {
    plan.links = plan.links.clone().and_data();
    let work = Work::Fetch(Fetch { inputs: vec![input as u32], micro_batches: 1 });
    let fetch = push(plan, work, waits);
    let work = Work::ReadAhead(ReadAhead { micro_batches: 1, bytes: BLOCK });
    [fetch, push(plan, work, &[fetch])]
}

fn push(plan: &mut Plan, work: Work, waits: &[InstructionId]) -> InstructionId {
    plan.instructions.push(Instruction { work, waits: waits.to_vec() });
    InstructionId(plan.instructions.len() as u32 - 1)
}

/// Everything since the last segment becomes one, which the step runs some times.
pub(crate) fn segment(plan: &mut Plan, name: &'static str, times: usize) -> SegmentId {
    let start = plan.segments.last().map_or(0, |segment| segment.instructions.end);
    plan.segments.push(Segment { name, instructions: start..plan.instructions.len() });
    let segment = SegmentId(plan.segments.len() as u32 - 1);
    plan.step.push(Run { segment, times });
    segment
}

/// A value that outlives the step at some blocks.
pub(crate) fn lasting(plan: &mut Plan, value: ValueId, places: &[(Tier, usize)]) {
    let places = places.iter().map(|&(tier, block)| Place { tier, offset: block * BLOCK });
    let tensor = tensor(&plan.value(value).name, TensorClass::Parameter(Training::Trainable));
    plan.lasting.push(Lasting {
        tensor,
        pieces: vec![value],
        places: places.collect(),
        parts: Vec::new(),
        shard: None,
    });
}

/// A value that the host writes before every run of a segment that copies it.
pub(crate) fn input(plan: &mut Plan, value: ValueId, host_block: usize, copies: &[InstructionId]) {
    plan.inputs.push(Input {
        tensor: tensor(&plan.value(value).name, TensorClass::Input),
        value,
        micro_batch: Some(0),
        place: Place { tier: Tier::HOST, offset: host_block * BLOCK },
        copies: copies.to_vec(),
        fetches: Vec::new(),
    });
}

/// A value that the host reads after every run of a segment that copies it.
pub(crate) fn result(plan: &mut Plan, value: ValueId, host_block: usize, copies: &[InstructionId]) {
    plan.results.push(PlanResult {
        tensor: tensor(&plan.value(value).name, TensorClass::Activation),
        value,
        micro_batch: Some(0),
        place: Place { tier: Tier::HOST, offset: host_block * BLOCK },
        copies: copies.to_vec(),
    });
}

fn tensor(name: &str, class: TensorClass) -> Tensor {
    let shape = Shape::from([BLOCK / 4]);
    Tensor { name: name.to_owned(), shape, dtype: DType::F32, class }
}
