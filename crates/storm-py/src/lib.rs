//! The Python module `storm._native`: STORM's queues offload what PyTorch saves.
//!
//! Only glue. Python registers hooks for saved tensors and creates views, a session of
//! `storm-saved` decides and moves, and the copies of `storm-device` run concurrently with
//! PyTorch's own work.

mod engine;
mod report;
mod torch;

use pyo3::prelude::*;

/// The module.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<engine::Saved>()?;
    module.add_class::<report::Report>()
}
