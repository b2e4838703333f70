//! Selects the sums of products of bf16 operands: those of the module's definition, or those of
//! AMX.

use super::super::element::Element;
use super::matrix::{Matrix, MatrixMut};
use super::{Epilogue, PARALLEL_MIN, amx, gemm_with};

/// How products of two bf16 operands are summed. This is part of the definition of a run, because
/// the two differ in the last bits. Products of other operands are always summed as with `Fma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Bf16Products {
    /// One chain of fused multiply-adds for each element.
    #[default]
    Fma,
    /// The sums that `TDPBF16PS` defines, in steps of 32 products (`gemm/amx/`).
    Amx,
}

impl Bf16Products {
    /// `c = a · b` with the epilogue. Uses the current rayon pool.
    ///
    /// # Panics
    /// If shapes do not match.
    pub fn gemm<A: Element, B: Element, C: Element>(
        self,
        a: Matrix<A>,
        b: Matrix<B>,
        c: MatrixMut<C>,
        epilogue: Epilogue<C>,
    ) {
        let work = c.rows().saturating_mul(c.cols()).saturating_mul(a.cols());
        let threads = if work < PARALLEL_MIN { 1 } else { rayon::current_num_threads() };
        self.gemm_with(threads, a, b, c, epilogue);
    }

    /// [`Bf16Products::gemm`] on the calling thread, for kernels that are themselves parallel.
    ///
    /// # Panics
    /// If shapes do not match.
    pub fn gemm_on_this_thread<A: Element, B: Element, C: Element>(
        self,
        a: Matrix<A>,
        b: Matrix<B>,
        c: MatrixMut<C>,
        epilogue: Epilogue<C>,
    ) {
        self.gemm_with(1, a, b, c, epilogue);
    }

    fn gemm_with<A: Element, B: Element, C: Element>(
        self,
        threads: usize,
        a: Matrix<A>,
        b: Matrix<B>,
        c: MatrixMut<C>,
        epilogue: Epilogue<C>,
    ) {
        match (self, a.as_bf16(), b.as_bf16()) {
            (Bf16Products::Amx, Some(a), Some(b)) => amx::gemm(threads, a, b, c, epilogue),
            _ => gemm_with(threads, a, b, c, epilogue),
        }
    }
}
