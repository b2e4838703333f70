//! The parameters of a model and the Hugging Face tensors that each consists of.
//!
//! STORM fuses matrices that are multiplied with the same input: query, key and value are one
//! matrix, and so are gate and up. All matrices are (out, in). GPT-2's tensors are (in, out) and
//! are transposed.

use std::ops::Range;

use crate::{Family, ModelConfig};

/// A STORM parameter and its Hugging Face tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterSpec {
    /// STORM's name, with the prefix `layers.N.` except in a layer template.
    pub name: String,
    /// (out, in) for a matrix, (size) for a bias or norm.
    pub shape: Vec<usize>,
    /// The tensors that it consists of, from the first row to the last.
    pub pieces: Vec<HfPiece>,
}

/// A Hugging Face tensor that is part of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HfPiece {
    /// Its name in transformers, without the layer's prefix in a layer template.
    pub hf_name: String,
    /// Its shape as stored in the file.
    pub shape: Vec<usize>,
    /// The rows of the parameter that it fills. For a vector, the elements.
    pub rows: Range<usize>,
    /// How its elements are ordered in the file.
    pub order: StoredOrder,
}

/// How the elements of a stored tensor are ordered, compared with the parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredOrder {
    /// As in the parameter.
    Rows,
    /// The whole matrix is stored as (in, out).
    Transposed,
    /// A row is (positions, channels) in the parameter and (channels, positions) in the file, as in
    /// PyTorch's convolutions.
    ChannelsFirst {
        /// Positions per row: those of a convolution's kernel.
        positions: usize,
    },
}

impl StoredOrder {
    /// Converts rows from their stored order to the parameter's order. Does nothing for a
    /// transposed matrix.
    pub(crate) fn restore_rows<E: Copy>(self, row: usize, rows: &mut [E]) {
        let StoredOrder::ChannelsFirst { positions } = self else { return };
        for_each_row(row, rows, |stored, restored| {
            swap_axes(row / positions, positions, stored, restored)
        });
    }

    /// Converts rows from the parameter's order to their stored order.
    pub(crate) fn store_rows<E: Copy>(self, row: usize, rows: &mut [E]) {
        let StoredOrder::ChannelsFirst { positions } = self else { return };
        for_each_row(row, rows, |own, stored| swap_axes(positions, row / positions, own, stored));
    }
}

fn for_each_row<E: Copy>(row: usize, rows: &mut [E], change: impl Fn(&[E], &mut [E])) {
    let mut before = Vec::with_capacity(row);
    for row in rows.chunks_mut(row.max(1)) {
        before.clear();
        before.extend_from_slice(row);
        change(&before, row);
    }
}

/// Transposes a matrix from (outer, inner) to (inner, outer).
fn swap_axes<E: Copy>(outer: usize, inner: usize, from: &[E], to: &mut [E]) {
    for (place, value) in from.iter().enumerate() {
        to[place % inner * outer + place / inner] = *value;
    }
}

impl HfPiece {
    /// The rows of this piece within these rows of the parameter, relative to the piece, and their
    /// offset in the destination.
    pub(crate) fn part_of(&self, rows: &Range<usize>) -> Option<(Range<usize>, usize)> {
        let start = self.rows.start.max(rows.start);
        let end = self.rows.end.min(rows.end);
        let own = || start - self.rows.start..end - self.rows.start;
        (start < end).then(|| (own(), start - rows.start))
    }
}

impl ParameterSpec {
    /// Number of elements of the parameter.
    pub fn element_count(&self) -> usize {
        self.shape.iter().product()
    }

    /// All rows. For a vector, all elements.
    pub fn rows(&self) -> Range<usize> {
        0..self.shape.first().copied().unwrap_or(1)
    }

    /// Elements of one row: 1 for a vector.
    pub fn row_elements(&self) -> usize {
        self.shape.iter().skip(1).product()
    }
}

/// All parameters of a model, with the repeated layer listed once: as cheap for 10,000 layers as
/// for one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterLayout {
    /// Before the layers: embeddings.
    pub prologue: Vec<ParameterSpec>,
    /// The parameters of one layer, named without `layers.N.`.
    pub layer: Vec<ParameterSpec>,
    /// After the layers: the final norm and, unless tied, the head.
    pub epilogue: Vec<ParameterSpec>,
    /// Number of layers.
    pub layer_count: usize,
    hf_layers: &'static str,
}

impl ParameterLayout {
    /// The layout of a validated config.
    pub fn new(config: &ModelConfig) -> Self {
        let (prologue, layer, epilogue) = match config.family {
            Family::Gpt2 => gpt2(config),
            _ => llama_like(config),
        };
        Self {
            prologue,
            layer,
            epilogue,
            layer_count: config.layer_count,
            hf_layers: hf_layers(config.family),
        }
    }

