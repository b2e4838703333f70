//! The instructions of a plan, resolved to launches, products and copies.

use super::super::context::{Allocation, Kernel, Start, Stream};
use super::super::gemm::{Gemm, GemmCall, Unit};
use super::super::pinned::PinnedMemory;
use super::super::plan::{Action, Planner};
use super::super::ranks::{CudaRanks, PlacedMessages};
use super::super::transfer::{self, CopyRange, Direction, queue_copy};
use super::Tools;
use super::units::{Pair, pairs};
use crate::collectives::Messages;
use crate::disk::DiskCopy;
use crate::placed::{PlacedNode, node_of, tensor_name};
use crate::{DeviceError, PlanDevice};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use storm_plan::{Compute, Idle, InstructionId, Link, Plan, Tier, Work};
use storm_ranks::Place;

/// All launches, products and copies of a plan with their addresses, and the block of memory they use.
#[derive(Debug)]
pub(super) struct Program {
    /// The actions of all instructions, one after another.
    actions: Vec<Action>,
    /// By instruction.
    work: Vec<Prepared>,
    memory: Allocation,
    copy_slowdown: f64,
    /// `None` if the plan is for one rank.
    ranks: Option<Arc<CudaRanks>>,
}

#[derive(Debug)]
enum Prepared {
    /// A range of the actions.
    Kernels(Range<u32>),
    Copy(Direction, CopyRange),
    /// Messages to and from other ranks, in rounds.
    Collective(Vec<PlacedMessages>),
    /// A thread of the host runs it.
    OnHost,
}

impl Program {
    /// Allocates the block and resolves every instruction to addresses in it.
    pub(super) fn new(
        plan: &Plan,
        tools: &Tools,
        copy_slowdown: f64,
        ranks: Option<Arc<CudaRanks>>,
        releases: Option<Idle>,
    ) -> Result<Program, DeviceError> {
        let place = ranks.as_ref().map(|ranks| ranks.place());
        let is_planned =
            |place: Place| (place.rank, place.ranks) == (plan.rank.rank, plan.rank.ranks);
        if plan.rank.is_shared() && !place.is_some_and(is_planned) {
            return Err(DeviceError::NoRanks);
        }
        let bytes = plan.bytes[Tier::DEVICE];
        let memory = match releases {
            Some(idle) => tools.context.allocate_in_parts(bytes, &plan.idle(idle))?,
            None => tools.context.allocate(bytes)?,
        };
        let work = Vec::with_capacity(plan.instructions.len());
        let copy_slowdown = copy_slowdown.max(1.0);
        let actions = Vec::new();
        let mut program = Program { actions, work, memory, copy_slowdown, ranks };
        for instruction in &plan.instructions {
            let prepared = match &instruction.work {
                Work::Compute(compute) => program.prepare(plan, compute, tools)?,
                Work::Copy(copy) if DiskCopy::new(copy).is_some() => Prepared::OnHost,
                work @ Work::Copy(copy) => {
                    let check = |offset, capacity| {
                        let tensor = tensor_name(plan, work);
                        transfer::check(&tensor, offset, copy.bytes, capacity)
                    };
                    let (from, to) = (copy.from.offset, copy.to.offset);
                    let (direction, host_offset, device_offset) = match copy.link() {
                        Link::HOST_TO_DEVICE => (Direction::ToDevice, from, to),
                        Link::DEVICE_TO_HOST => (Direction::ToHost, to, from),
                        link => return Err(DeviceError::NoTier { tier: link.from.max(link.to) }),
                    };
                    check(device_offset, plan.bytes[Tier::DEVICE])?;
                    check(host_offset, plan.bytes[Tier::HOST])?;
                    let range = CopyRange { host_offset, device_offset, bytes: copy.bytes };
                    Prepared::Copy(direction, range)
                }
                Work::Fetch(_) | Work::ReadAhead(_) => Prepared::OnHost,
                work @ Work::Collective(collective) => {
                    let (name, rounds) =
                        (tensor_name(plan, work), Messages::rounds(plan, collective));
                    let placed =
                        |messages| PlacedMessages::new(plan, &name, messages, &program.memory);
                    Prepared::Collective(rounds.iter().map(placed).collect::<Result<_, _>>()?)
                }
            };
            program.work.push(prepared);
        }
        for pair in pairs(plan) {
            program.fuse(&pair, tools)?;
        }
        Ok(program)
    }

