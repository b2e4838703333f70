//! Checks that need no walk through the step: references, bounds, segments.

use super::error::{Actor, CheckError};
use super::{coverage, host};
use crate::collective::{Collective, CollectiveKind, Moved, RankPlace};
use crate::pack::ALIGNMENT;
use crate::plan::{
    Compute, Copy, Fetch, InstructionId, Lasting, Operand, Place, Plan, Segment, ValueId, Work,
};
use crate::tier::PerTier;
use std::ops::Range;

/// Everything that [`super::walk`] may assume.
pub(super) fn check(plan: &Plan, budget: PerTier<usize>) -> Result<(), CheckError> {
    for (tier, &needed) in plan.bytes.iter() {
        if needed > budget[tier] {
            return Err(CheckError::OverBudget { tier, needed, budget: budget[tier] });
        }
        if needed > 0 && !plan.links.reach(tier) {
            return Err(CheckError::NoLinkToTier { tier });
        }
    }
    let RankPlace { rank, ranks, machine, relay } = plan.rank;
    let divides = |on_one: u32| on_one > 0 && ranks.is_multiple_of(on_one);
    if rank >= ranks
        || !divides(machine)
        || !divides(relay)
        || plan.rank.is_shared() != plan.links.rank_queue().is_some()
    {
        return Err(CheckError::RankPlace { rank: plan.rank.rank, ranks: plan.rank.ranks });
    }
    references(plan)?;
    segments(plan)?;
    coverage::check(plan)?;
    for lasting in &plan.lasting {
        check_lasting(plan, lasting)?;
    }
    check_fetches(plan)?;
    host::check(plan)
}

/// Every index is within its list. Nothing may be looked up before this check.
fn references(plan: &Plan) -> Result<(), CheckError> {
    let value = |whom: &str, id: ValueId| known(whom, "value", id.index(), plan.values.len());
    for (index, instruction) in plan.instructions.iter().enumerate() {
        let whom = format!("instruction {index}");
        for wait in &instruction.waits {
            known(&whom, "instruction", wait.index(), plan.instructions.len())?;
        }
        match &instruction.work {
            Work::Compute(compute) => {
                let graph = compute.graph.0 as usize;
                known(&whom, "graph", graph, plan.graphs.len())?;
                let nodes = plan.graphs[graph].nodes().len();
                known(&whom, "node", compute.node as usize, nodes)?;
                for operand in compute.reads.iter().chain(&compute.writes) {
                    value(&whom, operand.value)?;
                }
            }
            Work::Copy(copy) => {
                if plan.links.queue(copy.link()).is_none() {
                    return Err(CheckError::NoLink { whom, link: copy.link() });
                }
                for operand in &copy.values {
                    value(&whom, operand.value)?;
                }
            }
            Work::Fetch(_) | Work::ReadAhead(_) if plan.links.data_queue().is_none() => {
                return Err(CheckError::NoDataSource { whom });
            }
            Work::Fetch(fetch) => {
                for &input in &fetch.inputs {
                    known(&whom, "input", input as usize, plan.inputs.len())?;
                }
            }
            Work::ReadAhead(_) => {}
            Work::Collective(_) if plan.links.rank_queue().is_none() => {
                return Err(CheckError::NoRanks { whom });
            }
            Work::Collective(collective) => {
                let operands = collective.pieces.iter().flat_map(|piece| piece.operands());
                for operand in operands {
                    value(&whom, operand.value)?;
                }
            }
        }
    }
    for &own in &plan.own {
        value("what the rank owns", own)?;
    }
    for run in &plan.step {
        known("the step", "segment", run.segment.0 as usize, plan.segments.len())?;
    }
    for (whom, segment) in [("the flush", plan.flush), ("the evaluation", plan.evaluation)] {
        if let Some(segment) = segment {
            known(whom, "segment", segment.0 as usize, plan.segments.len())?;
        }
    }
    for lasting in &plan.lasting {
        for &piece in &lasting.pieces {
            value(&lasting.tensor.name, piece)?;
        }
    }
    let inputs = plan.inputs.iter().map(|i| (&i.tensor, i.value, &i.copies, &i.fetches[..]));
    let results = plan.results.iter().map(|r| (&r.tensor, r.value, &r.copies, &[][..]));
    for (tensor, id, copies, fetches) in inputs.chain(results) {
        value(&tensor.name, id)?;
        for copy in copies.iter().chain(fetches) {
            known(&tensor.name, "instruction", copy.index(), plan.instructions.len())?;
        }
    }
    Ok(())
}

fn known(whom: &str, what: &'static str, index: usize, count: usize) -> Result<(), CheckError> {
    match index < count {
        true => Ok(()),
        false => Err(CheckError::Unknown { whom: whom.to_owned(), what, index, count }),
    }
}

