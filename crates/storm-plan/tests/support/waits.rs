//! Waits for plans that are built by hand: none too few, a few too many.

use super::access::{Access, accesses};
use super::random::Random;
use storm_plan::{InstructionId, Plan, Queue, Run, Work};

const QUEUES: usize = Queue::COUNT_MAX;

/// Positions in the queues, counted from 1.
type Clock = [usize; QUEUES];

/// One run of an instruction.
struct Event {
    id: InstructionId,
    queue: usize,
    clock: Clock,
    accesses: Vec<Access>,
}

/// Makes every instruction wait for those that it must not overtake, walking each segment twice.
/// Now and then one waits for no reason.
pub(crate) fn add_waits(plan: &mut Plan, random: &mut Random) {
    let step: Vec<Run> = plan.step.iter().map(|r| Run { times: r.times.min(2), ..*r }).collect();
    walk(plan, &step);
    if let Some(segment) = plan.flush {
        walk(plan, &[Run { segment, times: 1 }]);
    }
    for segment in plan.segments.clone() {
        for index in segment.instructions.clone().skip(1) {
            let earlier =
                segment.instructions.start + random.below(index - segment.instructions.start);
            let id = InstructionId(earlier as u32);
            if random.chance(5) && !plan.instructions[index].waits.contains(&id) {
                plan.instructions[index].waits.push(id);
            }
        }
    }
}

fn walk(plan: &mut Plan, runs: &[Run]) {
    let mut events: Vec<Event> = Vec::new();
    let mut known = [[0; QUEUES]; QUEUES];
    let mut last: Vec<Option<Clock>> = vec![None; plan.instructions.len()];
    let mut fetched: Option<(InstructionId, usize, Clock)> = None;
    for run in runs {
        let instructions = plan.segment(run.segment).instructions.clone();
        for index in (0..run.times).flat_map(|_| instructions.clone()) {
            let id = InstructionId(index as u32);
            let queue = plan.queue(id).index();
            let accesses = accesses(plan, plan.instruction(id));
            for wait in plan.instruction(id).waits.clone() {
                if let Some(clock) = last[wait.index()] {
                    join(&mut known[queue], &clock);
                }
            }
            // The latest first: it tells most of what is before it.
            for event in events.iter().rev() {
                let is_known = known[queue][event.queue] >= event.clock[event.queue];
                let conflict =
                    || accesses.iter().any(|a| event.accesses.iter().any(|b| a.conflicts(b)));
                if event.queue != queue && !is_known && conflict() {
                    join(&mut known[queue], &event.clock);
                    plan.instructions[index].waits.push(event.id);
                }
            }
            if let (Work::ReadAhead(_), Some((fetch, of, clock))) =
                (&plan.instruction(id).work, fetched)
                && known[queue][of] < clock[of]
            {
                join(&mut known[queue], &clock);
                plan.instructions[index].waits.push(fetch);
            }
            known[queue][queue] += 1;
            let clock = known[queue];
            if let Work::Fetch(_) = &plan.instruction(id).work {
                fetched = Some((id, queue, clock));
            }
            last[index] = Some(clock);
            events.push(Event { id, queue, clock, accesses });
        }
    }
}

fn join(clock: &mut Clock, other: &Clock) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}
