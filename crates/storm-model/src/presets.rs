//! Published models by name.

use crate::BaseFormat;
use crate::{Family, ModelConfig, ModelError, Rotary, RotaryScaling, image_preset_names};
use storm_graph::ActivationFunction;

/// A row of the table: the values that differ between presets.
struct Row {
    name: &'static str,
    kind: Kind,
    hidden: usize,
    layers: usize,
    query_heads: usize,
    kv_heads: usize,
    intermediate: usize,
    vocab: usize,
    positions: usize,
}

/// The values that presets of a kind share.
#[derive(Clone, Copy)]
enum Kind {
    Gpt2,
    Qwen25 { tied: bool, eps: f64 },
    Qwen3 { tied: bool },
    Llama2,
    Llama31 { tied: bool, factor: f64 },
    Mistral,
}

const QWEN25_SMALL: Kind = Kind::Qwen25 { tied: true, eps: 1e-6 };
const QWEN25_7B: Kind = Kind::Qwen25 { tied: false, eps: 1e-6 };
const QWEN25_LARGE: Kind = Kind::Qwen25 { tied: false, eps: 1e-5 };
const LLAMA31: Kind = Kind::Llama31 { tied: false, factor: 8.0 };
const LLAMA32: Kind = Kind::Llama31 { tied: true, factor: 32.0 };
const QWEN3_TIED: Kind = Kind::Qwen3 { tied: true };
const QWEN3_UNTIED: Kind = Kind::Qwen3 { tied: false };

#[rustfmt::skip]
const ROWS: &[Row] = &[
    //      name             kind            hidden  L   Hq  Hkv inner   vocab    positions
    row("gpt2",          Kind::Gpt2,      768, 12, 12, 12,  3_072,  50_257,   1_024),
    row("gpt2-medium",   Kind::Gpt2,    1_024, 24, 16, 16,  4_096,  50_257,   1_024),
    row("gpt2-large",    Kind::Gpt2,    1_280, 36, 20, 20,  5_120,  50_257,   1_024),
    row("gpt2-xl",       Kind::Gpt2,    1_600, 48, 25, 25,  6_400,  50_257,   1_024),
    row("gpt3-175b",     Kind::Gpt2,   12_288, 96, 96, 96, 49_152,  50_257,   2_048),
    row("qwen2.5-0.5b",  QWEN25_SMALL,    896, 24, 14,  2,  4_864, 151_936,  32_768),
    row("qwen2.5-1.5b",  QWEN25_SMALL,  1_536, 28, 12,  2,  8_960, 151_936, 131_072),
    row("qwen2.5-3b",    QWEN25_SMALL,  2_048, 36, 16,  2, 11_008, 151_936,  32_768),
    row("qwen2.5-7b",    QWEN25_7B,     3_584, 28, 28,  4, 18_944, 152_064, 131_072),
    row("qwen2.5-14b",   QWEN25_LARGE,  5_120, 48, 40,  8, 13_824, 152_064, 131_072),
    row("qwen2.5-32b",   QWEN25_LARGE,  5_120, 64, 40,  8, 27_648, 152_064, 131_072),
    row("qwen2.5-72b",   QWEN25_LARGE,  8_192, 80, 64,  8, 29_568, 152_064, 131_072),
    row("qwen3-0.6b",    QWEN3_TIED,    1_024, 28, 16,  8,  3_072, 151_936,  40_960),
    row("qwen3-1.7b",    QWEN3_TIED,    2_048, 28, 16,  8,  6_144, 151_936,  40_960),
    row("qwen3-4b",      QWEN3_TIED,    2_560, 36, 32,  8,  9_728, 151_936,  40_960),
    row("qwen3-8b",      QWEN3_UNTIED,  4_096, 36, 32,  8, 12_288, 151_936,  40_960),
    row("llama-2-7b",    Kind::Llama2,  4_096, 32, 32, 32, 11_008,  32_000,   4_096),
    row("llama-2-13b",   Kind::Llama2,  5_120, 40, 40, 40, 13_824,  32_000,   4_096),
    row("llama-2-70b",   Kind::Llama2,  8_192, 80, 64,  8, 28_672,  32_000,   4_096),
    row("llama-3.1-8b",  LLAMA31,       4_096, 32, 32,  8, 14_336, 128_256, 131_072),
    row("llama-3.1-70b", LLAMA31,       8_192, 80, 64,  8, 28_672, 128_256, 131_072),
    // 50.0 billion parameters, for size comparisons: the model above with fewer layers.
    row("llama-50b",     LLAMA31,       8_192, 56, 64,  8, 28_672, 128_256, 131_072),
    row("llama-3.2-1b",  LLAMA32,       2_048, 16, 32,  8,  8_192, 128_256, 131_072),
    row("mistral-7b",    Kind::Mistral, 4_096, 32, 32,  8, 14_336,  32_768,  32_768),
];

