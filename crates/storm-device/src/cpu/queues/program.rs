use super::board::Board;
use crate::DeviceError;
use crate::collectives::{Collectives, Messages, Packed};
use crate::cpu::dispatch::execute;
use crate::cpu::instruction::Instruction;
use crate::cpu::kernels::gemm::Bf16Products;
use crate::cpu::memory::Memory;
use crate::disk::{DiskCopy, DiskOptions, DiskTier};
use crate::error::Failed;
use crate::placed::{node_of, tensor_name};
use crate::supply::{self, Supplied, Supply};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;
use storm_plan::{
    CheckedPlan, Compute, Fetch, InstructionId, PerTier, Place, Plan, ReadAhead, Tier, Work,
};

/// State that the threads of all queues share: the resolved plan and the memory it runs on.
pub(super) struct Program {
    pub(super) plan: Arc<CheckedPlan>,
    pub(super) memory: PerTier<Memory>,
    /// None if a block of memory takes its place.
    pub(super) disk: Option<DiskTier>,
    pub(super) board: Board,
    pub(super) products: Bf16Products,
    /// By instruction.
    work: Vec<Prepared>,
    supply: RwLock<Supplied>,
    /// None if the plan is for one rank.
    ranks: Option<Arc<dyn Collectives>>,
    /// Send and receive buffers of collectives.
    mail: Mutex<(Vec<u8>, Vec<u8>)>,
    origin: Instant,
}

#[derive(Debug)]
enum Prepared {
    Kernel(Box<Instruction>),
    Copy {
        from: Place,
        to: Place,
        bytes: usize,
    },
    Disk(DiskCopy),
    Fetch(Fetch),
    ReadAhead {
        micro_batches: usize,
    },
    /// Its rounds.
    Collective(Vec<Messages>),
}

impl Program {
    pub(super) fn new(
        plan: Arc<CheckedPlan>,
        board: Board,
        disk: Option<&DiskOptions>,
        ranks: Option<Arc<dyn Collectives>>,
        products: Bf16Products,
    ) -> Result<Program, DeviceError> {
        if plan.rank.is_shared() && ranks.is_none() {
            return Err(DeviceError::NoRanks);
        }
        let mut disk = DiskTier::new(&plan, disk)?;
        let memory = PerTier::try_from_fn(|tier| match &disk {
            Some(_) if tier == Tier::DISK => Memory::new(tier, 0),
            _ => Memory::new(tier, plan.bytes[tier]),
        })?;
        if let Some(disk) = &mut disk {
            let host = memory[Tier::HOST].address("", 0, 0)?;
            // SAFETY: the memory has the size in the plan, and both belong to the program.
            unsafe { disk.register(host) };
        }
        let work = (0..plan.instructions.len())
            .map(|index| {
                let id = InstructionId(index as u32);
                prepare(&plan, &memory, disk.as_ref(), id, products)
            })
            .collect::<Result<Vec<Prepared>, _>>()?;
        let (mut sent, mut received) = (0, 0);
        for prepared in &work {
            if let Prepared::Collective(rounds) = prepared {
                for sizes in rounds.iter().map(Messages::sizes) {
                    (sent, received) = (sent.max(sizes.0), received.max(sizes.1));
                }
            }
        }
        let mail = Mutex::new((vec![0; sent], vec![0; received]));
        let (supply, origin) = (RwLock::default(), Instant::now());
        let program =
            Program { plan, memory, disk, board, products, work, supply, ranks, mail, origin };
        let inputs = program.plan.inputs.iter().map(|input| (&input.tensor, input.place));
        let results = program.plan.results.iter().map(|result| (&result.tensor, result.place));
        for (tensor, place) in inputs.chain(results) {
            program.address(&tensor.name, place, tensor.size_bytes())?;
        }
        Ok(program)
    }

    /// Sets the source of data for later steps.
    pub(super) fn set_supply(&self, supply: Arc<dyn Supply>) {
        *self.supply.write().unwrap_or_else(PoisonError::into_inner) = Some(supply);
    }

    /// Runs an instruction to completion.
    ///
    /// # Errors
    /// There is no data to fetch, the disk fails, or a rank is gone.
    ///
    /// # Panics
    /// If an id in its data is out of range.
    ///
    /// # Safety
    /// The instruction was issued in the order of a checked plan, everything it waits for is done,
    /// and everything that waits for it keeps waiting until this returns. The checker has proved
    /// that nothing else touches its bytes meanwhile: every instruction that could is ordered
    /// before or after it.
    pub(super) unsafe fn run(&self, id: InstructionId) -> Result<(), Failed> {
        match &self.work[id.index()] {
            Prepared::Kernel(instruction) => {
                // SAFETY: the caller and the checked plan guarantee that nothing else touches these
                // bytes.
                let frame = unsafe { self.memory[Compute::TIER].shared_frame() };
                execute(instruction, &frame);
            }
            &Prepared::Copy { from, to, bytes } => {
                let [from, to] = [from, to].map(|place| {
                    self.address("", place, bytes).expect("checked when it was prepared")
                });
                // SAFETY: in bounds of two blocks that do not overlap, since a link connects two
                // tiers. The caller and the checked plan guarantee that no other instruction writes
                // the source or accesses the destination meanwhile.
                unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
            }
            &Prepared::Disk(copy) => {
                let disk = self.disk.as_ref().expect("checked when it was prepared");
                let place = Place { tier: Tier::HOST, offset: copy.host };
                let host = self.address("", place, copy.bytes).expect("checked likewise");
                // SAFETY: in bounds. Each direction has a queue, which is one thread. The caller
                // and the checked plan guarantee the rest.
                unsafe { disk.run(copy, host)? };
            }
            Prepared::Fetch(fetch) => {
                let supply = self.supply.read().unwrap_or_else(PoisonError::into_inner);
                let address = |name: &str, place, bytes| self.address(name, place, bytes);
                // SAFETY: in bounds. The caller and the checked plan guarantee that no other
                // instruction accesses the inputs meanwhile, and the host does not write inputs
                // that are fetched.
                let fetched = unsafe { supply::fetch(&supply, &self.plan, fetch, address) };
                fetched.map_err(|error| error.to_string())?;
            }
            &Prepared::ReadAhead { micro_batches } => {
                let supply = self.supply.read().unwrap_or_else(PoisonError::into_inner);
                if let Some(supply) = &*supply {
                    supply.read_ahead(micro_batches);
                }
            }
            Prepared::Collective(rounds) => {
                for messages in rounds {
                    // SAFETY: the caller and the checked plan guarantee that nothing else touches
                    // these bytes.
                    unsafe { self.send_and_receive(messages)? };
                }
            }
        }
        Ok(())
    }

