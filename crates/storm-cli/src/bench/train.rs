//! `storm bench train`: training speed of a real model on random tokens, with everything in device
//! memory or under a budget.

use super::budgeted;
use super::clocked::{Clocked, Launches};
use super::op_times::OpTimes;
use super::run_args::{DeviceArg, RunArgs};
use crate::size;
use anyhow::{Context, Result};
use clap::Args;
use std::path::PathBuf;
use std::time::Instant;
use storm_device::Device;
use storm_device::cpu::{CpuDevice, CpuPlanDevice};
use storm_device::cuda::{CudaDevice, CudaPlanDevice, MemoryInUse};
use storm_graph::{Accumulation, Program};
use storm_model::{ModelConfig, build};
use storm_train::{Precision, ReferenceTrainer};

#[derive(Args)]
pub(crate) struct TrainBenchArgs {
    #[command(flatten)]
    pub(super) run: RunArgs,
    /// Train under a plan within this much device memory, including the CUDA context: `9GB`, `16GiB`. Default: no plan,
    /// everything stays in device memory.
    #[arg(long, value_parser = size::parse)]
    vram: Option<u64>,
    /// Write a trace of the queues in the last step, for ui.perfetto.dev or chrome://tracing.
    #[arg(long, requires = "vram")]
    pub(super) trace: Option<PathBuf>,
    /// Write an HTML report of the last step: queues and memory over time, and their totals.
    #[arg(long, requires = "vram", value_name = "FILE.html")]
    pub(super) report: Option<PathBuf>,
    /// Print one line of JSON instead of tables.
    #[arg(long)]
    pub(super) json: bool,
}

pub(super) fn run(args: &TrainBenchArgs) -> Result<()> {
    match (args.vram, args.run.device) {
        (Some(vram), DeviceArg::Cpu) => return budgeted::run::<CpuPlanDevice>(args, vram),
        (Some(vram), DeviceArg::Cuda) => return budgeted::run::<CudaPlanDevice>(args, vram),
        (None, _) => args.run.check_unplanned()?,
    }
    let config = args.run.config()?;
    match args.run.device {
        DeviceArg::Cpu => bench(args, &config, CpuDevice::new, |_| Ok(None)),
        DeviceArg::Cuda => {
            let open = |bytes| CudaDevice::new(0, bytes);
            bench(args, &config, open, |device| Ok(Some(device.memory_in_use()?)))
        }
    }
}

fn bench<D: Device>(
    args: &TrainBenchArgs,
    config: &ModelConfig,
    open: impl FnOnce(usize) -> Result<D, storm_device::DeviceError>,
    gpu_memory: impl FnOnce(&D) -> Result<Option<MemoryInUse>>,
) -> Result<()> {
    let options = args.run.options();
    let precision = options.precision;
    let program = build(config, &options.build_options())?;
    let flops = Flops::of_micro_batch(&program, precision)?;
    eprintln!("preparing {} …", args.run.model);
    let open = |bytes| open(bytes).map(Clocked::new);
    let mut trainer = ReferenceTrainer::on_device(config, options, program, |_| {}, open)
        .with_context(|| format!("cannot train {}", args.run.model))?;
    let batches = args.run.batches(config)?;
    eprintln!("{} warm-up steps, then {} …", args.run.warmup, args.run.steps);
    for _ in 0..args.run.warmup {
        trainer.step(&batches, 1e-5)?;
    }
    trainer.synchronize()?;
    let mut times: Vec<f64> = Vec::new();
    let mut report = None;
    for _ in 0..args.run.steps {
        let start = Instant::now();
        report = Some(trainer.step(&batches, 1e-5)?);
        trainer.synchronize()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let (median, fastest) = (times[times.len() / 2], times[0]);
    let tokens = args.run.tokens_per_step() as f64;
    let tera = flops.all * args.run.accumulate as f64 / median / 1e12;
    let (memory, activations) = trainer.memory_bytes();
    let gpu_memory = gpu_memory(trainer.device().inner())?;
    let loss = report.map_or(f32::NAN, |report| report.loss);

    let before = trainer.device().launches();
    let times = OpTimes::measure(&mut trainer, &batches[0])?;
    let launches = trainer.device().launches().since(before);
    let gemm_seconds = times.of(|op| op.starts_with("Linear")).as_secs_f64();
    let gemm_tera = flops.linear / gemm_seconds / 1e12;
    // On the CPU, issuing an instruction runs it.
    let host = gpu_memory.map(|_| HostTime::of(launches, args.run.accumulate, median));
    if args.json {
        let line = serde_json::json!({
            "model": args.run.model,
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
    println!("{}: {} parameters, {precision:?}", args.run.model, config.parameter_count());
    println!("batch       {} × {} of {} tokens", args.run.batch, args.run.accumulate, args.run.seq);
    println!("step        {median:.3} s median of {}, {fastest:.3} s fastest", args.run.steps);
    println!("speed       {:.0} tokens/s, {tera:.0} TFLOP/s in matrix products", tokens / median);
    println!("products    {gemm_tera:.0} TFLOP/s of the linear layers alone");
    if let Some(host) = host {
        println!(
            "host        {:.2} ms to issue {} instructions of a micro-batch, {:.1} µs each, \
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

/// Host time to issue the work of a micro-batch, while the card runs it.
#[derive(Clone, Copy)]
struct HostTime {
    micro_batch_seconds: f64,
    instructions: u64,
    /// As a share of the step's time.
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
        for (stage, s) in program.stages().iter().enumerate() {
            let (section, times) = (program.section(stage), s.repeat as f64);
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
