//! How the weights of a frozen base are stored.

use std::fmt;
use std::str::FromStr;

/// The storage of a model's frozen projections. Everything else is stored as the model computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BaseFormat {
    /// As the model computes.
    #[default]
    Computed,
    /// In 8 bits with a scale for each 128 of them, see [`QuantizedRow`](storm_graph::QuantizedRow); half the memory of
    /// bf16.
    Int8,
}

impl fmt::Display for BaseFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BaseFormat::Computed => "bf16",
            BaseFormat::Int8 => "int8",
        })
    }
}

impl FromStr for BaseFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<BaseFormat, String> {
        match text {
            "bf16" => Ok(BaseFormat::Computed),
            "int8" => Ok(BaseFormat::Int8),
            _ => Err(format!("`{text}` is not a format of a base: use bf16 or int8")),
        }
    }
}
