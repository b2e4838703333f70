//! Toy plans, what may be done to them, and slow but simple judges of plans.
//!
//! Everything here works on any [`storm_plan::Plan`]; the toys are only the plans that are always at
//! hand.

// Each test file is a program of its own and uses a part of this.
#![allow(dead_code)]

pub(crate) mod access;
pub(crate) mod base;
pub(crate) mod mutate;
pub(crate) mod oracle;
pub(crate) mod random;
pub(crate) mod reference;
pub(crate) mod slabs;
pub(crate) mod small;
pub(crate) mod toy;
pub(crate) mod waits;

use storm_plan::{PerTier, Plan};

/// A budget that the plan just fits.
pub(crate) fn tight_budget(plan: &Plan) -> PerTier<usize> {
    plan.bytes
}
