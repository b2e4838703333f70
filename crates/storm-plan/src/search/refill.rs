//! After a move, adjusts how many blocks keep activations, to use the available memory.

use super::Search;
use crate::choice::{ActivationChoice, Choice};

impl Search<'_> {
    /// The choice with as many blocks keeping activations as fit, in the first group and in the others; none
    /// if it does not fit at all, or the user requests another number.
    pub(super) fn refilled(&self, choice: &Choice) -> Option<Choice> {
        let main = self.main;
        let usual = choice.stages[main].activations.kept;
        let first = choice.first.as_ref().map(|first| first.stages[main].kept);
        let with = |usual_count: usize, first_count: usize| {
            let mut choice = choice.clone();
            if usual.0 > 0 {
                choice.stages[main].activations.kept.1 = usual_count;
            }
            if let Some(first) = choice.first.as_mut() {
                let ActivationChoice { kept, .. } = &mut first.stages[main];
                if kept.0 > 0 {
                    kept.1 = first_count;
                }
            }
            choice
        };
        let most = |group: usize, kept: (usize, usize), choice: &dyn Fn(usize) -> Choice| match kept
        {
            (0, _) => 0,
            (saving, _) => {
                let bytes = self.savings[main][saving].bytes * group;
                self.most(self.blocks(main), bytes, choice)
            }
        };
        let usual_count = most(choice.group, usual, &|count| with(count, 0));
        let first_count = match (&choice.first, first) {
            (Some(group), Some(kept)) => most(group.group, kept, &|count| with(usual_count, count)),
            _ => 0,
        };
        let refilled = with(usual_count, first_count);
        (self.obeys(&refilled) && self.fits(&refilled)).then_some(refilled)
    }
}