#[allow(clippy::too_many_arguments)] // A table row; the table's head has the names.
const fn row(
    name: &'static str,
    kind: Kind,
    hidden: usize,
    layers: usize,
    query_heads: usize,
    kv_heads: usize,
    intermediate: usize,
    vocab: usize,
    positions: usize,
) -> Row {
    Row { name, kind, hidden, layers, query_heads, kv_heads, intermediate, vocab, positions }
}

/// The names that [`preset`] accepts, grouped by family.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    ROWS.iter().map(|row| row.name)
}

/// The published model with this name. Case is ignored.
pub fn preset(name: &str) -> Result<ModelConfig, ModelError> {
    match ROWS.iter().find(|row| row.name.eq_ignore_ascii_case(name)) {
        Some(row) => Ok(row.config()),
        None => Err(unknown(name)),
    }
}

impl Row {
    fn config(&self) -> ModelConfig {
        let plain = |theta| Some(Rotary::plain(theta));
        let base = ModelConfig {
            family: Family::Llama,
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            layer_count: self.layers,
            query_heads: self.query_heads,
            kv_heads: self.kv_heads,
            head_dim: self.hidden / self.query_heads,
            intermediate_size: self.intermediate,
            max_positions: self.positions,
            norm_eps: 1e-5,
            tied_embeddings: false,
            rotary: plain(10_000.0),
            qkv_bias: false,
            attention_output_bias: false,
            mlp_bias: false,
            activation: ActivationFunction::Silu,
            sliding_window: None,
            initializer_range: 0.02,
            adapters: None,
            base: BaseFormat::Computed,
        };
        match self.kind {
            Kind::Gpt2 => ModelConfig {
                family: Family::Gpt2,
                rotary: None,
                activation: ActivationFunction::GeluTanh,
                tied_embeddings: true,
                qkv_bias: true,
                attention_output_bias: true,
                mlp_bias: true,
                ..base
            },
            Kind::Qwen25 { tied, eps } => ModelConfig {
                family: Family::Qwen2,
                rotary: plain(1_000_000.0),
                tied_embeddings: tied,
                norm_eps: eps,
                qkv_bias: true,
                ..base
            },
            Kind::Qwen3 { tied } => ModelConfig {
                family: Family::Qwen3,
                rotary: plain(1_000_000.0),
                head_dim: 128,
                tied_embeddings: tied,
                norm_eps: 1e-6,
                ..base
            },
            Kind::Llama2 => base,
            Kind::Llama31 { tied, factor } => ModelConfig {
                tied_embeddings: tied,
                rotary: Some(Rotary {
                    share: 1.0,
                    theta: 500_000.0,
                    scaling: RotaryScaling::Llama3 {
                        factor,
                        low_freq_factor: 1.0,
                        high_freq_factor: 4.0,
                        original_max_positions: 8_192,
                    },
                }),
                ..base
            },
            Kind::Mistral => {
                ModelConfig { family: Family::Mistral, rotary: plain(1_000_000.0), ..base }
            }
        }
    }
}

fn unknown(name: &str) -> ModelError {
    // A longer name is not a typo, and comparing it would waste time.
    const NAME_CHARS_MAX: usize = 64;
    let short: String = name.chars().take(NAME_CHARS_MAX).flat_map(char::to_lowercase).collect();
    let names = || preset_names().chain(image_preset_names());
    let closest = names()
        .map(|known| (edit_distance(&short, known), known))
        .min()
        .filter(|(distance, known)| *distance <= known.len() / 2)
        .map(|(_, known)| known);
    ModelError::UnknownPreset {
        name: short,
        closest,
        known: names().collect::<Vec<_>>().join(", "),
    }
}

/// Levenshtein distance: the number of insertions, deletions and replacements between two strings.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut previous: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut current = vec![i + 1];
        for (j, to) in b.iter().enumerate() {
            let replace = previous[j] + usize::from(from != *to);
            current.push(replace.min(previous[j + 1] + 1).min(current[j] + 1));
        }
        previous = current;
    }
    previous[b.len()]
}
