//! Predicted times, worked out by hand and against a simulation without shortcuts.

mod support;

use storm_graph::{TensorClass, Training};
use storm_plan::{
    HardwareProfile, InstructionId, Link, LinkProfile, Plan, Queue, Run, Simulation, Tier, ValueId,
    simulate, simulate_with_timeline, verify,
};
use support::random::Random;
use support::small::{BLOCK, Kernel, copy, empty, input, kernel, lasting, result, segment, value};
use support::toy::toy_plan;
use support::{reference, tight_budget};

/// Kernels take 10 s, copies of one block 4 s in and 8 s out, launches nothing.
fn slow() -> HardwareProfile {
    HardwareProfile {
        kernel_seconds: 10.0,
        launch_seconds: 0.0,
        links: vec![LinkProfile {
            near: Tier::DEVICE,
            far: Tier::HOST,
            to_near_bandwidth: BLOCK as f64 / 4.0,
            to_far_bandwidth: BLOCK as f64 / 8.0,
            duplex_bandwidth: BLOCK as f64 * (1.0 / 4.0 + 1.0 / 8.0),
            latency_seconds: 0.0,
        }],
        ..HardwareProfile::builtin("reference").unwrap()
    }
}

/// Weights `w` in host blocks 0, 1, …, and values for what kernels make of them.
fn streaming(device_blocks: usize, weights: usize) -> (Plan, Vec<ValueId>, Vec<ValueId>) {
    let mut plan = empty(device_blocks, 2 * weights);
    let class = TensorClass::Parameter(Training::Trainable);
    let w: Vec<_> = (0..weights).map(|i| value(&mut plan, &format!("w{i}"), class)).collect();
    let y = (0..weights).map(|i| value(&mut plan, &format!("y{i}"), TensorClass::Activation));
    let y: Vec<_> = y.collect();
    for (block, &w) in w.iter().enumerate() {
        lasting(&mut plan, w, &[(Tier::HOST, block)]);
    }
    (plan, w, y)
}

fn starts(simulation: &Simulation) -> Vec<(f64, f64)> {
    simulation.timeline.iter().map(|span| (span.start_seconds, span.end_seconds)).collect()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1e-30)
}

/// Two weights through two slots: the second comes in behind the first kernel.
#[test]
fn copies_hide_behind_kernels() {
    let (mut plan, w, y) = streaming(4, 2);
    for i in 0..2 {
        let bring = copy(&mut plan, Link::HOST_TO_DEVICE, i, i, &[w[i]], &[]);
        kernel(&mut plan, Kernel::Scale, &[(w[i], i)], &[(y[i], 2 + i)], &[bring]);
    }
    segment(&mut plan, "only", 1);
    verify(&plan, tight_budget(&plan)).unwrap();
    let simulation = simulate_with_timeline(&plan, &slow());
    assert_eq!(starts(&simulation), [(0.0, 4.0), (4.0, 14.0), (4.0, 8.0), (14.0, 24.0)]);
    assert_eq!(simulation.timeline[1].waited_for, Some(InstructionId(0)));
    assert_eq!(simulation.timeline[3].waited_for, None);
    assert_eq!(simulation.step_seconds, 24.0);
    assert_eq!(busy(&simulation), [20.0, 8.0, 0.0]);
    assert_eq!(simulation.busy_share(Queue::HOST_TO_DEVICE), 8.0 / 24.0);
    assert_eq!(simulation.stalls.copy_seconds[Queue::HOST_TO_DEVICE], 4.0);
    assert_eq!(simulation.stalls.total_seconds(), 4.0);
    let [transfer] = simulation.transfers[..] else { panic!("{:?}", simulation.transfers) };
    assert_eq!(transfer.class, TensorClass::Parameter(Training::Trainable));
    assert_eq!((transfer.bytes, transfer.exposed_seconds), (512, 4.0));
    assert_eq!(transfer.hidden_share(), 0.5);
    assert_eq!(simulation.bytes(Queue::HOST_TO_DEVICE), 512);
    assert_eq!(simulation.bytes(Queue::DEVICE_TO_HOST), 0);
}

