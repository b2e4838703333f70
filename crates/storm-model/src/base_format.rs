//! Storage formats for the weights of a frozen base.

use std::fmt;
use std::str::FromStr;
use storm_graph::QuantizedFormat;

/// The storage format of a model's frozen projections. All other parameters are stored in the
/// compute type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BaseFormat {
    /// In the compute type.
    #[default]
    Computed,
    /// In 8 or 4 bits, see [`QuantizedRow`](storm_graph::QuantizedRow). This takes about half of
    /// the memory of bf16, or a little more than a quarter.
    Quantized(QuantizedFormat),
}

impl BaseFormat {
    /// All formats.
    pub const ALL: [BaseFormat; 3] = [
        BaseFormat::Computed,
        BaseFormat::Quantized(QuantizedFormat::Int8),
        BaseFormat::Quantized(QuantizedFormat::Nf4),
    ];

    /// The quantized format of a projection's rows, if quantized.
    pub fn quantized(self) -> Option<QuantizedFormat> {
        match self {
            BaseFormat::Computed => None,
            BaseFormat::Quantized(format) => Some(format),
        }
    }
}

impl fmt::Display for BaseFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BaseFormat::Computed => f.write_str("bf16"),
            BaseFormat::Quantized(format) => format.fmt(f),
        }
    }
}

impl FromStr for BaseFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<BaseFormat, String> {
        let found = BaseFormat::ALL.into_iter().find(|format| format.to_string() == text);
        found.ok_or_else(|| format!("`{text}` is not a format of a base: use bf16, int8 or nf4"))
    }
}
