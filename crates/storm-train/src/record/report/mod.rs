//! `report.html`: a run as one self-contained page.

mod chart;
mod charts;
mod phases;
mod pictures;
mod ticks;
mod unit;

pub use pictures::{Picture, Pictures, Shown};

use super::{History, Part, Sample};
use crate::RankFigures;
use std::io::{self, Write};
use storm_device::Trace;
use storm_exec::trace::page::{Cell, Escaped, Row, Table, write_end, write_head, write_rows};
use storm_exec::trace::{TierLimits, write_step};
use storm_plan::{PerTier, Plan, Prediction, Tier};
use unit::show_bytes;

/// Facts on the page besides the recorded history. All of them are escaped as text.
#[derive(Clone, Debug)]
pub struct RunFacts {
    /// The heading.
    pub title: String,
    /// A summary of the run as rows of name and value.
    pub rows: Vec<Row>,
    /// All settings of the run, under headings.
    pub settings: Vec<(String, Vec<Row>)>,
    /// Budgets of device and host memory in bytes, if known.
    pub budgets: [Option<u64>; 2],
    /// A hint on how to get a sample if there is none; `None` if the model does not generate text.
    pub sample_hint: Option<String>,
    /// Held-out images, for an image classifier.
    pub pictures: Pictures,
}

/// Results of the last plan, which only the training process knows.
#[derive(Clone, Copy, Debug)]
pub struct PlanFacts<'a> {
    /// More rows of name and value.
    pub rows: &'a [Row],
    /// The part of the run under this plan.
    pub part: &'a Part,
    /// The plan's prediction.
    pub prediction: &'a Prediction,
    /// Device memory budget in bytes.
    pub device_budget: u64,
    /// Host memory budget in bytes.
    pub host_budget: u64,
    /// The plan.
    pub plan: &'a Plan,
    /// The trace of a step under it.
    pub trace: &'a Trace,
}

