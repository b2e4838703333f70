//! Whole steps of a plan, fed and traced.

use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions, Fault, FaultKind};
use storm_device::{
    DeviceError, NullDevice, NullOptions, PlanDevice, Span, Trace, bytes_of, bytes_of_mut,
};
use storm_exec::trace::{
    ReportFacts, StallCause, TierLimits, occupancy, summarize, write_chrome, write_html,
};
use storm_exec::{ExecError, Feed, Planned};
use storm_graph::{DType, Graph, Op, Tensor, TensorClass};
use storm_plan::{HardwareProfile, InstructionId, Link, PerTier, Plan, Queue, Tier, simulate};
use storm_testing::{
    ELEMENTS, GROUP, LOSS_RESULTS, NORM_RESULT, Plain, SHIFT_INPUT, SLOT, StepResults, X_INPUTS,
    numbers, parameter, tiny_plan,
};

const REPETITIONS: usize = 3;
const MICRO_BATCHES: usize = GROUP * (1 + REPETITIONS);

/// Feeds numbers and records the results.
#[derive(Default)]
struct Numbers {
    x: Vec<Vec<f32>>,
    shift: Vec<f32>,
    results: StepResults,
    /// A micro-batch without data.
    missing: Option<usize>,
}

impl Numbers {
    fn of_step(step: usize) -> Numbers {
        let x = (0..MICRO_BATCHES).map(|index| numbers(step * 100 + index)).collect();
        Numbers { x, shift: numbers(50 + step), ..Numbers::default() }
    }
}

#[derive(Debug, PartialEq)]
enum FeedError {
    Exec(ExecError),
    Missing(usize),
}

impl From<ExecError> for FeedError {
    fn from(error: ExecError) -> FeedError {
        FeedError::Exec(error)
    }
}

impl Feed for Numbers {
    type Error = FeedError;

    fn input(
        &mut self,
        index: usize,
        tensor: &Tensor,
        micro_batch: Option<usize>,
    ) -> Result<&[u8], FeedError> {
        match micro_batch {
            None => {
                assert_eq!((index, tensor.name.as_str()), (SHIFT_INPUT, "shift"));
                Ok(bytes_of(&self.shift))
            }
            Some(number) if self.missing == Some(number) => Err(FeedError::Missing(number)),
            Some(number) => {
                assert_eq!(index, X_INPUTS[number % GROUP]);
                Ok(bytes_of(&self.x[number]))
            }
        }
    }

    fn result(&mut self, index: usize, tensor: &Tensor, micro_batch: Option<usize>, bytes: &[u8]) {
        let mut values = vec![0.0f32; ELEMENTS];
        bytes_of_mut(&mut values).copy_from_slice(bytes);
        match micro_batch {
            None => {
                assert_eq!((index, tensor.name.as_str()), (NORM_RESULT, "norm"));
                self.results.norm = values;
            }
            Some(number) => {
                assert_eq!(index, LOSS_RESULTS[number % GROUP]);
                assert_eq!(number, self.results.losses.len(), "losses come in order");
                self.results.losses.push(values);
            }
        }
    }
}

fn planned(options: CpuPlanOptions) -> Planned<CpuPlanDevice> {
    Planned::commit(tiny_plan(REPETITIONS), options).unwrap()
}

fn read<D: PlanDevice>(planned: &mut Planned<D>, name: &str) -> Vec<f32> {
    let mut values = vec![0.0; ELEMENTS];
    planned.read(name, &mut values).unwrap();
    values
}

/// Several steps with a flush in between, compared with plain arithmetic.
fn check_steps(options: CpuPlanOptions) {
    let mut plain = Plain::new(numbers(7));
    let mut planned = planned(options.clone());
    assert_eq!(planned.micro_batches(), MICRO_BATCHES);
    planned.write("w", &plain.w).unwrap();
    for step in 0..4 {
        let mut feed = Numbers::of_step(step);
        let expected = plain.step(&feed.x, &feed.shift);
        planned.step(&mut feed).unwrap();
        assert_eq!(feed.results, expected, "step {step}, {options:?}");
        if step == 1 {
            plain.flush();
            planned.flush(&mut feed).unwrap();
        }
    }
    assert_eq!(read(&mut planned, "w"), plain.w);
    assert_eq!(read(&mut planned, "m"), plain.m);
}

