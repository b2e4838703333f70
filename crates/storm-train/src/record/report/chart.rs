//! Line charts over steps: an SVG that works without scripts, and its data for the script that makes it interactive.

use super::ticks::{Scale, ticks};
use super::unit::Unit;
use serde_json::{Value, json};
use std::fmt::Write;
use storm_exec::trace::page::Escaped;

/// Coordinates of the SVG. It stretches to the page; line widths and text do not.
const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 200.0;

/// A limit this many times above all lines is not shown: it would flatten them.
const LIMIT_IN_SIGHT: f64 = 4.0;

/// The height of a color band.
const BAND: f64 = 8.0;

/// Axis labels further right than this are right-aligned.
const NEAR_END: f64 = 0.93;

/// The style of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A plain line.
    Plain,
    /// Noisy values, with a smoothed line on top.
    Noisy,
    /// Few points that matter, each with a dot.
    Dots,
}

/// A line of a chart.
pub(super) struct Series<'a> {
    pub(super) name: &'static str,
    /// A color variable of the page, such as `forward`.
    pub(super) colour: &'static str,
    pub(super) kind: Kind,
    /// The steps that have a value.
    pub(super) steps: &'a Steps,
    /// One value per step; not finite for a gap.
    pub(super) values: Vec<f64>,
}

/// The steps of one or more lines.
pub(super) struct Steps {
    /// Key for the script.
    pub(super) key: &'static str,
    pub(super) steps: Vec<u64>,
}

/// A chart with one or more lines.
pub(super) struct Chart<'a> {
    pub(super) title: &'static str,
    pub(super) series: Vec<Series<'a>>,
    /// A horizontal line that no value should exceed.
    pub(super) limit: Option<f64>,
    /// Whether the vertical axis starts at zero.
    pub(super) from_zero: bool,
    pub(super) unit: Unit,
    /// Color band along the top: first step, last step, color variable.
    pub(super) band: Vec<(u64, u64, &'static str)>,
}

impl Series<'_> {
    fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        self.steps.steps.iter().zip(&self.values).map(|(&step, &value)| (step as f64, value))
    }
}

