//! Types of option values on the command line and in a config file.

use crate::size;
use clap::ValueEnum;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::str::FromStr;
use storm_data::Overlong;
use storm_data::records::Order;
use storm_train::{Decay, DecayTargets};

/// The optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OptimizerArg {
    /// AdamW, as in `torch.optim.AdamW`.
    Adamw,
    /// Stochastic gradient descent with momentum, as in `torch.optim.SGD`.
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
        // In bytes, so that the value round-trips exactly whatever unit it was written in.
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

/// Any 64-bit number. TOML integers are signed, so larger values are written as text.
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
        #[serde(
            untagged,
            expecting = "a whole number that is not negative; from 2^63 on, in quotes"
        )]
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

/// Where to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DeviceArg {
    /// The first NVIDIA GPU if it is usable, else the CPU.
    Auto,
    /// The CPU, with the same memory budgets.
    Cpu,
    /// The first NVIDIA GPU; an error if it is not usable.
    Cuda,
}

/// What to do with samples that are longer than a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OverlongArg {
    /// Leave them out, with a warning.
    Drop,
    /// Cut off their end.
    Truncate,
    /// Cut them into pieces, each a separate sample.
    Split,
    /// Refuse to start.
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

/// The order of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OrderArg {
    /// Groups of blocks in random order; the rows of as many groups as fit in data-ram are shuffled.
    Window,
    /// All rows in random order. Slow for small records if the dataset does not fit in data-ram.
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

/// The learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ScheduleArg {
    /// Stays at learning-rate.
    Constant,
    /// Falls in a straight line to final-learning-rate.
    Linear,
    /// Falls along half a cosine wave to final-learning-rate.
    Cosine,
    /// Warm-up, stable, decay: stays at learning-rate and falls to final-learning-rate in the cooldown at the end.
    Wsd,
}

/// How the learning rate falls in a cooldown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CooldownShapeArg {
    /// A straight line.
    Linear,
    /// Half a cosine wave.
    Cosine,
    /// One minus the square root of the finished fraction of the cooldown: fast at first.
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

/// A part of a run: a fraction of its steps, below 1, or a number of steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Span {
    Share(f64),
    Steps(u64),
}

impl Span {
    /// The length in steps.
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
                "{number} is neither a fraction of the run, such as 0.2, nor a whole number of steps"
            )),
        }
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Span, String> {
        let problem = |_| {
            format!(
                "`{text}` is neither a fraction of the run, such as 0.2, nor a whole number of steps"
            )
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

/// Which weights get weight decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DecayTargetsArg {
    /// Those with two or more axes: no biases, no norms.
    Matrices,
    /// All weights.
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
