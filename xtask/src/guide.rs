//! `cargo xtask guide`: generates the tables of docs/guide.md and README.md from plans.

use crate::args::Args;
use crate::{process, workspace};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A card of each common size, by the name of its profile.
const CARDS: [(&str, &str); 4] = [
    ("8 GB", "rtx-4060"),
    ("12 GB", "rtx-3060-12gb"),
    ("16 GB", "rtx-5060-ti-16gb"),
    ("24 GB", "rtx-4090"),
];

const MODELS: [&str; 5] =
    ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b"];

/// Memory of a machine, and how much of it a run can use.
const RAM: [(&str, &str); 4] =
    [("16 GB", "12GiB"), ("32 GB", "28GiB"), ("64 GB", "60GiB"), ("128 GB", "124GiB")];

const TOKENS_PER_STEP: &str = "32768";

/// The number of tokens for which the tables show the time.
const TOKENS: f64 = 10e6;

/// The result of `storm plan` for a card, a model and a machine.
#[derive(Clone, Copy)]
struct Cell {
    parameters: f64,
    /// `None` if no plan fits.
    tokens_per_second: Option<f64>,
}

/// Speeds of one card: a row for each model, a column for each machine.
type Grid = Vec<Vec<Cell>>;

pub(crate) fn run(mut args: Args) -> Result<()> {
    let check = args.flag("--check");
    let storm: Option<PathBuf> = args.value("--storm")?;
    args.finish()?;
    let storm = match storm {
        Some(path) => path,
        None => {
            process::run(process::cargo().args(["build", "--release", "-p", "storm-cli"]))?;
            workspace::release_dir().join("storm")
        }
    };
    // One thread for each card, because a plan takes seconds on one core.
    let grids: Vec<Grid> = std::thread::scope(|scope| {
        let storm = &storm;
        let threads = CARDS.map(|(_, card)| scope.spawn(move || plans(storm, card)));
        let grids = threads.into_iter().map(|thread| thread.join().expect("plans do not panic"));
        grids.collect::<Result<_>>()
    })?;

    let guide = workspace::root().join("docs/guide.md");
    let readme = workspace::root().join("README.md");
    let blocks = [(&guide, "summary", summary(&grids)), (&guide, "cards", cards(&grids))];
    for (path, name, block) in blocks.into_iter().chain([(&readme, "summary", summary(&grids))]) {
        put(path, name, &block, check)?;
    }
    Ok(())
}

fn plans(storm: &Path, card: &str) -> Result<Grid> {
    let row = |model: &&str| -> Result<Vec<Cell>> {
        RAM.iter().map(|(_, ram)| plan(storm, card, model, ram)).collect()
    };
    MODELS.iter().map(row).collect()
}

fn plan(storm: &Path, card: &str, model: &str, ram: &str) -> Result<Cell> {
    let mut command = Command::new(storm);
    command.args(["plan", "--json", "--model", model, "--hardware", card, "--ram", ram]);
    command.args(["--tokens-per-step", TOKENS_PER_STEP]);
    // Ignore measured profiles in this machine's cache: the tables are based on data sheets.
    command.env("STORM_CACHE", workspace::target_dir().join("guide-cache"));
    let output = command.output().with_context(|| format!("cannot start {}", storm.display()))?;
    let object: Value = serde_json::from_slice(&output.stdout).with_context(|| {
        format!("{model} on {card}: {}", String::from_utf8_lossy(&output.stderr))
    })?;
    let parameters = object["parameters"].as_f64().context("a plan has `parameters`")?;
    let tokens_per_second = match object["feasible"].as_bool() {
        Some(true) => object["tokens_per_second"].as_f64(),
        _ => None,
    };
    eprintln!("{card} {model} {ram}: {tokens_per_second:?} tokens/s");
    Ok(Cell { parameters, tokens_per_second })
}

/// The largest model that fits each card and machine.
fn summary(grids: &[Grid]) -> String {
    let mut text = heading("card");
    for ((size, card), grid) in CARDS.iter().zip(grids) {
        let cells = (0..RAM.len()).map(|ram| {
            let fits = |cell: &Cell| cell.tokens_per_second.map(|speed| (cell.parameters, speed));
            match grid.iter().filter_map(|row| fits(&row[ram])).next_back() {
                Some((parameters, speed)) => {
                    format!("**{}**: {}", billions(parameters), shown(speed))
                }
                None => "–".to_owned(),
            }
        });
        let cells: Vec<String> = cells.collect();
        let _ = writeln!(text, "| {size} (`{card}`) | {} |", cells.join(" | "));
    }
    text
}

