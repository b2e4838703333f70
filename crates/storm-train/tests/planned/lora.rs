//! Adapters on a frozen base: every plan gives the same bits, gradients match those of the merged
//! weights, and the base does not change.

use crate::exactness::random_plans_of_config_are_exact;
use crate::support::{batches, options, tiny};
use std::collections::BTreeMap;
use std::ops::Range;
use storm_graph::Accumulation;
use storm_graph::{QuantizedFormat, QuantizedRow};
use storm_model::{
    Adapters, BaseFormat, LoraOptions, ModelConfig, Targets, build, merge, parameters,
};
use storm_model::{Element, ModelError, ParameterSource, ParameterSpec};
use storm_train::{Precision, ReferenceTrainer};

/// A tiny model with adapters.
pub(crate) fn adapted(name: &str, options: LoraOptions) -> ModelConfig {
    let base = tiny(name);
    let adapters = Adapters::new(&base, options).expect("adapters that fit");
    ModelConfig { adapters: Some(adapters), ..base }
}

/// Only some layers, different ranks and scales for some modules, and norms that are trained in
/// full.
pub(crate) fn patterned(name: &str) -> ModelConfig {
    adapted(
        name,
        LoraOptions {
            targets: Targets::Pattern(r".*layers\.[12]\.(self_attn\.[qv]_proj|mlp\..*)".to_owned()),
            rslora: true,
            modules_to_save: vec!["input_layernorm".to_owned(), "model.norm".to_owned()],
            rank_pattern: BTreeMap::from([("q_proj".to_owned(), 2), ("mlp.up_proj".to_owned(), 5)]),
            alpha_pattern: BTreeMap::from([("v_proj".to_owned(), 1.5)]),
            ..LoraOptions::new(3, 4.0)
        },
    )
}

#[test]
fn random_plans_of_adapters_are_exact() {
    let count = if std::env::var_os("STORM_LONG_TESTS").is_some() { 1000 } else { 16 };
    let all = |name| adapted(name, LoraOptions::new(3, 6.0));
    for (name, config) in [
        ("gpt2", all("gpt2")),
        ("llama-3.2-1b", all("llama-3.2-1b")),
        ("mistral-7b", patterned("mistral-7b")),
        ("qwen3-0.6b", all("qwen3-0.6b")),
    ] {
        random_plans_of_config_are_exact(name, &config, count);
    }
}

const INT8: BaseFormat = BaseFormat::Quantized(QuantizedFormat::Int8);
const NF4: BaseFormat = BaseFormat::Quantized(QuantizedFormat::Nf4);

/// The same with a base in 8 or 4 bits, whose values exist only around the products that read them.
#[test]
fn random_plans_of_a_quantized_base_are_exact() {
    let count = if std::env::var_os("STORM_LONG_TESTS").is_some() { 1000 } else { 10 };
    let all = |name| adapted(name, LoraOptions::new(3, 6.0));
    for (name, config, base) in [
        ("gpt2", all("gpt2"), INT8),
        ("mistral-7b", patterned("mistral-7b"), INT8),
        ("qwen3-0.6b", all("qwen3-0.6b"), NF4),
        ("mistral-7b", patterned("mistral-7b"), NF4),
    ] {
        let config = ModelConfig { base, ..config };
        random_plans_of_config_are_exact(name, &config, count);
    }
}

/// A base loaded in 8 or 4 bits computes as if the rounded weights had been loaded.
#[test]
fn a_quantized_base_is_its_rounded_weights() {
    [QuantizedFormat::Int8, QuantizedFormat::Nf4].into_iter().for_each(is_its_rounded_weights);
}

