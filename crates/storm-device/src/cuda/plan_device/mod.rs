//! Runs a plan on a GPU: one stream per queue, one block of device memory, and pinned host memory.

mod counters;
mod disk_queues;
mod disturbance;
mod failure;
mod graphs;
mod joined;
mod options;
mod program;
mod queues;
mod reader;
mod timeline;
mod units;

use super::context::{Card, Context};
use super::gather::{Gather, Piece};
use super::gemm::{Gemm, WORKSPACE_BYTES};
use super::memory::MemoryInUse;
use super::modules::Kernels;
use super::pinned::PinnedMemory;
use super::power::PowerReading;
use super::refused::over_budget;
use super::transfer::{self, CopyRange, Direction, queue_copy};
use super::{CudaDevice, CudaError};
use crate::disk::DiskTier;
use crate::host_buffer::copy_all;
use crate::placed::{PlacedNode, check_size};
use crate::sequence::{Sequence, Turn};
use crate::spans::Trace;
use crate::supply;
use crate::{Device, DeviceError, HostBuffer, PlanDevice, Supply};
use cudarc::driver::result;
use disk_queues::DiskQueues;
use disturbance::Disturbance;
use graphs::{Graphs, Issue};
pub use options::{CudaPlanOptions, GraphUse, Preparing};
use program::{Program, queue_action};
use queues::Queues;
use rayon::prelude::*;
use reader::{HostRun, Reader};
use std::sync::Arc;
use std::time::Instant;
use storm_graph::{Graph, Node, TensorId};
use storm_host::ScratchPath;
use storm_plan::{
    CheckedPlan, Idle, InstructionId, PerTier, Place, Plan, Queue, SegmentId, Tier, Work,
};
use timeline::Timeline;

/// A checked plan on a GPU.
///
/// The host issues instructions in the order of the plan. It waits only when the driver accepts no
/// more, and before it accesses memory that queues use. All kernels run in one stream, so matrix
/// products can share a workspace.
#[derive(Debug)]
pub struct CudaPlanDevice {
    // Dropped in this order: first the work, then what it uses.
    queues: Queues,
    /// `None` if the plan takes no data.
    reader: Option<Reader>,
    graphs: Graphs,
    /// Reads small tensors after steps. `None` until these tensors are known.
    gather: Option<Gather>,
    program: Program,
    kept: CudaKept,
    plan: Arc<CheckedPlan>,
    sequence: Sequence,
    timeline: Option<Timeline>,
    /// Whether steps are recorded, if there is a timeline.
    recording: bool,
    disturbance: Disturbance,
    vram_bytes: Option<u64>,
    /// What can be released between steps.
    releases: Option<Idle>,
    /// Waits after every instruction, so that an error is attributed to the one that caused it.
    synchronous: bool,
    /// The error that stopped the device.
    failure: Option<DeviceError>,
}

/// What a device passes on to the next. See [`CudaPlanDevice::keep`].
#[derive(Debug)]
pub struct CudaKept {
    // Dropped in this order: first what is registered with the context.
    host: PinnedMemory,
    tools: Tools,
}

/// Device memory that a second device of a process takes beside its plan, at most: a workspace for products, and the
/// code of its kernels. It has no graphs. The context is there already.
pub const SECOND_DEVICE_BYTES: u64 = WORKSPACE_BYTES as u64 + (32 << 20);

/// What all plans on a card share.
#[derive(Debug)]
struct Tools {
    gemm: Gemm,
    kernels: Kernels,
    context: Arc<Context>,
}

impl Tools {
    /// Kernels are for `multiprocessors` of the card, or for all of them if `None`: the blocks of some
    /// must all run at the same time.
    fn new(ordinal: usize, multiprocessors: Option<usize>) -> Result<Tools, DeviceError> {
        let context = Context::open(ordinal)?;
        let mut card = context.card.clone();
        card.multiprocessors = card.multiprocessors.min(multiprocessors.unwrap_or(usize::MAX));
        let kernels = Kernels::new(card)?;
        Ok(Tools { gemm: Gemm::new(&context)?, kernels, context })
    }
}

impl CudaPlanDevice {
    /// The card.
    pub fn card(&self) -> &Card {
        &self.kept.tools.context.card
    }

