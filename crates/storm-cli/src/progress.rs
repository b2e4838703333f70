//! A status line that is overwritten in place.

use crate::streams;
use std::time::{Duration, Instant};

/// Operations shorter than this show no progress.
const PATIENCE: Duration = Duration::from_secs(2);

/// Shortest time between two updates.
const INTERVAL: Duration = Duration::from_millis(100);

/// Shows a status. Does nothing without a terminal; an empty text clears the line.
pub(crate) fn show(what: &str) {
    match what {
        "" => streams::status(""),
        _ => streams::status(&format!("{what} …")),
    }
}

/// Byte progress of an operation, shown once it has taken a while.
pub(crate) struct Bytes {
    what: &'static str,
    total: u64,
    next: Instant,
}

impl Bytes {
    pub(crate) fn new(what: &'static str, total: u64) -> Bytes {
        Bytes { what, total, next: Instant::now() + PATIENCE }
    }

    /// Reports that `done` bytes are finished.
    pub(crate) fn show(&mut self, done: u64) {
        let now = Instant::now();
        if now >= self.next {
            self.next = now + INTERVAL;
            show(&format!("{} {}", self.what, part(done, self.total)));
        }
    }
}

/// `12.3 of 61.0 GiB`.
fn part(done: u64, total: u64) -> String {
    let (unit, name) = if total >= 1 << 30 { (1u64 << 30, "GiB") } else { (1 << 20, "MiB") };
    let [done, total] = [done, total].map(|bytes| bytes as f64 / unit as f64);
    format!("{done:.1} of {total:.1} {name}")
}

#[cfg(test)]
mod tests {
    use super::part;

    #[test]
    fn both_have_the_unit_of_the_whole() {
        assert_eq!(part(13_207_024_435, 65_498_251_264), "12.3 of 61.0 GiB");
        assert_eq!(part(0, 5 << 20), "0.0 of 5.0 MiB");
        assert_eq!(part(1 << 20, 1 << 30), "0.0 of 1.0 GiB");
    }
}
