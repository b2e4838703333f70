//! Runs checked plans.

mod exchange;
mod lasting;
mod room;

use crate::ExecError;
use exchange::Exchange;
use std::collections::BTreeMap;
use std::sync::Arc;
use storm_device::{PlanDevice, Supply, Trace};
use storm_graph::Tensor;
use storm_plan::{CheckedPlan, Idle, PerTier, Plan, Run, SegmentId};

/// Supplies the inputs of a step and receives its results. `micro_batch` counts through the whole step; it is `None`
/// for what exists once per step.
pub trait Feed {
    /// Why data is not available, or the step failed.
    type Error: From<ExecError>;

    /// The data of an input, given by its index in the plan's inputs.
    ///
    /// # Errors
    /// There is no data. The step ends there, and no other step can follow.
    fn input(
        &mut self,
        index: usize,
        tensor: &Tensor,
        micro_batch: Option<usize>,
    ) -> Result<&[u8], Self::Error>;

    /// Receives a result, given by its index in the plan's results. Those of micro-batches arrive in their
    /// order, before those of the step.
    fn result(&mut self, index: usize, tensor: &Tensor, micro_batch: Option<usize>, bytes: &[u8]);
}

/// A checked plan on a device.
///
/// The host runs ahead of the queues. It waits only for results that the next segment would overwrite, and for
/// the copies of inputs that it is about to write again.
#[derive(Debug)]
pub struct Planned<D> {
    device: D,
    plan: Arc<CheckedPlan>,
    /// Indices of the persistent tensors.
    by_name: BTreeMap<String, usize>,
    /// Shared tensors: the index of each, and the first byte and index of each part this rank owns.
    sharded: BTreeMap<String, (usize, Vec<(usize, usize)>)>,
    /// What the host exchanges with each run of a segment.
    segments: Vec<Exchange>,
    /// What it exchanges with a whole step, flush and evaluation.
    step: Exchange,
    flush: Exchange,
    evaluation: Exchange,
    /// Results of micro-batches that were issued and not read yet, with the first micro-batch of their group.
    unread: Vec<(usize, usize)>,
    /// A buffer for the largest result.
    staging: Vec<u8>,
    /// Whether idle device memory was released.
    is_released: bool,
}

impl<D: PlanDevice> Planned<D> {
    /// Commits a plan to a device: allocates all memory and prepares everything.
    ///
    /// # Errors
    /// The memory is not available, or an instruction does not fit the device.
    pub fn commit(plan: Arc<CheckedPlan>, options: D::Options) -> Result<Planned<D>, ExecError> {
        let device = D::commit(Arc::clone(&plan), options)?;
        let names = plan.lasting.iter().map(|lasting| lasting.tensor.name.clone());
        let by_name = names.enumerate().map(|(index, name)| (name, index)).collect();
        let mut sharded: BTreeMap<String, (usize, Vec<(usize, usize)>)> = BTreeMap::new();
        for (index, whole) in plan.sharded.iter().enumerate() {
            sharded.insert(whole.tensor.name.clone(), (index, Vec::new()));
        }
        for (index, lasting) in plan.lasting.iter().enumerate() {
            let shard = lasting.shard.as_ref();
            if let Some((shard, (_, parts))) =
                shard.and_then(|shard| Some((shard, sharded.get_mut(&shard.tensor)?)))
            {
                parts.push((shard.first_byte, index));
            }
        }
        let ids = (0..plan.segments.len()).map(|index| SegmentId(index as u32));
        let segments: Vec<Exchange> = ids.map(|id| Exchange::of_run(&plan, id)).collect();
        let step: Vec<SegmentId> = plan.step.iter().map(|run| run.segment).collect();
        let unread = segments.iter().map(|exchange| exchange.results.len()).max().unwrap_or(0);
        let largest = plan.results.iter().map(|result| result.tensor.size_bytes()).max();
        Ok(Planned {
            step: Exchange::of_whole(&plan, &step),
            flush: Exchange::of_whole(&plan, plan.flush.as_slice()),
            evaluation: Exchange::of_whole(&plan, plan.evaluation.as_slice()),
            unread: Vec::with_capacity(unread),
            staging: vec![0; largest.unwrap_or(0)],
            is_released: false,
            device,
            by_name,
            sharded,
            segments,
            plan,
        })
    }

