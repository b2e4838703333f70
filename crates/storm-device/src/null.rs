//! A device that does no work and has no memory, with a virtual clock.

use crate::placed::{PlacedNode, check_size};
use crate::sequence::{Sequence, Turn};
use crate::spans::{Recorder, Span, Trace, WaitedFor};
use crate::supply::Supplied;
use crate::{DeviceError, PlanDevice, Supply};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use storm_graph::{Graph, Node, TensorId};
use storm_plan::{
    CheckedPlan, HardwareProfile, InstructionId, PerQueue, PerTier, Place, Plan, SegmentId, Tier,
    Work, instruction_seconds,
};

/// Timing of a [`NullDevice`].
#[derive(Clone, Debug, PartialEq)]
pub struct NullOptions {
    /// Time of each instruction of the plan.
    pub instruction_seconds: Vec<f64>,
    /// Host time to issue an instruction.
    pub issue_seconds: f64,
    /// Record what the queues did in each step.
    pub trace: bool,
}

impl NullOptions {
    /// Uses the simulator's time for each instruction on this hardware, and records a trace.
    pub fn of_profile(plan: &Plan, profile: &HardwareProfile) -> NullOptions {
        NullOptions {
            instruction_seconds: instruction_seconds(plan, profile),
            issue_seconds: profile.launch_seconds,
            trace: true,
        }
    }
}

/// Runs a plan without doing its work: every instruction takes its given time, writes are
/// discarded, and reads return zeros.
pub struct NullDevice {
    plan: Arc<CheckedPlan>,
    sequence: Sequence,
    recorder: Option<Recorder>,
    issue_ns: u64,
    /// By instruction: how long it takes.
    durations_ns: Vec<u64>,
    /// By instruction: when its last run ended; 0 if it never ran.
    ends_ns: Vec<u64>,
    /// By queue: when it finishes everything it was given.
    free_ns: PerQueue<u64>,
    /// The host's time, waits included.
    host_ns: u64,
    supply: Supplied,
}

impl NullDevice {
    fn give(&mut self, id: InstructionId) -> Result<(), DeviceError> {
        self.take_data(id)?;
        self.host_ns += self.issue_ns;
        let instruction = self.plan.instruction(id);
        let queue = self.plan.queue(id);
        let free_ns = &mut self.free_ns[queue];
        let (mut ready_ns, mut waited_for) = (*free_ns, WaitedFor::Nothing);
        if self.host_ns > ready_ns {
            (ready_ns, waited_for) = (self.host_ns, WaitedFor::Host);
        }
        for &awaited in &instruction.waits {
            let end_ns = self.ends_ns[awaited.index()];
            if end_ns > ready_ns {
                (ready_ns, waited_for) = (end_ns, WaitedFor::Instruction(awaited));
            }
        }
        let end_ns = ready_ns + self.durations_ns[id.index()];
        (*free_ns, self.ends_ns[id.index()]) = (end_ns, end_ns);
        if let Some(recorder) = &mut self.recorder {
            let start_ns = ready_ns;
            recorder
                .record(queue, Span { instruction: id, waited_for, ready_ns, start_ns, end_ns });
        }
        Ok(())
    }

    /// Takes data from its source and drops it, so that the source advances as with any device.
    fn take_data(&self, id: InstructionId) -> Result<(), DeviceError> {
        match &self.plan.instruction(id).work {
            Work::Compute(_) | Work::Copy(_) | Work::Collective(_) => Ok(()),
            Work::Fetch(fetch) => {
                let supply = self.supply.as_ref().ok_or(DeviceError::NoSupply)?;
                let inputs = &self.plan.inputs;
                supply.fetch(fetch, &mut |index, bytes| {
                    check_size(&inputs[index].tensor, bytes.len())
                })
            }
            Work::ReadAhead(read) => {
                if let Some(supply) = &self.supply {
                    supply.read_ahead(read.micro_batches);
                }
                Ok(())
            }
        }
    }

    /// When the host continues if it waits for all of these.
    fn end_of(&self, instructions: &[InstructionId]) -> u64 {
        let ends = instructions.iter().map(|id| self.ends_ns[id.index()]);
        ends.fold(self.host_ns, u64::max)
    }

