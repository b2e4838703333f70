//! Applies LoRA options to the projections of a model.

use super::options::{ending, is_named, refuse, whole};
use super::{LoraOptions, Targets};
use crate::hf::{HfPiece, ParameterLayout, ParameterSpec, StoredOrder};
use crate::{Family, ModelConfig, ModelError};
use regex::Regex;
use std::collections::BTreeSet;
use std::ops::Range;

/// The prefix that PEFT adds to the names of a model's modules.
pub(super) const PEFT_PREFIX: &str = "base_model.model.";

const A: &str = ".lora_A";
const B: &str = ".lora_B.";

/// Larger ranks are mistakes. An adapter's scale is an f32.
const RANK_MAX: usize = 1 << 16;

/// The adapters of a model. All its other parameters are frozen, except those trained in full.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapters {
    /// The options, without names that match nothing.
    pub options: LoraOptions,
    layers: Vec<LayerAdapters>,
    /// Parameters outside the layers that are trained in full.
    saved: Vec<String>,
}

/// The adapters of one layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerAdapters {
    /// Its adapted projections.
    pub linears: Vec<AdaptedLinear>,
    /// Its parameters that are trained in full, without the layer's prefix.
    pub saved: Vec<String>,
}

/// A projection with adapters. A fused projection has at most one for each of its modules.
#[derive(Debug, Clone, PartialEq)]
pub struct AdaptedLinear {
    /// The name, such as `attention.qkv`.
    pub name: String,
    /// Input width.
    pub inputs: usize,
    /// Output width.
    pub outputs: usize,
    /// Its adapters, from the first row to the last.
    pub slices: Vec<AdaptedSlice>,
}

/// The adapter of one PEFT module.
#[derive(Debug, Clone, PartialEq)]
pub struct AdaptedSlice {
    /// The module in its layer, such as `self_attn.q_proj`.
    pub module: String,
    /// The rows of the projection that it adds to.
    pub rows: Range<usize>,
    /// The rank: rows of A, columns of B.
    pub rank: usize,
    /// Scale of the product of B and A.
    pub scale: f32,
}

impl AdaptedLinear {
    /// Rows of the stacked A.
    pub fn rank_sum(&self) -> usize {
        self.slices.iter().map(|slice| slice.rank).sum()
    }

    /// The name of the stacked A.
    pub fn a_name(&self) -> String {
        format!("{}{A}", self.name)
    }

    /// The name of a slice's B.
    pub fn b_name(&self, slice: &AdaptedSlice) -> String {
        let leaf = slice.module.rsplit('.').next().unwrap_or(&slice.module);
        format!("{}{B}{leaf}", self.name)
    }

    /// Its parameters. `peft_name` returns the PEFT name of a module.
    fn specs(&self, prefix: &str, peft_name: impl Fn(&str) -> String) -> Vec<ParameterSpec> {
        let piece = |module: &str, matrix: &str, shape: [usize; 2], first: usize| HfPiece {
            hf_name: format!("{}.lora_{matrix}.weight", peft_name(module)),
            shape: shape.to_vec(),
            rows: first..first + shape[0],
            order: StoredOrder::Rows,
        };
        let mut first = 0;
        let mut a = ParameterSpec {
            name: format!("{prefix}{}", self.a_name()),
            shape: vec![self.rank_sum(), self.inputs],
            pieces: Vec::new(),
        };
        let mut specs = Vec::new();
        for slice in &self.slices {
            a.pieces.push(piece(&slice.module, "A", [slice.rank, self.inputs], first));
            first += slice.rank;
            let shape = [slice.rows.len(), slice.rank];
            specs.push(ParameterSpec {
                name: format!("{prefix}{}", self.b_name(slice)),
                shape: shape.to_vec(),
                pieces: vec![piece(&slice.module, "B", shape, 0)],
            });
        }
        specs.insert(0, a);
        specs
    }
}

/// Whether a parameter's name denotes an adapter.
pub fn is_adapter(name: &str) -> bool {
    name.ends_with(A) || name.contains(B)
}

impl Adapters {
    /// Applies options to a model.
    ///
    /// # Errors
    /// A target or pattern matches nothing or cannot be adapted, a rank is larger than a matrix, or
    /// a number is not valid.
    pub fn new(config: &ModelConfig, options: LoraOptions) -> Result<Adapters, ModelError> {
        Finder::new(config, options, Unmatched::Refused)?.adapters()
    }

