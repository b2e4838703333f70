//! Kernels that do nothing useful: waiting, and failing.

use super::compile::KernelSource;
use super::context::{Argument, Launch, Start, Stream};
use super::modules::Kernels;
use super::plan::KernelChoice;
use crate::DeviceError;

/// What these kernels are compiled from, without definitions.
pub(super) const SOURCE: KernelSource =
    KernelSource { name: "delay.cu", text: include_str!("kernels/delay.cu"), only_for: None };

/// Holds up a stream without using more than one thread of the card.
#[derive(Debug)]
pub(super) struct Delay {
    launch: Launch,
}

impl Delay {
    pub(super) fn new(kernels: &Kernels) -> Result<Delay, DeviceError> {
        let launch = single_thread(kernels, "delay", vec![Argument::I64(0)])?;
        Ok(Delay { launch })
    }

    /// What `stream` is given from now on starts at least so much later.
    pub(super) fn queue(&mut self, stream: &Stream, nanoseconds: u32) -> Result<(), DeviceError> {
        self.launch.arguments[0] = Argument::I64(i64::from(nanoseconds));
        // SAFETY: the kernel takes one 64-bit integer and touches no memory.
        unsafe { self.launch.queue(stream, Start::InOrder, || "a delay".to_owned()) }
    }
}

/// A kernel that fails: afterwards nothing runs in this context any more.
#[derive(Debug)]
pub(super) struct Trap {
    launch: Launch,
}

impl Trap {
    pub(super) fn new(kernels: &Kernels) -> Result<Trap, DeviceError> {
        Ok(Trap { launch: single_thread(kernels, "trap", Vec::new())? })
    }

    pub(super) fn queue(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: the kernel takes nothing and touches no memory.
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
    })
}
