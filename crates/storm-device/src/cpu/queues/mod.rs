//! Runs a plan on the CPU: one thread per queue, and copies between blocks of host memory, one
//! block per tier.

mod board;
mod options;
mod program;
mod worker;

use super::instruction::Instruction;
use super::kernels;
use super::kernels::gemm::Bf16Products;
use super::memory::Memory;
use super::threads;
use crate::cpu::CpuDevice;
use crate::disk::DiskTier;
use crate::host_buffer::copy_all;
use crate::placed::check_size;
use crate::sequence::{Sequence, Turn};
use crate::spans::{Recorder, Trace};
use crate::tickets::Tickets;
use crate::{Device, DeviceError, MemoryRefused, PlanDevice, Supply};
use board::Board;
pub use options::{CpuPlanOptions, Fault, FaultKind};
use program::Program;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use storm_graph::{Graph, Node, TensorId};
use storm_host::ScratchPath;
use storm_plan::{
    CheckedPlan, Idle, InstructionId, PerQueue, PerTier, Place, Queue, SegmentId, Tier,
};
use worker::Worker;

/// A checked plan on the CPU. Kernels run in a separate rayon pool, and the compute queue runs on
/// one of its threads, because submitting work to a pool from outside may allocate.
#[derive(Debug)]
pub struct CpuPlanDevice {
    program: Arc<Program>,
    tickets: Tickets,
    sequence: Sequence,
    threads: Vec<JoinHandle<()>>,
    /// Device memory that is released now.
    released: Vec<Range<usize>>,
    refuses_reclaim: bool,
}

impl CpuPlanDevice {
    fn start(
        &mut self,
        name: &str,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), DeviceError> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
        let no_thread = |error: std::io::Error| DeviceError::Thread { reason: error.to_string() };
        self.threads.push(thread.map_err(no_thread)?);
        Ok(())
    }

    /// Memory of a tier, once all queues are empty.
    fn quiet_memory(&mut self, tier: Tier) -> Result<&Memory, DeviceError> {
        self.synchronize()?;
        Ok(&self.program.memory[tier])
    }

    /// The disk tier if it is this one, once all queues are empty.
    fn quiet_disk(&mut self, tier: Tier) -> Result<Option<&DiskTier>, DeviceError> {
        if tier != Tier::DISK {
            return Ok(None);
        }
        self.synchronize()?;
        Ok(self.program.disk.as_ref())
    }
}

impl PlanDevice for CpuPlanDevice {
    type Options = CpuPlanOptions;

    const ALIGNMENT: usize = CpuDevice::ALIGNMENT;

    fn commit(plan: Arc<CheckedPlan>, options: CpuPlanOptions) -> Result<Self, DeviceError> {
        let recorder = options.trace.then(|| Recorder::new(&plan));
        let tickets = Tickets::new(&plan);
        let sequence = Sequence::new(&plan);
        let board = Board::new(&plan, options.commands_max, recorder);
        let (disk, ranks) = (options.disk.as_ref(), options.ranks.clone());
        let program = Arc::new(Program::new(plan, board, disk, ranks, options.products)?);
        let pool = threads::pool(options.threads)?;
        pool.install(kernels::warm_up);
        let plan = Arc::clone(&program.plan);
        let worker = |queue| Worker::new(queue, Arc::clone(&program), &options);
        let workers: Vec<_> = plan.queues().map(|queue| (queue, worker(queue))).collect();

        let threads = Vec::new();
        let released = Vec::new();
        let refuses_reclaim = options.refuses_reclaim;
        let mut device =
            CpuPlanDevice { program, tickets, sequence, threads, released, refuses_reclaim };
        // From here on, dropping the device ends the threads that were started.
        let mut pool = Some(pool);
        for (queue, worker) in workers {
            let name = plan.links.queue_name(queue);
            match pool.take().filter(|_| queue == Queue::COMPUTE) {
                Some(pool) => device.start(&name, move || pool.install(|| worker.run()))?,
                None => device.start(&name, move || worker.run())?,
            }
        }
        Ok(device)
    }

    fn plan(&self) -> &Arc<CheckedPlan> {
        &self.program.plan
    }

    fn set_supply(&mut self, supply: Arc<dyn Supply>) -> Result<(), DeviceError> {
        self.synchronize()?;
        self.program.set_supply(supply);
        Ok(())
    }

    fn wait_for_data(&mut self) -> Result<(), DeviceError> {
        let mut counts = PerQueue::default();
        if let Some(data) = self.program.plan.links.data_queue() {
            counts[data] = self.tickets.given()[data];
        }
        self.program.board.wait(counts)
    }

    fn issue(&mut self, segment: SegmentId) -> Result<(), DeviceError> {
        let plan = &self.program.plan;
        // After a failure every call returns it, even a call that is also out of order.
        self.program.board.check()?;
        if self.sequence.advance(plan, segment)? == Turn::Begins {
            self.program.board.wait(self.tickets.given())?;
            self.program.board.begin_trace();
        }
        self.program.board.wait_for(self.tickets.targets(self.sequence.host_copies(segment)))?;
        for index in plan.segment(segment).instructions.clone() {
            let (queue, command) = self.tickets.give(plan, InstructionId(index as u32));
            self.program.board.give(queue, command)?;
        }
        Ok(())
    }