    /// Applies options written by PEFT. Target names of other models are ignored.
    pub(super) fn of_peft(
        config: &ModelConfig,
        options: LoraOptions,
    ) -> Result<Adapters, ModelError> {
        Finder::new(config, options, Unmatched::PassedOver)?.adapters()
    }

    /// The adapters of a layer.
    pub fn layer(&self, index: usize) -> &LayerAdapters {
        &self.layers[index]
    }

    /// Whether a parameter outside the layers is trained in full.
    pub(crate) fn saves(&self, name: &str) -> bool {
        self.saved.iter().any(|saved| saved == name)
    }

    /// Every parameter of the adapters and every one trained in full, with its full name, as PEFT
    /// stores them.
    pub fn specs(&self, config: &ModelConfig) -> Vec<ParameterSpec> {
        let mut specs = self.own_specs(config);
        specs.extend(self.saved_specs(config));
        specs
    }

    /// The parameters that the base model does not have.
    pub(crate) fn own_specs(&self, config: &ModelConfig) -> Vec<ParameterSpec> {
        let layout = ParameterLayout::new(config);
        let mut specs = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let prefix = format!("layers.{index}.");
            let peft_name =
                |module: &str| format!("{PEFT_PREFIX}{}", layout.layer_module(index, module));
            for linear in &layer.linears {
                specs.extend(linear.specs(&prefix, peft_name));
            }
        }
        specs
    }

    /// The parameters of the base model that are trained in full.
    pub(super) fn saved_specs(&self, config: &ModelConfig) -> Vec<ParameterSpec> {
        let layout = ParameterLayout::new(config);
        let outside = layout.prologue.iter().chain(&layout.epilogue);
        let mut specs: Vec<ParameterSpec> =
            outside.filter(|spec| self.saves(&spec.name)).cloned().collect();
        for (index, layer) in self.layers.iter().enumerate() {
            let own = layout.layer.iter().filter(|spec| layer.saved.contains(&spec.name));
            specs.extend(own.map(|spec| layout.in_layer(spec, index)));
        }
        for piece in specs.iter_mut().flat_map(|spec| &mut spec.pieces) {
            piece.hf_name = format!("{PEFT_PREFIX}{}", piece.hf_name);
        }
        specs
    }

    /// Number of trained parameters.
    pub fn parameter_count(&self, config: &ModelConfig) -> u64 {
        self.specs(config).iter().map(|spec| spec.element_count() as u64).sum()
    }
}

/// How to handle names that match nothing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unmatched {
    Refused,
    PassedOver,
}

struct Finder<'a> {
    config: &'a ModelConfig,
    layout: ParameterLayout,
    options: LoraOptions,
    unmatched: Unmatched,
    pattern: Option<Regex>,
    ranks: Vec<(Regex, usize)>,
    alphas: Vec<(Regex, f64)>,
}

