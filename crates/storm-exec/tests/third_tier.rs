//! A tier behind the host: the checker, the simulator and the CPU device on a plan that has one.
//!
//! Weights are kept in the third tier. Each passes through a ring in host memory and one in device
//! memory, is added to, and returns the same way.

use std::ops::Range;
use std::sync::Arc;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_device::cuda::{CudaPlanDevice, CudaPlanOptions};
use storm_device::{DeviceError, NullDevice, NullOptions, PlanDevice, bytes_of, bytes_of_mut};
use storm_exec::Planned;
use storm_exec::trace::summarize;
use storm_graph::{DType, Graph, Op, Tensor, TensorClass, Training};
use storm_plan::{
    CheckError, CheckedPlan, Compute, Copy, GraphId, HardwareProfile, Input, Instruction,
    InstructionId, Lasting, Link, LinkProfile, Links, Operand, PerTier, Place, Plan, PlanResult,
    Queue, Run, Segment, SegmentId, TensorKind, Tier, Value, ValueId, Work, check, simulate,
    verify,
};

const ELEMENTS: usize = 64;
const SLOT: usize = ELEMENTS * 4;
const LAYERS: usize = 5;
/// Slots of each ring.
const RING: usize = 2;
const BODY: SegmentId = SegmentId(0);

/// Addresses in slots: rings of weights on their way to the kernels and back.
const ON_DEVICE: [usize; 2] = [0, RING];
const ON_HOST: [usize; 2] = [0, RING];
const X: usize = 2 * RING;
const Y: usize = X + 1;

fn third() -> Tier {
    Tier::HOST.behind().expect("three tiers")
}

fn place(tier: Tier, slot: usize) -> Place {
    Place { tier, offset: slot * SLOT }
}

/// A plan under construction.
struct Builder {
    plan: Plan,
}

impl Builder {
    fn value(&mut self, name: &str, class: TensorClass) -> ValueId {
        self.plan.values.push(Value { name: name.to_owned(), size_bytes: SLOT, class });
        ValueId(self.plan.values.len() as u32 - 1)
    }

    fn tensor(&self, value: ValueId) -> Tensor {
        let Value { name, class, .. } = self.plan.value(value).clone();
        Tensor { name, shape: [ELEMENTS].into(), dtype: DType::F32, class }
    }

    fn copy(&mut self, value: ValueId, from: Place, to: Place) -> InstructionId {
        let values = vec![Operand { value, offset: 0 }];
        let (values, kind) = (values.into(), TensorKind::Weights);
        self.add(Work::Copy(Copy { from, to, bytes: SLOT, values, kind }))
    }

    /// `to` is the sum of two values in slots of device memory.
    fn sum(&mut self, parts: [(ValueId, usize); 2], to: (ValueId, usize)) {
        let operand = |&(value, slot): &(ValueId, usize)| Operand { value, offset: slot * SLOT };
        let reads: Vec<Operand> = parts.iter().map(operand).collect();
        let writes = vec![operand(&to)];
        let places = reads.iter().chain(&writes).map(|operand| operand.offset).collect();
        let graph = GraphId(0);
        self.add(Work::Compute(Compute {
            graph,
            node: 0,
            layer: 0,
            places,
            reads: reads.into(),
            writes: writes.into(),
        }));
    }

    /// Waits for everything in other queues that touches the same bytes.
    fn add(&mut self, work: Work) -> InstructionId {
        let id = InstructionId(self.plan.instructions.len() as u32);
        self.plan.instructions.push(Instruction { work, waits: Vec::new() });
        let plan = &self.plan;
        let mine = touched(plan, id);
        let conflicts = |other: &InstructionId| {
            let theirs = touched(plan, *other);
            mine.iter().any(|(tier, bytes, writes)| {
                theirs.iter().any(|(of, range, written)| {
                    let overlap = range.start < bytes.end && bytes.start < range.end;
                    tier == of && overlap && (*writes || *written)
                })
            })
        };
        let others =
            plan.ids().take(id.index()).filter(|&other| plan.queue(other) != plan.queue(id));
        let waits = others.filter(conflicts).collect();
        self.plan.instructions[id.index()].waits = waits;
        id
    }
}

