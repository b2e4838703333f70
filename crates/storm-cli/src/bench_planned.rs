//! `storm bench train --vram SIZE`: training speed under a memory budget, beside what the plan
//! predicted.

use crate::bench_train::TrainBenchArgs;
use crate::model::grouped;
use crate::size;
use anyhow::{Context, Result};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use storm_device::PlanDevice;
use storm_exec::trace::{self, ReportFacts, TierLimits};
use storm_model::ModelConfig;
use storm_plan::{Budget, Forced, HardwareProfile, Planned, Prediction, Queue, plan};
use storm_train::{Batch, PlannedTrainer, TrainOptions, training_task};

/// What a planned run needs besides the bench's own arguments.
pub(crate) struct PlannedRun<'a> {
    pub(crate) args: &'a TrainBenchArgs,
    pub(crate) config: &'a ModelConfig,
    pub(crate) options: TrainOptions,
    pub(crate) profile: HardwareProfile,
    pub(crate) budget: Budget,
    pub(crate) forced: Forced,
    pub(crate) batches: Vec<Batch>,
}

impl PlannedRun<'_> {
    /// Plans, trains, and compares. `vram` says what the process holds on the device.
    pub(crate) fn run<D: PlanDevice>(
        self,
        device: D::Options,
        vram: impl Fn(&D) -> Result<u64>,
    ) -> Result<()> {
        let PlannedRun { args, config, options, profile, budget, forced, batches } = self;
        // Before the work: a path that cannot be written should not cost a run.
        let mut outputs = Outputs::create(args)?;
        let task = training_task(config, &options, batches.len())?;
        let planning = Instant::now();
        let Planned { plan, decisions, prediction, .. } = plan(&task, &profile, budget, &forced)?;
        let planning = planning.elapsed().as_secs_f64();
        eprintln!(
            "planned in {planning:.1} s for {}: {:.3} s a step in {} of device and {} of host memory",
            profile.name,
            prediction.step_seconds,
            size::show(prediction.vram_peak_bytes),
            size::show(prediction.ram_peak_bytes),
        );
        let preparing = Instant::now();
        let mut trainer: PlannedTrainer<D> =
            PlannedTrainer::new(config, options, Arc::new(plan), device)
                .with_context(|| format!("cannot train {}", args.model))?;
        eprintln!("prepared in {:.1} s", preparing.elapsed().as_secs_f64());
        for _ in 0..args.warmup {
            trainer.step(&batches, 1e-5)?;
        }
        trainer.synchronize()?;
        let mut times = Vec::new();
        let mut loss = f32::NAN;
        for _ in 0..args.steps {
            let start = Instant::now();
            loss = trainer.step(&batches, 1e-5)?.loss;
            trainer.synchronize()?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let (median, fastest) = (times[times.len() / 2], times[0]);
        let tokens = (args.batch * args.seq * batches.len()) as f64;
        let vram = vram(trainer.device())?;
        let ram = trainer.memory_taken().host_bytes as u64;
        let summary = match trainer.trace()? {
            None => None,
            Some(trace) => {
                let plan = trainer.plan();
                if let Some(output) = &mut outputs.trace {
                    output.write(|out| trace::write_chrome(plan, &trace, out))?;
                }
                if let Some(output) = &mut outputs.report {
                    let beside_plan_bytes = vram.saturating_sub(plan.device_bytes as u64);
                    let device = TierLimits { budget_bytes: budget.vram_bytes, beside_plan_bytes };
                    let host = TierLimits { budget_bytes: budget.ram_bytes, beside_plan_bytes: 0 };
                    let facts = ReportFacts {
                        title: format!("A training step of {} as it ran", args.model),
                        rows: vec![
                            row("parameters", grouped(config.parameter_count())),
                            row("layers", config.layer_count),
                            row("batch", batch_shape(args, batches.len())),
                            row("speed", format!("{:.0} tokens/s", tokens / median)),
                            row("step, median", format!("{median:.3} s")),
                            row("step, predicted", format!("{:.3} s", prediction.step_seconds)),
                            row("hardware", &profile.name),
                            row("micro-batches in a group", decisions.group),
                            row("made again", again(&prediction)),
                            row("storm", env!("CARGO_PKG_VERSION")),
                        ],
                        device,
                        host,
                    };
                    output.write(|out| trace::write_html(plan, &trace, &facts, out))?;
                }
                Some(trace::summarize(plan, &trace))
            }
        };
        if args.json {
            let line = serde_json::json!({
                "model": args.model,
                "tokens_per_second": tokens / median,
                "step_seconds": median,
                "step_seconds_min": fastest,
                "predicted_step_seconds": prediction.step_seconds,
                "vram_budget_bytes": budget.vram_bytes,
                "vram_peak_bytes": vram,
                "predicted_vram_peak_bytes": prediction.vram_peak_bytes,
                "ram_peak_bytes": ram,
                "predicted_ram_peak_bytes": prediction.ram_peak_bytes,
                "h2d_bytes": prediction.h2d_bytes,
                "d2h_bytes": prediction.d2h_bytes,
                "recompute_fraction": prediction.recompute_fraction,
                "group": decisions.group,
                "loss": loss,
            });
            println!("{line}");
            return Ok(());
        }
        println!("{}: {} parameters", args.model, config.parameter_count());
        println!("batch       {}", batch_shape(args, batches.len()));
        println!("step        {median:.3} s median of {}, {fastest:.3} s fastest", args.steps);
        println!("speed       {:.0} tokens/s", tokens / median);
        let off = |measured: f64, predicted: f64| 100.0 * (measured - predicted) / predicted;
        println!("            {:>12} {:>12} {:>8}", "predicted", "measured", "off");
        println!(
            "step        {:>10.3} s {median:>10.3} s {:>+7.1}%",
            prediction.step_seconds,
            off(median, prediction.step_seconds)
        );
        for (name, predicted, measured) in
            [("device", prediction.vram_peak_bytes, vram), ("host", prediction.ram_peak_bytes, ram)]
        {
            println!(
                "{name:<11} {:>12} {:>12} {:>+7.1}%",
                size::show(predicted),
                size::show(measured),
                off(measured as f64, predicted.max(1) as f64)
            );
        }
        let verdict = if vram <= budget.vram_bytes { "within" } else { "OVER" };
        println!("budget      {} of device memory: {verdict}", size::show(budget.vram_bytes));
        let shares = Queue::ALL.map(|queue| {
            format!("{} {:.1}%", queue.name(), 100.0 * prediction.busy[queue.index()])
        });
        println!("predicted   busy: {}", shares.join(", "));
        println!("            again: {}; group of {}", again(&prediction), decisions.group);
        if let Some(summary) = summary {
            println!("{summary}");
        }
        println!("loss        {loss:.4}");
        Ok(())
    }
}

