//! `storm bench train --vram SIZE`: training speed under a memory budget.

use super::outputs::Output;
use super::planned::{Benched, Measured, PlannedRun};
use super::train::TrainBenchArgs;
use crate::model::grouped;
use crate::size;
use anyhow::Result;
use storm_device::PlanDevice;
use storm_exec::trace::{self, ReportFacts, TierLimits};
use storm_plan::{PerTier, Prediction, Queue, Tier};

/// Trains under the budget, and prints the results.
pub(super) fn run<D: Benched>(args: &TrainBenchArgs, vram_bytes: u64) -> Result<()> {
    let trace_output = Output::create(args.trace.as_deref(), "trace of the last step")?;
    let report_output = Output::create(args.report.as_deref(), "report of the last step")?;
    let run = PlannedRun::new(&args.run, args.run.budget(vram_bytes)?)?;
    let measured = run.run::<D>(None)?;
    let (plan, trace) = (measured.trainer.plan(), &measured.trace);
    if let Some(output) = trace_output {
        output.write(|out| trace::write_chrome(plan, trace, out))?;
    }
    if let Some(output) = report_output {
        let facts = facts(args, &run, &measured);
        output.write(|out| trace::write_html(plan, trace, &facts, out))?;
    }
    if args.json {
        println!("{}", json(args, &run, &measured));
        return Ok(());
    }
    show(args, &run, &measured);
    println!(
        "evaluation  {:.3} s for as many tokens, {:.3} of a step",
        measured.evaluation_seconds,
        measured.evaluation_seconds / measured.step_seconds
    );
    println!("recorded    {}", trace::summarize(plan, trace));
    println!("loss        {:.4}", measured.loss);
    Ok(())
}

fn tokens_per_second<D: PlanDevice>(args: &TrainBenchArgs, measured: &Measured<D>) -> f64 {
    args.run.tokens_per_step() as f64 / measured.step_seconds
}

fn facts<D: Benched>(
    args: &TrainBenchArgs,
    run: &PlannedRun<'_>,
    measured: &Measured<D>,
) -> ReportFacts {
    let row = |what: &str, value: &dyn ToString| (what.to_owned(), value.to_string());
    let block_bytes = measured.trainer.plan().bytes[Tier::DEVICE] as u64;
    let prediction = &measured.prediction;
    ReportFacts {
        title: format!("A training step of {} as it ran", args.run.model),
        rows: vec![
            row("parameters", &grouped(run.config.parameter_count())),
            row("layers", &run.config.layer_count),
            row("batch", &batch_shape(args)),
            row("speed", &format!("{:.0} tokens/s", tokens_per_second(args, measured))),
            row("step, median", &format!("{:.3} s", measured.step_seconds)),
            row("step, predicted", &format!("{:.3} s", prediction.step_seconds)),
            row("limited by", &measured.bottleneck.name()),
            row("hardware", &measured.profile.name),
            row("micro-batches in a group", &measured.decisions.group_sizes()),
            row("recomputed", &recomputed(prediction)),
            row("storm", &env!("CARGO_PKG_VERSION")),
        ],
        limits: PerTier::new(
            TierLimits {
                budget_bytes: run.budget[Tier::DEVICE],
                beside_plan_bytes: measured.vram_bytes.saturating_sub(block_bytes),
            },
            TierLimits { budget_bytes: run.budget[Tier::HOST], beside_plan_bytes: 0 },
        ),
    }
}