    /// Sets the data source of later steps. A step's feed supplies the other inputs.
    ///
    /// # Errors
    /// From earlier work.
    pub fn set_supply(&mut self, supply: Arc<dyn Supply>) -> Result<(), ExecError> {
        Ok(self.device.set_supply(supply)?)
    }

    /// Waits until the data of the next step has been read.
    ///
    /// # Errors
    /// From earlier work.
    pub fn wait_for_data(&mut self) -> Result<(), ExecError> {
        Ok(self.device.wait_for_data()?)
    }

    /// Micro-batches in a step.
    pub fn micro_batches(&self) -> usize {
        let of_run = |run: &Run| run.times * self.segments[run.segment.0 as usize].micro_batches;
        self.plan.step.iter().map(of_run).sum()
    }

    /// Runs a step. When it returns, all results have arrived, but queues may still be busy with work that is not
    /// needed before the next step. Errors there are reported by a later call.
    ///
    /// # Errors
    /// From the device or the feed.
    pub fn step<F: Feed>(&mut self, feed: &mut F) -> Result<(), F::Error> {
        self.reclaim_idle()?;
        let plan = Arc::clone(&self.plan);
        // Left over from a failed step.
        self.unread.clear();
        for &input in &self.step.inputs {
            write_input(&mut self.device, &plan, feed, input, None)?;
        }
        let mut first = 0;
        for run in &plan.step {
            for _ in 0..run.times {
                self.segment(feed, run.segment, first)?;
                first += self.segments[run.segment.0 as usize].micro_batches;
            }
        }
        self.read_unread(feed)?;
        for &result in &self.step.results {
            read_result(&mut self.device, &plan, feed, result, None, &mut self.staging)?;
        }
        Ok(())
    }

    /// Applies the update that the plan defers to the next step, if there is one.
    ///
    /// # Errors
    /// From the device or the feed.
    pub fn flush<F: Feed>(&mut self, feed: &mut F) -> Result<(), F::Error> {
        let plan = Arc::clone(&self.plan);
        let Some(segment) = plan.flush else { return Ok(()) };
        self.reclaim_idle()?;
        for &input in &self.flush.inputs {
            write_input(&mut self.device, &plan, feed, input, None)?;
        }
        self.device.issue(segment).map_err(ExecError::from)?;
        for &result in &self.flush.results {
            read_result(&mut self.device, &plan, feed, result, None, &mut self.staging)?;
        }
        Ok(())
    }

    /// Micro-batches per evaluation; `None` if the plan has no evaluation.
    pub fn evaluated_micro_batches(&self) -> Option<usize> {
        let segment = self.plan.evaluation?;
        Some(self.segments[segment.0 as usize].micro_batches)
    }

    /// Runs the forward pass of micro-batches from `first` on, as many as [`Planned::evaluated_micro_batches`]
    /// says. Persistent tensors do not change.
    ///
    /// # Errors
    /// From the device or the feed.
    pub fn evaluate<F: Feed>(&mut self, feed: &mut F, first: usize) -> Result<(), F::Error> {
        let plan = Arc::clone(&self.plan);
        let Some(segment) = plan.evaluation else { return Ok(()) };
        self.unread.clear();
        for &input in &self.evaluation.inputs {
            write_input(&mut self.device, &plan, feed, input, None)?;
        }
        self.segment(feed, segment, first)?;
        self.read_unread(feed)
    }