    /// Lets a product compute the gated unit that takes it, if there is a kernel for both.
    fn fuse(&mut self, pair: &Pair, tools: &Tools) -> Result<(), DeviceError> {
        let [Action::Gemm(call)] = self.actions(pair.product) else { return Ok(()) };
        let [Action::Launch(launch)] = self.actions(pair.unit) else { return Ok(()) };
        let address = |offset| self.memory.start() + offset as u64;
        if call.out != address(pair.made)
            || !tools.gemm.can_compute(call, pair.kind, &tools.kernels)
        {
            return Ok(());
        }
        let (kind, address) = (pair.kind, address(pair.unit_at));
        let unit = Unit { kind, address, launch: launch.clone() };
        let call = GemmCall { unit: Some(unit), ..call.clone() };
        let call = tools.gemm.prepare(call, &tools.kernels)?;
        let [product, unit] = [pair.product, pair.unit].map(InstructionId::index);
        if let Prepared::Kernels(range) = &self.work[product] {
            self.actions[range.start as usize] = Action::Gemm(call);
            self.work[unit] = Prepared::Kernels(range.end..range.end);
        }
        Ok(())
    }

    fn prepare(
        &mut self,
        plan: &Plan,
        compute: &Compute,
        tools: &Tools,
    ) -> Result<Prepared, DeviceError> {
        let (graph, node, place) = node_of(plan, compute);
        let (capacity, alignment) = (self.memory.bytes(), super::CudaPlanDevice::ALIGNMENT);
        let node = PlacedNode::new(capacity, alignment, graph, node, place, compute.layer)?;
        let first = self.actions.len() as u32;
        self.actions.extend(self.resolve(&node, tools)?);
        Ok(Prepared::Kernels(first..self.actions.len() as u32))
    }

    /// The launches and products for a node whose tensors are in the block.
    pub(super) fn resolve(
        &self,
        node: &PlacedNode,
        tools: &Tools,
    ) -> Result<Vec<Action>, DeviceError> {
        Planner::plan(node, &tools.kernels, &tools.gemm, self.memory.start())
    }

    /// The launches and products of an instruction; empty for a copy.
    pub(super) fn actions(&self, id: InstructionId) -> &[Action] {
        match &self.work[id.index()] {
            Prepared::Kernels(range) => &self.actions[range.start as usize..range.end as usize],
            Prepared::Copy(..) | Prepared::Collective(_) | Prepared::OnHost => &[],
        }
    }

    /// The block.
    pub(super) fn memory(&self) -> &Allocation {
        &self.memory
    }

    pub(super) fn memory_mut(&mut self) -> &mut Allocation {
        &mut self.memory
    }

    /// Queues an instruction. `what` names it in an error.
    ///
    /// # Safety
    /// The stream belongs to the instruction's queue. The instruction was issued in the order of a checked
    /// plan, and the stream waits for everything the instruction waits for; the checker has proved that
    /// nothing else touches its bytes then. `host` is as large as the plan says and lives until the stream has
    /// run the instruction.
    pub(super) unsafe fn queue(
        &self,
        id: InstructionId,
        stream: &Stream,
        gemm: &Gemm,
        host: &PinnedMemory,
        what: impl Fn() -> String,
    ) -> Result<(), DeviceError> {
        match &self.work[id.index()] {
            Prepared::Kernels(_) => {
                for action in self.actions(id) {
                    // SAFETY: as the caller guarantees. All kernels run in one stream.
                    unsafe { queue_action(action, stream, gemm, &what)? };
                }
                Ok(())
            }
            Prepared::Copy(direction, range) => {
                let copy = |range| {
                    // SAFETY: as the caller guarantees. The source does not change meanwhile, so
                    // repeating the copy changes nothing.
                    unsafe { queue_copy(stream, *direction, host, &self.memory, range) }
                };
                copy(*range)?;
                for bytes in again(range.bytes, self.copy_slowdown) {
                    copy(CopyRange { bytes, ..*range })?;
                }
                Ok(())
            }
            Prepared::Collective(rounds) => {
                let ranks = self.ranks.as_ref().ok_or(DeviceError::NoRanks)?;
                // SAFETY: as the caller guarantees. The plans of the other ranks have the
                // counterpart of this.
                Ok(unsafe { ranks.queue_timed(rounds, stream) }?)
            }
            Prepared::OnHost => Ok(()),
        }
    }

