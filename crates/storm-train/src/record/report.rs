//! `report.html`: a run as one page that needs nothing else.

use super::chart::{Chart, Series};
use super::ticks::{BYTE_UNITS, Scale};
use super::{History, Part, StepRecord};
use std::io::{self, Write};
use storm_device::Trace;
use storm_exec::trace::{
    ReportFacts, TierLimits, step_section, write_html_after, write_html_around,
};
use storm_plan::{PerTier, Plan, Prediction, Tier};

const STYLE: &str = "<style>
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 14px; margin: 0 0 18px; }
.charts figure { margin: 0; padding: 10px 12px; background: var(--card); border: 1px solid var(--line); border-radius: 6px; }
.charts figcaption { font-weight: 600; }
.charts figcaption span { margin-left: 14px; font-weight: 400; color: var(--quiet); white-space: nowrap; }
.charts figcaption b { color: var(--ink); font-weight: 400; font-variant-numeric: tabular-nums; }
.charts i { display: inline-block; width: 10px; height: 10px; margin-right: 4px; border-radius: 2px; }
.charts i.limit { height: 0; border-top: 2px dashed var(--budget); border-radius: 0; vertical-align: 3px; }
.charts svg { width: 100%; height: auto; }
.charts text { font-size: 12px; fill: var(--quiet); font-variant-numeric: tabular-nums; }
.charts .grid { stroke: var(--line); stroke-width: 1; }
.charts .line { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
.charts .limit { stroke: var(--budget); stroke-width: 1.5; stroke-dasharray: 5 4; fill: none; }
.measured { border-collapse: collapse; margin: 0 0 18px; font-variant-numeric: tabular-nums; }
.measured th, .measured td { padding: 3px 18px 3px 0; text-align: right; border-bottom: 1px solid var(--line); }
.measured th:first-child, .measured td:first-child { text-align: left; }
h2 { font-size: 16px; margin: 18px 0 6px; }
</style>
";

/// What the page says besides what was recorded.
#[derive(Clone, Debug)]
pub struct RunFacts {
    /// The heading.
    pub title: String,
    /// More about the run: what, and how much.
    pub rows: Vec<(String, String)>,
    /// Of device memory, in bytes.
    pub device_budget: u64,
    /// Of host memory, in bytes.
    pub host_budget: u64,
    /// What the plan said.
    pub prediction: Prediction,
}

/// Writes the page: loss, speed, overlap and memory over the whole run; prediction beside measurement for the
/// part that the present plan answers for; and one step in detail.
///
/// # Errors
/// From `out`.
pub fn write_report(
    facts: &RunFacts,
    history: &History,
    part: &Part,
    plan: &Plan,
    trace: &Trace,
    out: &mut impl Write,
) -> io::Result<()> {
    let budgets = [Some(facts.device_budget), Some(facts.host_budget)];
    let mut before = of_history(budgets, history);
    before.push_str("<h2>Predicted and measured, under the last plan</h2>\n");
    before.push_str(&measured(facts, history, part));
    let device_bytes = part.device_bytes_peak();
    let beside_plan_bytes = device_bytes.saturating_sub(plan.bytes[Tier::DEVICE] as u64);
    let page = ReportFacts {
        title: facts.title.clone(),
        rows: facts.rows.clone(),
        limits: PerTier::new(
            TierLimits { budget_bytes: facts.device_budget, beside_plan_bytes },
            TierLimits { budget_bytes: facts.host_budget, beside_plan_bytes: 0 },
        ),
    };
    write_html_after(plan, trace, &page, &before, out)
}

/// Writes the page again from what was recorded, whether the run has ended or not. What the page before says of one
/// step stays: that is known to the run alone.
///
/// # Errors
/// From `out`.
pub fn rewrite_report(
    title: &str,
    rows: &[(String, String)],
    budgets: [Option<u64>; 2],
    history: &History,
    page_before: Option<&str>,
    out: &mut impl Write,
) -> io::Result<()> {
    let before = of_history(budgets, history);
    write_html_around(title, rows, &before, page_before.and_then(step_section), out)
}

/// Loss, speed, overlap and memory over the whole run. Budgets are of device and host memory, in bytes.
fn of_history(budgets: [Option<u64>; 2], history: &History) -> String {
    let mut html = STYLE.to_owned();
    html.push_str("<h2>The run</h2>\n<div class=\"charts\">\n");
    charts(budgets, history).iter().for_each(|chart| html.push_str(&chart.to_html()));
    html.push_str("</div>\n");
    html
}

fn charts<'a>(budgets: [Option<u64>; 2], history: &History) -> Vec<Chart<'a>> {
    let series = |name: &'a str, colour: &'a str, of: &dyn Fn(&StepRecord) -> Option<f64>| {
        let point = |record: &StepRecord| Some((record.step as f64, of(record)?));
        Series {
            name,
            colour,
            points: history.steps().filter_map(point).collect(),
            has_dots: false,
        }
    };
    let [device_budget, host_budget] = budgets.map(|budget| budget.map(|bytes| bytes as f64));
    let mut losses = vec![series("training", "forward", &|r| Some(f64::from(r.loss)))];
    if history.best_loss().is_some() {
        let evaluations = history.evaluations();
        let points = evaluations.map(|&(step, loss)| (step as f64, loss)).collect();
        losses.push(Series { name: "held out", colour: "gradients", points, has_dots: true });
    }
    let bytes: fn(f64) -> String = show_bytes;
    let percent: fn(f64) -> String = |share| format!("{:.0} %", 100.0 * share);
    let chart = |title, series, limit, from_zero, scale, show| Chart {
        title,
        series,
        limit,
        from_zero,
        scale,
        show,
    };
    vec![
        chart("Loss", losses, None, false, Scale::Numbers, |loss| format!("{loss:.3}")),
        chart(
            "Tokens per second",
            vec![series("speed", "backward", &|r| Some(r.tokens_per_second))],
            None,
            true,
            Scale::Numbers,
            |speed| format!("{speed:.0}"),
        ),
        chart(
            "Device memory",
            vec![series("in use", "memory-edge", &|r| Some(r.device_bytes as f64))],
            device_budget,
            true,
            Scale::Bytes,
            bytes,
        ),
        chart(
            "Host memory",
            vec![
                series("plan", "memory-edge", &|r| Some(r.host_bytes as f64)),
                series("whole process", "inputs", &|r| r.process_bytes.map(|bytes| bytes as f64)),
            ],
            host_budget,
            true,
            Scale::Bytes,
            bytes,
        ),
        chart(
            "Overlap",
            vec![
                series("copies hidden", "activations", &|r| r.hidden_share),
                series("compute busy", "weights", &|r| r.compute_share),
            ],
            None,
            true,
            Scale::Shares,
            percent,
        ),
        chart(
            "Gradient norm",
            vec![series("before clipping", "optimizer", &|r| Some(f64::from(r.gradient_norm)))],
            None,
            true,
            Scale::Numbers,
            |norm| format!("{norm:.2}"),
        ),
    ]
}

fn measured(facts: &RunFacts, history: &History, part: &Part) -> String {
    let prediction = &facts.prediction;
    let host = history.last().map_or(0, |record| record.host_bytes);
    let mut html = "<table class=\"measured\"><tr><th></th><th>predicted</th><th>measured</th>\
                    <th>off</th><th>budget</th></tr>"
        .to_owned();
    let off = |measured: f64, predicted: f64| {
        format!("{:+.1} %", 100.0 * (measured - predicted) / predicted.max(1e-12))
    };
    let mut row = |cells: [String; 5]| {
        let cells = cells.map(|cell| format!("<td>{cell}</td>"));
        html.push_str(&format!("<tr>{}</tr>", cells.concat()));
    };
    if let Some(median) = part.median_step_seconds() {
        let predicted = prediction.step_seconds;
        row([
            "step, median".to_owned(),
            format!("{predicted:.3} s"),
            format!("{median:.3} s"),
            off(median, predicted),
            String::new(),
        ]);
    }
    if let Some(speed) = part.tokens_per_second() {
        let empty = String::new;
        row(["tokens per second".to_owned(), empty(), format!("{speed:.0}"), empty(), empty()]);
    }
    // Of a plan under which no step was made, nothing was measured.
    let seen = |bytes: u64| (part.steps() > 0).then_some(bytes);
    for (name, predicted, measured, budget) in [
        (
            "device memory, peak",
            prediction.peak_bytes[Tier::DEVICE],
            seen(part.device_bytes_peak()),
            facts.device_budget,
        ),
        (
            "host memory of the plan",
            prediction.peak_bytes[Tier::HOST],
            seen(host),
            facts.host_budget,
        ),
    ] {
        row([
            name.to_owned(),
            show_bytes(predicted as f64),
            measured.map_or(String::new(), |bytes| show_bytes(bytes as f64)),
            measured.map_or(String::new(), |bytes| off(bytes as f64, predicted as f64)),
            show_bytes(budget as f64),
        ]);
    }
    html.push_str("</table>\n");
    html
}

fn show_bytes(bytes: f64) -> String {
    let (mut value, mut unit) = (bytes, 0);
    while value.abs() >= 1024.0 && unit + 1 < BYTE_UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = if unit == 0 || value >= 100.0 { 0 } else { 1 };
    format!("{value:.decimals$} {}", BYTE_UNITS[unit])
}
