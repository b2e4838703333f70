use std::fmt;

/// The storage type of a tensor's elements.
///
/// Arithmetic is f32 (or wider) everywhere. A dtype only describes memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// The upper half of an f32: 8 exponent bits, 7 mantissa bits.
    BF16,
    /// Token IDs, positions, segment IDs, targets.
    I32,
    /// Quantized values.
    I8,
    /// Quantized values and masks.
    U8,
}

impl DType {
    /// Bytes per element.
    pub fn size_bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::BF16 => 2,
            DType::I8 | DType::U8 => 1,
        }
    }

    /// Whether gradients can flow through values of this dtype.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::BF16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::I8 => "i8",
            DType::U8 => "u8",
        })
    }
}
