use super::{Event, Observer, Run, RunError};
use crate::{Alarm, MemoryReading, Storage, TrainError};
use storm_device::{DeviceError, PlanDevice};
use storm_exec::ExecError;

impl<D: PlanDevice, S: Storage> Run<D, S> {
    /// Reports device memory that is not as planned. Returns an alarm if the run should be saved at once.
    pub(super) fn look_at_memory(
        &mut self,
        observer: &mut dyn Observer,
    ) -> Result<Option<Alarm>, RunError> {
        let Some(guard) = self.guard.as_mut().filter(|guard| guard.is_due()) else {
            return Ok(None);
        };
        let failed = |error: DeviceError| TrainError::from(ExecError::from(error));
        let device = self.trainer.device();
        let reading = MemoryReading {
            in_use_bytes: device.memory_in_use_bytes().map_err(failed)?,
            free_bytes: device.memory_free_bytes().map_err(failed)?,
        };
        let Some(alarm) = guard.read(reading) else { return Ok(None) };
        observer.event(&Event::MemoryAlarm { step: self.progress.step, alarm })?;
        Ok(Some(alarm).filter(Alarm::is_critical))
    }
}
