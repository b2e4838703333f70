//! Checkpoints: exact resume, damaged files, disks that fail.

mod damage;
mod exact;
mod faults;
mod keep;
mod support;
