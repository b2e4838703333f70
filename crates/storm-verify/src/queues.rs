//! Checks the queues of a device: small plans with injected delays, compared with plain arithmetic.

use std::collections::BTreeMap;
use storm_device::{PlanDevice, Span, Trace, bytes_of, bytes_of_mut};
use storm_exec::{ExecError, Feed, Planned};
use storm_graph::Tensor;
use storm_plan::{InstructionId, PerQueue, Plan};
use storm_testing::{
    ELEMENTS, GROUP, LOSS_RESULTS, NORM_RESULT, Plain, SHIFT_INPUT, StepResults, X_INPUTS, numbers,
    tiny_plan,
};

/// Results for one plan with one seed of delays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueReport {
    /// Groups of micro-batches in a step.
    pub groups: usize,
    /// Seed of the delays. `None` without delays.
    pub chaos_seed: Option<u64>,
    /// Number of instructions whose recorded times were checked. 0 if the device records none.
    pub spans: usize,
    /// The problem found, if any.
    pub problem: Option<String>,
}

impl QueueReport {
    /// Whether all results were bit-exact and all instructions ran in order.
    pub fn passed(&self) -> bool {
        self.problem.is_none()
    }
}

/// Steps of each plan.
const STEPS: usize = 4;
/// The step after which the queues are flushed.
const FLUSHED: usize = 1;
/// Clock skew allowed between queues.
const CLOCK_NS_MAX: u64 = 2_000;

/// Runs small plans on a device, without delays and with `seeds` seeds of them. A plan has a
/// repeated group, tensors offloaded to the host and fetched back, and an update whose state stays
/// there. `options` receives the seed and the previous device, which may be reused. Recorded times
/// are also checked.
///
/// # Errors
/// The device failed.
pub fn verify_plan_device<D: PlanDevice>(
    seeds: u64,
    mut options: impl FnMut(Option<u64>, Option<D>) -> D::Options,
) -> Result<Vec<QueueReport>, ExecError> {
    let mut before = None;
    let mut reports = Vec::new();
    for chaos_seed in std::iter::once(None).chain((0..seeds).map(Some)) {
        let repetitions = 2 + chaos_seed.map_or(0, |seed| seed as usize % 4);
        let options = options(chaos_seed, before.take());
        let mut planned: Planned<D> = Planned::commit(tiny_plan(repetitions), options)?;
        let (spans, problem) = match run(&mut planned)? {
            Ok(spans) => (spans, None),
            Err(problem) => (0, Some(problem)),
        };
        reports.push(QueueReport { groups: 1 + repetitions, chaos_seed, spans, problem });
        before = Some(planned.into_device());
    }
    Ok(reports)
}

/// Runs a small plan on a device that is expected to fail, and returns its error. `None` if it did
/// not fail.
pub fn failure_of_plan<D: PlanDevice>(options: D::Options) -> Option<ExecError> {
    let mut planned: Planned<D> = match Planned::commit(tiny_plan(2), options) {
        Ok(planned) => planned,
        Err(error) => return Some(error),
    };
    run(&mut planned).err()
}

/// Runs several steps and a flush. Returns the number of spans checked, or the problem.
fn run<D: PlanDevice>(planned: &mut Planned<D>) -> Result<Result<usize, String>, ExecError> {
    let mut plain = Plain::new(numbers(7));
    planned.write("w", &plain.w)?;
    let mut spans = 0;
    for step in 0..STEPS {
        let mut feed = Numbers::of_step(step, planned.micro_batches());
        let expected = plain.step(&feed.x, &feed.shift);
        planned.step(&mut feed)?;
        if feed.results != expected {
            return Ok(Err(format!("step {step}: {}", difference(&feed.results, &expected))));
        }
        if let Some(trace) = planned.trace()? {
            match check_trace(planned.plan(), &trace) {
                Ok(()) => spans += trace.spans.len(),
                Err(problem) => return Ok(Err(format!("step {step}: {problem}"))),
            }
        }
        if step == FLUSHED {
            plain.flush();
            planned.flush(&mut feed)?;
        }
    }
    for (name, expected) in [("w", &plain.w), ("m", &plain.m)] {
        let mut values = vec![0.0f32; ELEMENTS];
        planned.read(name, &mut values)?;
        if values != *expected {
            return Ok(Err(format!("`{name}` differs after {STEPS} steps")));
        }
    }
    Ok(Ok(spans))
}

fn difference(results: &StepResults, expected: &StepResults) -> String {
    let wrong = |a: &[f32], b: &[f32]| a.iter().zip(b).filter(|(a, b)| a != b).count();
    for (index, (a, b)) in results.losses.iter().zip(&expected.losses).enumerate() {
        if a != b {
            return format!("loss {index} differs in {} of {ELEMENTS} elements", wrong(a, b));
        }
    }
    format!("the norm differs in {} of {ELEMENTS} elements", wrong(&results.norm, &expected.norm))
}