    /// The parameter of layer `index` for a parameter of the layer template.
    pub fn in_layer(&self, template: &ParameterSpec, index: usize) -> ParameterSpec {
        let mut spec = template.clone();
        spec.name = format!("layers.{index}.{}", spec.name);
        for piece in &mut spec.pieces {
            piece.hf_name = format!("{}{index}.{}", self.hf_layers, piece.hf_name);
        }
        spec
    }

    /// The full name of a module of layer `index`.
    pub(crate) fn layer_module(&self, index: usize, module: &str) -> String {
        format!("{}{index}.{module}", self.hf_layers)
    }

    /// Every parameter with its full name, in the order of the forward pass.
    pub fn iter(&self) -> impl Iterator<Item = ParameterSpec> + '_ {
        let layers = (0..self.layer_count).flat_map(move |index| {
            self.layer.iter().map(move |template| self.in_layer(template, index))
        });
        self.prologue.iter().cloned().chain(layers).chain(self.epilogue.iter().cloned())
    }
}

/// Every parameter of a validated config with its full name: the model's in the order of the
/// forward pass, then those of its adapters.
pub fn parameters(config: &ModelConfig) -> Vec<ParameterSpec> {
    let mut specs: Vec<ParameterSpec> = ParameterLayout::new(config).iter().collect();
    specs.extend(config.adapters.iter().flat_map(|adapters| adapters.own_specs(config)));
    specs
}

/// The prefix of all tensors except the head, and the name parts that can follow it. Files of bare
/// models, such as the published GPT-2, lack the prefix.
pub(super) fn hf_prefix(family: Family) -> (&'static str, &'static [&'static str]) {
    match family {
        Family::Gpt2 => ("transformer.", &["wte.", "wpe.", "h.", "ln_f."]),
        _ => ("model.", &["embed_tokens.", "layers.", "norm.", "rotary_emb."]),
    }
}

/// The tensor of the head, which may also be stored for a tied model.
pub(super) const HF_HEAD: &str = "lm_head.weight";
pub(super) fn hf_embedding(family: Family) -> &'static str {
    if family == Family::Gpt2 { "transformer.wte.weight" } else { "model.embed_tokens.weight" }
}

fn hf_layers(family: Family) -> &'static str {
    if family == Family::Gpt2 { "transformer.h." } else { "model.layers." }
}

/// Whether a tensor is a constant that old versions of transformers saved with the weights: causal
/// masks of GPT-2, rotary frequencies of Llama.
pub(super) fn is_saved_constant(family: Family, hf_name: &str) -> bool {
    let name = hf_name.strip_prefix(hf_prefix(family).0).unwrap_or(hf_name);
    if family != Family::Gpt2 && name == "rotary_emb.inv_freq" {
        return true;
    }
    let (layers, suffixes): (_, &[&str]) = match family {
        Family::Gpt2 => ("h.", &["attn.bias", "attn.masked_bias"]),
        _ => ("layers.", &["self_attn.rotary_emb.inv_freq"]),
    };
    let in_layer = name.strip_prefix(layers).and_then(|rest| rest.split_once('.'));
    in_layer.is_some_and(|(index, suffix)| {
        !index.is_empty()
            && index.bytes().all(|byte| byte.is_ascii_digit())
            && suffixes.contains(&suffix)
    })
}

type Parts = (Vec<ParameterSpec>, Vec<ParameterSpec>, Vec<ParameterSpec>);

fn gpt2(config: &ModelConfig) -> Parts {
    let (vocab, hidden, inner) = (config.vocab_size, config.hidden_size, config.intermediate_size);
    let linear = |name: &str, hf: &str, rows: usize, columns: usize| {
        let weight = ParameterSpec {
            name: format!("{name}.weight"),
            shape: vec![rows, columns],
            pieces: vec![HfPiece {
                hf_name: format!("{hf}.weight"),
                shape: vec![columns, rows],
                rows: 0..rows,
                order: StoredOrder::Transposed,
            }],
        };
        [weight, whole(&format!("{name}.bias"), &format!("{hf}.bias"), &[rows])]
    };
    let norm = |name: &str, hf: &str| {
        ["weight", "bias"]
            .map(|part| whole(&format!("{name}.{part}"), &format!("{hf}.{part}"), &[hidden]))
    };
    let prologue = vec![
        whole("embedding.weight", "transformer.wte.weight", &[vocab, hidden]),
        whole(
            "position_embedding.weight",
            "transformer.wpe.weight",
            &[config.max_positions, hidden],
        ),
    ];
    let layer = [
        norm("attention_norm", "ln_1"),
        linear("attention.qkv", "attn.c_attn", config.qkv_rows(), hidden),
        linear("attention.output", "attn.c_proj", hidden, config.query_rows()),
        norm("mlp_norm", "ln_2"),
        linear("mlp.up", "mlp.c_fc", inner, hidden),
        linear("mlp.down", "mlp.c_proj", hidden, inner),
    ];
    let mut epilogue = norm("final_norm", "transformer.ln_f").to_vec();
    epilogue.extend(head(config));
    (prologue, layer.into_iter().flatten().collect(), epilogue)
}