#[test]
fn steps_are_exact() {
    check_steps(CpuPlanOptions::default());
    check_steps(CpuPlanOptions { commands_max: 1, trace: true, ..CpuPlanOptions::default() });
    for seed in 0..50 {
        let chaos_seed = Some(seed);
        check_steps(CpuPlanOptions { chaos_seed, trace: true, ..CpuPlanOptions::default() });
    }
}

#[test]
fn faults_are_reported_by_the_step() {
    for queue in [Queue::COMPUTE, Queue::HOST_TO_DEVICE, Queue::DEVICE_TO_HOST] {
        let fault = Fault { queue, after: 3, kind: FaultKind::Error };
        let mut planned =
            planned(CpuPlanOptions { fault: Some(fault), ..CpuPlanOptions::default() });
        let error = planned.step(&mut Numbers::of_step(0)).unwrap_err();
        let FeedError::Exec(ExecError::Device(DeviceError::Instruction { .. })) = &error else {
            panic!("{error:?}");
        };
        assert_eq!(planned.step(&mut Numbers::of_step(0)).unwrap_err(), error);
        assert_eq!(planned.flush(&mut Numbers::of_step(0)).unwrap_err(), error);
    }
}

/// A feed that fails in the middle ends the step, and no other step can follow. One that fails
/// before anything was issued does no harm.
#[test]
fn a_step_is_not_taken_up_in_the_middle() {
    let mut planned = planned(CpuPlanOptions::default());
    let mut feed = Numbers { missing: Some(1), ..Numbers::of_step(0) };
    assert_eq!(planned.step(&mut feed).unwrap_err(), FeedError::Missing(1));
    planned.step(&mut Numbers::of_step(0)).unwrap();

    let mut feed = Numbers { missing: Some(5), ..Numbers::of_step(0) };
    assert_eq!(planned.step(&mut feed).unwrap_err(), FeedError::Missing(5));
    let refused = DeviceError::OutOfTurn { segment: "first group", expected: "middle group" };
    let error = planned.step(&mut Numbers::of_step(0)).unwrap_err();
    assert_eq!(error, FeedError::Exec(ExecError::Device(refused)));
}

#[test]
fn lasting_tensors_are_known_by_name() {
    let mut planned = planned(CpuPlanOptions::default());
    planned.write("m", &numbers(4)).unwrap();
    let mut part = [0.0f32; 3];
    planned.read_part("m", ELEMENTS - 3, &mut part).unwrap();
    assert_eq!(part, numbers(4)[ELEMENTS - 3..]);
    assert_eq!(planned.tensor("w").unwrap().class, parameter());

    let error = planned.write("v", &numbers(4)).unwrap_err();
    assert_eq!(error.to_string(), "there is no `v`; there are: gradient, m, w");
    let error = planned.read_part("m", ELEMENTS - 2, &mut part).unwrap_err();
    assert!(error.to_string().contains("20001 elements of f32 do not fit `m`: 20000"), "{error}");
    let error = planned.write("m", &[1i32; ELEMENTS]).unwrap_err();
    assert!(error.to_string().contains("20000 elements of i32 do not fit `m`"), "{error}");
}

/// Tensors are computed on the device wherever they are kept, from given or persistent tensors,
/// and what is kept on the device stays unchanged.
#[test]
fn lasting_tensors_are_made_on_the_device() {
    let mut planned = planned(CpuPlanOptions::default());
    planned.write("gradient", &numbers(1)).unwrap();

    let sum = |a: &str, b: &str| {
        let mut graph = Graph::new();
        let [a, b] = [a, b].map(|name| graph.input(name, [ELEMENTS], DType::F32));
        graph.apply("sum", Op::Add { a, b }).unwrap();
        graph
    };
    let add = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
    let (three, four) = (numbers(3), numbers(4));
    let given = [("three", bytes_of(&three)), ("four", bytes_of(&four))];
    // Kept on the host only, computed by way of the device.
    planned.initialize("m", &sum("three", "four"), 0, &given).unwrap();
    assert_eq!(read(&mut planned, "m"), add(&three, &four));
    // From the host, to both.
    planned.initialize("w", &sum("m", "three"), 0, &given).unwrap();
    let w = add(&read(&mut planned, "m"), &three);
    let places = planned.plan().lasting[0].places.clone();
    assert_eq!(places.iter().map(|p| p.tier).collect::<Vec<_>>(), [Tier::DEVICE, Tier::HOST]);
    assert_eq!(read(&mut planned, "w"), w);
    let mut plain = Plain { w, m: read(&mut planned, "m") };
    assert_eq!(read(&mut planned, "gradient"), numbers(1));

    let mut feed = Numbers::of_step(0);
    planned.step(&mut feed).unwrap();
    assert_eq!(feed.results, plain.step(&feed.x, &feed.shift));

    let error = planned.initialize("w", &sum("five", "m"), 0, &given).unwrap_err();
    assert!(error.to_string().starts_with("there is no `five`"), "{error}");
    let error = planned.initialize("w", &sum("three", "m"), 0, &[("three", &[0; 7])]).unwrap_err();
    assert!(error.to_string().contains("7 bytes do not fit `three`"), "{error}");
}