fn json<D: Benched>(
    args: &TrainBenchArgs,
    run: &PlannedRun<'_>,
    measured: &Measured<D>,
) -> serde_json::Value {
    let prediction = &measured.prediction;
    serde_json::json!({
        "model": args.run.model,
        "tokens_per_second": tokens_per_second(args, measured),
        "step_seconds": measured.step_seconds,
        "step_seconds_min": measured.fastest_seconds,
        "predicted_step_seconds": prediction.step_seconds,
        "evaluation_seconds": measured.evaluation_seconds,
        "hardware": measured.profile.name,
        "limited_by": measured.bottleneck.name(),
        "vram_budget_bytes": run.budget[Tier::DEVICE],
        "vram_peak_bytes": measured.vram_bytes,
        "predicted_vram_peak_bytes": prediction.peak_bytes[Tier::DEVICE],
        "ram_peak_bytes": measured.trainer.memory_taken()[Tier::HOST],
        "predicted_ram_peak_bytes": prediction.peak_bytes[Tier::HOST],
        "h2d_bytes": prediction.copied_bytes[Queue::HOST_TO_DEVICE],
        "d2h_bytes": prediction.copied_bytes[Queue::DEVICE_TO_HOST],
        "recompute_fraction": prediction.recompute_fraction,
        "group": measured.decisions.usual_group().micro_batches,
        "first_group": measured.decisions.groups[0].micro_batches,
        "graphs": measured.trainer.device().graphs().0,
        "graph_kernels": measured.trainer.device().graphs().1,
        "step_joules": measured.energy.map(|energy| energy.step_joules),
        "watts": measured.energy.map(|energy| energy.watts),
        "clock_mhz": measured.energy.map(|energy| energy.clock_mhz),
        "loss": measured.loss,
    })
}

fn show<D: Benched>(args: &TrainBenchArgs, run: &PlannedRun<'_>, measured: &Measured<D>) {
    let Measured { prediction, step_seconds, fastest_seconds, vram_bytes, .. } = measured;
    println!("{}: {} parameters", args.run.model, run.config.parameter_count());
    println!("batch       {}", batch_shape(args));
    println!(
        "step        {step_seconds:.3} s median of {}, {fastest_seconds:.3} s fastest",
        args.run.steps
    );
    println!("speed       {:.0} tokens/s", tokens_per_second(args, measured));
    if let Some(energy) = &measured.energy {
        println!("energy      {}", energy.words());
    }
    let off = |measured: f64, predicted: f64| 100.0 * (measured - predicted) / predicted;
    println!("            {:>12} {:>12} {:>8}", "predicted", "measured", "off");
    println!(
        "step        {:>10.3} s {step_seconds:>10.3} s {:>+7.1}%",
        prediction.step_seconds,
        off(*step_seconds, prediction.step_seconds)
    );
    let ram_bytes = measured.trainer.memory_taken()[Tier::HOST] as u64;
    for (name, predicted, measured) in [
        ("device", prediction.peak_bytes[Tier::DEVICE], *vram_bytes),
        ("host", prediction.peak_bytes[Tier::HOST], ram_bytes),
    ] {
        println!(
            "{name:<11} {:>12} {:>12} {:>+7.1}%",
            size::show(predicted),
            size::show(measured),
            off(measured as f64, predicted.max(1) as f64)
        );
    }
    let verdict = if *vram_bytes <= run.budget[Tier::DEVICE] { "within" } else { "OVER" };
    println!("budget      {} of device memory: {verdict}", size::show(run.budget[Tier::DEVICE]));
    let plan = measured.trainer.plan();
    let share = |queue: Queue| {
        format!("{} {:.1}%", plan.links.queue_name(queue), 100.0 * prediction.busy[queue])
    };
    // The batches are given, so nothing is read.
    let queues = plan.queues().filter(|&queue| !plan.links.is_data(queue));
    let shares: Vec<String> = queues.map(share).collect();
    println!("predicted   busy: {}", shares.join(", "));
    println!(
        "            recomputed: {}; group of {}",
        recomputed(prediction),
        measured.decisions.group_sizes()
    );
    println!("            limited by {}", measured.bottleneck.name());
    if let (graphs @ 1.., kernels) = measured.trainer.device().graphs() {
        println!("issued      {} kernels in {graphs} CUDA graphs", grouped(kernels as u64));
    }
}

fn batch_shape(args: &TrainBenchArgs) -> String {
    format!("{} × {} of {} tokens", args.run.batch, args.run.accumulate, args.run.seq)
}

fn recomputed(prediction: &Prediction) -> String {
    format!("{:.1}% of computing", 100.0 * prediction.recompute_fraction)
}