    /// Card memory that this process holds: the block, workspaces, code and the context.
    ///
    /// # Errors
    /// From the driver.
    pub fn memory_in_use(&self) -> Result<MemoryInUse, DeviceError> {
        Ok(self.kept.tools.context.memory_in_use()?)
    }

    /// The card's energy use so far and its clock now. `None` if NVML does not report them.
    pub fn power(&self) -> Option<PowerReading> {
        self.kept.tools.context.power()
    }

    /// The number of CUDA graphs that issue kernels, and the number of kernels in them.
    pub fn graphs(&self) -> (usize, usize) {
        self.graphs.counts()
    }

    /// Shuts down the device but keeps what is slow to set up: pinned host memory and loaded kernels. The next
    /// device reuses the host memory if it is large enough for its plan, however much larger.
    ///
    /// # Errors
    /// From anything that was issued. After an error of the card, nothing can be kept.
    pub fn keep(mut self) -> Result<CudaKept, DeviceError> {
        self.synchronize()?;
        Ok(self.kept)
    }

    /// Fails if anything has failed before; otherwise makes the context current.
    fn enter(&self) -> Result<(), DeviceError> {
        match &self.failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(self.kept.tools.context.make_current()?),
        }
    }

    /// Fails if the disk has failed. Nothing that waited for it may be used.
    fn check_disk(&mut self) -> Result<(), DeviceError> {
        match self.queues.disk().and_then(DiskQueues::failure) {
            Some(failure) => {
                self.failure = Some(failure.clone());
                Err(failure)
            }
            None => Ok(()),
        }
    }

    /// The disk tier.
    fn disk(&self) -> Result<&DiskTier, DeviceError> {
        let disk = self.queues.disk().map(DiskQueues::disk);
        disk.ok_or(DeviceError::NoTier { tier: Tier::DISK })
    }

    /// Records a fatal error with the instruction that failed: `id` if it was being issued, unless the card
    /// reports the failure of an earlier one.
    fn fail(&mut self, id: Option<InstructionId>, error: DeviceError) -> DeviceError {
        let card = self.queues.stream(Queue::COMPUTE).check();
        let failure = match (id, card) {
            (None, Err(error)) => failure::of_something(&self.plan, &self.queues, error),
            (Some(_), Err(error)) if !self.synchronous => {
                failure::of_something(&self.plan, &self.queues, error)
            }
            (Some(id), _) => failure::of_instruction(&self.plan, id, &error),
            (None, Ok(())) => error,
        };
        self.failure = Some(failure.clone());
        failure
    }

    /// Waits until all issued reads are done.
    fn finish_reading(&mut self) -> Result<(), DeviceError> {
        let (Some(reader), Some(queue)) = (&self.reader, self.plan.links.data_queue()) else {
            return Ok(());
        };
        if !reader.wait(self.queues.given()[queue]) {
            let failure = DeviceError::Instruction {
                instruction: "reading the data of the next step".to_owned(),
                queue: self.plan.links.queue_name(queue),
                tensor: String::new(),
                reason: "it panicked".to_owned(),
            };
            self.failure = Some(failure.clone());
            return Err(failure);
        }
        self.queues.done_by_host(queue);
        Ok(())
    }

    /// Runs a fetch in this thread, or gives a read to the reader's thread.
    fn take_data(&mut self, id: InstructionId) -> Result<(), DeviceError> {
        let plan = Arc::clone(&self.plan);
        let waits = &plan.instruction(id).waits;
        // The host waits for streams, but streams never wait for a fetch: it is done before
        // anything that needs it is issued to them.
        self.queues.wait_for(waits)?;
        let (queue, _) = self.queues.begin(&plan, id)?;
        let reader = self.reader.as_ref().ok_or(DeviceError::NoSupply)?;
        match &plan.instruction(id).work {
            Work::ReadAhead(read) => reader.give(id, read.micro_batches),
            Work::Fetch(fetch) => {
                let start = Instant::now();
                let supply = reader.supply();
                // SAFETY: in bounds. The copies that read these inputs are done, and the checker has proved
                // that no other instruction touches them.
                unsafe {
                    supply::fetch(&supply, &plan, fetch, |name, place, bytes| {
                        self.host_address(name, place.offset, bytes)
                    })?;
                }
                self.queues.done_by_host(queue);
                let run = HostRun { instruction: id, start, end: Instant::now() };
                if let Some(timeline) = self.timeline.as_mut().filter(|_| self.recording) {
                    timeline.ran_on_host(run);
                }
            }
            Work::Compute(_) | Work::Copy(_) | Work::Collective(_) => {
                unreachable!("they run in streams, or no such plan was committed")
            }
        }
        Ok(())
    }

    fn give(&mut self, id: InstructionId) -> Result<(), DeviceError> {
        let plan = Arc::clone(&self.plan);
        let reads = |id: &&InstructionId| matches!(plan.instruction(**id).work, Work::ReadAhead(_));
        if plan.instruction(id).waits.iter().any(|wait| reads(&wait)) {
            self.finish_reading()?;
        }
        if plan.links.is_data(plan.queue(id)) {
            return self.take_data(id);
        }
        if plan.links.is_disk(plan.queue(id)) {
            self.queues.give_to_disk(&plan, id);
            return Ok(());
        }
        let (queue, command) = self.queues.begin(&self.plan, id)?;
        let stream = self.queues.stream(queue);
        if let Issue::InGraph { launches, ends } = self.issue_of(id) {
            if let Some(graph) = launches {
                self.disturbance.precede(queue, stream)?;
                // SAFETY: as for `queue` below. The graph has the instructions of this queue from
                // this one to the one that ends it. Of these, only the first waits for other
                // queues, and other queues wait only for the last.
                unsafe { self.graphs.graph(graph).queue(stream)? };
            }
            if ends {
                self.queues.end(queue, id)?;
            }
            return Ok(());
        }
        self.disturbance.precede(queue, stream)?;
        let started = match &mut self.timeline {
            Some(timeline) if self.recording => timeline.start(queue, &command, stream)?,
            _ => None,
        };
        let CudaKept { host, tools } = &self.kept;
        let what = || self.plan.describe(id);
        // SAFETY: segments are issued in the step order of a checked plan, and `begin` made the stream wait.
        // The device drops its queues, which waits for all work, before the block and the host memory.
        unsafe { self.program.queue(id, stream, &tools.gemm, host, what)? };
        if let (Some(timeline), Some(started)) = (&self.timeline, started) {
            timeline.end(queue, started, stream)?;
        }
        if self.synchronous {
            stream.synchronize("running it")?;
        }
        Ok(self.queues.end(queue, id)?)
    }

    /// How an instruction is issued now. A step that is recorded uses no graphs, because they do
    /// not show when their kernels run.
    fn issue_of(&self, id: InstructionId) -> Issue {
        let records = self.timeline.is_some() && self.recording;
        if records { Issue::Alone } else { self.graphs.issue(id) }
    }

    fn wait_for(&mut self, instructions: &[InstructionId]) -> Result<(), DeviceError> {
        self.enter()?;
        let waited = self.queues.wait_for(instructions);
        waited.map_err(|error| self.fail(None, error.into()))?;
        self.check_disk()
    }

    /// An address in the host tier, which is at least as large as the plan says.
    fn host_address(
        &self,
        what: &str,
        offset: usize,
        bytes: usize,
    ) -> Result<*mut u8, DeviceError> {
        transfer::check(what, offset, bytes, self.plan.bytes[Tier::HOST])?;
        Ok(self.kept.host.address(offset))
    }

    fn check_budget(&self) -> Result<(), DeviceError> {
        check_budget(&self.kept.tools, &self.program, self.vram_bytes)
    }
}

