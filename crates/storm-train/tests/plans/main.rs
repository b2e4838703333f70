//! Plans of real and tiny models: what the planner finds, what it refuses, and that all decisions
//! give a plan that the checker accepts.

mod accumulation;
mod bars;
mod cards;
mod estimate;
mod exhaustive;
mod forced;
mod growth;
mod holdings;
mod infeasible;
mod micro_batch;
mod models;
mod mutants;
mod overlap;
mod policies;
mod random;
mod ranks;
mod refined;
#[path = "../../../storm-plan/tests/support/mod.rs"]
mod support;
