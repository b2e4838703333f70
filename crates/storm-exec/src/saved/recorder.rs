//! How much memory everything but the saved pieces takes, position by position.

/// The framework's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// In use now.
    pub in_use_bytes: u64,
    /// Taken since the start, whatever was given back meanwhile.
    pub taken_bytes: u64,
    /// The most that was in use.
    pub peak_bytes: u64,
}

/// Follows one step. Only calls of the session are seen; of what is taken between two of them, nothing
/// counts as given back before the second.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    positions: Vec<Position>,
    peak_bytes: u64,
}

#[derive(Debug)]
struct Position {
    start: MemoryUse,
    /// Taken when it was last looked at.
    taken_bytes: u64,
    /// Pieces that the session held at its start.
    held_bytes: u64,
    /// What the session took itself since.
    own_bytes: u64,
}

impl Recorder {
    /// A position begins, with so much held by the session.
    pub(super) fn begin(&mut self, now: Option<MemoryUse>, held_bytes: u64) {
        self.look(now);
        let start = now.unwrap_or_default();
        let taken_bytes = start.taken_bytes;
        self.positions.push(Position { start, taken_bytes, held_bytes, own_bytes: 0 });
    }

    /// The position goes on.
    pub(super) fn look(&mut self, now: Option<MemoryUse>) {
        let Some(now) = now else { return };
        self.peak_bytes = now.peak_bytes;
        if let Some(position) = self.positions.last_mut() {
            position.taken_bytes = now.taken_bytes;
        }
    }

    /// The session took memory itself.
    pub(super) fn took(&mut self, bytes: u64) {
        if let Some(position) = self.positions.last_mut() {
            position.own_bytes += bytes;
        }
    }

    pub(super) fn baseline_bytes(&self) -> u64 {
        self.positions.first().map_or(0, |position| position.start.in_use_bytes)
    }

    /// By position, the most that was in use without the session's part.
    pub(super) fn other_bytes(&self) -> Vec<u64> {
        let bytes = self.positions.iter().map(|position| {
            let taken = position.taken_bytes.saturating_sub(position.start.taken_bytes);
            let most = (position.start.in_use_bytes + taken).min(self.peak_bytes);
            most.saturating_sub(position.held_bytes + position.own_bytes)
        });
        bytes.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(in_use_bytes: u64, taken_bytes: u64) -> Option<MemoryUse> {
        Some(MemoryUse { in_use_bytes, taken_bytes, peak_bytes: 170 })
    }

    #[test]
    fn takes_the_sessions_part_off() {
        let mut recorder = Recorder::default();
        recorder.begin(at(100, 1000), 0);
        // 60 are taken, 50 of them given back.
        recorder.begin(at(110, 1060), 30);
        recorder.took(20);
        recorder.look(at(90, 1100));
        // More is taken than was ever in use at once.
        recorder.begin(at(90, 1100), 0);
        recorder.look(at(90, 1300));
        assert_eq!(recorder.baseline_bytes(), 100);
        assert_eq!(recorder.other_bytes(), [160, 100, 170]);
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
