//! Packing and loading.

mod helpers;
mod hostile;
mod loading;
mod packing;
mod samples;
mod tokenizers;

use storm_device::allocation::AllocationMeter;

#[global_allocator]
static METER: AllocationMeter = AllocationMeter;
