//! What the op tests share: random cases, a machine that runs a graph, and comparisons.

mod case;
mod check;
mod compare;
mod differences;
mod machine;
mod rng;

pub(crate) use case::{Backward, Builder, Case, Precision, Start};
pub(crate) use check::check;
pub(crate) use compare::{BF16_TOLERANCE, F32_TOLERANCE, assert_close, assert_rounded_once};
pub(crate) use differences::check_differences;
pub(crate) use machine::Machine;
pub(crate) use rng::Rng;
