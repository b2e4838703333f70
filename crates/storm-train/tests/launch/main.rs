//! Launches on a device with a virtual clock, which differs from its profile as a test needs.

mod corrected;
mod splits;
mod virtual_device;
