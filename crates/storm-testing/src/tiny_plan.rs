//! A miniature training step, as a handwritten plan: a group of two micro-batches that is repeated,
//! with an activation that is offloaded to the host and fetched back, and an update whose state
//! stays in host memory.
//!
//! For each micro-batch: a = 2 x; b = a + w; c = 3 b; loss = c + a; gradient += loss.
//! At the end: m += gradient; w += m + shift; norm = gradient. The flush doubles w.

use std::sync::Arc;
use storm_graph::{DType, Graph, Op, Tensor, TensorClass, Training};
use storm_plan::{
    CheckedPlan, Compute, Copy, GraphId, Input, Instruction, InstructionId, Lasting, Link, Operand,
    Operands, PerTier, Place, Plan, PlanResult, Run, Segment, SegmentId, TensorKind, Tier, Value,
    ValueId, Work, check,
};

/// f32 elements of every tensor: enough that kernels use several threads and a race becomes
/// visible.
pub const ELEMENTS: usize = 20_000;
/// Bytes from the start of one slot to the start of the next.
pub const SLOT: usize = 80 << 10;
/// Micro-batches in a group.
pub const GROUP: usize = 2;

/// The class of a trainable parameter.
pub fn parameter() -> TensorClass {
    TensorClass::Parameter(Training::Trainable)
}

/// A list of instructions that becomes a plan.
#[derive(Default)]
pub struct PlanBuilder {
    /// The plan so far.
    pub plan: Plan,
    segment_start: usize,
}

impl PlanBuilder {
    /// Adds a value with [`ELEMENTS`] elements.
    pub fn value(&mut self, name: &str, class: TensorClass) -> ValueId {
        let size_bytes = ELEMENTS * 4;
        self.plan.values.push(Value { name: name.to_owned(), size_bytes, class });
        ValueId(self.plan.values.len() as u32 - 1)
    }

    fn add(&mut self, work: Work, waits: &[InstructionId]) -> InstructionId {
        self.plan.instructions.push(Instruction { work, waits: waits.to_vec() });
        InstructionId(self.plan.instructions.len() as u32 - 1)
    }

    /// Adds a kernel: the first node of a graph, with operands and an output in slots of device
    /// memory.
    pub fn compute(
        &mut self,
        graph: Graph,
        reads: &[(ValueId, usize)],
        write: (ValueId, usize),
        waits: &[InstructionId],
    ) -> InstructionId {
        self.plan.graphs.push(Arc::new(graph));
        let operand = |&(value, slot): &(ValueId, usize)| Operand { value, offset: slot * SLOT };
        let reads: Operands = reads.iter().map(operand).collect();
        let writes: Operands = [operand(&write)].into_iter().collect();
        let places = reads.iter().chain(&writes).map(|operand| operand.offset).collect();
        let graph = GraphId(self.plan.graphs.len() as u32 - 1);
        let compute = Compute { graph, node: 0, layer: 0, places, reads, writes };
        self.add(Work::Compute(compute), waits)
    }

    /// Adds a kernel that multiplies a value in a slot of device memory by `factor`, into another
    /// slot.
    pub fn scale(
        &mut self,
        (from, factor): ((ValueId, usize), f32),
        to: (ValueId, usize),
        waits: &[InstructionId],
    ) -> InstructionId {
        let mut graph = Graph::new();
        let x = graph.input("x", [ELEMENTS], DType::F32);
        let name = self.plan.value(to.0).name.clone();
        graph.apply(&name, Op::Scale { x, factor }).expect("of one shape");
        self.compute(graph, &[from], to, waits)
    }

    /// Adds a kernel that adds two values in slots of device memory, into another slot.
    pub fn sum(
        &mut self,
        parts: [(ValueId, usize); 2],
        to: (ValueId, usize),
        waits: &[InstructionId],
    ) -> InstructionId {
        let mut graph = Graph::new();
        let [a, b] = ["a", "b"].map(|name| graph.input(name, [ELEMENTS], DType::F32));
        let name = self.plan.value(to.0).name.clone();
        graph.apply(&name, Op::Add { a, b }).expect("of one shape");
        self.compute(graph, &parts, to, waits)
    }

