//! `storm train`: a run from a config file or from flags, under a memory budget.

#[macro_use]
mod table;

mod cards;
mod checks;
mod config;
mod data;
mod device;
mod disk_failure;
mod dry_run;
mod folder;
mod forecast;
mod launch;
mod model;
mod normalization;
mod options;
mod output;
mod packing;
mod pictures;
mod planned;
mod predictions;
mod probe;
mod progress;
mod progress_line;
mod ranks;
mod recorded;
mod reference;
mod report;
mod sample;
mod saving;
mod schedule;
mod session;
mod setup;
mod signals;
mod summary;
mod values;

use crate::joined::Devices;
use crate::model_tokenizer::OtherTokenizer;
use crate::{UsageError, joined};
use anyhow::Result;
pub(crate) use cards::Cards;
use clap::Args;
pub(crate) use config::BadConfig;
pub(crate) use data::{loader_threads, open_images, pictures_of};
pub(crate) use device::{Asked, CpuUse, DeviceKind, Machine, Trains, find_for};
use folder::Start;
pub(crate) use model::config_of_record;
pub(crate) use options::{Given, Settings};
pub(crate) use output::{Style, shell_word};
pub(crate) use planned::{check_config, positions_of_weights, request_of_config};
use ranks::Crew;
pub(crate) use recorded::Recorded;
pub(crate) use reference::{by_heading, with_defaults};
pub(crate) use schedule::{FRESH_RATE, FURTHER_RATE};
pub(crate) use setup::IMAGE_CONFIG;
use setup::{Purpose, Setup};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
pub(crate) use values::{DeviceArg, OverlongArg, Size as SizeOption};

#[derive(Args)]
#[command(
    after_help = "Every option is also a key of the config file: `--learning-rate 1e-3` is `learning-rate = 1e-3`. \
                  Flags override the file. docs/config.md lists all keys, docs/training.md explains a run."
)]
pub(crate) struct TrainArgs {
    /// Config file, such as examples/quickstart.toml.
    config: Option<PathBuf>,
    /// Resume the run from its newest intact checkpoint.
    #[arg(long)]
    resume: bool,
    /// Move everything in the run's folder to `before-1`, `before-2`, … inside it, and start again at step 1.
    #[arg(long, conflicts_with = "resume")]
    begin_anew: bool,
    /// Accept data that was packed with a tokenizer other than the model's.
    #[arg(long)]
    other_tokenizer: bool,
    /// Ignore the disk that the config file names.
    #[arg(long, conflicts_with_all = ["disk", "disk_space", "disk_endurance", "on_disk"])]
    no_disk: bool,
    /// Check everything and print the plan with tokens, steps, memory, time and disk space, but do not train. Text is
    /// packed into a temporary folder; no files stay behind.
    #[arg(long)]
    dry_run: bool,
    /// Print only errors and where the results are.
    #[arg(long, conflicts_with = "json")]
    quiet: bool,
    /// Print one JSON object per line for each event; see docs/json.md.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    options: Given,
}

/// Every option of a run by its `config.toml`, as text; none if that is not there or cannot be used.
pub(crate) fn settings_of_run(folder: &Path) -> BTreeMap<String, String> {
    config::read(&folder.join("config.toml")).map(|given| setup::record(&given)).unwrap_or_default()
}

/// The options of a config file, with the defaults of those that it does not give.
pub(crate) fn settings_of(config: &Path) -> Result<Settings> {
    let given = config::read(config)?;
    config::check_values(&given)?;
    Ok(given.resolve())
}

pub(crate) fn run(args: TrainArgs) -> Result<()> {
    let prepared = prepare(args);
    let devices = match prepared.as_ref().map(|prepared| prepared.given.device) {
        Ok(Some(DeviceArg::Cpu)) => Devices::Cpu,
        _ => Devices::Any,
    };
    match joined::join(devices)? {
        None => start(prepared?, None),
        Some(joined) => ranks::run(joined, prepared, |prepared, crew| start(prepared, Some(crew))),
    }
}

/// A run as it was asked for.
struct Prepared {
    given: Given,
    start: Start,
    other: OtherTokenizer,
    style: Style,
    dry_run: bool,
}

impl Prepared {
    /// All that must be the same on every rank.
    fn words(&self) -> (String, bool, Start) {
        (config::write(&self.given), self.dry_run, self.start)
    }
}

fn prepare(args: TrainArgs) -> Result<Prepared> {
    let TrainArgs {
        config,
        resume,
        begin_anew,
        other_tokenizer,
        no_disk,
        dry_run,
        quiet,
        json,
        options,
    } = args;
    let file = match &config {
        Some(path) => config::read(path)?,
        None => Given::default(),
    };
    let mut given = options.over(file);
    if no_disk {
        given = Given {
            disk: None,
            disk_space: None,
            disk_endurance: None,
            accept_wear: None,
            on_disk: None,
            ..given
        };
    }
    config::check_values(&given)?;
    if given.name.is_none() {
        let stem = config.as_ref().and_then(|path| path.file_stem());
        given.name = stem.map(|stem| stem.to_string_lossy().into_owned());
    }
    if given.name.is_none() {
        let problem = "give a config file, or --name for the run";
        return Err(UsageError(problem.to_owned()).into());
    }
    let style = match (quiet, json) {
        (true, _) => output::Style::Quiet,
        (_, true) => output::Style::Json,
        _ => output::Style::People,
    };
    let start = match (resume, begin_anew) {
        (true, _) => Start::Resume,
        (_, true) => Start::Anew,
        _ => Start::Fresh,
    };
    let other = OtherTokenizer::of_switch(other_tokenizer);
    Ok(Prepared { given, start, other, style, dry_run })
}

fn start(prepared: Prepared, crew: Option<&Crew>) -> Result<()> {
    let Prepared { mut given, start, other, style, dry_run } = prepared;
    if let (Some(crew), None) = (crew, given.lanes)
        && start != Start::Resume
    {
        given.lanes = Some(crew.count().into());
        style.say(&format!("lanes = {}, one for each rank: the run keeps them", crew.count()));
    }
    match dry_run {
        true => dry_run::show_run(&Setup::new(given, start, other, Purpose::DryRun, style, crew)?),
        false => session::run(Setup::new(given, start, other, Purpose::Train, style, crew)?),
    }
}
