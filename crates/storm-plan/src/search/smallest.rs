//! Finds the least memory that works.

use super::Search;
use crate::choice::{Choice, StageChoice};
use crate::decisions::SeamMemory;
use crate::request::Placement;
use crate::tier::{PerTier, Tier};
use crate::{PlanError, Storage, Streaming, UpdateTime};

/// The choice with the least device memory, whatever its speed.
pub(crate) struct Smallest {
    pub(crate) choice: Choice,
    pub(crate) bytes: PerTier<usize>,
}

impl Search<'_> {
    /// The choice with the least device memory within the limits of host and disk. If the host has too little
    /// for any, the one with the least host memory.
    pub(crate) fn smallest(&self) -> Result<Smallest, PlanError> {
        let mut problem = None;
        let mut smallest = None;
        let mut consider = |choice: Choice| match self.relieved(choice) {
            Ok(found) if smallest.as_ref().is_none_or(|known| self.is_smaller(&found, known)) => {
                smallest = Some(found);
            }
            Ok(_) => {}
            Err(error) => problem = Some(error),
        };
        self.squeezed().into_iter().filter(|choice| self.obeys(choice)).for_each(&mut consider);
        let Some(best) = smallest.as_ref().map(|found: &Smallest| found.choice.clone()) else {
            return Err(problem.unwrap_or(PlanError::Decisions {
                problem: "what was asked for contradicts itself".to_owned(),
            }));
        };
        // Recomputing everything needs room, too; in a model with few blocks keeping may take
        // less.
        let blocks = self.blocks(self.main);
        let mut consider = |choice: Choice| {
            if let Ok(found) = self.relieved(choice)
                && smallest.as_ref().is_none_or(|known| self.is_smaller(&found, known))
            {
                smallest = Some(found);
            }
        };
        for saving in 1..self.savings[self.main].len() {
            for choice in [
                self.with_units(&best, (0, 0), (saving, blocks)),
                self.with_units(&best, (saving, blocks), (0, 0)),
            ] {
                if self.obeys(&choice) {
                    consider(choice);
                }
            }
        }
        Ok(smallest.expect("found above"))
    }

    /// Choices that take little.
    fn squeezed(&self) -> Vec<Choice> {
        let mut choices = Vec::new();
        for base in self.bases() {
            for inputs_resident in [false, true] {
                for checkpoints in [Checkpoints::All, Checkpoints::SquareRoot] {
                    let mut choice = Choice {
                        group: self.groups()[0],
                        state_ring: 1,
                        activation_ring: 1,
                        input_ring: 0,
                        seams: SeamMemory::Shared,
                        ..base.clone()
                    };
                    for (stage, chosen) in choice.stages.iter_mut().enumerate() {
                        self.squeeze(stage, chosen);
                        chosen.activations.inputs_resident = inputs_resident;
                        if checkpoints == Checkpoints::SquareRoot
                            && self.forced.checkpoint_every.is_none()
                        {
                            let root = (self.blocks(stage) as f64).sqrt().ceil();
                            chosen.activations.inputs_every = root as usize;
                        }
                    }
                    choices.push(choice);
                }
            }
        }
        choices
    }

    fn squeeze(&self, stage: usize, chosen: &mut StageChoice) {
        let blocks = self.blocks(stage);
        for class in [&mut chosen.weights, &mut chosen.gradients] {
            if class.pinned < blocks {
                *class = Streaming { pinned: 0, ring: 1 };
            }
        }
        match self.forced.activations {
            Some(Storage::Keep) => chosen.activations.kept = self.everything(stage),
            Some(Storage::Offload) => chosen.activations.offloaded = self.everything(stage),
            _ => {}
        }
    }

    /// The choice with as many blocks on the device as do not fit in host memory and on disk.
    fn relieved(&self, choice: Choice) -> Result<Smallest, PlanError> {
        // Gradients that are applied in the backward pass have no host memory to give up.
        let order: &[Kept] = match choice.update {
            UpdateTime::InBackward => &[Kept::Weights, Kept::States, Kept::Gradients],
            UpdateTime::EndOfStep | UpdateTime::NextStep => {
                &[Kept::Gradients, Kept::Weights, Kept::States]
            }
        };
        let found = self.relieved_of(Tier::HOST, self.measured(choice)?, order)?;
        self.relieved_of(Tier::DISK, found, &[Kept::States, Kept::Weights])
    }

    /// Keeps more blocks on the device until a tier has room for the rest.
    fn relieved_of(
        &self,
        tier: Tier,
        found: Smallest,
        order: &[Kept],
    ) -> Result<Smallest, PlanError> {
        let limit = self.limits[tier];
        if found.bytes[tier] <= limit {
            return Ok(found);
        }
        let with = |count: usize| {
            let mut choice = found.choice.clone();
            let mut left = count;
            for kept in order {
                let placement = match kept {
                    Kept::Gradients => self.forced.gradients,
                    Kept::Weights => self.forced.weights,
                    Kept::States => self.forced.states,
                };
                for (stage, chosen) in choice.stages.iter_mut().enumerate() {
                    let blocks = self.blocks(stage);
                    let may_stay = placement != Some(Placement::Streamed) || blocks == 1;
                    let pinned = match kept {
                        Kept::Gradients => &mut chosen.gradients.pinned,
                        Kept::Weights => &mut chosen.weights.pinned,
                        Kept::States => &mut chosen.states,
                    };
                    let most = if may_stay { blocks } else { 0 };
                    let more = left.min(most.saturating_sub(*pinned));
                    *pinned += more;
                    left -= more;
                }
            }
            for (stage, chosen) in choice.stages.iter_mut().enumerate() {
                for class in [&mut chosen.gradients, &mut chosen.weights] {
                    if class.pinned == self.blocks(stage) {
                        class.ring = 0;
                    }
                }
            }
            choice
        };
        let (mut too_few, mut enough) = (0, order.len() * self.lowering.blocks.count());
        while enough - too_few > 1 {
            let middle = too_few + (enough - too_few) / 2;
            match self.measured(with(middle))?.bytes[tier] <= limit {
                true => enough = middle,
                false => too_few = middle,
            }
        }
        self.measured(with(enough))
    }

    fn measured(&self, choice: Choice) -> Result<Smallest, PlanError> {
        let decisions = choice.decisions(self.lowering, &self.savings);
        let bytes = self.lowering.memory(&decisions)?;
        Ok(Smallest { choice, bytes })
    }

    fn is_smaller(&self, one: &Smallest, other: &Smallest) -> bool {
        let rank = |found: &Smallest| {
            let excess = |tier| found.bytes[tier].saturating_sub(self.limits[tier]);
            (excess(Tier::HOST), excess(Tier::DISK), found.bytes[Tier::DEVICE])
        };
        rank(one) < rank(other)
    }
}

/// What may be kept on the device.
#[derive(Clone, Copy)]
enum Kept {
    Gradients,
    Weights,
    States,
}

/// Which block inputs are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Checkpoints {
    All,
    SquareRoot,
}