    /// One run of a segment, whose micro-batches start at `first`.
    fn segment<F: Feed>(
        &mut self,
        feed: &mut F,
        segment: SegmentId,
        first: usize,
    ) -> Result<(), F::Error> {
        // Inputs first: their copies complete earlier than those of results.
        let index = segment.0 as usize;
        for &input in &self.segments[index].inputs {
            let offset = self.plan.inputs[input].micro_batch.map_or(0, usize::from);
            write_input(&mut self.device, &self.plan, feed, input, Some(first + offset))?;
        }
        if !self.segments[index].results.is_empty() {
            self.read_unread(feed)?;
        }
        self.device.issue(segment).map_err(ExecError::from)?;
        self.unread.extend(self.segments[index].results.iter().map(|&result| (result, first)));
        Ok(())
    }

    fn read_unread<F: Feed>(&mut self, feed: &mut F) -> Result<(), F::Error> {
        for (result, first) in self.unread.drain(..) {
            let offset = self.plan.results[result].micro_batch.map_or(0, usize::from);
            let micro_batch = Some(first + offset);
            let staging = &mut self.staging;
            read_result(&mut self.device, &self.plan, feed, result, micro_batch, staging)?;
        }
        Ok(())
    }

    /// Releases device memory that is idle until the next step. Returns its size. See
    /// [`PlanDevice::release_idle`] for what may follow.
    ///
    /// # Errors
    /// From the device.
    pub fn release_idle(&mut self, idle: Idle) -> Result<u64, ExecError> {
        let bytes = self.device.release_idle(idle)?;
        self.is_released = true;
        Ok(bytes)
    }

    /// Reclaims the released memory. Steps do that automatically.
    ///
    /// # Errors
    /// The memory is no longer available. Persistent tensors that were not released are intact.
    pub fn reclaim_idle(&mut self) -> Result<(), ExecError> {
        if self.is_released {
            self.device.reclaim_idle()?;
            self.is_released = false;
        }
        Ok(())
    }

    /// Waits until everything is done.
    ///
    /// # Errors
    /// From earlier work.
    pub fn synchronize(&mut self) -> Result<(), ExecError> {
        Ok(self.device.synchronize()?)
    }

    /// Turns recording of later steps on or off, on a device opened with recording.
    pub fn set_recording(&mut self, recording: bool) {
        self.device.set_recording(recording);
    }

    /// The trace of the last recorded step or flush; `None` if the device does not record.
    ///
    /// # Errors
    /// From earlier work.
    pub fn trace(&mut self) -> Result<Option<Trace>, ExecError> {
        Ok(self.device.trace()?)
    }

    /// The plan.
    pub fn plan(&self) -> &Arc<CheckedPlan> {
        &self.plan
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device, mutable, to connect it to other ranks.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Ends the plan and returns the device, whose memory the next one may reuse.
    pub fn into_device(self) -> D {
        self.device
    }

    /// Bytes allocated in each tier.
    pub fn memory_taken(&self) -> PerTier<usize> {
        self.device.memory_taken()
    }
}

fn write_input<D: PlanDevice, F: Feed>(
    device: &mut D,
    plan: &Plan,
    feed: &mut F,
    index: usize,
    micro_batch: Option<usize>,
) -> Result<(), F::Error> {
    let bytes = feed.input(index, &plan.inputs[index].tensor, micro_batch)?;
    Ok(device.write_input(index, bytes).map_err(ExecError::from)?)
}

fn read_result<D: PlanDevice, F: Feed>(
    device: &mut D,
    plan: &Plan,
    feed: &mut F,
    index: usize,
    micro_batch: Option<usize>,
    staging: &mut [u8],
) -> Result<(), F::Error> {
    let tensor = &plan.results[index].tensor;
    let bytes = &mut staging[..tensor.size_bytes()];
    device.read_result(index, bytes).map_err(ExecError::from)?;
    feed.result(index, tensor, micro_batch, bytes);
    Ok(())
}
