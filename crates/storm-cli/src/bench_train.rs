//! `storm bench train`: training speed of a real model, all in device memory, random tokens.

use crate::size;
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use storm_device::Device;
use storm_device::cpu::CpuDevice;
use storm_device::cuda::CudaDevice;
use storm_graph::{Accumulation, Program};
use storm_model::{ModelConfig, build, preset};
use storm_train::{Batch, Precision, TrainOptions, Trainer};

#[derive(Args)]
pub(crate) struct TrainBenchArgs {
    /// Preset; see `storm model list`.
    #[arg(long, default_value = "qwen2.5-1.5b")]
    model: String,
    /// Sequences per micro-batch.
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Micro-batches per step.
    #[arg(long, default_value_t = 8)]
    accumulate: usize,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 1024)]
    seq: usize,
    /// Where to train.
    #[arg(long, value_enum, default_value_t = DeviceArg::Cuda)]
    device: DeviceArg,
    /// Storage of parameters, gradients and optimizer state.
    #[arg(long, value_enum, default_value_t = PrecisionArg::Bf16Stochastic)]
    precision: PrecisionArg,
    /// Rows of logits that exist at a time.
    #[arg(long, default_value_t = 2048)]
    chunk_rows: usize,
    /// Steps to time.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Steps before the clock starts.
    #[arg(long, default_value_t = 1)]
    warmup: u32,
    /// Fewer layers than the preset, to try a large model's layer on a small card.
    #[arg(long)]
    layers: Option<usize>,
    /// One line of JSON instead of tables.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum DeviceArg {
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, ValueEnum)]
enum PrecisionArg {
    F32,
    Bf16Master,
    Bf16Stochastic,
}

pub(crate) fn run(args: &TrainBenchArgs) -> Result<()> {
    let mut config = preset(&args.model)?;
    if let Some(layers) = args.layers {
        config.layer_count = layers;
    }
    match args.device {
        DeviceArg::Cpu => bench(args, &config, CpuDevice::new, |_| Ok(None)),
        DeviceArg::Cuda => {
            let open = |bytes| CudaDevice::new(0, bytes);
            bench(args, &config, open, |device| Ok(Some(device.memory_taken_bytes()?)))
        }
    }
}

fn bench<D: Device>(
    args: &TrainBenchArgs,
    config: &ModelConfig,
    open: impl FnOnce(usize) -> Result<D, storm_device::DeviceError>,
    taken: impl FnOnce(&D) -> Result<Option<usize>>,
) -> Result<()> {
    let precision = match args.precision {
        PrecisionArg::F32 => Precision::F32,
        PrecisionArg::Bf16Master => Precision::Bf16Master,
        PrecisionArg::Bf16Stochastic => Precision::Bf16Stochastic,
    };
    let options = TrainOptions {
        chunk_rows: args.chunk_rows,
        ..TrainOptions::new(args.batch, args.seq, precision)
    };
    let program = build(config, &options.build_options())?;
    let flops = step_flops(&program, precision)?;
    eprintln!("preparing {} …", args.model);
    let mut trainer = Trainer::on_device(config, options, program, |_| {}, open)
        .with_context(|| format!("cannot train {}", args.model))?;
    let batches: Vec<Batch> =
        (0..args.accumulate).map(|i| random_batch(args, config.vocab_size, i)).collect();
    eprintln!("{} warm-up steps, then {} …", args.warmup, args.steps);
    for _ in 0..args.warmup {
        trainer.step(&batches, 1e-5)?;
    }
    trainer.synchronize()?;
    let mut times: Vec<f64> = Vec::new();
    let mut report = None;
    for _ in 0..args.steps {
        let start = Instant::now();
        report = Some(trainer.step(&batches, 1e-5)?);
        trainer.synchronize()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let (median, fastest) = (times[times.len() / 2], times[0]);
    let tokens = (args.batch * args.seq * args.accumulate) as f64;
    let tera = flops as f64 * args.accumulate as f64 / median / 1e12;
    let (memory, activations) = trainer.memory_bytes();
    let taken = taken(trainer.device())?;
    let loss = report.map_or(f32::NAN, |report| report.loss);
    if args.json {
        let line = serde_json::json!({
            "model": args.model,
            "tokens_per_second": tokens / median,
            "step_seconds": median,
            "step_seconds_min": fastest,
            "matrix_tflops": tera,
            "block_bytes": memory,
            "activation_bytes": activations,
            "driver_bytes": taken,
            "loss": loss,
        });
        println!("{line}");
        return Ok(());
    }
    println!("{}: {} parameters, {precision:?}", args.model, config.parameter_count());
    println!("batch       {} × {} of {} tokens", args.batch, args.accumulate, args.seq);
    println!("step        {median:.3} s median of {}, {fastest:.3} s fastest", args.steps);
    println!("speed       {:.0} tokens/s, {tera:.0} TFLOP/s in matrix products", tokens / median);
    let show = |bytes: usize| size::show(bytes as u64);
    println!("memory      {} block, of it {} activations", show(memory), show(activations));
    if let Some(taken) = taken {
        println!(
            "            {} taken on the GPU beside the context, as the driver sees it",
            show(taken)
        );
    }
    println!("loss        {loss:.4}");
    profile(&mut trainer, &batches[0])
}

/// Matrix arithmetic of one micro-batch, forward and backward.
fn step_flops(program: &Program, precision: Precision) -> Result<u128> {
    let program = program.differentiate(Accumulation::Continue, precision.gradients())?;
    let mut flops = 0;
    for section in program.sections() {
        let graph = &section.graph;
        let one: u128 = graph
            .nodes()
            .iter()
            .map(|node| node.op.clone().map(|_, id| graph.tensor(id)).matrix_flops())
            .sum();
        let times = if section.name == "layer" { program.layer_count as u128 } else { 1 };
        flops += one * times;
    }
    Ok(flops)
}

fn random_batch(args: &TrainBenchArgs, vocabulary: usize, index: usize) -> Batch {
    let mut state = 0x2545_f491_4f6c_dd1d_u64 ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut token = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % vocabulary as u64) as i32
    };
    let rows = args.batch * args.seq;
    let tokens = (0..rows).map(|_| token()).collect();
    let targets = (0..rows).map(|_| token()).collect();
    Batch::new(tokens, targets, args.seq)
}

/// Time per op over forward and backward of one micro-batch, each op waited for.
pub(crate) fn profile<D: Device>(trainer: &mut Trainer<D>, batch: &Batch) -> Result<()> {
    let mut totals: BTreeMap<&'static str, (Duration, u32)> = BTreeMap::new();
    let mut running: Option<(&'static str, Instant)> = None;
    trainer.profile(batch, |next| {
        let now = Instant::now();
        if let Some((op, start)) = running.take() {
            let total = totals.entry(op).or_default();
            total.0 += now - start;
            total.1 += 1;
        }
        running = next.map(|op| (op, now));
    })?;
    let mut rows: Vec<_> = totals.into_iter().collect();
    rows.sort_by_key(|&(_, (time, _))| std::cmp::Reverse(time));
    let whole: Duration = rows.iter().map(|&(_, (time, _))| time).sum();
    println!("\n{:<18} {:>6} {:>10} {:>7}", "op", "calls", "ms", "share");
    for (op, (time, calls)) in rows {
        let share = 100.0 * time.as_secs_f64() / whole.as_secs_f64();
        println!("{op:<18} {calls:>6} {:>10.2} {share:>6.1}%", time.as_secs_f64() * 1e3);
    }
    Ok(())
}