/// Which bytes an instruction touches, and whether it writes them.
fn touched(plan: &Plan, id: InstructionId) -> Vec<(Tier, Range<usize>, bool)> {
    let at = |Place { tier, offset }: Place, writes| (tier, offset..offset + SLOT, writes);
    match &plan.instruction(id).work {
        Work::Copy(copy) => vec![at(copy.from, false), at(copy.to, true)],
        Work::Fetch(_) | Work::ReadAhead(_) | Work::Collective(_) => unreachable!("no such work"),
        Work::Compute(compute) => {
            let here = |operand: &Operand| Place { tier: Compute::TIER, offset: operand.offset };
            let reads = compute.reads.iter().map(|operand| at(here(operand), false));
            reads.chain(compute.writes.iter().map(|operand| at(here(operand), true))).collect()
        }
    }
}

/// Adds `x` to every weight, and returns the last of them twice.
fn plan() -> Plan {
    let mut graph = Graph::new();
    let [a, b] = ["a", "b"].map(|name| graph.input(name, [ELEMENTS], DType::F32));
    graph.apply("sum", Op::Add { a, b }).expect("of one shape");
    let links = Links::default().and_between(Tier::HOST, third());
    let bytes = PerTier::new((2 * RING + 2) * SLOT, (2 * RING + 2) * SLOT);
    let bytes = bytes.with(third(), LAYERS * SLOT);
    let mut builder =
        Builder { plan: Plan { graphs: vec![graph.into()], bytes, links, ..Plan::default() } };

    let x = builder.value("x", TensorClass::Input);
    let y = builder.value("y", TensorClass::Activation);
    let bring_x = builder.copy(x, place(Tier::HOST, X), place(Tier::DEVICE, X));
    let input = Input {
        tensor: builder.tensor(x),
        value: x,
        micro_batch: Some(0),
        place: place(Tier::HOST, X),
        copies: vec![bring_x],
        fetches: Vec::new(),
    };
    builder.plan.inputs.push(input);
    for layer in 0..LAYERS {
        let class = TensorClass::Parameter(Training::Trainable);
        let w = builder.value(&format!("w{layer}"), class);
        let slot = layer % RING;
        let [near_in, near_out] = ON_DEVICE.map(|ring| ring + slot);
        let [far_in, far_out] = ON_HOST.map(|ring| place(Tier::HOST, ring + slot));
        let rest = place(third(), layer);
        builder.copy(w, rest, far_in);
        builder.copy(w, far_in, place(Tier::DEVICE, near_in));
        builder.sum([(w, near_in), (x, X)], (w, near_out));
        if layer + 1 == LAYERS {
            builder.sum([(w, near_out), (w, near_out)], (y, Y));
        }
        builder.copy(w, place(Tier::DEVICE, near_out), far_out);
        builder.copy(w, far_out, rest);
        let tensor = builder.tensor(w);
        builder.plan.lasting.push(Lasting {
            tensor,
            pieces: vec![w],
            places: vec![rest],
            parts: Vec::new(),
            shard: None,
        });
    }
    let take_y = builder.copy(y, place(Tier::DEVICE, Y), place(Tier::HOST, Y));
    let result = PlanResult {
        tensor: builder.tensor(y),
        value: y,
        micro_batch: Some(0),
        place: place(Tier::HOST, Y),
        copies: vec![take_y],
    };
    builder.plan.results.push(result);
    let mut plan = builder.plan;
    plan.segments.push(Segment { name: "body", instructions: 0..plan.instructions.len() });
    plan.step.push(Run { segment: BODY, times: 1 });
    plan
}

fn checked() -> Arc<CheckedPlan> {
    let plan = plan();
    let bytes = plan.bytes;
    Arc::new(check(plan, bytes).unwrap())
}

fn refused(plan: &Plan) -> CheckError {
    verify(plan, plan.bytes).expect_err("the plan has a problem")
}

fn numbers(seed: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|index| ((seed * 37 + index * 11) % 101) as f32 / 7.0 - 5.0).collect()
}