fn is_its_rounded_weights(format: QuantizedFormat) {
    let config = adapted("mistral-7b", LoraOptions::new(3, 6.0));
    let narrow = ModelConfig { base: BaseFormat::Quantized(format), ..config.clone() };
    let mut wide = trainer_of(&config);
    let mut small = trainer_of(&narrow);
    let mut rounded = 0;
    for spec in parameters(&config) {
        let mut values = wide.read(&spec.name).expect("a parameter");
        let is_projection = spec.shape.len() == 2
            && spec.name.starts_with("layers.")
            && !storm_model::is_adapter(&spec.name);
        if !is_projection {
            small.write(&spec.name, &values).expect("a parameter");
            continue;
        }
        rounded += 1;
        small.write(&spec.name, &values).expect("a parameter");
        let form = QuantizedRow::new(format, spec.row_elements());
        let mut row = vec![0; form.bytes()];
        for values in values.chunks_mut(spec.row_elements()) {
            form.quantize(|column| values[column], &mut row);
            form.dequantize(&row, |column, value| values[column] = value);
        }
        wide.write(&spec.name, &values).expect("a parameter");
    }
    assert_eq!(rounded, 4 * config.layer_count);
    for step in 0..4 {
        let batches = batches(&config, 2, step);
        let [wide, small] =
            [&mut wide, &mut small].map(|t| t.step(&batches, 0.02).expect("a step"));
        assert_eq!(wide, small, "step {step}");
    }
}

/// The parameters of a trainer, as a source.
struct Held<'a>(&'a ReferenceTrainer);

impl ParameterSource for Held<'_> {
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        let values = self.0.read(&spec.name).expect("a parameter");
        let first = rows.start * spec.row_elements();
        dest.iter_mut().zip(&values[first..]).for_each(|(dest, &value)| *dest = E::from_f32(value));
        Ok(())
    }
}

/// A trainer with nonzero B, so that A has a gradient.
fn trainer_of(config: &ModelConfig) -> ReferenceTrainer {
    let mut trainer = ReferenceTrainer::new(config, options(Precision::F32)).expect("a model");
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    for (number, name) in names.iter().enumerate().filter(|(_, name)| name.contains(".lora_B.")) {
        let mut values = trainer.read(name).expect("a parameter");
        for (place, value) in values.iter_mut().enumerate() {
            *value = ((number * 31 + place * 7) % 11) as f32 * 0.02 - 0.1;
        }
        trainer.write(name, &values).expect("a parameter");
    }
    trainer
}

/// dA = scale · Bᵀ dW and dB = scale · dW Aᵀ, where dW is the gradient of the merged model's
/// weight.
#[test]
fn gradients_are_those_of_the_merged_weights() {
    let all = |name| adapted(name, LoraOptions::new(3, 6.0));
    for config in [all("gpt2"), all("qwen2.5-0.5b"), patterned("mistral-7b"), all("qwen3-0.6b")] {
        let mut trainer = trainer_of(&config);
        let base = ModelConfig { adapters: None, ..config.clone() };
        let mut merged = ReferenceTrainer::new(&base, options(Precision::F32)).expect("a model");
        for spec in parameters(&base) {
            let mut weight = vec![0f32; spec.element_count()];
            merge(&config, &Held(&trainer), &spec, &mut weight).expect("a weight");
            merged.write(&spec.name, &weight).expect("a parameter");
        }
        let batches = batches(&config, 2, 0);
        let loss = trainer.accumulate(&batches).expect("a step").loss;
        let merged_loss = merged.accumulate(&batches).expect("a step").loss;
        assert!((loss - merged_loss).abs() < 1e-5, "{loss}, not {merged_loss}");
        let adapters = config.adapters.as_ref().expect("adapters");
        let mut compared = 0;
        for layer in 0..config.layer_count {
            for linear in &adapters.layer(layer).linears {
                let read = |name: &str| trainer.read(&format!("layers.{layer}.{name}"));
                let weight = format!("layers.{layer}.{}.weight.grad", linear.name);
                let dw = merged.read(&weight).expect("a gradient"); // (N, K)
                let a = read(&linear.a_name()).expect("a parameter"); // (R, K)
                let da = read(&format!("{}.grad", linear.a_name())).expect("a gradient");
                let (inputs, mut first) = (linear.inputs, 0);
                for slice in &linear.slices {
                    let b = read(&linear.b_name(slice)).expect("a parameter"); // (N', r)
                    let db = read(&format!("{}.grad", linear.b_name(slice))).expect("a gradient");
                    for rank in 0..slice.rank {
                        for k in 0..inputs {
                            let sum: f32 = slice
                                .rows
                                .clone()
                                .enumerate()
                                .map(|(own, row)| b[own * slice.rank + rank] * dw[row * inputs + k])
                                .sum();
                            close(da[(first + rank) * inputs + k], slice.scale * sum, &linear.name);
                        }
                        for (own, row) in slice.rows.clone().enumerate() {
                            let sum: f32 = (0..inputs)
                                .map(|k| a[(first + rank) * inputs + k] * dw[row * inputs + k])
                                .sum();
                            close(db[own * slice.rank + rank], slice.scale * sum, &linear.name);
                        }
                    }
                    first += slice.rank;
                    compared += 1;
                }
            }
        }
        assert!(compared >= 8, "{compared} adapters");
    }
}

