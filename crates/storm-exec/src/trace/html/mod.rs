//! A trace as a page for people: one file that needs nothing else, neither network nor server.

mod data;
mod kind;
mod tables;
mod units;

use super::summary::{Summary, summarize};
use kind::{Family, Kind};
use std::fmt;
use std::io::{self, Write};
use storm_device::Trace;
use storm_plan::{PerTier, Plan, Queue};
use units::{show_ns, show_share};

/// What a report says besides what the queues did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportFacts {
    /// The heading.
    pub title: String,
    /// More about the run: what, and how much.
    pub rows: Vec<(String, String)>,
    /// Of every tier.
    pub limits: PerTier<TierLimits>,
}

/// How much of a tier a run may take, and what it takes besides the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierLimits {
    /// All that the run may take.
    pub budget_bytes: u64,
    /// What the process holds outside of the plan's memory: a context, libraries.
    pub beside_plan_bytes: u64,
}

/// The page may show its own content and fetch nothing, whatever it contains.
const CONTENT_POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";

/// Writes a trace as a page of HTML: queues and memory over time, with what the compute queue waited
/// for, and the [`Summary`] in tables.
///
/// # Errors
/// From `out`.
pub fn write_html(
    plan: &Plan,
    trace: &Trace,
    facts: &ReportFacts,
    out: &mut impl Write,
) -> io::Result<()> {
    write_html_after(plan, trace, facts, "", out)
}

/// [`write_html`] with some HTML of the caller's before what it says of the step.
///
/// # Errors
/// From `out`.
pub fn write_html_after(
    plan: &Plan,
    trace: &Trace,
    facts: &ReportFacts,
    before: &str,
    out: &mut impl Write,
) -> io::Result<()> {
    let summary = summarize(plan, trace);
    write_head(&facts.title, out)?;
    if !before.is_empty() {
        write_facts(&facts.rows, out)?;
        writeln!(out, "{before}\n{STEP_HEADING}")?;
    }
    writeln!(out, "<p class=\"lead\">{}</p>", Escaped(&lead(&summary)))?;
    if trace.left_out > 0 {
        let left_out = trace.left_out;
        writeln!(out, "<p class=\"lead\">{left_out} more instructions ran and are not shown.</p>")?;
    }
    if before.is_empty() {
        write_facts(&facts.rows, out)?;
    }
    write_timeline(out)?;
    tables::write(plan, &summary, facts, out)?;
    writeln!(
        out,
        "<script type=\"application/json\" id=\"data\">{}</script>\n\
         <script>\n{}\n{}</script>\n</body>\n</html>",
        for_script(&data::json(plan, trace, facts).to_string()),
        include_str!("picture.js"),
        include_str!("pointer.js"),
    )
}

/// What a page says of one step begins with this.
const STEP_HEADING: &str = "<h2>A step as it ran</h2>";

/// What a page of [`write_html_after`] says of its step, to its end: for [`write_html_around`].
pub fn step_section(page: &str) -> Option<&str> {
    page.find(STEP_HEADING).map(|at| &page[at..])
}

/// A page of some HTML of the caller's, and of what another page says of a step, if anything.
///
/// # Errors
/// From `out`.
pub fn write_html_around(
    title: &str,
    rows: &[(String, String)],
    before: &str,
    step_section: Option<&str>,
    out: &mut impl Write,
) -> io::Result<()> {
    write_head(title, out)?;
    write_facts(rows, out)?;
    writeln!(out, "{before}")?;
    match step_section {
        Some(section) => out.write_all(section.as_bytes()),
        None => writeln!(out, "</body>\n</html>"),
    }
}

fn write_head(title: &str, out: &mut impl Write) -> io::Result<()> {
    let title = Escaped(title);
    write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{CONTENT_POLICY}\">\n\
         <title>{title}</title>\n<style>\n{}</style>\n</head>\n<body>\n<h1>{title}</h1>\n",
        include_str!("report.css"),
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

fn write_facts(rows: &[(String, String)], out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "<dl class=\"facts\">")?;
    for (what, value) in rows {
        let (what, value) = (Escaped(what), Escaped(value));
        writeln!(out, "<div><dt>{what}</dt><dd>{value}</dd></div>")?;
    }
    writeln!(out, "</dl>")
}

/// The frame that the script draws in, with its legend.
fn write_timeline(out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "<div class=\"bar\">\n<div class=\"legend\">")?;
    for family in Family::ALL {
        writeln!(out, "<span class=\"family\"><b>{}</b>", family.name())?;
        for kind in Kind::ALL.into_iter().filter(|kind| kind.family() == family) {
            let (key, name) = (kind.key(), kind.name());
            writeln!(out, "<span><i class=\"chip {key}\"></i>{name}</span>")?;
        }
        writeln!(out, "</span>")?;
    }
    writeln!(
        out,
        "<span class=\"family\"><b>memory</b>\
         <span><i class=\"chip memory\"></i>in use</span>\
         <span><i class=\"chip besides\"></i>besides the plan</span></span>\n\
         </div>\n<div class=\"buttons\"><button type=\"button\" id=\"in\">Zoom in</button>\
         <button type=\"button\" id=\"out\">Zoom out</button>\
         <button type=\"button\" id=\"reset\">Whole step</button></div>\n</div>\n\
         <div id=\"frame\"><canvas id=\"picture\" tabindex=\"0\" role=\"img\" \
         aria-label=\"Queues and memory over time; the tables below say the same in numbers\">\
         </canvas><div id=\"tip\" role=\"tooltip\" hidden></div></div>\n\
         <noscript><p>The timeline needs JavaScript; the tables do not.</p></noscript>\n\
         <p class=\"hint\">Wheel or + and − to zoom, drag or arrow keys to move, 0 for the whole \
         step. Where several spans share a pixel, the height of a colour is its share of that \
         time.</p>"
    )
}

/// Text as HTML shows it, in an element or between quotes.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // HTML has no way to write it.
                '\0' => f.write_str("\u{fffd}")?,
                c => write!(f, "{c}")?,
            }
        }
        Ok(())
    }
}

/// Equivalent JSON that cannot end the script element around it.
fn for_script(json: &str) -> String {
    // These are in strings only, where JSON allows them in another form.
    json.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}
