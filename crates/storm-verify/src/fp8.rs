//! Detects whether a device supports FP8 matrix multiplication.

use storm_device::{Device, DeviceError};
use storm_exec::ExecError;
use storm_graph::{DType, Graph, Op, Shape, TensorClass};
use storm_plan::ALIGNMENT;

/// Prepares a small product, which older GPUs reject.
pub(crate) fn multiplies_fp8<D: Device>(
    open: impl Fn(usize) -> Result<D, DeviceError>,
) -> Result<bool, ExecError> {
    let mut graph = Graph::new();
    let mut codes = |name| graph.source(name, [17, 16], DType::U8, TensorClass::Activation);
    let (x, weight) = (codes("x"), codes("weight"));
    let output = Shape::from([16, 16]);
    graph.apply("y", Op::Fp8Linear { x, weight, bias: None, addend: None, output })?;
    let place = |id: storm_graph::TensorId| 8 * ALIGNMENT * id.index();
    let device = open(32 * ALIGNMENT)?;
    match device.prepare(&graph, &graph.nodes()[0], place, 0) {
        Ok(_) => Ok(true),
        Err(DeviceError::Unsupported { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
