//! Options for predictions: a `[predict]` section in a config file, `--predict 'direction="last-update"'` as a flag.

use crate::UsageError;
use serde::{Deserialize, Serialize};
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::str::FromStr;
use storm_plan::Idle;
use storm_train::{
    Accept, Controller, Direction, PhaseLengths, PredictOptions, PredictionCost, ProbeWeights,
};

/// The prediction options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct PredictArg {
    direction: DirectionArg,
    #[serde(default)]
    controller: ControllerArg,
    #[serde(default)]
    accept: AcceptArg,
    #[serde(default = "defaults::tau")]
    tau: f64,
    /// For the controller that learns.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<CostArg>,
    /// For the line search.
    #[serde(skip_serializing_if = "Option::is_none")]
    growth: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    jumps: Option<NonZeroU32>,
    /// For directions other than the last update. Default: the whole full phase.
    #[serde(skip_serializing_if = "Option::is_none")]
    window: Option<NonZeroU64>,
    /// For the outer direction.
    #[serde(skip_serializing_if = "Option::is_none")]
    momentum: Option<f64>,
    #[serde(default = "defaults::warm_up")]
    warm_up: u64,
    #[serde(default = "defaults::full")]
    full: u64,
    /// This and the options below are for jumps that may be undone.
    #[serde(skip_serializing_if = "Option::is_none")]
    correct: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    probe_batches: Option<NonZeroUsize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    probe_weights: Option<ProbeWeightsArg>,
    #[serde(skip_serializing_if = "Option::is_none")]
    noise: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    margin: Option<f64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum AcceptArg {
    #[default]
    IfLower,
    Always,
}

