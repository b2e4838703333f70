//! Plans on queues: the CPU and the null device.

use std::sync::Arc;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions, Fault, FaultKind};
use storm_device::{
    DeviceError, MemoryRefused, NullDevice, NullOptions, PlanDevice, Span, WaitedFor, bytes_of,
    bytes_of_mut,
};
use storm_graph::{DType, Graph, Op, TensorClass, TensorId};
use storm_plan::{
    CheckedPlan, InstructionId, Link, PerTier, Place, Plan, Queue, Run, SegmentId, Tier, check,
};
use storm_testing::{
    ELEMENTS, GROUP, LOSS_RESULTS, NORM_RESULT, Plain, PlanBuilder, SHIFT_INPUT, SLOT, StepResults,
    X_INPUTS, numbers, parameter, tiny_plan,
};

const FIRST: SegmentId = SegmentId(0);
const MIDDLE: SegmentId = SegmentId(1);
const UPDATE: SegmentId = SegmentId(2);
const FLUSH: SegmentId = SegmentId(3);
const REPETITIONS: usize = 3;

fn commit(plan: Arc<CheckedPlan>, options: CpuPlanOptions) -> CpuPlanDevice {
    CpuPlanDevice::commit(plan, options).unwrap()
}

/// Reads `w` and `m` where they rest: in device memory and in host memory.
fn weights<D: PlanDevice>(device: &mut D) -> [Vec<f32>; 3] {
    let plan = Arc::clone(device.plan());
    let mut read = |tensor: usize, place: usize| {
        let mut values = vec![0.0f32; ELEMENTS];
        let place: Place = plan.lasting[tensor].places[place];
        device.read(place, bytes_of_mut(&mut values)).unwrap();
        values
    };
    [read(0, 0), read(0, 1), read(2, 0)]
}

fn set_weights<D: PlanDevice>(device: &mut D, w: &[f32]) {
    let plan = Arc::clone(device.plan());
    for place in &plan.lasting[0].places {
        device.write(*place, bytes_of(w)).unwrap();
    }
}

/// A step, with the host as far ahead as the plan allows.
fn step<D: PlanDevice>(
    device: &mut D,
    x: &[Vec<f32>],
    shift: &[f32],
) -> Result<StepResults, DeviceError> {
    let mut results = StepResults::default();
    let read = |device: &mut D, result: usize| {
        let mut values = vec![0.0f32; ELEMENTS];
        device.read_result(result, bytes_of_mut(&mut values)).map(|()| values)
    };
    device.write_input(SHIFT_INPUT, bytes_of(shift))?;
    for (group, x) in x.chunks(GROUP).enumerate() {
        for (input, x) in X_INPUTS.into_iter().zip(x) {
            device.write_input(input, bytes_of(x))?;
        }
        if group > 0 {
            for result in LOSS_RESULTS {
                results.losses.push(read(device, result)?);
            }
        }
        device.issue(if group == 0 { FIRST } else { MIDDLE })?;
    }
    device.issue(UPDATE)?;
    for result in LOSS_RESULTS {
        results.losses.push(read(device, result)?);
    }
    results.norm = read(device, NORM_RESULT)?;
    Ok(results)
}

fn micro_batches(step: usize) -> Vec<Vec<f32>> {
    (0..GROUP * (1 + REPETITIONS)).map(|index| numbers(step * 100 + index)).collect()
}

/// Some steps and flushes give what plain arithmetic gives, bit by bit.
fn check_exact(options: CpuPlanOptions) {
    let mut plain = Plain::new(numbers(7));
    let mut device = commit(tiny_plan(REPETITIONS), options.clone());
    set_weights(&mut device, &plain.w);
    for index in 0..3 {
        let (x, shift) = (micro_batches(index), numbers(50 + index));
        let expected = plain.step(&x, &shift);
        assert_eq!(step(&mut device, &x, &shift).unwrap(), expected, "{options:?}");
        if index == 1 {
            plain.flush();
            device.issue(FLUSH).unwrap();
        }
        let Plain { w, m } = plain.clone();
        assert_eq!(weights(&mut device), [w.clone(), w, m], "{options:?}");
    }
}