/// The null device and the simulator agree on a whole step.
#[test]
fn the_null_device_agrees_with_the_simulator() {
    let profile = HardwareProfile::builtin("reference").unwrap();
    let plan = tiny_plan(REPETITIONS);
    let predicted = simulate(&plan, &profile);
    let options = NullOptions::of_profile(&plan, &profile);
    let mut planned: Planned<NullDevice> = Planned::commit(plan, options).unwrap();
    for step in 0..2 {
        let start = planned.device().now();
        planned.step(&mut Numbers::of_step(step)).unwrap();
        planned.synchronize().unwrap();
        let seconds = (planned.device().now() - start).as_secs_f64();
        // Durations are rounded to nanoseconds.
        let rounding = 100e-9;
        assert!((seconds - predicted.step_seconds).abs() < rounding, "{seconds} {predicted:?}");
    }
    let trace = planned.trace().unwrap().unwrap();
    let summary = summarize(planned.plan(), &trace);
    for queue in planned.plan().queues() {
        let busy = summary.queues[queue.index()].busy_ns as f64 * 1e-9;
        assert!((busy - predicted.busy_seconds[queue]).abs() < 100e-9);
    }
}

/// A null device on which kernels take 100 ns, and copies 30 to the device and 400 to the host.
fn slow_to_host() -> Planned<NullDevice> {
    let plan = tiny_plan(REPETITIONS);
    let seconds = |id: InstructionId| match plan.queue(id) {
        Queue::COMPUTE => 100e-9,
        Queue::HOST_TO_DEVICE => 30e-9,
        _ => 400e-9,
    };
    let instruction_seconds = plan.ids().map(seconds).collect();
    let options = NullOptions { instruction_seconds, issue_seconds: 0.0, trace: true };
    Planned::commit(plan, options).unwrap()
}

