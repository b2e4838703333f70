//! Owners of driver handles: the card's context, streams, memory, modules and kernels.

use super::memory::{Counted, MemoryInUse, MemoryMeter};
use super::part::Part;
use super::parts::Parts;
use super::power::PowerReading;
use super::refused::out_of_memory;
use super::{CudaError, libraries};
use crate::DeviceError;
use cudarc::driver::{result, sys};
use std::ffi::{CString, c_void};
use std::ops::Range;
use std::sync::Arc;

/// What the kernels may assume about the card.
#[derive(Clone, Debug, PartialEq)]
pub struct Card {
    /// `NVIDIA H200`.
    pub name: String,
    /// Compute capability, 9 and 0 for an H200.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of memory.
    pub memory_bytes: usize,
}

impl Card {
    /// `sm_90`.
    pub fn architecture(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }
}

/// A card's primary context, current on the thread that opened it.
#[derive(Debug)]
pub(super) struct Context {
    device: sys::CUdevice,
    handle: sys::CUcontext,
    pub(super) card: Card,
    meter: MemoryMeter,
}

// SAFETY: a context may be used from any thread that makes it current.
unsafe impl Send for Context {}
// SAFETY: as above; the driver synchronizes access.
unsafe impl Sync for Context {}

/// The CUDA version that the driver must support: that of the libraries that STORM loads.
const CUDA_NEEDED: (i32, &str) = (13_000, "13.0");

/// What a context is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Everything. Needs a driver and a card that the kernels support.
    Kernels,
    /// Copies for another framework, which every driver and card can do.
    Copies,
}

/// Approximate size of a context, for error messages only.
const CONTEXT_BYTES: usize = 512 << 20;

impl Context {
    pub(super) fn open(ordinal: usize) -> Result<Arc<Context>, CudaError> {
        Context::open_for(ordinal, Purpose::Kernels)
    }

