//! Plans that take data: fetches into the slots of inputs, and reads ahead of the next step.

mod support;

use storm_graph::TensorClass;
use storm_plan::{
    CheckError, Found, HardwareProfile, InstructionId, Link, LinkProfile, Links, Plan, Queue, Tier,
    ValueId, Work, simulate_with_timeline, verify,
};
use support::base::is;
use support::oracle;
use support::small::{BLOCK, Kernel, copy, empty, fetch, input, kernel, segment, value};
use support::tight_budget;

const X: ValueId = ValueId(0);
const Y: ValueId = ValueId(1);

/// Instructions of [`fetching`].
const FETCH: usize = 0;
const READ: usize = 1;
const BRING: usize = 2;
const SCALE: usize = 3;

/// A micro-batch `x` is fetched, comes in, and is scaled; so often.
fn fetching(times: usize) -> Plan {
    let mut plan = empty(2, 1);
    value(&mut plan, "x", TensorClass::Input);
    value(&mut plan, "y", TensorClass::Activation);
    let [bring, scale] = [BRING, SCALE].map(|index| InstructionId(index as u32));
    input(&mut plan, X, 0, &[bring]);
    let [fetched, _] = fetch(&mut plan, 0, &[bring]);
    plan.inputs[0].fetches = vec![fetched];
    copy(&mut plan, Link::HOST_TO_DEVICE, 0, 0, &[X], &[fetched, scale]);
    kernel(&mut plan, Kernel::Scale, &[(X, 0)], &[(Y, 1)], &[bring]);
    segment(&mut plan, "body", times);
    plan
}

/// What the checker says of a damaged plan, which the oracle refuses too.
fn refused(damage: impl FnOnce(&mut Plan)) -> CheckError {
    let mut plan = fetching(3);
    damage(&mut plan);
    oracle::judge(&plan).expect_err("the oracle sees the problem");
    verify(&plan, tight_budget(&plan)).expect_err("the plan has a problem")
}

/// What the checker says of a plan that contradicts itself.
fn contradicts(damage: impl FnOnce(&mut Plan)) -> CheckError {
    let mut plan = fetching(3);
    damage(&mut plan);
    verify(&plan, tight_budget(&plan)).expect_err("the plan has a problem")
}

#[test]
fn a_plan_may_fetch_its_inputs() {
    for times in [2, 3, 7] {
        let plan = fetching(times);
        verify(&plan, tight_budget(&plan)).unwrap();
        oracle::judge(&plan).unwrap();
    }
    let plan = fetching(1);
    let names: Vec<String> = plan.ids().map(|id| plan.links.queue_name(plan.queue(id))).collect();
    assert_eq!(names, ["staging", "data", "host to device", "compute"]);
}

#[test]
fn a_copy_waits_for_what_it_reads() {
    let error = refused(|plan| plan.instructions[BRING].waits.retain(|w| w.index() != FETCH));
    let CheckError::UnorderedRead { reader, writer, .. } = &error else { panic!("{error}") };
    assert!(is(reader, BRING) && is(writer, FETCH), "{error}");
}

#[test]
fn a_slot_is_not_filled_before_it_was_read() {
    let error = refused(|plan| plan.instructions[FETCH].waits.clear());
    let CheckError::OverwriteBeforeRead { writer, reader, .. } = &error else { panic!("{error}") };
    assert!(is(writer, FETCH) && is(reader, BRING), "{error}");
}

#[test]
fn what_is_read_ahead_replaces_what_was_fetched() {
    let error = refused(|plan| plan.instructions[READ].waits.clear());
    let CheckError::UnorderedReadAhead { reader, fetch } = &error else { panic!("{error}") };
    assert!(is(reader, READ) && is(fetch, FETCH), "{error}");
    let set = |plan: &mut Plan, count| {
        if let Work::ReadAhead(read) = &mut plan.instructions[READ].work {
            read.micro_batches = count;
        }
    };
    for count in [0, 2] {
        let error = refused(|plan| set(plan, count));
        let expected = matches!(error, CheckError::ReadAheadOf { micro_batches, free: 1, .. }
            if micro_batches == count);
        assert!(expected, "{error}");
    }
}

#[test]
fn every_fetch_is_followed_by_a_read() {
    // Fetches again where it should read.
    let error = refused(|plan| {
        plan.instructions[READ].work = plan.instructions[FETCH].work.clone();
        plan.inputs[0].fetches.push(InstructionId(READ as u32));
        plan.instructions[BRING].waits.push(InstructionId(READ as u32));
    });
    assert!(matches!(error, CheckError::NotReadAhead { micro_batches: 1, .. }), "{error}");
}

