//! Reports on the execution of a plan: pages, trace files and numbers.
//!
//! Works on any [`Trace`](storm_device::Trace), measured or on a virtual clock.

mod busy;
mod chrome;
mod html;
mod occupancy;
mod overlap;
mod stalls;
mod summary;

pub use chrome::write_chrome;
pub use html::{ReportFacts, TierLimits, page, write_html, write_step};
pub use occupancy::{Occupancy, occupancy};
pub use overlap::{Overlap, overlap};
pub use stalls::StallCause;
use storm_graph::{TensorClass, Training};
pub use summary::{QueueSummary, Stall, Summary, TransferSummary, summarize};

/// The name of a tensor class in reports.
fn class_name(class: TensorClass) -> &'static str {
    match class {
        TensorClass::Input => "inputs",
        TensorClass::Parameter(Training::Trainable) => "weights",
        TensorClass::Parameter(Training::Frozen) => "frozen weights",
        TensorClass::Parameter(Training::Running) => "running statistics",
        TensorClass::Gradient => "gradients",
        TensorClass::OptimizerState => "optimizer state",
        TensorClass::Cache => "keys and values",
        TensorClass::Activation => "activations",
        TensorClass::Scratch => "scratch",
    }
}