impl PlanDevice for CudaPlanDevice {
    type Options = CudaPlanOptions;

    const ALIGNMENT: usize = CudaDevice::ALIGNMENT;

    /// As [`PlanDevice::commit`]. Also runs every kernel once, so no card memory is allocated
    /// later.
    fn commit(
        plan: Arc<CheckedPlan>,
        mut options: CudaPlanOptions,
    ) -> Result<CudaPlanDevice, DeviceError> {
        let has = |tier: &Tier| match *tier {
            Tier::DEVICE | Tier::HOST => true,
            tier => tier == Tier::DISK && options.disk.is_some(),
        };
        if let Some(tier) = plan.tiers().find(|tier| !has(tier)) {
            return Err(DeviceError::NoTier { tier });
        }
        let disk = DiskTier::new(&plan, options.disk.as_ref())?;
        // Locals are dropped in reverse order: on an error, the work ends first, and the context is
        // released last.
        let (tools, kept_host) = match options.kept.take() {
            Some(CudaKept { host, tools }) => (tools, Some(host)),
            None => (Tools::new(options.ordinal, options.multiprocessors)?, None),
        };
        tools.context.make_current()?;
        let ranks = options.ranks.take();
        let mut program =
            Program::new(&plan, &tools, options.copy_slowdown, ranks.clone(), options.releases)?;
        let mut progress = options.progress.take().unwrap_or_else(|| Box::new(|_| {}));
        let mut disturbance = Disturbance::new(&options, &tools.kernels)?;
        let mut queues = Queues::new(&plan, &tools.context, options.multiprocessors)?;
        queues.set_ranks(ranks);
        let compute = queues.stream(Queue::COMPUTE);
        program.tune(compute, &tools, options.tune_seconds, |shapes, of| {
            progress(Preparing::Products { shapes, of });
        })?;
        program.memory().clear(compute)?;
        program.warm_up(compute, &tools.gemm)?;
        for stream in queues.streams() {
            disturbance.warm_up(stream)?;
        }
        compute.synchronize("running every kernel once")?;
        // Pinning host memory is slow, so check the budget first.
        check_budget(&tools, &program, options.vram_bytes)?;

        let host = host_memory(&plan, &tools.context, kept_host, &mut progress)?;
        check_host_places(&plan)?;
        warm_up_copies(&plan, &queues, &program, &host)?;
        let synchronous = std::env::var_os("STORM_CUDA_SYNC").is_some_and(|value| value == "1");
        let use_of = options.graph_use(synchronous);
        let graphs = Graphs::new(&plan, &program, &tools, compute, use_of, options.vram_bytes)?;
        program.memory().clear(compute)?;
        for stream in queues.streams() {
            stream.synchronize("clearing device memory")?;
        }
        let timeline = match options.trace {
            true => Some(Timeline::new(&plan, &tools.context)?),
            false => None,
        };
        let reader = match plan.links.data_queue() {
            Some(_) => Some(Reader::new(options.trace)?),
            None => None,
        };
        if let Some(disk) = disk {
            // SAFETY: the memory is as large as the plan says, and the device drops its queues first.
            queues.set_disk(unsafe {
                DiskQueues::new(&plan, &tools.context, disk, host.address(0), options.trace)?
            });
        }
        let device = CudaPlanDevice {
            queues,
            reader,
            graphs,
            gather: None,
            program,
            kept: CudaKept { host, tools },
            sequence: Sequence::new(&plan),
            plan,
            timeline,
            recording: true,
            disturbance,
            vram_bytes: options.vram_bytes,
            releases: options.releases,
            synchronous,
            failure: None,
        };
        device.check_budget()?;
        Ok(device)
    }

