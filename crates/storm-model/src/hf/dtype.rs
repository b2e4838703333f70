//! Element types in files and in memory, and conversions between them.

use half::{bf16, f16};

/// Element types of the safetensors format. Only F64, F32, BF16 and F16 are converted. The others
/// are listed so that files that contain them can be checked and described.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names are the format's own.
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E4M3,
    F8E5M2,
    I16,
    U16,
    F16,
    BF16,
    I32,
    U32,
    F32,
    I64,
    U64,
    F64,
}

impl Dtype {
    const ALL: [(Self, &'static str, usize); 15] = [
        (Self::Bool, "BOOL", 1),
        (Self::U8, "U8", 1),
        (Self::I8, "I8", 1),
        (Self::F8E4M3, "F8_E4M3", 1),
        (Self::F8E5M2, "F8_E5M2", 1),
        (Self::I16, "I16", 2),
        (Self::U16, "U16", 2),
        (Self::F16, "F16", 2),
        (Self::BF16, "BF16", 2),
        (Self::I32, "I32", 4),
        (Self::U32, "U32", 4),
        (Self::F32, "F32", 4),
        (Self::I64, "I64", 8),
        (Self::U64, "U64", 8),
        (Self::F64, "F64", 8),
    ];

    fn row(self) -> (Self, &'static str, usize) {
        Self::ALL[self as usize]
    }

    /// The name in a safetensors header.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Bytes of one element.
    pub fn size_bytes(self) -> usize {
        self.row().2
    }

    /// Whether STORM reads weights of this type.
    pub fn is_weight(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::BF16 | Self::F16)
    }

    pub(super) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(_, known, _)| *known == name).map(|(dtype, ..)| dtype)
    }
}

/// The types that weights are saved in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightDtype {
    /// 32-bit float.
    F32,
    /// bfloat16: a 16-bit float with the exponent range of f32.
    Bf16,
}

impl WeightDtype {
    /// The type in the file.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
        }
    }

    /// `dtype` in config.json.
    pub(super) fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
}

/// An element of weights in memory: `f32` or [`bf16`]. Narrowing rounds to nearest, ties to even.
pub trait Element: Copy + Default + sealed::Sealed {
    #[doc(hidden)]
    fn from_f64(value: f64) -> Self;
    #[doc(hidden)]
    fn from_f32(value: f32) -> Self;
    #[doc(hidden)]
    fn from_bf16(value: bf16) -> Self;
    #[doc(hidden)]
    fn to_f32(self) -> f32;
    #[doc(hidden)]
    fn to_bf16(self) -> bf16;
}

impl Element for f32 {
    fn from_f64(value: f64) -> Self {
        value as f32
    }
    fn from_f32(value: f32) -> Self {
        value
    }
    fn from_bf16(value: bf16) -> Self {
        value.to_f32()
    }
    fn to_f32(self) -> f32 {
        self
    }
    fn to_bf16(self) -> bf16 {
        bf16::from_f32(self)
    }
}

impl Element for bf16 {
    fn from_f64(value: f64) -> Self {
        bf16::from_f32(rounded_to_odd(value))
    }
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
    // Not via f32, which could change the payload of a NaN.
    fn from_bf16(value: bf16) -> Self {
        value
    }
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn to_bf16(self) -> bf16 {
        self
    }
}

/// Converts an f64 to f32 with round-to-odd: truncates toward zero and sets the last bit unless the
/// result is exact. Rounding that to a narrower type gives the same result as rounding the f64
/// once. Via the nearest f32, the value would be rounded twice.
fn rounded_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    if value.is_nan() || f64::from(nearest) == value {
        return nearest;
    }
    let is_beyond = f64::from(nearest).abs() > value.abs();
    // Subtracting 1 from the bits gives the next value toward zero, for either sign.
    let towards_zero = nearest.to_bits() - u32::from(is_beyond);
    f32::from_bits(towards_zero | 1)
}

/// Converts little-endian bytes to elements. Returns `false` if the type is not supported for
/// weights. `bytes` holds exactly `dest.len()` elements.
pub(super) fn decode<E: Element>(dtype: Dtype, bytes: &[u8], dest: &mut [E]) -> bool {
    match dtype {
        Dtype::F64 => {
            for (dest, bytes) in dest.iter_mut().zip(bytes.as_chunks::<8>().0) {
                *dest = E::from_f64(f64::from_le_bytes(*bytes));
            }
        }
        Dtype::F32 => {
            for (dest, bytes) in dest.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *dest = E::from_f32(f32::from_le_bytes(*bytes));
            }
        }
        Dtype::BF16 => {
            for (dest, bytes) in dest.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *dest = E::from_bf16(bf16::from_le_bytes(*bytes));
            }
        }
        Dtype::F16 => {
            for (dest, bytes) in dest.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *dest = E::from_f32(f16::from_le_bytes(*bytes).to_f32());
            }
        }
        _ => return false,
    }
    true
}

/// Converts elements to little-endian bytes.
pub(super) fn encode<E: Element>(source: &[E], dtype: WeightDtype, bytes: &mut Vec<u8>) {
    bytes.clear();
    match dtype {
        WeightDtype::F32 => {
            bytes.extend(source.iter().flat_map(|value| value.to_f32().to_le_bytes()))
        }
        WeightDtype::Bf16 => {
            bytes.extend(source.iter().flat_map(|value| value.to_bf16().to_le_bytes()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bf16 nearest to a value, ties to even, found by comparing its neighbors.
    fn nearest(value: f64) -> bf16 {
        let around = bf16::from_f32(value as f32).to_bits();
        let distance = |bits: u16| (f64::from(bf16::from_bits(bits).to_f32()) - value).abs();
        [around - 1, around, around + 1]
            .into_iter()
            .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))))
            .map(bf16::from_bits)
            .unwrap()
    }

    #[test]
    fn an_f64_is_rounded_once() {
        // 1 + 2⁻⁸ is halfway between two bf16 values. The remainder decides, and is lost in the
        // nearest f32.
        let middle = 1.0 + (-8f64).exp2();
        for (value, expected) in [
            (middle, 1.0),
            (middle + (-40f64).exp2(), 1.0 + (-7f32).exp2()),
            (middle - (-40f64).exp2(), 1.0),
            (-middle - (-40f64).exp2(), -1.0 - (-7f32).exp2()),
            (3.0 * (-8f64).exp2() + 1.0 - (-50f64).exp2(), 1.0 + (-7f32).exp2()),
            (0.0, 0.0),
            (1e-300, 0.0),
            (1e300, f32::INFINITY),
            (f64::NEG_INFINITY, f32::NEG_INFINITY),
        ] {
            assert_eq!(<bf16 as Element>::from_f64(value).to_f32(), expected, "{value:e}");
        }
        assert!(<bf16 as Element>::from_f64(f64::NAN).is_nan());
        let mut random = storm_graph::random::Random(3);
        for _ in 0..10_000 {
            let mantissa = 1.0 + random.below(1 << 20) as f64 / f64::from(1 << 20);
            let near_middle = (random.below(3) as f64 - 1.0) * (-45f64).exp2();
            let value = (mantissa + near_middle) * (random.below(200) as f64 - 100.0).exp2();
            assert_eq!(<bf16 as Element>::from_f64(value), nearest(value), "{value:e}");
        }
    }
}
