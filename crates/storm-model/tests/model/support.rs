//! Models to test with, and a meter for memory.

use std::collections::HashMap;
use std::path::Path;

use storm_graph::ActivationFunction;
pub(crate) use storm_graph::random::Random;
use storm_host::allocation::AllocationMeter;
pub(crate) use storm_host::allocation::peak_bytes;
use storm_model::{
    Family, ModelConfig, ParameterSpec, Rotary, RotaryScaling, SaveOptions, SlidingWindow,
    WeightDtype, parameters, save,
};

/// The most that reading a bad file may allocate.
const BAD_INPUT_BYTES_MAX: isize = 64 << 20;

#[global_allocator]
static METER: AllocationMeter = AllocationMeter;

/// Runs something that must not take much memory.
pub(crate) fn frugal<T>(run: impl FnOnce() -> T) -> T {
    let (result, peak) = peak_bytes(run);
    assert!(peak < BAD_INPUT_BYTES_MAX, "allocated {peak} bytes");
    result
}

/// A small model of each family, sizes odd where they may be.
pub(crate) fn tiny(family: Family) -> ModelConfig {
    let is_gpt2 = family == Family::Gpt2;
    let is_llama = family == Family::Llama;
    let scaling = RotaryScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 16,
    };
    let config = ModelConfig {
        family,
        vocab_size: 29,
        hidden_size: 12,
        layer_count: 3,
        query_heads: 4,
        kv_heads: if is_gpt2 { 4 } else { 2 },
        head_dim: match family {
            Family::Gpt2 => 3,
            Family::Llama | Family::Qwen2 => 12 / 4 * 2,
            Family::Mistral | Family::Phi3 => 4,
            Family::Qwen3 => 10,
        },
        intermediate_size: 17,
        max_positions: 64,
        norm_eps: 1.5e-6,
        tied_embeddings: matches!(family, Family::Gpt2 | Family::Qwen2),
        rotary: (!is_gpt2).then_some(Rotary {
            theta: 12_345.0,
            share: 1.0,
            scaling: if is_llama { scaling } else { RotaryScaling::None },
        }),
        qkv_bias: is_gpt2 || is_llama || family == Family::Qwen2,
        attention_output_bias: is_gpt2 || is_llama,
        mlp_bias: is_gpt2 || is_llama,
        activation: match is_gpt2 {
            true => ActivationFunction::GeluTanh,
            false => ActivationFunction::Silu,
        },
        sliding_window: (family == Family::Mistral).then(|| SlidingWindow::from_layer(40, 0, 3)),
        initializer_range: 0.03,
        adapters: None,
        base: storm_model::BaseFormat::Computed,
    };
    config.validate().unwrap();
    config
}

/// Some value for each element of a model, exact in bf16.
pub(crate) fn values(config: &ModelConfig) -> HashMap<String, Vec<f32>> {
    let mut random = Random(7);
    let mut fill = |spec: &ParameterSpec| {
        (0..spec.element_count()).map(|_| (random.below(255) as f32 - 127.0) / 64.0).collect()
    };
    parameters(config).into_iter().map(|spec| (spec.name.clone(), fill(&spec))).collect()
}

/// Saves [`values`] as f32 in one file.
pub(crate) fn save_tiny(path: &Path, config: &ModelConfig) {
    save_values(path, config, &SaveOptions { dtype: WeightDtype::F32, ..SaveOptions::default() });
}

/// Saves [`values`].
pub(crate) fn save_values(path: &Path, config: &ModelConfig, options: &SaveOptions<'_>) {
    let values = values(config);
    save::<f32, _>(path, config, options, |spec, elements, dest| {
        dest.copy_from_slice(&values[&spec.name][elements]);
        Ok(())
    })
    .unwrap();
}

/// The bytes of a safetensors file with this header and so many bytes of data.
pub(crate) fn file_bytes(header: &[u8], data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

/// A header of so many empty tensors; names end in `tail`.
pub(crate) fn entries(count: usize, tail: &str, shape: &str) -> String {
    let one = |i: usize| {
        format!(r#""{i:x}{tail}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}"#)
    };
    format!("{{{}}}", (0..count).map(one).collect::<Vec<_>>().join(","))
}

/// Writes a file anew. Some file systems flush a file to disk that is cut to nothing and written
/// again, which takes thousands of rounds from a blink to seconds.
pub(crate) fn write_anew(path: &Path, bytes: &[u8]) {
    let _ = std::fs::remove_file(path);
    std::fs::write(path, bytes).unwrap();
}
