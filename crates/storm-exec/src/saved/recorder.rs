//! How much memory everything but the saved pieces takes, position by position.

/// The framework's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// In use now.
    pub in_use_bytes: u64,
    /// The most that was in use since the peak was last forgotten.
    pub peak_bytes: u64,
}

/// What becomes of the framework's own record of its peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peak {
    /// It goes on.
    Keep,
    /// It begins anew, from what is in use now.
    Forget,
}

/// Follows one step.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    baseline_bytes: u64,
    positions: Vec<Position>,
}

#[derive(Debug, Default)]
struct Position {
    peak_bytes: u64,
    /// What the session holds while it lasts.
    held_bytes: u64,
}

impl Recorder {
    /// A position begins, with so much held by the session. `now` tells the peak of the one before.
    pub(super) fn begin(&mut self, now: Option<MemoryUse>, held_bytes: u64) {
        let now = now.unwrap_or_default();
        match self.positions.last_mut() {
            Some(before) => before.peak_bytes = before.peak_bytes.max(now.peak_bytes),
            None => self.baseline_bytes = now.in_use_bytes,
        }
        self.positions.push(Position { peak_bytes: now.in_use_bytes, held_bytes });
    }

    /// The position goes on.
    pub(super) fn look(&mut self, now: Option<MemoryUse>) {
        if let (Some(now), Some(position)) = (now, self.positions.last_mut()) {
            position.peak_bytes = position.peak_bytes.max(now.peak_bytes);
        }
    }

    /// The session took memory itself.
    pub(super) fn took(&mut self, bytes: u64) {
        if let Some(position) = self.positions.last_mut() {
            position.held_bytes += bytes;
        }
    }

    pub(super) fn baseline_bytes(&self) -> u64 {
        self.baseline_bytes
    }

    /// By position, the most that was in use without the session's part.
    pub(super) fn other_bytes(&self) -> Vec<u64> {
        let bytes = self.positions.iter();
        bytes.map(|position| position.peak_bytes.saturating_sub(position.held_bytes)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(in_use_bytes: u64, peak_bytes: u64) -> Option<MemoryUse> {
        Some(MemoryUse { in_use_bytes, peak_bytes })
    }

    #[test]
    fn takes_the_sessions_part_off() {
        let mut recorder = Recorder::default();
        recorder.begin(at(100, 999), 0);
        recorder.begin(at(110, 160), 30);
        recorder.took(20);
        recorder.begin(at(90, 150), 0);
        recorder.look(at(80, 120));
        recorder.look(at(70, 120));
        assert_eq!(recorder.baseline_bytes(), 100);
        assert_eq!(recorder.other_bytes(), [160, 100, 120]);
    }

    #[test]
    fn knows_nothing_where_nobody_counts() {
        let mut recorder = Recorder::default();
        recorder.begin(None, 50);
        recorder.took(20);
        recorder.begin(None, 0);
        assert_eq!(recorder.other_bytes(), [0, 0]);
    }
}
