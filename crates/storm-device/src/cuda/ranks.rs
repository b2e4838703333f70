//! The GPUs of other ranks, over NCCL.

mod clock;
mod link;

use super::context::{self, Allocation, Card, Context, Purpose, Stream};
use super::memory::bus_address;
use super::transfer;
use super::{CudaError, CudaPlanDevice};
use crate::collectives::{Messages, Packed};
use crate::{DeviceError, PlanDevice};
use clock::Clock;
use cudarc::driver::{result, sys};
pub use link::CudaLink;
use std::fmt;
use std::sync::Arc;
use storm_plan::Plan;
use storm_ranks::Place;
use storm_ranks::nccl::{self, Communicator, Id, Message, Nccl, Piece};

/// The number of GPUs that this process sees.
///
/// # Errors
/// There is no driver, or no GPU.
pub fn visible_cards() -> Result<usize, CudaError> {
    context::start_driver(0, Purpose::Kernels)?;
    context::card_count()
}

/// GPU number `ordinal`, and its address on the machine's bus, which distinguishes it from others.
/// The address is empty if the driver does not report it.
///
/// # Errors
/// There is no such GPU.
pub fn find_card(ordinal: usize) -> Result<(Card, String), CudaError> {
    context::start_driver(ordinal, Purpose::Kernels)?;
    let (device, card) = context::find_card(ordinal)?;
    let bus = bus_address(device).unwrap_or_default();
    Ok((card, bus))
}

/// This rank's GPU before it is connected. Everything that can fail on one rank alone happens
/// before ranks wait for each other.
pub struct OpenCard {
    context: Arc<Context>,
}

impl OpenCard {
    /// Opens GPU number `ordinal`.
    ///
    /// # Errors
    /// From the driver: no such GPU, one that cannot be used, or no memory for a context.
    pub fn new(ordinal: usize) -> Result<OpenCard, DeviceError> {
        Ok(OpenCard { context: Context::open(ordinal)? })
    }
}

/// This rank's GPU, connected to those of the others.
pub struct CudaRanks {
    // Dropped in this order: the communicator needs the context.
    communicator: Communicator,
    context: Arc<Context>,
    nccl_bytes: u64,
    /// Times the collectives of plans.
    clock: Clock,
}

impl CudaRanks {
    /// Connects a GPU to those of all other ranks, which call this at the same time. Sends each of
    /// them a message, so that NCCL allocates what it needs before anything is planned.
    ///
    /// # Errors
    /// From the driver or from NCCL, or if what arrives is not what was sent.
    pub fn connect(
        card: OpenCard,
        nccl: &Arc<Nccl>,
        id: Id,
        place: Place,
    ) -> Result<CudaRanks, DeviceError> {
        let OpenCard { context } = card;
        context.make_current()?;
        let before = context.memory_in_use()?;
        // SAFETY: the context is current, and lives longer than the communicator.
        let communicator =
            unsafe { Communicator::connect(nccl, id, place) }.map_err(CudaError::from)?;
        let mut ranks = CudaRanks { communicator, context, nccl_bytes: 0, clock: Clock::default() };
        ranks.greet()?;
        let after = ranks.context.memory_in_use()?;
        ranks.nccl_bytes = after.bytes.saturating_sub(before.bytes);
        Ok(ranks)
    }

    /// Which rank this is.
    pub fn place(&self) -> Place {
        self.communicator.place()
    }

    /// Card memory that NCCL took when it connected the ranks.
    pub fn nccl_bytes(&self) -> u64 {
        self.nccl_bytes
    }

    /// Waits for all queued work and disconnects, if nothing else uses the connection. Every rank
    /// does this.
    ///
    /// # Errors
    /// From the driver or from NCCL.
    pub fn finish(self: Arc<CudaRanks>) -> Result<(), DeviceError> {
        let Some(CudaRanks { communicator, context, .. }) = Arc::into_inner(self) else {
            return Ok(());
        };
        context.make_current()?;
        Ok(communicator.finish().map_err(CudaError::from)?)
    }

    /// Every rank sends its number to every other.
    fn greet(&self) -> Result<(), DeviceError> {
        const BYTES: usize = CudaPlanDevice::ALIGNMENT;
        let Place { rank, ranks } = self.place();
        let memory = self.context.allocate((ranks as usize + 1) * BYTES)?;
        let stream = Stream::new(&self.context)?;
        let word = |rank: u32| [rank.to_le_bytes(); BYTES / 4].concat();
        let at = |index: usize| memory.start() + (index * BYTES) as u64;
        // SAFETY: in bounds of memory that nothing else uses.
        unsafe { result::memcpy_htod_sync(at(ranks as usize), &word(rank)) }
            .map_err(CudaError::driver("copying a message"))?;
        let others = || (0..ranks).filter(|&other| other != rank);
        let message =
            |rank, index| Message { rank, piece: Piece { address: at(index), bytes: BYTES } };
        let sends: Vec<Message> = others().map(|other| message(other, ranks as usize)).collect();
        let receives: Vec<Message> = others().map(|other| message(other, other as usize)).collect();
        let messages = PlacedMessages { sends, receives, kept: Vec::new() };
        // SAFETY: in bounds of memory that nothing else uses, and that lives until the wait below.
        unsafe { self.queue(&messages, &stream)? };
        stream.synchronize("connecting ranks")?;
        for other in others() {
            let mut heard = vec![0; BYTES];
            // SAFETY: as above, and what wrote it is done.
            unsafe { result::memcpy_dtoh_sync(&mut heard, at(other as usize)) }
                .map_err(CudaError::driver("copying a message"))?;
            if heard != word(other) {
                return Err(CudaError::MessageChanged { rank: other }.into());
            }
        }
        Ok(())
    }