/// One slot only: the second copy has to wait until the first kernel is done with it, and holds up
/// the third, which has a slot of its own and could go.
#[test]
fn a_waiting_copy_holds_up_its_queue() {
    let (mut plan, w, y) = streaming(5, 3);
    let first = copy(&mut plan, Link::HOST_TO_DEVICE, 0, 0, &[w[0]], &[]);
    let use_first = kernel(&mut plan, Kernel::Scale, &[(w[0], 0)], &[(y[0], 2)], &[first]);
    let second = copy(&mut plan, Link::HOST_TO_DEVICE, 0, 1, &[w[1]], &[use_first]);
    let third = copy(&mut plan, Link::HOST_TO_DEVICE, 1, 2, &[w[2]], &[]);
    kernel(&mut plan, Kernel::Scale, &[(w[2], 1)], &[(y[2], 3)], &[third]);
    kernel(&mut plan, Kernel::Scale, &[(w[1], 0)], &[(y[1], 4)], &[second]);
    segment(&mut plan, "only", 1);
    verify(&plan, tight_budget(&plan)).unwrap();
    let simulation = simulate_with_timeline(&plan, &slow());
    // Alone, the third copy would be done at 8 and its kernel would start at 14.
    let expected =
        [(0.0, 4.0), (4.0, 14.0), (14.0, 18.0), (18.0, 22.0), (22.0, 32.0), (32.0, 42.0)];
    assert_eq!(starts(&simulation), expected);
    assert_eq!(simulation.timeline[2].waited_for, Some(use_first));
    assert_eq!(simulation.timeline[3].waited_for, None);
    assert_eq!(simulation.stalls.copy_seconds[Queue::HOST_TO_DEVICE], 4.0 + 8.0);
}

/// A kernel that needs the bytes which a copy out still reads, and the last copy at the end.
#[test]
fn time_is_laid_to_whoever_held_up_the_kernels() {
    let mut plan = empty(2, 2);
    let x = value(&mut plan, "x", TensorClass::Gradient);
    let y = value(&mut plan, "y", TensorClass::Activation);
    lasting(&mut plan, x, &[(Tier::DEVICE, 0)]);
    let take = InstructionId(1);
    let make = kernel(&mut plan, Kernel::Scale, &[(x, 0)], &[(y, 1)], &[take]);
    copy(&mut plan, Link::DEVICE_TO_HOST, 1, 0, &[y], &[make]);
    segment(&mut plan, "body", 3);
    verify(&plan, tight_budget(&plan)).unwrap();
    let simulation = simulate(&plan, &slow());
    assert_eq!(simulation.step_seconds, 3.0 * (10.0 + 8.0));
    assert_eq!(simulation.stalls.copy_seconds[Queue::DEVICE_TO_HOST], 2.0 * 8.0);
    assert_eq!(simulation.stalls.drain_seconds, 8.0);
    assert_eq!(simulation.stalls.total_seconds() + 30.0, simulation.step_seconds);
    let [transfer] = simulation.transfers[..] else { panic!("{:?}", simulation.transfers) };
    assert_eq!((transfer.class, transfer.queue), (TensorClass::Activation, Queue::DEVICE_TO_HOST));
    assert_eq!((transfer.exposed_seconds, transfer.hidden_share()), (24.0, 0.0));
    assert_eq!(simulation.segments[0].seconds, simulation.step_seconds);
    assert!(simulation.timeline.is_empty());
}

/// Launches take 15 s, kernels 10: the compute queue waits for the host.
#[test]
fn a_slow_host_holds_up_everything() {
    let mut plan = empty(2, 0);
    let x = value(&mut plan, "x", TensorClass::Gradient);
    let y = value(&mut plan, "y", TensorClass::Activation);
    lasting(&mut plan, x, &[(Tier::DEVICE, 0)]);
    kernel(&mut plan, Kernel::Scale, &[(x, 0)], &[(y, 1)], &[]);
    segment(&mut plan, "body", 4);
    let simulation = simulate(&plan, &HardwareProfile { launch_seconds: 15.0, ..slow() });
    assert_eq!(simulation.step_seconds, 4.0 * 15.0 + 10.0);
    assert_eq!(simulation.stalls.launch_seconds, 15.0 + 3.0 * 5.0);
}

