//! Plans that the checker refuses because of what they do: in no order, or with the wrong contents.

mod support;

use storm_graph::TensorClass;
use storm_plan::{
    Actor, CheckError, Copy, Found, InstructionId, Link, Plan, Queue, Tier, Work, check, verify,
};
use support::base::{ADD, BRING_W, BRING_X, TAKE_Y, W, X, Y, base, copy_of, damaged, is, refused};
use support::small::{BLOCK, Kernel, copy, empty, kernel, lasting, segment, value};
use support::tight_budget;

#[test]
fn a_safe_plan_passes() {
    let plan = base();
    let budget = tight_budget(&plan);
    let checked = check(plan.clone(), budget).unwrap();
    assert_eq!(checked.bytes[Tier::DEVICE], 3 * BLOCK);
    assert_eq!(checked.into_plan(), plan);
}

#[test]
fn a_read_must_wait_for_its_write() {
    let error = damaged(|plan| plan.instructions[ADD].waits.clear());
    let CheckError::UnorderedRead { reader, spot, writer } = &error else { panic!("{error}") };
    assert!(is(reader, ADD) && is(writer, BRING_X));
    assert_eq!((spot.value.as_deref(), spot.tier), (Some("x"), Tier::DEVICE));
    assert_eq!(
        error.to_string(),
        "Add `add` of layer 0 (instruction 2) reads `x` at device bytes 0..256, but does not wait \
         for copy of `x` to the device (instruction 0), which writes there"
    );
}

#[test]
fn a_repetition_must_not_overtake_the_one_before() {
    let overtake = |plan: &mut Plan| plan.instructions[BRING_X].waits.clear();
    let error = damaged(|plan| {
        overtake(plan);
        plan.results.clear();
    });
    let CheckError::OverwriteBeforeRead { writer, reader, .. } = &error else { panic!("{error}") };
    assert!(is(writer, BRING_X) && is(reader, ADD));
    // The host waits for the result before it issues the next repetition.
    let mut plan = base();
    overtake(&mut plan);
    verify(&plan, tight_budget(&plan)).unwrap();
}

#[test]
fn a_single_repetition_has_nobody_to_overtake() {
    let mut plan = base();
    plan.instructions[BRING_X].waits.clear();
    plan.step[0].times = 1;
    verify(&plan, tight_budget(&plan)).unwrap();
}

#[test]
fn two_writes_must_be_ordered() {
    let error = damaged(|plan| {
        copy(plan, Link::HOST_TO_DEVICE, 2, 1, &[W], &[]);
        plan.segments[0].instructions.end += 1;
    });
    let CheckError::UnorderedWrite { writer, earlier, .. } = &error else { panic!("{error}") };
    assert!(is(writer, 4) && is(earlier, ADD));
}

#[test]
fn bytes_must_hold_the_right_value() {
    let found = |error: &CheckError| match error {
        CheckError::WrongContent { found, .. } => found.clone(),
        _ => panic!("{error}"),
    };
    let error = damaged(|plan| {
        plan.bytes[Tier::HOST] += BLOCK;
        copy_of(plan, BRING_W).from.offset = 3 * BLOCK;
    });
    assert_eq!(found(&error), Found::Nothing);
    let error = damaged(|plan| {
        copy_of(plan, BRING_X).to.offset = BLOCK;
        copy_of(plan, BRING_W).to.offset = 0;
    });
    assert_eq!(found(&error), Found::Other("w".to_owned()));
    assert_eq!(
        error.to_string(),
        "Add `add` of layer 0 (instruction 2) expects `x` at device bytes 0..256, where `w` lies"
    );
}

