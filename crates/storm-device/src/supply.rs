use crate::DeviceError;
use crate::placed::check_size;
use std::sync::Arc;
use storm_plan::{Fetch, Place, Plan};

/// Takes the bytes of an input, given by its position in the plan's inputs.
pub type PutInput<'a> = dyn FnMut(usize, &[u8]) -> Result<(), DeviceError> + 'a;

/// Where a plan's data comes from. A device calls it from the threads of two queues: one fetches what was
/// read before, one reads ahead.
///
/// In every step the fetches take all of its micro-batches in order, and the reads give those of the next
/// step in order. A read follows the fetch of the micro-batches with the same numbers.
pub trait Supply: Send + Sync {
    /// Gives the data of the step's next micro-batches: calls `put` for every input of the fetch, with its
    /// position in the plan's inputs.
    ///
    /// # Errors
    /// There is no such data, or `put` refuses it.
    fn fetch(&self, fetch: &Fetch, put: &mut PutInput<'_>) -> Result<(), DeviceError>;

    /// Reads this many micro-batches of the next step. A source that fails does not fail the plan: whoever
    /// starts the next step is told.
    fn read_ahead(&self, micro_batches: usize);
}

/// What a device was told to take data from; nothing before that.
pub(crate) type Supplied = Option<Arc<dyn Supply>>;

/// Runs a fetch: `address` says where some bytes of a tier are.
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
