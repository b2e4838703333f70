use crate::cpu::kernels::element::E4m3;
use half::bf16;
use storm_graph::DType;

mod sealed {
    pub trait Sealed {}
}

/// An element type of tensors. Every bit pattern is valid, so memory may be read as any of them.
pub trait Scalar: Copy + Send + Sync + 'static + sealed::Sealed {
    /// The dtype it stores.
    const DTYPE: DType;
}

macro_rules! scalar {
    ($($ty:ty => $dtype:ident),*) => {
        $(
            impl sealed::Sealed for $ty {}
            impl Scalar for $ty {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}

/// The bytes that values are stored as.
pub fn bytes_of<T: Scalar>(values: &[T]) -> &[u8] {
    // SAFETY: a scalar has no padding, and bytes need no alignment; the result keeps the borrow.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes that values are stored as, to be overwritten.
pub fn bytes_of_mut<T: Scalar>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and every bit pattern is a valid scalar.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

scalar!(f32 => F32, bf16 => BF16, i32 => I32, i8 => I8, u8 => U8, E4m3 => U8);
