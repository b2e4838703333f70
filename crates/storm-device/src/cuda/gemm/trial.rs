//! Tests whether two algorithms give the same bits: both compute a small product of random numbers.
//!
//! An element of a product is a sum over k. Algorithms with different tiles add in the same order
//! on some cards and not on others. The library does not say which, so this tests it.

use super::{Gemm, GemmPlan, GemmShape, WORKSPACE_BYTES};
use crate::cuda::CudaError;
use crate::cuda::context::Stream;
use cudarc::cublaslt::sys;
use cudarc::driver::result as driver;
use storm_graph::DType;
use storm_graph::random::Random;

/// Upper bounds on the trial's extents: several tiles of every size, and many steps along k.
const ROWS: usize = 512;
const COLUMNS: usize = 768;
const INNER: usize = 4096;

/// The trial's memory is divided into parts of this size: operands, addend, bias, results, workspace.
const PART_BYTES: usize = 16 << 20;
const PARTS: usize = 5;

impl Gemm {
    /// Whether another algorithm may replace the plan's. If the trial fails, the answer is no.
    pub(super) fn gives_same_bits(
        &self,
        shape: &GemmShape,
        one: &sys::cublasLtMatmulAlgo_t,
        other: &sys::cublasLtMatmulAlgo_t,
    ) -> bool {
        let run = || -> Result<bool, CudaError> {
            let first = self.trial(shape, one)?;
            Ok(first == self.trial(shape, other)?)
        };
        run().unwrap_or(false)
    }

    /// The bytes of a small product computed with an algorithm.
    fn trial(
        &self,
        shape: &GemmShape,
        algorithm: &sys::cublasLtMatmulAlgo_t,
    ) -> Result<Vec<u8>, CudaError> {
        let (m, n, k) = shape.sizes;
        let (m, n, k) = (m.min(ROWS), n.min(COLUMNS), k.min(INNER));
        let small = GemmShape { sizes: (m, n, k), ..*shape };
        let mut plan = GemmPlan::describe_shape(&small).map_err(CudaError::blas("a trial"))?;
        plan.algorithm = *algorithm;
        let memory = self.context.allocate(PARTS * PART_BYTES + WORKSPACE_BYTES)?;
        let part = |index: usize| memory.start() + (index * PART_BYTES) as u64;
        let stream = Stream::new(&self.context)?;
        let mut random = Random(1);
        let operands =
            [(part(0), shape.a.0, m * k), (part(1), shape.b.0, k * n), (part(2), shape.out, m * n)];
        for (to, dtype, elements) in operands.into_iter().chain([(part(3), shape.out, n)]) {
            let bytes = values(&mut random, dtype, elements);
            // SAFETY: each part is larger than what is copied there; `bytes` lives until the stream is
            // synchronized.
            unsafe { driver::memcpy_htod_async(to, &bytes, stream.handle()) }
                .map_err(CudaError::driver("copying"))?;
            stream.synchronize("a trial of products")?;
        }
        let addresses = super::Addresses {
            a: part(0),
            b: part(1),
            addend: shape.has_addend.then(|| part(2)),
            bias: shape.has_bias.then(|| part(3)),
            // Products of 8-bit floats are never chunked, so there is no trial of them.
            scales: None,
            out: part(4),
            workspace: part(PARTS),
        };
        // SAFETY: every part is large enough for the small product, and nothing else uses them.
        unsafe { plan.queue(self.handle, &addresses, &stream) }
            .map_err(CudaError::blas("a trial"))?;
        let mut found = vec![0; m * n * shape.out.size_bytes()];
        stream.synchronize("a trial of products")?;
        // SAFETY: the product is done; `found` lives until the stream is synchronized.
        unsafe { driver::memcpy_dtoh_async(&mut found, part(4), stream.handle()) }
            .map_err(CudaError::driver("copying"))?;
        stream.synchronize("a trial of products")?;
        Ok(found)
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