#[test]
fn steps_are_exact() {
    check_exact(CpuPlanOptions::default());
    for commands_max in [1, 2, 5] {
        check_exact(CpuPlanOptions { commands_max, ..CpuPlanOptions::default() });
    }
    for threads in [1, 3] {
        check_exact(CpuPlanOptions { threads: Some(threads), ..CpuPlanOptions::default() });
    }
}

#[test]
fn chaos_changes_nothing() {
    for seed in 0..100 {
        check_exact(CpuPlanOptions {
            threads: Some(1 + seed % 2),
            commands_max: [1, 4, 1024][seed % 3],
            chaos_seed: Some(seed as u64),
            ..CpuPlanOptions::default()
        });
    }
}

/// Each run of an instruction starts after the run of every awaited instruction that was issued
/// last before it: neither an older nor a newer one.
#[test]
fn waits_mean_the_last_run_before() {
    let plan = tiny_plan(REPETITIONS);
    let options = CpuPlanOptions { trace: true, chaos_seed: Some(3), ..CpuPlanOptions::default() };
    let mut device = commit(Arc::clone(&plan), options);
    for _ in 0..2 {
        step(&mut device, &micro_batches(0), &numbers(1)).unwrap();
        let trace = device.trace().unwrap().unwrap();
        assert_eq!(trace.left_out, 0);

        // Runs of each instruction, in the order issued.
        let order = |segment: SegmentId| plan.segment(segment).instructions.clone();
        let given = order(FIRST).chain(order(MIDDLE).chain(order(MIDDLE)).chain(order(MIDDLE)));
        let given: Vec<usize> = given.chain(order(UPDATE)).collect();
        assert_eq!(trace.spans.len(), given.len());
        let span_of = |position: usize| {
            let instruction = given[position];
            let earlier = given[..position].iter().filter(|&&other| other == instruction).count();
            let runs = trace.spans.iter().filter(|s| s.instruction.index() == instruction);
            *runs.clone().nth(earlier).expect("every run has a span")
        };
        for (position, &instruction) in given.iter().enumerate() {
            let span = span_of(position);
            assert!(span.ready_ns <= span.start_ns && span.start_ns <= span.end_ns);
            for wait in &plan.instructions[instruction].waits {
                let last = given[..position].iter().rposition(|&other| other == wait.index());
                if let Some(last) = last {
                    assert!(span_of(last).end_ns <= span.start_ns);
                }
            }
        }
        for queue in plan.queues() {
            let spans = trace.spans.iter().filter(|s| plan.queue(s.instruction) == queue);
            let spans: Vec<_> = spans.collect();
            assert!(spans.windows(2).all(|pair| pair[0].end_ns <= pair[1].start_ns));
        }
    }
}

/// A fault in any queue, early or late, ends the step with an error that names it, and everything
/// after the step too; dropping the device ends its threads.
#[test]
fn faults_stop_all_queues() {
    for queue in [Queue::COMPUTE, Queue::HOST_TO_DEVICE, Queue::DEVICE_TO_HOST] {
        for kind in [FaultKind::Error, FaultKind::Panic] {
            for after in [0, 1, 5] {
                check_fault(Fault { queue, after, kind });
            }
        }
    }
}

