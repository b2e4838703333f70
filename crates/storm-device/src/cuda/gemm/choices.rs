//! The algorithms for a shape: those that the library proposes, and STORM's own kernel.

use super::hopper::Hopper;
use super::{Bytes, GemmPlan, GemmRole, GemmShape, WORKSPACE_BYTES, layout};
use cudarc::cublaslt::{result, sys};

/// A way to compute a product.
#[derive(Clone, Copy, Debug)]
pub(super) enum Algorithm {
    Library(sys::cublasLtMatmulAlgo_t),
    Hopper(Hopper),
}

impl Algorithm {
    /// Identifies it in the cache. STORM's own kernels have a version instead of the library's data.
    pub(super) fn bytes(&self) -> Vec<u8> {
        match self {
            Algorithm::Library(choice) => {
                choice.data.iter().flat_map(|word| word.to_le_bytes()).collect()
            }
            Algorithm::Hopper(_) => Hopper::VERSION.to_vec(),
        }
    }
}

/// Which algorithms a measurement compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Candidates {
    /// Those that the library proposes.
    Library,
    /// STORM's own kernels, too.
    All,
}

impl PartialEq for Algorithm {
    fn eq(&self, other: &Algorithm) -> bool {
        self.bytes() == other.bytes()
    }
}

/// More than the library has proposed for any shape so far.
const CHOICES_MAX: usize = 16;

impl GemmPlan {
    /// The library's first choice for this number of rows.
    pub(super) fn first_choice(
        &self,
        handle: sys::cublasLtHandle_t,
        shape: &GemmShape,
        rows: usize,
    ) -> Result<Algorithm, result::CublasError> {
        let none = result::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);
        self.choices(handle, shape, rows, 1)?.first().copied().ok_or(none)
    }

    /// All proposals of the library for the shape, the one that it ranks best first.
    pub(super) fn all_choices(
        &self,
        handle: sys::cublasLtHandle_t,
        shape: &GemmShape,
    ) -> Result<Vec<Algorithm>, result::CublasError> {
        self.choices(handle, shape, shape.sizes.0, CHOICES_MAX)
    }

    fn choices(
        &self,
        handle: sys::cublasLtHandle_t,
        shape: &GemmShape,
        rows: usize,
        count_max: usize,
    ) -> Result<Vec<Algorithm>, result::CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let (_, n, k) = shape.sizes;
        let preference = result::create_matmul_pref()?;
        let prefer = |attribute, value: &dyn Bytes| {
            let (pointer, size) = value.bytes();
            // SAFETY: the preference is alive and the value has the attribute's size.
            unsafe { result::set_matmul_pref_attribute(preference, attribute, pointer, size) }
        };
        prefer(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(WORKSPACE_BYTES as u64))?;
        let schemes = match shape.role {
            GemmRole::Activation => sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE,
            // The workspace holds partial sums in f32, added in a fixed order.
            GemmRole::Whole => {
                sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
            }
        };
        prefer(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &(schemes as u32))?;
        let attributes = [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        for (attribute, alignment) in attributes.into_iter().zip(shape.alignments) {
            prefer(attribute, &alignment)?;
        }
        let (a_rows, a_cols) = if shape.a.1 { (k, rows) } else { (rows, k) };
        let (second, out) = (layout(shape.a.0, a_rows, a_cols)?, layout(shape.out, rows, n)?);
        // SAFETY: plain data; the library fills the first `found` entries.
        let mut results: [sys::cublasLtMatmulHeuristicResult_t; CHOICES_MAX] =
            unsafe { std::mem::zeroed() };
        let mut found = 0;
        // SAFETY: all descriptors are alive, and there is room for `count_max` results.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.description,
                self.first,
                second,
                out,
                out,
                preference,
                count_max.min(CHOICES_MAX) as i32,
                results.as_mut_ptr(),
                &mut found,
            )
        };
        // SAFETY: created above, destroyed once.
        unsafe {
            result::destroy_matrix_layout(second)?;
            result::destroy_matrix_layout(out)?;
            result::destroy_matmul_pref(preference)?;
        }
        status.result()?;
        let is_usable = |result: &&sys::cublasLtMatmulHeuristicResult_t| {
            result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
        };
        let usable = results[..found as usize].iter().filter(is_usable);
        Ok(usable.map(|result| Algorithm::Library(result.algo)).collect())
    }
}
