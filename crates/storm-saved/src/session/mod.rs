//! The session: saves pieces, returns them when needed, records steps and plans later ones.

mod mover;
mod piece;
mod recorder;
mod recordings;
mod report;
mod step;

use crate::Framework;
use crate::plan::{Allowance, Fate};
use mover::Mover;
use piece::{Expected, Piece, Place};
use recorder::Recorder;
pub use recorder::{MemoryUse, Peak};
use recordings::Recordings;
pub use report::SavedReport;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use step::{Mode, Step};
use storm_device::foreign::{ComputeStream, Copies, Foreign};

/// Consecutive unplanned steps to record. After that, every step is assumed to differ.
const RECORDED_IN_A_ROW_MAX: u64 = 4;

/// How often to record again when every step differs.
const RECORDED_EVERY: u64 = 32;

/// Memory limits of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedOptions {
    /// Device memory limit.
    pub allowance: Allowance,
    /// Host memory limit.
    pub host_bytes_max: u64,
    /// Without a plan: the maximum bytes in flight in each direction.
    pub window_bytes: u64,
}

/// The memory to save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Uniquely identifies live memory, for as long as its origin exists.
    pub memory: usize,
    /// The memory's version, which counts changes.
    pub version: u64,
    /// The bytes to save.
    pub range: Range<usize>,
}

/// Refers to a saved piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceName {
    step: u64,
    piece: usize,
}

/// Whether a name is used for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// The first use.
    First,
    /// A later use: a second backward pass.
    Again,
}

/// The saved memory of one device.
pub struct Session<W: Framework> {
    options: SavedOptions,
    mover: Mover<W>,
    steps: BTreeMap<u64, Step<W>>,
    current: u64,
    recordings: Recordings,
    record_next: bool,
    /// Consecutive steps that did not follow a plan.
    unplanned_steps: u64,
}

impl<W: Framework> Session<W> {
    /// Creates a session without steps.
    pub fn new(framework: W, copies: Arc<Copies>, options: SavedOptions) -> Session<W> {
        Session {
            mover: Mover::new(framework, copies, options.host_bytes_max),
            options,
            steps: BTreeMap::new(),
            current: 0,
            recordings: Recordings::default(),
            record_next: false,
            unplanned_steps: 0,
        }
    }

    /// Saves a range of `memory`, which must have been written by work already issued to `stream`.
    ///
    /// # Errors
    /// From the device or the framework.
    ///
    /// # Panics
    /// The range is outside the memory.
    pub fn save(
        &mut self,
        source: Source,
        memory: W::Memory,
        origin: impl FnOnce() -> W::Origin,
        stream: ComputeStream,
    ) -> Result<PieceName, W::Error> {
        let bytes = source.range.len();
        self.mover.free_abandoned()?;
        if !self.steps.get(&self.current).is_some_and(Step::goes_on) {
            self.begin_step(bytes, stream)?;
        }
        let number = self.current;
        let step = self.steps.get_mut(&number).expect("it runs");
        if let Some(index) = step.find(&source, memory.bytes()) {
            self.save_again(number, index, memory, stream)?;
            self.mover.report.shared.0 += 1;
            self.mover.report.shared.1 += bytes as u64;
            return Ok(PieceName { step: number, piece: index });
        }

        let index = step.pieces.len();
        step.record_position(&self.mover.framework, index);
        self.follow(number, bytes, stream)?;
        let step = self.steps.get_mut(&number).expect("it runs");
        let mut expected = Expected::NOTHING;
        let mut fate = Some(Fate::Move { host_offset: usize::MAX });
        if let Mode::Planned { recording, plan, .. } = &step.mode {
            fate = plan.fates.get(index).copied();
            if let Some(recording) = self.recordings.get(*recording) {
                let recorded = &recording.pieces[index];
                expected = Expected { saves: recorded.saves, uses: Some(recorded.uses) };
            }
        }
        let Source { memory: id, version, range } = source;
        let piece = Piece::new(bytes, range.start, origin(), memory, expected);
        step.add(id, version, range, piece);
        if let Some(Fate::Move { host_offset }) = fate
            && expected.saves <= 1
            && let Err(error) = self.mover.send(step, index, Some(host_offset), stream)
        {
            // The caller never received its name.
            step.pieces[index].holders = 0;
            self.mover.forget(step, index);
            return Err(error);
        }
        step.holders += 1;
        self.limit_leaving(number, stream)?;
        Ok(PieceName { step: number, piece: index })
    }

