//! `storm bench train`: training speed of a real model, random tokens; all in device memory, or
//! under a budget.

use crate::bench_planned::PlannedRun;
use crate::clocked::{Clocked, Launches};
use crate::op_times::OpTimes;
use crate::size;
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Instant;
use storm_device::cpu::{CpuDevice, CpuPlanDevice, CpuPlanOptions, probe_cpu};
use storm_device::cuda::{CudaDevice, CudaPlanDevice, CudaPlanOptions, MemoryInUse};
use storm_device::{Device, PlanDevice};
use storm_graph::{Accumulation, Program};
use storm_model::{ModelConfig, build, preset};
use storm_plan::{Budget, Forced, HardwareProfile};
use storm_train::{Batch, Precision, TrainOptions, Trainer};

#[derive(Args)]
pub(crate) struct TrainBenchArgs {
    /// Preset; see `storm model list`.
    #[arg(long, default_value = "qwen2.5-1.5b")]
    pub(crate) model: String,
    /// Sequences per micro-batch.
    #[arg(long, default_value_t = 16)]
    pub(crate) batch: usize,
    /// Micro-batches per step.
    #[arg(long, default_value_t = 8)]
    accumulate: usize,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 1024)]
    pub(crate) seq: usize,
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
    pub(crate) steps: u32,
    /// Steps before the clock starts.
    #[arg(long, default_value_t = 1)]
    pub(crate) warmup: u32,
    /// Fewer layers than the preset, to try a large model's layer on a small card.
    #[arg(long)]
    layers: Option<usize>,
    /// Train under a plan within this much device memory, everything included: `9GB`, `16GiB`.
    #[arg(long, value_parser = size::parse)]
    vram: Option<u64>,
    /// Pinned host memory that the plan may take.
    #[arg(long, value_parser = size::parse, default_value = "110GiB", requires = "vram")]
    ram: u64,
    /// Profile to plan with on a GPU; see `storm plan --help`. On the CPU it is measured.
    #[arg(long, default_value = "h200", requires = "vram")]
    hardware: String,
    /// Write what the queues did in the last step, for Perfetto or chrome://tracing.
    #[arg(long, requires = "vram")]
    pub(crate) trace: Option<PathBuf>,
    /// Write the same as a page for people: queues and memory over time, and what they add up to.
    #[arg(long, requires = "vram", value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
    /// One line of JSON instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
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
    if let Some(vram_bytes) = args.vram {
        return run_planned(args, &config, Budget { vram_bytes, ram_bytes: args.ram });
    }
    match args.device {
        DeviceArg::Cpu => bench(args, &config, CpuDevice::new, |_| Ok(None)),
        DeviceArg::Cuda => {
            let open = |bytes| CudaDevice::new(0, bytes);
            bench(args, &config, open, |device| Ok(Some(device.memory_in_use()?)))
        }
    }
}

impl TrainBenchArgs {
    fn options(&self) -> TrainOptions {
        let precision = match self.precision {
            PrecisionArg::F32 => Precision::F32,
            PrecisionArg::Bf16Master => Precision::Bf16Master,
            PrecisionArg::Bf16Stochastic => Precision::Bf16Stochastic,
        };
        TrainOptions {
            chunk_rows: self.chunk_rows,
            ..TrainOptions::new(self.batch, self.seq, precision)
        }
    }

    fn batches(&self, config: &ModelConfig) -> Vec<Batch> {
        (0..self.accumulate).map(|i| random_batch(self, config.vocab_size, i)).collect()
    }
}

fn run_planned(args: &TrainBenchArgs, config: &ModelConfig, budget: Budget) -> Result<()> {
    let profile = match args.device {
        DeviceArg::Cpu => probe_cpu(budget.vram_bytes)?,
        DeviceArg::Cuda => HardwareProfile::builtin(&args.hardware)?,
    };
    let run = PlannedRun {
        args,
        config,
        options: args.options(),
        profile,
        budget,
        forced: Forced::default(),
        batches: args.batches(config),
    };
    match args.device {
        DeviceArg::Cpu => {
            let options = CpuPlanOptions { trace: true, ..CpuPlanOptions::default() };
            run.run::<CpuPlanDevice>(
                options,
                |device| Ok(device.memory_taken().device_bytes as u64),
            )
        }
        DeviceArg::Cuda => {
            let trace = args.trace.is_some() || args.report.is_some();
            let options = CudaPlanOptions {
                trace,
                vram_bytes: Some(budget.vram_bytes),
                ..CudaPlanOptions::default()
            };
            run.run::<CudaPlanDevice>(options, |device| Ok(device.memory_in_use()?.bytes))
        }
    }
}

