//! Reads many small pieces of device memory without waiting for the card: a kernel copies them to
//! pinned host memory, after the kernels that change them.

use super::CudaError;
use super::compile::KernelSource;
use super::context::{Argument, Context, Launch, Start, Stream};
use super::event::Event;
use super::modules::Kernels;
use super::pinned::PinnedMemory;
use super::plan::KernelChoice;
use crate::DeviceError;
use cudarc::driver::sys;
use std::sync::Arc;

/// The source of the kernel; it needs no definitions.
pub(super) const SOURCE: KernelSource =
    KernelSource { name: "gather.cu", text: include_str!("kernels/gather.cu"), only_for: None };

/// The largest number of pieces of a launch, `PIECES_MAX` in the source.
const PIECES_MAX: usize = 128;

/// Bytes that a thread copies at once. Pieces begin and end at multiples of it.
const WORD: usize = 16;

/// A piece of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) address: u64,
    pub(super) bytes: usize,
}

/// A list of pieces that is read repeatedly.
#[derive(Debug)]
pub(super) struct Gather {
    pieces: Vec<Piece>,
    launches: Vec<Launch>,
    done: Event,
    memory: PinnedMemory,
    is_begun: bool,
}

impl Gather {
    /// `None` if the kernel cannot copy these pieces, or the card cannot write to host memory.
    pub(super) fn new(
        context: &Arc<Context>,
        kernels: &Kernels,
        pieces: Vec<Piece>,
    ) -> Result<Option<Gather>, DeviceError> {
        let Some(tables) = tables(&pieces) else { return Ok(None) };
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let memory = PinnedMemory::new(context, bytes, |_| {})?;
        let Some(to) = device_address(&memory) else { return Ok(None) };
        let choice = KernelChoice {
            source: SOURCE,
            name: "gather",
            definitions: Vec::new(),
            shared_bytes: 0,
        };
        let kernel = kernels.get(&choice)?;
        let launch = |table: Table| Launch {
            kernel,
            grid: (table.pieces, 1, 1),
            block: 256,
            shared_bytes: 0,
            arguments: vec![Argument::Struct(table.words.into()), Argument::Pointer(to)],
            begins_early: false,
            joint: None,
        };
        let launches = tables.into_iter().map(launch).collect();
        let done = Event::without_time(context)?;
        Ok(Some(Gather { pieces, launches, done, memory, is_begun: false }))
    }

    /// Whether it reads exactly these pieces.
    pub(super) fn reads(&self, pieces: impl ExactSizeIterator<Item = Piece>) -> bool {
        self.pieces.len() == pieces.len() && self.pieces.iter().copied().eq(pieces)
    }

    /// Queues the kernel, after everything issued to the stream so far.
    ///
    /// # Safety
    /// The pieces are in memory that stays allocated until the stream has run the kernel, and other
    /// streams do not write them meanwhile.
    pub(super) unsafe fn begin(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        if !self.is_begun {
            self.memory.copy_begins();
            self.is_begun = true;
        }
        for launch in &self.launches {
            // SAFETY: the table has addresses of the pieces and places inside the pinned memory.
            // The caller guarantees the rest.
            unsafe { launch.queue(stream, Start::InOrder, || "reading small tensors".to_owned())? };
        }
        Ok(self.done.record(stream)?)
    }

    /// Waits for the kernel, and copies what it has read. Returns whether one was queued.
    pub(super) fn finish(&mut self, to: &mut [u8]) -> Result<bool, CudaError> {
        if !self.is_begun {
            return Ok(false);
        }
        self.done.synchronize()?;
        self.memory.copy_is_done();
        self.is_begun = false;
        to.copy_from_slice(self.memory.as_slice());
        Ok(true)
    }
}

/// The argument of a launch.
#[derive(Debug, PartialEq, Eq)]
struct Table {
    words: Vec<u64>,
    pieces: u32,
}

/// The arguments of all launches, as the source declares them. `None` if there are no pieces, if
/// one does not consist of whole words, or if there are too many words.
fn tables(pieces: &[Piece]) -> Option<Vec<Table>> {
    let is_whole = |piece: &Piece| {
        piece.address.is_multiple_of(WORD as u64) && piece.bytes.is_multiple_of(WORD)
    };
    if pieces.is_empty() || !pieces.iter().all(is_whole) {
        return None;
    }
    let mut first = 0u32;
    let mut tables = Vec::new();
    for pieces in pieces.chunks(PIECES_MAX) {
        let mut words: Vec<u64> = pieces.iter().map(|piece| piece.address).collect();
        words.resize(PIECES_MAX, 0);
        let (mut firsts, mut counts) = (vec![0; PIECES_MAX], vec![0; PIECES_MAX]);
        for (at, piece) in pieces.iter().enumerate() {
            let count = u32::try_from(piece.bytes / WORD).ok()?;
            (firsts[at], counts[at]) = (first, count);
            first = first.checked_add(count).filter(|&end| i32::try_from(end).is_ok())?;
        }
        let halves = firsts.chunks(2).chain(counts.chunks(2));
        words.extend(halves.map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32));
        tables.push(Table { words, pieces: pieces.len() as u32 });
    }
    Some(tables)
}

/// The address by which the card writes to pinned memory.
fn device_address(memory: &PinnedMemory) -> Option<u64> {
    let mut address = 0;
    // SAFETY: the memory is registered, and the driver only writes the address.
    unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, memory.address(0).cast(), 0) }
        .result()
        .ok()?;
    Some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_every_piece_once() {
        let pieces: Vec<Piece> = (0..130)
            .map(|at| Piece { address: 4096 * at, bytes: 16 * (at as usize % 3) })
            .collect();
        let found = tables(&pieces).expect("whole words");
        assert_eq!(found.iter().map(|table| table.pieces).collect::<Vec<_>>(), [128, 2]);
        assert!(found.iter().all(|table| table.words.len() == 2 * PIECES_MAX));
        let mut end = 0;
        for (at, piece) in pieces.iter().enumerate() {
            let (table, at) = (&found[at / PIECES_MAX], at % PIECES_MAX);
            let half = |base: usize| (table.words[base + at / 2] >> (32 * (at % 2))) as u32;
            assert_eq!(table.words[at], piece.address);
            assert_eq!(half(PIECES_MAX), end);
            assert_eq!(half(PIECES_MAX * 3 / 2) as usize, piece.bytes / WORD);
            end += half(PIECES_MAX * 3 / 2);
        }
    }

    #[test]
    fn pieces_that_a_thread_cannot_copy_are_left_to_others() {
        for (address, bytes) in [(8, 16), (16, 24), (16, 16 << 31)] {
            assert_eq!(tables(&[Piece { address, bytes }]), None, "{address} {bytes}");
        }
        assert_eq!(tables(&[]), None);
    }
}
