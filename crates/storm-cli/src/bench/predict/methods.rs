//! The methods to compare: plain training at several lengths, controls, outer steps, and
//! predictions.

use crate::UsageError;
use std::fmt::Write;

/// Lengths of plain runs, as shares of the steps. Each has a schedule that falls to zero in its own
/// last step. Together they show the loss that plain training reaches in a given time.
pub(super) const LENGTHS: [f64; 5] = [0.6, 0.8, 1.0, 1.25, 1.6];

/// Lengths of phases, and the size of the probe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Phases {
    pub(super) steps: u64,
    pub(super) full: u64,
    pub(super) correct: u64,
    pub(super) probe_batches: usize,
}

impl Phases {
    pub(super) fn warm_up(&self) -> u64 {
        (self.steps / 10).max(1)
    }
}

/// A way to train.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Method {
    /// Its name on the command line.
    pub(super) name: &'static str,
    /// A short description.
    pub(super) words: &'static str,
    /// Its `[predict]` section, without the lengths of phases.
    section: &'static str,
    phases: Kind,
    /// More flags of `storm train`.
    more: &'static [&'static str],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Jumps are measured and corrected.
    Measured,
    /// Jumps always stay.
    Outer,
    /// One full phase to the end of the run.
    Whole,
}

/// All methods. They use the learning rate of the best plain run.
pub(super) const METHODS: [Method; 12] = [
    Method {
        name: "null",
        words: "no jump, all costs",
        section: "direction=\"none\", tau=0.1, growth=2, jumps=6",
        phases: Kind::Measured,
        more: &[],
    },
    Method {
        name: "random",
        words: "random direction of the same norm",
        section: "direction=\"random\", tau=0.1, growth=2, jumps=6",
        phases: Kind::Measured,
        more: &[],
    },
    Method {
        name: "fast-forward",
        words: "last update, repeated while the loss falls",
        section: "direction=\"last-update\", jumps=20, noise=0, margin=1000",
        phases: Kind::Measured,
        more: &[],
    },
    Method {
        name: "lookahead",
        words: "half the way back after each full phase",
        section: "direction=\"difference\", controller=\"constant\", tau=-0.5",
        phases: Kind::Outer,
        more: &[],
    },
    Method {
        name: "snoo",
        words: "outer Nesterov step, momentum 0.5",
        section: "direction=\"outer\", momentum=0.5, controller=\"constant\"",
        phases: Kind::Outer,
        more: &[],
    },
    Method {
        name: "ema",
        words: "average of the weights at the end",
        section: "direction=\"weight-average\", controller=\"constant\"",
        phases: Kind::Whole,
        more: &[],
    },
    Method {
        name: "ema-constant",
        words: "the same, with a learning rate that does not fall",
        section: "direction=\"weight-average\", controller=\"constant\"",
        phases: Kind::Whole,
        more: &["--schedule", "constant"],
    },
    Method {
        name: "constant",
        words: "predictions of one length",
        section: "direction=\"difference\", controller=\"constant\", tau=0.25",
        phases: Kind::Measured,
        more: &[],
    },
    Method {
        name: "line-search",
        words: "predictions while the loss falls",
        section: "direction=\"difference\", tau=0.1, growth=2, jumps=6",
        phases: Kind::Measured,
        more: &[],
    },
    Method {
        name: "dmd",
        words: "the same to where the modes of the last window lead",
        section: "direction=\"dmd\", tau=0.1, growth=2, jumps=6",
        phases: Kind::Measured,
        more: &[],
    },
    Method {
        name: "average",
        words: "the same along the mean update",
        section: "direction=\"average\", tau=1, growth=2, jumps=6",
        phases: Kind::Measured,
        more: &[],
    },
    Method {
        name: "rssm",
        words: "predictions that a learned model chooses",
        section: "direction=\"difference\", controller=\"rssm\", tau=0.25, cost=\"measured\"",
        phases: Kind::Measured,
        more: &[],
    },
];

impl Method {
    /// Flags of `storm train`, in addition to those of a plain run.
    pub(super) fn flags(&self, phases: &Phases) -> Vec<String> {
        let Phases { steps, full, correct, probe_batches } = *phases;
        let warm_up = phases.warm_up();
        let mut section = self.section.to_owned();
        let _ = match self.phases {
            Kind::Measured => write!(
                section,
                ", warm-up={warm_up}, full={full}, correct={correct}, probe-batches={probe_batches}"
            ),
            Kind::Outer => {
                write!(section, ", accept=\"always\", warm-up={warm_up}, full={full}")
            }
            Kind::Whole => {
                let window = warm_up.min(steps - warm_up);
                let whole = steps - warm_up;
                write!(
                    section,
                    ", accept=\"always\", warm-up={warm_up}, full={whole}, window={window}"
                )
            }
        };
        let mut flags = vec!["--predict".to_owned(), section];
        flags.extend(self.more.iter().map(|&flag| flag.to_owned()));
        flags
    }

    /// Whether its learning rate falls to zero.
    pub(super) fn is_decayed(&self) -> bool {
        self.more.is_empty()
    }
}

/// The methods with these names, or all if there are no names.
pub(super) fn chosen(names: &[String]) -> Result<Vec<Method>, UsageError> {
    for name in names {
        if !METHODS.iter().any(|method| method.name == name) {
            let known: Vec<&str> = METHODS.iter().map(|method| method.name).collect();
            return Err(UsageError(format!("--methods {name}: known are {}", known.join(", "))));
        }
    }
    let is_asked = |method: &&Method| names.is_empty() || names.iter().any(|n| n == method.name);
    Ok(METHODS.iter().filter(is_asked).cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::PredictArg;

    #[test]
    fn every_method_is_one_that_storm_train_takes() {
        for steps in [30, 300] {
            let phases = Phases { steps, full: 10, correct: 3, probe_batches: 2 };
            for method in &METHODS {
                let flags = method.flags(&phases);
                let section: PredictArg = flags[1].parse().expect(method.name);
                section.options(steps).expect(method.name);
            }
        }
    }

    #[test]
    fn methods_are_chosen_by_name() {
        assert_eq!(chosen(&[]).expect("all").len(), METHODS.len());
        let two = ["snoo".to_owned(), "null".to_owned()];
        let found: Vec<&str> = chosen(&two).expect("two").iter().map(|m| m.name).collect();
        assert_eq!(found, ["null", "snoo"]);
        let error = chosen(&["sno".to_owned()]).expect_err("unknown").to_string();
        assert!(error.contains("sno: known are null, random"), "{error}");
    }
}