#[test]
fn a_summary_says_what_was_hidden_and_what_was_not() {
    let mut planned = slow_to_host();
    planned.step(&mut Numbers::of_step(0)).unwrap();
    let trace = planned.trace().unwrap().unwrap();
    let plan = planned.plan();
    let summary = summarize(plan, &trace);

    let kernels = &summary.queues[Queue::COMPUTE.index()];
    assert_eq!(kernels.busy_ns, 100 * kernels.instructions as u64);
    let stalled: u64 = summary.stalls.iter().map(|stall| stall.ns).sum();
    assert_eq!(kernels.busy_ns + stalled, summary.total_ns);
    let worst = summary.stalls[0].cause;
    assert_eq!(worst, StallCause::Copy(Link::DEVICE_TO_HOST, TensorClass::Activation), "{summary}");
    assert!(summary.stalls.iter().any(|stall| stall.cause == StallCause::Drain));

    let find = |link, class| {
        let mut transfers = summary.transfers.iter();
        *transfers.find(|t| t.link == link && t.class == class).unwrap()
    };
    let activations = find(Link::DEVICE_TO_HOST, TensorClass::Activation);
    // Two tensors of each micro-batch, and the norm.
    assert_eq!(activations.bytes, ((2 * MICRO_BATCHES + 1) * ELEMENTS * 4) as u64);
    assert_eq!(activations.busy_ns, (2 * MICRO_BATCHES as u64 + 1) * 400);
    assert!(activations.hidden_share() > 0.1 && activations.hidden_share() < 0.9);
    // The moments are fetched while the last group computes.
    assert_eq!(find(Link::HOST_TO_DEVICE, TensorClass::OptimizerState).hidden_share(), 1.0);

    // Two persistent tensors and up to five in use, of eight slots.
    assert!((1..=7 * ELEMENTS * 4).contains(&summary.peak_bytes[Tier::DEVICE]));
    // Everything but one of the two tensors that go to the host and back.
    assert_eq!(summary.peak_bytes[Tier::HOST], 9 * ELEMENTS * 4);
    let resting = occupancy(plan, &trace)[0].bytes;
    assert_eq!(resting, 2 * ELEMENTS * 4);
    assert!(resting < SLOT * 8);

    let text = summary.to_string();
    for part in ["activations to the host", "the last copies", "% hidden"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_trace_opens_in_chrome() {
    let mut planned = slow_to_host();
    planned.step(&mut Numbers::of_step(0)).unwrap();
    let trace = planned.trace().unwrap().unwrap();
    let mut text = Vec::new();
    write_chrome(planned.plan(), &trace, &mut text).unwrap();
    let parsed: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let events = parsed["traceEvents"].as_array().unwrap();
    let of_phase =
        |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
    assert_eq!(of_phase("X").len(), trace.spans.len());
    let mut spans = of_phase("X").into_iter();
    let copy = spans.find(|event| event["name"] == "copy of `a[0]` to the host").unwrap();
    assert_eq!((&copy["cat"], &copy["tid"]), (&"copy".into(), &2.into()));
    assert_eq!(copy["args"]["tensor"], "a[0]");
    assert_eq!(copy["args"]["bytes"], ELEMENTS * 4);
    assert_eq!(copy["args"]["class"], "activations");
    assert_eq!(copy["args"]["waited_for"], "Scale `a[0]` of layer 0");
    assert_eq!(copy["dur"], 0.4);
    let names = of_phase("M").into_iter().filter(|event| event["name"] == "thread_name");
    assert_eq!(names.count(), 3);

    // Every arrow ends where it says, and starts inside the span that was waited for.
    let (starts, ends) = (of_phase("s"), of_phase("f"));
    assert!(!starts.is_empty() && starts.len() == ends.len());
    for (start, end) in starts.iter().zip(ends) {
        assert_eq!(start["id"], end["id"]);
        assert!(start["ts"].as_f64() <= end["ts"].as_f64());
        let inside = of_phase("X").into_iter().any(|event| {
            let (from, ts) = (event["ts"].as_f64().unwrap(), start["ts"].as_f64().unwrap());
            let until = from + event["dur"].as_f64().unwrap();
            event["tid"] == start["tid"] && from <= ts && ts < until
        });
        assert!(inside, "{start}");
    }
    assert!(!of_phase("C").is_empty());
}

/// A step of [`slow_to_host`]: its plan, and what the queues did.
fn traced_step() -> (Plan, Trace) {
    let mut planned = slow_to_host();
    planned.step(&mut Numbers::of_step(0)).unwrap();
    let trace = planned.trace().unwrap().unwrap();
    (Plan::clone(planned.plan()), trace)
}

/// The page of a trace, and the data that its script draws.
fn report(plan: &Plan, trace: &Trace, title: &str) -> (String, serde_json::Value) {
    let facts = ReportFacts {
        title: title.to_owned(),
        rows: vec![("speed".to_owned(), title.to_owned())],
        limits: PerTier::new(
            TierLimits { budget_bytes: 10 << 20, beside_plan_bytes: 1 << 20 },
            TierLimits { budget_bytes: 20 << 20, beside_plan_bytes: 0 },
        ),
    };
    let mut page = Vec::new();
    write_html(plan, trace, &facts, &mut page).unwrap();
    let page = String::from_utf8(page).unwrap();
    let (_, data) = page.split_once("id=\"data\">").unwrap();
    let (data, _) = data.split_once("</script>").unwrap();
    let data = serde_json::from_str(data).unwrap();
    (page, data)
}

fn column<'a>(value: &'a serde_json::Value, name: &str) -> impl Iterator<Item = i64> + use<'a> {
    value[name].as_array().unwrap().iter().map(|number| number.as_i64().unwrap())
}

