//! `storm data estimate`: how fast records or text can be read here, and what that takes.

use super::disk_rates::Trial;
use super::model_rate;
use crate::model::grouped;
use crate::streams::duration;
use crate::train::loader_threads;
use crate::{UsageError, hardware, size};
use anyhow::Result;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use storm_data::records::{
    Codec, Estimator, Order, RecordDemand, RecordEstimate, RecordLoaderOptions, RecordRates,
    RecordSet, RecordStage,
};
use storm_data::{Dataset, LoaderOptions, estimator_of_text};
use storm_plan::{DiskProfile, Link};

#[derive(Args)]
#[command(after_long_help = "\
Reads parts of the dataset for about two seconds to measure how fast that is; compressed datasets may take longer.
Without a dataset, the disk figures of the hardware profile are used, if `storm probe` measured them; otherwise up to
64 MiB of synthetic records are written to --at, read, and removed.

Example: storm data estimate --records 5000000 --shape 32,32,3 --data-ram 2GiB --rate 50000 --hardware rtx-4090
Example: storm data estimate books --seq 1024 --batch 8 --model gpt2")]
pub(crate) struct EstimateArgs {
    /// Directory of a dataset that `storm data pack` wrote.
    #[arg(required_unless_present = "records")]
    dir: Option<PathBuf>,
    /// Records per epoch. Default: those of the dataset.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 48))]
    records: Option<u64>,
    /// Shape of a record, in bytes: height, width, channels.
    #[arg(long, value_delimiter = ',', default_value = "32,32,3", conflicts_with = "dir")]
    shape: Vec<usize>,
    /// Directory to write the synthetic records to. If given, its disk is measured even if the profile has figures.
    #[arg(long, value_name = "DIR", conflicts_with = "dir")]
    at: Option<PathBuf>,
    /// Records or rows of text per batch. Default: 256 records, or 8 rows of text.
    #[arg(long, value_parser = size::positive)]
    batch: Option<usize>,
    /// Tokens per row of text.
    #[arg(long, default_value_t = 1024, value_parser = size::positive)]
    seq: usize,
    /// Host memory for data read ahead from disk.
    #[arg(long, default_value = "1GiB", value_parser = size::parse)]
    data_ram: u64,
    /// Order of records or rows. Default: `window` for records, `global` for text.
    #[arg(long, value_enum)]
    order: Option<OrderArg>,
    /// Threads that read. Default: as many as `storm train` uses.
    #[arg(long)]
    workers: Option<usize>,
    /// Records or tokens per second that the model trains on.
    #[arg(long, value_parser = rate, conflicts_with = "model")]
    rate: Option<f64>,
    /// Model whose speed to predict, instead of --rate: small-cnn, resnet-9, resnet-18, or the directory of an image
    /// classifier; for text, a preset such as gpt2, or its directory. A step of it is planned for the hardware.
    #[arg(long)]
    model: Option<String>,
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

impl From<OrderArg> for Order {
    fn from(order: OrderArg) -> Order {
        match order {
            OrderArg::Window => Order::Window,
            OrderArg::Global => Order::Global,
        }
    }
}

/// What is counted: records, or the tokens of rows.
#[derive(Clone, Copy)]
enum Unit {
    Records,
    Tokens { in_row: usize },
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Unit::Records => "records",
            Unit::Tokens { .. } => "tokens",
        }
    }

    fn tokens_in_row(self) -> Option<usize> {
        match self {
            Unit::Records => None,
            Unit::Tokens { in_row } => Some(in_row),
        }
    }

    fn per_row(self) -> usize {
        self.tokens_in_row().unwrap_or(1)
    }

    fn of_rows(self, rows: f64) -> f64 {
        rows * self.per_row() as f64
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && rate < 1e15 => Ok(rate),
        _ => Err("must be a number above 0".to_owned()),
    }
}

pub(crate) fn run(args: &EstimateArgs) -> Result<()> {
    let profile = hardware::named_or_found(args.hardware.as_deref())?;
    let known = match (&args.dir, &args.at) {
        (None, None) => profile.disk.as_ref(),
        _ => None,
    };
    // Deleted when this function returns.
    let trial = match &args.dir {
        Some(_) => None,
        None => {
            let at = args.at.clone().unwrap_or_else(|| PathBuf::from("."));
            Some(Trial::new(&at, &args.shape, args.records.unwrap_or(1), Codec::None)?)
        }
    };
    let dir = match (&args.dir, &trial) {
        (_, Some(trial)) => trial.dir(),
        (Some(dir), None) => dir.clone(),
        (None, None) => unreachable!("there is a dataset or a trial"),
    };
    let (estimator, unit) = args.estimator(&dir)?;
    let batch = args.batch(unit);
    let rate = match &args.model {
        Some(model) => Some(model_rate::predicted(model, batch, unit.tokens_in_row(), &profile)?),
        None => args.rate.map(|rate| rate / unit.per_row() as f64),
    };
    let demand = RecordDemand {
        records: args.records.unwrap_or_else(|| estimator.rows()),
        rate,
        bus_bytes_per_second: Some(profile.link(Link::HOST_TO_DEVICE).bandwidth),
    };
    let (rates, path) = match known {
        Some(disk) => (of_profile(disk), format!("{}, by storm probe", disk.reading_path)),
        None => (estimator.measure()?, estimator.reading_path().to_string()),
    };
    let estimate = estimator.estimate(&rates, &demand)?;
    let shown = Shown {
        estimate: &estimate,
        rates: &rates,
        rows: demand.records,
        unit,
        hardware: &profile.name,
        reading_path: &path,
        is_planned: args.model.is_some(),
    };
    match args.json {
        true => println!("{:#}", shown.object()),
        false => shown.print(),
    }
    Ok(())
}