    fn plan(&self) -> &Arc<CheckedPlan> {
        &self.plan
    }

    fn set_supply(&mut self, supply: Arc<dyn Supply>) -> Result<(), DeviceError> {
        self.synchronize()?;
        if let Some(reader) = &self.reader {
            reader.set_supply(supply);
        }
        Ok(())
    }

    fn wait_for_data(&mut self) -> Result<(), DeviceError> {
        self.enter()?;
        self.finish_reading()
    }

    fn issue(&mut self, segment: SegmentId) -> Result<(), DeviceError> {
        self.enter()?;
        if self.sequence.advance(&self.plan, segment)? == Turn::Begins {
            self.synchronize()?;
            if let Some(timeline) = self.timeline.as_mut().filter(|_| self.recording) {
                let begun = timeline.begin(self.queues.streams(), self.queues.given());
                begun.map_err(|error| self.fail(None, error.into()))?;
                if let Some(reader) = &self.reader {
                    reader.begin();
                }
                if let Some(disk) = self.queues.disk() {
                    disk.begin();
                }
            }
        }
        let waited = self.queues.wait_for(self.sequence.host_copies(segment));
        waited.map_err(|error| self.fail(None, error.into()))?;
        self.check_disk()?;
        for index in self.plan.segment(segment).instructions.clone() {
            let id = InstructionId(index as u32);
            self.give(id).map_err(|error| self.fail(Some(id), error))?;
        }
        Ok(())
    }