impl<'a> Finder<'a> {
    fn new(
        config: &'a ModelConfig,
        options: LoraOptions,
        unmatched: Unmatched,
    ) -> Result<Finder<'a>, ModelError> {
        let pattern = match &options.targets {
            Targets::Pattern(pattern) => Some(whole(pattern)?),
            _ => None,
        };
        let mut ranks = Vec::new();
        for (pattern, &rank) in &options.rank_pattern {
            ranks.push((ending(pattern)?, rank));
        }
        let mut alphas = Vec::new();
        for (pattern, &alpha) in &options.alpha_pattern {
            alphas.push((ending(pattern)?, alpha));
        }
        let layout = ParameterLayout::new(config);
        Ok(Finder { config, layout, options, unmatched, pattern, ranks, alphas })
    }

    fn adapters(self) -> Result<Adapters, ModelError> {
        self.check_alpha(self.options.alpha)?;
        let dropout = self.options.dropout;
        if !(0.0..1.0).contains(&dropout) {
            return refuse(format!("dropout is {dropout}; it must be at least 0 and less than 1"));
        }
        let mut used = BTreeSet::new();
        let mut layers = Vec::new();
        for index in 0..self.config.layer_count {
            let mut layer = LayerAdapters::default();
            for spec in &self.layout.layer {
                if let Some(linear) = self.linear(index, spec, &mut used)? {
                    layer.linears.push(linear);
                }
                if self.is_saved(&self.layout.in_layer(spec, index), &mut used)? {
                    layer.saved.push(spec.name.clone());
                }
            }
            layers.push(layer);
        }
        let mut saved = Vec::new();
        for spec in self.layout.prologue.iter().chain(&self.layout.epilogue) {
            self.refuse_outside(spec)?;
            if self.is_saved(spec, &mut used)? {
                saved.push(spec.name.clone());
            }
        }
        if layers.iter().all(|layer| layer.linears.is_empty()) {
            let targets = match &self.options.targets {
                Targets::AllLinear => "all-linear".to_owned(),
                Targets::Names(names) => names.join(", "),
                Targets::Pattern(pattern) => pattern.clone(),
            };
            return self.no_match("targets", &targets);
        }
        if self.unmatched == Unmatched::Refused {
            if let Targets::Names(names) = &self.options.targets
                && let Some(name) = names.iter().find(|name| !used.contains(name.as_str()))
            {
                return self.no_match("targets", name);
            }
            if let Some(name) =
                self.options.modules_to_save.iter().find(|name| !used.contains(name.as_str()))
            {
                return self.no_match("modules-to-save", name);
            }
            let patterns =
                self.options.rank_pattern.keys().chain(self.options.alpha_pattern.keys());
            if let Some(name) = patterns.into_iter().find(|name| !used.contains(name.as_str())) {
                return self.no_match("rank-pattern or alpha-pattern", name);
            }
        }
        let mut options = self.options;
        if let Targets::Names(names) = &mut options.targets {
            names.retain(|name| used.contains(name));
        }
        options.modules_to_save.retain(|name| used.contains(name));
        options.rank_pattern.retain(|name, _| used.contains(name));
        options.alpha_pattern.retain(|name, _| used.contains(name));
        Ok(Adapters { options, layers, saved })
    }

    /// The adapted form of a projection in a layer, if it has adapters there.
    fn linear(
        &self,
        index: usize,
        spec: &ParameterSpec,
        used: &mut BTreeSet<String>,
    ) -> Result<Option<AdaptedLinear>, ModelError> {
        let Some(name) = spec.name.strip_suffix(".weight") else { return Ok(None) };
        let mut slices = Vec::new();
        for piece in &spec.pieces {
            let module = module_of(&piece.hf_name);
            let full = self.layout.layer_module(index, module);
            if !self.is_target(&full, spec.shape.len() == 2, used) {
                continue;
            }
            let &[_, inputs] = spec.shape.as_slice() else {
                return refuse(format!(
                    "`{full}` is not a projection, and only projections get adapters; name it in modules-to-save to \
                     train all of it"
                ));
            };
            let rank = self.rank(&full, used)?;
            let alpha = self.alpha(&full, used)?;
            let rows = piece.rows.clone();
            if rank > rows.len().min(inputs) {
                return refuse(format!(
                    "rank {rank} is larger than `{full}`, which is {} × {inputs}; take a rank of at most {}",
                    rows.len(),
                    rows.len().min(inputs)
                ));
            }
            let scale = self.options.scale(alpha, rank);
            slices.push(AdaptedSlice { module: module.to_owned(), rows, rank, scale });
        }
        if slices.is_empty() {
            return Ok(None);
        }
        let (outputs, inputs) = (spec.shape[0], spec.shape[1]);
        Ok(Some(AdaptedLinear { name: name.to_owned(), inputs, outputs, slices }))
    }

    fn is_target(&self, module: &str, is_matrix: bool, used: &mut BTreeSet<String>) -> bool {
        match &self.options.targets {
            Targets::AllLinear => is_matrix,
            Targets::Pattern(_) => self.pattern.as_ref().is_some_and(|p| p.is_match(module)),
            Targets::Names(names) => {
                let mut found = false;
                for name in names.iter().filter(|name| is_named(module, name)) {
                    used.insert(name.clone());
                    found = true;
                }
                found
            }
        }
    }

    /// Embeddings and the head are not projections of a layer. Their kernels do not support
    /// adapters.
    fn refuse_outside(&self, spec: &ParameterSpec) -> Result<(), ModelError> {
        if self.options.targets == Targets::AllLinear {
            return Ok(());
        }
        for piece in &spec.pieces {
            let module = module_of(&piece.hf_name);
            if self.is_target(module, false, &mut BTreeSet::new()) {
                return refuse(format!(
                    "`{module}` cannot have an adapter: only projections in the layers can; leave it out, or name it in \
                     modules-to-save to train all of it"
                ));
            }
        }
        Ok(())
    }

    fn rank(&self, module: &str, used: &mut BTreeSet<String>) -> Result<usize, ModelError> {
        let patterns = self.options.rank_pattern.keys().zip(&self.ranks);
        let rank = one_match("rank", patterns, module, used)?.unwrap_or(self.options.rank);
        match (1..=RANK_MAX).contains(&rank) {
            true => Ok(rank),
            false => refuse(format!("rank is {rank}; it must be from 1 to {RANK_MAX}")),
        }
    }

    fn alpha(&self, module: &str, used: &mut BTreeSet<String>) -> Result<f64, ModelError> {
        let patterns = self.options.alpha_pattern.keys().zip(&self.alphas);
        let alpha = one_match("alpha", patterns, module, used)?.unwrap_or(self.options.alpha);
        self.check_alpha(alpha)?;
        Ok(alpha)
    }

    fn check_alpha(&self, alpha: f64) -> Result<(), ModelError> {
        match alpha > 0.0 && alpha <= 1e6 {
            true => Ok(()),
            false => {
                refuse(format!("alpha is {alpha}; it must be more than 0 and at most 1000000"))
            }
        }
    }

    /// Whether a parameter is trained in full.
    fn is_saved(
        &self,
        spec: &ParameterSpec,
        used: &mut BTreeSet<String>,
    ) -> Result<bool, ModelError> {
        let names = &self.options.modules_to_save;
        let mut matched = 0;
        for piece in &spec.pieces {
            let module = module_of(&piece.hf_name);
            for name in names.iter().filter(|name| is_named(module, name)) {
                used.insert(name.clone());
                matched += 1;
            }
        }
        if matched == 0 {
            return Ok(false);
        }
        if self.config.tied_embeddings && spec.name == "embedding.weight" {
            return refuse(
                "the embedding is also the head of this model and stays frozen; take it out of modules-to-save"
                    .to_owned(),
            );
        }
        if self.config.family == Family::Gpt2
            && spec.shape.len() == 2
            && spec.pieces[0].order == StoredOrder::Transposed
        {
            return refuse(format!(
                "`{}` is a projection: give it an adapter (targets) instead of naming it in modules-to-save",
                module_of(&spec.pieces[0].hf_name)
            ));
        }
        match matched >= spec.pieces.len() {
            true => Ok(true),
            false => refuse(format!(
                "modules-to-save must name all of {}, which STORM computes as one matrix, or none",
                spec.pieces.iter().map(|p| module_of(&p.hf_name)).collect::<Vec<_>>().join(", ")
            )),
        }
    }

    fn no_match<T>(&self, what: &str, name: &str) -> Result<T, ModelError> {
        let pieces = self.layout.layer.iter().filter(|spec| spec.shape.len() == 2);
        let names: Vec<String> = pieces
            .flat_map(|spec| &spec.pieces)
            .map(|piece| self.layout.layer_module(0, module_of(&piece.hf_name)))
            .collect();
        refuse(format!(
            "{what}: {name:?} matches no module of this model; projections of its first layer: {}",
            names.join(", ")
        ))
    }
}

/// The value of the only matching pattern. Several matches with different values are an error,
/// because PEFT's choice depends on their order.
fn one_match<'a, T: Copy + PartialEq + std::fmt::Display + 'a>(
    what: &str,
    patterns: impl Iterator<Item = (&'a String, &'a (Regex, T))>,
    module: &str,
    used: &mut BTreeSet<String>,
) -> Result<Option<T>, ModelError> {
    let mut found = None;
    for (pattern, (regex, value)) in patterns {
        if !regex.is_match(module) {
            continue;
        }
        used.insert(pattern.clone());
        match found {
            Some(other) if other != *value => {
                return refuse(format!(
                    "two {what} patterns match `{module}`, for {other} and {value}; make them exclude each other"
                ));
            }
            _ => found = Some(*value),
        }
    }
    Ok(found)
}

/// The module of a tensor: its name without `.weight` or `.bias`.
fn module_of(tensor: &str) -> &str {
    tensor.rsplit_once('.').map_or(tensor, |(module, _)| module)
}
