//! Into what the micro-batches of a step are divided.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Lanes of a step, and the groups that these form: `8`, or `2x8` for two groups of eight lanes in a row.
///
/// The gradient of a lane is accumulated by itself. The lanes of a group are added in f32 in their order, then the sums of the
/// groups in f32 in theirs, and the result is rounded once. One group of lanes, or groups of one lane, are lanes without groups:
/// the sums are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lanes {
    groups: usize,
    in_group: usize,
}

impl Lanes {
    /// The whole step.
    pub const ONE: Lanes = Lanes { groups: 1, in_group: 1 };

    /// This many groups of so many lanes; none if these are too many to count.
    pub fn in_groups(groups: usize, in_group: usize) -> Option<Lanes> {
        let count = groups.checked_mul(in_group)?;
        match groups > 1 && in_group > 1 {
            true => Some(Lanes { groups, in_group }),
            false => Some(Lanes::from(count)),
        }
    }

    /// All lanes of a step.
    pub fn count(self) -> usize {
        self.groups * self.in_group
    }

    /// How many groups there are; 1 if lanes have none.
    pub fn groups(self) -> usize {
        self.groups
    }

    /// How many lanes a group has.
    pub fn in_group(self) -> usize {
        self.in_group
    }
}

/// Lanes without groups.
impl From<usize> for Lanes {
    fn from(count: usize) -> Lanes {
        Lanes { groups: 1, in_group: count }
    }
}

impl fmt::Display for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.groups {
            1 => write!(f, "{}", self.in_group),
            groups => write!(f, "{groups}x{}", self.in_group),
        }
    }
}

/// What are not lanes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "lanes are a number such as 8, or groups and the lanes of each such as 2x8, both at least 1; not `{0}`"
)]
pub struct NotLanes(String);

impl FromStr for Lanes {
    type Err = NotLanes;

    fn from_str(text: &str) -> Result<Lanes, NotLanes> {
        let number = |part: &str| match part.bytes().all(|byte| byte.is_ascii_digit()) {
            true => part.parse::<usize>().ok().filter(|&number| number > 0),
            false => None,
        };
        let lanes = match text.split_once('x') {
            None => number(text).map(Lanes::from),
            Some((groups, in_group)) => number(groups)
                .zip(number(in_group))
                .and_then(|(groups, in_group)| Lanes::in_groups(groups, in_group)),
        };
        lanes.ok_or_else(|| NotLanes(text.to_owned()))
    }
}

/// A number, or text if there are groups.
impl Serialize for Lanes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.groups {
            1 => serializer.serialize_u64(self.in_group as u64),
            _ => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for Lanes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Lanes, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Lanes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("lanes: a number such as 8, or groups such as \"2x8\"")
            }

            fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Lanes, E> {
                self.visit_str(&number.to_string())
            }

            fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Lanes, E> {
                self.visit_str(&number.to_string())
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Lanes, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_says_groups_and_lanes() {
        for (text, count, groups, shown) in [
            ("1", 1, 1, "1"),
            ("8", 8, 1, "8"),
            ("2x8", 16, 2, "2x8"),
            ("1x8", 8, 1, "8"),
            ("8x1", 8, 1, "8"),
        ] {
            let lanes: Lanes = text.parse().expect(text);
            assert_eq!(
                (lanes.count(), lanes.groups(), &*lanes.to_string()),
                (count, groups, shown)
            );
            let json = serde_json::to_string(&lanes).expect("json");
            assert_eq!(json, if groups == 1 { shown.to_owned() } else { format!("\"{shown}\"") });
            assert_eq!(serde_json::from_str::<Lanes>(&json).expect("json"), lanes);
        }
    }

    #[test]
    fn what_are_not_lanes_is_refused() {
        let huge = format!("{0}x{0}", usize::MAX);
        for text in [
            "", "0", "x", "2x", "x8", "0x4", "4x0", "-2", "+2", "2x+8", "2x8x2", "2 x 8", "two",
            "1.5", &huge,
        ] {
            let error = text.parse::<Lanes>().expect_err(text).to_string();
            assert!(error.contains("such as 2x8") && error.contains(text), "{error}");
        }
        assert!(serde_json::from_str::<Lanes>("0").is_err());
        assert!(serde_json::from_str::<Lanes>("-1").is_err());
        assert!(serde_json::from_str::<Lanes>("2.5").is_err());
    }
}