/// The kernel reads a weight that another kernel has changed elsewhere.
#[test]
fn outdated_values_are_refused() {
    let mut plan = empty(4, 1);
    let w = value(&mut plan, "w", TensorClass::Gradient);
    let [y, partials] = ["y", "partials"].map(|n| value(&mut plan, n, TensorClass::Scratch));
    let away = copy(&mut plan, Link::DEVICE_TO_HOST, 0, 0, &[w], &[]);
    let back = copy(&mut plan, Link::HOST_TO_DEVICE, 1, 0, &[w], &[away]);
    let reads = [(w, 1), (w, 0)];
    kernel(&mut plan, Kernel::Accumulate, &reads, &[(w, 0), (partials, 2)], &[back]);
    kernel(&mut plan, Kernel::Scale, &[(w, 1)], &[(y, 3)], &[]);
    segment(&mut plan, "body", 1);
    lasting(&mut plan, w, &[(Tier::DEVICE, 0)]);
    let error = refused(&plan);
    let CheckError::WrongContent { reader, found: Found::Stale, .. } = &error else {
        panic!("{error}")
    };
    assert!(is(reader, 3));
    // Where it was changed, it is current.
    let Work::Compute(last) = &mut plan.instructions[3].work else { unreachable!() };
    (last.places[0], last.reads[0].offset) = (0, 0);
    verify(&plan, tight_budget(&plan)).unwrap();
}

