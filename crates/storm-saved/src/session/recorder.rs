//! Measures the memory use of everything but the saved pieces, by position.

/// The framework's memory use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// In use now.
    pub in_use_bytes: u64,
    /// Allocated in total since the start. Frees are not subtracted.
    pub taken_bytes: u64,
    /// Peak since it was last reset.
    pub peak_bytes: u64,
}

/// What to do with the framework's own peak counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peak {
    /// Leave it unchanged.
    Keep,
    /// Reset it to the current use.
    Forget,
}

/// Records one step.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    positions: Vec<Position>,
}

#[derive(Debug, Default)]
struct Position {
    start: MemoryUse,
    peak_bytes: u64,
    /// Total allocated at the last reading.
    taken_bytes: u64,
    /// Bytes held by the session during the position.
    held_bytes: u64,
    /// Bytes of the pieces that were released during the position.
    given_up_bytes: u64,
}

impl Position {
    /// Peak use without the session's part, if the pieces released in this position had stayed.
    /// When they were released within the position is unknown, but two upper bounds hold.
    fn other_bytes(&self) -> u64 {
        let taken = self.taken_bytes.saturating_sub(self.start.taken_bytes);
        let nothing_given_back = self.start.in_use_bytes + taken;
        let all_stayed = self.peak_bytes + self.given_up_bytes;
        let most = self.peak_bytes.max(all_stayed.min(nothing_given_back));
        most.saturating_sub(self.held_bytes)
    }
}

impl Recorder {
    /// Begins a position in which the session holds `held_bytes`. `given_up_bytes` were released in
    /// the previous position.
    pub(super) fn begin(&mut self, now: Option<MemoryUse>, held_bytes: u64, given_up_bytes: u64) {
        self.look(now);
        if let Some(before) = self.positions.last_mut() {
            before.given_up_bytes = given_up_bytes;
        }
        let start = now.unwrap_or_default();
        self.positions.push(Position {
            start,
            peak_bytes: start.in_use_bytes,
            taken_bytes: start.taken_bytes,
            held_bytes,
            given_up_bytes: 0,
        });
    }

    /// Updates the current position.
    pub(super) fn look(&mut self, now: Option<MemoryUse>) {
        if let (Some(now), Some(position)) = (now, self.positions.last_mut()) {
            position.peak_bytes = position.peak_bytes.max(now.peak_bytes);
            position.taken_bytes = now.taken_bytes;
        }
    }

    /// The session itself allocated memory.
    pub(super) fn took(&mut self, bytes: u64) {
        if let Some(position) = self.positions.last_mut() {
            position.held_bytes += bytes;
        }
    }

    pub(super) fn baseline_bytes(&self) -> u64 {
        self.positions.first().map_or(0, |position| position.start.in_use_bytes)
    }

    /// By position, the peak use without the session's part.
    pub(super) fn other_bytes(&self) -> Vec<u64> {
        self.positions.iter().map(Position::other_bytes).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(in_use_bytes: u64, peak_bytes: u64, taken_bytes: u64) -> Option<MemoryUse> {
        Some(MemoryUse { in_use_bytes, taken_bytes, peak_bytes })
    }

    #[test]
    fn takes_the_sessions_part_off() {
        let mut recorder = Recorder::default();
        recorder.begin(at(100, 999, 1000), 0, 0);
        recorder.begin(at(110, 160, 1090), 30, 0);
        recorder.took(20);
        recorder.begin(at(90, 150, 1200), 0, 0);
        recorder.look(at(80, 120, 1300));
        recorder.look(at(70, 120, 1300));
        assert_eq!(recorder.baseline_bytes(), 100);
        assert_eq!(recorder.other_bytes(), [160, 100, 120]);
    }

    #[test]
    fn what_was_given_up_may_have_to_stay_at_the_peak() {
        let other = |taken: u64, given_up_bytes: u64| {
            let mut recorder = Recorder::default();
            recorder.begin(at(100, 100, 0), 0, 0);
            recorder.begin(at(80, 120, taken), 0, given_up_bytes);
            recorder.other_bytes()[0]
        };
        assert_eq!(other(70, 0), 120);
        assert_eq!(other(70, 30), 150, "the peak may have come after it went");
        assert_eq!(other(25, 30), 125, "no more than that was taken");
    }

    #[test]
    fn knows_nothing_where_nobody_counts() {
        let mut recorder = Recorder::default();
        recorder.begin(None, 50, 0);
        recorder.took(20);
        recorder.begin(None, 0, 0);
        assert_eq!(recorder.other_bytes(), [0, 0]);
    }
}
