//! Unusual properties of a model's files, which are always reported to the user.

use super::quantization::Quantization;
use std::fmt;

/// A difference from the files that `transformers` writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Remark {
    /// Tensors are stored as f64 and rounded to the run's precision when read.
    WideWeights {
        /// Number of tensors.
        tensors: usize,
    },
    /// Tensor names contain parts added by a wrapper, which are removed.
    WrappedNames {
        /// The part, with its dots.
        part: &'static str,
        /// The wrapper.
        by: &'static str,
        /// Number of tensors.
        tensors: usize,
    },
    /// There is no head. Training starts with a new one.
    NoHead,
    /// Weights are quantized, and are dequantized when read.
    Quantized {
        /// The format.
        by: Quantization,
        /// Number of tensors.
        tensors: usize,
    },
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WideWeights { tensors } => {
                write!(f, "{} stored as f64: each weight is rounded once", count(*tensors))
            }
            Self::WrappedNames { part, by, tensors } => {
                write!(f, "{} `{part}` of {by}, which is left out", has(*tensors))
            }
            Self::Quantized { by, tensors } => write!(
                f,
                "{} quantized ({by}), and read as the numbers that they stand for; what they are stored as from here on \
                 rounds them once more",
                count(*tensors)
            ),
            Self::NoHead => f.write_str(
                "there is no `lm_head.weight`, and `tie_word_embeddings` is false: training starts with a fresh head",
            ),
        }
    }
}

fn count(tensors: usize) -> String {
    if tensors == 1 { "1 tensor is".to_owned() } else { format!("{tensors} tensors are") }
}

fn has(tensors: usize) -> String {
    match tensors {
        1 => "the name of 1 tensor has".to_owned(),
        _ => format!("the names of {tensors} tensors have"),
    }
}
