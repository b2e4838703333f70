//! Whole training steps on the CPU device: exact for any thread count, any choice of what to
//! recompute, and without allocating. And text by the models: exact, however much of it is kept.

mod allocation;
mod exactness;
mod learning;
mod loading;
mod moments;
mod support;
mod writing;
