//! Weights are loaded in pieces, so memory outside the plan does not grow with the size of a
//! parameter.

use std::path::Path;
use std::sync::Arc;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_graph::QuantizedFormat;
use storm_host::allocation::peak_bytes;
use storm_model::{
    Adapters, BaseFormat, HfDirectory, IfExists, LoraOptions, ModelConfig, SaveOptions,
    WeightDtype, parameters, preset, save,
};
use storm_plan::{Budget, Forced, HardwareProfile, Tier, plan};
use storm_train::{Precision, ReferenceTrainer, TrainOptions, Trainer, training_task};

/// Memory that loading may take for any parameters: a part of one in f32, as stored, and as read.
const SCRATCH_BYTES_MAX: isize = 20 << 20;

/// A model with adapters on a base in 8 bits.
fn quantized(config: ModelConfig) -> ModelConfig {
    let adapters = Some(Adapters::new(&config, LoraOptions::new(4, 8.0)).expect("adapters"));
    ModelConfig { adapters, base: BaseFormat::Quantized(QuantizedFormat::Int8), ..config }
}

/// Element `place` of a parameter.
fn value(place: usize) -> f32 {
    (place.wrapping_mul(0x9e37_79b9) >> 8 & 0xff) as f32 / 4096.0 - 0.03
}

fn write_directory(path: &Path, config: &ModelConfig) {
    let options = SaveOptions {
        dtype: WeightDtype::Bf16,
        if_exists: IfExists::Refuse,
        ..SaveOptions::default()
    };
    save(path, config, &options, |_, range, dest: &mut [f32]| {
        dest.iter_mut().zip(range).for_each(|(dest, place)| *dest = value(place));
        Ok(())
    })
    .expect("a model directory");
}

#[test]
fn scratch_does_not_grow_with_a_parameter() {
    let mut plain = crate::support::tiny("qwen2.5-0.5b");
    (plain.vocab_size, plain.hidden_size, plain.layer_count) = (45_000, 128, 1);
    plain.intermediate_size = 24_000;
    let config = quantized(plain.clone());
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model");
    write_directory(&path, &plain);
    let directory = HfDirectory::open(&path).expect("a model");
    let options = TrainOptions::new(1, 8, Precision::Bf16Master);
    let mut trainer = ReferenceTrainer::new(&config, options).expect("a trainer");
    let (loaded, peak) = peak_bytes(|| trainer.load(&directory));
    loaded.expect("loads");
    let specs = parameters(&config);
    for name in ["embedding.weight", "layers.0.mlp.gate_up.weight"] {
        let spec = specs.iter().find(|spec| spec.name == name).expect("a parameter");
        let wide = 4 * spec.element_count() as isize;
        assert!(peak < SCRATCH_BYTES_MAX, "{peak} bytes");
        assert!(wide > SCRATCH_BYTES_MAX, "{name} is too small to show anything");
    }
    // The last rows are loaded, and at the right place.
    let embedding = trainer.read("embedding.weight").expect("a parameter");
    for place in [0, embedding.len() / 2, embedding.len() - 1] {
        assert_eq!(embedding[place], half::bf16::from_f32(value(place)).to_f32(), "{place}");
    }
}

fn status_bytes(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find(|line| line.starts_with(field)).expect("a field");
    let kilobytes = line.split_whitespace().nth(1).expect("a number");
    kilobytes.parse::<u64>().expect("a number") << 10
}

/// Two layers of a 72B model, with its embedding and head: 8.5 GB of weights. Run it alone, because
/// it measures the whole process:
/// `STORM_LONG_TESTS=1 cargo test -p storm-train --test training tensors_of_72b -- --nocapture`
#[test]
fn tensors_of_72b_are_loaded_within_4_gib() {
    if std::env::var_os("STORM_LONG_TESTS").is_none() {
        return;
    }
    let mut plain = preset("qwen2.5-72b").expect("a preset");
    plain.layer_count = 2;
    let config = quantized(plain.clone());
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model");
    write_directory(&path, &plain);
    let directory = HfDirectory::open(&path).expect("a model");
    let options = TrainOptions::new(1, 16, Precision::Bf16Master);
    let task = training_task(&config, &options, 1).expect("a task");
    let profile = HardwareProfile::builtin("reference").expect("built in");
    let budget = Budget::new(5 << 30, 12 << 30);
    let planned = plan(&task, &profile, budget, &Forced::default()).expect("a plan");
    let mut trainer: Trainer<CpuPlanDevice> =
        Trainer::new(&config, options, Arc::new(planned.plan), CpuPlanOptions::default())
            .expect("a trainer");
    // From here on the peak is that of loading.
    std::fs::write("/proc/self/clear_refs", "5").expect("the peak is forgotten");
    let before = status_bytes("VmRSS:");
    let (loaded, heap) = peak_bytes(|| trainer.load(&directory));
    loaded.expect("loads");
    let beyond = status_bytes("VmHWM:").saturating_sub(before);
    println!(
        "{} bytes of weights; the plan holds {} of host and {} of device memory; while they were loaded, resident memory rose \
         by {beyond} bytes at most, and {heap} were on the heap",
        2 * config.parameter_count(),
        trainer.memory_taken()[Tier::HOST],
        trainer.memory_taken()[Tier::DEVICE],
    );
    assert!(beyond < 4 << 30, "{beyond} bytes");
}
