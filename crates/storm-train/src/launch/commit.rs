//! Commits a plan to a device, and replans if the machine has less memory than expected.

use super::{Launch, LaunchSite, Notice};
use crate::{TrainError, Trainer};
use std::sync::Arc;
use storm_device::{DeviceError, PlanDevice};
use storm_exec::ExecError;
use storm_plan::{Budget, Prediction};

/// Other processes may allocate memory at the same time, so retry, but not forever.
const ATTEMPTS_MAX: usize = 4;

/// Fraction of memory left free below a limit that was just discovered, and its maximum: the limit may move a little.
const SLACK: u64 = 64;
const SLACK_BYTES_MAX: u64 = 64 << 20;

impl Launch {
    /// Allocates all memory for the plan and initializes the model. If the host or the device refuses memory, or the
    /// process holds more device memory than the profile says, replans with what is available.
    pub(super) fn commit<D: PlanDevice>(
        &mut self,
        site: &mut impl LaunchSite<D>,
        mut before: Option<D>,
    ) -> Result<Trainer<D>, TrainError> {
        for attempt in 1.. {
            site.notice(Notice::Committing(&self.plan));
            let plan = Arc::new(self.plan.planned.plan.clone());
            let device = site.device(self.request.budget, &self.plan, before.take());
            let (model, options) = (&self.request.model, self.options());
            let mut progress = |made| site.notice(Notice::Initializing(made));
            let made = Trainer::with_progress(model, options, plan, device, &mut progress);
            let error = match made {
                Ok(trainer) => {
                    site.notice(Notice::Committed(&self.plan));
                    return Ok(trainer);
                }
                Err(error) => error,
            };
            match smaller(&error, self.available, &self.plan.planned.prediction) {
                Some(less) if attempt < ATTEMPTS_MAX => self.available = less,
                _ => return Err(error),
            }
            let reason = error.to_string();
            site.notice(Notice::Refused { reason: &reason, budget: self.available });
            self.plan = self.planned_again()?;
        }
        unreachable!("attempts end")
    }
}

/// The budget to replan with after an error; `None` if a smaller budget would not help.
fn smaller(error: &TrainError, budget: Budget, planned: &Prediction) -> Option<Budget> {
    let TrainError::Exec(ExecError::Device(DeviceError::Memory(refused))) = error else {
        return None;
    };
    let left = planned.peak_bytes[refused.tier].saturating_sub(refused.missing_bytes());
    let slack = (left / SLACK).min(SLACK_BYTES_MAX);
    Some(budget.with(refused.tier, left - slack))
}