    /// Queues the messages of a round of a collective.
    ///
    /// # Safety
    /// Until the stream has executed this, nothing writes what is sent, and nothing accesses what
    /// is received. The other ranks queue the counterparts of these messages.
    pub(super) unsafe fn queue(
        &self,
        messages: &PlacedMessages,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let PlacedMessages { sends, receives, kept } = messages;
        for &(from, to, bytes) in kept {
            // SAFETY: as the caller guarantees. Both are in one block and do not overlap.
            unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream.handle()) }
                .result()
                .map_err(CudaError::driver("queueing a copy"))?;
        }
        if sends.is_empty() && receives.is_empty() {
            return Ok(());
        }
        let stream = nccl::Stream(stream.handle().cast());
        // SAFETY: as the caller guarantees.
        Ok(unsafe { self.communicator.exchange(sends, receives, stream) }?)
    }

    /// Queues the rounds of a collective, and times them.
    ///
    /// # Safety
    /// As for [`CudaRanks::queue`].
    pub(super) unsafe fn queue_timed(
        &self,
        rounds: &[PlacedMessages],
        stream: &Stream,
    ) -> Result<(), CudaError> {
        self.clock.time(&self.context, stream, || {
            // SAFETY: as the caller guarantees. A stream runs one round after the other.
            rounds.iter().try_for_each(|messages| unsafe { self.queue(messages, stream) })
        })
    }

    /// Seconds that timed collectives took on the card, of those that ended since the last call.
    pub(super) fn take_seconds(&self) -> Result<f64, CudaError> {
        self.clock.take_seconds()
    }

    /// Fails if something that was queued failed, such as when another rank has ended. What waits
    /// for that rank on the card is then aborted.
    pub(super) fn check(&self) -> Result<(), CudaError> {
        let Some(failure) = self.communicator.failure() else { return Ok(()) };
        let aborter = self.communicator.aborter();
        // Aborting may hang. If no thread can be started for it, queued work ends with the process.
        let _ = std::thread::Builder::new()
            .name("nccl-abort".to_owned())
            .spawn(move || aborter.abort());
        Err(failure.into())
    }
}

impl fmt::Debug for CudaRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaRanks").field("place", &self.place()).finish_non_exhaustive()
    }
}

/// The messages of a round of a collective, with addresses. Nothing is packed: each piece goes from
/// its place on one card to its place on another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PlacedMessages {
    sends: Vec<Message>,
    receives: Vec<Message>,
    /// Own pieces to copy to another place: from, to, bytes.
    kept: Vec<(u64, u64, usize)>,
}

impl PlacedMessages {
    /// The messages of a round of a collective, in a block of the plan's size.
    pub(super) fn new(
        plan: &Plan,
        name: &str,
        messages: &Messages,
        memory: &Allocation,
    ) -> Result<PlacedMessages, DeviceError> {
        PlacedMessages::at(plan.rank.ranks, name, messages, memory.start(), memory.bytes())
    }

    fn at(
        ranks: u32,
        name: &str,
        messages: &Messages,
        start: u64,
        capacity: usize,
    ) -> Result<PlacedMessages, DeviceError> {
        let address = |offset: usize, bytes: usize| -> Result<u64, DeviceError> {
            transfer::check(name, offset, bytes, capacity)?;
            Ok(start + offset as u64)
        };
        let mut placed = PlacedMessages::default();
        for rank in 0..ranks {
            for &Packed { place, bytes, .. } in messages.sent_to(rank) {
                let piece = Piece { address: address(place.offset, bytes)?, bytes };
                placed.sends.push(Message { rank, piece });
            }
            for &Packed { place, bytes, .. } in messages.received_from(rank) {
                let piece = Piece { address: address(place.offset, bytes)?, bytes };
                placed.receives.push(Message { rank, piece });
            }
        }
        for &(from, to, bytes) in &messages.kept {
            placed.kept.push((address(from.offset, bytes)?, address(to.offset, bytes)?, bytes));
        }
        Ok(placed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_plan::{Place, Tier};

    /// Two pieces to one rank and one to another, one from each, and an own piece that moves.
    #[test]
    fn pieces_go_straight_to_their_places() {
        let place = |offset| Place { tier: Tier::DEVICE, offset };
        let packed = |offset, at, bytes| Packed { place: place(offset), at, bytes };
        let messages = Messages {
            pack: vec![packed(0, 0, 256), packed(512, 256, 128), packed(1024, 384, 64)],
            sends: vec![0..384, 0..0, 384..448],
            receives: vec![0..64, 64..64, 64..96],
            unpack: vec![packed(2048, 0, 64), packed(2304, 64, 32)],
            kept: vec![(place(0), place(4096), 256)],
        };
        let placed = PlacedMessages::at(3, "w", &messages, 0x10_0000, 8192).expect("in bounds");
        let message = |rank, offset: u64, bytes| Message {
            rank,
            piece: Piece { address: 0x10_0000 + offset, bytes },
        };
        assert_eq!(placed.sends, [message(0, 0, 256), message(0, 512, 128), message(2, 1024, 64)]);
        assert_eq!(placed.receives, [message(0, 2048, 64), message(2, 2304, 32)]);
        assert_eq!(placed.kept, [(0x10_0000, 0x10_1000, 256)]);
        let error = PlacedMessages::at(3, "w", &messages, 0x10_0000, 4200).expect_err("too small");
        assert!(matches!(error, DeviceError::OutOfBounds { .. }), "{error}");
    }
}
