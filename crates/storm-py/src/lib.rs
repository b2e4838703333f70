//! The Python module `storm._native`: offloads the tensors that PyTorch's autograd saves.
//!
//! Only glue code. Python registers hooks for saved tensors and creates views. A session of
//! `storm-saved` decides what to offload and moves it. The copies of `storm-device` run concurrently
//! with PyTorch's own work.

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
