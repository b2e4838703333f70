//! What STORM claims about training under a budget, measured on a GPU.

use crate::bench::{Measured, PlannedRun, RunArgs};
use crate::forced::ForcedArgs;
use crate::{hardware, progress, size};
use anyhow::Result;
use std::time::Instant;
use storm_device::cuda::{CudaDevice, CudaPlanDevice};
use storm_exec::trace;
use storm_model::build;
use storm_plan::{Queue, Storage, Tier};
use storm_train::ReferenceTrainer;

/// The model of all claims.
const MODEL: &str = "qwen2.5-1.5b";

/// Its budget, if the card has that much memory.
const VRAM_BYTES: u64 = 9_000_000_000;

/// Share of the card's memory that a claim may use.
const CARD_SHARE: f64 = 0.95;

/// A sequence long enough to hide offloading of everything.
const LONG_SEQUENCE: usize = 49_152;

/// How a claim came out.
pub(super) enum Verdict {
    Pass,
    Fail,
    /// This machine cannot check it, for this reason.
    Skipped(String),
}

/// One line of the table.
pub(super) struct Claim {
    pub(super) what: &'static str,
    /// What must hold, in words.
    pub(super) bar: String,
    pub(super) figure: String,
    pub(super) verdict: Verdict,
}

impl Claim {
    fn new(what: &'static str, bar: &str, figure: String, holds: bool) -> Claim {
        let verdict = if holds { Verdict::Pass } else { Verdict::Fail };
        Claim { what, bar: bar.to_owned(), figure, verdict }
    }
}

/// Checks every claim, and shows each as soon as it is known.
pub(super) fn all(hardware: Option<&str>, mut show: impl FnMut(&Claim)) -> Result<()> {
    let card_bytes = hardware::named_or_found(hardware)?.memory_bytes;
    let card_bytes = (card_bytes as f64 * CARD_SHARE) as u64;
    let named = |mut args: RunArgs| {
        args.hardware = hardware.map(ToOwned::to_owned);
        args
    };
    let args = named(RunArgs::new(MODEL, 16, 8, 1024));
    budgeted(&args, VRAM_BYTES.min(card_bytes))?.iter().for_each(&mut show);
    let args = named(RunArgs { steps: 2, ..RunArgs::new(MODEL, 1, 1, LONG_SEQUENCE) });
    activations_away(args, card_bytes)?.iter().for_each(show);
    Ok(())
}

/// Checks that queues overlap, copies are hidden, host memory is exact, and predictions are right.
fn budgeted(args: &RunArgs, vram_bytes: u64) -> Result<Vec<Claim>> {
    progress::show(&format!("{MODEL} in {}", size::show(vram_bytes)));
    let run = PlannedRun::new(args, args.budget(vram_bytes)?)?;
    let measured: Measured<CudaPlanDevice> = run.run(None)?;
    let plan = measured.trainer.plan();
    let overlap = trace::overlap(plan, &measured.trace);
    let stored = trace::summarize(plan, &measured.trace).peak_bytes[Tier::HOST];
    let held = measured.trainer.memory_taken()[Tier::HOST];
    let percent = |share: f64| format!("{:.2} %", 100.0 * share);
    let ratio = held as f64 / stored.max(1) as f64;
    let prediction = &measured.prediction;
    let off = |measured: f64, predicted: f64| (measured - predicted) / predicted;
    let memory_off = off(measured.vram_bytes as f64, prediction.peak_bytes[Tier::DEVICE] as f64);
    let time_off = off(measured.step_seconds, prediction.step_seconds);
    let [in_use, budget] = [measured.vram_bytes, vram_bytes].map(size::show);
    Ok(vec![
        Claim::new(
            "three queues at once",
            "some",
            format!("{} of the step", percent(overlap.all_queues())),
            overlap.all_queues_ns > 0,
        ),
        Claim::new(
            "compute waits for offload",
            "< 2 % of forward",
            percent(overlap.offload_gap()),
            overlap.offload_gap() < 0.02,
        ),
        Claim::new(
            "compute waits for fetch",
            "< 2 % of backward",
            percent(overlap.fetch_gap()),
            overlap.fetch_gap() < 0.02,
        ),
        Claim::new(
            "pinned bytes held ÷ stored",
            "≤ 1.02",
            format!("{ratio:.4}, {} held", size::show(held as u64)),
            ratio <= 1.02,
        ),
        Claim::new(
            "peak device memory",
            "≤ budget",
            format!("{in_use} of {budget}"),
            measured.vram_bytes <= vram_bytes,
        ),
        Claim::new(
            "peak against prediction",
            "within 2 %",
            percent(memory_off),
            memory_off.abs() <= 0.02,
        ),
        Claim::new(
            "step time against prediction",
            "within 10 %",
            format!("{} of {:.3} s", percent(time_off), prediction.step_seconds),
            time_off.abs() <= 0.10,
        ),
    ])
}

