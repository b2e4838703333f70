//! Retention: which checkpoints to keep.

use super::source::Hashing;
use super::{CheckpointError, Checkpoints, Keep, StateTensor, Storage};

/// Which checkpoints to keep when a new one is saved, besides the best one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Keep this many of the newest intact ones, at least one.
    pub last: usize,
    /// Also keep those whose step is a multiple of this.
    pub every: Option<u64>,
}

impl Retention {
    /// The steps whose checkpoints to delete, given all steps in order. `is_whole` may have to read a whole checkpoint,
    /// so it is called only if its answer decides whether something is deleted.
    fn superfluous(
        &self,
        steps: &[u64],
        best: Option<u64>,
        mut is_whole: impl FnMut(u64) -> bool,
    ) -> Vec<u64> {
        let stays = |step: u64| {
            best == Some(step) || self.every.is_some_and(|every| step.is_multiple_of(every))
        };
        let mut missing = self.last.max(1);
        for (older, &step) in steps.iter().enumerate().rev() {
            if older < missing || steps[..older].iter().all(|&step| stays(step)) {
                return Vec::new();
            }
            missing -= usize::from(is_whole(step));
            if missing == 0 {
                return steps[..older].iter().copied().filter(|&step| !stays(step)).collect();
            }
        }
        Vec::new()
    }
}

impl<S: Storage> Checkpoints<S> {
    /// Deletes the checkpoints that are not kept. A newer checkpoint counts only if it is intact and holds these
    /// tensors, so those that this process did not write are read first.
    ///
    /// # Errors
    /// From the file system.
    pub fn keep(&self, keep: Keep, tensors: &[StateTensor]) -> Result<(), CheckpointError> {
        self.keep_by(keep, tensors, Hashing::AllCores)
    }

    pub(super) fn keep_by(
        &self,
        Keep { retention, best }: Keep,
        tensors: &[StateTensor],
        hashing: Hashing,
    ) -> Result<(), CheckpointError> {
        let is_whole = |step| self.is_whole(step, tensors, hashing);
        for step in retention.superfluous(&self.steps()?, best, is_whole) {
            // Rename before deleting: under its own name, a checkpoint is always complete.
            let deleting = self.beside(step, "deleting");
            self.clear(&deleting)?;
            self.rename(&self.path(step), &deleting)?;
            self.known.forget(step);
            self.clear(&deleting)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: [u64; 5] = [10, 20, 30, 40, 50];

    #[track_caller]
    fn check(last: usize, every: Option<u64>, best: Option<u64>, goes: &[u64]) {
        let retention = Retention { last, every };
        assert_eq!(retention.superfluous(&STEPS, best, |_| true), goes);
    }

    /// What goes if these are whole, and which ones have to be read to know it.
    #[track_caller]
    fn check_damaged(last: usize, best: Option<u64>, whole: &[u64], goes: &[u64], read: &[u64]) {
        let retention = Retention { last, every: None };
        let mut asked = Vec::new();
        let found = retention.superfluous(&STEPS, best, |step| {
            asked.push(step);
            whole.contains(&step)
        });
        assert_eq!((found.as_slice(), asked.as_slice()), (goes, read));
    }

    #[test]
    fn the_last_the_marked_and_the_best_stay() {
        check(2, None, None, &[10, 20, 30]);
        check(2, Some(20), None, &[10, 30]);
        check(1, None, Some(20), &[10, 30, 40]);
        check(9, None, None, &[]);
        // The newest stays whatever is asked for.
        check(0, None, None, &[10, 20, 30, 40]);
    }

    #[test]
    fn only_whole_ones_count() {
        check_damaged(2, None, &[10, 20, 30], &[10], &[50, 40, 30, 20]);
        check_damaged(2, None, &[10], &[], &[50, 40, 30]);
        check_damaged(1, None, &[10, 20], &[10], &[50, 40, 30, 20]);
        check_damaged(1, None, &[], &[], &[50, 40, 30, 20]);
    }

    #[test]
    fn nothing_is_read_where_nothing_can_go() {
        check_damaged(5, None, &STEPS, &[], &[]);
        check_damaged(2, None, &STEPS, &[10, 20, 30], &[50, 40]);
        // Below 20 there is only the best.
        check_damaged(4, Some(10), &STEPS, &[], &[50, 40, 30]);
    }
}
