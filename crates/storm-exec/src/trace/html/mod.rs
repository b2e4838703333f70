//! A trace as a web page: one self-contained file that needs neither network nor server.

mod data;
mod kind;
pub mod page;
mod tables;
mod units;

use super::summary::{Summary, summarize};
use kind::{Family, Kind};
use page::{Escaped, Row, for_script, write_end, write_head, write_rows};
use std::io::{self, Write};
use storm_device::Trace;
use storm_plan::{PerTier, Plan, Queue};
use units::{show_ns, show_share};

/// Facts on the page besides the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportFacts {
    /// The heading.
    pub title: String,
    /// More about the run, as rows of name and value.
    pub rows: Vec<Row>,
    /// The limits of every tier.
    pub limits: PerTier<TierLimits>,
}

/// The budget of a tier, and its use besides the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierLimits {
    /// The budget of the run.
    pub budget_bytes: u64,
    /// Memory the process holds besides the plan's: context, libraries.
    pub beside_plan_bytes: u64,
}

/// Writes a trace as an HTML page: queues and memory over time, what the compute queue waited for, and the [`Summary`]
/// in tables.
///
/// # Errors
/// From `out`.
pub fn write_html(
    plan: &Plan,
    trace: &Trace,
    facts: &ReportFacts,
    out: &mut impl Write,
) -> io::Result<()> {
    write_head(&facts.title, out)?;
    write_rows(&facts.rows, out)?;
    write_step(plan, trace, facts.limits, out)?;
    write_end(out)
}

/// Writes the part of [`write_html`] about the step, for a larger page.
///
/// # Errors
/// From `out`.
pub fn write_step(
    plan: &Plan,
    trace: &Trace,
    limits: PerTier<TierLimits>,
    out: &mut impl Write,
) -> io::Result<()> {
    let summary = summarize(plan, trace);
    writeln!(out, "<p class=\"lead\">{}</p>", Escaped(&lead(&summary)))?;
    if trace.left_out > 0 {
        let left_out = trace.left_out;
        writeln!(out, "<p class=\"lead\">{left_out} more instructions ran and are not shown.</p>")?;
    }
    write_timeline(out)?;
    tables::write(plan, &summary, limits, out)?;
    writeln!(
        out,
        "<script type=\"application/json\" id=\"data\">{}</script>\n\
         <script>\n\"use strict\";\n{{\n{}\n{}\n{}}}\n</script>",
        for_script(&data::json(plan, trace, limits).to_string()),
        include_str!("unpack.js"),
        include_str!("picture.js"),
        include_str!("pointer.js"),
    )
}

/// The main result in a sentence or two.
fn lead(summary: &Summary) -> String {
    let total = show_ns(summary.total_ns);
    let busy = show_share(summary.busy_share(Queue::COMPUTE));
    let stalled_ns: u64 = summary.stalls.iter().map(|stall| stall.ns).sum();
    let waited = match summary.stalls.first() {
        None => String::new(),
        Some(longest) => format!(
            " It stood still for {}; the largest cause, {}, took {}.",
            show_ns(stalled_ns),
            longest.cause,
            show_ns(longest.ns),
        ),
    };
    format!("The step took {total}. The compute queue worked {busy} of that time.{waited}")
}

/// The frame that the script draws in, with its legend: a key highlights what it stands for.
fn write_timeline(out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "<div class=\"bar\">\n<div class=\"legend\">")?;
    let key = |key: &str, name: &str| {
        format!(
            "<button type=\"button\" class=\"key\" data-kind=\"{key}\" aria-pressed=\"false\">\
             <i class=\"chip {key}\"></i>{name}</button>"
        )
    };
    for family in Family::ALL {
        writeln!(out, "<span class=\"family\"><b>{}</b>", family.name())?;
        for kind in Kind::ALL.into_iter().filter(|kind| kind.family() == family) {
            writeln!(out, "{}", key(kind.key(), kind.name()))?;
        }
        writeln!(out, "</span>")?;
    }
    writeln!(
        out,
        "<span class=\"family\"><b>memory</b>\n{}\n{}</span>\n\
         </div>\n<div class=\"buttons\"><button type=\"button\" id=\"in\">Zoom in</button>\
         <button type=\"button\" id=\"out\">Zoom out</button>\
         <button type=\"button\" id=\"reset\">Whole step</button></div>\n</div>\n\
         <div id=\"frame\"><canvas id=\"picture\" tabindex=\"0\" role=\"img\" \
         aria-label=\"Queues and memory over time; the tables below say the same in numbers\">\
         </canvas><div id=\"tip\" class=\"tip\" role=\"tooltip\" hidden></div></div>\n\
         <noscript><p>The timeline needs JavaScript; the tables do not.</p></noscript>\n\
         <p class=\"hint\">Wheel or + and − to zoom, drag or arrow keys to move, 0 for the whole \
         step; point at a key or tap it to see its kind alone. Where several spans share a pixel, \
         the height of a color is its share of that time.</p>",
        key("memory", "in use"),
        key("besides", "besides the plan"),
    )
}
