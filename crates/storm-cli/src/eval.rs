//! `storm eval`: how well a model predicts a dataset.

use crate::model_tokenizer::{OtherTokenizer, Weights};
use crate::precision::DtypeArg;
use crate::progress;
use crate::size::positive;
use crate::train::OverlongArg;
use crate::{lengths, model};
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use storm_data::{Dataset, Kind, LoaderOptions, Order, Passes, Split};
use storm_device::cpu::CpuDevice;
use storm_device::cuda::CudaDevice;
use storm_device::{Device, DeviceError};
use storm_model::{BuildOptions, Packing};
use storm_train::{Batch, BatchSource, Evaluation, LoaderSource};

#[derive(Args)]
pub(crate) struct EvalArgs {
    /// Hugging Face directory, such as the `model` of a run.
    model: PathBuf,
    /// Dataset that `storm data pack` wrote, such as the `data` of a run.
    #[arg(long)]
    data: PathBuf,
    /// Which part of it.
    #[arg(long, value_enum, default_value_t = SplitArg::HeldOut)]
    split: SplitArg,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 1024, value_parser = positive)]
    seq: usize,
    /// What becomes of samples that are longer than that.
    #[arg(long, value_enum, default_value_t = OverlongArg::Drop)]
    overlong: OverlongArg,
    /// Sequences at a time.
    #[arg(long, default_value_t = 4, value_parser = positive)]
    batch: usize,
    /// Batches to look at; all of the part if not given.
    #[arg(long, value_parser = positive)]
    batches: Option<usize>,
    /// Where to compute. The whole model must fit.
    #[arg(long, value_enum, default_value_t = DeviceArg::Cpu)]
    device: DeviceArg,
    /// Arithmetic.
    #[arg(long, value_enum, default_value_t = DtypeArg::F32)]
    dtype: DtypeArg,
    /// Evaluate on data that another tokenizer made than the one in the model's directory.
    #[arg(long)]
    other_tokenizer: bool,
    /// One object of JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum SplitArg {
    /// What training does not see.
    HeldOut,
    /// What it learns from.
    Training,
}

#[derive(Clone, Copy, ValueEnum)]
enum DeviceArg {
    Cpu,
    Cuda,
}

pub(crate) fn run(args: &EvalArgs) -> Result<()> {
    match args.device {
        DeviceArg::Cpu => evaluate(args, CpuDevice::new),
        DeviceArg::Cuda => evaluate(args, |bytes| CudaDevice::new(0, bytes)),
    }
}

fn evaluate<D: Device>(
    args: &EvalArgs,
    open: impl FnOnce(usize) -> Result<D, DeviceError>,
) -> Result<()> {
    let directory = model::open(&args.model)?;
    let dataset = Arc::new(Dataset::open(&args.data)?);
    let weights = Weights { directory: &args.model, vocabulary: directory.model().vocab_size };
    weights.check_dataset(&dataset, OtherTokenizer::of_switch(args.other_tokenizer))?;
    let packing = match dataset.manifest().kind {
        Kind::Text => Packing::Single,
        Kind::Samples => Packing::Segments,
    };
    let dtype = args.dtype.into();
    let split = match args.split {
        SplitArg::HeldOut => Split::Held,
        SplitArg::Training => Split::Train,
    };
    let options = LoaderOptions {
        batch: args.batch,
        sequence: args.seq,
        seed: 0,
        split,
        order: Order::Sequential,
        passes: Passes::One,
        overlong: args.overlong.into(),
    };
    let mut source = LoaderSource::new(dataset, options)?;
    lengths::check(source.loader(), split, args.overlong, directory.model().max_positions)?;
    let batches = source.loader().rows_per_epoch().div_ceil(args.batch as u64);
    let batches = batches.min(args.batches.unwrap_or(usize::MAX) as u64);
    let build = BuildOptions { packing, ..BuildOptions::training(args.batch, args.seq, dtype) };
    progress::show("loading the model");
    let begun = Instant::now();
    let mut evaluation = Evaluation::load(directory.model(), &build, &directory, open)?;
    let mut batch = Batch::new(Vec::new(), Vec::new(), args.seq);
    for number in 0..batches {
        progress::show(&format!("batch {} of {batches}", number + 1));
        if source.next_batch(&mut batch)? == 0 {
            break;
        }
        evaluation.add(&batch)?;
    }
    progress::show("");
    let loss = evaluation.loss().context("the data has no token to predict")?;
    let seconds = begun.elapsed().as_secs_f64();
    let (targets, perplexity) = (evaluation.targets(), loss.exp());
    if args.json {
        let object = serde_json::json!({
            "loss": loss,
            "perplexity": perplexity,
            "tokens": targets,
            "split": split.name(),
            "seconds": seconds,
        });
        println!("{object}");
        return Ok(());
    }
    println!("loss        {loss:.4} a token, of {targets} {} tokens", split.name());
    println!("perplexity  {perplexity:.2}");
    println!("time        {seconds:.1} s, {:.0} tokens/s", targets as f64 / seconds);
    Ok(())
}