    pub(super) fn open_for(ordinal: usize, purpose: Purpose) -> Result<Arc<Context>, CudaError> {
        start_driver(ordinal, purpose)?;
        let (device, card) = find_card(ordinal)?;
        if let Some(problem) = card_problem(&card).filter(|_| purpose == Purpose::Kernels) {
            return Err(problem);
        }
        let meter = MemoryMeter::new(device);
        // SAFETY: the device is valid; `drop` releases the context.
        let handle =
            unsafe { result::primary_ctx::retain(device) }.map_err(|error| match error.0 {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                    let free_bytes = meter.card_free().unwrap_or(0) as usize;
                    let holders = meter.other_holders();
                    out_of_memory(CONTEXT_BYTES, free_bytes, card.memory_bytes, &holders).into()
                }
                code => CudaError::Driver { what: "making a context".into(), code },
            })?;
        let context = Arc::new(Context { device, handle, card, meter });
        if purpose == Purpose::Kernels {
            context.make_current()?;
        }
        Ok(context)
    }

    /// Makes the context current until the guard is dropped. For threads that STORM did not start.
    pub(super) fn enter(&self) -> Result<Entered, CudaError> {
        let before = result::ctx::get_current()
            .map_err(CudaError::driver("asking for the current context"))?;
        if before == Some(self.handle) {
            return Ok(Entered { before: None });
        }
        self.make_current()?;
        Ok(Entered { before: Some(before.unwrap_or(std::ptr::null_mut())) })
    }

    pub(super) fn device(&self) -> sys::CUdevice {
        self.device
    }

    pub(super) fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained.
        unsafe { result::ctx::set_current(self.handle) }
            .map_err(CudaError::driver("making the context current"))
    }

    /// Free and total bytes according to the driver, for all processes together.
    pub(super) fn memory_info(&self) -> Result<(usize, usize), CudaError> {
        result::mem_get_info().map_err(CudaError::driver("asking for free memory"))
    }

    /// Memory that this process holds, context and code included, as precisely as it can be known.
    pub(super) fn memory_in_use(&self) -> Result<MemoryInUse, CudaError> {
        if let Some(memory) = self.meter.in_use() {
            return Ok(memory);
        }
        let (free, total) = self.memory_info()?;
        Ok(MemoryInUse { bytes: total.saturating_sub(free) as u64, counted: Counted::Card })
    }

    /// The card's energy use so far and its clock now. `None` if NVML does not report them.
    pub(super) fn power(&self) -> Option<PowerReading> {
        self.meter.power()
    }

    pub(super) fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Allocation, CudaError> {
        // SAFETY: `drop` frees it.
        match unsafe { result::malloc_sync(bytes.max(1)) } {
            Ok(start) => Ok(Allocation { context: Arc::clone(self), start, bytes, parts: None }),
            Err(error) => Err(self.refused(bytes, CudaError::driver("allocating")(error))),
        }
    }

    /// Allocates memory whose `idle` ranges can be given back for a while.
    pub(super) fn allocate_in_parts(
        self: &Arc<Self>,
        bytes: usize,
        idle: &[Range<usize>],
    ) -> Result<Allocation, CudaError> {
        let parts = Parts::new(self, bytes, idle).map_err(|error| self.refused(bytes, error))?;
        let start = parts.start();
        Ok(Allocation { context: Arc::clone(self), start, bytes, parts: Some(parts) })
    }

    /// The card's number on this machine.
    pub(super) fn ordinal(&self) -> i32 {
        self.device
    }

    /// The error for memory that could not be allocated, with the processes that hold it.
    fn refused(&self, bytes: usize, error: CudaError) -> CudaError {
        let CudaError::Driver { code: sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY, .. } = error else {
            return error;
        };
        match self.memory_info() {
            Ok((free_bytes, total_bytes)) => {
                let holders = self.meter.other_holders();
                out_of_memory(bytes, free_bytes, total_bytes, &holders).into()
            }
            Err(error) => error,
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`. At exit the driver may already be gone, so the result is ignored.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Guard: the context is current on this thread. Dropping it restores the previous one.
#[derive(Debug)]
pub(super) struct Entered {
    /// The previous context; null if there was none. `None` if this context already was current.
    before: Option<sys::CUcontext>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current on this thread before; null means none.
            let _ = unsafe { result::ctx::set_current(before) };
        }
    }
}

/// Initializes the driver and returns the CUDA version it supports, which suffices for the purpose.
pub(super) fn start_driver(ordinal: usize, purpose: Purpose) -> Result<String, CudaError> {
    libraries::require_driver()?;
    result::init().map_err(|error| match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => CudaError::NoDevice { count: 0, wanted: ordinal },
        code => CudaError::Driver { what: "starting the driver".into(), code },
    })?;
    let mut version = 0;
    // SAFETY: writes one integer.
    unsafe { sys::cuDriverGetVersion(&mut version) }
        .result()
        .map_err(CudaError::driver("asking for the driver's version"))?;
    let found = format!("{}.{}", version / 1000, version % 1000 / 10);
    match purpose == Purpose::Kernels && version < CUDA_NEEDED.0 {
        true => Err(CudaError::DriverTooOld { found, needed: CUDA_NEEDED.1 }),
        false => Ok(found),
    }
}

/// The number of cards that the initialized driver sees.
pub(super) fn card_count() -> Result<usize, CudaError> {
    let count = result::device::get_count().map_err(CudaError::driver("counting GPUs"))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// A card of a started driver.
pub(super) fn find_card(ordinal: usize) -> Result<(sys::CUdevice, Card), CudaError> {
    let count = card_count()?;
    if ordinal >= count {
        return Err(CudaError::NoDevice { count, wanted: ordinal });
    }
    let device = result::device::get(ordinal as i32).map_err(CudaError::driver("opening"))?;
    let card = describe(device).map_err(CudaError::driver("describing the card"))?;
    Ok((device, card))
}

/// Why a card cannot be used. `None` if it can.
pub(super) fn card_problem(card: &Card) -> Option<CudaError> {
    let (major, minor) = card.capability;
    (major < 8).then(|| CudaError::CardTooOld { name: card.name.clone(), major, minor })
}

fn describe(device: sys::CUdevice) -> Result<Card, result::DriverError> {
    use sys::CUdevice_attribute_enum as Attribute;
    // SAFETY: the device is valid.
    let attribute = |which| unsafe { result::device::get_attribute(device, which) };
    Ok(Card {
        name: result::device::get_name(device)?,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
        // SAFETY: as above.
        memory_bytes: unsafe { result::device::total_mem(device)? },
    })
}

/// Device memory, freed when dropped.
#[derive(Debug)]
pub(super) struct Allocation {
    context: Arc<Context>,
    start: sys::CUdeviceptr,
    bytes: usize,
    /// `None` if the memory is one piece, which cannot be given back in parts.
    parts: Option<Parts>,
}

impl Allocation {
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives back idle memory, and returns how much. The card must be idle.
    pub(super) fn give_back(&mut self) -> Result<u64, CudaError> {
        let Some(parts) = &mut self.parts else { return Ok(0) };
        let before = parts.present_bytes();
        parts.give_back()?;
        Ok((before - parts.present_bytes()) as u64)
    }

    /// Takes back the memory that was given back.
    pub(super) fn take_back(&mut self) -> Result<(), CudaError> {
        let Allocation { context, bytes, parts, .. } = self;
        let Some(parts) = parts else { return Ok(()) };
        let missing = bytes.saturating_sub(parts.present_bytes());
        parts.take().map_err(|error| context.refused(missing, error))
    }

    /// Queues zeroing all of the memory.
    pub(super) fn clear(&self, stream: &Stream) -> Result<(), CudaError> {
        if self.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the range is this allocation, and `drop` waits for the work of all streams before freeing it. A
        // kernel that reads it meanwhile sees arbitrary bytes, which is harmless.
        unsafe { result::memset_d8_async(self.start, 0, self.bytes, stream.handle()) }
            .map_err(CudaError::driver("clearing device memory"))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // Everything that still runs on this memory must finish first.
        let _ = self.context.make_current();
        let _ = result::ctx::synchronize();
        match self.parts.take() {
            Some(parts) => drop(parts),
            // SAFETY: allocated in `allocate`, freed once.
            None => drop(unsafe { result::free_sync(self.start) }),
        }
    }
}

/// An ordered queue of work on the card.
#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    handle: sys::CUstream,
    /// The multiprocessors that it runs on. `None` for the whole card.
    _part: Option<Part>,
}

// SAFETY: a stream may be used from any thread; the driver synchronizes access.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Stream, CudaError> {
        let handle = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(CudaError::driver("making a stream"))?;
        Ok(Stream { context: Arc::clone(context), handle, _part: None })
    }

    /// A stream that runs on this many multiprocessors, or a few more.
    pub(super) fn on_part(
        context: &Arc<Context>,
        multiprocessors: usize,
    ) -> Result<Stream, CudaError> {
        let part = Part::new(context, multiprocessors)?;
        let handle = part.stream()?;
        Ok(Stream { context: Arc::clone(context), handle, _part: Some(part) })
    }

    pub(super) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Reports errors of anything issued to the card that are known so far.
    pub(super) fn check(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.handle) }.result() {
            Err(error) if error.0 != sys::CUresult::CUDA_ERROR_NOT_READY => {
                Err(CudaError::driver("checking the GPU")(error))
            }
            _ => Ok(()),
        }
    }

    /// Waits until all work issued so far is done, and reports errors inside kernels.
    pub(super) fn synchronize(&self, what: &str) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.handle) }.map_err(CudaError::driver(what))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.context.make_current();
        // SAFETY: created in `new`, destroyed once; the driver finishes queued work first.
        let _ = unsafe { result::stream::destroy(self.handle) };
    }
}

/// A loaded cubin.
#[derive(Debug)]
pub(super) struct Module {
    handle: sys::CUmodule,
    source_name: &'static str,
}

// SAFETY: handles may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel of a module that is never unloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Kernel(sys::CUfunction);

// SAFETY: handles may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Module {
    /// Loads machine code into the current context. It stays loaded until the process ends.
    pub(super) fn load(source_name: &'static str, cubin: &[u8]) -> Result<Module, CudaError> {
        // SAFETY: the driver checks and copies the image, which is a complete cubin.
        let handle = unsafe { result::module::load_data(cubin.as_ptr().cast()) }
            .map_err(CudaError::driver(format!("loading {source_name}")))?;
        Ok(Module { handle, source_name })
    }

    /// Finds a kernel of the module.
    pub(super) fn kernel(&self, name: &str) -> Result<Kernel, CudaError> {
        let c_name = CString::new(name).expect("kernel names have no NUL");
        // SAFETY: the module is loaded.
        let function =
            unsafe { result::module::get_function(self.handle, c_name) }.map_err(|_| {
                CudaError::NoKernel { kernel: name.to_owned(), source_name: self.source_name }
            })?;
        Ok(Kernel(function))
    }
}

impl Kernel {
    /// A fake handle, for tests that launch nothing.
    #[cfg(test)]
    pub(super) fn named(number: usize) -> Kernel {
        Kernel(std::ptr::without_provenance_mut(number))
    }

    /// Sets the kernel's limit on dynamic shared memory. The driver requires this above 48 KiB, static shared memory
    /// included.
    pub(super) fn allow_shared(&self, bytes: usize) -> Result<(), CudaError> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is valid.
        unsafe { result::function::set_function_attribute(self.0, attribute, bytes as i32) }
            .map_err(CudaError::driver(format!("{bytes} bytes of shared memory")))
    }
}

/// A kernel argument. The driver takes the address of its value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Argument {
    /// Device address; 0 for an absent operand.
    Pointer(u64),
    I32(i32),
    I64(i64),
    F32(f32),
    /// A struct of floats, by value.
    Floats(Arc<[f32; FLOATS]>),
    /// Any other struct, by value.
    Struct(Arc<[u64]>),
}

/// Floats of [`Argument::Floats`].
pub(super) const FLOATS: usize = 128;

impl Argument {
    fn address(&self) -> *mut c_void {
        let address: *const c_void = match self {
            Argument::Pointer(value) => std::ptr::from_ref(value).cast(),
            Argument::I32(value) => std::ptr::from_ref(value).cast(),
            Argument::I64(value) => std::ptr::from_ref(value).cast(),
            Argument::F32(value) => std::ptr::from_ref(value).cast(),
            Argument::Floats(values) => Arc::as_ptr(values).cast(),
            Argument::Struct(words) => words.as_ptr().cast(),
        };
        address.cast_mut()
    }
}

/// A kernel with its geometry and arguments.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) kernel: Kernel,
    pub(super) grid: (u32, u32, u32),
    pub(super) block: u32,
    pub(super) shared_bytes: u32,
    pub(super) arguments: Vec<Argument>,
    /// The kernel itself waits for the kernels before it, so it may start while they finish.
    pub(super) begins_early: bool,
    /// How several such launches are joined.
    pub(super) joint: Option<Joint>,
}

/// The kernel that does for several tensors what another kernel does for one. Its first argument is
/// a struct of the arguments that differ between tensors, see [`join`](super::join). Its other
/// arguments are those of the kernel for one tensor that all have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Joint {
    pub(super) kernel: Kernel,
    /// Positions of the arguments of the kernel for one tensor that all have in common.
    pub(super) common: &'static [usize],
}

/// When a kernel may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// After everything before it in the stream.
    InOrder,
    /// Earlier, if the kernel itself waits. Only for streams that run nothing but kernels between two host waits, on
    /// cards that support that wait.
    Early,
}

/// The largest number of arguments of any kernel.
const ARGUMENTS_MAX: usize = 40;

impl Launch {
    /// Queues the kernel; `what` names it in an error.
    ///
    /// # Safety
    /// The arguments match the kernel's parameters. Until the stream has run the kernel, the addresses stay valid and
    /// nothing else uses that memory.
    pub(super) unsafe fn queue(
        &self,
        stream: &Stream,
        start: Start,
        what: impl Fn() -> String,
    ) -> Result<(), DeviceError> {
        let mut pointers = [std::ptr::null_mut(); ARGUMENTS_MAX];
        assert!(self.arguments.len() <= ARGUMENTS_MAX, "too many kernel arguments");
        for (pointer, argument) in pointers.iter_mut().zip(&self.arguments) {
            *pointer = argument.address();
        }
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid.0,
            gridDimY: self.grid.1,
            gridDimZ: self.grid.2,
            blockDimX: self.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream.handle(),
            attrs: &mut early,
            numAttrs: u32::from(self.begins_early && start == Start::Early),
        };
        // SAFETY: as the caller guarantees. The driver copies arguments and attributes before
        // returning.
        unsafe {
            sys::cuLaunchKernelEx(
                &config,
                self.kernel.0,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(|error| {
            let Launch { grid, block, shared_bytes, .. } = self;
            let shape = format!("{grid:?} blocks of {block}, {shared_bytes} bytes shared");
            CudaError::driver(format!("{} (a kernel of {shape})", what()))(error).into()
        })
    }
}
