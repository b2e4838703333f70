//! Which checkpoints stay.

use super::{CheckpointError, Checkpoints, Storage};

/// Which checkpoints stay when a new one is saved; the best one always does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// So many of the newest, at least one.
    pub last: usize,
    /// And those of steps that are a multiple of this.
    pub every: Option<u64>,
}

impl Retention {
    /// The steps whose checkpoints go, given all in order.
    fn superfluous(&self, steps: &[u64], best: Option<u64>) -> Vec<u64> {
        let newest = steps.len().saturating_sub(self.last.max(1));
        let stays = |step: u64| {
            best == Some(step) || self.every.is_some_and(|every| step.is_multiple_of(every))
        };
        steps[..newest].iter().copied().filter(|&step| !stays(step)).collect()
    }
}

impl<S: Storage> Checkpoints<S> {
    /// Deletes the checkpoints that need not stay.
    ///
    /// # Errors
    /// From the file system.
    pub fn keep(&self, retention: Retention, best: Option<u64>) -> Result<(), CheckpointError> {
        for step in retention.superfluous(&self.steps()?, best) {
            // Under its own name it is never half there.
            let deleting = self.beside(step, "deleting");
            self.clear(&deleting)?;
            self.rename(&self.path(step), &deleting)?;
            self.clear(&deleting)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(last: usize, every: Option<u64>, best: Option<u64>, goes: &[u64]) {
        let retention = Retention { last, every };
        assert_eq!(retention.superfluous(&[10, 20, 30, 40, 50], best), goes);
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
}
