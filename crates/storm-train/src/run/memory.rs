//! Device memory during a run: that of this process, and that of other ranks, which tell it with every step.

use super::{Event, Observer, Run, RunError};
use crate::{Alarm, Guard, MemoryReading, RankFigures, Storage, TrainError};
use storm_device::PlanDevice;
use storm_exec::ExecError;

/// Watches all ranks. Their plans use the same memory.
#[derive(Debug)]
pub(super) struct Watch {
    own: Guard,
    /// Of rank 1, rank 2, …, once they have told their memory.
    others: Vec<Guard>,
}

impl Watch {
    pub(super) fn new(guard: Guard) -> Watch {
        Watch { own: guard, others: Vec::new() }
    }

    /// Returns alarms that are new, with the rank if there are several.
    fn read(&mut self, own: MemoryReading, ranks: &[RankFigures]) -> Vec<(Option<u32>, Alarm)> {
        let others = ranks.get(1..).unwrap_or_default();
        if self.others.is_empty() {
            self.others = vec![self.own.unread(); others.len()];
        }
        let own_rank = (!others.is_empty()).then_some(0);
        let mut alarms: Vec<_> =
            self.own.read(own).into_iter().map(|alarm| (own_rank, alarm)).collect();
        for (guard, figures) in self.others.iter_mut().zip(others) {
            let reading = MemoryReading {
                in_use_bytes: figures.device_bytes,
                free_bytes: figures.device_free_bytes,
            };
            alarms.extend(guard.read(reading).map(|alarm| (Some(figures.rank), alarm)));
        }
        alarms
    }
}

impl<D: PlanDevice, S: Storage> Run<D, S> {
    /// Reports device memory that is not as planned, on any rank. Returns an alarm if the run should be saved at once.
    pub(super) fn look_at_memory(
        &mut self,
        observer: &mut dyn Observer,
    ) -> Result<Option<Alarm>, RunError> {
        let Some(watch) = self.watch.as_mut().filter(|watch| watch.own.is_due()) else {
            return Ok(None);
        };
        let own = MemoryReading::of(self.trainer.device());
        let own = own.map_err(|error| TrainError::from(ExecError::from(error)))?;
        let (step, mut critical) = (self.progress.step, None);
        for (rank, alarm) in watch.read(own, self.trainer.rank_figures()) {
            observer.event(&Event::MemoryAlarm { step, rank, alarm })?;
            critical = critical.or(Some(alarm).filter(Alarm::is_critical));
        }
        Ok(critical)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn figures(rank: u32, device_bytes: u64, free: u64) -> RankFigures {
        RankFigures {
            rank,
            seconds: 1.0,
            collective_seconds: 0.5,
            device_bytes,
            device_free_bytes: Some(free),
            host_bytes: 0,
            process_bytes: None,
        }
    }

    #[test]
    fn memory_of_every_rank_is_watched() {
        let mut watch = Watch::new(Guard::new(1000, 2000, Duration::ZERO));
        let own = MemoryReading { in_use_bytes: 1000, free_bytes: Some(500) };
        let good = [figures(0, 1000, 500), figures(1, 1000, 500), figures(2, 1000, 500)];
        assert_eq!(watch.read(own, &good), []);
        let short = [good[0], good[1], figures(2, 1000, 20)];
        let alarm = Alarm::LittleFree { free_bytes: 20 };
        assert_eq!(watch.read(own, &short), [(Some(2), alarm)]);
        // Each rank tells its own news, once.
        let over = MemoryReading { in_use_bytes: 2100, free_bytes: Some(500) };
        let alarm = Alarm::OverBudget { in_use_bytes: 2100, budget_bytes: 2000 };
        assert_eq!(watch.read(over, &short), [(Some(0), alarm)]);
        assert_eq!(watch.read(over, &short), []);
    }

    #[test]
    fn a_rank_alone_has_no_number() {
        let mut watch = Watch::new(Guard::new(1000, 2000, Duration::ZERO));
        let over = MemoryReading { in_use_bytes: 2100, free_bytes: None };
        let alarm = Alarm::OverBudget { in_use_bytes: 2100, budget_bytes: 2000 };
        assert_eq!(watch.read(over, &[]), [(None, alarm)]);
    }
}
