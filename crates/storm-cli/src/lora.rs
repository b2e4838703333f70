//! LoRA options: `lora = { rank = 16 }` in a config file, `--lora rank=16` as a flag.

use crate::UsageError;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::str::FromStr;
use storm_model::{Adapters, LoraOptions, ModelConfig, Targets};

/// The LoRA options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct LoraArg {
    rank: NonZeroUsize,
    #[serde(skip_serializing_if = "Option::is_none")]
    alpha: Option<f64>,
    #[serde(default, skip_serializing_if = "is_zero")]
    dropout: f64,
    #[serde(default)]
    targets: TargetsArg,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    rslora: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    modules_to_save: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    rank_pattern: BTreeMap<String, NonZeroUsize>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    alpha_pattern: BTreeMap<String, f64>,
}

/// A name, a pattern or `all-linear`, or a list of names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "`all-linear`, a name, a pattern, or a list of names")]
enum TargetsArg {
    One(String),
    Several(Vec<String>),
}

impl Default for TargetsArg {
    fn default() -> TargetsArg {
        TargetsArg::One("all-linear".to_owned())
    }
}

fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

impl FromStr for LoraArg {
    type Err = String;

    /// Parses the value as in a config file, with or without braces.
    fn from_str(text: &str) -> Result<LoraArg, String> {
        #[derive(Deserialize)]
        struct Line {
            lora: LoraArg,
        }
        let text = text.trim();
        let table = if text.starts_with('{') { text.to_owned() } else { format!("{{ {text} }}") };
        let line = toml::from_str::<Line>(&format!("lora = {table}"));
        line.map(|line| line.lora).map_err(|error| {
            format!(
                "{}; write it as in a config file: rank=16, targets=\"all-linear\"",
                error.message()
            )
        })
    }
}

impl LoraArg {
    /// Parses the value that a run recorded.
    pub(crate) fn of_record(text: &str) -> Result<LoraArg> {
        Ok(serde_json::from_str(text)?)
    }

    /// The options an existing adapter was made with.
    pub(crate) fn of_options(options: &LoraOptions) -> Result<LoraArg, UsageError> {
        let rank = |rank: usize| {
            NonZeroUsize::new(rank).ok_or_else(|| UsageError("an adapter has rank 0".to_owned()))
        };
        let ranks = options.rank_pattern.iter();
        Ok(LoraArg {
            rank: rank(options.rank)?,
            alpha: Some(options.alpha),
            dropout: options.dropout,
            targets: match &options.targets {
                Targets::AllLinear => TargetsArg::default(),
                Targets::Names(names) => TargetsArg::Several(names.clone()),
                Targets::Pattern(pattern) => TargetsArg::One(pattern.clone()),
            },
            rslora: options.rslora,
            modules_to_save: options.modules_to_save.clone(),
            rank_pattern: ranks
                .map(|(pattern, &value)| Ok((pattern.clone(), rank(value)?)))
                .collect::<Result<_, UsageError>>()?,
            alpha_pattern: options.alpha_pattern.clone(),
        })
    }

    fn options(&self) -> LoraOptions {
        let rank = self.rank.get();
        LoraOptions {
            rank,
            alpha: self.alpha.unwrap_or(2.0 * rank as f64),
            dropout: self.dropout,
            targets: match &self.targets {
                TargetsArg::One(text) if text == "all-linear" => Targets::AllLinear,
                TargetsArg::One(text) if is_name(text) => Targets::Names(vec![text.clone()]),
                TargetsArg::One(text) => Targets::Pattern(text.clone()),
                TargetsArg::Several(names) => Targets::Names(names.clone()),
            },
            rslora: self.rslora,
            modules_to_save: self.modules_to_save.clone(),
            rank_pattern: self
                .rank_pattern
                .iter()
                .map(|(pattern, rank)| (pattern.clone(), rank.get()))
                .collect(),
            alpha_pattern: self.alpha_pattern.clone(),
        }
    }

    /// The config with these adapters.
    pub(crate) fn apply_to(&self, config: ModelConfig) -> Result<ModelConfig> {
        let adapters = Adapters::new(&config, self.options())?;
        Ok(ModelConfig { adapters: Some(adapters), ..config })
    }
}

/// Whether a text can only be a module name. A pattern must match a full module path, which starts with the model's own
/// name.
fn is_name(text: &str) -> bool {
    text.chars().all(|c| c.is_alphanumeric() || "_.-".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_written_like_the_key() {
        let arg: LoraArg =
            "rank=4, alpha = 8, targets=[\"q_proj\"], rslora=true".parse().expect("a table");
        assert_eq!(
            arg,
            "{ rank = 4, alpha = 8.0, targets = [\"q_proj\"], rslora = true }"
                .parse()
                .expect("a table")
        );
        let text = serde_json::to_string(&arg).expect("plain");
        assert_eq!(LoraArg::of_record(&text).expect("its own text"), arg);
        assert_eq!(arg.options().targets, Targets::Names(vec!["q_proj".to_owned()]));
        let all: LoraArg = "rank=16".parse().expect("a table");
        assert_eq!((all.options().targets, all.options().alpha), (Targets::AllLinear, 32.0));
        let pattern: LoraArg = "rank=1, targets='.*q_proj'".parse().expect("a table");
        assert_eq!(pattern.options().targets, Targets::Pattern(".*q_proj".to_owned()));
        for bad in ["", "rank=0", "16", "rank=4, tragets=\"all-linear\"", "rank=4,\nsteps=3"] {
            bad.parse::<LoraArg>().expect_err(bad);
        }
    }
}
