use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A request to end a run after its current step. Clones share the request.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Creates a request that is not made yet.
    pub fn new() -> Stop {
        Stop::default()
    }

    /// Requests a stop. Returns whether one was already requested.
    pub fn request(&self) -> bool {
        self.0.swap(true, Ordering::SeqCst)
    }

    /// Whether a stop was requested.
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