impl EstimateArgs {
    fn batch(&self, unit: Unit) -> usize {
        self.batch.unwrap_or(match unit {
            Unit::Records => 256,
            Unit::Tokens { .. } => 8,
        })
    }

    /// The estimator for the records or text in a directory.
    fn estimator(&self, dir: &Path) -> Result<(Estimator, Unit)> {
        let workers = self.workers.unwrap_or_else(loader_threads);
        let order = self.order.map(Order::from);
        if RecordSet::is_one(dir) {
            let options = RecordLoaderOptions {
                order: order.unwrap_or(Order::Window),
                workers,
                ..RecordLoaderOptions::training(self.batch(Unit::Records), 0, self.data_ram)
            };
            let set = Arc::new(RecordSet::open(dir)?);
            return Ok((Estimator::of_records(set, options)?, Unit::Records));
        }
        let dataset = Dataset::open(dir)?;
        if self.records.is_some() {
            let problem = format!(
                "{} holds text, whose rows follow from --seq: leave --records out",
                dir.display()
            );
            return Err(UsageError(problem).into());
        }
        let unit = Unit::Tokens { in_row: self.seq };
        let options = LoaderOptions {
            order: order.unwrap_or(Order::Global),
            workers,
            data_ram: self.data_ram,
            ..LoaderOptions::training(self.batch(unit), self.seq, 0)
        };
        let estimator = estimator_of_text(&dataset, &options)?.ok_or_else(|| {
            UsageError(format!(
                "{} was packed before datasets of text had blocks, and is mapped into memory; pack it again",
                dir.display()
            ))
        })?;
        Ok((estimator, unit))
    }
}

fn of_profile(disk: &DiskProfile) -> RecordRates {
    RecordRates {
        sequential_bytes_per_second: disk.sequential_bytes_per_second,
        random_reads_per_second: disk.random_reads_per_second,
        reads_per_row: 1.0,
        decoding_bytes_per_second: disk.decode_bytes_per_second,
    }
}

/// An estimate with everything that is shown.
struct Shown<'a> {
    estimate: &'a RecordEstimate,
    rates: &'a RecordRates,
    rows: u64,
    unit: Unit,
    hardware: &'a str,
    reading_path: &'a str,
    /// Whether the planner predicted the rate of the model.
    is_planned: bool,
}

impl Shown<'_> {
    fn object(&self) -> Value {
        let Shown { estimate, rates, rows, unit, hardware, reading_path, .. } = *self;
        let rate_key = format!("{}_per_second", unit.name());
        let stage =
            |stage: &RecordStage| json!({"name": stage.name, &rate_key: unit.of_rows(stage.rate)});
        json!({
            unit.name(): rows * unit.per_row() as u64,
            "disk_bytes": estimate.disk_bytes,
            "block_bytes": estimate.block_bytes,
            "batches_ahead": estimate.ahead,
            "ahead_bytes": estimate.ahead_bytes,
            "device_bytes": estimate.device_bytes,
            "resident": estimate.is_resident,
            "found_share": estimate.found_share,
            "workers": estimate.workers,
            "sequential_bytes_per_second": rates.sequential_bytes_per_second,
            "random_reads_per_second": rates.random_reads_per_second,
            "reads_per_row": rates.reads_per_row,
            "decoding_bytes_per_second": rates.decoding_bytes_per_second,
            "reading_path": reading_path,
            "hardware": hardware,
            "stages": estimate.stages.iter().map(stage).collect::<Vec<_>>(),
            "epoch_seconds": estimate.epoch_seconds,
            "advice": estimate.advice,
        })
    }

    fn print(&self) {
        let Shown { estimate, rates, rows, unit, hardware, reading_path, is_planned } = *self;
        let line = |name: &str, value: String| println!("  {name:<22}{value}");
        match unit.tokens_in_row() {
            None => println!("{} records", grouped(rows)),
            Some(tokens) => println!(
                "{} tokens in {} rows of {tokens}",
                grouped(rows * tokens as u64),
                grouped(rows)
            ),
        }
        line("on disk", size::show(estimate.disk_bytes));
        let whole = if estimate.is_resident { ": all of it" } else { "" };
        line("blocks in memory", format!("{}{whole}", size::show(estimate.block_bytes)));
        let ahead = size::show(estimate.ahead_bytes);
        line("batches ahead", format!("{}, {ahead}", estimate.ahead));
        line("on the device", format!("{}, two batches", size::show(estimate.device_bytes)));
        let long = size::show(rates.sequential_bytes_per_second as u64);
        let short = grouped(rates.random_reads_per_second as u64);
        line(
            "measured",
            format!("{long}/s in long reads, {short} short reads a second ({reading_path})"),
        );
        if estimate.found_share > 0.0 && !estimate.is_resident {
            let share = 100.0 * estimate.found_share;
            line("found in memory", format!("{share:.1} % of the blocks that are wanted"));
        }
        for (number, stage) in estimate.stages.iter().enumerate() {
            let slowest = if number == 0 { ", the slowest" } else { "" };
            let of = match stage.name.contains("device") || (stage.name == "model" && is_planned) {
                true => format!(" ({hardware})"),
                false => String::new(),
            };
            let rate = grouped(unit.of_rows(stage.rate) as u64);
            line(stage.name, format!("{rate} {}/s{of}{slowest}", unit.name()));
        }
        let seconds = estimate.epoch_seconds;
        let long = match seconds >= 120.0 {
            true => format!(" ({})", duration(seconds)),
            false => String::new(),
        };
        line("an epoch", format!("{seconds:.1} s{long}"));
        for advice in &estimate.advice {
            line("to be faster", advice.clone());
        }
    }
}
