//! Proves that a plan is safe to run.
//!
//! The checker tracks every byte of every tier through a step: which value it holds, in which
//! version, which instruction wrote it, and which read it. A plan passes if
//! - every read is ordered after the write of what it reads, and every write after all earlier
//!   accesses of the same bytes, by queues and waits alone (happens-before, with vector clocks over
//!   the queues and the host);
//! - every kernel finds the values it reads as the kernels before it in the compute queue left them:
//!   that queue's order defines the step, and copies only move values;
//! - everything persistent ends the step where it started, so steps and flushes can follow one
//!   another in any order (step∘step);
//! - every address is inside its tier, and the tiers are inside the budget.
//!
//! If several ranks share a step, [`verify_ranks`] then proves that their plans fit together.
//!
//! # Why a few repetitions stand for all
//! A repeated segment is followed until memory looks the same after a repetition as after the
//! previous one: the same values at the same bytes, with the same of them current. From then on every
//! further repetition finds and leaves the same state.
//!
//! The same number of repetitions is enough for the order of accesses. Let (i, r) be the run of
//! instruction i in repetition r. Two accesses of the same byte that must be ordered are at most one
//! repetition apart, because an instruction that touches a byte does so in every repetition. An order
//! between (i, r) and (j, r + 1) comes from a chain of queue neighbors, waits and host actions, all
//! issued between the two. Waits refer back to the last run of an instruction, so the links within
//! and between two neighboring repetitions are the same for every pair: what holds between the first
//! and the second holds for all. Whatever follows the segment sees the last repetition as it would
//! see any other. A chain from before the segment to after it only grows along the queues with more
//! repetitions.

mod blame;
mod coverage;
mod error;
mod heard;
pub(crate) mod host;
mod memory;
mod ranks;
mod structure;
mod walk;

pub use error::{Actor, CheckError, Found, Spot};
pub use ranks::{RanksError, shared_digest, sums_digest, verify_ranks};

use crate::plan::{Plan, Run};
use crate::tier::PerTier;
use heard::Heard;
use host::HostWork;
use std::ops::Deref;
use walk::Walk;

/// A plan that [`check`] found safe. Devices accept nothing else: their memory safety depends on it.
#[derive(Clone, Debug)]
pub struct CheckedPlan {
    plan: Plan,
}

impl CheckedPlan {
    /// The plan itself. It may then be changed, so it no longer counts as checked.
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

/// Checks a plan. It may take as much memory of each tier as `budget` says.
///
/// # Errors
/// The first problem: which instructions, which value, which bytes.
pub fn check(plan: Plan, budget: PerTier<usize>) -> Result<CheckedPlan, CheckError> {
    verify(&plan, budget)?;
    Ok(CheckedPlan { plan })
}

/// [`check`] for callers that want only the answer.
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