    /// The other ranks, if the plan is one of several.
    pub(super) fn ranks(&self) -> Option<&CudaRanks> {
        self.ranks.as_deref()
    }

    /// Finds the fastest algorithms for products in about `seconds`. See [`Gemm::tune`]. Overwrites
    /// the block.
    pub(super) fn tune(
        &mut self,
        stream: &Stream,
        tools: &Tools,
        seconds: f64,
        progress: impl FnMut(usize, usize),
    ) -> Result<(), DeviceError> {
        let Tools { gemm, kernels, .. } = tools;
        let calls = self.actions.iter().filter_map(|action| match action {
            Action::Gemm(call) => Some(call),
            Action::Launch(_) => None,
        });
        // SAFETY: the calls were prepared for addresses in the block, which nothing else uses yet.
        unsafe { gemm.tune(calls, stream, kernels, seconds, progress)? };
        for action in &mut self.actions {
            if let Action::Gemm(call) = action {
                *call = gemm.prepare(call.clone(), kernels)?;
            }
        }
        Ok(())
    }

    /// Runs every kernel and every product shape once, on any contents of the block, because the
    /// first run of each loads code and may allocate card memory.
    pub(super) fn warm_up(&self, stream: &Stream, gemm: &Gemm) -> Result<(), DeviceError> {
        let mut kernels: HashSet<Kernel> = HashSet::new();
        let mut products = HashSet::new();
        for action in &self.actions {
            let is_new = match action {
                Action::Launch(launch) => kernels.insert(launch.kernel),
                Action::Gemm(call) => {
                    products.insert(call.plan.as_ref().map(std::sync::Arc::as_ptr))
                }
            };
            if is_new {
                let what = || "running every kernel once".to_owned();
                // SAFETY: the addresses are in the block, which nothing else uses yet. Kernels stay inside
                // their tensors whatever the contents.
                unsafe { queue_action(action, stream, gemm, what)? };
            }
        }
        Ok(())
    }
}

/// Queues one action. `what` names it in an error.
///
/// # Safety
/// Until the stream has run it, the addresses are valid and nothing else uses that memory. All products run in
/// the same stream.
pub(super) unsafe fn queue_action(
    action: &Action,
    stream: &Stream,
    gemm: &Gemm,
    what: impl Fn() -> String,
) -> Result<(), DeviceError> {
    match action {
        // SAFETY: as the caller guarantees. The planner made the arguments for this kernel.
        Action::Launch(launch) => unsafe { launch.queue(stream, Start::InOrder, what) },
        // SAFETY: as the caller guarantees.
        Action::Gemm(call) => unsafe { gemm.queue(call, stream) },
    }
}

/// The bytes that a copy moves in each repetition so that it takes `slowdown` times as long: all of
/// them several times, then a part.
fn again(bytes: usize, slowdown: f64) -> impl Iterator<Item = usize> {
    let more = slowdown - 1.0;
    let part = (bytes as f64 * more.fract()) as usize;
    std::iter::repeat_n(bytes, more as usize).chain((part > 0).then_some(part))
}

#[cfg(test)]
mod tests {
    use super::again;

    #[test]
    fn slow_copies_move_more() {
        let list = |slowdown| again(1000, slowdown).collect::<Vec<_>>();
        assert!(list(1.0).is_empty());
        assert_eq!(list(1.25), [250]);
        assert_eq!(list(3.5), [1000, 1000, 500]);
        assert_eq!(list(2.0), [1000]);
    }
}