impl Chart<'_> {
    /// Renders the chart as an HTML figure.
    pub(super) fn to_html(&self) -> String {
        let mut html =
            format!("<figure class=\"chart\">\n<figcaption><b>{}</b>", Escaped(self.title));
        let mut key = |chip: &str, name: &str, value: &str| {
            let (name, value) = (Escaped(name), Escaped(value));
            let _ = write!(
                html,
                "\n<button type=\"button\" class=\"key\" aria-pressed=\"false\">{chip}{name} \
                 <span>{value}</span></button>"
            );
        };
        for Series { name, colour, kind, values, .. } in &self.series {
            let class = if *kind == Kind::Dots { "chip round" } else { "chip" };
            let chip = format!("<i class=\"{class}\" style=\"background:var(--{colour})\"></i>");
            let last = values.iter().rfind(|value| value.is_finite());
            key(&chip, name, &last.map_or(String::new(), |&value| self.unit.show(value)));
        }
        if let Some(limit) = self.limit {
            key("<i class=\"chip limit\"></i>", "budget", &self.unit.show(limit));
        }
        html.push_str("</figcaption>\n");
        match self.frame() {
            Some(frame) => self.draw(&frame, &mut html),
            None => html.push_str("<p class=\"hint\">nothing was measured</p>"),
        }
        html.push_str("\n</figure>\n");
        html
    }

    /// The data for the script.
    pub(super) fn to_json(&self) -> Value {
        let series = self.series.iter().map(|series| {
            json!({
                "name": series.name,
                "colour": series.colour,
                "steps": series.steps.key,
                "smooth": series.kind == Kind::Noisy,
                "values": series.values.iter().map(|&value| rounded(value)).collect::<Vec<_>>(),
            })
        });
        let frame = self.frame().map(|frame| [frame.x0, frame.x1, frame.low, frame.high]);
        json!({"unit": self.unit.key(), "frame": frame, "series": series.collect::<Vec<_>>()})
    }

    fn frame(&self) -> Option<Frame> {
        let points = || self.series.iter().flat_map(Series::points);
        let finite = || points().filter(|(_, y)| y.is_finite());
        let fold = |from: f64, pick: fn(f64, f64) -> f64, of: fn((f64, f64)) -> f64| {
            finite().map(of).fold(from, pick)
        };
        finite().next()?;
        let (x0, x1) = (fold(f64::MAX, f64::min, |p| p.0), fold(f64::MIN, f64::max, |p| p.0));
        let mut low = fold(f64::MAX, f64::min, |p| p.1);
        let mut high = fold(f64::MIN, f64::max, |p| p.1);
        if self.from_zero {
            low = low.min(0.0);
        }
        let in_sight = self.limit.filter(|&limit| limit <= LIMIT_IN_SIGHT * high);
        high = in_sight.map_or(high, |limit| high.max(limit));
        let margin = match high - low {
            0.0 => (0.1 * high.abs()).max(1e-9),
            range => 0.05 * range,
        };
        let low = if self.from_zero { low } else { low - margin };
        Some(Frame { x0, x1: x1.max(x0 + 1.0), last: x1, low, high: high + margin })
    }

    fn draw(&self, frame: &Frame, html: &mut String) {
        let title = Escaped(self.title);
        let _ = write!(
            html,
            "<div class=\"plot\" tabindex=\"0\" role=\"img\" aria-label=\"{title} over steps\">\
             <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=\"none\">"
        );
        let marks = ticks(frame.low, frame.high, self.unit.scale());
        for (value, _) in &marks {
            let _ = write!(html, "<path class=\"grid\" d=\"M0 {:.1}H{WIDTH}\"/>", frame.y(*value));
        }
        for &(from, to, colour) in &self.band {
            let (from, to) = (frame.x(from as f64), frame.x(to as f64));
            let _ = write!(
                html,
                "<path class=\"band\" style=\"fill:var(--{colour})\" d=\"M{from:.1} 0H{to:.1}V{BAND}H{from:.1}Z\"/>"
            );
        }
        for series in &self.series {
            draw_series(frame, series, html);
        }
        if let Some(limit) = self.limit {
            // One group per legend entry, in order, whether or not the limit is drawn.
            html.push_str("<g class=\"series\">");
            if limit <= frame.high {
                let y = frame.y(limit);
                let _ = write!(html, "<path class=\"limit\" d=\"M0 {y:.1}H{WIDTH}\"/>");
            }
            html.push_str("</g>");
        }
        html.push_str("</svg>");
        for (value, label) in &marks {
            let top = 100.0 * frame.y(*value) / HEIGHT;
            let _ = write!(html, "<span class=\"y\" style=\"top:{top:.1}%\">{label}</span>");
        }
        html.push_str("<span class=\"step\">step</span>");
        for (step, label) in ticks(frame.x0, frame.x1, Scale::Counts) {
            if step > frame.last {
                continue;
            }
            let share = frame.x(step) / WIDTH;
            // A centered label at the right edge would be cut off.
            let class = if share > NEAR_END { "x end" } else { "x" };
            let left = 100.0 * share;
            let _ =
                write!(html, "<span class=\"{class}\" style=\"left:{left:.1}%\">{label}</span>");
        }
        html.push_str("</div>");
    }
}