fn add(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Steps on the CPU match plain arithmetic, bit for bit, in whatever order the queues run.
#[test]
fn steps_are_exact() {
    for seed in 0..30 {
        let options = CpuPlanOptions {
            threads: Some(1),
            commands_max: [1, 4, 1024][seed % 3],
            chaos_seed: (seed > 0).then_some(seed as u64),
            trace: true,
            ..CpuPlanOptions::default()
        };
        let mut device = CpuPlanDevice::commit(checked(), options).unwrap();
        assert_eq!(device.memory_taken(), plan().bytes);
        let mut weights: Vec<Vec<f32>> = (0..LAYERS).map(numbers).collect();
        for (layer, w) in weights.iter().enumerate() {
            device.write(place(third(), layer), bytes_of(w)).unwrap();
        }
        for step in 0..3 {
            let x = numbers(100 + step);
            device.write_input(0, bytes_of(&x)).unwrap();
            device.issue(BODY).unwrap();
            let mut y = vec![0.0f32; ELEMENTS];
            device.read_result(0, bytes_of_mut(&mut y)).unwrap();
            weights.iter_mut().for_each(|w| *w = add(w, &x));
            assert_eq!(y, add(&weights[LAYERS - 1], &weights[LAYERS - 1]), "step {step}");
        }
        let trace = device.trace().unwrap().unwrap();
        assert_eq!(trace.spans.len(), plan().instructions.len());
        for (layer, expected) in weights.iter().enumerate() {
            let mut w = vec![0.0f32; ELEMENTS];
            device.read(place(third(), layer), bytes_of_mut(&mut w)).unwrap();
            assert_eq!(&w, expected, "layer {layer}");
        }
    }
}

#[test]
fn tensors_are_found_where_they_rest() {
    let options = CpuPlanOptions::default();
    let mut planned: Planned<CpuPlanDevice> = Planned::commit(checked(), options).unwrap();
    planned.write("w3", &numbers(3)).unwrap();
    let mut w = vec![0.0f32; ELEMENTS];
    planned.read("w3", &mut w).unwrap();
    assert_eq!(w, numbers(3));
}

/// Without its ordering waits, every single instruction is rejected: the checker tracks what is in
/// the third tier and what crosses its links.
#[test]
fn every_wait_matters() {
    let plan = plan();
    let names: Vec<String> = plan.queues().map(|queue| plan.links.queue_name(queue)).collect();
    assert_eq!(
        names,
        ["compute", "host to device", "device to host", "disk to host", "host to disk"]
    );
    for id in plan.ids().filter(|&id| !plan.instruction(id).waits.is_empty()) {
        let mut damaged = plan.clone();
        damaged.instructions[id.index()].waits.clear();
        let error = refused(&damaged);
        let is_order = matches!(
            error,
            CheckError::UnorderedRead { .. }
                | CheckError::UnorderedWrite { .. }
                | CheckError::OverwriteBeforeRead { .. }
        );
        assert!(is_order, "{error}");
    }
    // A weight that returns one slot off is not where the next step looks for it.
    let mut damaged = plan.clone();
    let last =
        damaged.instructions.iter_mut().rev().find_map(|instruction| match &mut instruction.work {
            Work::Copy(copy) if copy.to.tier == third() => Some(copy),
            _ => None,
        });
    last.expect("weights go back").to.offset -= SLOT;
    let error = refused(&damaged).to_string();
    assert!(error.contains("disk bytes"), "{error}");
}

/// Kernels take 10 s, copies of a slot 4 s in, 8 s out, and 20 s and 40 s to and from the third tier.
fn machine() -> HardwareProfile {
    let link = |near, far, to_near: f64, to_far: f64| LinkProfile {
        near,
        far,
        to_near_bandwidth: SLOT as f64 / to_near,
        to_far_bandwidth: SLOT as f64 / to_far,
        duplex_bandwidth: SLOT as f64 / to_near + SLOT as f64 / to_far,
        latency_seconds: 0.0,
    };
    HardwareProfile {
        kernel_seconds: 10.0,
        launch_seconds: 0.0,
        links: vec![
            link(Tier::DEVICE, Tier::HOST, 4.0, 8.0),
            link(Tier::HOST, third(), 20.0, 40.0),
        ],
        ..HardwareProfile::builtin("reference").unwrap()
    }
}

#[test]
fn the_slowest_link_is_what_a_step_waits_for() {
    let (plan, profile) = (plan(), machine());
    let simulation = simulate(&plan, &profile);
    let busy: Vec<f64> = plan.queues().map(|queue| simulation.busy_seconds[queue]).collect();
    // Six kernels, x and five weights in, y and five weights out, five weights each way behind.
    assert_eq!(busy, [60.0, 24.0, 48.0, 100.0, 200.0]);
    let out = plan.links.queue(Link { from: Tier::HOST, to: third() }).unwrap();
    assert_eq!(simulation.bytes(out), (LAYERS * SLOT) as u64);
    // The first weight starts back after it was fetched, added to and copied out: 20 + 4 + 10 + 8 s.
    assert_eq!(simulation.step_seconds, 42.0 + 200.0);
    assert_eq!(simulation.stalls.total_seconds(), simulation.step_seconds - 60.0);
    // If the third tier took no time: x and a weight in, six kernels, the last weight out.
    assert_eq!(simulation.stalls.disk_seconds, 242.0 - (4.0 + 4.0 + 60.0 + 8.0));

    // The null device uses the same clock.
    let options = NullOptions::of_profile(&plan, &profile);
    let mut device = NullDevice::commit(checked(), options).unwrap();
    device.issue(BODY).unwrap();
    device.synchronize().unwrap();
    assert_eq!(device.now().as_nanos(), 242_000_000_000);
    let trace = device.trace().unwrap().unwrap();
    let summary = summarize(&plan, &trace);
    assert_eq!(summary.queues[out.index()].busy_ns, 200_000_000_000);
    assert_eq!(summary.peak_bytes[third()], LAYERS * SLOT);

    // Links share bandwidth only with their opposite: halving the duplex bandwidth slows these two
    // alone.
    let mut shared = machine();
    shared.links[1].duplex_bandwidth /= 2.0;
    let busy_of = |profile: &HardwareProfile, queue| simulate(&plan, profile).busy_seconds[queue];
    assert_eq!(busy_of(&shared, Queue::HOST_TO_DEVICE), 24.0);
    assert_eq!(busy_of(&shared, out), 300.0);
}

#[test]
fn a_tier_without_a_link_is_named() {
    let mut unlinked = Plan { bytes: PerTier::new(SLOT, SLOT), ..Plan::default() };
    verify(&unlinked, unlinked.bytes).unwrap();
    unlinked.bytes[third()] = SLOT;
    let error = refused(&unlinked);
    assert_eq!(error, CheckError::NoLinkToTier { tier: third() });
    assert!(error.to_string().contains("disk memory, which no link"), "{error}");

    let mut past_the_host = plan();
    let Work::Copy(copy) = &mut past_the_host.instructions[1].work else { unreachable!() };
    copy.to.tier = Tier::DEVICE;
    let error = refused(&past_the_host);
    let link = Link { from: third(), to: Tier::DEVICE };
    assert_eq!(error, CheckError::NoLink { whom: "instruction 1".to_owned(), link });
    assert!(error.to_string().contains("from disk to device"), "{error}");

    let mut over = plan();
    let budget = over.bytes.with(third(), over.bytes[third()] - 1);
    let error = verify(&over, budget).unwrap_err();
    assert!(matches!(error, CheckError::OverBudget { tier, .. } if tier == third()), "{error}");
    over.inputs[0].place.tier = Tier::DEVICE;
    let error = refused(&over).to_string();
    assert!(error.contains("device memory of `x`"), "{error}");
}

/// A card has two tiers, and reports that before it looks for a driver.
#[test]
fn a_card_refuses_a_tier_that_it_does_not_have() {
    let error = CudaPlanDevice::commit(checked(), CudaPlanOptions::default()).unwrap_err();
    assert_eq!(error, DeviceError::NoTier { tier: third() });
    assert!(error.to_string().contains("no disk memory"), "{error}");
}
