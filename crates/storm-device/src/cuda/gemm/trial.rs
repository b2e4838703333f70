//! Tests whether two algorithms give the same bits: both compute a small product of random numbers.
//!
//! An element of a product is a sum over k. Algorithms with different tiles add in the same order
//! on some cards and not on others. The library does not say which, so this tests it.

use super::choices::Algorithm;
use super::{Gemm, GemmPlan, GemmShape, Unit, WORKSPACE_BYTES};
use crate::DeviceError;
use crate::cuda::CudaError;
use crate::cuda::context::Stream;
use crate::cuda::dispatch::silu_unit;
use crate::cuda::modules::Kernels;
use cudarc::driver::result as driver;
use storm_graph::DType;
use storm_graph::random::Random;

/// Upper bounds on the trial's extents: several tiles of every size, and many steps along k.
const ROWS: usize = 512;
const COLUMNS: usize = 768;
const INNER: usize = 4096;

/// The trial's memory is divided into parts of this size: operands, addend, bias, results, those of a gated unit,
/// workspace.
const PART_BYTES: usize = 16 << 20;
const PARTS: usize = 6;

impl Gemm {
    /// Whether another algorithm may replace the plan's. If the trial fails, the answer is no.
    pub(super) fn gives_same_bits(
        &self,
        shape: &GemmShape,
        one: &Algorithm,
        other: &Algorithm,
        kernels: &Kernels,
    ) -> bool {
        let run = || -> Result<bool, DeviceError> {
            let first = self.trial(shape, one, kernels)?;
            Ok(first == self.trial(shape, other, kernels)?)
        };
        run().unwrap_or(false)
    }

    /// The bytes of a small product computed with an algorithm, and of its gated unit.
    pub(super) fn trial(
        &self,
        shape: &GemmShape,
        algorithm: &Algorithm,
        kernels: &Kernels,
    ) -> Result<Vec<u8>, DeviceError> {
        let (m, n, k) = shape.sizes;
        let (m, n, k) = (m.min(ROWS), n.min(COLUMNS), k.min(INNER));
        let small = GemmShape { sizes: (m, n, k), ..*shape };
        let mut plan = GemmPlan::describe_shape(&small).map_err(CudaError::blas("a trial"))?;
        plan.algorithm = *algorithm;
        let memory = self.context.allocate(PARTS * PART_BYTES + WORKSPACE_BYTES)?;
        let part = |index: usize| memory.start() + (index * PART_BYTES) as u64;
        let stream = Stream::new(&self.context)?;
        let Operands { a, b, addend, bias, unit } = Operands::new(&small);
        let parts = [(0, a), (1, b), (2, addend), (3, bias), (5, unit)];
        for (index, bytes) in parts.iter().filter(|(_, bytes)| !bytes.is_empty()) {
            // SAFETY: each part is larger than what is copied there; `bytes` lives until the stream is
            // synchronized.
            unsafe { driver::memcpy_htod_async(part(*index), bytes, stream.handle()) }
                .map_err(CudaError::driver("copying"))?;
            stream.synchronize("a trial of products")?;
        }
        let unit = |kind| {
            let launch = silu_unit(kernels, kind, part(4), part(5), (m, n))?;
            Ok::<_, CudaError>(Unit { kind, address: part(5), launch })
        };
        let unit = shape.unit.map(unit).transpose()?;
        let addresses = super::Addresses {
            a: part(0),
            b: part(1),
            addend: shape.has_addend.then(|| part(2)),
            bias: shape.has_bias.then(|| part(3)),
            // Products of 8-bit floats are never chunked, so there is no trial of them.
            scales: None,
            out: part(4),
            unit: unit.as_ref(),
            workspace: part(PARTS),
        };
        // SAFETY: every part is large enough for the small product, and nothing else uses them.
        unsafe { plan.queue(self.handle, &addresses, &stream, || "a trial".to_owned())? };
        stream.synchronize("a trial of products")?;
        let bytes = m * n * shape.out.size_bytes();
        let unit_elements = shape.unit.map_or(0, |kind| kind.elements(m, n));
        let mut found = vec![0; bytes + unit_elements * shape.out.size_bytes()];
        let (product, unit) = found.split_at_mut(bytes);
        let results = [(product, part(4)), (unit, part(5))];
        for (to, from) in results.into_iter().filter(|(to, _)| !to.is_empty()) {
            // SAFETY: the product is done; `found` lives until the stream is synchronized.
            unsafe { driver::memcpy_dtoh_async(to, from, stream.handle()) }
                .map_err(CudaError::driver("copying"))?;
            stream.synchronize("a trial of products")?;
        }
        Ok(found)
    }
}

/// The bytes of a trial's operands.
pub(super) struct Operands {
    a: Vec<u8>,
    b: Vec<u8>,
    pub(super) addend: Vec<u8>,
    bias: Vec<u8>,
    /// Gates and ups, where the unit reads them from memory.
    unit: Vec<u8>,
}

impl Operands {
    /// Always the same for a shape.
    pub(super) fn new(shape: &GemmShape) -> Operands {
        let (m, n, k) = shape.sizes;
        let mut random = Random(1);
        Operands {
            a: values(&mut random, shape.a.0, m * k),
            b: values(&mut random, shape.b.0, k * n),
            addend: values(&mut random, shape.out, m * n),
            bias: values(&mut random, shape.out, n),
            unit: values(&mut random, shape.out, shape.unit.map_or(0, |kind| kind.elements(m, n))),
        }
    }
}

/// Random numbers around 0 whose sums are inexact.
fn values(random: &mut Random, dtype: DType, elements: usize) -> Vec<u8> {
    let mut value = || random.unit() as f32 - 0.5;
    match dtype {
        DType::BF16 => {
            (0..elements).flat_map(|_| half::bf16::from_f32(value()).to_le_bytes()).collect()
        }
        _ => (0..elements).flat_map(|_| value().to_le_bytes()).collect(),
    }
}
