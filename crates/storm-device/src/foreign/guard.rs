//! Guards that own memory while a copy uses it.

use super::{ComputeStream, CopyTime, Foreign, Mark, Stall};
use crate::DeviceError;

/// Memory being copied out. It can still be read.
#[derive(Debug)]
pub struct Leaving<F: Foreign>(InFlight<F>);

/// Memory that is being filled.
#[derive(Debug)]
pub struct Coming<F: Foreign>(InFlight<F>);

#[derive(Debug)]
struct InFlight<F: Foreign> {
    /// Always present, except while it is being taken out.
    memory: Option<F>,
    mark: Mark,
}

impl<F: Foreign> InFlight<F> {
    fn take(mut self) -> F {
        self.memory.take().expect("there until taken")
    }
}

impl<F: Foreign> Drop for InFlight<F> {
    fn drop(&mut self) {
        if self.memory.is_some() {
            // After an error nothing copies any more, and the error was already reported.
            let _ = self.mark.wait();
        }
    }
}

impl<F: Foreign> Leaving<F> {
    pub(super) fn new(memory: F, mark: Mark) -> Leaving<F> {
        Leaving(InFlight { memory: Some(memory), mark })
    }

    /// Replaces its mark by that of a later copy in the same queue, which covers this one.
    pub(super) fn until(mut self, mark: Mark) -> Leaving<F> {
        self.0.mark = mark;
        self
    }

    /// The memory, to be read.
    pub fn memory(&self) -> &F {
        self.0.memory.as_ref().expect("there until taken")
    }

    /// Whether the copy is done.
    ///
    /// # Errors
    /// From the driver.
    pub fn is_done(&self) -> Result<bool, DeviceError> {
        self.0.mark.is_done()
    }

    /// Returns the memory. Everything issued to `stream` from now on waits for the copy.
    ///
    /// # Errors
    /// From the driver.
    pub fn release(self, stream: ComputeStream) -> Result<(F, Stall), DeviceError> {
        let stall = self.0.mark.hold(stream)?;
        Ok((self.0.take(), stall))
    }

    /// To ask how long the copy took.
    pub fn time(&self) -> CopyTime {
        CopyTime(self.0.mark.clone())
    }
}

impl<F: Foreign> Coming<F> {
    pub(super) fn new(memory: F, mark: Mark) -> Coming<F> {
        Coming(InFlight { memory: Some(memory), mark })
    }

    /// Whether the copy is done.
    ///
    /// # Errors
    /// From the driver.
    pub fn is_done(&self) -> Result<bool, DeviceError> {
        self.0.mark.is_done()
    }

    /// Returns the memory. Everything issued to `stream` from now on waits for the copy.
    ///
    /// # Errors
    /// From the driver.
    pub fn arrive(self, stream: ComputeStream) -> Result<(F, Stall), DeviceError> {
        let stall = self.0.mark.hold(stream)?;
        Ok((self.0.take(), stall))
    }

    /// To ask how long the copy took.
    pub fn time(&self) -> CopyTime {
        CopyTime(self.0.mark.clone())
    }
}
