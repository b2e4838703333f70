//! Values of options, as people write them on the command line and in a config file.

use crate::size;
use clap::ValueEnum;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::str::FromStr;
use storm_data::Overlong;
use storm_train::{Decay, DecayTargets};

/// A number of bytes: `16GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        size::parse(text).map(Size)
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Exact, whatever unit it was written in.
        serializer.serialize_str(&format!("{}B", self.0))
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Size, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a size such as \"16GiB\"")]
        enum Written {
            Number(f64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(number) => number.to_string().parse().map_err(serde::de::Error::custom),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// Any number of 64 bits. TOML's integers have one bit less: above those it is text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seed(pub(crate) u64);

impl FromStr for Seed {
    type Err = String;

    fn from_str(text: &str) -> Result<Seed, String> {
        let problem = || format!("`{text}` is not a whole number from 0 to {}", u64::MAX);
        text.parse().map(Seed).map_err(|_| problem())
    }
}

impl Serialize for Seed {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match i64::try_from(self.0) {
            Ok(seed) => serializer.serialize_i64(seed),
            Err(_) => serializer.serialize_str(&self.0.to_string()),
        }
    }
}

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Seed, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a whole number that is not negative; above 2^63 as text")]
        enum Written {
            Number(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(seed) => Ok(Seed(seed)),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// Where to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DeviceArg {
    /// On the GPU if there is one that can be used, else on the CPU.
    Auto,
    /// On the CPU, which keeps to the same budget in the same way.
    Cpu,
    /// On the first NVIDIA GPU.
    Cuda,
}

/// What becomes of samples that are longer than a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OverlongArg {
    /// They are left out, with a warning.
    Drop,
    /// They lose their end.
    Truncate,
    /// They are cut into pieces, each a sample of its own.
    Split,
    /// The run does not begin.
    Error,
}

impl From<OverlongArg> for Overlong {
    fn from(overlong: OverlongArg) -> Overlong {
        match overlong {
            OverlongArg::Drop => Overlong::Drop,
            OverlongArg::Truncate => Overlong::Truncate,
            OverlongArg::Split => Overlong::Split,
            OverlongArg::Error => Overlong::Error,
        }
    }
}

/// How the learning rate falls after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DecayArg {
    /// It stays.
    Constant,
    /// In a straight line.
    Linear,
    /// Along half a wave of the cosine.
    Cosine,
}

impl From<DecayArg> for Decay {
    fn from(decay: DecayArg) -> Decay {
        match decay {
            DecayArg::Constant => Decay::Constant,
            DecayArg::Linear => Decay::Linear,
            DecayArg::Cosine => Decay::Cosine,
        }
    }
}

/// Which weights shrink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DecayTargetsArg {
    /// Those with two or more axes: not biases, not norms.
    Matrices,
    /// All of them.
    All,
}

impl From<DecayTargetsArg> for DecayTargets {
    fn from(targets: DecayTargetsArg) -> DecayTargets {
        match targets {
            DecayTargetsArg::Matrices => DecayTargets::Matrices,
            DecayTargetsArg::All => DecayTargets::All,
        }
    }
}