    fn write_input(&mut self, input: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let plan = Arc::clone(&self.plan);
        let input = &plan.inputs[input];
        check_size(&input.tensor, bytes.len())?;
        self.wait_for(&input.copies)?;
        self.wait_for(&input.fetches)?;
        let to = self.host_address(&input.tensor.name, input.place.offset, bytes.len())?;
        // SAFETY: in bounds. The copies that read these bytes and the fetches that write them are done, the
        // checker has proved that no other instruction touches them, and `&mut self` prevents new ones from being issued.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    fn read_result(&mut self, result: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let plan = Arc::clone(&self.plan);
        let result = &plan.results[result];
        check_size(&result.tensor, bytes.len())?;
        self.wait_for(&result.copies)?;
        let from = self.host_address(&result.tensor.name, result.place.offset, bytes.len())?;
        // SAFETY: as in `write_input`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.enter()?;
        self.finish_reading()?;
        self.queues.wait_for_all().map_err(|error| self.fail(None, error.into()))?;
        self.check_disk()
    }

    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), DeviceError> {
        self.synchronize()?;
        let Place { tier, offset } = place;
        match tier {
            Tier::HOST => {
                let to = self.host_address("host data", offset, bytes.len())?;
                // SAFETY: in bounds, and the queues are empty while `self` is borrowed.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
                Ok(())
            }
            Tier::DEVICE => {
                let memory = self.program.memory();
                transfer::check("host data", offset, bytes.len(), memory.bytes())?;
                let to = memory.start() + offset as u64;
                let stream = self.queues.stream(Queue::HOST_TO_DEVICE);
                // SAFETY: in bounds; the queues are empty, and `bytes` stays borrowed until the wait.
                unsafe { result::memcpy_htod_async(to, bytes, stream.handle()) }
                    .map_err(CudaError::driver("copying to the GPU"))
                    .and_then(|()| stream.synchronize("copying to the GPU"))
                    .map_err(|error| self.fail(None, error.into()))
            }
            Tier::DISK => self.disk()?.write(offset, bytes),
            tier => Err(DeviceError::NoTier { tier }),
        }
    }

    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.synchronize()?;
        let Place { tier, offset } = place;
        match tier {
            Tier::HOST => {
                let from = self.host_address("host data", offset, bytes.len())?;
                // SAFETY: as in `write`.
                unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
                Ok(())
            }
            Tier::DEVICE => {
                let memory = self.program.memory();
                transfer::check("host data", offset, bytes.len(), memory.bytes())?;
                let from = memory.start() + offset as u64;
                let stream = self.queues.stream(Queue::DEVICE_TO_HOST);
                // SAFETY: as in `write`; every bit pattern is a valid byte.
                unsafe { result::memcpy_dtoh_async(bytes, from, stream.handle()) }
                    .map_err(CudaError::driver("copying from the GPU"))
                    .and_then(|()| stream.synchronize("copying from the GPU"))
                    .map_err(|error| self.fail(None, error.into()))
            }
            Tier::DISK => self.disk()?.read(offset, bytes),
            tier => Err(DeviceError::NoTier { tier }),
        }
    }

    fn read_all(&mut self, reads: Vec<(Place, &mut [u8])>) -> Result<(), DeviceError> {
        self.synchronize()?;
        let memory = self.program.memory();
        let (mut here, mut there) = (Vec::new(), Vec::new());
        for (Place { tier, offset }, bytes) in reads {
            match tier {
                Tier::HOST => {
                    let from = self.host_address("host data", offset, bytes.len())?;
                    // SAFETY: in bounds and initialized, and no queue writes until this returns.
                    let from =
                        unsafe { std::slice::from_raw_parts(from.cast_const(), bytes.len()) };
                    here.push((from, bytes));
                }
                Tier::DEVICE => {
                    transfer::check("host data", offset, bytes.len(), memory.bytes())?;
                    there.push((memory.start() + offset as u64, bytes));
                }
                Tier::DISK => self.disk()?.read(offset, bytes)?,
                tier => return Err(DeviceError::NoTier { tier }),
            }
        }
        let stream = self.queues.stream(Queue::DEVICE_TO_HOST);
        let queued = there.iter_mut().try_for_each(|(from, bytes)| {
            // SAFETY: in bounds; the queues are empty, and `bytes` stays borrowed until the wait below, which
            // happens on every path. Every bit pattern is a valid byte.
            unsafe { result::memcpy_dtoh_async(bytes, *from, stream.handle()) }
                .map_err(CudaError::driver("copying from the GPU"))
        });
        // Runs while the card copies its part.
        copy_all(here);
        let done = stream.synchronize("copying from the GPU");
        queued.and(done).map_err(|error| self.fail(None, error.into()))
    }

    fn begin_read(&mut self, places: &[(Place, usize)]) -> Result<bool, DeviceError> {
        self.enter()?;
        if places.iter().any(|(place, _)| place.tier != Tier::DEVICE) {
            return Ok(false);
        }
        let memory = self.program.memory();
        let (start, capacity) = (memory.start(), memory.bytes());
        for (Place { offset, .. }, bytes) in places {
            transfer::check("device data", *offset, *bytes, capacity)?;
        }
        let pieces = places
            .iter()
            .map(|&(Place { offset, .. }, bytes)| Piece { address: start + offset as u64, bytes });
        if !self.gather.as_ref().is_some_and(|gather| gather.reads(pieces.clone())) {
            // The old kernel may still be writing to its memory.
            self.synchronize()?;
            let Tools { kernels, context, .. } = &self.kept.tools;
            self.gather = Gather::new(context, kernels, pieces.collect())?;
            // New code uses card memory.
            self.check_budget()?;
        }
        let Some(gather) = &mut self.gather else { return Ok(false) };
        // SAFETY: in bounds of the block, which the device drops after its queues. Resident tensors are only written by
        // kernels of this stream, and from the host once all queues are empty.
        let begun = unsafe { gather.begin(self.queues.stream(Queue::COMPUTE)) };
        begun.map(|()| true).map_err(|error| self.fail(None, error))
    }

    fn finish_read(&mut self, bytes: &mut [u8]) -> Result<bool, DeviceError> {
        self.enter()?;
        let Some(gather) = &mut self.gather else { return Ok(false) };
        gather.finish(bytes).map_err(|error| self.fail(None, error.into()))
    }

    fn host_buffer(&self, bytes: usize) -> Result<HostBuffer, DeviceError> {
        let memory = PinnedMemory::new(&self.kept.tools.context, bytes, |_| {})?;
        Ok(HostBuffer::pinned(memory))
    }

    fn run_alone(
        &mut self,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<(), DeviceError> {
        self.synchronize()?;
        let Tools { gemm, kernels, .. } = &self.kept.tools;
        let capacity = self.program.memory().bytes();
        let placed = PlacedNode::new(capacity, Self::ALIGNMENT, graph, node, place, layer)?;
        let modules = kernels.module_count();
        let actions = self.program.resolve(&placed, &self.kept.tools)?;
        let stream = self.queues.stream(Queue::COMPUTE);
        let what = || format!("{} `{}`", node.op.name(), node.name);
        let queued = actions.iter().try_for_each(|action| {
            // SAFETY: `PlacedNode` keeps it inside the block; the queues are empty while `self` is borrowed.
            unsafe { queue_action(action, stream, gemm, what) }
        });
        let done = queued.and_then(|()| Ok(stream.synchronize(&what())?));
        if let Err(error) = done {
            let failure = DeviceError::Instruction {
                instruction: what(),
                queue: self.plan.links.queue_name(Queue::COMPUTE),
                tensor: graph.tensor(node.outputs[0]).name.clone(),
                reason: error.to_string(),
            };
            self.failure = Some(failure.clone());
            return Err(failure);
        }
        // New code uses card memory.
        if kernels.module_count() > modules { self.check_budget() } else { Ok(()) }
    }

    fn release_idle(&mut self, idle: Idle) -> Result<u64, DeviceError> {
        self.synchronize()?;
        // Memory is in parts for one kind only.
        if self.releases != Some(idle) {
            return Ok(0);
        }
        Ok(self.program.memory_mut().give_back()?)
    }

    fn reclaim_idle(&mut self) -> Result<(), DeviceError> {
        self.synchronize()?;
        Ok(self.program.memory_mut().take_back()?)
    }

    fn memory_taken(&self) -> PerTier<usize> {
        let memory = PerTier::new(self.program.memory().bytes(), self.kept.host.bytes());
        memory.with(Tier::DISK, self.plan.bytes[Tier::DISK])
    }

    fn disk_path(&self) -> Option<ScratchPath> {
        self.disk().ok().map(DiskTier::path)
    }

    fn memory_in_use_bytes(&self) -> Result<u64, DeviceError> {
        Ok(self.memory_in_use()?.bytes)
    }

    /// The driver counts the whole process.
    fn memory_in_use_with(&self, _: &CudaPlanDevice) -> Result<u64, DeviceError> {
        self.memory_in_use_bytes()
    }

    fn memory_free_bytes(&self) -> Result<Option<u64>, DeviceError> {
        let (free, _) = self.kept.tools.context.memory_info()?;
        Ok(Some(free as u64))
    }

    fn collective_seconds(&self) -> Result<Option<f64>, DeviceError> {
        Ok(self.program.ranks().map(|ranks| ranks.take_seconds()).transpose()?)
    }

    fn identity(&self) -> String {
        let card = self.card();
        format!("{} ({}), {}", card.name, card.architecture(), self.kept.tools.gemm.library())
    }

    fn set_recording(&mut self, recording: bool) {
        self.recording = recording;
    }

    fn trace(&mut self) -> Result<Option<Trace>, DeviceError> {
        self.synchronize()?;
        let mut others = self.reader.as_ref().map(Reader::runs).unwrap_or_default();
        others.extend(self.queues.disk().map(DiskQueues::runs).unwrap_or_default());
        let trace = self.timeline.as_ref().map(|timeline| timeline.trace(&others)).transpose();
        trace.map_err(|error| self.fail(None, error.into()))
    }
}

