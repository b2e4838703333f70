//! Checks and their verdicts, printed line by line as tables, or as one JSON object.

use super::claims::{Claim, Verdict};
use anyhow::{Result, bail};
use serde_json::{Value, json};

pub(super) struct Sheet {
    card: String,
    /// Used for JSON only.
    checks: Option<Vec<Value>>,
    failed: usize,
}

impl Sheet {
    pub(super) fn new(as_json: bool, card: &str) -> Sheet {
        let sheet = Sheet { card: card.to_owned(), checks: as_json.then(Vec::new), failed: 0 };
        sheet.head(card);
        sheet
    }

    /// Prints a line that is not a check.
    pub(super) fn head(&self, line: &str) {
        if self.checks.is_none() {
            println!("{line}");
        }
    }

    /// Adds a check: fields for JSON, a line for the table.
    pub(super) fn row(&mut self, kind: &str, passed: bool, object: Value, line: &str) {
        let verdict = if passed { "pass" } else { "fail" };
        self.add(kind, verdict, object, line);
    }

    pub(super) fn claim(&mut self, claim: &Claim) {
        let Claim { what, bar, figure, verdict } = claim;
        let (name, words) = match verdict {
            Verdict::Pass => ("pass", format!("PASS {figure}")),
            Verdict::Fail => ("fail", format!("FAIL {figure}")),
            Verdict::Skipped(reason) => ("skip", format!("SKIP {reason}")),
        };
        let line = format!("{what:<36} {bar:<26} {words}");
        let object = json!({"what": what, "bar": bar, "figure": figure});
        self.add("claims", name, object, &line);
    }

    fn add(&mut self, kind: &str, verdict: &str, mut object: Value, line: &str) {
        self.failed += usize::from(verdict == "fail");
        let Some(checks) = &mut self.checks else {
            println!("{line}");
            return;
        };
        object["kind"] = json!(kind);
        object["verdict"] = json!(verdict);
        object["line"] = json!(line.trim());
        checks.push(object);
    }

    /// Prints the JSON object. Fails if a check failed.
    pub(super) fn finish(self) -> Result<()> {
        let Sheet { card, checks, failed } = self;
        if let Some(checks) = checks {
            println!("{:#}", json!({"card": card, "checks": checks, "failed": failed}));
        }
        match failed {
            0 => Ok(()),
            _ => bail!("{failed} checks failed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_are_counted_and_collected() {
        let mut sheet = Sheet::new(true, "a card");
        sheet.row("ops", true, json!({"op": "add"}), "add PASS");
        sheet.row("ops", false, json!({"op": "mul"}), " mul FAIL");
        let checks = sheet.checks.as_ref().expect("for programs");
        assert_eq!(
            checks[1],
            json!({"op": "mul", "kind": "ops", "verdict": "fail", "line": "mul FAIL"})
        );
        assert_eq!(sheet.finish().expect_err("one failed").to_string(), "1 checks failed");
    }
}
