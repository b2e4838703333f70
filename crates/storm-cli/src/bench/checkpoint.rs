//! `storm bench checkpoint`: what saving checkpoints costs a run.

use super::planned::{Benched, PlannedRun};
use super::run_args::{DeviceArg, RunArgs};
use crate::size;
use anyhow::{Context, Result};
use clap::Args;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;
use storm_device::cpu::CpuPlanDevice;
use storm_device::cuda::CudaPlanDevice;
use storm_train::{
    Begun, Checkpoints, Disk, Keep, Progress, Retention, Saved, Saver, Snapshot, Trainer,
    checkpoint_bytes,
};

/// Maximum share of time that saving may cost.
const SHARE_MAX: f64 = 0.02;

#[derive(Args)]
pub(crate) struct CheckpointBenchArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Train under a plan within this much device memory, including the CUDA context: `9GB`, `16GiB`.
    #[arg(long, value_parser = size::parse)]
    vram: u64,
    /// Number of rounds. Each runs `--steps` steps without a checkpoint, then as many with one.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Where to write checkpoints: a folder is created there and deleted afterwards.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Print one line of JSON instead of a table.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &CheckpointBenchArgs) -> Result<()> {
    match args.run.device {
        DeviceArg::Cpu => bench::<CpuPlanDevice>(args),
        DeviceArg::Cuda => bench::<CudaPlanDevice>(args),
    }
}

/// Medians of what was measured.
struct Costs {
    bytes: u64,
    step_seconds: f64,
    /// Time of a round without a checkpoint.
    plain_seconds: f64,
    /// How much longer the next round took, which saves a checkpoint: all three quartiles.
    overhead_quartiles: [f64; 3],
    /// Time to apply a deferred update, to fill the snapshot, and from then until the checkpoint is
    /// on disk.
    flush_seconds: f64,
    snapshot_seconds: f64,
    written_seconds: f64,
    /// Time to save a checkpoint while steps wait.
    pause_seconds: f64,
}

impl Costs {
    fn overhead_seconds(&self) -> f64 {
        self.overhead_quartiles[1]
    }

    fn share(&self) -> f64 {
        self.overhead_seconds() / self.plain_seconds
    }

    /// The fewest steps between two checkpoints at which saving costs at most `SHARE_MAX`.
    fn steps_min(&self) -> u64 {
        (self.overhead_seconds() / (SHARE_MAX * self.step_seconds)).ceil().max(1.0) as u64
    }
}

fn bench<D: Benched>(args: &CheckpointBenchArgs) -> Result<()> {
    let run = PlannedRun::new(&args.run, args.run.budget(args.vram)?)?;
    let folder = Folder::new(&args.dir)?;
    let mut trainer = run.warm::<D>()?;
    let mut bench = Bench {
        run: &run,
        saver: Saver::new(Checkpoints::open(&folder.0, Disk)?),
        steps: args.run.steps,
        progress: beginning(),
    };
    let mut pauses = Vec::new();
    for _ in 0..args.rounds {
        let start = Instant::now();
        bench.begin_save(&mut trainer)?;
        pauses.push(start.elapsed().as_secs_f64());
    }
    bench.saver.use_snapshot(Snapshot::new(&trainer)?);
    // Not counted: it uses disk and memory for the first time.
    bench.round_with(&mut trainer)?;
    let (mut plain, mut with) = (Vec::new(), Vec::new());
    for round in 0..args.rounds {
        eprintln!("round {} of {} …", round + 1, args.rounds);
        plain.push(bench.round_without(&mut trainer)?);
        with.push(bench.round_with(&mut trainer)?);
    }
    let overheads = with.iter().zip(&plain).map(|(with, plain)| with.seconds - plain).collect();
    let plain_seconds = median(plain);
    let of = |part: fn(&Round) -> f64| median(with.iter().map(part).collect());
    let costs = Costs {
        bytes: checkpoint_bytes(&run.config, trainer.options())?,
        step_seconds: plain_seconds / f64::from(args.run.steps),
        plain_seconds,
        overhead_quartiles: quartiles(overheads),
        flush_seconds: of(|round| round.flush_seconds),
        snapshot_seconds: of(|round| round.snapshot_seconds),
        written_seconds: of(|round| round.written_seconds),
        pause_seconds: median(pauses),
    };
    match args.json {
        true => println!("{}", json(args, &costs)),
        false => show(args, &costs),
    }
    Ok(())
}

