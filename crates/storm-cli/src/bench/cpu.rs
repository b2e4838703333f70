//! `storm bench cpu`: a small GPT on the CPU, with everything resident and under a budget.

use super::op_times::OpTimes;
use crate::cpu_products::CpuProductsArg;
use crate::precision::PrecisionArg;
use crate::size;
use crate::train::DeviceKind;
use anyhow::{Context, Result, ensure};
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use std::time::Instant;
use storm_device::cpu::{Bf16Products, CpuDevice, CpuPlanDevice, CpuPlanOptions, probe_cpu};
use storm_model::{ModelConfig, build, preset};
use storm_plan::{Budget, Forced, Tier, plan};
use storm_train::{Batch, ReferenceTrainer, TrainOptions, Trainer, training_task};

#[derive(Args)]
pub(crate) struct CpuArgs {
    /// Number of steps to time.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Untimed steps before them.
    #[arg(long, default_value_t = 3)]
    warmup: u32,
    /// Threads, at most 1024. Default: all cores.
    #[arg(long, value_parser = size::threads)]
    threads: Option<usize>,
    /// Number formats of parameters, gradients, optimizer state and matrix products.
    #[arg(long, value_enum, default_value_t = PrecisionArg::F32)]
    precision: PrecisionArg,
    /// How bf16 products are summed.
    #[arg(long, value_enum, default_value_t = CpuProductsArg::Fma)]
    cpu_products: CpuProductsArg,
    /// Also train in this fraction of the device memory that training takes with everything resident, such as 0.25, and
    /// compare speed and losses.
    #[arg(long, value_name = "SHARE")]
    budget: Option<f64>,
    /// Print one line of JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Also show how much of the forward and backward pass each op takes.
    #[arg(long)]
    profile: bool,
}

pub(super) fn run(args: &CpuArgs) -> Result<()> {
    args.cpu_products.check(DeviceKind::Cpu, args.precision)?;
    if let Some(warning) = args.cpu_products.warning() {
        eprintln!("{warning}");
    }
    let mut pool = rayon::ThreadPoolBuilder::new();
    if let Some(threads) = args.threads {
        pool = pool.num_threads(threads);
    }
    let pool = pool.build().context("cannot start the threads")?;
    // Runs everything inside the pool, so that kernels do not enter it one by one.
    pool.install(|| cpu(args))
}

const BATCH: usize = 8;
const SEQUENCE: usize = 256;

fn small_gpt() -> Result<ModelConfig> {
    let mut config = preset("gpt2")?;
    config.vocab_size = 256;
    config.hidden_size = 384;
    config.intermediate_size = 4 * 384;
    config.layer_count = 6;
    config.query_heads = 6;
    config.kv_heads = 6;
    config.head_dim = 64;
    config.max_positions = SEQUENCE;
    Ok(config)
}