    fn write_input(&mut self, input: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let input = &self.program.plan.inputs[input];
        check_size(&input.tensor, bytes.len())?;
        self.program.board.wait_for(self.tickets.targets(&input.copies))?;
        self.program.board.wait_for(self.tickets.targets(&input.fetches))?;
        let to = self.program.address(&input.tensor.name, input.place, bytes.len())?;
        // SAFETY: in bounds. The copies that read these bytes and the fetches that write them are
        // done, the checker has proved that no other instruction touches them, and `&mut self`
        // prevents new ones from being issued.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    fn read_result(&mut self, result: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let result = &self.program.plan.results[result];
        check_size(&result.tensor, bytes.len())?;
        self.program.board.wait_for(self.tickets.targets(&result.copies))?;
        let from = self.program.address(&result.tensor.name, result.place, bytes.len())?;
        // SAFETY: as in `write_input`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.program.board.wait(self.tickets.given())
    }

    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), DeviceError> {
        if let Some(disk) = self.quiet_disk(place.tier)? {
            return disk.write(place.offset, bytes);
        }
        let to = self.quiet_memory(place.tier)?.address("host data", place.offset, bytes.len())?;
        // SAFETY: in bounds, and the queues are empty while `self` is borrowed.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), DeviceError> {
        if let Some(disk) = self.quiet_disk(place.tier)? {
            return disk.read(place.offset, bytes);
        }
        let from =
            self.quiet_memory(place.tier)?.address("host data", place.offset, bytes.len())?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn read_all(&mut self, reads: Vec<(Place, &mut [u8])>) -> Result<(), DeviceError> {
        let mut pairs = Vec::with_capacity(reads.len());
        for (place, bytes) in reads {
            if let Some(disk) = self.quiet_disk(place.tier)? {
                disk.read(place.offset, bytes)?;
                continue;
            }
            let from =
                self.quiet_memory(place.tier)?.address("host data", place.offset, bytes.len())?;
            // SAFETY: in bounds and initialized, and the queues stay empty until this returns.
            let from = unsafe { std::slice::from_raw_parts(from.cast_const(), bytes.len()) };
            pairs.push((from, bytes));
        }
        copy_all(pairs);
        Ok(())
    }

    /// Runs in the caller's rayon pool.
    fn run_alone(
        &mut self,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<(), DeviceError> {
        let products = self.program.products;
        let memory = self.quiet_memory(Tier::DEVICE)?;
        let capacity = memory.capacity_bytes();
        let instruction = Instruction::new(capacity, graph, node, place, layer, products)?;
        // SAFETY: the queues are empty while `self` is borrowed.
        let frame = unsafe { memory.shared_frame() };
        catch_unwind(AssertUnwindSafe(|| super::execute(&instruction, &frame))).map_err(|panic| {
            DeviceError::Instruction {
                instruction: format!("{} `{}`", node.op.name(), node.name),
                queue: self.program.plan.links.queue_name(Queue::COMPUTE),
                tensor: graph.tensor(node.outputs[0]).name.clone(),
                reason: worker::message(&*panic),
            }
        })
    }

    fn memory_taken(&self) -> PerTier<usize> {
        let taken = PerTier::from_fn(|tier| self.program.memory[tier].capacity_bytes());
        match &self.program.disk {
            Some(disk) => taken.with(Tier::DISK, disk.bytes()),
            None => taken,
        }
    }

    fn release_idle(&mut self, idle: Idle) -> Result<u64, DeviceError> {
        self.reclaim_idle()?;
        let idle = self.program.plan.idle(idle);
        let memory = self.quiet_memory(Tier::DEVICE)?;
        // SAFETY: the queues are empty, and no instruction that is issued before the memory is
        // restored uses it.
        unsafe { memory.release(&idle)? };
        let released = memory.absent(&idle) as u64;
        self.released = idle;
        Ok(released)
    }

    fn reclaim_idle(&mut self) -> Result<(), DeviceError> {
        if self.released.is_empty() {
            return Ok(());
        }
        self.synchronize()?;
        let memory = &self.program.memory[Tier::DEVICE];
        if self.refuses_reclaim {
            return Err(MemoryRefused {
                tier: Tier::DEVICE,
                wanted_bytes: memory.absent(&self.released) as u64,
                available_bytes: None,
                reason: "it is refused on purpose".to_owned(),
            }
            .into());
        }
        // SAFETY: it was released, and the queues are empty.
        unsafe { memory.restore(Tier::DEVICE, &self.released)? };
        self.released.clear();
        Ok(())
    }

    fn memory_in_use_bytes(&self) -> Result<u64, DeviceError> {
        let memory = &self.program.memory[Tier::DEVICE];
        Ok((memory.capacity_bytes() - memory.absent(&self.released)) as u64)
    }

    fn disk_path(&self) -> Option<ScratchPath> {
        self.program.disk.as_ref().map(DiskTier::path)
    }

    /// Results depend on how products are summed, but not on threads or the instruction set.
    fn identity(&self) -> String {
        match self.program.products {
            Bf16Products::Fma => "cpu".to_owned(),
            Bf16Products::Amx => "cpu, bf16 products as AMX sums them".to_owned(),
        }
    }

    fn trace(&mut self) -> Result<Option<Trace>, DeviceError> {
        self.synchronize()?;
        Ok(self.program.board.trace())
    }
}

impl Drop for CpuPlanDevice {
    fn drop(&mut self) {
        self.program.board.stop();
        for thread in self.threads.drain(..) {
            // Kernel panics are caught in the thread. Others cannot be reported.
            let _ = thread.join();
        }
    }
}
