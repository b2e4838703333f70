//! Follows the runs of a step in issue order.
//!
//! The queues may really execute in that order, since queues and waits only ever delay an
//! instruction behind earlier ones. If no two conflicting accesses are unordered, every other
//! possible order gives the same contents. So checking this one order is enough.

use super::error::{Actor, CheckError, Spot};
use super::heard::Heard;
use super::host::HostWork;
use super::memory::{Clock, Content, HOST, Memory, Part, Stamp, THREADS, join};
use crate::collective::Collective;
use crate::plan::{
    Compute, Copy, Fetch, InstructionId, Operand, Place, Plan, ReadAhead, Run, SegmentId, ValueId,
    Work,
};
use crate::queue::PerQueue;
use crate::tier::{PerTier, Tier};
use std::collections::VecDeque;
use std::ops::Range;

/// After this many repetitions, memory must look the same as one repetition earlier.
const REPETITIONS_MAX: usize = 4;

/// The state of all tiers, and what every queue knows, from one barrier to the next.
pub(super) struct Walk<'a> {
    pub(super) plan: &'a Plan,
    host_work: &'a HostWork,
    heard: &'a mut Heard,
    memory: PerTier<Memory>,
    /// By value: how many times it was written.
    versions: Vec<u32>,
    /// By thread: what is done when its next action starts.
    known: [Clock; THREADS],
    /// By instruction: what is done when its last run is done; none before its first.
    done: Vec<Option<Clock>>,
    /// By queue: what was issued.
    pub(super) given_out: PerQueue<Vec<InstructionId>>,
    /// Fetches of the segment whose memory nothing was read into yet, in order: how many micro-batches each
    /// took.
    fetched: VecDeque<(usize, Stamp)>,
    /// What the current copy carries: bytes relative to its first, and the content of the first
    /// byte.
    carried: Vec<(Range<usize>, Option<Content>)>,
}

