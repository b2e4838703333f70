//! Matrix products by cuBLASLt, with descriptors and algorithms chosen once per shape.
//!
//! The bits of a product are those of the library's first choice for the shape under a fixed workspace. That
//! choice is a pure function of shape, dtypes, card and library version, so every plan and every run gives the
//! same bits. For activations, the choice is made for one fixed number of rows, so a plan may chunk rows without
//! changing a bit. Split-k sums are allowed only where rows are never chunked: for weight gradients, whose k is the
//! tokens, and for products of 8-bit floats, whose scales belong to all rows.
//!
//! Another algorithm may run instead if it gives the same bits: the choice for the real number of rows, if a
//! small trial shows equal bits (`trial.rs`), or the fastest one measured (`tune.rs`), which is cached on disk. On
//! Hopper, it may be a kernel of STORM's own (`hopper.rs`), which can also compute the gated unit that takes the product.

mod check;
mod choices;
mod fastest;
mod hopper;
mod trial;
mod tune;

use super::cache::Cache;
use super::context::{Allocation, Context, Launch, Start, Stream};
use super::modules::Kernels;
use super::{CudaError, libraries};
use crate::DeviceError;
pub use check::OwnProduct;
use choices::{Algorithm, Candidates};
use cudarc::cublaslt::{result, sys};
pub(super) use hopper::kernels as own_kernels;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};
use storm_graph::DType;
pub(super) use tune::SOURCE as TRIAL_SOURCE;

/// Enough for every worthwhile algorithm on Hopper. Algorithm selection depends on it.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// The number of rows for which the algorithm of an activation product is chosen, regardless of its
/// real number of rows.
const CHOICE_ROWS: usize = 8192;

/// The largest alignment that any algorithm exploits, in bytes.
const ALIGNMENT_MAX: u64 = 16;

/// A row-major matrix in device memory, dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Operand {
    pub(super) address: u64,
    pub(super) dtype: DType,
    /// Stored as the transpose of the matrix in the product.
    pub(super) transposed: bool,
}

/// Addresses of the scales of operands in 8-bit floats, an f32 each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scales {
    pub(super) a: u64,
    pub(super) b: u64,
}

/// The role of a product in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum GemmRole {
    /// Rows may be chunked, so an element must not depend on the number of rows.
    Activation,
    /// Rows are never chunked.
    Whole,
}

/// `out (m × n) = a (m × k) · b (k × n) + bias + addend`, row-major, rounded once. With `accumulate`, the addend
/// is the previous content of `out`.
#[derive(Clone, Debug)]
pub(super) struct GemmCall {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) a: Operand,
    pub(super) b: Operand,
    pub(super) out: u64,
    pub(super) out_dtype: DType,
    /// One value per column, in the dtype of `out`.
    pub(super) bias: Option<u64>,
    pub(super) addend: Option<u64>,
    pub(super) accumulate: bool,
    pub(super) role: GemmRole,
    /// For operands in u8, which are codes of E4M3.
    pub(super) scales: Option<Scales>,
    /// The gated unit that takes `out`, if it is computed with the product.
    pub(super) unit: Option<Unit>,
    /// Filled by [`Gemm::prepare`].
    pub(super) plan: Option<Arc<GemmPlan>>,
}

/// What a gated unit with SiLU, in bf16, does with a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum UnitKind {
    /// The product's columns are gates and ups; the unit's result has half as many.
    Forward,
    /// The product is the gradient of the unit's result. Those of gates and ups, twice as many columns, overwrite them.
    Gradient,
    /// The same, and the product becomes the unit's result.
    GradientAndOutput,
}

impl UnitKind {
    /// Elements at [`Unit::address`], for a product of this size.
    fn elements(self, m: usize, n: usize) -> usize {
        match self {
            UnitKind::Forward => m * n / 2,
            UnitKind::Gradient | UnitKind::GradientAndOutput => 2 * m * n,
        }
    }
}

/// A gated unit that takes a product.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) kind: UnitKind,
    /// The unit's result, or gates and ups.
    pub(super) address: u64,
    /// Computes it after the product.
    pub(super) launch: Launch,
}

