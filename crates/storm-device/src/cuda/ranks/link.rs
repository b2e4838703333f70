//! Times collectives between GPUs, queued like those of a plan.

use super::{CudaRanks, PlacedMessages};
use crate::cuda::CudaPlanDevice;
use crate::cuda::context::{Allocation, Stream};
use crate::cuda::event::Event;
use crate::{DeviceError, PlanDevice};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use storm_ranks::nccl::{Message, Piece};

/// Collectives in a row that are timed together. An untimed one goes before them. It ends on all
/// ranks at about the same time, so the time until all ranks have started is not counted.
const IN_A_ROW: u32 = 4;

/// Times collectives between this rank's GPU and those of the others.
#[derive(Debug)]
pub struct CudaLink {
    // Dropped in this order: first the work, then what it uses.
    stream: Stream,
    events: [Event; 2],
    /// What is sent, then what is received.
    memory: Option<Allocation>,
    ranks: Arc<CudaRanks>,
}

impl CudaLink {
    /// Times collectives over this connection.
    ///
    /// # Errors
    /// From the driver.
    pub fn new(ranks: &Arc<CudaRanks>) -> Result<CudaLink, DeviceError> {
        let context = &ranks.context;
        context.make_current()?;
        let events = [Event::new(context)?, Event::new(context)?];
        let stream = Stream::new(context)?;
        Ok(CudaLink { stream, events, memory: None, ranks: Arc::clone(ranks) })
    }

    /// Times a collective that sends `sends[i]` of one block of memory to rank `i`, and receives
    /// what rank `i` sends into `receives[i]` of another block. Returns the mean time of several in
    /// a row. All ranks call this at the same time.
    ///
    /// # Errors
    /// From the driver or from NCCL. The other ranks may then wait for this one.
    pub fn time(
        &mut self,
        sends: &[Range<usize>],
        receives: &[Range<usize>],
    ) -> Result<Duration, DeviceError> {
        let context = &self.ranks.context;
        context.make_current()?;
        let end = |ranges: &[Range<usize>]| ranges.iter().map(|range| range.end).max().unwrap_or(0);
        let sent = end(sends).next_multiple_of(CudaPlanDevice::ALIGNMENT);
        let bytes = sent + end(receives);
        if self.memory.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            // Freed before more is allocated.
            self.memory = None;
            let memory = context.allocate(bytes)?;
            memory.clear(&self.stream)?;
            self.memory = Some(memory);
        }
        let start = self.memory.as_ref().map_or(0, Allocation::start);
        let messages = PlacedMessages {
            sends: messages(sends, start),
            receives: messages(receives, start + sent as u64),
            kept: Vec::new(),
        };
        let [begun, ended] = &self.events;
        for number in 0..=IN_A_ROW {
            if number == 1 {
                begun.record(&self.stream)?;
            }
            // SAFETY: in bounds of memory that nothing else uses or reads, and that lives until the wait below.
            unsafe { self.ranks.queue(&messages, &self.stream)? };
        }
        ended.record(&self.stream)?;
        self.stream.synchronize("measuring the link between ranks")?;
        self.ranks.check()?;
        let seconds = ended.seconds_since(begun)?;
        Ok(Duration::from_secs_f64(seconds.max(0.0)) / IN_A_ROW)
    }
}

/// A message for each range that is not empty.
fn messages(ranges: &[Range<usize>], start: u64) -> Vec<Message> {
    let message = |(rank, range): (u32, &Range<usize>)| {
        let piece = Piece { address: start + range.start as u64, bytes: range.len() };
        (!range.is_empty()).then_some(Message { rank, piece })
    };
    (0..).zip(ranges).filter_map(message).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_get_nothing_have_no_message() {
        let message = |rank, address, bytes| Message { rank, piece: Piece { address, bytes } };
        assert_eq!(
            messages(&[0..0, 0..64, 64..64, 64..96], 0x1000),
            [message(1, 0x1000, 64), message(3, 0x1040, 32)]
        );
    }
}