    /// Handles another save of a piece. A tensor with a separate version counter may have written
    /// its memory since. So a piece is offloaded after the last save, or copied again if it already
    /// was offloaded.
    fn save_again(
        &mut self,
        number: u64,
        index: usize,
        memory: W::Memory,
        stream: ComputeStream,
    ) -> Result<(), W::Error> {
        let step = self.steps.get_mut(&number).expect("it runs");
        step.pieces[index].saves += 1;
        let unsent = step.unsent(index);
        let piece = &mut step.pieces[index];
        if let Some(host_offset) = unsent {
            if piece.saves >= piece.saves_expected {
                piece.place = Place::Here(memory, 0);
                self.mover.send(step, index, Some(host_offset), stream)?;
            }
        } else if piece.moved {
            self.mover.send_again(step, index, memory, stream)?;
        }
        let step = self.steps.get_mut(&number).expect("it runs");
        step.holders += 1;
        step.pieces[index].holders += 1;
        step.pieces[index].names += 1;
        self.limit_leaving(number, stream)
    }

    /// Provides a piece to `hand_out`, with the offset of the original at which its memory begins.
    ///
    /// # Errors
    /// From the device or the framework.
    ///
    /// # Panics
    /// The name was released.
    pub fn need<R>(
        &mut self,
        name: PieceName,
        usage: Use,
        stream: ComputeStream,
        hand_out: impl FnOnce(&W::Memory, usize) -> R,
    ) -> Result<R, W::Error> {
        self.mover.free_abandoned()?;
        let step = self.steps.get_mut(&name.step).expect("a step lives as long as its names");
        let first_need = step.pieces[name.piece].needed.is_none();
        if first_need {
            step.needs += 1;
        }
        let position = step.position();
        let piece = &mut step.pieces[name.piece];
        piece.needed = Some((piece.needed.map_or(position, |(first, _)| first), position));
        if first_need {
            self.advance(name, position, stream)?;
        }
        let step = self.steps.get_mut(&name.step).expect("as above");
        self.mover.bring(step, name.piece, stream)?;
        let piece = &mut step.pieces[name.piece];
        if usage == Use::First {
            piece.used += 1;
        }
        let result = match &piece.place {
            Place::Here(memory, start) => hand_out(memory, *start),
            Place::Leaving(leaving) => hand_out(leaving.memory(), 0),
            Place::Away | Place::Coming(_) => unreachable!("it was brought here"),
        };
        if piece.slot.is_some() && piece.is_finished() {
            self.mover.let_go(step, name.piece);
        }
        Ok(result)
    }

    /// Releases a name, used or not.
    ///
    /// # Panics
    /// It was already released.
    pub fn release(&mut self, name: PieceName, usage: Option<Use>) {
        let step = self.steps.get_mut(&name.step).expect("a step lives as long as its names");
        if let Mode::Recorded(recorder) = &mut step.mode {
            recorder.look(self.mover.framework.memory_use(Peak::Keep));
        }
        step.holders -= 1;
        step.pieces[name.piece].holders -= 1;
        if usage.is_none() {
            step.pieces[name.piece].names -= 1;
        }
        if step.pieces[name.piece].holders == 0 {
            self.mover.forget(step, name.piece);
        }
        if step.is_over() && name.step != self.current {
            self.steps.remove(&name.step);
        }
    }

    /// Returns unused host memory to the system.
    ///
    /// # Errors
    /// From the device.
    pub fn give_back_host_memory(&mut self) -> Result<(), W::Error> {
        self.mover.free_abandoned()?;
        Ok(self.mover.pool.reserve(0)?)
    }