/// The weight is brought twice, the second time half a block further.
#[test]
fn a_value_must_lie_at_its_own_bytes() {
    let mut plan = empty(3, 1);
    let w = value(&mut plan, "w", TensorClass::Gradient);
    let y = value(&mut plan, "y", TensorClass::Activation);
    copy(&mut plan, Link::HOST_TO_DEVICE, 0, 0, &[w], &[]);
    let again = copy(&mut plan, Link::HOST_TO_DEVICE, 0, 0, &[w], &[]);
    copy_of(&mut plan, 1).to.offset = BLOCK / 2;
    kernel(&mut plan, Kernel::Scale, &[(w, 0)], &[(y, 2)], &[again]);
    segment(&mut plan, "body", 1);
    lasting(&mut plan, w, &[(Tier::HOST, 0)]);
    let error = refused(&plan);
    let CheckError::WrongContent { spot, found: Found::Shifted, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(spot.bytes, 128..256);
}

#[test]
fn a_wait_must_have_something_to_wait_for() {
    let error = damaged(|plan| plan.step[0].times = 1);
    let CheckError::WaitNeverRecorded { waiter, awaited } = &error else { panic!("{error}") };
    assert!(is(waiter, BRING_X) && is(awaited, ADD));
}

#[test]
fn what_lasts_must_be_at_rest_after_the_step() {
    // The weight's home is overwritten.
    let error = damaged(|plan| {
        plan.results.clear();
        copy_of(plan, TAKE_Y).to.offset = BLOCK;
        plan.step[0].times = 1;
        plan.instructions[BRING_X].waits.clear();
    });
    assert_eq!(
        error.to_string(),
        "after the step, `w` at host bytes 256..512 of tensor `w` must rest, but `y` lies there"
    );
    // One of two places is not brought up to date.
    let mut plan = empty(3, 1);
    let [x, sum, partials] =
        ["x", "sum", "partials"].map(|name| value(&mut plan, name, TensorClass::Gradient));
    let add =
        kernel(&mut plan, Kernel::Accumulate, &[(x, 0), (sum, 1)], &[(sum, 1), (partials, 2)], &[]);
    segment(&mut plan, "body", 1);
    lasting(&mut plan, x, &[(Tier::DEVICE, 0)]);
    lasting(&mut plan, sum, &[(Tier::DEVICE, 1), (Tier::HOST, 0)]);
    let error = refused(&plan);
    assert!(matches!(error, CheckError::NotAtRest { found: Found::Stale, .. }), "{error}");
    copy(&mut plan, Link::DEVICE_TO_HOST, 1, 0, &[sum], &[add]);
    plan.segments[0].instructions.end += 1;
    verify(&plan, tight_budget(&plan)).unwrap();
}

#[test]
fn a_flush_starts_and_ends_at_rest() {
    let mut plan = base();
    let flush = copy(&mut plan, Link::HOST_TO_DEVICE, 0, 1, &[W], &[]);
    plan.flush = Some(segment(&mut plan, "flush", 1));
    plan.step.pop();
    verify(&plan, tight_budget(&plan)).unwrap();
    // What the step left on the device is unknown to a flush.
    let into = copy_of(&mut plan, 4).clone();
    let work = Work::Copy(Copy { from: into.to, to: into.from, ..into });
    plan.instructions[flush.index()].work = work;
    assert!(matches!(refused(&plan), CheckError::WrongContent { found: Found::Nothing, .. }));
}

#[test]
fn results_must_be_current() {
    let error = damaged(|plan| {
        // Written again after it was copied.
        kernel(plan, Kernel::Scale, &[(X, 0)], &[(Y, 2)], &[InstructionId(TAKE_Y as u32)]);
        plan.segments[0].instructions.end += 1;
        plan.instructions[BRING_X].waits = vec![InstructionId(4)];
    });
    let CheckError::WrongContent { reader: Actor::Host, found: Found::Stale, .. } = &error else {
        panic!("{error}")
    };
}

/// An outdated value wanders through a chain of copies, one place further in each repetition: what
/// the end of the step finds would depend on how many there are.
#[test]
fn repetitions_must_settle() {
    let mut plan = empty(6, 5);
    let [x, w, partials] =
        ["x", "w", "partials"].map(|name| value(&mut plan, name, TensorClass::Gradient));
    lasting(&mut plan, x, &[(Tier::DEVICE, 0)]);
    lasting(&mut plan, w, &[(Tier::DEVICE, 1)]);
    let out = |plan: &mut Plan, device: usize, host: usize, waits: &[InstructionId]| {
        copy(plan, Link::DEVICE_TO_HOST, device, host, &[w], waits)
    };
    let back = |plan: &mut Plan, device: usize, host: usize, waits: &[InstructionId]| {
        copy(plan, Link::HOST_TO_DEVICE, device, host, &[w], waits)
    };
    // Device 2 gets the old version; then host 0, device 3, host 1, device 4 and host 2 the new one.
    let mut last = out(&mut plan, 1, 3, &[]);
    last = back(&mut plan, 2, 3, &[last]);
    last =
        kernel(&mut plan, Kernel::Accumulate, &[(x, 0), (w, 1)], &[(w, 1), (partials, 5)], &[last]);
    last = out(&mut plan, 1, 0, &[last]);
    for place in 0..2 {
        last = back(&mut plan, 3 + place, place, &[last]);
        last = out(&mut plan, 3 + place, place + 1, &[last]);
    }
    segment(&mut plan, "fill", 1);
    let chain: [(Link, usize, usize); 5] = [
        (Link::DEVICE_TO_HOST, 4, 2),
        (Link::HOST_TO_DEVICE, 4, 1),
        (Link::DEVICE_TO_HOST, 3, 1),
        (Link::HOST_TO_DEVICE, 3, 0),
        (Link::DEVICE_TO_HOST, 2, 0),
    ];
    for (link, device, host) in chain {
        let mut waits = vec![last];
        if plan.instructions.len() == plan.segments[0].instructions.end {
            // From one repetition to the next.
            waits.push(InstructionId(plan.instructions.len() as u32 + 4));
        }
        last = copy(&mut plan, link, device, host, &[w], &waits);
    }
    segment(&mut plan, "wander", 9);
    let error = refused(&plan);
    let CheckError::Unsettled { segment, times } = &error else { panic!("{error}") };
    assert_eq!((segment.as_str(), *times), ("wander", 4));
    // Few repetitions can be followed one by one.
    plan.step[1].times = 4;
    verify(&plan, tight_budget(&plan)).unwrap();
}

#[test]
fn waits_within_a_queue_are_harmless() {
    let mut plan = base();
    plan.instructions[BRING_W].waits.push(InstructionId(BRING_X as u32));
    assert_eq!(plan.queue(InstructionId(BRING_W as u32)), Queue::HOST_TO_DEVICE);
    verify(&plan, tight_budget(&plan)).unwrap();
}
