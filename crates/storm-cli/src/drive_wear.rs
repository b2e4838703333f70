//! Drive wear: how long a drive's endurance rating lasts, and the confirmation before a run that uses much of it.

use crate::{UsageError, streams};
use anyhow::Result;
use std::io::{self, BufRead, IsTerminal};
use storm_host::DriveWear;

/// Daily writes allowed on a drive of unknown endurance.
const DAY_BYTES_MAX: f64 = 50e12;

/// Ask before a run that uses a larger share of the drive's endurance within 30 days.
const MONTH_SHARE: f64 = 0.1;

/// What is known about a drive's endurance.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Drive {
    /// Endurance in bytes written, as given by the user.
    pub(crate) given_bytes: Option<u64>,
    /// Wear as reported by the drive.
    pub(crate) wear: Option<DriveWear>,
}

impl Drive {
    /// Endurance in bytes written.
    pub(crate) fn rated_bytes(&self) -> Option<u64> {
        self.given_bytes.or_else(|| self.wear.and_then(|wear| wear.rated_bytes()))
    }

    /// Describes how long the endurance lasts at this many bytes per day; empty if nothing is written or known.
    pub(crate) fn words(&self, day: f64) -> String {
        let used = self.wear.map_or(String::new(), |wear| {
            format!(
                "; the drive says that {} % of its life are used, with {} written",
                wear.used_percent,
                terabytes(wear.written_bytes as f64)
            )
        });
        let Some(rated) = self.rated_bytes().filter(|_| day > 0.0) else { return used };
        let left = rated.saturating_sub(self.wear.map_or(0, |wear| wear.written_bytes));
        let source = match self.given_bytes {
            Some(_) => "that the drive is rated for",
            None => "that the drive seems to be rated for, estimated from what it reports",
        };
        let days = left as f64 / day;
        format!("{used}, {days:.0} days until the {} {source}", terabytes(rated as f64))
    }

    /// Refuses heavy writes to a drive of unknown endurance. Asks before using up the endurance soon: with a prompt at
    /// a terminal, elsewhere by requiring an option.
    pub(crate) fn check(&self, day: f64, accepts: bool) -> Result<()> {
        let Some(rated) = self.rated_bytes() else {
            return match day > DAY_BYTES_MAX {
                false => Ok(()),
                true => Err(UsageError(format!(
                    "the run would write {} a day to the disk; give the rated endurance of the drive (TBW in its data \
                     sheet), such as --disk-endurance 1200TB",
                    terabytes(day)
                ))
                .into()),
            };
        };
        let share = 30.0 * day / (rated as f64).max(1.0);
        if share <= MONTH_SHARE {
            return Ok(());
        }
        let problem = format!(
            "the run writes {} a day to the disk, which in 30 days is {:.0} % of what the drive is rated for",
            terabytes(day),
            100.0 * share
        );
        if accepts || is_confirmed(&problem) {
            eprintln!("warning: {problem}");
            return Ok(());
        }
        Err(UsageError(format!("{problem}; give --accept-wear true to run it anyway")).into())
    }
}

/// Asks for confirmation at a terminal; false elsewhere.
fn is_confirmed(problem: &str) -> bool {
    if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
        return false;
    }
    streams::ask(&format!("{problem}. Continue? [y/N] "));
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.is_ok() && is_yes(&answer)
}

fn is_yes(answer: &str) -> bool {
    matches!(answer.trim().to_lowercase().as_str(), "y" | "yes")
}

/// `1.2 TB`.
pub(crate) fn terabytes(bytes: f64) -> String {
    match bytes < 1e12 {
        true => format!("{:.1} GB", bytes / 1e9),
        false => format!("{:.1} TB", bytes / 1e12),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORN: DriveWear = DriveWear { used_percent: 50, written_bytes: 600_000_000_000_000 };

    #[test]
    fn days_count_what_is_left() {
        let given = Drive { given_bytes: Some(1_200_000_000_000_000), wear: None };
        assert_eq!(
            given.words(1e12),
            ", 1200 days until the 1200.0 TB that the drive is rated for"
        );
        assert_eq!(
            (given.words(0.0), Drive::default().words(1e12)),
            (String::new(), String::new())
        );
        let both = Drive { wear: Some(WORN), ..given };
        let words = both.words(1e12);
        assert!(words.contains("50 % of its life are used, with 600.0 TB written"), "{words}");
        assert!(words.contains(", 600 days until the 1200.0 TB that"), "{words}");
        let known = Drive { given_bytes: None, wear: Some(WORN) };
        assert_eq!(known.rated_bytes(), given.given_bytes);
        assert!(known.words(1e12).contains("seems to be rated for"));
        let over = DriveWear { used_percent: 200, ..WORN };
        let over = Drive { given_bytes: Some(500_000_000_000_000), wear: Some(over) };
        assert!(over.words(1e12).contains(", 0 days until"), "{}", over.words(1e12));
    }

    #[test]
    fn much_wear_needs_consent() {
        let unknown = Drive::default();
        assert!(unknown.check(49e12, false).is_ok());
        let error = unknown.check(51e12, true).unwrap_err().to_string();
        assert!(error.contains("--disk-endurance"), "{error}");
        let known = Drive { given_bytes: Some(3_000_000_000_000_000), wear: None };
        // A tenth of 3000 TB in 30 days is 10 TB a day.
        assert!(known.check(10e12, false).is_ok());
        let error = known.check(10.5e12, false).unwrap_err().to_string();
        assert!(error.contains("10.5 TB a day") && error.contains("--accept-wear"), "{error}");
        assert!(known.check(60e12, true).is_ok());
    }

    #[test]
    fn only_yes_is_yes() {
        assert!(["y\n", "Yes\n", " YES "].into_iter().all(is_yes));
        assert!(!["\n", "", "n\n", "yeah\n"].into_iter().any(is_yes));
    }
}