fn bench<D: Device>(
    args: &TrainBenchArgs,
    config: &ModelConfig,
    open: impl FnOnce(usize) -> Result<D, storm_device::DeviceError>,
    gpu_memory: impl FnOnce(&D) -> Result<Option<MemoryInUse>>,
) -> Result<()> {
    let options = args.options();
    let precision = options.precision;
    let program = build(config, &options.build_options())?;
    let flops = Flops::of_micro_batch(&program, precision)?;
    eprintln!("preparing {} …", args.model);
    let open = |bytes| open(bytes).map(Clocked::new);
    let mut trainer = Trainer::on_device(config, options, program, |_| {}, open)
        .with_context(|| format!("cannot train {}", args.model))?;
    let batches = args.batches(config);
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
    let tera = flops.all * args.accumulate as f64 / median / 1e12;
    let (memory, activations) = trainer.memory_bytes();
    let gpu_memory = gpu_memory(trainer.device().inner())?;
    let loss = report.map_or(f32::NAN, |report| report.loss);

    let before = trainer.device().launches();
    let times = OpTimes::measure(&mut trainer, &batches[0])?;
    let launches = trainer.device().launches().since(before);
    let gemm_seconds = times.of(|op| op.starts_with("Linear")).as_secs_f64();
    let gemm_tera = flops.linear / gemm_seconds / 1e12;
    // On the CPU, giving out an instruction is running it.
    let host = gpu_memory.map(|_| HostTime::of(launches, args.accumulate, median));
    if args.json {
        let line = serde_json::json!({
            "model": args.model,
            "tokens_per_second": tokens / median,
            "step_seconds": median,
            "step_seconds_min": fastest,
            "matrix_tflops": tera,
            "gemm_tflops": gemm_tera,
            "launch_seconds": host.map(|host| host.micro_batch_seconds),
            "launch_instructions": host.map(|host| host.instructions),
            "launch_share": host.map(|host| host.share),
            "block_bytes": memory,
            "activation_bytes": activations,
            "driver_bytes": gpu_memory.map(|memory| memory.bytes),
            "driver_bytes_counted": gpu_memory.map(|memory| memory.counted.to_string()),
            "loss": loss,
        });
        println!("{line}");
        return Ok(());
    }
    println!("{}: {} parameters, {precision:?}", args.model, config.parameter_count());
    println!("batch       {} × {} of {} tokens", args.batch, args.accumulate, args.seq);
    println!("step        {median:.3} s median of {}, {fastest:.3} s fastest", args.steps);
    println!("speed       {:.0} tokens/s, {tera:.0} TFLOP/s in matrix products", tokens / median);
    println!("products    {gemm_tera:.0} TFLOP/s of the linear layers alone");
    if let Some(host) = host {
        println!(
            "host        {:.2} ms to give out {} instructions of a micro-batch, {:.1} µs each, \
             {:.1}% of the step",
            host.micro_batch_seconds * 1e3,
            host.instructions,
            host.micro_batch_seconds / host.instructions.max(1) as f64 * 1e6,
            host.share * 100.0
        );
    }
    let show = |bytes: usize| size::show(bytes as u64);
    println!("memory      {} block, of it {} activations", show(memory), show(activations));
    if let Some(memory) = gpu_memory {
        println!("            {} {}", size::show(memory.bytes), memory.counted);
    }
    println!("loss        {loss:.4}");
    times.print();
    Ok(())
}

/// What the host takes to give out the work of a micro-batch, while the card runs it.
#[derive(Clone, Copy)]
struct HostTime {
    micro_batch_seconds: f64,
    instructions: u64,
    /// Of the step's time.
    share: f64,
}

impl HostTime {
    fn of(launches: Launches, accumulate: usize, step_seconds: f64) -> HostTime {
        let micro_batch_seconds = launches.time.as_secs_f64();
        HostTime {
            micro_batch_seconds,
            instructions: launches.instructions,
            share: micro_batch_seconds * accumulate as f64 / step_seconds,
        }
    }
}

/// Matrix arithmetic of one micro-batch, forward and backward.
struct Flops {
    all: f64,
    /// Of the linear layers alone.
    linear: f64,
}

impl Flops {
    fn of_micro_batch(program: &Program, precision: Precision) -> Result<Flops> {
        let program = program.differentiate(Accumulation::Continue, precision.gradients())?;
        let mut flops = Flops { all: 0.0, linear: 0.0 };
        for section in program.sections() {
            let times = if section.name == "layer" { program.layer_count as f64 } else { 1.0 };
            for node in section.graph.nodes() {
                let op = node.op.clone().map(|_, id| section.graph.tensor(id));
                let one = times * op.matrix_flops() as f64;
                flops.all += one;
                if op.name().starts_with("Linear") {
                    flops.linear += one;
                }
            }
        }
        Ok(flops)
    }
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