/// The weights that losses are measured with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ProbeWeightsArg {
    #[default]
    AsTrained,
    Int8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum DirectionArg {
    LastUpdate,
    Average,
    WeightAverage,
    Difference,
    Dmd,
    Outer,
    None,
    Random,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ControllerArg {
    Constant,
    #[default]
    LineSearch,
    Rssm,
}

/// What the controller takes a prediction to cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "cost is \"counted\", \"measured\" or a number of steps")]
enum CostArg {
    Named(NamedCost),
    /// In steps.
    Steps(f64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum NamedCost {
    /// By its forward passes.
    Counted,
    /// Before the first step. The run then records it as a number.
    Measured,
}

mod defaults {
    pub(super) fn tau() -> f64 {
        1.0
    }
    pub(super) fn warm_up() -> u64 {
        50
    }
    pub(super) fn full() -> u64 {
        20
    }
    pub(super) const CORRECT: u64 = 5;
    pub(super) const PROBE_BATCHES: usize = 8;
    pub(super) const NOISE: f64 = 2.0;
    pub(super) const MARGIN: f64 = 0.01;
    pub(super) const GROWTH: f64 = 1.0;
    pub(super) const JUMPS: u32 = 10;
    pub(super) const MOMENTUM: f64 = 0.5;
}

/// Most micro-batches of a probe; they stay in host memory.
const PROBE_BATCHES_MAX: usize = 1 << 16;

/// Held-out rows of a run with this many `probe-batches`, in micro-batches of `batch` rows.
pub(crate) fn held_out_rows(probe_batches: usize, batch: usize) -> u64 {
    rows(both_sets(probe_batches), batch)
}

/// Micro-batches for jumps, and as many for corrections.
fn both_sets(probe_batches: usize) -> usize {
    2 * probe_batches.min(PROBE_BATCHES_MAX)
}

fn rows(batches: usize, batch: usize) -> u64 {
    (batches as u64).saturating_mul(batch as u64)
}

impl FromStr for PredictArg {
    type Err = String;

    /// Parses the value as in a config file, with or without braces.
    fn from_str(text: &str) -> Result<PredictArg, String> {
        #[derive(Deserialize)]
        struct Line {
            predict: PredictArg,
        }
        let text = text.trim();
        let table = if text.starts_with('{') { text.to_owned() } else { format!("{{ {text} }}") };
        let line = toml::from_str::<Line>(&format!("predict = {table}"));
        line.map(|line| line.predict).map_err(|error| {
            format!(
                "{}; write it as in a config file: direction=\"last-update\", full=20",
                error.message()
            )
        })
    }
}

impl PredictArg {
    /// Whether the controller observes the updates of steps.
    pub(crate) fn observes_updates(&self) -> bool {
        self.controller == ControllerArg::Rssm
    }

    /// Whether the cost of a prediction has yet to be measured.
    pub(crate) fn measures_cost(&self) -> bool {
        self.cost == Some(CostArg::Named(NamedCost::Measured))
    }

    /// Sets the cost of a prediction.
    pub(crate) fn set_cost(&mut self, steps: f64) {
        self.cost = Some(CostArg::Steps(steps));
    }

    /// The cost of a prediction in steps, if it is set to a number.
    pub(crate) fn cost_steps(&self) -> Option<f64> {
        match self.cost {
            Some(CostArg::Steps(steps)) => Some(steps),
            _ => None,
        }
    }

    /// The options that a run has recorded.
    pub(crate) fn of_record(text: &str) -> Option<PredictArg> {
        serde_json::from_str(text).ok()
    }

    /// The options for a run of this many steps. A cost that has yet to be measured is counted.
    pub(crate) fn options(&self, steps: u64) -> Result<PredictOptions, UsageError> {
        let refuse = |problem: &str| Err(UsageError(format!("predict: {problem}")));
        if self.probe_batches.is_some_and(|batches| batches.get() > PROBE_BATCHES_MAX) {
            return refuse(&format!("probe-batches is at most {PROBE_BATCHES_MAX}"));
        }
        let is_search = self.controller == ControllerArg::LineSearch;
        if !is_search && (self.growth.is_some() || self.jumps.is_some()) {
            return refuse("growth and jumps are for controller = \"line-search\"");
        }
        if self.controller != ControllerArg::Rssm && self.cost.is_some() {
            return refuse("cost is for controller = \"rssm\"");
        }
        if self.direction == DirectionArg::LastUpdate && self.window.is_some() {
            return refuse(
                "window is for other directions than \"last-update\", whose window is 1",
            );
        }
        if self.direction != DirectionArg::Outer && self.momentum.is_some() {
            return refuse("momentum is for direction = \"outer\"");
        }
        let is_probed = self.accept == AcceptArg::IfLower;
        let of_probes = [self.noise, self.margin].iter().any(Option::is_some)
            || self.correct.is_some()
            || self.probe_batches.is_some()
            || self.probe_weights.is_some();
        if !is_probed && of_probes {
            return refuse(
                "correct, probe-batches, probe-weights, noise and margin are for jumps that stay if the loss is lower; leave \
                 them out with accept = \"always\"",
            );
        }
        if !is_probed && is_search {
            return refuse("a line search measures losses; give controller = \"constant\"");
        }
        let correct = self.correct.unwrap_or(if is_probed { defaults::CORRECT } else { 0 });
        let window = self.window.map_or(self.full, NonZeroU64::get);
        let tau = self.tau as f32;
        let options = PredictOptions {
            lengths: PhaseLengths { warm_up: self.warm_up, full: self.full, correct },
            direction: match self.direction {
                DirectionArg::LastUpdate => Direction::LastUpdate,
                DirectionArg::Average => Direction::Average { window },
                DirectionArg::WeightAverage => Direction::WeightAverage { window },
                DirectionArg::Difference => Direction::Difference { window },
                DirectionArg::Dmd => Direction::Dmd {
                    // Default: the longest multiple of 4 within the full phase.
                    window: self.window.map_or((self.full / 4 * 4).max(4), NonZeroU64::get),
                },
                DirectionArg::Outer => {
                    let momentum = self.momentum.unwrap_or(defaults::MOMENTUM) as f32;
                    Direction::Outer { window, momentum }
                }
                DirectionArg::None => Direction::None { window },
                DirectionArg::Random => Direction::Random { window },
            },
            controller: match self.controller {
                ControllerArg::Constant => Controller::Constant { tau },
                ControllerArg::Rssm => {
                    let cost = self.cost_steps();
                    let cost = cost.map_or(PredictionCost::Counted, PredictionCost::Steps);
                    Controller::Rssm { tau, cost }
                }
                ControllerArg::LineSearch => Controller::LineSearch {
                    tau,
                    growth: self.growth.unwrap_or(defaults::GROWTH) as f32,
                    jumps: self.jumps.map_or(defaults::JUMPS, NonZeroU32::get),
                },
            },
            accept: match self.accept {
                AcceptArg::IfLower => Accept::IfLower,
                AcceptArg::Always => Accept::Always,
            },
            probe_weights: match self.probe_weights.unwrap_or_default() {
                ProbeWeightsArg::AsTrained => ProbeWeights::AsTrained,
                ProbeWeightsArg::Int8 => ProbeWeights::Int8,
            },
            noise: self.noise.unwrap_or(defaults::NOISE),
            margin: self.margin.unwrap_or(defaults::MARGIN),
        };
        options.check(steps).map_err(|error| UsageError(error.to_string()))?;
        Ok(options)
    }

    /// Device memory that the run releases while it measures losses. `None` if it measures none.
    pub(crate) fn releases(&self) -> Option<Idle> {
        match (self.accept, self.probe_weights.unwrap_or_default()) {
            (AcceptArg::Always, _) => None,
            (AcceptArg::IfLower, ProbeWeightsArg::AsTrained) => Some(Idle::BesideEvaluation),
            (AcceptArg::IfLower, ProbeWeightsArg::Int8) => Some(Idle::WithParameters),
        }
    }

    /// Held-out micro-batches needed: one set for jumps, and one for corrections.
    pub(crate) fn held_out_batches(&self) -> usize {
        let probe = self.probe_batches.map_or(defaults::PROBE_BATCHES, NonZeroUsize::get);
        match self.accept {
            AcceptArg::IfLower => both_sets(probe),
            AcceptArg::Always => 0,
        }
    }

    /// Held-out rows needed, in micro-batches of `batch` rows.
    pub(crate) fn held_out_rows(&self, batch: usize) -> u64 {
        rows(self.held_out_batches(), batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> Result<PredictOptions, String> {
        let arg: PredictArg = text.parse()?;
        arg.options(1000).map_err(|error| error.to_string())
    }

    #[test]
    fn a_section_says_as_little_as_it_likes() {
        let least = options("direction=\"last-update\"").expect("a table");
        assert_eq!(least.direction, Direction::LastUpdate);
        let expected = Controller::LineSearch { tau: 1.0, growth: 1.0, jumps: 10 };
        assert_eq!(least.controller, expected);
        let outer = options(
            "{ direction = \"outer\", controller = \"constant\", tau = 0.5, window = 4, full = 8, \
             momentum = 0.25, noise = 0, margin = 1.5 }",
        )
        .expect("a table");
        assert_eq!(outer.direction, Direction::Outer { window: 4, momentum: 0.25 });
        assert_eq!(outer.controller, Controller::Constant { tau: 0.5 });
        assert_eq!((outer.noise, outer.margin), (0.0, 1.5));
        let learned = "direction=\"difference\", controller=\"rssm\"";
        for (cost, expected) in [
            ("", PredictionCost::Counted),
            (", cost=\"counted\"", PredictionCost::Counted),
            (", cost=2", PredictionCost::Steps(2.0)),
        ] {
            let rssm = options(&format!("{learned}{cost}")).expect("a table");
            assert_eq!(rssm.controller, Controller::Rssm { tau: 1.0, cost: expected });
        }
        let mut arg: PredictArg = format!("{learned}, cost=\"measured\"").parse().expect("one");
        assert!(arg.measures_cost());
        arg.set_cost(12.3);
        assert_eq!((arg.measures_cost(), arg.cost_steps()), (false, Some(12.3)));
        let lookahead = options(
            "direction=\"difference\", accept=\"always\", controller=\"constant\", tau=-0.5",
        );
        let lookahead = lookahead.expect("a table");
        assert_eq!((lookahead.accept, lookahead.lengths.correct), (Accept::Always, 0));
        let dmd = options("direction=\"dmd\", full=11").expect("a table");
        assert_eq!(dmd.direction, Direction::Dmd { window: 8 });
        assert_eq!(dmd.probe_weights, ProbeWeights::AsTrained);
        let arg = |text: &str| text.parse::<PredictArg>().expect("a table");
        let few = arg("direction=\"difference\", probe-batches=3");
        assert_eq!((few.held_out_batches(), few.held_out_rows(4)), (6, 24));
        assert_eq!(held_out_rows(3, 4), 24);
        let usual = arg("direction=\"difference\"");
        assert_eq!(usual.held_out_rows(4), held_out_rows(8, 4));
        let always = arg("direction=\"difference\", accept=\"always\"");
        assert_eq!(always.held_out_rows(4), 0);
        let int8 = options("direction=\"difference\", probe-weights=\"int8\"").expect("a table");
        assert_eq!(int8.probe_weights, ProbeWeights::Int8);
        let whole = options("direction=\"difference\", full=7").expect("a table");
        assert_eq!(whole.direction, Direction::Difference { window: 7 });
    }

    #[test]
    fn what_does_nothing_or_makes_no_sense_is_refused() {
        for (text, expected) in [
            ("", "direction"),
            ("direction=\"rssm\"", "unknown variant"),
            ("direction=\"average\", controller=\"neural\"", "unknown variant"),
            ("direction=\"outer\", accept=\"always\", controller=\"rssm\"", "rssm learns"),
            ("direction=\"last-update\", window=3", "window is for other"),
            ("direction=\"average\", momentum=0.5", "momentum is for"),
            ("direction=\"average\", controller=\"constant\", jumps=3", "growth and jumps"),
            ("direction=\"average\", cost=1", "cost is for controller"),
            ("direction=\"average\", controller=\"rssm\", cost=-1", "cost is -1"),
            ("direction=\"average\", controller=\"rssm\", cost=\"paid\"", "cost is \"counted\","),
            ("direction=\"average\", full=0", "full is 0"),
            ("direction=\"average\", window=21", "window is 21"),
            ("direction=\"dmd\", window=6", "multiple of 4"),
            ("direction=\"dmd\", full=3", "window is 4"),
            ("direction=\"average\", warm-up=990", "take 1015 steps"),
            ("direction=\"average\", tau=nan", "tau is NaN"),
            ("direction=\"average\", probe-batches=0", "nonzero"),
            ("direction=\"average\", colour=1", "unknown field"),
            ("direction=\"outer\", accept=\"always\"", "a line search measures"),
            (
                "direction=\"outer\", accept=\"always\", controller=\"constant\", noise=1",
                "leave them out",
            ),
            ("direction=\"average\", probe-weights=\"int4\"", "unknown variant"),
            (
                "direction=\"outer\", accept=\"always\", controller=\"constant\", probe-weights=\"int8\"",
                "leave them out",
            ),
            ("direction=\"outer\", controller=\"constant\", tau=-1", "tau is -1"),
        ] {
            let error = options(text).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