    /// Statistics so far.
    ///
    /// # Errors
    /// From the device.
    pub fn report(&mut self) -> Result<SavedReport, W::Error> {
        self.mover.clock.read(&mut self.mover.report)?;
        let mut report = self.mover.report;
        if let Some(step) = self.steps.get(&self.current) {
            (report.kept, report.moved) = step.sums();
            if let Mode::Planned { plan, .. } = &step.mode {
                report.planned_peak_bytes = plan.peak_bytes;
                report.least_peak_bytes = plan.least_bytes;
                report.allowed_bytes = plan.allowed_bytes;
            }
        }
        report.host_bytes = self.mover.pool.held_bytes() as u64;
        Ok(report)
    }

    /// Begins a step whose first piece has this many bytes.
    fn begin_step(&mut self, bytes: usize, stream: ComputeStream) -> Result<(), W::Error> {
        self.conclude_step(stream)?;
        self.mover.clock.read(&mut self.mover.report)?;
        self.mover.report.steps += 1;
        self.mover.report.shared = (0, 0);
        let known = self.recordings.find(std::iter::once(bytes));
        let may_record = self.unplanned_steps < RECORDED_IN_A_ROW_MAX
            || self.unplanned_steps.is_multiple_of(RECORDED_EVERY);
        let mode = match known {
            Some(recording) if !(self.record_next && may_record) => self.planned(recording)?,
            _ if may_record => {
                self.record_next = false;
                self.mover.report.recorded_steps += 1;
                Mode::Recorded(Recorder::default())
            }
            _ => Mode::Unplanned,
        };
        self.current += 1;
        self.steps.insert(self.current, Step::new(mode));
        Ok(())
    }

    /// Ends the current step and keeps its recording.
    fn conclude_step(&mut self, stream: ComputeStream) -> Result<(), W::Error> {
        let Some(step) = self.steps.get_mut(&self.current) else { return Ok(()) };
        self.mover.limit_leaving(step, 0, |_| true, stream)?;
        if !step.is_backward() {
            // A forward pass whose graph was dropped, such as an evaluation, records nothing
            // useful.
            self.steps.remove(&self.current);
            return Ok(());
        }
        let as_planned = match &step.mode {
            Mode::Planned { plan, surprises, .. } => {
                *surprises == 0 && step.pieces.len() == plan.fates.len()
            }
            Mode::Recorded(_) | Mode::Unplanned => false,
        };
        if as_planned {
            self.unplanned_steps = 0;
            self.mover.report.planned_steps += 1;
        } else {
            self.unplanned_steps += 1;
            self.record_next |= matches!(step.mode, Mode::Planned { .. });
        }
        if let Some(recording) = step.recording() {
            self.recordings.add(recording);
        }
        if step.is_over() {
            self.steps.remove(&self.current);
        }
        Ok(())
    }

    fn planned(&mut self, recording: u64) -> Result<Mode, W::Error> {
        let now = self.mover.framework.memory_use(Peak::Keep);
        let in_use = now.unwrap_or_default().in_use_bytes;
        let plan = self.recordings.plan(recording, self.options.allowance, in_use);
        let plan = plan.expect("it was just found");
        if self.steps.values().all(|step| step.holders == 0) {
            self.mover.pool.reserve(plan.slab_bytes)?;
        }
        Ok(Mode::Planned { recording, plan, next_fetch: 0, surprises: 0 })
    }

    /// Checks that the next piece matches the recording. If not, switches to another recording or
    /// continues without a plan.
    fn follow(&mut self, number: u64, bytes: usize, stream: ComputeStream) -> Result<(), W::Error> {
        let step = &self.steps[&number];
        let Mode::Planned { recording, .. } = step.mode else { return Ok(()) };
        let index = step.pieces.len();
        let recorded = self.recordings.get(recording).and_then(|all| all.pieces.get(index));
        if recorded.is_some_and(|piece| piece.bytes == bytes) {
            return Ok(());
        }
        let sizes: Vec<usize> =
            step.pieces.iter().map(|piece| piece.bytes).chain([bytes]).collect();
        let other = self.recordings.find(sizes.iter().copied());
        self.leave_plan(number, other, stream)
    }