#[test]
fn a_micro_batch_is_not_computed_with_the_data_of_another() {
    // The copy comes before the fetch, and finds what the repetition before left.
    let error = refused(|plan| {
        plan.instructions[BRING].waits.retain(|wait| wait.index() != FETCH);
        let bring = plan.instructions[BRING].clone();
        plan.instructions.remove(BRING);
        plan.instructions.insert(FETCH, bring);
        let renamed = |id: &mut InstructionId| {
            id.0 = match id.index() {
                BRING => 0,
                FETCH | READ => id.0 + 1,
                _ => id.0,
            };
        };
        plan.instructions.iter_mut().flat_map(|i| &mut i.waits).for_each(renamed);
        let input = &mut plan.inputs[0];
        input.copies.iter_mut().chain(&mut input.fetches).for_each(renamed);
    });
    let CheckError::WrongContent { spot, found, .. } = &error else { panic!("{error}") };
    assert_eq!((spot.value.as_deref(), found), (Some("x"), &Found::Nothing), "{error}");
}

#[test]
fn inputs_and_fetches_say_the_same() {
    let of_x = |error: &CheckError| matches!(error, CheckError::Fetched { index: 0, .. });
    let problems: [&dyn Fn(&mut Plan); 4] = [
        &|plan| plan.inputs[0].fetches.clear(),
        &|plan| plan.inputs[0].fetches.push(InstructionId(BRING as u32)),
        // Of a micro-batch that the fetch does not take.
        &|plan| plan.inputs[0].micro_batch = Some(1),
        &|plan| {
            if let Work::Fetch(fetch) = &mut plan.instructions[FETCH].work {
                fetch.inputs.push(0);
            }
        },
    ];
    for problem in problems {
        let error = contradicts(problem);
        assert!(of_x(&error), "{error}");
    }
    let error = contradicts(|plan| {
        if let Work::Fetch(fetch) = &mut plan.instructions[FETCH].work {
            fetch.inputs.push(1);
        }
    });
    assert!(matches!(error, CheckError::Unknown { what: "input", index: 1, .. }), "{error}");
    let error = contradicts(|plan| plan.links = Links::default());
    assert!(matches!(error, CheckError::NoDataSource { .. }), "{error}");
    // An evaluation must not take what a step needs.
    let error = contradicts(|plan| plan.evaluation = Some(plan.step[0].segment));
    assert!(matches!(error, CheckError::Segments { .. }), "{error}");
}

/// Kernels take 10 s, copies 4 s, and a micro-batch is read in so many.
fn slow(read_seconds: f64) -> HardwareProfile {
    HardwareProfile {
        kernel_seconds: 10.0,
        launch_seconds: 0.0,
        data_bandwidth: Some(BLOCK as f64 / read_seconds),
        links: vec![LinkProfile {
            near: Tier::DEVICE,
            far: Tier::HOST,
            to_near_bandwidth: BLOCK as f64 / 4.0,
            to_far_bandwidth: BLOCK as f64 / 4.0,
            duplex_bandwidth: BLOCK as f64 / 2.0,
            latency_seconds: 0.0,
        }],
        ..HardwareProfile::builtin("reference").unwrap()
    }
}

#[test]
fn reading_hides_behind_the_step_or_is_announced() {
    let plan = fetching(3);
    let data = plan.links.data_queue().unwrap();
    // The copy of a repetition waits for the kernel before it: 3 × 14 s.
    let hidden = simulate_with_timeline(&plan, &slow(5.0));
    assert_eq!((hidden.step_seconds, hidden.stalls.data_seconds), (42.0, 0.0));
    assert_eq!(hidden.busy_seconds[data], 15.0);
    // The next step cannot begin before all of it is read: 3 × 20 s.
    let exposed = simulate_with_timeline(&plan, &slow(20.0));
    assert_eq!((exposed.step_seconds, exposed.stalls.data_seconds), (60.0, 18.0));
    let compute = exposed.busy_seconds[Queue::COMPUTE];
    assert_eq!(compute + exposed.stalls.total_seconds(), exposed.step_seconds);
    // No kernel waits for a read in the middle of a step.
    let kernels = |simulation: &storm_plan::Simulation| -> Vec<f64> {
        let spans = simulation.timeline.iter().filter(|span| span.queue == Queue::COMPUTE);
        spans.map(|span| span.start_seconds).collect()
    };
    assert_eq!(kernels(&hidden), kernels(&exposed));
    // Nothing is known of the data.
    let unknown = HardwareProfile { data_bandwidth: None, ..slow(1.0) };
    assert_eq!(simulate_with_timeline(&plan, &unknown).busy_seconds[data], 0.0);
}