fn cpu(args: &CpuArgs) -> Result<()> {
    let config = small_gpt()?;
    let options = TrainOptions::new(BATCH, SEQUENCE, args.precision.into());
    let products = args.cpu_products.into();
    let open = |bytes| CpuDevice::with_products(bytes, products);
    let program = build(&config, &options.build_options())?;
    let mut trainer = ReferenceTrainer::on_device(&config, options.clone(), program, |_| {}, open)?;
    let batches = [random_batch(config.vocab_size)];
    let (memory, activations) = trainer.memory_bytes();
    let mut budgeted = match args.budget {
        None => None,
        Some(share) => Some(budgeted_trainer(&config, options, products, memory, share)?),
    };
    for _ in 0..args.warmup {
        trainer.step(&batches, 1e-4)?;
        if let Some((budgeted, _)) = &mut budgeted {
            budgeted.step(&batches, 1e-4)?;
        }
    }
    let (mut times, mut budgeted_times): (Vec<f64>, Vec<f64>) = (Vec::new(), Vec::new());
    let mut loss = 0.0;
    // Alternates, so that changes in the machine's speed affect both alike.
    for _ in 0..args.steps {
        let start = Instant::now();
        loss = trainer.step(&batches, 1e-4)?.loss;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        if let Some((budgeted, _)) = &mut budgeted {
            let start = Instant::now();
            let same = budgeted.step(&batches, 1e-4)?.loss;
            budgeted.synchronize()?;
            budgeted_times.push(start.elapsed().as_secs_f64() * 1e3);
            ensure!(
                same.to_bits() == loss.to_bits(),
                "under the budget the loss is {same}, not {loss}"
            );
        }
    }
    times.sort_by(f64::total_cmp);
    budgeted_times.sort_by(f64::total_cmp);
    let (median, fastest) = (times[times.len() / 2], times[0]);
    let tokens_per_second = (BATCH * SEQUENCE) as f64 / (median / 1e3);
    let threads = rayon::current_num_threads();
    let budgeted = budgeted.map(|(_, bytes)| (bytes, budgeted_times[budgeted_times.len() / 2]));
    if args.json {
        let line = serde_json::json!({
            "tokens_per_second": tokens_per_second,
            "step_ms": median,
            "step_ms_min": fastest,
            "threads": threads,
            "precision": args.precision,
            "cpu_products": args.cpu_products,
            "memory_bytes": memory,
            "budget_bytes": budgeted.map(|(bytes, _)| bytes),
            "budget_step_ms": budgeted.map(|(_, median)| median),
            "loss": loss,
        });
        println!("{line}");
    } else {
        let name = |value: Option<PossibleValue>| {
            value.map_or_else(String::new, |v| v.get_name().to_owned())
        };
        println!(
            "model       {} parameters, {}, {} products",
            config.parameter_count(),
            name(args.precision.to_possible_value()),
            name(args.cpu_products.to_possible_value()),
        );
        println!("batch       {BATCH} × {SEQUENCE} tokens, {threads} threads");
        println!("step        {median:.1} ms median of {}, {fastest:.1} ms fastest", args.steps);
        println!("speed       {tokens_per_second:.0} tokens/s");
        let show = |bytes: usize| size::show(bytes as u64);
        println!("memory      {}, of it activations {}", show(memory), show(activations));
        if let Some((bytes, under_budget)) = budgeted {
            println!(
                "budget      {}: {under_budget:.1} ms median, {:.2} of the speed, same losses",
                show(bytes),
                median / under_budget
            );
        }
    }
    if args.profile {
        OpTimes::measure(&mut trainer, &batches[0])?.print();
    }
    Ok(())
}

/// A trainer with a share of the memory, and the device memory that it takes.
fn budgeted_trainer(
    config: &ModelConfig,
    options: TrainOptions,
    products: Bf16Products,
    resident_bytes: usize,
    share: f64,
) -> Result<(Trainer<CpuPlanDevice>, usize)> {
    ensure!(share > 0.0 && share.is_finite(), "--budget must be positive, such as 0.25");
    let vram_bytes = (resident_bytes as f64 * share) as u64;
    let budget = Budget::new(vram_bytes, 8 * resident_bytes as u64);
    let task = training_task(config, &options, 1)?;
    let profile = probe_cpu(vram_bytes, None, products)?;
    let planned = plan(&task, &profile, budget, &Forced::default())?;
    let device = CpuPlanOptions { products, ..CpuPlanOptions::default() };
    let trainer = Trainer::new(config, options, planned.plan.into(), device)?;
    let bytes = trainer.memory_taken()[Tier::DEVICE];
    Ok((trainer, bytes))
}

/// Random tokens from a fixed seed.
fn random_batch(vocabulary: usize) -> Batch {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut token = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % vocabulary as u64) as i32
    };
    let tokens = (0..BATCH * SEQUENCE).map(|_| token()).collect();
    let targets = (0..BATCH * SEQUENCE).map(|_| token()).collect();
    Batch::new(tokens, targets, SEQUENCE)
}
