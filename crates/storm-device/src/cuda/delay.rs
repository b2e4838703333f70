//! Kernels for tests: one that only waits, and one that fails.

use super::compile::KernelSource;
use super::context::{Argument, Launch, Start, Stream};
use super::modules::Kernels;
use super::plan::KernelChoice;
use crate::DeviceError;

/// The source of these kernels; it needs no definitions.
pub(super) const SOURCE: KernelSource =
    KernelSource { name: "delay.cu", text: include_str!("kernels/delay.cu"), only_for: None };

/// Delays a stream while using only one thread of the card.
#[derive(Debug)]
pub(super) struct Delay {
    launch: Launch,
}

impl Delay {
    pub(super) fn new(kernels: &Kernels) -> Result<Delay, DeviceError> {
        let launch = single_thread(kernels, "delay", vec![Argument::I64(0)])?;
        Ok(Delay { launch })
    }

    /// Delays everything issued to `stream` from now on by at least this long.
    pub(super) fn queue(&mut self, stream: &Stream, nanoseconds: u32) -> Result<(), DeviceError> {
        self.launch.arguments[0] = Argument::I64(i64::from(nanoseconds));
        // SAFETY: the kernel takes one 64-bit integer and touches no memory.
        unsafe { self.launch.queue(stream, Start::InOrder, || "a delay".to_owned()) }
    }
}

/// A kernel that fails. Nothing runs in this context afterwards.
#[derive(Debug)]
pub(super) struct Trap {
    launch: Launch,
}

impl Trap {
    pub(super) fn new(kernels: &Kernels) -> Result<Trap, DeviceError> {
        Ok(Trap { launch: single_thread(kernels, "trap", Vec::new())? })
    }

    pub(super) fn queue(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: the kernel takes no arguments and touches no memory.
        unsafe { self.launch.queue(stream, Start::InOrder, || "a failure on purpose".to_owned()) }
    }
}

fn single_thread(
    kernels: &Kernels,
    name: &str,
    arguments: Vec<Argument>,
) -> Result<Launch, DeviceError> {
    let choice = KernelChoice { source: SOURCE, name, definitions: Vec::new(), shared_bytes: 0 };
    let kernel = kernels.get(&choice)?;
    Ok(Launch {
        kernel,
        grid: (1, 1, 1),
        block: 1,
        shared_bytes: 0,
        arguments,
        begins_early: false,
        joint: None,
    })
}
