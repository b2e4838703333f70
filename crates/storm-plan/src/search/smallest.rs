//! The least memory that works.

use super::Search;
use crate::choice::Choice;
use crate::request::Placement;
use crate::{PlanError, Storage, Streaming};

/// What takes the least device memory, whatever its speed.
pub(crate) struct Smallest {
    pub(crate) choice: Choice,
    pub(crate) device_bytes: usize,
    pub(crate) host_bytes: usize,
}

impl Search<'_> {
    /// What takes the least device memory within the host's. Where the host has too little for
    /// anything, what takes the least of it.
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
        // Making everything again takes room for it; in a model of few layers keeping takes less.
        let layers = self.task().layer_count();
        let mut consider = |choice: Choice| {
            if let Ok(found) = self.relieved(choice)
                && smallest.as_ref().is_none_or(|known| self.is_smaller(&found, known))
            {
                smallest = Some(found);
            }
        };
        for saving in 1..self.savings.len() {
            for choice in [
                Choice { offloaded: (saving, layers), ..best.clone() },
                Choice { kept: (saving, layers), ..best.clone() },
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
        let layers = self.task().layer_count();
        let all = self.savings.len() - 1;
        let (kept, offloaded) = match self.forced.activations {
            Some(Storage::Keep) => ((all, layers), (0, 0)),
            Some(Storage::Offload) => ((0, 0), (all, layers)),
            _ => ((0, 0), (0, 0)),
        };
        let squeeze = |streaming: Streaming| match streaming.pinned == layers {
            true => streaming,
            false => Streaming { pinned: 0, ring: 1 },
        };
        let root = (layers as f64).sqrt().ceil() as usize;
        let mut choices = Vec::new();
        for base in self.bases() {
            for inputs_resident in [false, true] {
                for inputs_every in [1, root] {
                    choices.push(Choice {
                        weights: squeeze(base.weights),
                        gradients: squeeze(base.gradients),
                        states: squeeze(base.states),
                        group: self.forced.group.unwrap_or(1),
                        kept,
                        offloaded,
                        inputs_resident,
                        inputs_every: self.forced.checkpoint_every.unwrap_or(inputs_every),
                        activation_ring: 1,
                        boundary_ring: 0,
                        ..base.clone()
                    });
                }
            }
        }
        choices
    }

    /// The choice, with as many layers on the device as the host has no room for.
    fn relieved(&self, choice: Choice) -> Result<Smallest, PlanError> {
        let limit = self.limits.host_bytes;
        let found = self.measured(choice)?;
        if found.host_bytes <= limit {
            return Ok(found);
        }
        let layers = self.task().layer_count();
        let most = |placement: Option<Placement>| match placement {
            Some(Placement::Streamed) => 0,
            _ => layers,
        };
        let most = [self.forced.gradients, self.forced.weights, self.forced.states].map(most);
        let with = |count: usize| {
            let mut choice = found.choice.clone();
            let mut left = count;
            let Choice { gradients, weights, states, .. } = &mut choice;
            for (class, most) in [gradients, weights, states].into_iter().zip(most) {
                let more = left.min(most.saturating_sub(class.pinned));
                class.pinned += more;
                left -= more;
            }
            for class in [&mut choice.gradients, &mut choice.weights] {
                class.ring = if class.pinned == layers { 0 } else { class.ring };
            }
            choice
        };
        let (mut too_few, mut enough) = (0, 3 * layers);
        while enough - too_few > 1 {
            let middle = too_few + (enough - too_few) / 2;
            match self.measured(with(middle))?.host_bytes <= limit {
                true => enough = middle,
                false => too_few = middle,
            }
        }
        self.measured(with(enough))
    }

    fn measured(&self, choice: Choice) -> Result<Smallest, PlanError> {
        let decisions = choice.decisions(self.lowering, &self.savings);
        let (device_bytes, host_bytes) = self.lowering.memory(&decisions)?;
        Ok(Smallest { choice, device_bytes, host_bytes })
    }

    fn is_smaller(&self, one: &Smallest, other: &Smallest) -> bool {
        let rank = |found: &Smallest| {
            (found.host_bytes.saturating_sub(self.limits.host_bytes), found.device_bytes)
        };
        rank(one) < rank(other)
    }
}
