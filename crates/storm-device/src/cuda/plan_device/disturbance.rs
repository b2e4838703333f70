use super::super::context::Stream;
use super::super::delay::{Delay, Trap};
use super::super::modules::Kernels;
use super::CudaPlanOptions;
use crate::DeviceError;
use crate::chaos::Chaos;
use storm_plan::{PerQueue, Queue};

/// Disturbances of the queues for tests: delays, which must not change results, and a failure.
#[derive(Debug)]
pub(super) struct Disturbance {
    chaos: Option<(Delay, PerQueue<Chaos>)>,
    /// The failure, and how many instructions of the compute queue run before it.
    fault: Option<(Trap, u64)>,
}

impl Disturbance {
    pub(super) fn new(
        options: &CudaPlanOptions,
        kernels: &Kernels,
    ) -> Result<Disturbance, DeviceError> {
        let chaos = match options.chaos_seed {
            Some(seed) => {
                Some((Delay::new(kernels)?, PerQueue::from_fn(|queue| Chaos::new(seed, queue))))
            }
            None => None,
        };
        let fault = match options.fail_after {
            Some(count) => Some((Trap::new(kernels)?, count)),
            None => None,
        };
        Ok(Disturbance { chaos, fault })
    }

    /// Runs the delay kernel once, with no delay. The kernel that fails cannot be run in advance.
    pub(super) fn warm_up(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.chaos.as_mut().map_or(Ok(()), |(delay, _)| delay.queue(stream, 0))
    }

    /// Disturbs the next instruction of a queue.
    pub(super) fn precede(&mut self, queue: Queue, stream: &Stream) -> Result<(), DeviceError> {
        if let Some((delay, chaos)) = &mut self.chaos {
            delay.queue(stream, chaos[queue].delay_ns())?;
        }
        match &mut self.fault {
            Some((trap, 0)) if queue == Queue::COMPUTE => trap.queue(stream),
            Some((_, count)) if queue == Queue::COMPUTE => {
                *count -= 1;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
