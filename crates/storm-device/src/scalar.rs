use half::bf16;
use storm_graph::DType;

mod sealed {
    pub trait Sealed {}
}

/// A type that tensors are made of. Every bit pattern is a value, so memory may be read as any.
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

scalar!(f32 => F32, bf16 => BF16, i32 => I32, i8 => I8, u8 => U8);