/// A table for each card.
fn cards(grids: &[Grid]) -> String {
    let mut text = String::new();
    for ((size, card), grid) in CARDS.iter().zip(grids) {
        let _ = writeln!(text, "### A card with {size}: `{card}`\n");
        text += &heading("model");
        for (model, row) in MODELS.iter().zip(grid) {
            let cell = |cell: &Cell| cell.tokens_per_second.map_or_else(|| "–".to_owned(), shown);
            let cells: Vec<String> = row.iter().map(cell).collect();
            let _ = writeln!(text, "| `{model}` | {} |", cells.join(" | "));
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text + "\n"
}

fn heading(first: &str) -> String {
    let columns: Vec<String> = RAM.iter().map(|(size, _)| format!("{size} of RAM")).collect();
    format!("| {first} | {} |\n|---|{}\n", columns.join(" | "), "---|".repeat(RAM.len()))
}

/// For example `940 tok/s, 3.0 h`. Two digits already exceed the accuracy of a data sheet.
fn shown(tokens_per_second: f64) -> String {
    format!(
        "{} tok/s, {}",
        grouped(two_digits(tokens_per_second)),
        time(TOKENS / tokens_per_second)
    )
}

fn two_digits(value: f64) -> f64 {
    let unit = 10f64.powf((value.log10().floor() - 1.0).max(0.0));
    (value / unit).round() * unit
}

fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    match digits.split_at_checked(digits.len().saturating_sub(3)) {
        Some((thousands, rest)) if !thousands.is_empty() => format!("{thousands},{rest}"),
        _ => digits,
    }
}

fn time(seconds: f64) -> String {
    let hours = seconds / 3600.0;
    match hours {
        ..0.95 => format!("{:.0} min", two_digits(seconds / 60.0)),
        ..9.95 => format!("{hours:.1} h"),
        ..48.0 => format!("{hours:.0} h"),
        _ => format!("{:.1} days", hours / 24.0),
    }
}

fn billions(parameters: f64) -> String {
    let billions = parameters / 1e9;
    if billions < 10.0 { format!("{billions:.1}B") } else { format!("{billions:.0}B") }
}

/// Replaces what is between the markers of a block. With `check`, fails if it differs.
fn put(path: &Path, name: &str, block: &str, check: bool) -> Result<()> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let new = replaced(&text, name, block).with_context(|| {
        format!("{} has no block `{name}` of `cargo xtask guide`", path.display())
    })?;
    if check && new != text {
        bail!(
            "the table `{name}` in {} is not what plans give: run `cargo xtask guide`",
            path.display()
        );
    }
    if new != text {
        std::fs::write(path, new).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn replaced(text: &str, name: &str, block: &str) -> Option<String> {
    let begin = format!("<!-- cargo xtask guide: {name} -->\n");
    let end = format!("<!-- end of {name} -->");
    let from = text.find(&begin)? + begin.len();
    let to = from + text[from..].find(&end)?;
    Some(format!("{}\n{block}\n{}", &text[..from], &text[to..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_two_digits() {
        assert_eq!(shown(935.7), "940 tok/s, 3.0 h");
        assert_eq!(shown(12_345.0), "12,000 tok/s, 14 min");
        assert_eq!(shown(42.0), "42 tok/s, 2.8 days");
        assert_eq!(billions(494_032_768.0), "0.5B");
        assert_eq!(billions(14_770_033_664.0), "15B");
    }

    #[test]
    fn the_largest_model_that_fits_is_shown() {
        let cell = |parameters, tokens_per_second| Cell { parameters, tokens_per_second };
        let row =
            |parameters, speeds: [Option<f64>; 4]| speeds.map(|s| cell(parameters, s)).to_vec();
        let grid =
            vec![row(1e9, [Some(900.0); 4]), row(7e9, [None, None, Some(100.0), Some(200.0)])];
        let text = summary(&[grid]);
        let wanted = "| 8 GB (`rtx-4060`) | **1.0B**: 900 tok/s, 3.1 h | **1.0B**: 900 tok/s, 3.1 h | \
                      **7.0B**: 100 tok/s, 28 h | **7.0B**: 200 tok/s, 14 h |";
        assert!(text.contains(wanted), "{text}");
    }

    #[test]
    fn only_the_block_is_replaced() {
        let text = "a\n<!-- cargo xtask guide: x -->\nold\n<!-- end of x -->\nb\n";
        let new = replaced(text, "x", "new\n").unwrap();
        assert_eq!(new, "a\n<!-- cargo xtask guide: x -->\n\nnew\n\n<!-- end of x -->\nb\n");
        assert_eq!(replaced(&new, "x", "new\n").unwrap(), new);
        assert_eq!(replaced(text, "y", "new\n"), None);
    }
}