fn llama_like(config: &ModelConfig) -> Parts {
    let (vocab, hidden, inner) = (config.vocab_size, config.hidden_size, config.intermediate_size);
    let (query, kv) = (config.query_rows(), config.kv_rows());
    // Phi 3 already fuses these matrices.
    let qkv: &[(&str, usize)] = match config.family {
        Family::Phi3 => &[("self_attn.qkv_proj", query + 2 * kv)],
        _ => &[("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)],
    };
    let gate_up: &[(&str, usize)] = match config.family {
        Family::Phi3 => &[("mlp.gate_up_proj", 2 * inner)],
        _ => &[("mlp.gate_proj", inner), ("mlp.up_proj", inner)],
    };

    let mut layer = vec![
        whole("attention_norm.weight", "input_layernorm.weight", &[hidden]),
        stacked("attention.qkv.weight", "weight", qkv, Some(hidden)),
    ];
    if config.qkv_bias {
        layer.push(stacked("attention.qkv.bias", "bias", qkv, None));
    }
    if config.family.has_query_key_norm() {
        layer.push(whole(
            "attention.query_norm.weight",
            "self_attn.q_norm.weight",
            &[config.head_dim],
        ));
        layer.push(whole(
            "attention.key_norm.weight",
            "self_attn.k_norm.weight",
            &[config.head_dim],
        ));
    }
    layer.push(whole("attention.output.weight", "self_attn.o_proj.weight", &[hidden, query]));
    if config.attention_output_bias {
        layer.push(whole("attention.output.bias", "self_attn.o_proj.bias", &[hidden]));
    }
    layer.push(whole("mlp_norm.weight", "post_attention_layernorm.weight", &[hidden]));
    layer.push(stacked("mlp.gate_up.weight", "weight", gate_up, Some(hidden)));
    if config.mlp_bias {
        layer.push(stacked("mlp.gate_up.bias", "bias", gate_up, None));
    }
    layer.push(whole("mlp.down.weight", "mlp.down_proj.weight", &[hidden, inner]));
    if config.mlp_bias {
        layer.push(whole("mlp.down.bias", "mlp.down_proj.bias", &[hidden]));
    }

    let prologue = vec![whole("embedding.weight", "model.embed_tokens.weight", &[vocab, hidden])];
    let mut epilogue = vec![whole("final_norm.weight", "model.norm.weight", &[hidden])];
    epilogue.extend(head(config));
    (prologue, layer, epilogue)
}

fn head(config: &ModelConfig) -> Option<ParameterSpec> {
    let shape = [config.vocab_size, config.hidden_size];
    (!config.tied_embeddings).then(|| whole("head.weight", HF_HEAD, &shape))
}

/// A parameter that is exactly one Hugging Face tensor.
fn whole(name: &str, hf_name: &str, shape: &[usize]) -> ParameterSpec {
    ParameterSpec {
        name: name.into(),
        shape: shape.into(),
        pieces: vec![HfPiece {
            hf_name: hf_name.into(),
            shape: shape.into(),
            rows: 0..shape[0],
            order: StoredOrder::Rows,
        }],
    }
}

/// A parameter whose rows come from several tensors, one after the other.
fn stacked(
    name: &str,
    part: &str,
    sources: &[(&str, usize)],
    columns: Option<usize>,
) -> ParameterSpec {
    let mut end = 0;
    let with_columns = |rows: usize| std::iter::once(rows).chain(columns).collect::<Vec<_>>();
    let pieces = sources
        .iter()
        .map(|&(hf, rows)| {
            let start = end;
            end += rows;
            HfPiece {
                hf_name: format!("{hf}.{part}"),
                shape: with_columns(rows),
                rows: start..end,
                order: StoredOrder::Rows,
            }
        })
        .collect();
    ParameterSpec { name: name.into(), shape: with_columns(end), pieces }
}