fn close(found: f32, expected: f32, what: &str) {
    assert!(
        (found - expected).abs() <= 2e-5 + 1e-4 * expected.abs(),
        "{what}: {found}, not {expected}"
    );
}

/// Fresh adapters change nothing. Training changes them and what is saved with them, and nothing
/// else.
#[test]
fn only_what_is_trained_changes() {
    for precision in [Precision::F32, Precision::Bf16Stochastic, Precision::Bf16Master] {
        let config = patterned("mistral-7b");
        let base = ModelConfig { adapters: None, ..config.clone() };
        let mut plain = ReferenceTrainer::new(&base, options(precision)).expect("a model");
        let mut trainer = ReferenceTrainer::new(&config, options(precision)).expect("a model");
        for spec in parameters(&base) {
            let values = plain.read(&spec.name).expect("a parameter");
            trainer.write(&spec.name, &values).expect("a parameter");
        }
        let batches = batches(&config, 2, 0);
        let loss = trainer.accumulate(&batches).expect("a step").loss;
        assert_eq!(loss.to_bits(), plain.accumulate(&batches).expect("a step").loss.to_bits());
        let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
        let read = |trainer: &ReferenceTrainer, name: &str| trainer.read(name).expect("a tensor");
        let before: Vec<Vec<f32>> = names.iter().map(|name| read(&trainer, name)).collect();
        for _ in 0..3 {
            trainer.step(&batches, 0.05).expect("a step");
        }
        let trained: Vec<&str> = names
            .iter()
            .zip(&before)
            .filter(|(name, before)| read(&trainer, name) != **before)
            .map(|(name, _)| name.as_str())
            .collect();
        let adapters = config.adapters.as_ref().expect("adapters");
        let mut expected: Vec<String> =
            adapters.specs(&config).into_iter().map(|spec| spec.name).collect();
        expected.sort();
        let mut found: Vec<String> = trained.iter().map(|&name| name.to_owned()).collect();
        found.sort();
        assert_eq!(found, expected, "{precision:?}");
        for name in &names {
            let state = trainer.read(&format!("{name}.first_moment"));
            assert_eq!(state.is_ok(), expected.contains(name), "{name}");
        }
    }
}

/// No gradient below the lowest adapter, and none for the base.
#[test]
fn nothing_is_computed_for_the_base() {
    let lora = LoraOptions {
        targets: Targets::Pattern(r"model\.layers\.1\..*_proj".to_owned()),
        ..LoraOptions::new(2, 2.0)
    };
    let config = adapted("qwen2.5-0.5b", lora);
    let program = build(&config, &options(Precision::F32).build_options()).expect("a program");
    let program =
        program.differentiate(Accumulation::Start, storm_graph::DType::F32).expect("a gradient");
    let reached: Vec<(&str, bool)> = program
        .stages()
        .iter()
        .enumerate()
        .map(|(index, stage)| (stage.name.as_str(), program.is_reached(index)))
        .collect();
    let expected = [
        ("embedding", false),
        ("layers 0", false),
        ("layers 1", true),
        ("layers 2", true),
        ("head", true),
    ];
    assert_eq!(reached, expected);
    for section in program.templates() {
        for gradient in section.backward.iter().flat_map(|backward| &backward.parameters) {
            let name = &section.graph.tensor(gradient.parameter).name;
            assert!(storm_model::is_adapter(name), "{name} has a gradient");
        }
    }
}
