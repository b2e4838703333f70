//! Proves that a plan is safe to run.
//!
//! Every byte of every tier is followed through a step: which value lies there, in which version,
//! who wrote it, who read it. A plan passes if
//! - every read is ordered after the write of what it reads, and every write after all earlier
//!   accesses of the same bytes, by queues and waits alone (happens-before, with vector clocks over
//!   the queues and the host);
//! - every kernel finds the values it reads as the kernels before it in the compute queue left them:
//!   that queue's order is the meaning of the step, copies only move values around;
//! - everything that outlives a step is where it was, so that steps and flushes follow one another in
//!   any order (step∘step);
//! - every address is inside its tier, and the tiers are inside the budget.
//!
//! # Why a few repetitions stand for all
//! A segment that runs many times is followed until memory looks the same after a repetition as
//! after the one before it: the same values at the same bytes, the same of them current. From
//! then on every further repetition finds and leaves the same.
//!
//! The order of accesses does not need more either. Call (i, r) the run of instruction i in
//! repetition r. Accesses of the same byte that have to be ordered are at most one repetition apart,
//! as whoever touches a byte does so in every repetition. An order between (i, r) and (j, r + 1)
//! comes from a chain of queue neighbours, waits and actions of the host, all of them issued between
//! the two. Waits look back to the last run of an instruction, so the links within and between two
//! neighbouring repetitions are the same for every pair of them: what holds between the first and the
//! second holds for all. What comes after the segment sees the last repetition as it would see any
//! other, and a chain from before the segment to after it only grows with more repetitions, along the
//! queues.

mod blame;
mod coverage;
mod error;
mod heard;
pub(crate) mod host;
mod memory;
mod structure;
mod walk;

pub use error::{Actor, CheckError, Found, Spot};

use crate::plan::{Plan, Run};
use crate::tier::PerTier;
use heard::Heard;
use host::HostWork;
use std::ops::Deref;
use walk::Walk;

/// A plan that [`check`] found safe. Devices take nothing else: their memory safety rests on it.
#[derive(Clone, Debug)]
pub struct CheckedPlan {
    plan: Plan,
}

impl CheckedPlan {
    /// The plan, which may then be changed and is no longer checked.
    pub fn into_plan(self) -> Plan {
        self.plan
    }
}

impl Deref for CheckedPlan {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.plan
    }
}

/// Checks a plan and vouches for it. It may take as much memory of each tier as `budget` says.
///
/// # Errors
/// The first problem: which instructions, which value, which bytes.
pub fn check(plan: Plan, budget: PerTier<usize>) -> Result<CheckedPlan, CheckError> {
    verify(&plan, budget)?;
    Ok(CheckedPlan { plan })
}

/// [`check`] for those who want the answer only.
///
/// # Errors
/// As [`check`].
pub fn verify(plan: &Plan, budget: PerTier<usize>) -> Result<(), CheckError> {
    structure::check(plan, budget)?;
    let host_work = HostWork::new(plan);
    let mut heard = Heard::new(plan);
    Walk::at_rest(plan, &host_work, &mut heard).program("step", &plan.step)?;
    for (name, segment) in [("flush", plan.flush), ("evaluation", plan.evaluation)] {
        let Some(segment) = segment else { continue };
        let runs = [Run { segment, times: 1 }];
        Walk::at_rest(plan, &host_work, &mut heard).program(name, &runs)?;
    }
    heard.check(plan)
}
