//! When instructions ran, by the card's clock.

use super::super::CudaError;
use super::super::context::{Context, Stream};
use super::super::event::Event;
use super::reader::HostRun;
use crate::spans::{Span, Trace, WaitedFor, longest};
use crate::tickets::Command;
use std::sync::Arc;
use std::time::Instant;
use storm_plan::{InstructionId, PerQueue, Plan, Queue};

/// The largest number of instructions of a queue that are timed in a step. Each takes two events.
const SPANS_MAX: usize = 1 << 17;

/// The times of one step.
#[derive(Debug)]
pub(super) struct Timeline {
    /// The whole step starts after this event, and times count from it.
    base: Event,
    /// The time of that event by the host's clock.
    origin: Instant,
    queues: PerQueue<Times>,
    /// Instructions given to each queue before the step.
    given_before: PerQueue<u64>,
    left_out: usize,
    /// Instructions that the issuing thread ran itself.
    by_host: Vec<HostRun>,
}

/// The times of one queue.
#[derive(Debug)]
struct Times {
    /// Start and end of each run. Only the first `runs.len()` are in use.
    events: Vec<[Event; 2]>,
    runs: Vec<Run>,
}

/// An instruction as it was issued.
#[derive(Clone, Copy, Debug)]
struct Run {
    instruction: InstructionId,
    given_ns: u64,
    /// By queue: how many instructions it must have done, counted as in `Tickets`.
    targets: PerQueue<u64>,
}

/// A run that has started and not ended, as an index into its queue's runs.
#[derive(Debug)]
pub(super) struct Started(usize);

impl Timeline {
    /// Makes room for a step of the plan, up to the limit.
    pub(super) fn new(plan: &Plan, context: &Arc<Context>) -> Result<Timeline, CudaError> {
        let times = |count: usize| -> Result<Times, CudaError> {
            let count = count.min(SPANS_MAX);
            let events = (0..count)
                .map(|_| Ok([Event::new(context)?, Event::new(context)?]))
                .collect::<Result<_, CudaError>>()?;
            Ok(Times { events, runs: Vec::with_capacity(count) })
        };
        let longest = longest(plan);
        let on_card = |queue| if plan.links.is_of_host(queue) { 0 } else { longest[queue] };
        let staged = plan.links.staging_queue().map_or(0, |queue| longest[queue]);
        Ok(Timeline {
            base: Event::new(context)?,
            origin: Instant::now(),
            queues: PerQueue::try_from_fn(|queue| times(on_card(queue)))?,
            given_before: PerQueue::default(),
            left_out: 0,
            by_host: Vec::with_capacity(staged.min(SPANS_MAX)),
        })
    }

