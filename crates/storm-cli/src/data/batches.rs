//! `storm data batches`: what training sees, as a file.

use crate::train::OverlongArg;
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;
use std::sync::Arc;
use storm_data::{Dataset, Loader, LoaderOptions, write_batches};

#[derive(Args)]
#[command(after_long_help = "\
The file is in safetensors format and holds `tokens` and `targets`, and `segments` for samples: i32 tensors of shape
(count, batch, seq). Targets of -100 are masked. `storm train` with the same data, seq, batch, overlong and seed reads
the same batches in the same order, `accumulate` of them per step.")]
pub(crate) struct BatchesArgs {
    /// Directory that `storm data pack` wrote.
    dir: PathBuf,
    /// Tokens per sequence.
    #[arg(long)]
    seq: usize,
    /// What to do with samples longer than --seq, as in `storm train`.
    #[arg(long, value_enum, default_value_t = OverlongArg::Drop)]
    overlong: OverlongArg,
    /// Sequences per batch.
    #[arg(long)]
    batch: usize,
    /// Seed of the data order, as in `storm train`.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Number of batches to write.
    #[arg(long)]
    count: u64,
    /// File to write; an existing one is replaced.
    #[arg(long, value_name = "FILE.safetensors")]
    out: PathBuf,
    /// Print JSON: the file, and the rows and samples of an epoch.
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