/// Fails if more card memory is in use than allowed.
fn check_budget(
    tools: &Tools,
    program: &Program,
    vram_bytes: Option<u64>,
) -> Result<(), DeviceError> {
    let Some(budget_bytes) = vram_bytes else { return Ok(()) };
    let in_use = tools.context.memory_in_use()?;
    if in_use.bytes <= budget_bytes {
        return Ok(());
    }
    let block_bytes = program.memory().bytes() as u64;
    Err(over_budget(in_use, budget_bytes, block_bytes).into())
}

/// Zeroed host memory for a plan. Reuses the kept memory if it is large enough.
fn host_memory(
    plan: &Plan,
    context: &Arc<Context>,
    kept: Option<PinnedMemory>,
    progress: &mut dyn FnMut(Preparing),
) -> Result<PinnedMemory, DeviceError> {
    let wanted = plan.bytes[Tier::HOST];
    if let Some(mut host) = kept.filter(|host| host.bytes() >= wanted) {
        host.as_mut_slice().par_chunks_mut(64 << 20).for_each(|part| part.fill(0));
        return Ok(host);
    }
    // The kept memory is already freed here, because there may not be enough memory for both.
    Ok(PinnedMemory::new(context, wanted, |bytes| {
        progress(Preparing::HostMemory { bytes, of: wanted });
    })?)
}

