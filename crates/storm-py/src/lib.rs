//! The Python module `storm._native`: what PyTorch saves, moved by STORM's queues.
//!
//! Glue only. Python registers hooks for saved tensors and makes views; the session of `storm-exec`
//! decides and moves; the copies of `storm-device` run beside PyTorch's own work.

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