/// Every instruction is in exactly one segment, and every segment runs: what never runs is never
/// checked.
fn segments(plan: &Plan) -> Result<(), CheckError> {
    let mut taken = vec![false; plan.instructions.len()];
    for (index, segment) in plan.segments.iter().enumerate() {
        let error = |problem: String| {
            Err(CheckError::Segments { segment: segment.name.to_owned(), problem })
        };
        let Range { start, end } = segment.instructions;
        if start > end || end > taken.len() {
            return error(format!("instructions {start}..{end} of {}", taken.len()));
        }
        if taken[start..end].contains(&true) {
            return error("shares instructions with another segment".to_owned());
        }
        taken[start..end].fill(true);
        let is_this = |id: crate::plan::SegmentId| id.0 as usize == index;
        let runs = plan.step.iter().any(|run| is_this(run.segment) && run.times > 0);
        let outside = [plan.flush, plan.evaluation].into_iter().flatten();
        if !runs && !outside.into_iter().any(is_this) {
            return error("never runs".to_owned());
        }
    }
    for id in [plan.flush, plan.evaluation].into_iter().flatten() {
        let Segment { name, instructions } = plan.segment(id);
        let takes_data = |index: usize| {
            matches!(plan.instructions[index].work, Work::Fetch(_) | Work::ReadAhead(_))
        };
        if instructions.clone().any(takes_data) {
            let problem = "takes the data of a step, and is not part of one".to_owned();
            return Err(CheckError::Segments { segment: (*name).to_owned(), problem });
        }
    }
    match taken.iter().position(|&taken| !taken) {
        None => Ok(()),
        Some(index) => Err(CheckError::Segments {
            segment: "none".to_owned(),
            problem: format!("instruction {index} belongs to no segment"),
        }),
    }
}

fn check_lasting(plan: &Plan, lasting: &Lasting) -> Result<(), CheckError> {
    let (name, size) = (&lasting.tensor.name, lasting.tensor.size_bytes());
    let mut pieces = lasting.pieces.iter().map(|&id| plan.value(id).size_bytes);
    if pieces.try_fold(0usize, usize::checked_add) != Some(size) {
        let whom = format!("`{name}`");
        return Err(CheckError::NoAddress { whom, what: format!("exactly its {size} bytes") });
    }
    let has_part = |piece: usize| lasting.parts.iter().any(|&(part, _)| part as usize == piece);
    if lasting.places.is_empty() && !(0..lasting.pieces.len()).all(has_part) {
        let what = "the time between two steps".to_owned();
        return Err(CheckError::NoAddress { whom: format!("`{name}`"), what });
    }
    for &(piece, place) in &lasting.parts {
        known(name, "piece", piece as usize, lasting.pieces.len())?;
        let size = plan.value(lasting.pieces[piece as usize]).size_bytes;
        aligned(|| format!("`{name}`"), place.offset)?;
        within(plan, || format!("`{name}`"), place, size)?;
    }
    for place in &lasting.places {
        aligned(|| format!("`{name}`"), place.offset)?;
        within(plan, || format!("`{name}`"), *place, size)?;
    }
    Ok(())
}

pub(super) fn check_copy(plan: &Plan, id: InstructionId, copy: &Copy) -> Result<(), CheckError> {
    for place in copy.ends() {
        within(plan, || Actor::instruction(plan, id).to_string(), place, copy.bytes)?;
    }
    let error = |problem: String| {
        Err(CheckError::BadCoverage { instruction: Actor::instruction(plan, id), problem })
    };
    let mut end = 0;
    for operand in &copy.values {
        let value = plan.value(operand.value);
        if operand.offset < end {
            return error(format!("`{}` lies over the value before it", value.name));
        }
        match operand.offset.checked_add(value.size_bytes) {
            Some(last) if last <= copy.bytes => end = last,
            _ => return error(format!("`{}` goes beyond the {} bytes", value.name, copy.bytes)),
        }
    }
    if end == 0 {
        return error("it carries no value".to_owned());
    }
    Ok(())
}