/// The host reads a result of every repetition before it issues the next one.
#[test]
fn the_host_waits_for_results_and_inputs() {
    let mut plan = empty(2, 2);
    let x = value(&mut plan, "x", TensorClass::Input);
    let y = value(&mut plan, "y", TensorClass::Activation);
    let bring = copy(&mut plan, Link::HOST_TO_DEVICE, 0, 0, &[x], &[]);
    let make = kernel(&mut plan, Kernel::Scale, &[(x, 0)], &[(y, 1)], &[bring]);
    let take = copy(&mut plan, Link::DEVICE_TO_HOST, 1, 1, &[y], &[make]);
    segment(&mut plan, "body", 5);
    input(&mut plan, x, 0, &[bring]);
    result(&mut plan, y, 1, &[take]);
    verify(&plan, tight_budget(&plan)).unwrap();
    let simulation = simulate(&plan, &slow());
    assert_eq!(simulation.step_seconds, 5.0 * (4.0 + 10.0 + 8.0));
}

/// Each direction alone is fast, both at once share a connection.
#[test]
fn both_directions_share_the_connection() {
    let mut plan = empty(2, 2);
    let class = TensorClass::Gradient;
    let [x, y] = ["x", "y"].map(|name| value(&mut plan, name, class));
    lasting(&mut plan, x, &[(Tier::HOST, 0)]);
    lasting(&mut plan, y, &[(Tier::DEVICE, 1)]);
    copy(&mut plan, Link::HOST_TO_DEVICE, 0, 0, &[x], &[]);
    copy(&mut plan, Link::DEVICE_TO_HOST, 1, 1, &[y], &[]);
    segment(&mut plan, "body", 1);
    verify(&plan, tight_budget(&plan)).unwrap();
    let mut half = slow();
    half.links[0].duplex_bandwidth /= 2.0;
    // 4 s in, 8 s out; at half speed while both go: all of the way in, and as long on the way out.
    let simulation = simulate(&plan, &half);
    assert_eq!(busy(&simulation), [0.0, 8.0, 12.0]);
    plan.instructions.pop();
    plan.segments[0].instructions.end = 1;
    assert_eq!(busy(&simulate(&plan, &half)), [0.0, 4.0, 0.0]);
}

/// Copies out fall behind by a little in each repetition until the ring is full: what holds after
/// a few repetitions does not hold for ever.
#[test]
fn a_queue_that_falls_behind_is_noticed() {
    let mut plan = empty(1 + 12, 12);
    let x = value(&mut plan, "x", TensorClass::Gradient);
    lasting(&mut plan, x, &[(Tier::DEVICE, 0)]);
    // Twelve kernels of 10 s and twelve copies out of 11 s in a repetition: a slot is free again
    // long before it is needed, at first.
    for slot in 0..12 {
        let y = value(&mut plan, &format!("y{slot}"), TensorClass::Activation);
        let take = InstructionId(2 * slot as u32 + 1);
        let make = kernel(&mut plan, Kernel::Scale, &[(x, 0)], &[(y, 1 + slot)], &[take]);
        copy(&mut plan, Link::DEVICE_TO_HOST, 1 + slot, slot, &[y], &[make]);
    }
    segment(&mut plan, "body", 500);
    verify(&plan, tight_budget(&plan)).unwrap();
    let mut profile = slow();
    profile.links[0].to_far_bandwidth = BLOCK as f64 / 11.0;
    profile.links[0].duplex_bandwidth = 1e9;
    let simulation = simulate_with_timeline(&plan, &profile);
    assert!(simulation.timeline.len() < 20 * plan.instructions.len(), "most are skipped");
    let followed = reference::run(&plan, &plan.step, &profile).unwrap();
    assert!(close(simulation.step_seconds, followed), "{} {followed}", simulation.step_seconds);
    let busy = simulation.busy_seconds[Queue::COMPUTE] + simulation.stalls.total_seconds();
    assert!(close(busy, simulation.step_seconds), "{busy} of {}", simulation.step_seconds);
}

