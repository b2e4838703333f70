//! Recordings of earlier steps, and the plans made from them.

use crate::plan::{Allowance, Recording, SavedPlan, plan_saved};
use std::sync::Arc;

/// Maximum number of recordings kept: training, a smaller last batch, a second model.
const RECORDINGS_MAX: usize = 8;

/// A plan is still valid if a step begins with at most this much more memory in use than planned.
const TOLERANCE_BYTES: i64 = 4 << 20;

/// With at least this much less memory in use, a new plan is worthwhile.
const WORTHWHILE_BYTES: i64 = 64 << 20;

/// Recordings, most recently used first.
#[derive(Debug, Default)]
pub(super) struct Recordings {
    known: Vec<Known>,
    numbers: u64,
}

#[derive(Debug)]
struct Known {
    number: u64,
    recording: Recording,
    plan: Option<Arc<SavedPlan>>,
    /// Consecutive steps that began with far less memory in use than planned for.
    low_steps: u32,
}

impl Recordings {
    pub(super) fn get(&self, number: u64) -> Option<&Recording> {
        self.known.iter().find(|known| known.number == number).map(|known| &known.recording)
    }

    /// Adds a recording and replaces one with the same piece sizes.
    pub(super) fn add(&mut self, recording: Recording) {
        let sizes = |recording: &Recording| -> Vec<usize> {
            recording.pieces.iter().map(|piece| piece.bytes).collect()
        };
        self.known.retain(|known| sizes(&known.recording) != sizes(&recording));
        self.numbers += 1;
        let number = self.numbers;
        self.known.insert(0, Known { number, recording, plan: None, low_steps: 0 });
        self.known.truncate(RECORDINGS_MAX);
    }

    /// Finds a recording that begins with pieces of these sizes.
    pub(super) fn find(&mut self, sizes: impl Iterator<Item = usize> + Clone) -> Option<u64> {
        let index = self.known.iter().position(|known| {
            let mut pieces = known.recording.pieces.iter();
            sizes.clone().all(|bytes| pieces.next().is_some_and(|piece| piece.bytes == bytes))
        })?;
        let known = self.known.remove(index);
        let number = known.number;
        self.known.insert(0, known);
        Some(number)
    }

    /// The plan for a step that begins with this much memory in use.
    pub(super) fn plan(
        &mut self,
        number: u64,
        allowance: Allowance,
        in_use_bytes: u64,
    ) -> Option<Arc<SavedPlan>> {
        let known = self.known.iter_mut().find(|known| known.number == number)?;
        let shift = in_use_bytes as i64 - known.recording.baseline_bytes as i64;
        if let Some(plan) = &known.plan {
            let low = shift < plan.baseline_shift - WORTHWHILE_BYTES;
            known.low_steps = if low { known.low_steps + 1 } else { 0 };
            // With gradient accumulation, steps with and without gradients in memory alternate.
            let high = shift > plan.baseline_shift + TOLERANCE_BYTES;
            if !high && known.low_steps < 2 {
                return Some(Arc::clone(plan));
            }
        }
        let plan = Arc::new(plan_saved(&known.recording, allowance, shift));
        known.low_steps = 0;
        known.plan = Some(Arc::clone(&plan));
        Some(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::RecordedPiece;

    fn recording(sizes: &[usize]) -> Recording {
        let piece = |(index, &bytes): (usize, &usize)| RecordedPiece {
            bytes,
            given_up: index,
            needed: Some((2 * sizes.len() - 1 - index, 2 * sizes.len() - 1 - index)),
            saves: 1,
            uses: 1,
            fixed: false,
        };
        Recording {
            pieces: sizes.iter().enumerate().map(piece).collect(),
            other_bytes: vec![0; 2 * sizes.len()],
            baseline_bytes: 1 << 30,
        }
    }

    #[test]
    fn finds_by_prefix_and_keeps_a_few() {
        let mut recordings = Recordings::default();
        for size in 1..20 {
            recordings.add(recording(&[size, 7]));
            recordings.add(recording(&[size, 7]));
        }
        assert_eq!(recordings.known.len(), RECORDINGS_MAX);
        assert!(recordings.find([19].into_iter()).is_some());
        assert!(recordings.find([19, 7].into_iter()).is_some());
        assert_eq!(recordings.find([19, 8].into_iter()), None);
        assert_eq!(recordings.find([19, 7, 7].into_iter()), None);
        assert_eq!(recordings.find([1].into_iter()), None);
    }

    #[test]
    fn plans_follow_the_baseline() {
        let mut recordings = Recordings::default();
        recordings.add(recording(&[1 << 20, 1 << 20]));
        let allowance = Allowance::Budget { bytes: 4 << 30 };
        let mut shift_at = |in_use: u64| {
            recordings.plan(1, allowance, in_use << 20).map(|plan| plan.baseline_shift >> 20)
        };
        assert_eq!(shift_at(1024), Some(0));
        assert_eq!(shift_at(1025), Some(0));
        assert_eq!(shift_at(1224), Some(200));
        // Low and high alternate: the plan for the high one stays.
        assert_eq!(shift_at(1024), Some(200));
        assert_eq!(shift_at(1224), Some(200));
        assert_eq!(shift_at(1024), Some(200));
        assert_eq!(shift_at(1024), Some(0));
        assert_eq!(recordings.plan(9, allowance, 0), None);
    }
}