/// Every piece is sent and received as its owner implies, inside the tier, and nothing that is written is touched twice.
pub(super) fn check_collective(
    plan: &Plan,
    id: InstructionId,
    collective: &Collective,
) -> Result<(), CheckError> {
    let RankPlace { rank, ranks, .. } = plan.rank;
    let error = |problem: String| {
        Err(CheckError::BadCoverage { instruction: Actor::instruction(plan, id), problem })
    };
    let is_of_sums = collective.kind == CollectiveKind::ExchangeSums;
    if is_of_sums && !plan.rank.has_levels() {
        return error("one machine has nothing to exchange with others".to_owned());
    }
    // A rank may have no sums to send, and takes part.
    if collective.pieces.is_empty() && !is_of_sums {
        return error("it moves nothing".to_owned());
    }
    let mut written: Vec<Range<usize>> = Vec::new();
    let mut values: Vec<ValueId> = Vec::new();
    for (number, Moved { owner, sent, received }) in collective.pieces.iter().enumerate() {
        let senders: Vec<u32> = received.iter().map(|&(from, _)| from).collect();
        let is_own = *owner == rank;
        let fits = match collective.kind {
            CollectiveKind::Exchange | CollectiveKind::ExchangeSums => {
                let receiver = collective.kind.receiver(plan.rank, *owner);
                let receives = receiver == Some(rank);
                let mut members = collective.kind.members(plan.rank);
                members.retain(|&other| receives && other != rank);
                receiver.is_some() && sent.is_none() == receives && senders == members
            }
            CollectiveKind::Gather => {
                let receives = senders == [*owner] || (is_own && senders.is_empty());
                sent.is_some() == is_own && receives
            }
        };
        if *owner >= ranks || !fits {
            return error(format!("rank {owner} of {ranks} cannot own piece {number}"));
        }
        let sizes = sent.iter().chain(received.iter().map(|(_, operand)| operand));
        let mut sizes = sizes.map(|operand| plan.value(operand.value).size_bytes);
        let first = sizes.next().unwrap_or(0);
        if sizes.any(|size| size != first) {
            return error(format!("piece {number} has several sizes"));
        }
        if let (Some(sent), [(from, received)]) = (sent, &received[..])
            && *from == rank
            && sent.value != received.value
        {
            return error(format!("piece {number} arrives as another value"));
        }
        for (_, operand) in received {
            written.push(operand_bytes(plan, id, operand)?);
            values.push(operand.value);
        }
    }
    written.sort_by_key(|range| range.start);
    if written.windows(2).any(|pair| pair[0].end > pair[1].start) {
        return error("it receives two things in one place".to_owned());
    }
    values.sort();
    if values.windows(2).any(|pair| pair[0] == pair[1]) {
        return error("it receives a value twice".to_owned());
    }
    for operand in collective.reads() {
        let sent = operand_bytes(plan, id, operand)?;
        let next = written.partition_point(|range| range.end <= sent.start);
        if written.get(next).is_some_and(|range| range.start < sent.end) {
            return error("it receives where it sends from".to_owned());
        }
    }
    Ok(())
}

fn operand_bytes(
    plan: &Plan,
    id: InstructionId,
    operand: &Operand,
) -> Result<Range<usize>, CheckError> {
    let size = plan.value(operand.value).size_bytes;
    let place = Place { tier: Compute::TIER, offset: operand.offset };
    within(plan, || Actor::instruction(plan, id).to_string(), place, size)?;
    Ok(operand.offset..operand.offset + size)
}

/// The inputs of a fetch and the fetches of an input say the same. Each input is of one of the
/// micro-batches that the fetch takes, and is copied in the same segment: what the host may write elsewhere
/// is then never what a fetch wrote here.
pub(super) fn check_fetch(plan: &Plan, id: InstructionId, fetch: &Fetch) -> Result<(), CheckError> {
    let mut seen = vec![false; plan.inputs.len()];
    for &index in &fetch.inputs {
        let index = index as usize;
        let input = &plan.inputs[index];
        let error = |problem: String| {
            let tensor = input.tensor.name.clone();
            Err(CheckError::Fetched { index, tensor, problem })
        };
        let actor = || Actor::instruction(plan, id);
        if std::mem::replace(&mut seen[index], true) {
            return error(format!("{} writes it twice", actor()));
        }
        if !input.fetches.contains(&id) {
            return error(format!("{} is not one of its fetches", actor()));
        }
        if input.micro_batch.is_none_or(|m| usize::from(m) >= fetch.micro_batches) {
            return error(format!("{} takes no data of its micro-batch", actor()));
        }
        let here = plan.segments.iter().find(|s| s.instructions.contains(&id.index()));
        let is_here = |copy: &InstructionId| {
            here.is_some_and(|segment| segment.instructions.contains(&copy.index()))
        };
        if !input.copies.iter().any(is_here) {
            return error(format!("no copy of the segment reads what {} writes", actor()));
        }
    }
    Ok(())
}

/// Every fetch that an input lists writes it.
fn check_fetches(plan: &Plan) -> Result<(), CheckError> {
    for (index, input) in plan.inputs.iter().enumerate() {
        for &id in &input.fetches {
            let writes = matches!(&plan.instruction(id).work,
                Work::Fetch(fetch) if fetch.inputs.contains(&(index as u32)));
            if !writes {
                let actor = Actor::instruction(plan, id);
                let problem = format!("{actor} is listed, but does not write it");
                let tensor = input.tensor.name.clone();
                return Err(CheckError::Fetched { index, tensor, problem });
            }
        }
    }
    Ok(())
}

pub(super) fn aligned(what: impl Fn() -> String, offset: usize) -> Result<(), CheckError> {
    match offset.is_multiple_of(ALIGNMENT) {
        true => Ok(()),
        false => Err(CheckError::Misaligned { what: what(), offset, alignment: ALIGNMENT }),
    }
}

pub(super) fn within(
    plan: &Plan,
    what: impl Fn() -> String,
    Place { tier, offset }: Place,
    bytes: usize,
) -> Result<(), CheckError> {
    let size = plan.bytes[tier];
    let end = offset.saturating_add(bytes);
    match end <= size && end - offset == bytes {
        true => Ok(()),
        false => Err(CheckError::OutOfBounds { what: what(), tier, bytes: offset..end, size }),
    }
}