/// Checks that every instruction of a step ran as often as it was issued, after the previous one in
/// its queue, and after the runs it waits for, which are the last ones issued before it.
fn check_trace(plan: &Plan, trace: &Trace) -> Result<(), String> {
    let mut runs: BTreeMap<usize, Vec<Span>> = BTreeMap::new();
    for span in &trace.spans {
        runs.entry(span.instruction.index()).or_default().push(*span);
    }
    let mut given: BTreeMap<usize, usize> = BTreeMap::new();
    let mut ends_ns = PerQueue::of_each(0);
    let segments = plan.step.iter().flat_map(|run| std::iter::repeat_n(run.segment, run.times));
    for index in segments.flat_map(|segment| plan.segment(segment).instructions.clone()) {
        let id = InstructionId(index as u32);
        let times = given.entry(index).or_default();
        let span = runs.get(&index).and_then(|runs| runs.get(*times)).copied();
        *times += 1;
        let what = || plan.describe(id);
        let Some(span) = span else { return Err(format!("{} did not run", what())) };
        let end_ns = &mut ends_ns[plan.queue(id)];
        if span.start_ns < *end_ns || span.end_ns < span.start_ns {
            return Err(format!("{} ran before the previous one was done", what()));
        }
        *end_ns = span.end_ns;
        for awaited in &plan.instruction(id).waits {
            let times = given.get(&awaited.index()).copied().unwrap_or(0);
            let Some(last) = times.checked_sub(1) else { continue };
            let last = runs[&awaited.index()][last];
            if last.end_ns > span.start_ns + CLOCK_NS_MAX {
                let early_ns = last.end_ns - span.start_ns;
                let awaited = plan.describe(*awaited);
                return Err(format!("{} ran {early_ns} ns before {awaited} was done", what()));
            }
        }
    }
    match trace.spans.len() == given.values().sum::<usize>() {
        true => Ok(()),
        false => Err("something ran that was not issued".to_owned()),
    }
}

/// Feeds numbers and records the results.
struct Numbers {
    x: Vec<Vec<f32>>,
    shift: Vec<f32>,
    results: StepResults,
}

impl Numbers {
    fn of_step(step: usize, micro_batches: usize) -> Numbers {
        let x = (0..micro_batches).map(|index| numbers(step * 100 + index)).collect();
        Numbers { x, shift: numbers(50 + step), results: StepResults::default() }
    }
}

impl Feed for Numbers {
    type Error = ExecError;

    fn input(
        &mut self,
        index: usize,
        _: &Tensor,
        micro_batch: Option<usize>,
    ) -> Result<&[u8], ExecError> {
        match micro_batch {
            None => {
                assert_eq!(index, SHIFT_INPUT);
                Ok(bytes_of(&self.shift))
            }
            Some(number) => {
                assert_eq!(index, X_INPUTS[number % GROUP]);
                Ok(bytes_of(&self.x[number]))
            }
        }
    }

    fn result(&mut self, index: usize, _: &Tensor, micro_batch: Option<usize>, bytes: &[u8]) {
        let mut values = vec![0.0f32; ELEMENTS];
        bytes_of_mut(&mut values).copy_from_slice(bytes);
        match micro_batch {
            None => {
                assert_eq!(index, NORM_RESULT);
                self.results.norm = values;
            }
            Some(number) => {
                assert_eq!(index, LOSS_RESULTS[number % GROUP]);
                self.results.losses.push(values);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
    use storm_device::cuda::{CudaError, CudaPlanDevice, CudaPlanOptions};
    use storm_device::{DeviceError, NullDevice, NullOptions};

    #[test]
    fn the_cpu_passes() {
        let reports = verify_plan_device::<CpuPlanDevice>(8, |chaos_seed, _| CpuPlanOptions {
            chaos_seed,
            trace: true,
            ..CpuPlanOptions::default()
        });
        let reports = reports.expect("it runs");
        assert_eq!(reports.len(), 9);
        for report in reports {
            assert!(report.passed() && report.spans > 100, "{report:?}");
        }
    }

    /// A device that only simulates time is detected by its results.
    #[test]
    fn a_device_that_computes_nothing_does_not() {
        let seconds = vec![1e-6; tiny_plan(2).instructions.len()];
        let options = |_, _| NullOptions {
            instruction_seconds: seconds.clone(),
            issue_seconds: 0.0,
            trace: true,
        };
        let reports = verify_plan_device::<NullDevice>(0, options).expect("it runs");
        let problem = reports[0].problem.as_deref();
        assert!(problem.is_some_and(|text| text.contains("step 0: loss 0 differs")), "{problem:?}");
    }

    /// Times that the plan does not allow are detected.
    #[test]
    fn a_trace_out_of_order_does_not() {
        let plan = tiny_plan(2);
        let seconds = vec![10e-6; plan.instructions.len()];
        let options = NullOptions { instruction_seconds: seconds, issue_seconds: 0.0, trace: true };
        let mut planned: Planned<NullDevice> =
            Planned::commit(plan.clone(), options).expect("no memory is taken");
        let mut feed = Numbers::of_step(0, planned.micro_batches());
        planned.step(&mut feed).expect("it runs");
        let trace = planned.trace().expect("it ran").expect("asked for");
        assert_eq!(check_trace(&plan, &trace), Ok(()));

        let mut found = 0;
        for index in 0..trace.spans.len() {
            let mut early = trace.clone();
            early.spans[index].start_ns = early.spans[index].start_ns.saturating_sub(5_000);
            found += usize::from(check_trace(&plan, &early).is_err());
        }
        // All but those that start before anything else has finished.
        assert!(found > trace.spans.len() * 3 / 4, "{found} of {}", trace.spans.len());
        let mut short = trace.clone();
        short.spans.pop();
        assert!(check_trace(&plan, &short).is_err());
    }

    /// On a GPU this is part of `storm verify`. Elsewhere, opening one returns a typed error.
    #[test]
    fn without_a_gpu_there_is_a_reason() {
        let options = |chaos_seed, _| CudaPlanOptions { chaos_seed, ..CudaPlanOptions::default() };
        match verify_plan_device::<CudaPlanDevice>(0, options) {
            Ok(reports) => assert!(reports.iter().all(QueueReport::passed), "{reports:?}"),
            Err(ExecError::Device(DeviceError::Cuda(error))) => {
                let is_known = matches!(error, CudaError::NoDriver | CudaError::NoDevice { .. });
                assert!(is_known, "{error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
