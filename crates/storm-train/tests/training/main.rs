//! Whole training steps on the CPU device: exact for any thread count, any choice of what to
//! recompute, and without allocating.

mod allocation;
mod exactness;
mod learning;
mod support;
