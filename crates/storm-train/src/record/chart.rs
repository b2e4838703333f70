//! Lines over steps, as SVG that needs nothing else and takes its colours from the page.

use super::ticks::{Scale, ticks};
use std::fmt::Write;

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 190.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 24.0;

/// A limit that is so many times higher than all lines would leave nothing to see of them.
const LIMIT_IN_SIGHT: f64 = 4.0;

/// A line of a chart.
pub(super) struct Series<'a> {
    pub(super) name: &'a str,
    /// A colour of the page: `forward`.
    pub(super) colour: &'a str,
    /// Step and value.
    pub(super) points: Vec<(f64, f64)>,
    /// Marked by dots, too: few points.
    pub(super) has_dots: bool,
}

/// A picture of some lines.
pub(super) struct Chart<'a> {
    pub(super) title: &'a str,
    pub(super) series: Vec<Series<'a>>,
    /// A line across all steps that none should be above.
    pub(super) limit: Option<f64>,
    /// Whether values are measured from zero.
    pub(super) from_zero: bool,
    /// What values are, for the marks of their axis.
    pub(super) scale: Scale,
    /// A value in the caption.
    pub(super) show: fn(f64) -> String,
}

impl Chart<'_> {
    /// As a figure of HTML; names and titles are trusted.
    pub(super) fn to_html(&self) -> String {
        let mut html = format!("<figure><figcaption>{}", self.title);
        for series in &self.series {
            let Series { name, colour, .. } = series;
            let last = series.points.last().map_or(String::new(), |(_, y)| (self.show)(*y));
            let _ = write!(
                html,
                "<span><i style=\"background:var(--{colour})\"></i>{name} <b>{last}</b></span>"
            );
        }
        if let Some(limit) = self.limit {
            let limit = (self.show)(limit);
            let _ = write!(html, "<span><i class=\"limit\"></i>budget <b>{limit}</b></span>");
        }
        html.push_str("</figcaption>");
        match self.frame() {
            Some(frame) => self.draw(&frame, &mut html),
            None => html.push_str("<p class=\"hint\">nothing was measured</p>"),
        }
        html.push_str("</figure>\n");
        html
    }

    fn frame(&self) -> Option<Frame> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let finite = || points().filter(|(x, y)| x.is_finite() && y.is_finite());
        let fold = |from: f64, pick: fn(f64, f64) -> f64, of: fn(&(f64, f64)) -> f64| {
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
        let _ = write!(
            html,
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">",
            self.title
        );
        for (value, label) in ticks(frame.low, frame.high, self.scale) {
            let y = frame.y(value);
            let _ = write!(
                html,
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{}\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                y + 4.0,
            );
        }
        let mut label = |x: f64, anchor: &str, label: &str| {
            let y = HEIGHT - 6.0;
            let _ = write!(
                html,
                "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"{anchor}\">{label}</text>"
            );
        };
        label(LEFT - 6.0, "end", "step");
        for (step, number) in ticks(frame.x0, frame.x1, Scale::Counts) {
            let x = frame.x(step);
            // A number in the middle below the right edge would be cut off.
            let anchor = if x > WIDTH - 2.0 * RIGHT { "end" } else { "middle" };
            if step <= frame.last {
                label(x, anchor, &number);
            }
        }
        if let Some(limit) = self.limit.filter(|&limit| limit <= frame.high) {
            let y = frame.y(limit);
            let _ = write!(html, "<path class=\"limit\" d=\"M{LEFT} {y:.1}H{}\"/>", WIDTH - RIGHT);
        }
        for series in &self.series {
            draw_series(frame, series, html);
        }
        html.push_str("</svg>");
    }
}

fn draw_series(frame: &Frame, series: &Series<'_>, html: &mut String) {
    let colour = series.colour;
    let mut path = String::new();
    let mut dots = String::new();
    let mut pen = 'M';
    for &(x, y) in &series.points {
        if !y.is_finite() {
            // A gap.
            pen = 'M';
            continue;
        }
        let (x, y) = (frame.x(x), frame.y(y));
        let _ = write!(path, "{pen}{x:.1} {y:.1}");
        pen = 'L';
        if series.has_dots {
            let _ = write!(dots, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\"/>");
        }
    }
    let _ = write!(
        html,
        "<g style=\"stroke:var(--{colour});fill:var(--{colour})\">\
         <path class=\"line\" d=\"{path}\"/>{dots}</g>"
    );
}

/// From steps and values to places in the picture.
struct Frame {
    x0: f64,
    x1: f64,
    /// The last step that there is; `x1` is behind it where there is but one.
    last: f64,
    low: f64,
    high: f64,
}

impl Frame {
    fn x(&self, step: f64) -> f64 {
        LEFT + (step - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let share = (value - self.low) / (self.high - self.low);
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>, limit: Option<f64>) -> String {
        let series = Series { name: "loss", colour: "forward", points, has_dots: true };
        let show = |value: f64| format!("{value:.1}");
        let (from_zero, scale) = (false, Scale::Numbers);
        Chart { title: "Loss", series: vec![series], limit, from_zero, scale, show }.to_html()
    }

    #[test]
    fn gaps_and_nothing_are_drawn_as_such() {
        let nan = f64::NAN;
        let html = chart(vec![(1.0, 2.0), (2.0, nan), (3.0, 1.0), (4.0, 1.5)], None);
        assert_eq!(html.matches('M').count() - html.matches("class=\"grid\"").count(), 2, "{html}");
        assert_eq!(html.matches("<circle").count(), 3);
        assert!(!html.contains("NaN"), "{html}");
        assert!(chart(Vec::new(), None).contains("nothing was measured"));
        assert!(!chart(vec![(5.0, 3.0)], None).contains("NaN"));
    }

    #[test]
    fn axes_are_marked_at_round_numbers() {
        let html =
            chart((1..=50).map(|step| (f64::from(step), 100.0 / f64::from(step))).collect(), None);
        for label in [">0<", ">100<", ">step<", ">10<", ">50<"] {
            assert!(html.contains(label), "{label} is not in {html}");
        }
        // Of one step, the next has no mark.
        let html = chart(vec![(1.0, 2.0)], None);
        assert!(html.contains("middle\">1<") && !html.contains("\">2<"), "{html}");
    }

    #[test]
    fn a_limit_is_in_the_picture_unless_it_is_far_above() {
        for (limit, is_drawn) in [(0.5, true), (5.0, true), (100.0, false)] {
            let html = chart(vec![(1.0, 1.0), (2.0, 2.0)], Some(limit));
            assert_eq!(html.contains("<path class=\"limit\""), is_drawn, "{html}");
            assert!(html.contains(&format!("budget <b>{limit:.1}</b>")), "{html}");
        }
    }
}
