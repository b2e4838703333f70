use crate::DeviceError;
use crate::placed::check_size;
use std::sync::Arc;
use storm_plan::{Fetch, Place, Plan};

/// Receives the bytes of an input, given by its index in the plan's inputs.
pub type PutInput<'a> = dyn FnMut(usize, &[u8]) -> Result<(), DeviceError> + 'a;

/// The source of a plan's data. A device calls it from the threads of two queues: one fetches data that was read
/// before, the other reads ahead.
///
/// In every step, the fetches take all of its micro-batches in order, and the reads read those of the next step in
/// order. A read follows the fetch of the micro-batches with the same numbers.
pub trait Supply: Send + Sync {
    /// Provides the data of the step's next micro-batches: calls `put` for every input of the fetch, with its index in
    /// the plan's inputs.
    ///
    /// # Errors
    /// There is no such data, or `put` refuses it.
    fn fetch(&self, fetch: &Fetch, put: &mut PutInput<'_>) -> Result<(), DeviceError>;

    /// Reads this many micro-batches of the next step. A failing source does not fail the plan: the error is reported
    /// when the next step starts.
    fn read_ahead(&self, micro_batches: usize);
}

/// The device's data source; `None` until one is set.
pub(crate) type Supplied = Option<Arc<dyn Supply>>;

/// Runs a fetch. `address` returns the address of some bytes of a tier.
///
/// # Safety
/// `address` gives memory of that many bytes, which nothing else uses until this returns.
pub(crate) unsafe fn fetch(
    supply: &Supplied,
    plan: &Plan,
    fetch: &Fetch,
    address: impl Fn(&str, Place, usize) -> Result<*mut u8, DeviceError>,
) -> Result<(), DeviceError> {
    let supply = supply.as_ref().ok_or(DeviceError::NoSupply)?;
    supply.fetch(fetch, &mut |index, bytes| {
        let input = &plan.inputs[index];
        check_size(&input.tensor, bytes.len())?;
        let to = address(&input.tensor.name, input.place, bytes.len())?;
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    })
}
