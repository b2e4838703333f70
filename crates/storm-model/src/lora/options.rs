use crate::ModelError;
use crate::error::clip;
use regex::{Regex, RegexBuilder};
use std::collections::BTreeMap;

/// A pattern that compiles to more than this is no module name.
const PATTERN_BYTES_MAX: usize = 1 << 20;

/// Which adapters are asked for, in PEFT's words.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraOptions {
    /// r: rows of A and columns of B.
    pub rank: usize,
    /// The product of both is scaled by `alpha / rank`.
    pub alpha: f64,
    /// Share of the adapters' input that is dropped in training.
    pub dropout: f64,
    /// Which projections.
    pub targets: Targets,
    /// Scale by `alpha / √rank` instead.
    pub rslora: bool,
    /// Other modules that are trained whole, and saved with the adapters.
    pub modules_to_save: Vec<String>,
    /// Ranks of some projections, by patterns that match the end of their names.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Alphas of some projections.
    pub alpha_pattern: BTreeMap<String, f64>,
}

/// Which projections get adapters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Targets {
    /// All in the layers.
    AllLinear,
    /// Those whose names are these or end in them: `q_proj`, `mlp.up_proj`.
    Names(Vec<String>),
    /// Those whose whole name a regular expression matches.
    Pattern(String),
}

impl LoraOptions {
    /// Rank and alpha with PEFT's defaults for the rest, on all projections.
    pub fn new(rank: usize, alpha: f64) -> LoraOptions {
        LoraOptions {
            rank,
            alpha,
            dropout: 0.0,
            targets: Targets::AllLinear,
            rslora: false,
            modules_to_save: Vec::new(),
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
        }
    }

    pub(super) fn scale(&self, alpha: f64, rank: usize) -> f32 {
        let rank = rank as f64;
        (alpha / if self.rslora { rank.sqrt() } else { rank }) as f32
    }
}

pub(super) fn refuse<T>(problem: String) -> Result<T, ModelError> {
    Err(ModelError::Lora { problem })
}

/// A pattern that must match all of a name.
pub(super) fn whole(pattern: &str) -> Result<Regex, ModelError> {
    compile(pattern, &format!("^(?:{pattern})$"))
}

/// A pattern that must match a name from one of its parts on, as PEFT's rank and alpha patterns do.
pub(super) fn ending(pattern: &str) -> Result<Regex, ModelError> {
    compile(pattern, &format!(r"^(?:.*\.)?(?:{pattern})$"))
}

fn compile(pattern: &str, anchored: &str) -> Result<Regex, ModelError> {
    let built = RegexBuilder::new(anchored).size_limit(PATTERN_BYTES_MAX).build();
    built.or_else(|error| {
        let last = error.to_string().lines().last().map(clip).unwrap_or_default();
        refuse(format!(
            "the pattern {:?} cannot be used ({last}); look-around and back-references are not supported",
            clip(pattern)
        ))
    })
}

/// Whether a name is one of a list's, or ends in it.
pub(super) fn is_named(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}