    /// Adds a copy between a slot of device memory and one of host memory.
    pub fn copy(
        &mut self,
        value: ValueId,
        link: Link,
        (device, host): (usize, usize),
        waits: &[InstructionId],
    ) -> InstructionId {
        let end = |tier: Tier| {
            let slot = if tier == Tier::DEVICE { device } else { host };
            Place { tier, offset: slot * SLOT }
        };
        let copy = Copy {
            from: end(link.from),
            to: end(link.to),
            bytes: self.plan.value(value).size_bytes,
            values: [Operand { value, offset: 0 }].into_iter().collect(),
            kind: TensorKind::Weights,
        };
        self.add(Work::Copy(copy), waits)
    }

    /// Ends the current segment.
    pub fn segment(&mut self, name: &'static str) -> SegmentId {
        let instructions = self.segment_start..self.plan.instructions.len();
        self.segment_start = instructions.end;
        self.plan.segments.push(Segment { name, instructions });
        SegmentId(self.plan.segments.len() as u32 - 1)
    }

    fn tensor(&self, value: ValueId) -> Tensor {
        let Value { name, class, .. } = self.plan.value(value).clone();
        Tensor { name, shape: [ELEMENTS].into(), dtype: DType::F32, class }
    }

    /// Adds a value that persists between steps, with its slots.
    pub fn lasting(&mut self, value: ValueId, places: &[(Tier, usize)]) {
        let place = |&(tier, slot): &(Tier, usize)| Place { tier, offset: slot * SLOT };
        let places = places.iter().map(place).collect();
        let tensor = self.tensor(value);
        let pieces = vec![value];
        let lasting = Lasting { tensor, pieces, places, parts: Vec::new(), shard: None };
        self.plan.lasting.push(lasting);
    }

    /// Adds an input, which the host writes before a step or before a micro-batch.
    pub fn input(
        &mut self,
        value: ValueId,
        micro_batch: Option<u16>,
        slot: usize,
        copies: &[InstructionId],
    ) {
        let tensor = self.tensor(value);
        let (place, copies) = (Place { tier: Tier::HOST, offset: slot * SLOT }, copies.to_vec());
        let fetches = Vec::new();
        self.plan.inputs.push(Input { tensor, value, micro_batch, place, copies, fetches });
    }

    /// Adds a result, which the host reads after a step or after a micro-batch.
    pub fn result(
        &mut self,
        value: ValueId,
        micro_batch: Option<u16>,
        slot: usize,
        copies: &[InstructionId],
    ) {
        let tensor = self.tensor(value);
        let (place, copies) = (Place { tier: Tier::HOST, offset: slot * SLOT }, copies.to_vec());
        self.plan.results.push(PlanResult { tensor, value, micro_batch, place, copies });
    }

    /// Checks the plan with this many slots in each tier.
    pub fn checked(mut self, device_slots: usize, host_slots: usize) -> Arc<CheckedPlan> {
        let bytes = PerTier::new(device_slots * SLOT, host_slots * SLOT);
        self.plan.bytes = bytes;
        let checked = check(self.plan, bytes);
        Arc::new(checked.unwrap_or_else(|error| panic!("{error}")))
    }
}

/// Slots of device memory. Those from X on are used for several values in turn.
mod device {
    pub(super) const W: usize = 0;
    pub(super) const GRADIENT: usize = 1;
    pub(super) const X: usize = 2;
    pub(super) const A: usize = 3;
    pub(super) const B: usize = 4;
    pub(super) const LOSS: usize = 5;
    pub(super) const M: usize = 6;
    pub(super) const SHIFT: usize = 7;
    pub(super) const COUNT: usize = 8;
}

/// Slots of host memory. X, A and LOSS are each the first of two slots, one per micro-batch of the
/// group.
mod host {
    pub(super) const X: usize = 0;
    pub(super) const A: usize = 2;
    pub(super) const LOSS: usize = 4;
    pub(super) const SHIFT: usize = 6;
    pub(super) const NORM: usize = 7;
    pub(super) const M: usize = 8;
    pub(super) const W: usize = 9;
    pub(super) const COUNT: usize = 10;
}

/// Positions among the plan's inputs: one `x` for each micro-batch of a group.
pub const X_INPUTS: [usize; GROUP] = [0, 1];
/// Position among the plan's inputs: the shift of the update.
pub const SHIFT_INPUT: usize = 2;
/// Positions among the plan's results: the losses of a group.
pub const LOSS_RESULTS: [usize; GROUP] = [0, 1];
/// Position among the plan's results: the norm.
pub const NORM_RESULT: usize = 2;

struct Values {
    x: [ValueId; GROUP],
    a: [ValueId; GROUP],
    loss: [ValueId; GROUP],
    b: ValueId,
    c: ValueId,
    sum: ValueId,
    gradient: ValueId,
    w: ValueId,
}