impl GemmCall {
    /// A plain product.
    pub(super) fn new(
        (m, n, k): (usize, usize, usize),
        a: Operand,
        b: Operand,
        out: u64,
        out_dtype: DType,
        role: GemmRole,
    ) -> GemmCall {
        GemmCall {
            m,
            n,
            k,
            a,
            b,
            out,
            out_dtype,
            bias: None,
            addend: None,
            accumulate: false,
            role,
            scales: None,
            unit: None,
            plan: None,
        }
    }

    fn addresses(&self, workspace: u64) -> Addresses<'_> {
        Addresses {
            a: self.a.address,
            b: self.b.address,
            addend: if self.accumulate { Some(self.out) } else { self.addend },
            bias: self.bias,
            scales: self.scales,
            out: self.out,
            unit: self.unit.as_ref(),
            workspace,
        }
    }

    fn shape(&self) -> GemmShape {
        GemmShape {
            sizes: (self.m, self.n, self.k),
            a: (self.a.dtype, self.a.transposed),
            b: (self.b.dtype, self.b.transposed),
            out: self.out_dtype,
            has_bias: self.bias.is_some(),
            has_addend: self.addend.is_some() || self.accumulate,
            unit: self.unit.as_ref().map(|unit| unit.kind),
            role: self.role,
            alignments: [
                alignment(self.b.address),
                alignment(self.a.address),
                alignment(self.addend.unwrap_or(self.out)),
                alignment(self.out),
            ],
        }
    }
}

/// The largest power of two that divides an address, up to the maximum that matters. Tensors are well aligned,
/// but a chunk of a tensor's rows may not be.
fn alignment(address: u64) -> u32 {
    (1u64 << address.trailing_zeros().min(63)).min(ALIGNMENT_MAX) as u32
}

/// Everything that the choice of algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct GemmShape {
    sizes: (usize, usize, usize),
    a: (DType, bool),
    b: (DType, bool),
    out: DType,
    has_bias: bool,
    has_addend: bool,
    unit: Option<UnitKind>,
    role: GemmRole,
    /// Alignments of b, a, the addend and the output, in bytes.
    alignments: [u32; 4],
}

/// Descriptors and algorithm of one shape, in cuBLASLt's column-major terms, where a row-major matrix is its
/// transpose: `outᵀ = bᵀ · aᵀ`.
#[derive(Debug)]
pub(super) struct GemmPlan {
    shape: GemmShape,
    description: sys::cublasLtMatmulDesc_t,
    first: sys::cublasLtMatrixLayout_t,
    second: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: Algorithm,
    /// The algorithms among which it is the fastest one, if that has been measured.
    measured: Option<Candidates>,
}

// SAFETY: after construction only `queue` writes a descriptor, to set the addresses of bias and
// scales, and its callers guarantee that no other thread queues the same plan.
unsafe impl Send for GemmPlan {}
// SAFETY: as above.
unsafe impl Sync for GemmPlan {}

/// The library, its workspace, and the plans made so far.
#[derive(Debug)]
pub(super) struct Gemm {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    workspace: Allocation,
    plans: Mutex<BTreeMap<GemmShape, Arc<GemmPlan>>>,
    /// The fastest algorithms measured, on disk.
    measured: Cache,
}

// SAFETY: the handle may be used from any thread.
unsafe impl Send for Gemm {}
// SAFETY: as above.
unsafe impl Sync for Gemm {}

impl Gemm {
    /// `cuBLASLt 130001`: together with the card, this determines how products are computed.
    pub(super) fn library(&self) -> String {
        // SAFETY: the library is loaded, since a handle exists; the call takes no arguments.
        format!("cuBLASLt {}", unsafe { sys::cublasLtGetVersion() })
    }

    pub(super) fn new(context: &Arc<Context>) -> Result<Gemm, CudaError> {
        libraries::require_blas()?;
        let handle = result::create_handle().map_err(CudaError::blas("starting"))?;
        let workspace = context.allocate(WORKSPACE_BYTES)?;
        let (context, plans) = (Arc::clone(context), Mutex::default());
        let measured = Cache::of_user("products", "algorithm");
        Ok(Gemm { context, handle, workspace, plans, measured })
    }