    /// Begins a step on idle streams, which were given this many instructions before.
    pub(super) fn begin<'a>(
        &mut self,
        streams: impl IntoIterator<Item = &'a Stream>,
        given_before: PerQueue<u64>,
    ) -> Result<(), CudaError> {
        let before = Instant::now();
        for (index, stream) in streams.into_iter().enumerate() {
            match index {
                0 => self.base.record(stream)?,
                _ => self.base.hold(stream)?,
            }
        }
        self.base.synchronize()?;
        // The card recorded the event at some time in between.
        self.origin = before + before.elapsed() / 2;
        self.queues.iter_mut().for_each(|(_, times)| times.runs.clear());
        self.by_host.clear();
        (self.given_before, self.left_out) = (given_before, 0);
        Ok(())
    }

    /// Records that an instruction starts at this point of its stream. `None` if there is no room.
    pub(super) fn start(
        &mut self,
        queue: Queue,
        command: &Command,
        stream: &Stream,
    ) -> Result<Option<Started>, CudaError> {
        let Times { events, runs } = &mut self.queues[queue];
        let index = runs.len();
        let Some([start, _]) = events.get(index) else {
            self.left_out += 1;
            return Ok(None);
        };
        start.record(stream)?;
        runs.push(Run {
            instruction: command.instruction,
            given_ns: self.origin.elapsed().as_nanos() as u64,
            targets: command.targets.map(|target| target.count),
        });
        Ok(Some(Started(index)))
    }

    /// Records that the started instruction ends at this point of its stream.
    pub(super) fn end(
        &self,
        queue: Queue,
        started: Started,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        self.queues[queue].events[started.0][1].record(stream)
    }

    /// Records an instruction that the issuing thread ran itself.
    pub(super) fn ran_on_host(&mut self, run: HostRun) {
        match self.by_host.len() < self.by_host.capacity() {
            true => self.by_host.push(run),
            false => self.left_out += 1,
        }
    }

    /// The trace of the step, once it is done. `others` is what other threads of the host ran.
    pub(super) fn trace(&self, others: &[HostRun]) -> Result<Trace, CudaError> {
        let times = PerQueue::try_from_fn(|queue| self.queues[queue].times(&self.base))?;
        let mut spans = Vec::with_capacity(times.iter().map(|(_, own)| own.len()).sum());
        for (of, own) in times.iter() {
            let queue = &self.queues[of];
            let mut before_ns = 0;
            for (run, &[start_ns, end_ns]) in queue.runs.iter().zip(own) {
                let (mut ready_ns, mut waited_for) = (before_ns, WaitedFor::Nothing);
                if run.given_ns > ready_ns {
                    (ready_ns, waited_for) = (run.given_ns, WaitedFor::Host);
                }
                for (other, _) in times.iter() {
                    let Some((instruction, awaited_ns)) = self.awaited(run, other, &times) else {
                        continue;
                    };
                    if awaited_ns > ready_ns {
                        (ready_ns, waited_for) = (awaited_ns, WaitedFor::Instruction(instruction));
                    }
                }
                // The two clocks agree only to within a few microseconds.
                let ready_ns = ready_ns.min(start_ns);
                let instruction = run.instruction;
                spans.push(Span { instruction, waited_for, ready_ns, start_ns, end_ns });
                before_ns = end_ns;
            }
        }
        for run in self.by_host.iter().chain(others) {
            let since =
                |time: Instant| time.saturating_duration_since(self.origin).as_nanos() as u64;
            let (start_ns, end_ns) = (since(run.start), since(run.end));
            let (instruction, waited_for) = (run.instruction, WaitedFor::Nothing);
            spans.push(Span { instruction, waited_for, ready_ns: start_ns, start_ns, end_ns });
        }
        Ok(Trace { spans, left_out: self.left_out })
    }

    /// What a run waited for in another queue, and when that was done. `None` if it was done before
    /// the step, or was not recorded.
    fn awaited(
        &self,
        run: &Run,
        other: Queue,
        times: &PerQueue<Vec<[u64; 2]>>,
    ) -> Option<(InstructionId, u64)> {
        let position = run.targets[other].checked_sub(self.given_before[other] + 1)? as usize;
        let awaited = self.queues[other].runs.get(position)?;
        Some((awaited.instruction, times[other][position][1]))
    }
}

impl Times {
    /// Start and end of each run, in nanoseconds from `base`, never decreasing.
    fn times(&self, base: &Event) -> Result<Vec<[u64; 2]>, CudaError> {
        let mut clock = Clock { anchor: base, anchor_seconds: 0.0, last_ns: 0 };
        let in_use = &self.events[..self.runs.len()];
        in_use.iter().map(|[start, end]| Ok([clock.read(start)?, clock.read(end)?])).collect()
    }
}

/// Reads the events of a stream in order. The driver reports the time between two events as `f32`
/// milliseconds, so measuring from a nearby event keeps nanosecond precision.
struct Clock<'a> {
    anchor: &'a Event,
    anchor_seconds: f64,
    last_ns: u64,
}

/// An event further away than this becomes the anchor for those that follow.
const ANCHOR_SECONDS_MAX: f64 = 0.05;

impl<'a> Clock<'a> {
    fn read(&mut self, event: &'a Event) -> Result<u64, CudaError> {
        let since_anchor = event.seconds_since(self.anchor)?;
        let seconds = self.anchor_seconds + since_anchor;
        if since_anchor > ANCHOR_SECONDS_MAX {
            (self.anchor, self.anchor_seconds) = (event, seconds);
        }
        self.last_ns = self.last_ns.max((seconds * 1e9).round() as u64);
        Ok(self.last_ns)
    }
}