fn check_fault(fault: Fault) {
    let plan = tiny_plan(REPETITIONS);
    let options = CpuPlanOptions { fault: Some(fault), ..CpuPlanOptions::default() };
    let mut device = commit(Arc::clone(&plan), options);
    let error = step(&mut device, &micro_batches(0), &numbers(1)).unwrap_err();
    let DeviceError::Instruction { instruction, queue, tensor, reason } = &error else {
        panic!("{error}");
    };
    let failed =
        plan.ids().filter(|&id| plan.queue(id) == fault.queue).nth(fault.after as usize).unwrap();
    assert_eq!(*instruction, plan.describe(failed));
    assert_eq!(*queue, plan.links.queue_name(fault.queue));
    assert!(instruction.contains(tensor.as_str()), "{error}");
    let expected = match fault.kind {
        FaultKind::Error => "failed on purpose",
        FaultKind::Panic => "panicked on purpose",
    };
    assert_eq!(reason, expected);

    let again = Err(error);
    assert_eq!(device.synchronize(), again);
    assert_eq!(device.issue(FIRST), again);
    let mut values = vec![0.0f32; ELEMENTS];
    assert_eq!(device.write_input(X_INPUTS[0], bytes_of(&values)), again);
    assert_eq!(device.read_result(NORM_RESULT, bytes_of_mut(&mut values)), again);
    let place = Place { tier: Tier::HOST, offset: 0 };
    assert_eq!(device.write(place, bytes_of(&values)), again);
    assert_eq!(device.read(place, bytes_of_mut(&mut values)), again);
    assert_eq!(device.trace().map(|_| ()), again);
}

/// An id that is not in a table, found by whichever thread of the kernel's pool meets it.
#[test]
fn a_panic_in_a_kernel_is_named() {
    let mut builder = PlanBuilder::default();
    let [ids, rows] = ["ids", "layers.0.rows"].map(|name| builder.value(name, TensorClass::Input));
    let table = builder.value("table", parameter());
    let fetch = builder.copy(ids, Link::HOST_TO_DEVICE, (1, 0), &[]);
    let mut graph = Graph::new();
    let op = Op::Embedding {
        ids: graph.input("ids", [ELEMENTS], DType::I32),
        table: graph.input("table", [ELEMENTS, 1], DType::F32),
    };
    graph.apply("rows", op).unwrap();
    let look_up = builder.compute(graph, &[(ids, 1), (table, 0)], (rows, 2), &[fetch]);
    let store = builder.copy(rows, Link::DEVICE_TO_HOST, (2, 1), &[look_up]);
    let segment = builder.segment("all");
    builder.plan.step = vec![Run { segment, times: 1 }];
    builder.lasting(table, &[(Tier::DEVICE, 0)]);
    builder.input(ids, None, 0, &[fetch]);
    builder.result(rows, None, 1, &[store]);

    let options = CpuPlanOptions { threads: Some(3), ..CpuPlanOptions::default() };
    let mut device = commit(builder.checked(3, 2), options);
    let mut result = vec![0.0f32; ELEMENTS];
    let mut ids: Vec<i32> = (0..ELEMENTS as i32).rev().collect();
    device.write(Place { tier: Tier::DEVICE, offset: 0 }, bytes_of(&numbers(1))).unwrap();
    device.write_input(0, bytes_of(&ids)).unwrap();
    device.issue(segment).unwrap();
    device.read_result(0, bytes_of_mut(&mut result)).unwrap();
    assert!(result.iter().eq(numbers(1).iter().rev()));

    ids[ELEMENTS / 2] = -7;
    device.write_input(0, bytes_of(&ids)).unwrap();
    device.issue(segment).unwrap();
    let expected = DeviceError::Instruction {
        instruction: "Embedding `rows` of layer 0".to_owned(),
        queue: "compute".to_owned(),
        tensor: "layers.0.rows".to_owned(),
        reason: "id -7 is not a row of an embedding table".to_owned(),
    };
    assert_eq!(device.read_result(0, bytes_of_mut(&mut result)), Err(expected.clone()));
    assert_eq!(device.synchronize(), Err(expected));
}

/// A device that is dropped in the middle of a step ends its threads.
#[test]
fn a_step_may_be_abandoned() {
    for seed in 0..10 {
        let options = CpuPlanOptions { chaos_seed: Some(seed), ..CpuPlanOptions::default() };
        let mut device = commit(tiny_plan(REPETITIONS), options);
        device.issue(FIRST).unwrap();
    }
}