    /// Continues with another recording's plan or without one. Pieces that it does not keep are
    /// offloaded now.
    fn leave_plan(
        &mut self,
        number: u64,
        other: Option<u64>,
        stream: ComputeStream,
    ) -> Result<(), W::Error> {
        let mode = match other {
            Some(recording) => self.planned(recording)?,
            None => {
                self.record_next = true;
                Mode::Unplanned
            }
        };
        let step = self.steps.get_mut(&number).expect("it runs");
        step.mode = mode;
        for index in 0..step.pieces.len() {
            let stays = match &step.mode {
                Mode::Planned { plan, .. } => plan.fates[index] == Fate::Stay,
                Mode::Recorded(_) | Mode::Unplanned => false,
            };
            let piece = &step.pieces[index];
            if !stays && !piece.moved && piece.holders > 0 {
                self.mover.send(step, index, None, stream)?;
            }
        }
        Ok(())
    }

    /// Handles the first need of a piece in its step: starts the next fetches.
    fn advance(
        &mut self,
        name: PieceName,
        position: usize,
        stream: ComputeStream,
    ) -> Result<(), W::Error> {
        let step = self.steps.get_mut(&name.step).expect("a step lives as long as its names");
        if let Mode::Planned { plan, .. } = &step.mode
            && (plan.fates.len() != step.pieces.len() || step.needs == 1 && !step.all_sent())
        {
            self.leave_plan(name.step, None, stream)?;
        }
        let step = self.steps.get_mut(&name.step).expect("as above");
        match &mut step.mode {
            Mode::Recorded(_) => step.record_position(&self.mover.framework, position),
            Mode::Planned { recording, plan, next_fetch, surprises } => {
                let recorded = self.recordings.get(*recording);
                let expected = recorded.and_then(|all| all.pieces[name.piece].needed);
                if expected.is_none_or(|(first, _)| first != position) {
                    *surprises += 1;
                }
                let from = *next_fetch;
                let due =
                    plan.fetches[from..].iter().take_while(|fetch| fetch.position <= position);
                let due: Vec<usize> = due.map(|fetch| fetch.piece).collect();
                *next_fetch += due.len();
                for piece in due {
                    if step.pieces[piece].holders > 0 && step.pieces[piece].needed.is_none()
                        || piece == name.piece
                    {
                        self.mover.fetch(step, piece, stream)?;
                    }
                }
            }
            Mode::Unplanned => {
                if !self.mover.framework.is_alive(&step.pieces[name.piece].origin) {
                    self.mover.fetch(step, name.piece, stream)?;
                }
                self.fetch_backwards(name, stream)?;
            }
        }
        self.limit_leaving(name.step, stream)
    }

    /// Without a plan, guesses that the piece saved before this one is needed next.
    fn fetch_backwards(&mut self, name: PieceName, stream: ComputeStream) -> Result<(), W::Error> {
        let step = self.steps.get_mut(&name.step).expect("a step lives as long as its names");
        let mut bytes = 0;
        for index in (0..name.piece).rev() {
            let piece = &step.pieces[index];
            if piece.needed.is_some() || piece.holders == 0 {
                continue;
            }
            bytes += piece.bytes as u64;
            if bytes > self.options.window_bytes {
                break;
            }
            if !self.mover.framework.is_alive(&piece.origin) {
                self.mover.fetch(step, index, stream)?;
            }
        }
        Ok(())
    }

    /// Limits the bytes being offloaded to the maximum at this position.
    fn limit_leaving(&mut self, number: u64, stream: ComputeStream) -> Result<(), W::Error> {
        let step = self.steps.get_mut(&number).expect("it runs");
        if step.leaving.is_empty() {
            return Ok(());
        }
        let position = step.position();
        match &step.mode {
            Mode::Recorded(_) => self.mover.limit_leaving(step, 0, |_| true, stream),
            Mode::Unplanned => {
                self.mover.limit_leaving(step, self.options.window_bytes, |_| true, stream)
            }
            Mode::Planned { recording, plan, .. } => {
                let limit = plan.leaving_bytes_max.get(position).copied().unwrap_or(0);
                let recorded = self.recordings.get(*recording);
                let given_up = |index: usize| {
                    recorded.is_none_or(|all| all.pieces[index].given_up <= position)
                };
                self.mover.limit_leaving(step, limit, given_up, stream)
            }
        }
    }
}