/// Random machines on which anything may be what holds up the rest.
fn random_profile(random: &mut Random) -> HardwareProfile {
    let mut factor = || 10f64.powf(random.below(300) as f64 / 100.0 - 1.5);
    let base = HardwareProfile::builtin("reference").unwrap();
    let (inward, outward) = (1e8 * factor(), 1e8 * factor());
    HardwareProfile {
        data_bandwidth: Some(1e8 * factor()),
        kernel_seconds: 3e-6 * factor(),
        launch_seconds: 1e-6 * factor(),
        links: vec![LinkProfile {
            near: Tier::DEVICE,
            far: Tier::HOST,
            to_near_bandwidth: inward,
            to_far_bandwidth: outward,
            duplex_bandwidth: inward + outward,
            latency_seconds: 3e-6 * factor(),
        }],
        ..base
    }
}

/// No plan that passes the checker can get stuck, and skipping repetitions changes no result.
#[test]
fn random_plans_run_to_their_end_as_predicted() {
    let mut random = Random(7);
    let (mut long, mut skipped) = (0, 0);
    for seed in 0..10_000 {
        let plan = toy_plan(seed);
        verify(&plan, tight_budget(&plan)).unwrap_or_else(|e| panic!("plan {seed}: {e}"));
        let profile = random_profile(&mut random);
        let simulation = simulate_with_timeline(&plan, &profile);
        let instructions = |run: &Run| run.times * plan.segment(run.segment).instructions.len();
        let all: usize = plan.step.iter().map(instructions).sum();
        long += usize::from(plan.step.iter().any(|run| run.times > 10));
        skipped += usize::from(simulation.timeline.len() < all / 2);
        let end = reference::run(&plan, &plan.step, &profile)
            .unwrap_or_else(|e| panic!("plan {seed}: {e}"));
        assert!(close(simulation.step_seconds, end), "plan {seed}: {simulation:?}, not {end}");
        let flush = plan.flush.map(|segment| Run { segment, times: 1 });
        let flush = flush.map(|run| reference::run(&plan, &[run], &profile).unwrap());
        assert_eq!(simulation.flush_seconds.is_some(), flush.is_some());
        assert!(simulation.flush_seconds.zip(flush).is_none_or(|(a, b)| close(a, b)));
        adds_up(&simulation);
    }
    assert!(
        long > 1_000 && skipped * 10 > long * 9,
        "{skipped} of {long} long plans are shortened"
    );
}

/// How long kernels and copies into the device and out of it take.
fn busy(simulation: &Simulation) -> [f64; 3] {
    [Queue::COMPUTE, Queue::HOST_TO_DEVICE, Queue::DEVICE_TO_HOST]
        .map(|queue| simulation.busy_seconds[queue])
}

/// Whatever the compute queue does not work, somebody is blamed for.
fn adds_up(simulation: &Simulation) {
    let busy = simulation.busy_seconds[Queue::COMPUTE];
    assert!(
        close(busy + simulation.stalls.total_seconds(), simulation.step_seconds),
        "{simulation:?}"
    );
    let segments: f64 = simulation.segments.iter().map(|segment| segment.seconds).sum();
    assert!(close(segments, simulation.step_seconds));
    for (queue, &seconds) in simulation.busy_seconds.iter() {
        assert!((0.0..=1.0 + 1e-9).contains(&simulation.busy_share(queue)));
        if [Queue::HOST_TO_DEVICE, Queue::DEVICE_TO_HOST].contains(&queue) {
            let transfers = simulation.transfers.iter().filter(|t| t.queue == queue);
            let busy: f64 = transfers.map(|transfer| transfer.busy_seconds).sum();
            assert!(close(busy, seconds));
        }
    }
}