/// A line of the report's facts.
fn row(what: &str, value: impl ToString) -> (String, String) {
    (what.to_owned(), value.to_string())
}

fn batch_shape(args: &TrainBenchArgs, micro_batches: usize) -> String {
    format!("{} × {micro_batches} of {} tokens", args.batch, args.seq)
}

fn again(prediction: &Prediction) -> String {
    format!("{:.1}% of computing", 100.0 * prediction.recompute_fraction)
}

/// Files that show the last step.
struct Outputs {
    trace: Option<Output>,
    report: Option<Output>,
}

impl Outputs {
    fn create(args: &TrainBenchArgs) -> Result<Outputs> {
        let create = |path: &Option<PathBuf>, what| {
            path.as_deref().map(|path| Output::create(path, what)).transpose()
        };
        Ok(Outputs {
            trace: create(&args.trace, "trace of the last step")?,
            report: create(&args.report, "report of the last step")?,
        })
    }
}

/// A file that is to be written.
struct Output {
    what: &'static str,
    path: PathBuf,
    file: BufWriter<File>,
}

impl Output {
    fn create(path: &Path, what: &'static str) -> Result<Output> {
        let file =
            File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Output { what, path: path.to_owned(), file: BufWriter::new(file) })
    }

    fn write(&mut self, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> Result<()> {
        write(&mut self.file)
            .and_then(|()| self.file.flush())
            .with_context(|| format!("cannot write {}", self.path.display()))?;
        eprintln!("{}: {}", self.what, self.path.display());
        Ok(())
    }
}