    /// Moves the pieces of a round of a collective.
    ///
    /// # Safety
    /// As [`Program::run`].
    unsafe fn send_and_receive(&self, messages: &Messages) -> Result<(), String> {
        let ranks = self.ranks.as_ref().expect("checked when it was committed");
        let mut mail = self.mail.lock().unwrap_or_else(PoisonError::into_inner);
        let (send, receive) = &mut *mail;
        let address =
            |place, bytes| self.address("", place, bytes).expect("checked when it was prepared");
        for &Packed { place, at, bytes } in &messages.pack {
            let to = send[at..at + bytes].as_mut_ptr();
            // SAFETY: in bounds of two blocks that do not overlap, and nothing else touches them
            // meanwhile.
            unsafe { std::ptr::copy_nonoverlapping(address(place, bytes), to, bytes) };
        }
        ranks.exchange(send, &messages.sends, receive, &messages.receives)?;
        for &Packed { place, at, bytes } in &messages.unpack {
            let from = receive[at..at + bytes].as_ptr();
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from, address(place, bytes), bytes) };
        }
        for &(from, to, bytes) in &messages.kept {
            // SAFETY: as above. The checker refuses a piece that is received where it is sent from.
            unsafe {
                std::ptr::copy_nonoverlapping(address(from, bytes), address(to, bytes), bytes)
            };
        }
        Ok(())
    }

    /// The address of some bytes of a tier.
    pub(super) fn address(
        &self,
        tensor: &str,
        place: Place,
        bytes: usize,
    ) -> Result<*mut u8, DeviceError> {
        self.memory[place.tier].address(tensor, place.offset, bytes)
    }

    /// Nanoseconds since the program was created.
    pub(super) fn now_ns(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }

    /// The error for an instruction that failed.
    pub(super) fn failure(&self, id: InstructionId, failed: Failed) -> DeviceError {
        DeviceError::instruction(&self.plan, id, failed)
    }
}

fn prepare(
    plan: &Plan,
    memory: &PerTier<Memory>,
    disk: Option<&DiskTier>,
    id: InstructionId,
    products: Bf16Products,
) -> Result<Prepared, DeviceError> {
    match &plan.instruction(id).work {
        Work::Compute(compute) => {
            let (graph, node, place) = node_of(plan, compute);
            let capacity = memory[Compute::TIER].capacity_bytes();
            let layer = compute.layer;
            let instruction = Instruction::new(capacity, graph, node, place, layer, products)?;
            Ok(Prepared::Kernel(Box::new(instruction)))
        }
        work @ Work::Copy(copy) => {
            let name = tensor_name(plan, work);
            if let Some(copy) = DiskCopy::new(copy).filter(|_| disk.is_some()) {
                memory[Tier::HOST].address(&name, copy.host, copy.bytes)?;
                return Ok(Prepared::Disk(copy));
            }
            for Place { tier, offset } in copy.ends() {
                memory[tier].address(&name, offset, copy.bytes)?;
            }
            let &storm_plan::Copy { from, to, bytes, .. } = copy;
            Ok(Prepared::Copy { from, to, bytes })
        }
        Work::Fetch(fetch) => Ok(Prepared::Fetch(fetch.clone())),
        &Work::ReadAhead(ReadAhead { micro_batches, .. }) => {
            Ok(Prepared::ReadAhead { micro_batches })
        }
        work @ Work::Collective(collective) => {
            let (name, rounds) = (tensor_name(plan, work), Messages::rounds(plan, collective));
            for messages in &rounds {
                let packed = messages.pack.iter().chain(&messages.unpack);
                let moved = packed.map(|packed| (packed.place, packed.bytes));
                let kept = messages.kept.iter().flat_map(|&(from, to, n)| [(from, n), (to, n)]);
                for (Place { tier, offset }, bytes) in moved.chain(kept) {
                    memory[tier].address(&name, offset, bytes)?;
                }
            }
            Ok(Prepared::Collective(rounds))
        }
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").field("board", &self.board).finish_non_exhaustive()
    }
}
