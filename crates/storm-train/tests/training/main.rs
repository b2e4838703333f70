//! Whole training steps on the CPU device: exact for any thread count and any choice of what to
//! recompute, and without allocating. Also text generation: exact, however much is cached.

mod allocation;
mod exactness;
mod learning;
mod loading;
mod moments;
mod support;
mod writing;
