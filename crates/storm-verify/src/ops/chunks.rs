//! Products in chunks of rows must give the same bits as the whole product: plans may chunk freely.

use half::bf16;
use storm_device::{Device, DeviceError};
use storm_exec::ExecError;
use storm_graph::random::Random;
use storm_graph::{DType, Graph, Op, TensorId, Training};
use storm_plan::ALIGNMENT;

/// Results for one product.
#[derive(Clone, Debug, PartialEq)]
pub struct ChunkReport {
    /// `Linear` or `LinearInputGrad`.
    pub op: &'static str,
    /// Rows, outputs and inputs of the projection.
    pub shape: (usize, usize, usize),
    /// Chunk sizes, in rows, for which any bit differs.
    pub differs_at: Vec<usize>,
}

/// Rows of the whole product, and of the chunks that plans may use.
const ROWS: usize = 4096;
const CHUNKS: [usize; 5] = [64, 256, 768, 1024, 2048];

/// The same for prefill in pieces and token-by-token decoding.
const FEW_ROWS: usize = 32;
const FEW_CHUNKS: [usize; 4] = [1, 2, 8, 16];

/// Runs projections with shapes of real models, whole and in chunks of rows, in bf16.
///
/// # Errors
/// The device failed.
pub fn verify_row_chunks<D: Device>(
    open: impl Fn(usize) -> Result<D, DeviceError>,
) -> Result<Vec<ChunkReport>, ExecError> {
    let mut reports = Vec::new();
    for (outputs, inputs) in [(2048, 1536), (1536, 8960), (4608, 3584), (1000, 384)] {
        for op in ["Linear", "LinearInputGrad"] {
            let product = Product::new(op, ROWS, outputs, inputs);
            reports.push(product.compare(&open, &CHUNKS)?);
        }
    }
    for (outputs, inputs) in [(2048, 1536), (1536, 8960), (4608, 3584)] {
        let product = Product::new("Linear", FEW_ROWS, outputs, inputs);
        reports.push(product.compare(&open, &FEW_CHUNKS)?);
    }
    Ok(reports)
}

/// `x · weightᵀ`, or its gradient with respect to `x`.
struct Product {
    op: &'static str,
    rows: usize,
    /// Widths of the input and output rows.
    widths: (usize, usize),
    weight_shape: [usize; 2],
}

impl Product {
    fn new(op: &'static str, rows: usize, outputs: usize, inputs: usize) -> Product {
        let widths = if op == "Linear" { (inputs, outputs) } else { (outputs, inputs) };
        Product { op, rows, widths, weight_shape: [outputs, inputs] }
    }

    /// Compares the whole product with chunks of each size.
    fn compare<D: Device>(
        &self,
        open: impl Fn(usize) -> Result<D, DeviceError>,
        chunks: &[usize],
    ) -> Result<ChunkReport, ExecError> {
        let mut device = open(self.size_bytes())?;
        self.write(&mut device)?;
        let whole = self.run(&mut device, self.rows)?;
        let mut differs_at = Vec::new();
        for &chunk in chunks {
            if self.run(&mut device, chunk)? != whole {
                differs_at.push(chunk);
            }
        }
        let [outputs, inputs] = self.weight_shape;
        Ok(ChunkReport { op: self.op, shape: (self.rows, outputs, inputs), differs_at })
    }

    /// Offsets of the input, the weight, and the output.
    fn offsets(&self) -> [usize; 3] {
        let bytes = |elements: usize| (elements * 2).next_multiple_of(ALIGNMENT);
        let weight = bytes(self.rows * self.widths.0);
        [0, weight, weight + bytes(self.weight_shape.iter().product())]
    }

    fn size_bytes(&self) -> usize {
        self.offsets()[2] + (self.rows * self.widths.1 * 2).next_multiple_of(ALIGNMENT)
    }

    fn write(&self, device: &mut impl Device) -> Result<(), DeviceError> {
        let mut random = Random(1);
        let mut value = || bf16::from_f32(2.0 * random.unit() as f32 - 1.0);
        let [x, weight, _] = self.offsets();
        let values: Vec<bf16> = (0..self.rows * self.widths.0).map(|_| value()).collect();
        device.write(x, &values)?;
        let count = self.weight_shape.iter().product();
        let values: Vec<bf16> = (0..count).map(|_| value()).collect();
        device.write(weight, &values)
    }

    /// Computes all rows, `chunk` at a time.
    fn run(&self, device: &mut impl Device, chunk: usize) -> Result<Vec<u16>, ExecError> {
        let [read, weight_at, written] = self.offsets();
        let mut start = 0;
        while start < self.rows {
            let rows = chunk.min(self.rows - start);
            let mut graph = Graph::new();
            let x = graph.input("x", [rows, self.widths.0], DType::BF16);
            let weight =
                graph.parameter("weight", self.weight_shape, DType::BF16, Training::Frozen);
            let op = match self.op {
                "Linear" => Op::Linear { x, weight, bias: None, addend: None },
                _ => Op::LinearInputGrad { dy: x, weight, addend: None },
            };
            graph.apply("y", op)?;
            let place = |id: TensorId| match id {
                id if id == x => read + start * self.widths.0 * 2,
                id if id == weight => weight_at,
                _ => written + start * self.widths.1 * 2,
            };
            let instruction = device.prepare(&graph, &graph.nodes()[0], place, 0)?;
            device.run(&instruction)?;
            start += rows;
        }
        let mut values = vec![bf16::ZERO; self.rows * self.widths.1];
        device.read(written, &mut values)?;
        Ok(values.into_iter().map(bf16::to_bits).collect())
    }
}
