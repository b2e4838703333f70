//! On how many levels ranks exchange gradients and gather weights, which depends on their machines and on the groups of lanes.

use std::fmt;
use storm_plan::{Lanes, RankPlace};

/// How the ranks of a step exchange gradients. Bits do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Every rank sends its lanes to the owners of their pieces.
    Flat(Flat),
    /// Machines of so many ranks add up a group of lanes each, and exchange the sums.
    TwoLevels {
        /// Ranks of a machine, which are lanes of a group.
        machine: u32,
        /// How many machines there are.
        machines: u32,
    },
}

/// Why an exchange is flat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flat {
    /// All ranks are on one machine, or each has its own.
    OneLevel,
    /// Machines have different numbers of ranks.
    Uneven,
    /// Ranks of a machine do not follow each other.
    Mixed,
    /// What machines compute at once is not a group of lanes.
    OtherGroups {
        /// Lanes of a group; none if lanes have no groups.
        group: Option<usize>,
        /// How many ranks each machine has.
        machine: u32,
        /// How many machines there are.
        machines: u32,
    },
}

impl Exchange {
    /// How ranks exchange gradients, given the machine of each as a number.
    pub fn new(lanes: Lanes, machines: &[u32]) -> Exchange {
        let ranks = machines.len();
        let on = |machine: u32| machines.iter().filter(|&&other| other == machine).count();
        let Some(&first) = machines.first() else { return Exchange::Flat(Flat::OneLevel) };
        let machine = on(first);
        if machines.iter().any(|&other| on(other) != machine) {
            return Exchange::Flat(Flat::Uneven);
        }
        if machine == 1 || machine == ranks {
            return Exchange::Flat(Flat::OneLevel);
        }
        if machines.chunks(machine).any(|row| row.iter().any(|&other| other != row[0])) {
            return Exchange::Flat(Flat::Mixed);
        }
        let (count, machine) = ((ranks / machine) as u32, machine as u32);
        match lanes.groups() > 1 && lanes.in_group() == machine as usize {
            true => Exchange::TwoLevels { machine, machines: count },
            false => Exchange::Flat(Flat::OtherGroups {
                group: (lanes.groups() > 1).then_some(lanes.in_group()),
                machine,
                machines: count,
            }),
        }
    }

    /// Which of the ranks a rank is, for its plan.
    pub fn place(self, rank: u32, ranks: u32) -> RankPlace {
        match self {
            Exchange::TwoLevels { machine, .. } => RankPlace::on_machines(rank, ranks, machine),
            // Which way weights take does not depend on lanes.
            Exchange::Flat(Flat::OtherGroups { machine, .. }) => {
                RankPlace { relay: machine, ..RankPlace::flat(rank, ranks) }
            }
            Exchange::Flat(_) => RankPlace::flat(rank, ranks),
        }
    }
}

/// In words.
impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flat = "one level: every rank sends its lanes to the owners of their pieces";
        match self {
            Exchange::TwoLevels { machine, machines } => write!(
                f,
                "two levels: each of {machines} machines adds up the {machine} lanes of its ranks, and only the sums go to others"
            ),
            Exchange::Flat(Flat::OneLevel) => {
                write!(f, "{flat}, because one machine has all ranks, or each has one")
            }
            Exchange::Flat(Flat::Uneven) => {
                write!(f, "{flat}, because machines have different numbers of ranks")
            }
            Exchange::Flat(Flat::Mixed) => write!(
                f,
                "{flat}, because the ranks of a machine do not follow each other; start them machine by machine for two levels"
            ),
            Exchange::Flat(Flat::OtherGroups { group, machine, machines }) => {
                let why = match group {
                    Some(lanes) => {
                        format!("a group has {lanes} lanes and a machine {machine} ranks")
                    }
                    None => "lanes have no groups".to_owned(),
                };
                write!(
                    f,
                    "{flat}, because {why}; with lanes = \"{machines}x{machine}\", a run would have two levels"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_that_compute_a_group_exchange_sums() {
        let found = |lanes: &str, machines: &[u32]| {
            let exchange = Exchange::new(lanes.parse().expect("lanes"), machines);
            (exchange.place(1, machines.len() as u32).machine, exchange.to_string())
        };
        // Numbers of machines may be any.
        assert_eq!(found("2x2", &[0, 0, 2, 2]).0, 2);
        assert_eq!(found("4x2", &[0, 0, 1, 1]).0, 2);
        assert_eq!(found("2x3", &[7, 7, 7, 1, 1, 1]).0, 3);
        for (lanes, machines, why) in [
            ("2x2", &[0, 0, 0, 0][..], "one machine has all"),
            ("2x2", &[0, 1, 2, 3], "each has one"),
            ("2x2", &[0, 0, 0, 1], "different numbers"),
            ("2x2", &[0, 1, 0, 1], "machine by machine"),
            (
                "2x4",
                &[0, 0, 1, 1],
                "a group has 4 lanes and a machine 2 ranks; with lanes = \"2x2\"",
            ),
            ("4", &[0, 0, 1, 1], "lanes have no groups; with lanes = \"2x2\""),
        ] {
            let (machine, words) = found(lanes, machines);
            assert_eq!(machine as usize, machines.len(), "{words}");
            assert!(words.starts_with("one level") && words.contains(why), "{words}");
        }
    }
}
