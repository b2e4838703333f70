//! Checks any device against the CPU device, for `storm verify` and for tests.
//!
//! The checks, from small to large:
//! - [`verify_ops`] compares every op, node by node.
//! - [`verify_row_chunks`] checks that matrix products in chunks of rows give the same bits as the
//!   whole product.
//! - [`verify_plan_device`] checks that queues keep the order of a plan.
//! - [`verify_models`] compares the gradients of whole models, and checks that runs are
//!   deterministic.
//! - [`verify_plans`] checks that results are bit-identical under every plan.

mod fp8;
mod models;
mod ops;
mod plans;
mod queues;

pub use models::{ModelReport, verify_models};
pub use ops::{ChunkReport, OpReport, verify_ops, verify_row_chunks};
pub use plans::{PlanReport, verify_plans};
pub use queues::{QueueReport, failure_of_plan, verify_plan_device};
