//! Offloads and fetches pieces.

use super::Framework;
use super::piece::Place;
use super::report::{Clock, SavedReport};
use super::step::{Mode, Step};
use std::sync::Arc;
use storm_device::DeviceError;
use storm_device::foreign::{Coming, ComputeStream, Copies, Leaving, SlabPool};

pub(super) struct Mover<W: Framework> {
    pub(super) framework: W,
    copies: Arc<Copies>,
    pub(super) pool: SlabPool,
    /// Memory that only a copy in flight still needs.
    abandoned: Vec<Abandoned<W>>,
    pub(super) clock: Clock,
    pub(super) report: SavedReport,
    host_used_bytes: u64,
}

enum Abandoned<W: Framework> {
    Leaving(Leaving<W::Memory>),
    Coming(Coming<W::Memory>),
}

impl<W: Framework> Mover<W> {
    pub(super) fn new(framework: W, copies: Arc<Copies>, host_bytes_max: u64) -> Mover<W> {
        let pool = SlabPool::new(&copies, host_bytes_max);
        let (clock, report) = (Clock::default(), SavedReport::default());
        Mover { framework, copies, pool, abandoned: Vec::new(), clock, report, host_used_bytes: 0 }
    }

    /// Offloads a piece that is on the device, to this offset in the slab if it is free. The piece
    /// stays if there is no host memory for it.
    pub(super) fn send(
        &mut self,
        step: &mut Step<W>,
        index: usize,
        host_offset: Option<usize>,
        stream: ComputeStream,
    ) -> Result<(), W::Error> {
        let piece = &mut step.pieces[index];
        let planned = host_offset.and_then(|offset| self.pool.take_at(offset, piece.bytes));
        let Ok(mut slot) = planned.map_or_else(|| self.pool.take(piece.bytes), Ok) else {
            piece.fixed = true;
            return Ok(());
        };
        let Place::Here(memory, start) = std::mem::replace(&mut piece.place, Place::Away) else {
            unreachable!("only pieces that are here are sent out");
        };
        let leaving = self.copies.store(memory, piece.offset - start, &mut slot, stream)?;
        piece.slot = Some(slot);
        piece.moved = true;
        self.was_sent(step, index, leaving);
        let piece = &step.pieces[index];
        self.host_used_bytes += piece.bytes as u64;
        self.report.host_used_bytes = self.report.host_used_bytes.max(self.host_used_bytes);
        Ok(())
    }

    /// Copies an offloaded piece to the same slot again, from its original memory.
    pub(super) fn send_again(
        &mut self,
        step: &mut Step<W>,
        index: usize,
        memory: W::Memory,
        stream: ComputeStream,
    ) -> Result<(), W::Error> {
        let piece = &mut step.pieces[index];
        let slot = piece.slot.as_mut().expect("what was sent has a place until it is forgotten");
        let leaving = match std::mem::replace(&mut piece.place, Place::Away) {
            Place::Leaving(leaving) => {
                self.copies.store_again(leaving, piece.offset, slot, stream)?
            }
            _ => self.copies.store(memory, piece.offset, slot, stream)?,
        };
        step.leaving.retain(|&leaving| leaving != index);
        self.was_sent(step, index, leaving);
        Ok(())
    }

    fn was_sent(&mut self, step: &mut Step<W>, index: usize, leaving: Leaving<W::Memory>) {
        let piece = &mut step.pieces[index];
        self.clock.copy(leaving.time());
        piece.place = Place::Leaving(leaving);
        step.leaving.push_back(index);
        self.report.stored_bytes += piece.bytes as u64;
        self.report.copies += 1;
    }

