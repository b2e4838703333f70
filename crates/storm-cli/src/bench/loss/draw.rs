//! The plot: losses above, differences from the first variant below.

use super::child::Variant;
use super::compare::{Curve, held_out, smoothed};
use anyhow::{Context, Result, anyhow};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

const COLOURS: [RGBColor; 5] = [
    RGBColor(90, 90, 90),
    RGBColor(31, 94, 168),
    RGBColor(200, 90, 30),
    RGBColor(40, 130, 70),
    RGBColor(130, 60, 150),
];

type Points = Vec<(u64, f64)>;
type Area<'b> = DrawingArea<SVGBackend<'b>, plotters::coord::Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

pub(super) fn draw(variants: &[Variant], curves: &[Vec<Curve>]) -> Result<String> {
    let mut svg = String::new();
    draw_into(&mut svg, variants, curves)
        .map_err(|error| anyhow!("{error}"))
        .context("cannot draw the losses")?;
    Ok(svg)
}

fn draw_into(
    svg: &mut String,
    variants: &[Variant],
    curves: &[Vec<Curve>],
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(svg, (720, 640)).into_drawing_area();
    root.fill(&WHITE)?;
    let (above, below) = root.split_vertically(360);
    let seeds = curves[0].len();
    let held: Vec<Points> = curves.iter().map(|curves| held_out(curves)).collect();
    let named = |number: usize| variants[number].name.clone();
    let title = format!("held-out loss, mean of {seeds} seeds");
    let losses = (0..variants.len()).map(|v| (v, held[v].clone())).collect();
    panel(&above, &title, "loss", losses, Some(&named))?;

    let smooth: Vec<Points> = curves.iter().map(|curves| smoothed(curves)).collect();
    let percent = |other: &Points, base: &Points| -> Points {
        other.iter().zip(base).map(|(b, a)| (b.0, 100.0 * (b.1 / a.1 - 1.0))).collect()
    };
    let differences = (1..variants.len()).map(|v| (v, percent(&smooth[v], &smooth[0]))).collect();
    let title = "difference of the smoothed training loss";
    // The legend of the panel above applies to this one.
    panel(&below, title, "percent", differences, None)?;
    root.present()?;
    Ok(())
}

/// Lines over the same steps, with a legend if there are names.
fn panel(
    area: &Area<'_>,
    title: &str,
    y_name: &str,
    lines: Vec<(usize, Points)>,
    named: Option<&dyn Fn(usize) -> String>,
) -> Result<(), Box<dyn std::error::Error>> {
    let all = || lines.iter().flat_map(|(_, points)| points);
    let steps = all().map(|&(step, _)| step as f64).fold(1.0, f64::max);
    let least = all().map(|&(_, y)| y).fold(f64::MAX, f64::min);
    let most = all().map(|&(_, y)| y).fold(f64::MIN, f64::max);
    // Curves without any difference still need a range.
    let margin = (0.08 * (most - least)).max(1e-3);
    let mut chart: Chart<'_, '_> = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 16))
        .margin(14)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..steps, least - margin..most + margin)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("step")
        .y_desc(y_name)
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|y| format!("{y:.2}"))
        .label_style(("sans-serif", 13))
        .draw()?;
    for (number, points) in lines {
        let colour = COLOURS[number % COLOURS.len()];
        let points = points.into_iter().map(|(step, y)| (step as f64, y));
        let line = chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
        if let Some(named) = named {
            line.label(named(number)).legend(move |(x, y)| {
                PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2))
            });
        }
    }
    if named.is_some() {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .border_style(RGBColor(200, 200, 200))
            .background_style(WHITE)
            .label_font(("sans-serif", 13))
            .draw()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_and_differences_are_drawn() {
        let curve = |scale: f64| Curve {
            steps: (1..=30).map(|step| (step, scale / step as f64)).collect(),
            held_out: vec![(10, scale), (30, scale / 2.0)],
        };
        let variants = [Variant::unchanged(), Variant::new("--base int8")];
        let svg = draw(&variants, &[vec![curve(3.0)], vec![curve(3.3)]]).expect("it draws");
        assert!(svg.starts_with("<svg") && svg.contains("base int8"), "{svg}");
        // Two lines above, one below, and two in the legend.
        assert_eq!(svg.matches("stroke-width=\"2\"").count(), 5, "{svg}");
    }
}
