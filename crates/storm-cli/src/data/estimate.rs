//! `storm data estimate`: how fast records can be read here, and what that takes.

use crate::model::grouped;
use crate::{hardware, size};
use anyhow::Result;
use clap::{Args, ValueEnum};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use storm_data::records::{
    Codec, Order, RecordDemand, RecordEstimate, RecordInput, RecordLoaderOptions,
    RecordPackOptions, RecordRates, RecordSet, Synthetic, estimate_records, pack_records,
};
use storm_data::{DataError, IfExists, Split};
use storm_plan::Link;

/// Bytes of made-up records that are written to measure the disk.
const TRIAL_BYTES: u64 = 64 << 20;

#[derive(Args)]
#[command(after_long_help = "\
Reads parts of the dataset for a second to see how fast that goes. Without a dataset, 64 MiB of made-up records are
written to --at, read, and removed.

Example: storm data estimate --records 5000000 --shape 32,32,3 --data-ram 2GiB --rate 50000 --hardware rtx-4090")]
pub(crate) struct EstimateArgs {
    /// Directory of records that `storm data pack` wrote.
    #[arg(required_unless_present = "records")]
    dir: Option<PathBuf>,
    /// Records of an epoch; those of the dataset if not given.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 48))]
    records: Option<u64>,
    /// The shape of a record of bytes.
    #[arg(long, value_delimiter = ',', default_value = "32,32,3", conflicts_with = "dir")]
    shape: Vec<usize>,
    /// Where made-up records are written.
    #[arg(long, default_value = ".", value_name = "DIR", conflicts_with = "dir")]
    at: PathBuf,
    /// Records in a batch.
    #[arg(long, default_value_t = 256)]
    batch: usize,
    /// Memory for the data.
    #[arg(long, default_value = "1GiB", value_parser = size::parse)]
    data_ram: u64,
    /// The order of records.
    #[arg(long, value_enum, default_value_t = OrderArg::Window)]
    order: OrderArg,
    /// Threads that read; the number of processors if not given.
    #[arg(long)]
    workers: Option<usize>,
    /// Records per second that the model takes.
    #[arg(long, value_parser = rate)]
    rate: Option<f64>,
    #[arg(long, value_name = "NAME|FILE", help = hardware::help())]
    hardware: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum OrderArg {
    Window,
    Global,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && rate < 1e15 => Ok(rate),
        _ => Err("must be a number above 0".to_owned()),
    }
}

pub(crate) fn run(args: &EstimateArgs) -> Result<()> {
    let profile = hardware::named_or_found(args.hardware.as_deref())?;
    // Gone when this ends.
    let trial = match &args.dir {
        Some(_) => None,
        None => Some(trial(args)?),
    };
    let dir = match (&args.dir, &trial) {
        (Some(dir), _) => dir.clone(),
        (None, Some(trial)) => trial.path().join("trial"),
        (None, None) => args.at.clone(),
    };
    let set = RecordSet::open(&dir)?;
    let options = RecordLoaderOptions {
        order: match args.order {
            OrderArg::Window => Order::Window,
            OrderArg::Global => Order::Global,
        },
        workers: args.workers.unwrap_or_else(|| available_parallelism().map_or(1, Into::into)),
        ..RecordLoaderOptions::training(args.batch, 0, args.data_ram)
    };
    options.check()?;
    let demand = RecordDemand {
        records: args.records.unwrap_or_else(|| set.records(Split::Train)),
        rate: args.rate,
        bus_bytes_per_second: Some(profile.link(Link::HOST_TO_DEVICE).bandwidth),
    };
    let rates = RecordRates::measure(&set, &options)?;
    let estimate = estimate_records(&set, &options, &rates, &demand)?;
    let path = set.reading_path().to_string();
    match args.json {
        true => println!("{:#}", object(&estimate, &rates, &demand, &profile.name, &path)),
        false => print(&estimate, &rates, &demand, &profile.name, &path),
    }
    Ok(())
}

/// Some made-up records.
fn trial(args: &EstimateArgs) -> Result<tempfile::TempDir> {
    let folder = tempfile::Builder::new()
        .prefix(".storm-trial-")
        .tempdir_in(&args.at)
        .map_err(|source| DataError::Io { path: args.at.clone(), source })?;
    let record = args.shape.iter().try_fold(1u64, |bytes, &side| bytes.checked_mul(side as u64));
    let count = (TRIAL_BYTES / record.unwrap_or(0).max(1)).clamp(1, args.records.unwrap_or(1));
    let synthetic = Synthetic { count, shape: args.shape.clone(), classes: 10 };
    pack(folder.path(), synthetic)?;
    Ok(folder)
}

fn pack(folder: &Path, synthetic: Synthetic) -> Result<(), DataError> {
    let options = RecordPackOptions {
        input: RecordInput::Synthetic(synthetic),
        out: folder.join("trial"),
        if_exists: IfExists::Refuse,
        codec: Codec::None,
        held_out: 0.0,
        skip_bad: false,
        size: None,
    };
    pack_records(&options, &|_| {}).map(drop)
}

fn object(
    estimate: &RecordEstimate,
    rates: &RecordRates,
    demand: &RecordDemand,
    hardware: &str,
    reading_path: &str,
) -> serde_json::Value {
    let stage = |stage: &storm_data::records::RecordStage| json!({"name": stage.name, "records_per_second": stage.rate});
    json!({
        "records": demand.records,
        "disk_bytes": estimate.disk_bytes,
        "block_bytes": estimate.block_bytes,
        "ahead_bytes": estimate.ahead_bytes,
        "device_bytes": estimate.device_bytes,
        "resident": estimate.is_resident,
        "sequential_bytes_per_second": rates.sequential_bytes_per_second,
        "random_reads_per_second": rates.random_reads_per_second,
        "reading_path": reading_path,
        "hardware": hardware,
        "stages": estimate.stages.iter().map(stage).collect::<Vec<_>>(),
        "epoch_seconds": estimate.epoch_seconds,
        "advice": estimate.advice,
    })
}

fn print(
    estimate: &RecordEstimate,
    rates: &RecordRates,
    demand: &RecordDemand,
    hardware: &str,
    reading_path: &str,
) {
    let line = |name: &str, value: String| println!("  {name:<22}{value}");
    println!("{} records", grouped(demand.records));
    line("on disk", size::show(estimate.disk_bytes));
    let whole = if estimate.is_resident { ": all of it" } else { "" };
    line("blocks in memory", format!("{}{whole}", size::show(estimate.block_bytes)));
    line("batches ahead", size::show(estimate.ahead_bytes));
    line("on the device", format!("{}, two batches", size::show(estimate.device_bytes)));
    let long = size::show(rates.sequential_bytes_per_second as u64);
    let short = grouped(rates.random_reads_per_second as u64);
    line(
        "measured",
        format!("{long}/s in long reads, {short} short reads a second ({reading_path})"),
    );
    for (number, stage) in estimate.stages.iter().enumerate() {
        let slowest = if number == 0 { ", the slowest" } else { "" };
        let of =
            if stage.name.contains("device") { format!(" ({hardware})") } else { String::new() };
        line(stage.name, format!("{} records/s{of}{slowest}", grouped(stage.rate as u64)));
    }
    line("an epoch", format!("{:.1} s", estimate.epoch_seconds));
    for advice in &estimate.advice {
        line("to be faster", advice.clone());
    }
}
