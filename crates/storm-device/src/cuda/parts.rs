//! Device memory whose idle parts can be given back for a while: one range of addresses, with
//! separate physical memory behind each part.

use super::context::Context;
use super::error::CudaError;
use cudarc::driver::sys;
use std::ops::Range;

/// A part of the range, in whole granules.
#[derive(Debug)]
struct Part {
    range: Range<usize>,
    is_idle: bool,
    /// The memory behind it. `None` if it was given back.
    handle: Option<sys::CUmemGenericAllocationHandle>,
}

/// A range of addresses with memory behind its parts.
#[derive(Debug)]
pub(super) struct Parts {
    start: sys::CUdeviceptr,
    reserved_bytes: usize,
    location: sys::CUmemLocation,
    parts: Vec<Part>,
}

fn checked(what: &'static str, code: sys::CUresult) -> Result<(), CudaError> {
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(CudaError::Driver { what: what.into(), code }),
    }
}

/// Divides a range where idle memory begins and ends. Idle parts are reduced to whole granules.
fn cut(bytes: usize, idle: &[Range<usize>], granule: usize) -> Vec<(Range<usize>, bool)> {
    let mut parts = Vec::new();
    let mut start = 0;
    for range in idle {
        let inner = range.start.next_multiple_of(granule)..range.end / granule * granule;
        if inner.is_empty() {
            continue;
        }
        if start < inner.start {
            parts.push((start..inner.start, false));
        }
        start = inner.end;
        parts.push((inner, true));
    }
    if start < bytes {
        parts.push((start..bytes, false));
    }
    parts
}

impl Parts {
    /// Reserves the addresses, and allocates memory for all parts.
    pub(super) fn new(
        context: &Context,
        bytes: usize,
        idle: &[Range<usize>],
    ) -> Result<Parts, CudaError> {
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: context.ordinal(),
        };
        let mut granule = 0;
        let properties = properties(location);
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: both outlive the call.
        let code =
            unsafe { sys::cuMemGetAllocationGranularity(&mut granule, &properties, minimum) };
        checked("asking for the size of device pages", code)?;
        let granule = granule.max(1);
        let reserved_bytes = bytes.max(1).next_multiple_of(granule);
        let mut start = 0;
        // SAFETY: the result outlives the call; `drop` frees the addresses.
        let code = unsafe { sys::cuMemAddressReserve(&mut start, reserved_bytes, 0, 0, 0) };
        checked("reserving addresses", code)?;
        let parts = cut(reserved_bytes, idle, granule)
            .into_iter()
            .map(|(range, is_idle)| Part { range, is_idle, handle: None })
            .collect();
        // From here on, `drop` frees everything that was allocated.
        let mut memory = Parts { start, reserved_bytes, location, parts };
        memory.take()?;
        Ok(memory)
    }

    pub(super) fn start(&self) -> sys::CUdeviceptr {
        self.start
    }

    /// Bytes that have memory behind them now.
    pub(super) fn present_bytes(&self) -> usize {
        let present = self.parts.iter().filter(|part| part.handle.is_some());
        present.map(|part| part.range.len()).sum()
    }

    /// Allocates and maps memory for every part that has none.
    pub(super) fn take(&mut self) -> Result<(), CudaError> {
        let (start, location) = (self.start, self.location);
        for part in self.parts.iter_mut().filter(|part| part.handle.is_none()) {
            let (address, bytes) = (start + part.range.start as u64, part.range.len());
            let mut handle = 0;
            // SAFETY: both outlive the call; `give_back` and `drop` release the handle.
            let code = unsafe { sys::cuMemCreate(&mut handle, bytes, &properties(location), 0) };
            checked("allocating", code)?;
            // SAFETY: these addresses are reserved, and nothing is mapped to them.
            let code = unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) };
            if let Err(error) = checked("mapping device memory", code) {
                // SAFETY: created above and not mapped.
                let _ = unsafe { sys::cuMemRelease(handle) };
                return Err(error);
            }
            part.handle = Some(handle);
            let access = sys::CUmemAccessDesc {
                location,
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            };
            // SAFETY: mapped above, and the description outlives the call.
            let code = unsafe { sys::cuMemSetAccess(address, bytes, &access, 1) };
            if let Err(error) = checked("allowing access to device memory", code) {
                release(start, part)?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives back the memory behind idle parts. Nothing on the card may use these parts.
    pub(super) fn give_back(&mut self) -> Result<(), CudaError> {
        let start = self.start;
        for part in self.parts.iter_mut().filter(|part| part.is_idle) {
            release(start, part)?;
        }
        Ok(())
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        for part in &mut self.parts {
            let _ = release(self.start, part);
        }
        // SAFETY: reserved in `new`, and nothing is mapped to it any more.
        let _ = unsafe { sys::cuMemAddressFree(self.start, self.reserved_bytes) };
    }
}

/// Releases the memory behind a part.
fn release(start: sys::CUdeviceptr, part: &mut Part) -> Result<(), CudaError> {
    let Some(handle) = part.handle.take() else { return Ok(()) };
    let (address, bytes) = (start + part.range.start as u64, part.range.len());
    // SAFETY: mapped in `take`, once, as a whole.
    checked("unmapping device memory", unsafe { sys::cuMemUnmap(address, bytes) })?;
    // SAFETY: created in `take`, released once.
    checked("releasing device memory", unsafe { sys::cuMemRelease(handle) })
}

/// The properties of plain memory of a card.
fn properties(location: sys::CUmemLocation) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location,
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_once_and_idle_ones_are_inside_what_is_idle() {
        let idle = [0..3, 10..11, 95..210, 300..400];
        let parts = cut(400, &idle, 10);
        let expected = [(0..100, false), (100..210, true), (210..300, false), (300..400, true)];
        assert_eq!(parts, expected);
        assert_eq!(cut(40, &[], 10), [(0..40, false)]);
        assert_eq!(cut(40, std::slice::from_ref(&(0..40)), 10), [(0..40, true)]);
    }
}