/// Draws a line. The script draws the smoothed one.
fn draw_series(frame: &Frame, series: &Series<'_>, html: &mut String) {
    let mut path = String::new();
    let mut dots = String::new();
    let mut is_drawing = false;
    for (x, y) in series.points() {
        if !y.is_finite() {
            is_drawing = false;
            continue;
        }
        let (x, y) = (frame.x(x), frame.y(y));
        // A point without neighbors is drawn as a dot.
        let _ = match is_drawing {
            true => write!(path, "L{x:.1} {y:.1}"),
            false => write!(path, "M{x:.1} {y:.1}h0"),
        };
        is_drawing = true;
        if series.kind == Kind::Dots {
            let _ = write!(dots, "M{x:.1} {y:.1}h0");
        }
    }
    let colour = series.colour;
    let _ = write!(
        html,
        "<g class=\"series\" style=\"stroke:var(--{colour})\"><path class=\"line\" d=\"{path}\"/>"
    );
    match series.kind {
        Kind::Plain => {}
        Kind::Noisy => html.push_str("<path class=\"smooth\" d=\"\"/>"),
        Kind::Dots => {
            let _ = write!(html, "<path class=\"dots\" d=\"{dots}\"/>");
        }
    }
    html.push_str("</g>");
}

/// Rounds to the digits that are useful in a chart.
fn rounded(value: f64) -> Option<f64> {
    value.is_finite().then(|| format!("{value:.5e}").parse().unwrap_or(value))
}

/// Maps steps and values to SVG coordinates.
struct Frame {
    x0: f64,
    x1: f64,
    /// The last step. `x1` is larger if there is only one step.
    last: f64,
    low: f64,
    high: f64,
}

impl Frame {
    fn x(&self, step: f64) -> f64 {
        (step - self.x0) / (self.x1 - self.x0) * WIDTH
    }

    fn y(&self, value: f64) -> f64 {
        (1.0 - (value - self.low) / (self.high - self.low)) * HEIGHT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(u64, f64)>, limit: Option<f64>) -> String {
        let (steps, values) = points.into_iter().unzip();
        let steps = Steps { key: "steps", steps };
        let (name, colour, kind) = ("loss", "forward", Kind::Dots);
        let series = vec![Series { name, colour, kind, steps: &steps, values }];
        let band = vec![(1, 3, "weights")];
        let chart =
            Chart { title: "Loss", series, limit, from_zero: false, unit: Unit::Loss, band };
        assert!(!chart.to_json().to_string().contains("NaN"));
        chart.to_html()
    }

    #[test]
    fn gaps_and_nothing_are_drawn_as_such() {
        let nan = f64::NAN;
        let html = chart(vec![(1, 2.0), (2, nan), (3, 1.0), (4, 1.5)], None);
        let of_class = |class: &str| {
            let (_, path) = html.split_once(&format!("class=\"{class}\" d=\"")).expect("a path");
            path.split('"').next().expect("its end")
        };
        assert_eq!(of_class("line").matches('M').count(), 2, "{html}");
        assert_eq!(of_class("line").matches('L').count(), 1, "{html}");
        assert_eq!(of_class("dots").matches('M').count(), 3, "{html}");
        assert!(!html.contains("NaN"), "{html}");
        assert!(chart(Vec::new(), None).contains("nothing was measured"));
        assert!(chart(vec![(1, nan)], None).contains("nothing was measured"));
        assert!(!chart(vec![(5, 3.0)], None).contains("NaN"));
    }

    #[test]
    fn axes_are_marked_at_round_numbers() {
        let html = chart((1..=50).map(|step| (step, 100.0 / step as f64)).collect(), None);
        for label in [">0<", ">100<", ">step<", ">10<", ">50<"] {
            assert!(html.contains(label), "{label} is not in {html}");
        }
        // Of one step, the next has no mark.
        let html = chart(vec![(1, 2.0)], None);
        assert!(html.contains("left:0.0%\">1<") && !html.contains("%\">2<"), "{html}");
    }

    #[test]
    fn a_limit_is_in_the_picture_unless_it_is_far_above() {
        for (limit, is_drawn) in [(0.5, true), (5.0, true), (100.0, false)] {
            let html = chart(vec![(1, 1.0), (2, 2.0)], Some(limit));
            assert_eq!(html.contains("<path class=\"limit\""), is_drawn, "{html}");
            assert!(html.contains(&format!("budget <span>{limit:.4}</span>")), "{html}");
        }
    }
}