/// The instructions of a micro-batch that later instructions wait for.
#[derive(Clone, Copy)]
struct MicroBatch {
    fetch_x: InstructionId,
    make_loss: InstructionId,
    store_loss: InstructionId,
}

/// Adds one micro-batch. `before` lists the micro-batches that may run immediately before it.
fn micro_batch(
    builder: &mut PlanBuilder,
    values: &Values,
    index: usize,
    before: &[MicroBatch],
    is_first: bool,
) -> MicroBatch {
    const TO_DEVICE: Link = Link::HOST_TO_DEVICE;
    const TO_HOST: Link = Link::DEVICE_TO_HOST;
    let (x, a, loss) = (values.x[index], values.a[index], values.loss[index]);
    // The slot of x held the fetched `a` of the previous micro-batch.
    let made: Vec<_> = before.iter().map(|micro_batch| micro_batch.make_loss).collect();
    let stored: Vec<_> = before.iter().map(|micro_batch| micro_batch.store_loss).collect();
    let fetch_x = builder.copy(x, TO_DEVICE, (device::X, host::X + index), &made);
    let make_a = builder.scale(((x, device::X), 2.0), (a, device::A), &[fetch_x]);
    let store_a = builder.copy(a, TO_HOST, (device::A, host::A + index), &[make_a]);
    let (b, c, w) = (values.b, values.c, values.w);
    builder.sum([(a, device::A), (w, device::W)], (b, device::B), &[]);
    builder.scale(((b, device::B), 3.0), (c, device::A), &[store_a]);
    let fetch_a = builder.copy(a, TO_DEVICE, (device::X, host::A + index), &[store_a]);
    let mut waits = stored;
    waits.push(fetch_a);
    let make_loss = builder.sum([(c, device::A), (a, device::X)], (loss, device::LOSS), &waits);
    let store_loss = builder.copy(loss, TO_HOST, (device::LOSS, host::LOSS + index), &[make_loss]);
    let (gradient, sum) = (values.gradient, values.sum);
    if is_first {
        builder.scale(((loss, device::LOSS), 1.0), (gradient, device::GRADIENT), &[]);
    } else {
        let parts = [(gradient, device::GRADIENT), (loss, device::LOSS)];
        builder.sum(parts, (sum, device::B), &[]);
        builder.scale(((sum, device::B), 1.0), (gradient, device::GRADIENT), &[]);
    }
    MicroBatch { fetch_x, make_loss, store_loss }
}

