//! `storm bench`: training speed, measured.

use crate::bench_attention::{self, AttentionBenchArgs};
use crate::bench_train::{self, TrainBenchArgs};
use crate::op_times::OpTimes;
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use std::time::Instant;
use storm_model::{ModelConfig, preset};
use storm_train::{Batch, Precision, TrainOptions, Trainer};

#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// A 10M-parameter GPT on the CPU: 6 layers, 384 wide, context 256, batch 8, f32.
    Cpu(CpuArgs),
    /// A real model with everything in device memory, random tokens.
    Train(TrainBenchArgs),
    /// One attention op, forward and backward, on a GPU.
    Attention(AttentionBenchArgs),
}

#[derive(Args)]
pub(crate) struct CpuArgs {
    /// Steps to time.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Steps before the clock starts.
    #[arg(long, default_value_t = 3)]
    warmup: u32,
    /// Threads; all cores unless given.
    #[arg(long)]
    threads: Option<usize>,
    /// One line of JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Also show how much of forward and backward each op takes.
    #[arg(long)]
    profile: bool,
}

pub(crate) fn run(command: &BenchCommand) -> Result<()> {
    let args = match command {
        BenchCommand::Cpu(args) => args,
        BenchCommand::Train(args) => return bench_train::run(args),
        BenchCommand::Attention(args) => return bench_attention::run(args),
    };
    let mut pool = rayon::ThreadPoolBuilder::new();
    if let Some(threads) = args.threads {
        pool = pool.num_threads(threads);
    }
    let pool = pool.build().context("cannot start the threads")?;
    // The whole run is inside the pool, so that kernels do not cross into it one by one.
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
    let mut trainer = Trainer::new(&config, TrainOptions::new(BATCH, SEQUENCE, Precision::F32))?;
    let batches = [random_batch(config.vocab_size)];
    for _ in 0..args.warmup {
        trainer.step(&batches, 1e-4)?;
    }
    let mut times: Vec<f64> = Vec::new();
    let mut loss = 0.0;
    for _ in 0..args.steps {
        let start = Instant::now();
        loss = trainer.step(&batches, 1e-4)?.loss;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    let (median, fastest) = (times[times.len() / 2], times[0]);
    let tokens_per_second = (BATCH * SEQUENCE) as f64 / (median / 1e3);
    let threads = rayon::current_num_threads();
    let (memory, activations) = trainer.memory_bytes();
    if args.json {
        let line = serde_json::json!({
            "tokens_per_second": tokens_per_second,
            "step_ms": median,
            "step_ms_min": fastest,
            "threads": threads,
            "memory_bytes": memory,
            "loss": loss,
        });
        println!("{line}");
    } else {
        println!("model       {} parameters, f32", config.parameter_count());
        println!("batch       {BATCH} × {SEQUENCE} tokens, {threads} threads");
        println!("step        {median:.1} ms median of {}, {fastest:.1} ms fastest", args.steps);
        println!("speed       {tokens_per_second:.0} tokens/s");
        let show = |bytes: usize| crate::size::show(bytes as u64);
        println!("memory      {}, of it activations {}", show(memory), show(activations));
    }
    if args.profile {
        OpTimes::measure(&mut trainer, &batches[0])?.print();
    }
    Ok(())
}

/// Seeded tokens, the same every time.
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