    fn check_place(&self, place: Place, bytes: usize) -> Result<(), DeviceError> {
        let Place { tier, offset } = place;
        let capacity = self.plan.bytes[tier];
        let end = offset.saturating_add(bytes);
        if end <= capacity {
            return Ok(());
        }
        Err(DeviceError::OutOfBounds { tensor: "host data".to_owned(), offset, end, capacity })
    }
}

impl PlanDevice for NullDevice {
    type Options = NullOptions;

    const ALIGNMENT: usize = 64;

    /// # Panics
    /// If the number of instructions in the options differs from the plan's.
    fn commit(plan: Arc<CheckedPlan>, options: NullOptions) -> Result<NullDevice, DeviceError> {
        assert_eq!(options.instruction_seconds.len(), plan.instructions.len());
        let durations_ns = options.instruction_seconds.into_iter().map(nanoseconds);
        Ok(NullDevice {
            durations_ns: durations_ns.collect(),
            ends_ns: vec![0; plan.instructions.len()],
            free_ns: PerQueue::default(),
            host_ns: 0,
            supply: None,
            issue_ns: nanoseconds(options.issue_seconds),
            recorder: options.trace.then(|| Recorder::new(&plan)),
            sequence: Sequence::new(&plan),
            plan,
        })
    }

    fn plan(&self) -> &Arc<CheckedPlan> {
        &self.plan
    }

    fn set_supply(&mut self, supply: Arc<dyn Supply>) -> Result<(), DeviceError> {
        self.supply = Some(supply);
        Ok(())
    }

    fn wait_for_data(&mut self) -> Result<(), DeviceError> {
        if let Some(data) = self.plan.links.data_queue() {
            self.host_ns = self.host_ns.max(self.free_ns[data]);
        }
        Ok(())
    }

    fn issue(&mut self, segment: SegmentId) -> Result<(), DeviceError> {
        if self.sequence.advance(&self.plan, segment)? == Turn::Begins {
            self.synchronize()?;
            if let Some(recorder) = &mut self.recorder {
                recorder.begin();
            }
        }
        self.host_ns = self.end_of(self.sequence.host_copies(segment));
        for index in self.plan.segment(segment).instructions.clone() {
            self.give(InstructionId(index as u32))?;
        }
        Ok(())
    }

    fn write_input(&mut self, input: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        check_size(&self.plan.inputs[input].tensor, bytes.len())?;
        self.host_ns = self.end_of(&self.plan.inputs[input].copies);
        self.host_ns = self.end_of(&self.plan.inputs[input].fetches);
        Ok(())
    }

    fn read_result(&mut self, result: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        check_size(&self.plan.results[result].tensor, bytes.len())?;
        self.host_ns = self.end_of(&self.plan.results[result].copies);
        bytes.fill(0);
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.host_ns = self.free_ns.iter().map(|(_, &free)| free).fold(self.host_ns, u64::max);
        Ok(())
    }

    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), DeviceError> {
        self.synchronize()?;
        self.check_place(place, bytes.len())
    }

    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.synchronize()?;
        self.check_place(place, bytes.len())?;
        bytes.fill(0);
        Ok(())
    }

    /// Takes no time.
    fn run_alone(
        &mut self,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<(), DeviceError> {
        self.synchronize()?;
        let capacity = self.plan.bytes[Tier::DEVICE];
        PlacedNode::new(capacity, Self::ALIGNMENT, graph, node, place, layer)?;
        Ok(())
    }

    /// The memory the plan would use.
    fn memory_taken(&self) -> PerTier<usize> {
        self.plan.bytes
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.host_ns)
    }

    fn identity(&self) -> String {
        "virtual clock".to_owned()
    }

    fn trace(&mut self) -> Result<Option<Trace>, DeviceError> {
        self.synchronize()?;
        Ok(self.recorder.as_ref().map(Recorder::trace))
    }
}

fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9).round() as u64
}

impl fmt::Debug for NullDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullDevice").field("host_ns", &self.host_ns).finish_non_exhaustive()
    }
}
