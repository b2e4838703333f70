//! Checks training on a device against training on the CPU device.

use crate::fp8::multiplies_fp8;
use storm_device::cpu::CpuDevice;
use storm_device::{Device, DeviceError};
use storm_graph::random::Random;
use storm_graph::{ActivationFunction, IGNORE_INDEX};
use storm_model::{Family, ModelConfig, Packing, SlidingWindow, build, preset};
use storm_train::{Batch, Precision, ReferenceTrainer, TrainError, TrainOptions};

/// Results for one family at one precision.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelReport {
    /// Model type, such as `qwen3`.
    pub family: &'static str,
    /// Training precision.
    pub precision: Precision,
    /// Largest relative error of a gradient tensor, as ‖difference‖ / ‖gradient‖.
    pub gradient_error: f64,
    /// The tensor with the largest error.
    pub worst_tensor: String,
    /// The error allowed.
    pub gradient_tolerance: f64,
    /// Whether repeated runs gave the same bits.
    pub repeatable: bool,
    /// Number of runs, and steps per run.
    pub runs: (usize, usize),
}

impl ModelReport {
    /// Whether gradients are correct and runs are deterministic.
    pub fn passed(&self) -> bool {
        self.gradient_error <= self.gradient_tolerance && self.repeatable
    }
}

/// Learning rate of every step.
pub(crate) const LEARNING_RATE: f32 = 1e-3;

const BATCH: usize = 2;
const SEQUENCE: usize = 72;

/// Small models of every family, with head sizes that the fast attention kernels support.
pub(crate) fn configs() -> Result<Vec<ModelConfig>, TrainError> {
    let names = ["gpt2", "llama-3.2-1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b"];
    names
        .into_iter()
        .map(|name| {
            let mut config = preset(name)?;
            config.vocab_size = 331;
            config.hidden_size = 256;
            config.layer_count = 2;
            config.query_heads = 4;
            config.kv_heads = if name == "gpt2" { 4 } else { 2 };
            config.head_dim = if config.family.has_query_key_norm() { 128 } else { 64 };
            config.intermediate_size = 320;
            config.max_positions = SEQUENCE;
            config.initializer_range = 0.08;
            // Not covered by presets: exact GELU, and a window shorter than the samples, in all
            // layers or in some.
            match config.family {
                Family::Gpt2 => config.activation = ActivationFunction::Gelu,
                Family::Mistral => {
                    config.sliding_window = Some(SlidingWindow::from_layer(11, 0, 2))
                }
                Family::Qwen2 => config.sliding_window = Some(SlidingWindow::from_layer(7, 1, 2)),
                _ => {}
            }
            Ok(config)
        })
        .collect()
}

/// Compares gradients of every family with those of the CPU device, and checks that `runs` runs of
/// `steps` steps give the same bits. `progress` receives the name of each test before it starts.
///
/// # Errors
/// The device failed.
pub fn verify_models<D: Device>(
    runs: usize,
    steps: usize,
    open: impl Fn(usize) -> Result<D, DeviceError>,
    mut progress: impl FnMut(&str),
) -> Result<Vec<ModelReport>, TrainError> {
    let mut reports = Vec::new();
    let fp8 = multiplies_fp8(&open)?.then_some(Precision::Fp8);
    let usual = [Precision::F32, Precision::Bf16Master, Precision::Bf16Stochastic];
    for config in configs()? {
        for precision in usual.into_iter().chain(fp8) {
            let family = config.family.model_type();
            progress(&format!("{family} {precision:?}"));
            let Comparison {
                error: gradient_error,
                tolerance: gradient_tolerance,
                tensor: worst_tensor,
            } = compare_gradients(&config, precision, &open)?;
            let first = run_steps(&config, precision, steps, &open)?;
            let mut repeatable = true;
            for _ in 1..runs {
                repeatable &= run_steps(&config, precision, steps, &open)? == first;
            }
            reports.push(ModelReport {
                family,
                precision,
                gradient_error,
                worst_tensor,
                gradient_tolerance,
                repeatable,
                runs: (runs, steps),
            });
        }
    }
    Ok(reports)
}

pub(crate) fn options(precision: Precision) -> TrainOptions {
    TrainOptions {
        packing: Packing::Segments,
        chunk_rows: 64,
        seed: 3,
        ..TrainOptions::new(BATCH, SEQUENCE, precision)
    }
}

fn trainer<D: Device>(
    config: &ModelConfig,
    options: TrainOptions,
    open: impl FnOnce(usize) -> Result<D, DeviceError>,
) -> Result<ReferenceTrainer<D>, TrainError> {
    let program = build(config, &options.build_options())?;
    ReferenceTrainer::on_device(config, options, program, |_| {}, open)
}

