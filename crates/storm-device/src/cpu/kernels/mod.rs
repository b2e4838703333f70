//! CPU kernels on typed slices. They are independent of graphs: the caller has resolved shapes,
//! types and addresses.
//!
//! Invariants of every kernel here:
//! - The result is a function of the inputs alone. Thread count, instruction set and partition of
//!   the work never change a bit.
//! - Nothing is allocated during a call. Packing and block buffers are thread locals of fixed size,
//!   which [`warm_up`] creates before the first step.

pub mod attention;
pub mod augment;
pub mod batch_norm;
pub mod categorical;
pub mod column_sum;
pub mod convolution;
pub mod dropout;
pub mod element;
pub mod elementwise;
pub mod embedding;
pub mod fp8;
pub mod gated_coded;
pub mod gemm;
pub mod group_norm;
pub mod heads;
pub mod layout;
pub mod loss;
pub mod math;
pub mod norm;
pub mod optimizer;
pub mod pool;
pub mod projection;
pub mod quantized;
pub mod recurrent;
pub mod row_loss;
mod scratch;
mod shared;
pub mod simd;
pub mod sum;

/// Creates and touches the scratch buffers of every thread of the current rayon pool, so that later
/// kernel calls need no allocation and no page fault for them.
pub fn warm_up() {
    let touch = || {
        gemm::touch_scratch();
        attention::touch_scratch();
    };
    touch();
    rayon::broadcast(|_| touch());
}
