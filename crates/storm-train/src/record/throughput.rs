use serde::{Deserialize, Serialize};
use storm_model::Unit;

/// Tokens or images that a run reads. Files name the fields after the unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Throughput {
    /// Of a language model.
    Tokens {
        /// Total of all steps so far.
        tokens: u64,
        /// Rate of this step.
        tokens_per_second: f64,
    },
    /// Of an image classifier.
    Images {
        /// Total of all steps so far.
        images: u64,
        /// Rate of this step.
        images_per_second: f64,
    },
}

impl Throughput {
    /// A total of all steps, and the rate of this step.
    pub fn new(unit: Unit, total: u64, per_second: f64) -> Throughput {
        match unit {
            Unit::Tokens => Throughput::Tokens { tokens: total, tokens_per_second: per_second },
            Unit::Images => Throughput::Images { images: total, images_per_second: per_second },
        }
    }

    /// The unit.
    pub fn unit(self) -> Unit {
        match self {
            Throughput::Tokens { .. } => Unit::Tokens,
            Throughput::Images { .. } => Unit::Images,
        }
    }

    /// Total of all steps so far.
    pub fn total(self) -> u64 {
        match self {
            Throughput::Tokens { tokens: total, .. } | Throughput::Images { images: total, .. } => {
                total
            }
        }
    }

    /// Rate of this step.
    pub fn per_second(self) -> f64 {
        match self {
            Throughput::Tokens { tokens_per_second: speed, .. }
            | Throughput::Images { images_per_second: speed, .. } => speed,
        }
    }
}
