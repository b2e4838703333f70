use super::super::context::Stream;
use super::super::delay::{Delay, Trap};
use super::super::modules::Kernels;
use super::{CudaFault, CudaPlanOptions};
use crate::DeviceError;
use crate::chaos::Chaos;
use storm_plan::Queue;

/// What is done to the queues on purpose: delays that must change nothing, and a failure.
#[derive(Debug)]
pub(super) struct Disturbance {
    chaos: Option<(Delay, [Chaos; Queue::ALL.len()])>,
    fault: Option<(Trap, CudaFault)>,
    /// Instructions given to each queue.
    given: [u64; Queue::ALL.len()],
}

impl Disturbance {
    pub(super) fn new(
        options: &CudaPlanOptions,
        kernels: &Kernels,
    ) -> Result<Disturbance, DeviceError> {
        let chaos = match options.chaos_seed {
            Some(seed) => {
                Some((Delay::new(kernels)?, Queue::ALL.map(|queue| Chaos::new(seed, queue))))
            }
            None => None,
        };
        let fault = match options.fault {
            Some(fault) => Some((Trap::new(kernels)?, fault)),
            None => None,
        };
        Ok(Disturbance { chaos, fault, given: [0; Queue::ALL.len()] })
    }

    /// Runs what can be run without harm once.
    pub(super) fn warm_up(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.chaos.as_mut().map_or(Ok(()), |(delay, _)| delay.queue(stream, 0))
    }

    /// Disturbs the next instruction of a queue.
    pub(super) fn precede(&mut self, queue: Queue, stream: &Stream) -> Result<(), DeviceError> {
        if let Some((delay, chaos)) = &mut self.chaos {
            delay.queue(stream, chaos[queue.index()].delay_ns())?;
        }
        let given = &mut self.given[queue.index()];
        if let Some((trap, fault)) = &self.fault
            && fault.queue == queue
            && fault.after == *given
        {
            trap.queue(stream)?;
        }
        *given += 1;
        Ok(())
    }
}
