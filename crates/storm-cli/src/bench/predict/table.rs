//! The table, as Markdown, as JSON and for the page.

use super::compare::{Comparison, Estimate, Timed};
use super::methods::Method;
use serde_json::{Value, json};

/// A method and its comparison, which is `None` until it has a finished run.
pub(super) struct Line<'a> {
    pub(super) method: &'a Method,
    pub(super) found: Option<Comparison>,
}

/// The plain runs with as many steps as the methods.
pub(super) struct Plain {
    pub(super) test_loss: Estimate,
    pub(super) seeds: usize,
    /// Seeds of the whole table.
    pub(super) seeds_asked: usize,
    pub(super) steps: u64,
    pub(super) seconds: f64,
}

pub(super) const COLUMNS: [&str; 8] = [
    "method",
    "test loss",
    "loss at equal steps",
    "cost in steps",
    "loss at equal time",
    "time to the same loss, in steps",
    "the same, in seconds",
    "jumps accepted, corrections kept",
];

fn interval(estimate: &Estimate, digits: usize, sign: bool) -> String {
    let Estimate { mean, low, high } = *estimate;
    let mean = if sign { format!("{mean:+.digits$}") } else { format!("{mean:.digits$}") };
    match low.is_finite() && high.is_finite() {
        true if sign => format!("{mean} [{low:+.digits$}, {high:+.digits$}]"),
        true => format!("{mean} [{low:.digits$}, {high:.digits$}]"),
        false => mean,
    }
}

/// With a sign if the curve of plain training gives only a bound.
fn ratio(timed: &Timed) -> String {
    let sign = match (timed.before, timed.beyond) {
        (0, 0) => "",
        (_, 0) => "≥ ",
        (0, _) => "≤ ",
        _ => "about ",
    };
    format!("{sign}{}", interval(&timed.ratio, 3, false))
}

/// Says how many seeds a row has, if some are missing.
fn of_seeds(seeds: usize, asked: usize) -> String {
    match seeds < asked {
        true => format!(" ({seeds} of {asked} seeds)"),
        false => String::new(),
    }
}

/// The cells of a method, starting with its name, in a table of this many seeds.
pub(super) fn cells(line: &Line<'_>, seeds_asked: usize) -> Vec<String> {
    let seeds = line.found.as_ref().map_or(seeds_asked, |found| found.seeds);
    let seeds = of_seeds(seeds, seeds_asked);
    let name = format!("`{}`: {}{seeds}", line.method.name, line.method.words);
    let Some(found) = &line.found else {
        return std::iter::once(name)
            .chain(std::iter::once("not run yet".to_owned()))
            .chain(std::iter::repeat_n(String::new(), COLUMNS.len() - 2))
            .collect();
    };
    let jumps = match found.accepted + found.refused {
        0 => String::new(),
        all => format!("{} of {all}", found.accepted),
    };
    let kept = match found.kept + found.undone {
        0 => String::new(),
        all => format!(", {} of {all}", found.kept),
    };
    vec![
        name,
        format!("{:.4}", found.test_loss),
        interval(&found.equal_steps, 4, true),
        format!("{:.0}", found.by_steps.cost),
        interval(&found.by_steps.equal_time, 4, true),
        ratio(&found.by_steps),
        ratio(&found.by_seconds),
        format!("{jumps}{kept}"),
    ]
}

/// The cells of plain training.
pub(super) fn plain_cells(plain: &Plain) -> Vec<String> {
    let mut cells = vec![
        format!("plain training, tuned{}", of_seeds(plain.seeds, plain.seeds_asked)),
        format!("{:.4}", plain.test_loss.mean),
        String::new(),
        plain.steps.to_string(),
    ];
    cells.resize(COLUMNS.len(), String::new());
    cells
}

pub(super) fn markdown(plain: &Plain, lines: &[Line<'_>]) -> String {
    let row = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = row(&COLUMNS.map(str::to_owned));
    text.push_str(&format!("|{}\n", "---|".repeat(COLUMNS.len())));
    text.push_str(&row(&plain_cells(plain)));
    lines.iter().for_each(|line| text.push_str(&row(&cells(line, plain.seeds_asked))));
    text
}

fn estimate(estimate: &Estimate) -> Value {
    // JSON has no infinity. With one seed there is no interval, and its ends become null.
    json!({"mean": estimate.mean, "low": estimate.low, "high": estimate.high})
}

fn timed(timed: &Timed) -> Value {
    json!({
        "cost": timed.cost,
        "loss_at_equal_time": estimate(&timed.equal_time),
        "time_ratio": estimate(&timed.ratio),
        "seeds_before_curve": timed.before,
        "seeds_beyond_curve": timed.beyond,
    })
}

pub(super) fn plain_object(plain: &Plain, rate: f64) -> Value {
    json!({
        "method": "plain", "seeds": plain.seeds, "steps": plain.steps, "learning_rate": rate,
        "test_loss": estimate(&plain.test_loss), "seconds": plain.seconds,
    })
}

/// `None` until it has a finished run.
pub(super) fn object(line: &Line<'_>) -> Option<Value> {
    let found = line.found.as_ref()?;
    Some(json!({
        "method": line.method.name,
        "seeds": found.seeds,
        "test_loss": found.test_loss,
        "loss_at_equal_steps": estimate(&found.equal_steps),
        "in_steps": timed(&found.by_steps),
        "in_seconds": timed(&found.by_seconds),
        "accepted": found.accepted,
        "refused": found.refused,
        "kept": found.kept,
        "undone": found.undone,
        "distance_min": found.distance_min,
        "brier": found.brier,
        "cost": found.cost,
    }))
}

/// Replaces the text between the markers of a task with the table. `None` if there are no such
/// markers.
pub(super) fn put_between(text: &str, task: &str, table: &str) -> Option<String> {
    let (begin, end) =
        (format!("<!-- storm bench predict: {task} -->"), format!("<!-- end of {task} -->"));
    let first = text.find(&begin)? + begin.len();
    let last = first + text[first..].find(&end)?;
    Some(format!("{}\n\n{table}\n{}", &text[..first], &text[last..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_replaces_the_one_between_its_marks() {
        let text = "a\n<!-- storm bench predict: x -->\nold\n<!-- end of x -->\nb\n";
        let once = put_between(text, "x", "| new |").expect("marks");
        let expected = "a\n<!-- storm bench predict: x -->\n\n| new |\n<!-- end of x -->\nb\n";
        assert_eq!(once, expected);
        assert_eq!(put_between(&once, "x", "| new |").as_deref(), Some(expected), "again");
        assert_eq!(put_between(text, "y", "| new |"), None);
    }

    #[test]
    fn a_row_says_which_seeds_are_missing() {
        assert_eq!(of_seeds(2, 5), " (2 of 5 seeds)");
        assert_eq!(of_seeds(5, 5), "");
        let plain = Plain {
            test_loss: Estimate::of(&[0.5]).expect("one"),
            seeds: 1,
            seeds_asked: 3,
            steps: 10,
            seconds: 1.0,
        };
        assert_eq!(plain_cells(&plain)[0], "plain training, tuned (1 of 3 seeds)");
    }

    #[test]
    fn one_seed_has_no_interval() {
        let one = Estimate::of(&[0.5]).expect("one");
        assert_eq!(interval(&one, 2, true), "+0.50");
        let two = Estimate::of(&[0.5, 0.5]).expect("two");
        assert_eq!(interval(&two, 2, false), "0.50 [0.50, 0.50]");
        assert!(estimate(&one)["low"].is_null());
    }
}
