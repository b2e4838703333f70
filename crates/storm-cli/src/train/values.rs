//! Values of options, as people write them on the command line and in a config file.

use crate::size;
use clap::ValueEnum;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::str::FromStr;
use storm_data::Overlong;
use storm_data::records::Order;
use storm_train::{Decay, DecayTargets};

/// The rule that updates weights, as people write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OptimizerArg {
    /// AdamW.
    Adamw,
    /// Stochastic gradient descent with momentum.
    Sgd,
}

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

/// In which order rows come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OrderArg {
    /// Blocks in a random order, and the rows of as many as fit into data-ram in a random order among each other.
    Window,
    /// Any row may follow any other. Of small records, slow where the dataset does not fit into data-ram.
    Global,
}

impl From<OrderArg> for Order {
    fn from(order: OrderArg) -> Order {
        match order {
            OrderArg::Window => Order::Window,
            OrderArg::Global => Order::Global,
        }
    }
}

/// What the learning rate does after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ScheduleArg {
    /// It stays.
    Constant,
    /// It falls in a straight line.
    Linear,
    /// It falls along half a wave of the cosine.
    Cosine,
    /// Warm-up, stable, decay: it stays, and falls in the cooldown at the end.
    Wsd,
}

/// How the learning rate falls in a cooldown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CooldownShapeArg {
    /// In a straight line.
    Linear,
    /// Along half a wave of the cosine.
    Cosine,
    /// As one minus the square root of the part that is done: fast at first.
    #[value(name = "1-sqrt")]
    #[serde(rename = "1-sqrt")]
    OneMinusSqrt,
}

impl From<CooldownShapeArg> for Decay {
    fn from(shape: CooldownShapeArg) -> Decay {
        match shape {
            CooldownShapeArg::Linear => Decay::Linear,
            CooldownShapeArg::Cosine => Decay::Cosine,
            CooldownShapeArg::OneMinusSqrt => Decay::OneMinusSqrt,
        }
    }
}

/// A part of a run: a share of its steps, below 1, or a number of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Span {
    Share(f64),
    Steps(u64),
}

impl Span {
    /// How many of a run's steps that is.
    pub(crate) fn of(self, steps: u64) -> u64 {
        match self {
            Span::Share(share) => (share * steps as f64).round() as u64,
            Span::Steps(steps) => steps,
        }
    }

    fn new(number: f64) -> Result<Span, String> {
        match number {
            0.0..1.0 => Ok(Span::Share(number)),
            1.0..=9e15 if number.fract() == 0.0 => Ok(Span::Steps(number as u64)),
            _ => Err(format!(
                "{number} is neither a share of the run, such as 0.2, nor a number of steps"
            )),
        }
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Span, String> {
        let problem = |_| {
            format!("`{text}` is neither a share of the run, such as 0.2, nor a number of steps")
        };
        Span::new(text.parse().map_err(problem)?)
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Span::Share(share) => serializer.serialize_f64(share),
            Span::Steps(steps) => serializer.serialize_u64(steps),
        }
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Span, D::Error> {
        Span::new(f64::deserialize(deserializer)?).map_err(serde::de::Error::custom)
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
