//! Packing and loading.

mod blocks;
mod chats;
mod containers;
mod helpers;
mod hostile;
mod loading;
mod memory;
mod outputs;
mod packing;
mod records;
mod samples;
mod skipping;
mod tokenizers;
mod workers;

use storm_host::allocation::AllocationMeter;

#[global_allocator]
static METER: AllocationMeter = AllocationMeter;
