//! A device whose steps take as long as a test says.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use storm_device::{
    DeviceError, MemoryRefused, NullDevice, NullOptions, PlanDevice, Supply, Trace,
};
use storm_graph::{Graph, Node, TensorId};
use storm_plan::{Budget, CheckedPlan, HardwareProfile, PerTier, Place, Queue, SegmentId, Tier};
use storm_train::{AnyBatch, Batch, Correction, LaunchSite, Notice, RunError, StepPlan};

/// The real time of a step, whatever profile a plan was made with.
#[derive(Clone)]
pub(crate) struct Truth {
    /// Whether there is no memory for a plan.
    pub(crate) refuses: Rc<dyn Fn(&CheckedPlan) -> bool>,
    pub(crate) profile: HardwareProfile,
    /// Factor by which everything in a plan is slower.
    pub(crate) factor: Rc<dyn Fn(&CheckedPlan) -> f64>,
    /// How much of a kernel's time a recording shows. The rest is between kernels.
    pub(crate) recorded: f64,
}

impl Truth {
    pub(crate) fn new(
        profile: HardwareProfile,
        factor: impl Fn(&CheckedPlan) -> f64 + 'static,
    ) -> Truth {
        Truth { profile, factor: Rc::new(factor), refuses: Rc::new(|_| false), recorded: 1.0 }
    }
}

pub(crate) struct VirtualDevice {
    null: NullDevice,
    recorded: f64,
}

impl PlanDevice for VirtualDevice {
    type Options = Truth;

    const ALIGNMENT: usize = NullDevice::ALIGNMENT;

    fn commit(plan: Arc<CheckedPlan>, truth: Truth) -> Result<VirtualDevice, DeviceError> {
        if (truth.refuses)(&plan) {
            let refused = MemoryRefused {
                tier: Tier::DEVICE,
                wanted_bytes: plan.bytes[Tier::DEVICE] as u64,
                available_bytes: None,
                reason: "the test refuses it".to_owned(),
            };
            return Err(DeviceError::Memory(refused));
        }
        let mut options = NullOptions::of_profile(&plan, &truth.profile);
        let factor = (truth.factor)(&plan);
        options.instruction_seconds.iter_mut().for_each(|seconds| *seconds *= factor);
        let recorded = truth.recorded;
        NullDevice::commit(plan, options).map(|null| VirtualDevice { null, recorded })
    }

    fn plan(&self) -> &Arc<CheckedPlan> {
        self.null.plan()
    }

    fn set_supply(&mut self, supply: Arc<dyn Supply>) -> Result<(), DeviceError> {
        self.null.set_supply(supply)
    }

    fn wait_for_data(&mut self) -> Result<(), DeviceError> {
        self.null.wait_for_data()
    }

    fn issue(&mut self, segment: SegmentId) -> Result<(), DeviceError> {
        self.null.issue(segment)
    }

    fn write_input(&mut self, input: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.null.write_input(input, bytes)
    }

    fn read_result(&mut self, result: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.null.read_result(result, bytes)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.null.synchronize()
    }

    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), DeviceError> {
        self.null.write(place, bytes)
    }

    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.null.read(place, bytes)
    }

    fn run_alone(
        &mut self,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<(), DeviceError> {
        self.null.run_alone(graph, node, place, layer)
    }

    fn memory_taken(&self) -> PerTier<usize> {
        self.null.memory_taken()
    }

    fn now(&self) -> Duration {
        self.null.now()
    }

    fn identity(&self) -> String {
        self.null.identity()
    }

    fn trace(&mut self) -> Result<Option<Trace>, DeviceError> {
        let mut trace = self.null.trace()?;
        let plan = self.null.plan();
        for span in trace.iter_mut().flat_map(|trace| &mut trace.spans) {
            if plan.queue(span.instruction) == Queue::COMPUTE {
                let hidden = (1.0 - self.recorded) * (span.end_ns - span.start_ns) as f64;
                span.start_ns += hidden as u64;
            }
        }
        Ok(trace)
    }
}

/// A launch on such a device, and what it reported.
pub(crate) struct Site {
    pub(crate) truth: Truth,
    pub(crate) sequence: usize,
    /// Bytes of device memory of each plan that was put on the device.
    pub(crate) committed: Vec<usize>,
    pub(crate) corrections: Vec<Correction>,
    /// Sizes of micro-batches that could not be tried.
    pub(crate) not_tried: Vec<usize>,
}

impl Site {
    pub(crate) fn new(truth: Truth, sequence: usize) -> Site {
        Site {
            truth,
            sequence,
            committed: Vec::new(),
            corrections: Vec::new(),
            not_tried: Vec::new(),
        }
    }
}

impl LaunchSite<VirtualDevice> for Site {
    fn device(&mut self, _: Budget, _: &StepPlan, _: Option<VirtualDevice>) -> Truth {
        self.truth.clone()
    }

    fn batches(&mut self, batch: usize, accumulate: usize) -> Result<Vec<AnyBatch>, RunError> {
        let tokens = vec![1; batch * self.sequence];
        let batch = Batch::new(tokens.clone(), tokens, self.sequence);
        Ok(vec![batch.into(); accumulate])
    }

    fn notice(&mut self, notice: Notice<'_>) {
        match notice {
            Notice::Committed(plan) => {
                self.committed.push(plan.planned.plan.bytes[Tier::DEVICE]);
            }
            Notice::NotTried { split, reason } => {
                assert!(reason.contains("memory"), "{reason}");
                self.not_tried.push(split.batch);
            }
            Notice::Corrected(correction) => self.corrections.push(*correction),
            _ => {}
        }
    }
}