    /// Whether one of STORM's own kernels could compute a product together with a gated unit.
    pub(super) fn can_compute(&self, call: &GemmCall, unit: UnitKind, kernels: &Kernels) -> bool {
        hopper::suits(&GemmShape { unit: Some(unit), ..call.shape() }, kernels.card())
    }

    /// Attaches the plan for the call's shape.
    pub(super) fn prepare(
        &self,
        mut call: GemmCall,
        kernels: &Kernels,
    ) -> Result<GemmCall, CudaError> {
        let shape = call.shape();
        let mut plans = self.plans.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let plan = match plans.get(&shape) {
            Some(plan) => Arc::clone(plan),
            None => {
                let plan = Arc::new(self.plan(&shape, kernels)?);
                plans.insert(shape, Arc::clone(&plan));
                plan
            }
        };
        call.plan = Some(plan);
        Ok(call)
    }

    /// Queues a prepared call.
    ///
    /// # Safety
    /// Until the stream has run the call, the addresses are valid for the shape and no other stream uses the
    /// workspace. No other thread runs a call of the same shape.
    pub(super) unsafe fn queue(&self, call: &GemmCall, stream: &Stream) -> Result<(), DeviceError> {
        let plan = call.plan.as_ref().expect("prepared");
        let what = || format!("product {} × {} × {}", call.m, call.n, call.k);
        let addresses = call.addresses(self.workspace.start());
        // SAFETY: as the caller guarantees.
        unsafe { plan.queue(self.handle, &addresses, stream, what) }
    }

    /// Descriptors and algorithm of a shape.
    fn plan(&self, shape: &GemmShape, kernels: &Kernels) -> Result<GemmPlan, CudaError> {
        let what = || format!("no algorithm for {shape:?}");
        let mut plan = GemmPlan::describe_shape(shape).map_err(CudaError::blas(what()))?;
        if let Some((algorithm, among)) = self.measured(shape, &plan, kernels) {
            (plan.algorithm, plan.measured) = (algorithm, Some(among));
            return Ok(plan);
        }
        let choose = |rows: usize| plan.first_choice(self.handle, shape, rows);
        let rows = shape.sizes.0;
        plan.algorithm = match shape.role {
            GemmRole::Whole => choose(rows).map_err(CudaError::blas(what()))?,
            GemmRole::Activation => {
                let defines_bits = choose(CHOICE_ROWS).map_err(CudaError::blas(what()))?;
                let same_bits = |other: &Algorithm| {
                    *other == defines_bits
                        || self.gives_same_bits(shape, &defines_bits, other, kernels)
                };
                choose(rows).ok().filter(same_bits).unwrap_or(defines_bits)
            }
        };
        Ok(plan)
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

fn data_type(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::U8 => sys::cudaDataType::CUDA_R_8F_E4M3,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

/// Row-major (rows × cols) in column-major terms.
fn layout(
    dtype: DType,
    rows: usize,
    cols: usize,
) -> Result<sys::cublasLtMatrixLayout_t, result::CublasError> {
    result::create_matrix_layout(data_type(dtype), cols as u64, rows as u64, cols as i64)
}

/// Addresses of the parts of one product.
struct Addresses<'a> {
    a: u64,
    b: u64,
    addend: Option<u64>,
    bias: Option<u64>,
    scales: Option<Scales>,
    out: u64,
    unit: Option<&'a Unit>,
    /// Has [`WORKSPACE_BYTES`].
    workspace: u64,
}

impl GemmPlan {
    /// Descriptors of a shape, without an algorithm.
    fn describe_shape(shape: &GemmShape) -> Result<GemmPlan, result::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let (m, n, k) = shape.sizes;
        // f32 accumulation; f32 operands are not truncated to TF32.
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F)?;
        let (a_transposed, b_transposed) = (shape.a.1, shape.b.1);
        let (a_rows, a_cols) = if a_transposed { (k, m) } else { (m, k) };
        let (b_rows, b_cols) = if b_transposed { (n, k) } else { (k, n) };
        let plan = GemmPlan {
            shape: *shape,
            description,
            first: layout(shape.b.0, b_rows, b_cols)?,
            second: layout(shape.a.0, a_rows, a_cols)?,
            out: layout(shape.out, m, n)?,
            // SAFETY: plain data, overwritten before it is used.
            algorithm: Algorithm::Library(unsafe { std::mem::zeroed() }),
            measured: None,
        };
        // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1.
        let operation = |transposed: bool| i32::from(transposed);
        plan.describe(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(b_transposed))?;
        plan.describe(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(a_transposed))?;
        if shape.has_bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as i32;
            plan.describe(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            let dtype = data_type(shape.out) as i32;
            plan.describe(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &dtype)?;
            // Any aligned address works, but the heuristics need one.
            let address = 256u64;
            plan.describe(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &address)?;
        }
        if shape.a.0 == DType::U8 {
            // Without this, tensor cores may add with less precision than f32.
            let fast = 0i8;
            plan.describe(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast)?;
            plan.set_scales(Scales { a: 256, b: 256 })?;
        }
        Ok(plan)
    }

