//! Monitors device memory during a run: against the plan, the budget, and what other processes leave free on the GPU.

use std::fmt;
use std::time::{Duration, Instant};
use storm_device::{DeviceError, PlanDevice};

/// Tolerated excess over the plan: drivers round sizes up.
const ABOVE_PLAN: f64 = 0.02;

/// Free memory below this fraction of the budget is too little.
const LITTLE_FREE: f64 = 0.05;

/// A memory reading from the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReading {
    /// Held by this process.
    pub in_use_bytes: u64,
    /// Free on the device; `None` if no other process shares its memory.
    pub free_bytes: Option<u64>,
}

impl MemoryReading {
    /// Asks a device.
    pub(crate) fn of(device: &impl PlanDevice) -> Result<MemoryReading, DeviceError> {
        Ok(MemoryReading {
            in_use_bytes: device.memory_in_use_bytes()?,
            free_bytes: device.memory_free_bytes()?,
        })
    }
}

/// Device memory is not as planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alarm {
    /// More is in use than planned, but within the budget.
    AbovePlan {
        /// In use.
        in_use_bytes: u64,
        /// Planned.
        planned_bytes: u64,
    },
    /// More is in use than the budget allows.
    OverBudget {
        /// In use.
        in_use_bytes: u64,
        /// Allowed.
        budget_bytes: u64,
    },
    /// Other processes have taken most of the free memory. A driver that runs out may kill any process.
    LittleFree {
        /// Left.
        free_bytes: u64,
    },
}

impl Alarm {
    /// Whether the run should be saved at once.
    pub fn is_critical(&self) -> bool {
        !matches!(self, Alarm::AbovePlan { .. })
    }

    /// The device memory to replan with, given that the plan uses `planned_bytes`: reduced so much that the alarm would
    /// end if everything else stayed the same.
    pub fn smaller_budget(&self, planned_bytes: u64, budget_bytes: u64) -> u64 {
        let slack = (LITTLE_FREE * budget_bytes as f64) as u64;
        let too_much = match *self {
            Alarm::AbovePlan { in_use_bytes, planned_bytes } => in_use_bytes - planned_bytes,
            Alarm::OverBudget { in_use_bytes, budget_bytes } => in_use_bytes - budget_bytes,
            Alarm::LittleFree { free_bytes } => slack.saturating_sub(free_bytes),
        };
        planned_bytes.saturating_sub(too_much + slack)
    }

    fn severity(self) -> u8 {
        match self {
            Alarm::AbovePlan { .. } => 1,
            Alarm::LittleFree { .. } => 2,
            Alarm::OverBudget { .. } => 3,
        }
    }
}

impl fmt::Display for Alarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        match *self {
            Alarm::AbovePlan { in_use_bytes, planned_bytes } => write!(
                f,
                "{} of device memory are in use where {} were planned",
                mib(in_use_bytes),
                mib(planned_bytes)
            ),
            Alarm::OverBudget { in_use_bytes, budget_bytes } => write!(
                f,
                "{} of device memory are in use, more than the budget of {}",
                mib(in_use_bytes),
                mib(budget_bytes)
            ),
            Alarm::LittleFree { free_bytes } => {
                write!(f, "other processes have left {} of device memory free", mib(free_bytes))
            }
        }
    }
}

/// Compares readings with the plan, and reports each change for the worse once.
#[derive(Clone, Copy, Debug)]
pub struct Guard {
    planned_bytes: u64,
    budget_bytes: u64,
    interval: Duration,
    read_at: Option<Instant>,
    /// Free memory at the first reading: the run itself may leave little free from the start.
    free_bytes_first: Option<u64>,
    told: u8,
}

impl Guard {
    /// A guard for a plan that uses `planned_bytes` of `budget_bytes`, with a reading once per interval.
    pub fn new(planned_bytes: u64, budget_bytes: u64, interval: Duration) -> Guard {
        Guard {
            planned_bytes,
            budget_bytes,
            interval,
            read_at: None,
            free_bytes_first: None,
            told: 0,
        }
    }

    /// The same guard before its first reading.
    pub(crate) fn unread(&self) -> Guard {
        Guard::new(self.planned_bytes, self.budget_bytes, self.interval)
    }