/// Times of a round with a checkpoint.
struct Round {
    seconds: f64,
    flush_seconds: f64,
    snapshot_seconds: f64,
    written_seconds: f64,
}

struct Bench<'a> {
    run: &'a PlannedRun<'a>,
    saver: Saver<Disk>,
    steps: u32,
    progress: Progress,
}

impl Bench<'_> {
    fn begin_save<D: Benched>(&mut self, trainer: &mut Trainer<D>) -> Result<Begun> {
        self.progress.step += 1;
        let keep = Keep { retention: Retention { last: 1, every: None }, best: None };
        Ok(self.saver.save(trainer, &self.progress, keep)?)
    }

    fn round_without<D: Benched>(&mut self, trainer: &mut Trainer<D>) -> Result<f64> {
        let start = Instant::now();
        for _ in 0..self.steps {
            self.run.step(trainer)?;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Waits until the checkpoint is on disk, because the next one could not start earlier.
    fn round_with<D: Benched>(&mut self, trainer: &mut Trainer<D>) -> Result<Round> {
        let start = Instant::now();
        trainer.flush()?;
        trainer.synchronize()?;
        let flush_seconds = start.elapsed().as_secs_f64();
        self.begin_save(trainer)?;
        let snapshot_seconds = start.elapsed().as_secs_f64() - flush_seconds;
        for _ in 0..self.steps {
            self.run.step(trainer)?;
        }
        let Saved { seconds: written_seconds, .. } =
            self.saver.wait()?.context("nothing was being written")?;
        let seconds = start.elapsed().as_secs_f64();
        Ok(Round { seconds, flush_seconds, snapshot_seconds, written_seconds })
    }
}

fn beginning() -> Progress {
    Progress {
        step: 0,
        updates: 0,
        units: 0,
        data: serde_json::Value::Null,
        best: None,
        evaluations_without_gain: 0,
        settings: BTreeMap::new(),
        device: String::new(),
        predict: None,
    }
}

fn median(values: Vec<f64>) -> f64 {
    quartiles(values)[1]
}

fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[values.len() * quarter / 4])
}

fn json(args: &CheckpointBenchArgs, costs: &Costs) -> serde_json::Value {
    serde_json::json!({
        "model": args.run.model,
        "checkpoint_bytes": costs.bytes,
        "save_every": args.run.steps,
        "step_seconds": costs.step_seconds,
        "overhead_seconds": costs.overhead_seconds(),
        "overhead_seconds_quartiles": costs.overhead_quartiles,
        "overhead_share": costs.share(),
        "save_every_min": costs.steps_min(),
        "flush_seconds": costs.flush_seconds,
        "snapshot_seconds": costs.snapshot_seconds,
        "written_seconds": costs.written_seconds,
        "pause_seconds": costs.pause_seconds,
    })
}

fn show(args: &CheckpointBenchArgs, costs: &Costs) {
    let per_second = |seconds: f64| size::show((costs.bytes as f64 / seconds) as u64);
    println!("checkpoint  {} of {}", size::show(costs.bytes), args.run.model);
    println!("step        {:.4} s without saving", costs.step_seconds);
    println!(
        "background  steps wait {:.4} s for a pending update and {:.4} s for the snapshot ({}/s);",
        costs.flush_seconds,
        costs.snapshot_seconds,
        per_second(costs.snapshot_seconds),
    );
    println!(
        "            it is on the disk after {:.3} s ({}/s)",
        costs.written_seconds,
        per_second(costs.written_seconds),
    );
    let [low, _, high] = costs.overhead_quartiles;
    println!(
        "overhead    {:.4} s a checkpoint, {low:.4} to {high:.4} in the middle half of the rounds",
        costs.overhead_seconds()
    );
    println!(
        "            {:.2} % of the {} steps between two; at most {:.0} % with {} or more",
        100.0 * costs.share(),
        args.run.steps,
        100.0 * SHARE_MAX,
        costs.steps_min()
    );
    println!(
        "with pause  {:.3} s a checkpoint ({}/s)",
        costs.pause_seconds,
        per_second(costs.pause_seconds)
    );
}

/// A folder that is deleted on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(dir: &std::path::Path) -> Result<Folder> {
        let path = dir.join(format!(".storm-bench-{}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}