    /// Queues the product; `what` names it in an error.
    ///
    /// # Safety
    /// Until the stream has run it, the addresses are valid for the shape and no other stream uses the
    /// workspace. No other thread queues the same plan.
    unsafe fn queue(
        &self,
        handle: sys::cublasLtHandle_t,
        at: &Addresses<'_>,
        stream: &Stream,
        what: impl Fn() -> String,
    ) -> Result<(), DeviceError> {
        match &self.algorithm {
            // SAFETY: as the caller guarantees.
            Algorithm::Library(algorithm) => unsafe {
                self.queue_in_library(algorithm, handle, at, stream)
                    .map_err(|error| CudaError::blas(what())(error))?;
                let Some(unit) = at.unit else { return Ok(()) };
                unit.launch.queue(stream, Start::InOrder, what)
            },
            // SAFETY: as the caller guarantees.
            Algorithm::Hopper(hopper) => unsafe {
                hopper.launch(&self.shape, at)?.queue(stream, Start::InOrder, what)
            },
        }
    }

    /// # Safety
    /// As for [`GemmPlan::queue`].
    unsafe fn queue_in_library(
        &self,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        handle: sys::cublasLtHandle_t,
        at: &Addresses<'_>,
        stream: &Stream,
    ) -> Result<(), result::CublasError> {
        if let Some(bias) = at.bias {
            let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            self.describe(attribute, &bias)?;
        }
        if let Some(scales) = at.scales {
            self.set_scales(scales)?;
        }
        let (alpha, beta) = (1.0f32, if at.addend.is_some() { 1.0f32 } else { 0.0 });
        let pointer = |address: u64| address as *mut c_void;
        // SAFETY: as the caller guarantees. Alpha and beta are read before the call returns.
        unsafe {
            result::matmul(
                handle,
                self.description,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                pointer(at.b),
                self.first,
                pointer(at.a),
                self.second,
                pointer(at.addend.unwrap_or(at.out)),
                self.out,
                pointer(at.out),
                self.out,
                algorithm,
                pointer(at.workspace),
                WORKSPACE_BYTES,
                stream.handle().cast(),
            )
        }
    }

    fn set_scales(&self, scales: Scales) -> Result<(), result::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        // The library's first operand is `b`.
        self.describe(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scales.b)?;
        self.describe(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scales.a)
    }

    fn describe(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &dyn Bytes,
    ) -> Result<(), result::CublasError> {
        let (pointer, size) = value.bytes();
        // SAFETY: the descriptor is alive and the value has the attribute's size.
        unsafe { result::set_matmul_desc_attribute(self.description, attribute, pointer, size) }
    }
}

impl Drop for GemmPlan {
    fn drop(&mut self) {
        // SAFETY: created in `describe_shape`, destroyed once.
        unsafe {
            let _ = result::destroy_matmul_desc(self.description);
            for layout in [self.first, self.second, self.out] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

/// The value of an attribute, in the form that cuBLASLt takes.
trait Bytes {
    fn bytes(&self) -> (*const c_void, usize);
}

macro_rules! bytes {
    ($($ty:ty),*) => {
        $(impl Bytes for $ty {
            fn bytes(&self) -> (*const c_void, usize) {
                (std::ptr::from_ref(self).cast(), size_of::<$ty>())
            }
        })*
    };
}

bytes!(i8, i32, u32, u64);
