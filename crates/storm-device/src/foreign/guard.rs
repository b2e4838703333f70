//! Memory that a copy is using.

use super::{ComputeStream, CopyTime, Foreign, Mark, Stall};
use crate::DeviceError;

/// Memory on its way out. It can still be read.
#[derive(Debug)]
pub struct Leaving<F: Foreign>(InFlight<F>);

/// Memory that is being filled.
#[derive(Debug)]
pub struct Coming<F: Foreign>(InFlight<F>);

#[derive(Debug)]
struct InFlight<F: Foreign> {
    /// Always there, but while it is taken out.
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
            // After an error nothing copies any more: it says nothing new.
            let _ = self.mark.wait();
        }
    }
}

impl<F: Foreign> Leaving<F> {
    pub(super) fn new(memory: F, mark: Mark) -> Leaving<F> {
        Leaving(InFlight { memory: Some(memory), mark })
    }

    /// With a later copy of the same queue: waiting for that one covers this one.
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

    /// Gives the memory back; what `stream` is given from now on starts after the copy.
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

    /// The memory; what `stream` is given from now on starts after the copy.
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
