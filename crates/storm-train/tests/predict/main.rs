//! Runs that predict: what is refused or undone leaves no trace, what is accepted moves weights,
//! and a run that was stopped or killed anywhere resumes bit for bit.

mod cost;
mod exact;
mod input;
mod int8;
mod memory;
mod outer;
mod resume;
mod rssm;
mod support;
mod updates;

use storm_host::allocation::AllocationMeter;

#[global_allocator]
static METER: AllocationMeter = AllocationMeter;