/// The plan for `1 + repetitions` groups. The middle segment waits for its previous repetition, so
/// there must be at least two repetitions.
pub fn tiny_plan(repetitions: usize) -> Arc<CheckedPlan> {
    const TO_DEVICE: Link = Link::HOST_TO_DEVICE;
    const TO_HOST: Link = Link::DEVICE_TO_HOST;
    let mut builder = PlanBuilder::default();
    let names = |builder: &mut PlanBuilder, name: &str, class| {
        [0, 1].map(|index| builder.value(&format!("{name}[{index}]"), class))
    };
    let values = Values {
        x: names(&mut builder, "x", TensorClass::Input),
        a: names(&mut builder, "a", TensorClass::Activation),
        loss: names(&mut builder, "loss", TensorClass::Activation),
        b: builder.value("b", TensorClass::Activation),
        c: builder.value("c", TensorClass::Activation),
        sum: builder.value("sum", TensorClass::Activation),
        gradient: builder.value("gradient", TensorClass::Gradient),
        w: builder.value("w", parameter()),
    };
    let m = builder.value("m", TensorClass::OptimizerState);
    let shift = builder.value("shift", TensorClass::Input);
    let [moved, shifted, norm] =
        ["moved", "shifted", "norm"].map(|name| builder.value(name, TensorClass::Activation));
    let w = values.w;

    let fetch_shift = builder.copy(shift, TO_DEVICE, (device::SHIFT, host::SHIFT), &[]);
    let first0 = micro_batch(&mut builder, &values, 0, &[], true);
    let first1 = micro_batch(&mut builder, &values, 1, &[first0], false);
    let first = builder.segment("first group");

    // The last micro-batch of the previous repetition comes later in the list, so the waits for it
    // are added below.
    let middle0 = micro_batch(&mut builder, &values, 0, &[first1], false);
    let middle1 = micro_batch(&mut builder, &values, 1, &[middle0], false);
    let middle = builder.segment("middle group");
    for (waiter, awaited) in
        [(middle0.fetch_x, middle1.make_loss), (middle0.make_loss, middle1.store_loss)]
    {
        builder.plan.instructions[waiter.index()].waits.push(awaited);
    }

    let fetch_m = builder.copy(m, TO_DEVICE, (device::M, host::M), &[]);
    let parts = [(m, device::M), (values.gradient, device::GRADIENT)];
    let update_m = builder.sum(parts, (m, device::A), &[fetch_m]);
    let store_m = builder.copy(m, TO_HOST, (device::A, host::M), &[update_m]);
    builder.sum([(w, device::W), (m, device::A)], (moved, device::B), &[]);
    let parts = [(moved, device::B), (shift, device::SHIFT)];
    let waits = [fetch_shift, middle1.store_loss];
    builder.sum(parts, (shifted, device::LOSS), &waits);
    let update_w = builder.scale(((shifted, device::LOSS), 1.0), (w, device::W), &[]);
    builder.copy(w, TO_HOST, (device::W, host::W), &[update_w]);
    let gradient = (values.gradient, device::GRADIENT);
    let make_norm = builder.scale((gradient, 1.0), (norm, device::A), &[store_m]);
    let store_norm = builder.copy(norm, TO_HOST, (device::A, host::NORM), &[make_norm]);
    let last = builder.segment("update");

    builder.scale(((w, device::W), 2.0), (moved, device::B), &[]);
    let update_w = builder.scale(((moved, device::B), 1.0), (w, device::W), &[]);
    builder.copy(w, TO_HOST, (device::W, host::W), &[update_w]);
    let flush = builder.segment("flush");

    let run = |segment, times| Run { segment, times };
    builder.plan.step = vec![run(first, 1), run(middle, repetitions), run(last, 1)];
    builder.plan.flush = Some(flush);
    builder.lasting(w, &[(Tier::DEVICE, device::W), (Tier::HOST, host::W)]);
    builder.lasting(values.gradient, &[(Tier::DEVICE, device::GRADIENT)]);
    builder.lasting(m, &[(Tier::HOST, host::M)]);
    for (index, copies) in [[first0, middle0], [first1, middle1]].into_iter().enumerate() {
        let in_group = Some(index as u16);
        let fetches = copies.map(|copy| copy.fetch_x);
        builder.input(values.x[index], in_group, host::X + index, &fetches);
        let stores = copies.map(|copy| copy.store_loss);
        builder.result(values.loss[index], in_group, host::LOSS + index, &stores);
    }
    builder.input(shift, None, host::SHIFT, &[fetch_shift]);
    builder.result(norm, None, host::NORM, &[store_norm]);
    builder.checked(device::COUNT, host::COUNT)
}

/// The same step as plain arithmetic, without a plan, queues or a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Plain {
    /// The weights.
    pub w: Vec<f32>,
    /// The optimizer state.
    pub m: Vec<f32>,
}

/// The results of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepResults {
    /// The loss of each micro-batch.
    pub losses: Vec<Vec<f32>>,
    /// The norm of the step.
    pub norm: Vec<f32>,
}

impl Plain {
    /// Starts with these weights.
    pub fn new(w: Vec<f32>) -> Plain {
        Plain { w, m: vec![0.0; ELEMENTS] }
    }

    /// Runs a step over these micro-batches.
    pub fn step(&mut self, x: &[Vec<f32>], shift: &[f32]) -> StepResults {
        let mut losses = Vec::new();
        let mut gradient: Option<Vec<f32>> = None;
        for x in x {
            let a = map(x, |x| 2.0 * x);
            let loss = add(&map(&add(&a, &self.w), |b| 3.0 * b), &a);
            gradient = Some(gradient.map_or_else(|| loss.clone(), |sum| add(&sum, &loss)));
            losses.push(loss);
        }
        let norm = gradient.expect("a step has micro-batches");
        self.m = add(&self.m, &norm);
        self.w = add(&add(&self.w, &self.m), shift);
        StepResults { losses, norm }
    }

    /// Applies the flush.
    pub fn flush(&mut self) {
        self.w = map(&self.w, |w| 2.0 * w);
    }
}

fn map(x: &[f32], f: impl Fn(f32) -> f32) -> Vec<f32> {
    x.iter().map(|&x| f(x)).collect()
}

fn add(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Small numbers that depend on the seed.
pub fn numbers(seed: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|i| ((i * 37 + seed * 101) % 211) as f32 / 64.0 - 1.5).collect()
}
