use crate::ModelError;
use crate::error::clip;
use regex::{Regex, RegexBuilder};
use std::collections::BTreeMap;

/// Limit on the compiled size of a pattern. Patterns for module names are far smaller.
const PATTERN_BYTES_MAX: usize = 1 << 20;

/// LoRA options, in PEFT's terms.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraOptions {
    /// r: rows of A and columns of B.
    pub rank: usize,
    /// The product of B and A is scaled by `alpha / rank`.
    pub alpha: f64,
    /// Dropout rate of the adapters' input in training.
    pub dropout: f64,
    /// The projections that get adapters.
    pub targets: Targets,
    /// Scale by `alpha / √rank` instead.
    pub rslora: bool,
    /// Other modules that are trained in full and saved with the adapters.
    pub modules_to_save: Vec<String>,
    /// Ranks of some projections, by patterns that match the end of their names.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Alphas of some projections, by such patterns.
    pub alpha_pattern: BTreeMap<String, f64>,
}

/// Which projections get adapters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Targets {
    /// All projections in the layers.
    AllLinear,
    /// Those with one of these names, or with a name that ends in one: `q_proj`, `mlp.up_proj`.
    Names(Vec<String>),
    /// Those whose full name matches a regular expression.
    Pattern(String),
}

impl LoraOptions {
    /// Options with this rank and alpha, on all projections, with PEFT's defaults otherwise.
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

/// A pattern that must match a full name.
pub(super) fn whole(pattern: &str) -> Result<Regex, ModelError> {
    compile(pattern, &format!("^(?:{pattern})$"))
}

/// A pattern that must match a name or its last parts, like PEFT's rank and alpha patterns.
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

/// Whether a module has a name or ends in it.
pub(super) fn is_named(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}