/// Seeded tokens in segments. Every seventh target is ignored.
pub(crate) fn batch(config: &ModelConfig, seed: u64) -> Batch {
    let mut random = Random(seed);
    let mut token = || random.below(config.vocab_size) as i32;
    let rows = BATCH * SEQUENCE;
    let tokens = (0..rows).map(|_| token()).collect();
    let targets = (0..rows).map(|i| if i % 7 == 0 { IGNORE_INDEX } else { token() }).collect();
    let segments = (0..rows).map(|i| (i % SEQUENCE / 29) as i32).collect();
    Batch::packed(tokens, targets, segments, SEQUENCE)
}

/// How far a gradient is from that of the CPU device, and how far it may be.
struct Comparison {
    error: f64,
    tolerance: f64,
    tensor: String,
}

impl Comparison {
    fn share(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.tolerance }
    }
}

/// The gradient tensor whose relative error uses most of its tolerance, after two micro-batches from
/// the same weights.
fn compare_gradients<D: Device>(
    config: &ModelConfig,
    precision: Precision,
    open: &impl Fn(usize) -> Result<D, DeviceError>,
) -> Result<Comparison, TrainError> {
    let mut cpu = trainer(config, options(precision), CpuDevice::new)?;
    let mut other = trainer(config, options(precision), open)?;
    let names: Vec<String> = cpu.parameter_names().map(str::to_owned).collect();
    for name in &names {
        other.write(name, &cpu.read(name)?)?;
    }
    let batches = [batch(config, 1), batch(config, 2)];
    let losses =
        [cpu.accumulate(&batches)?, other.accumulate(&batches)?].map(|found| f64::from(found.loss));
    // A last bit of a bf16 value can change an 8-bit code by a sixteenth, and the layers behind it
    // amplify that. So two devices may differ as much as 8 bits differ from f32.
    let exact = match precision {
        Precision::Fp8 => {
            let mut exact = trainer(config, options(Precision::F32), CpuDevice::new)?;
            for name in &names {
                exact.write(name, &cpu.read(name)?)?;
            }
            exact.accumulate(&batches)?;
            Some(exact)
        }
        _ => None,
    };
    let usual = if precision == Precision::F32 { 1e-4 } else { 5e-2 };
    let mut worst = Comparison {
        error: (losses[0] - losses[1]).abs() / losses[0].abs(),
        tolerance: usual,
        tensor: "loss".to_owned(),
    };
    for name in names {
        let tensor = format!("{name}.grad");
        let (want, got) = (cpu.read(&tensor)?, other.read(&tensor)?);
        let tolerance = match &exact {
            Some(exact) => distance(&want, &exact.read(&tensor)?).max(usual),
            None => usual,
        };
        let error = distance(&want, &got);
        let error = if error.is_nan() { f64::INFINITY } else { error };
        let found = Comparison { error, tolerance, tensor };
        if found.share() > worst.share() {
            worst = found;
        }
    }
    Ok(worst)
}

/// ‖a − b‖ / ‖a‖.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut a.iter().zip(b).map(|(&a, &b)| f64::from(a) - f64::from(b)));
    if apart == 0.0 { 0.0 } else { apart / norm(&mut a.iter().map(|&x| f64::from(x))) }
}

/// All losses, norms and final parameters of a run.
fn run_steps<D: Device>(
    config: &ModelConfig,
    precision: Precision,
    steps: usize,
    open: &impl Fn(usize) -> Result<D, DeviceError>,
) -> Result<Vec<u32>, TrainError> {
    let batches = [batch(config, 5), batch(config, 6)];
    run_batches(config, &options(precision), steps, &batches, open)
}

pub(crate) fn run_batches<D: Device>(
    config: &ModelConfig,
    options: &TrainOptions,
    steps: usize,
    batches: &[Batch],
    open: &impl Fn(usize) -> Result<D, DeviceError>,
) -> Result<Vec<u32>, TrainError> {
    let mut trainer = trainer(config, options.clone(), open)?;
    let mut bits = Vec::new();
    for _ in 0..steps {
        let report = trainer.step(batches, LEARNING_RATE)?;
        bits.extend([report.loss.to_bits(), report.gradient_norm.to_bits()]);
    }
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    for name in names {
        bits.extend(trainer.read(&name)?.into_iter().map(f32::to_bits));
    }
    Ok(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_agrees_with_itself() {
        let reports = verify_models(2, 2, CpuDevice::new, |_| {}).expect("it runs");
        // Five families in four precisions.
        assert_eq!(reports.len(), 20);
        for report in reports {
            assert!(report.passed() && report.gradient_error == 0.0, "{report:?}");
        }
    }
}