    /// Starts to fetch a piece unless it is on the device or in flight.
    pub(super) fn fetch(
        &mut self,
        step: &mut Step<W>,
        index: usize,
        stream: ComputeStream,
    ) -> Result<(), W::Error> {
        let piece = &mut step.pieces[index];
        if let Place::Leaving(_) = piece.place {
            // It is still on the device, so cancel its release.
            step.leaving.retain(|&leaving| leaving != index);
        }
        let (Place::Away, Some(slot)) = (&piece.place, &mut piece.slot) else { return Ok(()) };
        let memory = self.framework.allocate(piece.bytes, stream)?;
        if let Mode::Recorded(recorder) = &mut step.mode {
            recorder.took(piece.bytes as u64);
        }
        let coming = self.copies.fetch(slot, memory, stream)?;
        self.clock.copy(coming.time());
        self.report.fetched_bytes += piece.bytes as u64;
        self.report.copies += 1;
        piece.place = Place::Coming(coming);
        Ok(())
    }

    /// Makes sure that a piece is on the device for everything issued to `stream` from now on.
    pub(super) fn bring(
        &mut self,
        step: &mut Step<W>,
        index: usize,
        stream: ComputeStream,
    ) -> Result<(), W::Error> {
        let piece = &mut step.pieces[index];
        if let Place::Away = piece.place
            && let Some(memory) = self.framework.upgrade(&piece.origin)
        {
            piece.fixed = true;
            piece.place = Place::Here(memory, 0);
            return Ok(());
        }
        self.fetch(step, index, stream)?;
        let piece = &mut step.pieces[index];
        match std::mem::replace(&mut piece.place, Place::Away) {
            Place::Coming(coming) => {
                let (memory, stall) = coming.arrive(stream)?;
                self.clock.stall(stall);
                piece.place = Place::Here(memory, piece.offset);
            }
            place => piece.place = place,
        }
        Ok(())
    }

    /// Frees the oldest pieces being offloaded, waiting if necessary, until copies alone hold at
    /// most `limit_bytes` bytes.
    pub(super) fn limit_leaving(
        &mut self,
        step: &mut Step<W>,
        limit_bytes: u64,
        given_up: impl Fn(usize) -> bool,
        stream: ComputeStream,
    ) -> Result<(), W::Error> {
        let mut bytes = step.leaving_bytes(&given_up);
        while let Some(&index) = step.leaving.front() {
            let piece = &mut step.pieces[index];
            let done = match &piece.place {
                Place::Leaving(leaving) => leaving.is_done()?,
                // It was fetched back, or is no longer needed.
                _ => {
                    step.leaving.pop_front();
                    continue;
                }
            };
            if !done && bytes <= limit_bytes {
                break;
            }
            if given_up(index) {
                bytes -= piece.bytes as u64;
            }
            step.leaving.pop_front();
            if let Place::Leaving(leaving) = std::mem::replace(&mut piece.place, Place::Away) {
                let (memory, stall) = leaving.release(stream)?;
                drop(memory);
                if !done {
                    self.clock.stall(stall);
                }
            }
        }
        Ok(())
    }

    /// Releases the device memory of a piece that the framework no longer needs. Its host copy
    /// stays.
    pub(super) fn let_go(&mut self, step: &mut Step<W>, index: usize) {
        match std::mem::replace(&mut step.pieces[index].place, Place::Away) {
            Place::Leaving(leaving) => self.abandoned.push(Abandoned::Leaving(leaving)),
            Place::Coming(coming) => self.abandoned.push(Abandoned::Coming(coming)),
            Place::Here(..) | Place::Away => {}
        }
    }

    /// Releases a piece on the device and on the host.
    pub(super) fn forget(&mut self, step: &mut Step<W>, index: usize) {
        self.let_go(step, index);
        if step.pieces[index].slot.take().is_some() {
            self.host_used_bytes -= step.pieces[index].bytes as u64;
        }
    }

    /// Frees memory of completed copies.
    pub(super) fn free_abandoned(&mut self) -> Result<(), DeviceError> {
        let mut kept = Vec::new();
        for abandoned in self.abandoned.drain(..) {
            let done = match &abandoned {
                Abandoned::Leaving(leaving) => leaving.is_done()?,
                Abandoned::Coming(coming) => coming.is_done()?,
            };
            if !done {
                kept.push(abandoned);
            }
        }
        self.abandoned = kept;
        Ok(())
    }
}
