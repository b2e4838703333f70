use crate::DeviceError;
use storm_plan::{InstructionId, Plan, Segment, SegmentId};

/// Tracks where a plan is in its step, and what the host must wait for before it continues. A plan
/// is checked only for this order and these waits, so devices refuse any other segment.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    /// The run that is next or in progress, as an index into the plan's step.
    run: usize,
    /// How often its segment has been issued.
    times: usize,
    /// By segment: the copies of the inputs that the host writes before it, with their fetches, and the copies
    /// of the results that the host reads before they are overwritten.
    host_copies: Vec<Vec<InstructionId>>,
}

/// The position of a segment in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// First: the queues must be empty before it.
    Begins,
    /// After another segment of the step.
    GoesOn,
}

impl Sequence {
    pub(crate) fn new(plan: &Plan) -> Sequence {
        let copies_of = |segment: &Segment| {
            let here = |id: &InstructionId| segment.instructions.contains(&id.index());
            // The host does not write what a fetch of the segment writes.
            let inputs = plan.inputs.iter().filter(|input| {
                input.micro_batch.is_some()
                    && input.copies.iter().any(here)
                    && !input.fetches.iter().any(here)
            });
            let results = plan.results.iter().filter(|result| result.copies.iter().any(here));
            // All copies of these, including those in other segments.
            let inputs = inputs.flat_map(|input| input.copies.iter().chain(&input.fetches));
            inputs.chain(results.flat_map(|result| &result.copies)).copied().collect()
        };
        let host_copies = plan.segments.iter().map(copies_of).collect();
        Sequence { run: 0, times: 0, host_copies }
    }

    /// The copies whose latest runs must be done before the host issues the segment.
    pub(crate) fn host_copies(&self, segment: SegmentId) -> &[InstructionId] {
        &self.host_copies[segment.0 as usize]
    }

    /// Records that a segment is issued.
    pub(crate) fn advance(&mut self, plan: &Plan, segment: SegmentId) -> Result<Turn, DeviceError> {
        self.skip_empty(plan);
        let begins = plan.step[..self.run].iter().all(|run| run.times == 0) && self.times == 0;
        let turn = if begins { Turn::Begins } else { Turn::GoesOn };
        let next = plan.step.get(self.run);
        if let Some(next) = next.filter(|next| next.segment == segment) {
            self.times += 1;
            if self.times == next.times {
                (self.run, self.times) = (self.run + 1, 0);
            }
            self.skip_empty(plan);
            if self.run == plan.step.len() {
                self.run = 0;
            }
            return Ok(turn);
        }
        if begins && [plan.flush, plan.evaluation].contains(&Some(segment)) {
            return Ok(turn);
        }
        Err(DeviceError::OutOfTurn {
            segment: plan.segment(segment).name,
            expected: next.map_or("nothing", |run| plan.segment(run.segment).name),
        })
    }

    fn skip_empty(&mut self, plan: &Plan) {
        while plan.step.get(self.run).is_some_and(|run| run.times == 0) {
            self.run += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_plan::Run;

    #[test]
    fn only_the_order_of_the_step_is_let_through() {
        let segment = |name| Segment { name, instructions: 0..0 };
        let run = |segment, times| Run { segment: SegmentId(segment), times };
        let plan = Plan {
            segments: ["skipped", "first", "middle", "last", "flush"].map(segment).into(),
            step: vec![run(0, 0), run(1, 1), run(2, 2), run(3, 1), run(0, 0)],
            flush: Some(SegmentId(4)),
            ..Plan::default()
        };
        let mut sequence = Sequence::new(&plan);
        let mut give = |segment| sequence.advance(&plan, SegmentId(segment));
        let refused = |segment, expected| Err(DeviceError::OutOfTurn { segment, expected });
        for _ in 0..2 {
            assert_eq!(give(4), Ok(Turn::Begins));
            assert_eq!(give(2), refused("middle", "first"));
            assert_eq!(give(1), Ok(Turn::Begins));
            assert_eq!(give(4), refused("flush", "middle"));
            assert_eq!(give(2), Ok(Turn::GoesOn));
            assert_eq!(give(3), refused("last", "middle"));
            assert_eq!(give(2), Ok(Turn::GoesOn));
            assert_eq!(give(2), refused("middle", "last"));
            assert_eq!(give(3), Ok(Turn::GoesOn));
        }
    }
}
