//! Launches on a device whose clock is virtual: it differs from its profile as a test wants it to.

mod corrected;
mod splits;
mod virtual_device;
