//! `storm bench curve`: training speed against the memory budget.

use super::outputs::Output;
use super::planned::{Benched, PlannedRun};
use super::run_args::{DeviceArg, RunArgs};
use crate::size;
use anyhow::{Context, Result, anyhow};
use clap::Args;
use plotters::prelude::*;
use std::io::Write;
use std::path::PathBuf;
use storm_device::cpu::CpuPlanDevice;
use storm_device::cuda::CudaPlanDevice;
use storm_plan::{Queue, Tier};

#[derive(Args)]
pub(crate) struct CurveArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Device memory budgets, including the CUDA context: `5GB,9GB,16GB`.
    #[arg(long, value_parser = size::parse, value_delimiter = ',', required = true)]
    vram: Vec<u64>,
    /// Draw the curve to this file.
    #[arg(long, value_name = "FILE.svg")]
    svg: Option<PathBuf>,
    /// Print one line of JSON per budget instead of a table.
    #[arg(long)]
    json: bool,
}

/// The result for one budget.
struct Point {
    vram_bytes: u64,
    tokens_per_second: f64,
    predicted_tokens_per_second: f64,
    limited_by: &'static str,
}

pub(super) fn run(args: &CurveArgs) -> Result<()> {
    match args.run.device {
        DeviceArg::Cpu => run_on::<CpuPlanDevice>(args),
        DeviceArg::Cuda => run_on::<CudaPlanDevice>(args),
    }
}

fn run_on<D: Benched>(args: &CurveArgs) -> Result<()> {
    let output = Output::create(args.svg.as_deref(), "curve")?;
    // Smallest budget first: it takes the most host memory, which later runs reuse.
    let mut budgets = args.vram.clone();
    budgets.sort_unstable();
    budgets.dedup();
    let mut points = Vec::new();
    // Determined once, because later runs reuse the memory that earlier ones hold.
    let budget = args.run.budget(0)?;
    let mut before: Option<D> = None;
    for vram_bytes in budgets {
        let run = PlannedRun::new(&args.run, budget.with(Tier::DEVICE, vram_bytes))?;
        let measured = run.run(before.take())?;
        let tokens = args.run.tokens_per_step() as f64;
        let point = Point {
            vram_bytes,
            tokens_per_second: tokens / measured.step_seconds,
            predicted_tokens_per_second: tokens / measured.prediction.step_seconds,
            limited_by: measured.bottleneck.name(),
        };
        if args.json {
            let line = serde_json::json!({
                "model": args.run.model,
                "vram_budget_bytes": vram_bytes,
                "vram_peak_bytes": measured.vram_bytes,
                "ram_bytes": measured.prediction.peak_bytes[Tier::HOST],
                "tokens_per_second": point.tokens_per_second,
                "predicted_tokens_per_second": point.predicted_tokens_per_second,
                "recompute_fraction": measured.prediction.recompute_fraction,
                "limited_by": point.limited_by,
            });
            println!("{line}");
        } else {
            if points.is_empty() {
                println!(
                    "{:>12} {:>12} {:>12} {:>10} {:>10} {:>7} {:>10}  limited by",
                    "budget", "in use", "host", "tokens/s", "predicted", "compute", "recomputed"
                );
            }
            println!(
                "{:>12} {:>12} {:>12} {:>10.0} {:>10.0} {:>5.0} % {:>8.0} %  {}",
                size::show(vram_bytes),
                size::show(measured.vram_bytes),
                size::show(measured.prediction.peak_bytes[Tier::HOST]),
                point.tokens_per_second,
                point.predicted_tokens_per_second,
                100.0 * measured.prediction.busy[Queue::COMPUTE],
                100.0 * measured.prediction.recompute_fraction,
                point.limited_by
            );
        }
        points.push(point);
        before = Some(measured.trainer.into_device());
    }
    if let Some(output) = output {
        let title = format!(
            "{}, {} × {} of {} tokens",
            args.run.model, args.run.batch, args.run.accumulate, args.run.seq
        );
        let svg = draw(&title, &points)?;
        output.write(|out| out.write_all(svg.as_bytes()))?;
    }
    Ok(())
}

fn draw(title: &str, points: &[Point]) -> Result<String> {
    let mut svg = String::new();
    draw_into(&mut svg, title, points)
        .map_err(|error| anyhow!("{error}"))
        .context("cannot draw the curve")?;
    Ok(svg)
}

fn draw_into(
    svg: &mut String,
    title: &str,
    points: &[Point],
) -> Result<(), Box<dyn std::error::Error>> {
    let gigabytes = |point: &Point| point.vram_bytes as f64 / 1e9;
    let most = points.iter().map(gigabytes).fold(1.0, f64::max);
    let fastest = points
        .iter()
        .map(|point| point.tokens_per_second.max(point.predicted_tokens_per_second))
        .fold(1.0, f64::max);
    let root = SVGBackend::with_string(svg, (720, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..most * 1.05, 0.0..fastest * 1.1)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("device memory of the process, GB")
        .y_desc("tokens/s")
        .x_label_formatter(&|gigabytes| format!("{gigabytes:.0}"))
        .y_label_formatter(&|speed| format!("{speed:.0}"))
        .label_style(("sans-serif", 13))
        .draw()?;
    let measured = points.iter().map(|point| (gigabytes(point), point.tokens_per_second));
    let predicted =
        points.iter().map(|point| (gigabytes(point), point.predicted_tokens_per_second));
    chart
        .draw_series(LineSeries::new(predicted, RGBColor(150, 150, 150)))?
        .label("predicted")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], RGBColor(150, 150, 150)));
    let blue = RGBColor(31, 94, 168);
    chart
        .draw_series(LineSeries::new(measured, blue.stroke_width(2)).point_size(4))?
        .label("measured")
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], blue.stroke_width(2)));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .border_style(RGBColor(200, 200, 200))
        .background_style(WHITE)
        .label_font(("sans-serif", 13))
        .draw()?;
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_drawn() {
        let point = |gigabytes: u64, tokens_per_second: f64| Point {
            vram_bytes: gigabytes * 1_000_000_000,
            tokens_per_second,
            predicted_tokens_per_second: tokens_per_second * 0.99,
            limited_by: "memory",
        };
        let svg = draw("a model", &[point(5, 100.0), point(9, 120.0)]).expect("it draws");
        assert!(svg.starts_with("<svg") && svg.contains("a model"), "{svg}");
        assert_eq!(svg.matches("<circle").count(), 2, "{svg}");
    }
}
