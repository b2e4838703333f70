//! A device that adds up how long the host takes to issue instructions.

use std::time::{Duration, Instant};
use storm_device::{Device, DeviceError, Scalar};
use storm_graph::{Graph, Node, TensorId};

/// Forwards everything to the device, and measures the time.
pub(crate) struct Clocked<D> {
    device: D,
    launches: Launches,
}

/// Instructions issued so far, and the host time that took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Launches {
    pub(crate) instructions: u64,
    pub(crate) time: Duration,
}

impl Launches {
    /// Launches since `before`.
    pub(crate) fn since(self, before: Launches) -> Launches {
        Launches {
            instructions: self.instructions - before.instructions,
            time: self.time - before.time,
        }
    }
}

impl<D> Clocked<D> {
    pub(crate) fn new(device: D) -> Clocked<D> {
        Clocked { device, launches: Launches::default() }
    }

    pub(crate) fn inner(&self) -> &D {
        &self.device
    }

    pub(crate) fn launches(&self) -> Launches {
        self.launches
    }
}

impl<D: Device> Device for Clocked<D> {
    type Instruction = D::Instruction;

    const ALIGNMENT: usize = D::ALIGNMENT;

    fn capacity_bytes(&self) -> usize {
        self.device.capacity_bytes()
    }

    fn prepare(
        &self,
        graph: &Graph,
        node: &Node,
        place: impl Fn(TensorId) -> usize,
        layer: u16,
    ) -> Result<D::Instruction, DeviceError> {
        self.device.prepare(graph, node, place, layer)
    }

    fn run(&mut self, instruction: &D::Instruction) -> Result<(), DeviceError> {
        let start = Instant::now();
        let result = self.device.run(instruction);
        self.launches.time += start.elapsed();
        self.launches.instructions += 1;
        result
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.device.synchronize()
    }

    fn write<T: Scalar>(&mut self, offset: usize, values: &[T]) -> Result<(), DeviceError> {
        self.device.write(offset, values)
    }

    fn read<T: Scalar>(&self, offset: usize, values: &mut [T]) -> Result<(), DeviceError> {
        self.device.read(offset, values)
    }

    fn op_name(instruction: &D::Instruction) -> &'static str {
        D::op_name(instruction)
    }
}