/// The page's section on the last plan.
#[derive(Clone, Copy, Debug)]
pub enum LastPlan<'a> {
    /// From the training process.
    Facts(PlanFacts<'a>),
    /// Copied from an earlier page.
    Page(&'a str),
    /// Not known.
    Unknown,
}

/// Start of the section on the last plan, which extends to the end of the page.
const PLAN_HEADING: &str = "<h2 id=\"plan\">The last plan</h2>";

/// Writes the page: loss, speed, overlap and memory over the whole run, its settings and a text sample; predictions
/// next to measurements for the part under the last plan; and one step in detail.
///
/// # Errors
/// From `out`.
pub fn write_report(
    facts: &RunFacts,
    history: &History,
    last_plan: LastPlan<'_>,
    out: &mut impl Write,
) -> io::Result<()> {
    write_head(&facts.title, out)?;
    writeln!(out, "<style>\n{}</style>", include_str!("charts.css"))?;
    write_rows(&facts.rows, out)?;
    writeln!(out, "{}", charts::to_html(facts.budgets, history))?;
    if let Some(table) = phases::table(history) {
        writeln!(out, "{}", phases::legend())?;
        table.write(out)?;
    }
    if let Some(table) = phases::updates(history) {
        table.write(out)?;
    }
    if let Some(table) = phases::calibration(history) {
        table.write(out)?;
    }
    write_sample(history.sample(), facts.sample_hint.as_deref(), out)?;
    facts.pictures.write(out)?;
    if let Some(table) = ranks(history) {
        table.write(out)?;
    }
    write_settings(&facts.settings, out)?;
    match last_plan {
        LastPlan::Facts(plan) => {
            writeln!(out, "{PLAN_HEADING}")?;
            write_plan(&plan, history, out)?;
            write_end(out)
        }
        LastPlan::Page(page) => match page.find(PLAN_HEADING) {
            Some(at) => out.write_all(&page.as_bytes()[at..]),
            None => write_end(out),
        },
        LastPlan::Unknown => write_end(out),
    }
}

fn write_sample(
    sample: Option<&Sample>,
    hint: Option<&str>,
    out: &mut impl Write,
) -> io::Result<()> {
    if sample.is_none() && hint.is_none() {
        return Ok(());
    }
    writeln!(out, "<h2>Text by the model</h2>")?;
    let Some(Sample { step, prompt, text }) = sample else {
        return writeln!(out, "<p class=\"hint\">{}</p>", Escaped(hint.unwrap_or_default()));
    };
    let (prompt, text) = (Escaped(prompt), Escaped(text));
    writeln!(
        out,
        "<p class=\"hint\">After step {step}. It begins with the prompt, in grey.</p>\n\
         <pre class=\"sample\"><b>{prompt}</b>{text}</pre>"
    )
}

fn write_settings(settings: &[(String, Vec<Row>)], out: &mut impl Write) -> io::Result<()> {
    if settings.is_empty() {
        return Ok(());
    }
    writeln!(out, "<details class=\"settings\"><summary>All settings</summary>")?;
    for (heading, rows) in settings {
        writeln!(out, "<h3>{}</h3>", Escaped(heading))?;
        write_rows(rows, out)?;
    }
    writeln!(out, "</details>")
}

fn write_plan(plan: &PlanFacts<'_>, history: &History, out: &mut impl Write) -> io::Result<()> {
    write_rows(plan.rows, out)?;
    measured(plan, history).write(out)?;
    let device_bytes = plan.part.device_bytes_peak();
    let beside_plan_bytes = device_bytes.saturating_sub(plan.plan.bytes[Tier::DEVICE] as u64);
    let limits = PerTier::new(
        TierLimits { budget_bytes: plan.device_budget, beside_plan_bytes },
        TierLimits { budget_bytes: plan.host_budget, beside_plan_bytes: 0 },
    );
    writeln!(out, "<h2>A step as it ran</h2>")?;
    write_step(plan.plan, plan.trace, limits, out)
}

/// Time and memory of each rank; `None` in a run with one rank.
fn ranks(history: &History) -> Option<Table> {
    let row = |figures: &RankFigures| {
        let RankFigures { rank, seconds, collective_seconds, .. } = *figures;
        let bytes = |bytes: u64| show_bytes(bytes as f64);
        let cells = [
            format!("{seconds:.3} s"),
            format!("{collective_seconds:.3} s"),
            bytes(figures.device_bytes),
            bytes(figures.host_bytes),
            figures.process_bytes.map_or(String::new(), bytes),
        ];
        (format!("rank {rank}"), cells.map(Cell::Text).to_vec())
    };
    (!history.ranks().is_empty()).then(|| Table {
        caption: "Ranks, in the last step that was sampled. A rank whose collectives take less time than those of others is \
                  the one that they wait for",
        columns: &["", "step", "collectives", "device memory", "host memory of the plan", "process"],
        rows: history.ranks().iter().map(row).collect(),
    })
}

fn measured(plan: &PlanFacts<'_>, history: &History) -> Table {
    let PlanFacts { prediction, part, .. } = plan;
    let off = |measured: f64, predicted: f64| {
        format!("{:+.1} %", 100.0 * (measured - predicted) / predicted.max(1e-12))
    };
    let mut rows = Vec::new();
    let mut row = |name: &str, cells: [String; 4]| {
        rows.push((name.to_owned(), cells.map(Cell::Text).to_vec()));
    };
    if let Some(median) = part.median_step_seconds() {
        let predicted = prediction.step_seconds;
        let cells = [format!("{predicted:.3} s"), format!("{median:.3} s"), off(median, predicted)];
        let [predicted, median, off] = cells;
        row("step, median", [predicted, median, off, String::new()]);
    }
    if let Some(speed) = part.units_per_second() {
        let empty = String::new;
        row(
            &format!("{} per second", part.unit()),
            [empty(), format!("{speed:.0}"), empty(), empty()],
        );
    }
    // If no step ran under this plan, nothing was measured.
    let seen = |bytes: u64| (part.steps() > 0).then_some(bytes);
    let host = history.last().map_or(0, |record| record.host_bytes);
    for (name, predicted, measured, budget) in [
        (
            "device memory, peak",
            prediction.peak_bytes[Tier::DEVICE],
            seen(part.device_bytes_peak()),
            plan.device_budget,
        ),
        (
            "host memory of the plan",
            prediction.peak_bytes[Tier::HOST],
            seen(host),
            plan.host_budget,
        ),
    ] {
        let cells = [
            show_bytes(predicted as f64),
            measured.map_or(String::new(), |bytes| show_bytes(bytes as f64)),
            measured.map_or(String::new(), |bytes| off(bytes as f64, predicted as f64)),
            show_bytes(budget as f64),
        ];
        row(name, cells);
    }
    Table {
        caption: "Predicted and measured, since the run last started or changed its plan",
        columns: &["", "predicted", "measured", "off", "budget"],
        rows,
    }
}

#[cfg(test)]
mod tests {
    use super::super::history::tests::record;
    use super::super::{Sink, StepRecord, Throughput};
    use super::*;
    use crate::Event;
    use storm_graph::random::Random;
    use storm_model::Unit;

    const HOSTILE: &str =
        "</script><script>alert(1)</script><img src=x onerror='f()'>\"&\0\u{2028}";

    fn page(facts: &RunFacts, history: &History, last_plan: LastPlan<'_>) -> String {
        let mut page = Vec::new();
        write_report(facts, history, last_plan, &mut page).expect("written");
        String::from_utf8(page).expect("text")
    }

    fn facts(text: &str) -> RunFacts {
        let row = || vec![(text.to_owned(), text.to_owned())];
        RunFacts {
            title: text.to_owned(),
            rows: row(),
            settings: vec![(text.to_owned(), row())],
            budgets: [Some(1 << 20), None],
            sample_hint: Some(text.to_owned()),
            pictures: Pictures::None,
        }
    }

    fn history(steps: u64) -> History {
        let mut history = History::new();
        for step in 1..=steps {
            let loss = 3.0 + 1.0 / step as f32;
            let throughput = Throughput::new(Unit::Tokens, step, 1_234.567_89);
            let record = StepRecord { loss, throughput, ..record(step) };
            history.step(&record).expect("taken down");
        }
        history
    }

    #[test]
    fn what_others_supplied_is_text() {
        let mut history = history(3);
        let without = page(&facts(HOSTILE), &history, LastPlan::Unknown);
        let sampled = Event::Sampled { step: 3, prompt: HOSTILE, text: HOSTILE };
        history.event(&sampled).expect("taken down");
        let with = page(&facts(HOSTILE), &history, LastPlan::Unknown);
        for page in [&without, &with] {
            // The numbers of the charts, and their script.
            assert_eq!(page.matches("</script>").count(), 2);
            assert!(!page.contains("<img") && !page.contains("alert(1)</script>"));
        }
        // Title twice, a row, a heading, a setting; a hint, or the prompt and the text.
        assert_eq!(without.matches("&lt;img src=x onerror=&#39;f()").count(), 8);
        assert_eq!(with.matches("&lt;img src=x onerror=&#39;f()").count(), 9);
    }

    #[test]
    fn numbers_that_make_no_sense_leave_a_page() {
        let mut history = history(2);
        for (step, value) in [(3, f64::MAX), (4, f64::NAN), (u64::MAX, -f64::MAX)] {
            let record = StepRecord {
                throughput: Throughput::new(Unit::Tokens, step, value),
                loss: value as f32,
                device_bytes: u64::MAX,
                hidden_share: Some(value),
                ..record(step)
            };
            history.step(&record).expect("taken down");
        }
        let page = page(&facts("a"), &history, LastPlan::Unknown);
        assert!(!page.contains("NaN") && !page.contains("inf "), "{page}");
    }

    #[test]
    fn a_long_run_has_a_small_page() {
        let mut random = Random(7);
        let mut history = History::new();
        for step in 1..=127_999 {
            let [a, b, c] = std::array::from_fn(|_| random.bits() >> 24);
            let [x, y, z] = [a, b, c].map(|bits| bits as f64 / 3.0);
            let record = StepRecord {
                loss: x as f32,
                gradient_norm: y as f32,
                learning_rate: 1.0 / z as f32,
                throughput: Throughput::new(Unit::Tokens, step, x),
                device_bytes: a,
                host_bytes: b,
                process_bytes: Some(c),
                hidden_share: Some(1.0 / y),
                compute_share: Some(1.0 / z),
                ..record(step)
            };
            history.step(&record).expect("taken down");
            let (accuracy, is_best, seconds) = (None, false, 0.0);
            let evaluated = Event::Evaluated { step, loss: z, accuracy, is_best, seconds };
            history.event(&evaluated).expect("taken down");
        }
        let page = page(&facts("a"), &history, LastPlan::Unknown);
        assert!(page.len() < 1_250_000, "{} bytes", page.len());
    }

    #[test]
    fn what_a_page_says_of_the_last_plan_stays() {
        let before = format!("<h1>other</h1>{PLAN_HEADING}<p>as it was</p></html>\n");
        let after = page(&facts("a"), &history(2), LastPlan::Page(&before));
        assert!(
            after.ends_with("<p>as it was</p></html>\n") && !after.contains("<h1>other"),
            "{after}"
        );
        let after = page(&facts("a"), &history(2), LastPlan::Page("<h2>none</h2>"));
        assert!(after.ends_with("</html>\n") && !after.contains("<h2>none"), "{after}");
    }
}