fn check_host_places(plan: &Plan) -> Result<(), DeviceError> {
    let inputs = plan.inputs.iter().map(|input| (&input.tensor, input.place));
    let results = plan.results.iter().map(|result| (&result.tensor, result.place));
    inputs.chain(results).try_for_each(|(tensor, Place { tier, offset })| match tier {
        Tier::HOST => transfer::check(&tensor.name, offset, tensor.size_bytes(), plan.bytes[tier]),
        tier => Err(DeviceError::NoTier { tier }),
    })
}

/// Copies a few bytes each way, because the first copy of a stream may allocate card memory.
fn warm_up_copies(
    plan: &Plan,
    queues: &Queues,
    program: &Program,
    host: &PinnedMemory,
) -> Result<(), DeviceError> {
    let bytes = plan.bytes[Tier::HOST].min(plan.bytes[Tier::DEVICE]).min(4096);
    let range = CopyRange { host_offset: 0, device_offset: 0, bytes };
    for (queue, direction) in
        [(Queue::HOST_TO_DEVICE, Direction::ToDevice), (Queue::DEVICE_TO_HOST, Direction::ToHost)]
    {
        let stream = queues.stream(queue);
        // SAFETY: nothing else uses either memory, and both outlive the wait.
        unsafe { queue_copy(stream, direction, host, program.memory(), range)? };
        stream.synchronize("copying for the first time")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A separate host thread may issue the work.
    #[test]
    fn devices_may_move_between_threads() {
        fn check<T: Send>() {}
        check::<CudaPlanDevice>();
        check::<CudaKept>();
    }
}