/// Offloads all activations between forward and backward, and compares with everything resident.
fn activations_away(mut args: RunArgs, vram_bytes: u64) -> Result<Vec<Claim>> {
    const WHAT: &str = "all activations away";
    let bar = "≥ 0.80 of resident speed";
    progress::show(&format!("{MODEL} with sequences of {LONG_SEQUENCE}, everything resident"));
    let resident_seconds = match resident_step(&args) {
        Ok(seconds) => seconds,
        Err(error) => {
            let verdict = Verdict::Skipped(format!("nothing to compare with: {error:#}"));
            return Ok(vec![Claim {
                what: WHAT,
                bar: bar.to_owned(),
                figure: "-".to_owned(),
                verdict,
            }]);
        }
    };
    args.forced = ForcedArgs::nothing_kept();
    progress::show(&format!("{MODEL} with sequences of {LONG_SEQUENCE}, all activations away"));
    let run = PlannedRun::new(&args, args.budget(vram_bytes)?)?;
    let measured: Measured<CudaPlanDevice> = run.run(None)?;
    let decisions = &measured.decisions;
    // The last stage runs backward at once, so it stores nothing in between.
    let groups = decisions.groups.iter();
    let waiting = groups.flat_map(|group| &group.stages[1..group.stages.len() - 1]);
    let mut stored = waiting.flat_map(|s| s.saved.iter().flatten().chain(&s.inputs));
    let is_away = !stored.any(|&storage| storage == Storage::Keep);
    let share = resident_seconds / measured.step_seconds;
    let summary = trace::summarize(measured.trainer.plan(), &measured.trace);
    let busy = summary.busy_share(Queue::COMPUTE);
    let moved = size::show(measured.prediction.copied_bytes[Queue::DEVICE_TO_HOST]);
    Ok(vec![
        Claim::new(
            "no activation stays on the device",
            "between passes",
            format!("{moved} offloaded, {}", recomputed(measured.prediction.recompute_fraction)),
            is_away,
        ),
        Claim::new(
            WHAT,
            bar,
            format!(
                "{share:.3}: {:.3} s and {resident_seconds:.3} s a step of {LONG_SEQUENCE} tokens",
                measured.step_seconds
            ),
            share >= 0.80,
        ),
        Claim::new(
            "compute queue busy meanwhile",
            "≥ 80 %",
            format!("{:.1} %", 100.0 * busy),
            busy >= 0.80,
        ),
    ])
}

fn recomputed(share: f64) -> String {
    format!("{:.1} % of computing recomputed", 100.0 * share)
}

/// Seconds of a step with everything in device memory.
fn resident_step(args: &RunArgs) -> Result<f64> {
    let config = args.config()?;
    let options = args.options();
    let program = build(&config, &options.build_options())?;
    let open = |bytes| CudaDevice::new(0, bytes);
    let mut trainer = ReferenceTrainer::on_device(&config, options, program, |_| {}, open)?;
    let batches = args.batches(&config)?;
    let mut seconds = f64::MAX;
    // The first step warms up.
    for step in 0..=args.steps {
        let start = Instant::now();
        trainer.step(&batches, 1e-5)?;
        trainer.synchronize()?;
        if step > 0 {
            seconds = seconds.min(start.elapsed().as_secs_f64());
        }
    }
    Ok(seconds)
}
