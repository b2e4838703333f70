use storm_plan::{InstructionId, Plan, SegmentId};

/// What the host exchanges with a run of a segment, or with a whole step or flush: indices of the inputs it writes
/// before, and of the results it reads after. Excludes inputs that the segment fetches.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) inputs: Vec<usize>,
    /// In the order of their micro-batches.
    pub(super) results: Vec<usize>,
    /// Number of micro-batches.
    pub(super) micro_batches: usize,
}

impl Exchange {
    /// Inputs and results of each run of a segment: those of micro-batches.
    pub(super) fn of_run(plan: &Plan, segment: SegmentId) -> Exchange {
        Exchange::new(plan, &[segment], |micro_batch| micro_batch.is_some())
    }

    /// Inputs and results that exist once for all of these segments together.
    pub(super) fn of_whole(plan: &Plan, segments: &[SegmentId]) -> Exchange {
        Exchange::new(plan, segments, |micro_batch| micro_batch.is_none())
    }

    fn new(
        plan: &Plan,
        segments: &[SegmentId],
        is_wanted: impl Fn(Option<u16>) -> bool,
    ) -> Exchange {
        let is_here = |copies: &[InstructionId]| {
            copies.iter().any(|copy| {
                let ranges = segments.iter().map(|&id| &plan.segment(id).instructions);
                ranges.into_iter().any(|range| range.contains(&copy.index()))
            })
        };
        let inputs = plan.inputs.iter().enumerate();
        let inputs = inputs.filter(|(_, i)| is_wanted(i.micro_batch) && is_here(&i.copies));
        let written = inputs.clone().filter(|(_, input)| !is_here(&input.fetches));
        let results = plan.results.iter().enumerate();
        let results = results.filter(|(_, r)| is_wanted(r.micro_batch) && is_here(&r.copies));
        let last = inputs.clone().filter_map(|(_, input)| input.micro_batch).max();
        let mut results: Vec<usize> = results.map(|(index, _)| index).collect();
        results.sort_by_key(|&index| plan.results[index].micro_batch);
        Exchange {
            inputs: written.map(|(index, _)| index).collect(),
            results,
            micro_batches: last.map_or(0, |last| usize::from(last) + 1),
        }
    }
}