#[test]
fn segments_out_of_turn_are_refused() {
    let mut device = commit(tiny_plan(2), CpuPlanOptions::default());
    let error = device.issue(MIDDLE).unwrap_err();
    let expected = DeviceError::OutOfTurn { segment: "middle group", expected: "first group" };
    assert_eq!(error, expected);
    device.issue(FIRST).unwrap();
    let error = device.issue(FIRST).unwrap_err();
    assert!(error.to_string().contains("where `middle group` is next"), "{error}");
}

#[test]
fn sizes_and_places_are_checked() {
    let mut device = commit(tiny_plan(2), CpuPlanOptions::default());
    let mut bytes = vec![0u8; SLOT];
    let expected = DeviceError::WrongSize {
        tensor: "x[1]".to_owned(),
        tensor_bytes: 4 * ELEMENTS,
        given_bytes: SLOT,
    };
    assert_eq!(device.write_input(X_INPUTS[1], &bytes), Err(expected));
    let error = device.read_result(NORM_RESULT, &mut bytes).unwrap_err();
    assert!(
        error.to_string().contains("81920 bytes do not fit `norm`, which has 80000"),
        "{error}"
    );
    for (tier, slots) in [(Tier::DEVICE, 8), (Tier::HOST, 10)] {
        let last = Place { tier, offset: (slots - 1) * SLOT };
        device.write(last, &bytes).unwrap();
        let beyond = Place { tier, offset: last.offset + 1 };
        let refused = |result| matches!(result, Err(DeviceError::OutOfBounds { .. }));
        assert!(refused(device.write(beyond, &bytes)));
        assert!(refused(device.read(beyond, &mut bytes)));
    }
    let taken = device.memory_taken();
    assert_eq!(taken, PerTier::new(8 * SLOT, 10 * SLOT));
}