impl<'a> Walk<'a> {
    /// The state between two steps: everything persistent is in its place, and everything else is
    /// unknown.
    pub(super) fn at_rest(
        plan: &'a Plan,
        host_work: &'a HostWork,
        heard: &'a mut Heard,
    ) -> Walk<'a> {
        let mut walk = Walk {
            plan,
            host_work,
            heard,
            memory: PerTier::default(),
            versions: vec![0; plan.values.len()],
            known: [[0; THREADS]; THREADS],
            done: vec![None; plan.instructions.len()],
            given_out: Default::default(),
            fetched: VecDeque::new(),
            carried: Vec::new(),
        };
        for (_, spot) in resting(plan) {
            let content = Some(Content { value: spot.value, version: 0, position: 0 });
            walk.memory[spot.tier]
                .write(spot.bytes, Stamp::default(), &[0; THREADS], content)
                .expect("nobody has touched anything yet");
        }
        walk
    }

    /// Runs segments from barrier to barrier, and checks that everything persistent is back in its
    /// place.
    pub(super) fn program(mut self, name: &'static str, runs: &[Run]) -> Result<(), CheckError> {
        for input in self.host_work.inputs_at_start(runs) {
            self.write_input(input)?;
        }
        for run in runs {
            self.repeat(run)?;
        }
        for (tensor, spot) in resting(self.plan) {
            let version = self.versions[spot.value.index()];
            for Part { bytes, content, .. } in self.memory[spot.tier].look(spot.bytes.clone()) {
                let position = bytes.start - spot.bytes.start;
                let wanted = Content { value: spot.value, version, position };
                if content != Some(wanted) {
                    let found = self.found(wanted, content);
                    let spot = Spot::new(self.plan, Some(spot.value), spot.tier, bytes);
                    let tensor = self.plan.lasting[tensor].tensor.name.clone();
                    return Err(CheckError::NotAtRest { program: name, tensor, spot, found });
                }
            }
        }
        Ok(())
    }

    /// See [`super`] for why a few repetitions stand for all.
    fn repeat(&mut self, run: &Run) -> Result<(), CheckError> {
        let mut before = None;
        for times in 1..=run.times {
            self.segment(run.segment)?;
            if times == run.times {
                break;
            }
            let after = self.contents();
            if before.as_ref() == Some(&after) {
                break;
            }
            if times == REPETITIONS_MAX {
                let segment = self.plan.segment(run.segment).name.to_owned();
                return Err(CheckError::Unsettled { segment, times });
            }
            before = Some(after);
        }
        Ok(())
    }

    /// What is where, and whether it is current: everything that matters to a later reader.
    fn contents(&self) -> Vec<(Tier, Range<usize>, ValueId, usize, bool)> {
        let all = self.memory.iter().flat_map(|(tier, memory)| {
            memory.contents().into_iter().map(move |(bytes, content)| (tier, bytes, content))
        });
        all.map(|(tier, bytes, content)| {
            let is_current = content.version == self.versions[content.value.index()];
            (tier, bytes, content.value, content.position, is_current)
        })
        .collect()
    }

    fn segment(&mut self, id: SegmentId) -> Result<(), CheckError> {
        let (plan, work) = (self.plan, self.host_work);
        for &result in work.results(id) {
            self.host_waits_for(&plan.results[result].copies);
        }
        for &input in work.inputs(id) {
            self.write_input(input)?;
        }
        for index in plan.segment(id).instructions.clone() {
            self.give_out(index)?;
        }
        if let Some(&(micro_batches, fetch)) = self.fetched.front() {
            return Err(CheckError::NotReadAhead { fetch: self.actor(fetch), micro_batches });
        }
        for &result in work.results(id) {
            self.look_at_result(result)?;
        }
        Ok(())
    }

    fn host_waits_for(&mut self, copies: &[InstructionId]) {
        for copy in copies {
            if let Some(done) = self.done[copy.index()] {
                join(&mut self.known[HOST], &done);
            }
        }
    }

    fn write_input(&mut self, index: usize) -> Result<(), CheckError> {
        let input = &self.plan.inputs[index];
        self.host_waits_for(&input.copies);
        self.host_waits_for(&input.fetches);
        self.known[HOST][HOST] += 1;
        let clock = self.known[HOST];
        let writer = Stamp { thread: HOST, count: clock[HOST] };
        self.versions[input.value.index()] += 1;
        let version = self.versions[input.value.index()];
        let content = Content { value: input.value, version, position: 0 };
        let Place { tier, offset } = input.place;
        let bytes = offset..offset + self.plan.value(input.value).size_bytes;
        self.memory[tier]
            .write(bytes, writer, &clock, Some(content))
            .map_err(|conflict| self.write_conflict(Actor::Host, Some(input.value), tier, conflict))
    }

    /// The host reads a result some time after its copies are done and before they run again. Until
    /// then nothing else touches it (see [`super::host::check`]), so it can be checked right away.
    /// The read does not order other threads.
    fn look_at_result(&self, index: usize) -> Result<(), CheckError> {
        let result = &self.plan.results[index];
        let mut clock = self.known[HOST];
        for copy in &result.copies {
            if let Some(done) = self.done[copy.index()] {
                join(&mut clock, &done);
            }
        }
        let Place { tier, offset: start } = result.place;
        let end = start + self.plan.value(result.value).size_bytes;
        for Part { bytes, content, written } in self.memory[tier].look(start..end) {
            let spot = || Spot::new(self.plan, Some(result.value), tier, bytes.clone());
            if written.count > clock[written.thread] {
                let writer = self.actor(written);
                return Err(CheckError::UnorderedRead {
                    reader: Actor::Host,
                    spot: spot(),
                    writer,
                });
            }
            let version = self.versions[result.value.index()];
            let wanted = Content { value: result.value, version, position: bytes.start - start };
            if content != Some(wanted) {
                let found = self.found(wanted, content);
                return Err(CheckError::WrongContent { reader: Actor::Host, spot: spot(), found });
            }
        }
        Ok(())
    }

    fn give_out(&mut self, index: usize) -> Result<(), CheckError> {
        let plan = self.plan;
        let instruction = &plan.instructions[index];
        let id = InstructionId(index as u32);
        let queue = plan.queue(id);
        let thread = queue.index();
        let mut clock = self.known[thread];
        join(&mut clock, &self.known[HOST]);
        for (wait, awaited) in instruction.waits.iter().enumerate() {
            if let Some(done) = &self.done[awaited.index()] {
                join(&mut clock, done);
                self.heard.hear(index, wait);
            }
        }
        clock[thread] += 1;
        self.given_out[queue].push(id);
        let stamp = Stamp { thread, count: clock[thread] };
        match &instruction.work {
            Work::Compute(compute) => self.compute(compute, stamp, &clock)?,
            Work::Copy(copy) => self.copy(copy, stamp, &clock)?,
            Work::Fetch(fetch) => self.fetch(fetch, stamp, &clock)?,
            Work::ReadAhead(read) => self.read_ahead(read, stamp, &clock)?,
            Work::Collective(collective) => self.collective(collective, stamp, &clock)?,
        }
        self.known[thread] = clock;
        self.done[index] = Some(clock);
        Ok(())
    }

    fn compute(
        &mut self,
        compute: &Compute,
        stamp: Stamp,
        clock: &Clock,
    ) -> Result<(), CheckError> {
        for operand in &compute.reads {
            self.read_current(operand, stamp, clock)?;
        }
        for operand in &compute.writes {
            self.versions[operand.value.index()] += 1;
            self.write_current(operand, stamp, clock)?;
        }
        Ok(())
    }

    /// Sends what is current. What comes from another rank is new; an own piece that is put elsewhere stays what it is.
    fn collective(
        &mut self,
        collective: &Collective,
        stamp: Stamp,
        clock: &Clock,
    ) -> Result<(), CheckError> {
        for operand in collective.reads() {
            self.read_current(operand, stamp, clock)?;
        }
        for (from, operand) in collective.writes() {
            if *from != self.plan.rank.rank {
                self.versions[operand.value.index()] += 1;
            }
            self.write_current(operand, stamp, clock)?;
        }
        Ok(())
    }

    /// Reads the latest version of a value where kernels work.
    fn read_current(
        &mut self,
        operand: &Operand,
        stamp: Stamp,
        clock: &Clock,
    ) -> Result<(), CheckError> {
        let (value, start) = (operand.value, operand.offset);
        let bytes = start..start + self.plan.value(value).size_bytes;
        let version = self.versions[value.index()];
        let mut wrong = None;
        let read = self.memory[Compute::TIER].read(bytes, stamp, clock, |bytes, content| {
            let wanted = Content { value, version, position: bytes.start - start };
            if content != Some(wanted) {
                wrong.get_or_insert((bytes, wanted, content));
            }
        });
        read.map_err(|c| self.read_conflict(stamp, Some(value), Compute::TIER, c))?;
        match wrong {
            None => Ok(()),
            Some((bytes, wanted, content)) => {
                Err(self.wrong_content(stamp, Compute::TIER, bytes, wanted, content))
            }
        }
    }

    /// Writes the latest version of a value where kernels work.
    fn write_current(
        &mut self,
        operand: &Operand,
        stamp: Stamp,
        clock: &Clock,
    ) -> Result<(), CheckError> {
        let (value, start) = (operand.value, operand.offset);
        let bytes = start..start + self.plan.value(value).size_bytes;
        let version = self.versions[value.index()];
        let content = Some(Content { value, version, position: 0 });
        self.memory[Compute::TIER].write(bytes, stamp, clock, content).map_err(|conflict| {
            self.write_conflict(self.actor(stamp), Some(value), Compute::TIER, conflict)
        })
    }

    /// Every input gets the data of another micro-batch: a new version, which kernels must find.
    fn fetch(&mut self, fetch: &Fetch, stamp: Stamp, clock: &Clock) -> Result<(), CheckError> {
        for input in self.plan.fetched(fetch) {
            let value = input.value;
            self.versions[value.index()] += 1;
            let version = self.versions[value.index()];
            let content = Content { value, version, position: 0 };
            let Place { tier, offset } = input.place;
            let bytes = offset..offset + self.plan.value(value).size_bytes;
            self.memory[tier].write(bytes, stamp, clock, Some(content)).map_err(|conflict| {
                self.write_conflict(self.actor(stamp), Some(value), tier, conflict)
            })?;
        }
        self.fetched.push_back((fetch.micro_batches, stamp));
        Ok(())
    }

    /// What is read goes where the data of the oldest fetch was, so that fetch must be done.
    fn read_ahead(
        &mut self,
        read: &ReadAhead,
        stamp: Stamp,
        clock: &Clock,
    ) -> Result<(), CheckError> {
        let reader = self.actor(stamp);
        match self.fetched.pop_front() {
            Some((micro_batches, fetch)) if micro_batches == read.micro_batches => {
                match fetch.is_before(clock) {
                    true => Ok(()),
                    false => {
                        Err(CheckError::UnorderedReadAhead { reader, fetch: self.actor(fetch) })
                    }
                }
            }
            found => Err(CheckError::ReadAheadOf {
                reader,
                micro_batches: read.micro_batches,
                free: found.map_or(0, |(micro_batches, _)| micro_batches),
            }),
        }
    }

    fn copy(&mut self, copy: &Copy, stamp: Stamp, clock: &Clock) -> Result<(), CheckError> {
        let Copy { from, to, .. } = *copy;
        let mut carried = std::mem::take(&mut self.carried);
        carried.clear();
        let mut next = 0;
        for operand in &copy.values {
            // The bytes between the values are copied as well, whatever they hold.
            self.pick_up(None, from, next..operand.offset, stamp, clock, &mut carried)?;
            next = operand.offset + self.plan.value(operand.value).size_bytes;
            let bytes = operand.offset..next;
            self.pick_up(Some(operand.value), from, bytes, stamp, clock, &mut carried)?;
        }
        self.pick_up(None, from, next..copy.bytes, stamp, clock, &mut carried)?;
        for (bytes, content) in &carried {
            let bytes = to.offset + bytes.start..to.offset + bytes.end;
            self.memory[to.tier].write(bytes, stamp, clock, *content).map_err(|conflict| {
                let value = content.map(|content| content.value);
                self.write_conflict(self.actor(stamp), value, to.tier, conflict)
            })?;
        }
        self.carried = carried;
        Ok(())
    }

    /// Reads a value for a copy, in any version, or the bytes between two values.
    fn pick_up(
        &mut self,
        value: Option<ValueId>,
        Place { tier, offset: base }: Place,
        relative: Range<usize>,
        stamp: Stamp,
        clock: &Clock,
        carried: &mut Vec<(Range<usize>, Option<Content>)>,
    ) -> Result<(), CheckError> {
        let bytes = base + relative.start..base + relative.end;
        let start = bytes.start;
        let mut wrong = None;
        let read = self.memory[tier].read(bytes, stamp, clock, |bytes, content| {
            let mut taken = None;
            if let Some(value) = value {
                let position = bytes.start - start;
                taken = content.filter(|c| c.value == value && c.position == position);
                if taken.is_none() {
                    wrong.get_or_insert((
                        bytes.clone(),
                        Content { value, version: 0, position },
                        content,
                    ));
                }
            }
            carried.push((bytes.start - base..bytes.end - base, taken));
        });
        read.map_err(|conflict| self.read_conflict(stamp, value, tier, conflict))?;
        match wrong {
            None => Ok(()),
            Some((bytes, wanted, content)) => {
                Err(self.wrong_content(stamp, tier, bytes, wanted, content))
            }
        }
    }
}

/// Where a value rests.
struct RestingSpot {
    value: ValueId,
    tier: Tier,
    bytes: Range<usize>,
}

/// All persistent values, at all their places, with the index of their tensor.
fn resting(plan: &Plan) -> impl Iterator<Item = (usize, RestingSpot)> {
    plan.lasting.iter().enumerate().flat_map(move |(tensor, lasting)| {
        let wholes = lasting.places.iter().flat_map(move |place| {
            let mut start = place.offset;
            lasting.pieces.iter().map(move |&value| {
                let bytes = start..start + plan.value(value).size_bytes;
                start = bytes.end;
                (tensor, RestingSpot { value, tier: place.tier, bytes })
            })
        });
        let parts = lasting.parts.iter().map(move |&(piece, Place { tier, offset })| {
            let value = lasting.pieces[piece as usize];
            let bytes = offset..offset + plan.value(value).size_bytes;
            (tensor, RestingSpot { value, tier, bytes })
        });
        wholes.chain(parts)
    })
}
