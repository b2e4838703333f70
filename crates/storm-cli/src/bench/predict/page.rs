//! The page: what was compared, a table, and two plots.

use super::table::{COLUMNS, cells, plain_cells};
use super::{Found, Task, draw};
use std::io::{self, Write};
use storm_exec::trace::page::{Cell, Row, Table, write_end, write_head, write_rows};

pub(super) fn write(
    name: &str,
    task: &Task,
    rate: f64,
    found: &Found<'_>,
    out: &mut impl Write,
) -> io::Result<()> {
    write_head(&format!("Predictions against plain training: {name}"), out)?;
    let row = |what: &str, value: String| -> Row { (what.to_owned(), value) };
    let phases = &task.phases;
    let mut rows = vec![
        row("steps", phases.steps.to_string()),
        row("seeds", found.plain.seeds.to_string()),
        row("learning rate", format!("{rate}, the best of plain training on validation rows")),
        row("full, correct", format!("{} and {} steps", phases.full, phases.correct)),
        row(
            "probe",
            format!("{} micro-batches, and as many for corrections", phases.probe_batches),
        ),
        row("plain training", format!("{:.1} s", found.plain.seconds)),
    ];
    let problem = |problem: &String| row("wrong", problem.clone());
    rows.extend(found.problems.iter().map(problem));
    write_rows(&rows, out)?;
    let lines = std::iter::once(plain_cells(&found.plain))
        .chain(found.lines.iter().map(|line| cells(line, found.plain.seeds_asked)));
    let rows = lines.map(|cells| {
        let name = cells[0].replace('`', "");
        (name, cells[1..].iter().cloned().map(Cell::Text).collect())
    });
    Table {
        caption: "Means over seeds, with intervals of 95 %. Losses are of test rows, and differences from plain training; \
                  times include everything",
        columns: &COLUMNS,
        rows: rows.collect(),
    }
    .write(out)?;
    let methods: Vec<_> = found
        .lines
        .iter()
        .filter_map(|line| Some((line.method.name, line.found.as_ref()?)))
        .collect();
    let pictures = [draw::curve(&found.curve, &methods), draw::ratios(&methods)];
    for picture in pictures {
        writeln!(out, "<figure>{}</figure>", picture.map_err(io::Error::other)?)?;
    }
    write_end(out)
}
