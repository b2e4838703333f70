//! A miniature training step, as a plan ([`tiny_plan`]) and as plain arithmetic ([`Plain`]), for
//! the tests of several crates and for `storm verify`.
//!
//! The seeded generator of all tests is [`storm_graph::random::Random`].

mod tiny_plan;

pub use tiny_plan::{
    ELEMENTS, GROUP, LOSS_RESULTS, NORM_RESULT, Plain, PlanBuilder, SHIFT_INPUT, SLOT, StepResults,
    X_INPUTS, numbers, parameter, tiny_plan,
};
