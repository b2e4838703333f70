//! Plots: plain training as a curve with methods as points, and the time of each to the same loss.

use super::compare::{Comparison, Estimate};
use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;

const COLOURS: [RGBColor; 6] = [
    RGBColor(31, 94, 168),
    RGBColor(200, 90, 30),
    RGBColor(40, 130, 70),
    RGBColor(130, 60, 150),
    RGBColor(160, 30, 60),
    RGBColor(20, 130, 140),
];
const GREY: RGBColor = RGBColor(110, 110, 110);

/// Pixels for the names of methods.
const LEGEND_WIDTH: i32 = 140;

type Drawn = Result<(), Box<dyn std::error::Error>>;

/// The curve against the cost in steps, and the methods as points.
pub(super) fn curve(plain: &[(f64, f64)], methods: &[(&str, &Comparison)]) -> Result<String> {
    let mut svg = String::new();
    draw_curve(&mut svg, plain, methods)
        .map_err(|error| anyhow!("{error}"))
        .context("cannot draw the curve")?;
    Ok(svg)
}

fn draw_curve(svg: &mut String, plain: &[(f64, f64)], methods: &[(&str, &Comparison)]) -> Drawn {
    let points: Vec<(&str, f64, f64)> =
        methods.iter().map(|(name, found)| (*name, found.by_steps.cost, found.test_loss)).collect();
    let costs = || plain.iter().map(|p| p.0).chain(points.iter().map(|p| p.1));
    let losses = || plain.iter().map(|p| p.1).chain(points.iter().map(|p| p.2));
    let (c0, c1) = (costs().fold(f64::MAX, f64::min), costs().fold(1.0, f64::max));
    let (l0, l1) = (losses().fold(f64::MAX, f64::min), losses().fold(f64::MIN, f64::max));
    let margin = (0.08 * (l1 - l0)).max(1e-4);
    let root = SVGBackend::with_string(svg, (720, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let (plot, legend) = root.split_horizontally(720 - LEGEND_WIDTH);
    let mut chart = ChartBuilder::on(&plot)
        .caption("test loss over cost, means of all seeds", ("sans-serif", 16))
        .margin(14)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(0.95 * c0..1.05 * c1, l0 - margin..l1 + margin)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("cost, in steps")
        .y_desc("loss")
        .x_label_formatter(&|cost| format!("{cost:.0}"))
        .y_label_formatter(&|loss| format!("{loss:.3}"))
        .label_style(("sans-serif", 13))
        .draw()?;
    let line = LineSeries::new(plain.iter().copied(), GREY.stroke_width(2)).point_size(3);
    chart.draw_series(line)?;
    // The legend is beside the plot, where it hides no point.
    let row = |number: usize| 44 + 20 * number as i32;
    let label = |name: &str, y| Text::new(name.to_owned(), (26, y - 7), ("sans-serif", 13));
    legend.draw(&PathElement::new([(0, row(0)), (18, row(0))], GREY.stroke_width(2)))?;
    legend.draw(&label("plain training", row(0)))?;
    for (number, (name, cost, loss)) in points.into_iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()].filled();
        let y = row(number + 1);
        if number < COLOURS.len() {
            chart.draw_series([Circle::new((cost, loss), 5, colour)])?;
            legend.draw(&Circle::new((9, y), 5, colour))?;
        } else {
            chart.draw_series([TriangleMarker::new((cost, loss), 6, colour)])?;
            legend.draw(&TriangleMarker::new((9, y), 6, colour))?;
        }
        legend.draw(&label(name, y))?;
    }
    root.present()?;
    Ok(())
}

/// Time of methods to the same loss, with intervals. Plain training is the line at 1.
pub(super) fn ratios(methods: &[(&str, &Comparison)]) -> Result<String> {
    let mut svg = String::new();
    draw_ratios(&mut svg, methods)
        .map_err(|error| anyhow!("{error}"))
        .context("cannot draw the ratios")?;
    Ok(svg)
}

fn draw_ratios(svg: &mut String, methods: &[(&str, &Comparison)]) -> Drawn {
    let count = methods.len();
    let all = || methods.iter().map(|(_, found)| found.by_steps.ratio);
    let high = all().map(|r| if r.high.is_finite() { r.high } else { r.mean });
    let most = high.fold(1.2, f64::max).min(4.0);
    let root = SVGBackend::with_string(svg, (720, 80 + 28 * count as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("time to the same loss, plain training = 1", ("sans-serif", 16))
        .margin(14)
        .x_label_area_size(30)
        .y_label_area_size(8)
        .build_cartesian_2d(0.0..1.05 * most, -0.5..count as f64 - 0.5)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .disable_y_mesh()
        .y_labels(0)
        .x_label_formatter(&|ratio| format!("{ratio:.1}"))
        .label_style(("sans-serif", 13))
        .draw()?;
    let line = [(1.0, -0.5), (1.0, count as f64 - 0.5)];
    chart.draw_series(LineSeries::new(line, GREY.stroke_width(1)))?;
    for (row, (name, found)) in methods.iter().enumerate() {
        let (y, Estimate { mean, low, high }) =
            (count as f64 - 1.0 - row as f64, found.by_steps.ratio);
        let colour = COLOURS[row % COLOURS.len()];
        let font = ("sans-serif", 13).into_font();
        chart.draw_series([Text::new((*name).to_owned(), (0.01 * most, y + 0.2), font)])?;
        if low.is_finite() && high.is_finite() {
            let ends = [(low.min(most), y), (high.min(most), y)];
            chart.draw_series(LineSeries::new(ends, colour.stroke_width(2)))?;
        }
        chart.draw_series([Circle::new((mean.min(most), y), 5, colour.filled())])?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::compare::{Comparison, Pair};
    use super::super::records::tests::finished;
    use super::*;

    #[test]
    fn a_point_is_drawn_for_each_method() {
        let plain = [finished(0, 100, 3.0), finished(0, 200, 2.5)];
        let run = finished(0, 100, 2.75);
        let pairs = [Pair { plain: plain.iter().collect(), method: &run }];
        let found = Comparison::new(&pairs).expect("a seed");
        let methods = [("one", &found), ("two", &found)];
        let plain = [(100.0, 3.0), (200.0, 2.5)];
        let marks = |methods: &[(&str, &Comparison)]| {
            let svg = curve(&plain, methods).expect("it draws");
            ["<circle", "<polygon"].map(|mark| svg.matches(mark).count())
        };
        // Two runs, two methods, and the methods in the legend.
        assert_eq!(marks(&methods), [6, 0]);
        // Methods beyond the number of colours are triangles, in the plot and in the legend.
        let many: Vec<_> = (0..COLOURS.len() + 2).map(|_| methods[0]).collect();
        assert_eq!(marks(&many), [2 + 2 * COLOURS.len(), 4]);
        let svg = ratios(&methods).expect("it draws");
        assert_eq!(svg.matches("<circle").count(), 2, "{svg}");
        assert!(svg.contains("one") && svg.contains("two"), "{svg}");
    }
}