#[test]
fn memory_that_cannot_be_had_is_an_error() {
    let too_many = isize::MAX as usize - SLOT;
    for refused in [Tier::DEVICE, Tier::HOST] {
        let bytes = PerTier::default().with(refused, too_many);
        let plan = check(Plan { bytes, ..Plan::default() }, bytes).unwrap();
        let error = CpuPlanDevice::commit(Arc::new(plan), CpuPlanOptions::default()).unwrap_err();
        let DeviceError::Memory(MemoryRefused { tier, wanted_bytes, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!((tier, wanted_bytes), (refused, too_many as u64));
    }
}

/// A node that is not in the plan runs on its memory; one that fails leaves the device as it was.
#[test]
fn nodes_run_alone() {
    let mut device = commit(tiny_plan(2), CpuPlanOptions::default());
    set_weights(&mut device, &numbers(3));

    let mut graph = Graph::new();
    let x = graph.input("x", [ELEMENTS], DType::F32);
    graph.apply("half", Op::Scale { x, factor: 0.5 }).unwrap();
    let place = |id: TensorId| if id == x { 0 } else { 5 * SLOT };
    device.run_alone(&graph, &graph.nodes()[0], place, 0).unwrap();
    let mut halves = vec![0.0f32; ELEMENTS];
    let at = Place { tier: Tier::DEVICE, offset: 5 * SLOT };
    device.read(at, bytes_of_mut(&mut halves)).unwrap();
    assert_eq!(halves, numbers(3).iter().map(|x| x / 2.0).collect::<Vec<_>>());

    let (graph, place) = embedding();
    device.write(Place { tier: Tier::DEVICE, offset: SLOT }, bytes_of(&[99i32, 0])).unwrap();
    let error = device.run_alone(&graph, &graph.nodes()[0], place, 0).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("Embedding `rows` failed in the compute queue"), "{text}");
    device.write(Place { tier: Tier::DEVICE, offset: SLOT }, bytes_of(&[1i32, 0])).unwrap();
    device.run_alone(&graph, &graph.nodes()[0], place, 0).unwrap();
}

/// Two rows of a table of four: the table in slot 0, ids in slot 1, the rows in slot 2.
fn embedding() -> (Graph, impl Fn(TensorId) -> usize + Copy) {
    let mut graph = Graph::new();
    let table = graph.input("table", [4, 8], DType::F32);
    let ids = graph.input("ids", [2], DType::I32);
    graph.apply("rows", Op::Embedding { ids, table }).unwrap();
    (graph, |id: TensorId| id.index() * SLOT)
}

const COMPUTE_NS: u64 = 100;
const TO_DEVICE_NS: u64 = 30;
const TO_HOST_NS: u64 = 40;

fn null_device(plan: Arc<CheckedPlan>, issue_ns: u64) -> NullDevice {
    let nanoseconds = |id: InstructionId| match plan.queue(id) {
        Queue::COMPUTE => COMPUTE_NS,
        Queue::HOST_TO_DEVICE => TO_DEVICE_NS,
        _ => TO_HOST_NS,
    };
    let instruction_seconds = plan.ids().map(|id| nanoseconds(id) as f64 * 1e-9).collect();
    let issue_seconds = issue_ns as f64 * 1e-9;
    let options = NullOptions { instruction_seconds, issue_seconds, trace: true };
    NullDevice::commit(plan, options).unwrap()
}

/// The first micro-batch, worked out by hand.
#[test]
fn the_null_device_keeps_time() {
    let plan = tiny_plan(2);
    let mut device = null_device(Arc::clone(&plan), 0);
    device.issue(FIRST).unwrap();
    let trace = device.trace().unwrap().unwrap();
    let find = |index: u32| {
        let found = trace.spans.iter().find(|span| span.instruction.0 == index);
        let &Span { waited_for, ready_ns, start_ns, end_ns, .. } = found.unwrap();
        assert_eq!(ready_ns, start_ns);
        (start_ns, end_ns, waited_for)
    };
    let on = |index| WaitedFor::Instruction(InstructionId(index));
    let expected = [
        (0, 30, WaitedFor::Nothing),    // 0 shift to the device
        (30, 60, WaitedFor::Nothing),   // 1 x to the device
        (60, 160, on(1)),               // 2 a
        (160, 200, on(2)),              // 3 a to the host
        (160, 260, WaitedFor::Nothing), // 4 b
        (260, 360, WaitedFor::Nothing), // 5 c, for which a was moved in time
        (200, 230, on(3)),              // 6 a to the device
        (360, 460, WaitedFor::Nothing), // 7 loss
        (460, 500, on(7)),              // 8 loss to the host
        (460, 560, WaitedFor::Nothing), // 9 gradient
        (460, 490, on(7)),              // 10 x of the next, over the fetched a
        (560, 660, WaitedFor::Nothing), // 11 its a
    ];
    for (index, expected) in expected.into_iter().enumerate() {
        assert_eq!(find(index as u32), expected, "{}", plan.describe(InstructionId(index as u32)));
    }
    assert_eq!(
        device.now().as_nanos() as u64,
        trace.spans.iter().map(|span| span.end_ns).max().unwrap()
    );
}

/// A host that issues instructions slowly delays every queue; one that must wait for a
/// result loses no time that the queues have.
#[test]
fn the_null_device_has_a_host() {
    let mut device = null_device(tiny_plan(2), 1000);
    device.issue(FIRST).unwrap();
    let trace = device.trace().unwrap().unwrap();
    for span in &trace.spans {
        assert_eq!(span.waited_for, WaitedFor::Host);
        assert_eq!(span.start_ns, 1000 * (u64::from(span.instruction.0) + 1));
    }

    let mut device = null_device(tiny_plan(REPETITIONS), 0);
    let results = step(&mut device, &micro_batches(0), &numbers(1)).unwrap();
    assert_eq!(results.norm, vec![0.0; ELEMENTS]);
    let trace = device.trace().unwrap().unwrap();
    let kernels =
        trace.spans.iter().filter(|span| device.plan().queue(span.instruction) == Queue::COMPUTE);
    assert!(kernels.clone().all(|span| span.waited_for != WaitedFor::Host));
    let stalled = kernels.filter(|span| span.waited_for != WaitedFor::Nothing);
    assert_eq!(stalled.count(), 1, "only the first kernel waits, for x");
}
