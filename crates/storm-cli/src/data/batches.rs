//! `storm data batches`: what training sees, as a file.

use crate::train::OverlongArg;
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;
use std::sync::Arc;
use storm_data::{Dataset, Loader, LoaderOptions, write_batches};

#[derive(Args)]
#[command(after_long_help = "\
The file is in the safetensors format: `tokens` and `targets`, and `segments` for samples, each of i32 and the
shape (count, batch, seq). A target of -100 does not count. `storm train` with the same data, seq, batch and seed
takes these batches one after another, and with accumulate several to a step.")]
pub(crate) struct BatchesArgs {
    /// Directory that `storm data pack` wrote.
    dir: PathBuf,
    /// Tokens per sequence.
    #[arg(long)]
    seq: usize,
    /// What becomes of samples that are longer than that, as `storm train` is given it.
    #[arg(long, value_enum, default_value_t = OverlongArg::Drop)]
    overlong: OverlongArg,
    /// Sequences per batch.
    #[arg(long)]
    batch: usize,
    /// Of the order, as `storm train` is given it.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Batches to write.
    #[arg(long)]
    count: u64,
    /// File to write; one that is there is replaced.
    #[arg(long, value_name = "FILE.safetensors")]
    out: PathBuf,
    /// Print JSON: the file, and the rows and tokens of an epoch.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &BatchesArgs) -> Result<()> {
    let dataset = Arc::new(Dataset::open(&args.dir)?);
    let overlong = args.overlong.into();
    let options =
        LoaderOptions { overlong, ..LoaderOptions::training(args.batch, args.seq, args.seed) };
    write_batches(&dataset, options, args.count, &args.out)?;
    if args.json {
        let report = Loader::new(dataset, options)?.report();
        let object = serde_json::json!({
            "out": args.out.display().to_string(),
            "batches": args.count,
            "rows_per_epoch": report.rows,
            "samples_per_epoch": report.samples,
            "overlong_samples": report.overlong_samples,
            "dropped_samples": report.dropped_samples,
        });
        println!("{object}");
    }
    Ok(())
}