#[test]
fn a_report_shows_what_the_trace_holds() {
    let (plan, trace) = traced_step();
    let summary = summarize(&plan, &trace);
    let (page, data) = report(&plan, &trace, "a step");

    assert_eq!(data["total"], summary.total_ns);
    for queue in summary.queues {
        let lane = &data["lanes"][queue.queue.index()];
        assert_eq!(lane["name"], queue.name);
        assert_eq!(column(lane, "gap").count(), queue.instructions);
        assert_eq!(column(lane, "length").sum::<i64>(), queue.busy_ns as i64);
    }
    let stalled: u64 = summary.stalls.iter().map(|stall| stall.ns).sum();
    assert_eq!(column(&data["stalls"], "length").sum::<i64>(), stalled as i64);
    assert_eq!(data["segments"]["name"].as_array().unwrap().len(), 2 + REPETITIONS);
    for (tier, peak_bytes) in
        [Tier::DEVICE, Tier::HOST].map(|tier| summary.peak_bytes[tier]).iter().enumerate()
    {
        let in_use = column(&data["memory"][tier], "change").scan(0, |bytes, change| {
            *bytes += change;
            Some(*bytes)
        });
        assert_eq!(in_use.max(), Some(*peak_bytes as i64));
    }
    let kinds: Vec<&str> =
        data["kinds"].as_array().unwrap().iter().map(|kind| kind[0].as_str().unwrap()).collect();
    let mut used: Vec<&str> =
        column(&data["instructions"], "kind").map(|kind| kinds[kind as usize]).collect();
    used.sort();
    used.dedup();
    let moved = ["activations", "forward", "inputs", "optimizer-state", "weights"];
    assert_eq!(used, moved, "all kernels of this plan are forward ones");

    // Also in words, for readers who cannot see the picture or run no scripts.
    for part in ["host to device", "activations to the host", "the last copies", "10.0 MiB"] {
        assert!(page.contains(part), "{part} is not in the page");
    }
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
    // Nothing is loaded from elsewhere.
    for part in ["http:", "https:", "//cdn", "src=", "href=", "@import", "url("] {
        assert!(!page.contains(part), "{part} is in the page");
    }
}

/// Names of tensors come from untrusted files.
#[test]
fn names_in_a_report_are_text() {
    let (mut plan, trace) = traced_step();
    let hostile =
        "</script><script>alert(1)</script><!--<img src=x onerror='f()'>\"&amp;\0\u{2028}";
    for value in &mut plan.values {
        value.name = hostile.to_owned();
    }
    for graph in &mut plan.graphs {
        let mut renamed = Graph::new();
        let x = renamed.input("x", [ELEMENTS], DType::F32);
        renamed.apply(hostile, Op::Scale { x, factor: 1.0 }).unwrap();
        *graph = std::sync::Arc::new(renamed);
    }
    let (page, data) = report(&plan, &trace, hostile);
    for part in ["alert(1)</script>", "<img", "<!--"] {
        assert!(!page.contains(part), "{part} is in the page as it is");
    }
    assert_eq!(page.matches("</script>").count(), 2);
    // They are there, as plain text.
    let strings = data["instructions"]["strings"].as_array().unwrap();
    assert!(strings.iter().any(|name| name == hostile));
    assert!(page.contains("<h1>&lt;/script&gt;&lt;script&gt;alert(1)"));
}

#[test]
fn a_report_of_many_spans_is_small() {
    let (mut plan, trace) = traced_step();
    for value in &mut plan.values {
        value.name = format!("layers.27.mlp.gate_up.weight.first_moment of {}", value.name);
    }
    // The same step over and over, with durations like those of real steps.
    let length_ns = trace.spans.iter().map(|span| span.end_ns).max().unwrap() * 10_000;
    let mut spans = Vec::new();
    for queue in plan.queues() {
        for repetition in 0..7_000_u64.div_ceil(trace.spans.len() as u64) {
            let of_queue = trace.spans.iter().filter(|s| plan.queue(s.instruction) == queue);
            let later = |ns: u64| ns * 9_999 + repetition * length_ns;
            spans.extend(of_queue.map(|&span| Span {
                ready_ns: later(span.ready_ns),
                start_ns: later(span.start_ns),
                end_ns: later(span.end_ns),
                ..span
            }));
        }
    }
    assert!(spans.len() >= 7_000);
    let (page, _) = report(&plan, &Trace { spans, left_out: 3 }, "many");
    assert!(page.len() < 1_000_000, "{} bytes", page.len());
    assert!(page.contains("3 more instructions"));
}