    /// Whether a reading is due.
    pub fn is_due(&self) -> bool {
        self.read_at.is_none_or(|read_at| read_at.elapsed() >= self.interval)
    }

    /// Returns an alarm if it is worse than the last one reported. Once all is well, it can be reported again.
    pub fn read(&mut self, reading: MemoryReading) -> Option<Alarm> {
        self.read_at = Some(Instant::now());
        self.free_bytes_first = self.free_bytes_first.or(reading.free_bytes);
        let alarm = self.alarm(reading);
        let severity = alarm.map_or(0, Alarm::severity);
        let is_news = severity > self.told;
        if severity == 0 || is_news {
            self.told = severity;
        }
        alarm.filter(|_| is_news)
    }

    fn alarm(&self, MemoryReading { in_use_bytes, free_bytes }: MemoryReading) -> Option<Alarm> {
        let Guard { planned_bytes, budget_bytes, .. } = *self;
        if in_use_bytes > budget_bytes {
            return Some(Alarm::OverBudget { in_use_bytes, budget_bytes });
        }
        let at_first = self.free_bytes_first.unwrap_or(u64::MAX);
        let little = ((LITTLE_FREE * budget_bytes as f64) as u64).min(at_first / 2);
        if let Some(free_bytes) = free_bytes.filter(|&free| free < little) {
            return Some(Alarm::LittleFree { free_bytes });
        }
        let most = ((1.0 + ABOVE_PLAN) * planned_bytes as f64) as u64;
        (in_use_bytes > most).then_some(Alarm::AbovePlan { in_use_bytes, planned_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(in_use_bytes: u64, free_bytes: Option<u64>) -> MemoryReading {
        MemoryReading { in_use_bytes, free_bytes }
    }

    #[test]
    fn each_change_for_the_worse_is_told_once() {
        let mut guard = Guard::new(1000, 2000, Duration::ZERO);
        let mut told = |in_use, free| guard.read(reading(in_use, free)).map(Alarm::severity);
        assert_eq!(told(1000, None), None);
        assert_eq!(told(1020, Some(5000)), None);
        assert_eq!(told(1021, Some(5000)), Some(1));
        assert_eq!(told(1900, Some(5000)), None);
        assert_eq!(told(1000, Some(99)), Some(2));
        assert_eq!(told(2001, Some(99)), Some(3));
        assert_eq!(told(1500, None), None);
        // All well, and then not.
        assert_eq!(told(1000, Some(100)), None);
        assert_eq!(told(1000, Some(0)), Some(2));
    }

    #[test]
    fn what_was_never_free_is_not_missed() {
        let mut guard = Guard::new(1000, 2000, Duration::ZERO);
        assert_eq!(guard.read(reading(1000, Some(40))), None);
        assert_eq!(guard.read(reading(1000, Some(20))), None);
        let alarm = Alarm::LittleFree { free_bytes: 19 };
        assert_eq!(guard.read(reading(1000, Some(19))), Some(alarm));
    }

    #[test]
    fn a_smaller_budget_ends_the_alarm() {
        let mut guard = Guard::new(1000, 2000, Duration::ZERO);
        assert_eq!(guard.read(reading(1000, Some(5000))), None);
        let alarm = guard.read(reading(1000, Some(30))).expect("little is free");
        let smaller = alarm.smaller_budget(1000, 2000);
        // Others stay as they are: what is not taken any more is free.
        let mut guard = Guard::new(smaller, smaller, Duration::ZERO);
        assert_eq!(guard.read(reading(smaller, Some(30 + 1000 - smaller))), None);
        assert_eq!(Alarm::LittleFree { free_bytes: 0 }.smaller_budget(100, 2000), 0);
        let over = Alarm::OverBudget { in_use_bytes: 2500, budget_bytes: 2000 };
        assert_eq!(over.smaller_budget(2000, 2000), 1400);
    }

    #[test]
    fn only_what_may_end_the_process_is_critical() {
        let alarm = |now| {
            let mut guard = Guard::new(1000, 2000, Duration::ZERO);
            assert_eq!(guard.read(reading(1000, Some(5000))), None);
            guard.read(now).expect("an alarm")
        };
        assert!(!alarm(reading(1500, None)).is_critical());
        assert!(alarm(reading(2500, None)).is_critical());
        assert!(alarm(reading(900, Some(10))).is_critical());
    }
}
