//! Times collectives on a card.

use crate::cuda::CudaError;
use crate::cuda::context::{Context, Stream};
use crate::cuda::event::Event;
use std::sync::{Arc, Mutex, PoisonError};

/// Times what is queued between pairs of events. The host never waits for them.
#[derive(Debug, Default)]
pub(super) struct Clock(Mutex<Pairs>);

#[derive(Debug, Default)]
struct Pairs {
    /// Queued, in the order of their stream.
    queued: Vec<[Event; 2]>,
    /// For reuse.
    idle: Vec<[Event; 2]>,
}

impl Clock {
    /// Times what `queue` adds to the stream.
    pub(super) fn time<T>(
        &self,
        context: &Arc<Context>,
        stream: &Stream,
        queue: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let mut pairs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pair = match pairs.idle.pop() {
            Some(pair) => pair,
            None => [Event::new(context)?, Event::new(context)?],
        };
        pair[0].record(stream)?;
        let queued = queue()?;
        pair[1].record(stream)?;
        pairs.queued.push(pair);
        Ok(queued)
    }

    /// Seconds of everything that ended since the last call.
    pub(super) fn take_seconds(&self) -> Result<f64, CudaError> {
        let mut pairs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seconds = 0.0;
        for pair in std::mem::take(&mut pairs.queued) {
            match pair[1].is_done()? {
                true => {
                    seconds += pair[1].seconds_since(&pair[0])?;
                    pairs.idle.push(pair);
                }
                false => pairs.queued.push(pair),
            }
        }
        Ok(seconds)
    }
}
