//! MPI's functions, through each of the three ABIs in use.
//!
//! The ABIs have the same functions but different handles: integers in MPICH, addresses of the
//! library's data in Open MPI, and fixed addresses in the standard ABI of MPI 5. [`Library`] hides
//! the difference.

use libloading::os::unix as loading;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;

/// An MPI ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Abi {
    /// `libmpi_abi.so.1`: the ABI defined by MPI 5, from any implementation.
    Standard,
    /// `libmpi.so.12`: MPICH, Intel MPI, MVAPICH, Cray.
    Mpich,
    /// `libmpi.so.40`: Open MPI.
    OpenMpi,
}

/// A handle: an integer or an address.
pub(super) trait Handle: Copy + Send + 'static {
    fn to_bits(self) -> usize;
    fn from_bits(bits: usize) -> Self;
}

impl Handle for c_int {
    fn to_bits(self) -> usize {
        self as u32 as usize
    }
    fn from_bits(bits: usize) -> Self {
        bits as u32 as c_int
    }
}

/// An address that is never dereferenced here.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Address(*mut c_void);

// SAFETY: the address is only passed back to MPI, which `Library` calls from one thread at a time.
unsafe impl Send for Address {}

impl Handle for Address {
    fn to_bits(self) -> usize {
        self.0.expose_provenance()
    }
    fn from_bits(bits: usize) -> Self {
        Address(ptr::with_exposed_provenance_mut(bits))
    }
}

/// A message in flight.
pub(super) struct Request(usize);

/// A completed message.
pub(super) struct Done {
    /// The tag. Meaningless for a sent message.
    pub(super) tag: c_int,
    /// The length in bytes. Meaningless for a sent message.
    pub(super) bytes: usize,
}

/// A failed MPI call.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) function: &'static str,
    pub(super) message: String,
}

/// The functions of a loaded library, for any handle type. Only one thread at a time may use it.
pub(super) trait Library: Send {
    /// Name and version, on one line. May be called before [`Library::start`].
    fn version(&self) -> String;
    /// Starts MPI. Returns false if it does not support calls from different threads, one at a
    /// time.
    fn start(&self) -> Result<bool, Failed>;
    /// This rank and the number of ranks.
    fn place(&self) -> Result<(u32, u32), Failed>;
    /// Starts a send.
    ///
    /// # Safety
    /// The bytes are readable and do not change until the request is complete.
    unsafe fn send(
        &self,
        bytes: *const u8,
        count: c_int,
        to: u32,
        tag: c_int,
    ) -> Result<Request, Failed>;
    /// Starts a receive of a message with any tag.
    ///
    /// # Safety
    /// The bytes are writable, and nothing else accesses them until the request is complete.
    unsafe fn receive(&self, bytes: *mut u8, count: c_int, from: u32) -> Result<Request, Failed>;
    /// Returns the message if it is complete. A complete request must not be tested again.
    fn test(&self, request: &mut Request) -> Result<Option<Done>, Failed>;
    /// Ends MPI. No function may be called afterwards.
    fn finish(&self) -> Result<(), Failed>;
    /// Ends all ranks. May return if MPI fails to end them.
    fn abort(&self);
}

/// Larger than the status of any ABI. The tag is among the first four integers.
#[repr(C, align(16))]
struct Status([c_int; 16]);

/// A library's functions and constants for an ABI with handles of type `H`.
struct Functions<H> {
    world: H,
    byte: H,
    errors_return: H,
    any_tag: c_int,
    serialized: c_int,
    /// Index of the tag in a status.
    status_tag: usize,
    init_thread: unsafe extern "C" fn(*mut c_int, *mut c_void, c_int, *mut c_int) -> c_int,
    get_library_version: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int,
    comm_set_errhandler: unsafe extern "C" fn(H, H) -> c_int,
    comm_rank: unsafe extern "C" fn(H, *mut c_int) -> c_int,
    comm_size: unsafe extern "C" fn(H, *mut c_int) -> c_int,
    isend: unsafe extern "C" fn(*const c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int,
    irecv: unsafe extern "C" fn(*mut c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int,
    test: unsafe extern "C" fn(*mut H, *mut c_int, *mut Status) -> c_int,
    get_count: unsafe extern "C" fn(*const Status, H, *mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int,
    abort: unsafe extern "C" fn(H, c_int) -> c_int,
    finalize: unsafe extern "C" fn() -> c_int,
}

/// A symbol missing from a library.
pub(super) type MissingSymbol = String;

/// The functions of a loaded library with the given ABI. The library must never be unloaded.
pub(super) fn bind(
    library: &loading::Library,
    abi: Abi,
) -> Result<Box<dyn Library>, MissingSymbol> {
    // The handles of MPICH and of the standard ABI are constants in `mpi.h`.
    match abi {
        Abi::Standard => {
            let handles = [0x101, 0x247, 0x143].map(Address::from_bits);
            bind_with(library, handles, -2, 2048, 1)
        }
        Abi::Mpich => {
            let handles = [0x4400_0000, 0x4c00_010d, 0x5400_0001];
            bind_with::<c_int>(library, handles, -1, 2, 3)
        }
        Abi::OpenMpi => {
            let address = |name| symbol::<*mut c_void>(library, name).map(Address);
            let handles = [
                address("ompi_mpi_comm_world")?,
                address("ompi_mpi_byte")?,
                address("ompi_mpi_errors_return")?,
            ];
            bind_with(library, handles, -1, 2, 1)
        }
    }
}

/// Whether a library has a symbol.
pub(super) fn has_symbol(library: &loading::Library, name: &str) -> bool {
    symbol::<*mut c_void>(library, name).is_ok()
}

fn bind_with<H: Handle>(
    library: &loading::Library,
    [world, byte, errors_return]: [H; 3],
    any_tag: c_int,
    serialized: c_int,
    status_tag: usize,
) -> Result<Box<dyn Library>, MissingSymbol> {
    Ok(Box::new(Functions {
        world,
        byte,
        errors_return,
        any_tag,
        serialized,
        status_tag,
        init_thread: symbol(library, "MPI_Init_thread")?,
        get_library_version: symbol(library, "MPI_Get_library_version")?,
        comm_set_errhandler: symbol(library, "MPI_Comm_set_errhandler")?,
        comm_rank: symbol(library, "MPI_Comm_rank")?,
        comm_size: symbol(library, "MPI_Comm_size")?,
        isend: symbol(library, "MPI_Isend")?,
        irecv: symbol(library, "MPI_Irecv")?,
        test: symbol(library, "MPI_Test")?,
        get_count: symbol(library, "MPI_Get_count")?,
        error_string: symbol(library, "MPI_Error_string")?,
        abort: symbol(library, "MPI_Abort")?,
        finalize: symbol(library, "MPI_Finalize")?,
    }))
}

/// The address of a function or of data, as a value of type `T`.
fn symbol<T: Copy>(library: &loading::Library, name: &str) -> Result<T, MissingSymbol> {
    // SAFETY: the fields of `Functions` have the types that the MPI standard gives these functions,
    // with the handles of the ABI. Data symbols are used only as addresses.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| name.to_owned())
}

impl<H: Handle> Functions<H> {
    fn check(&self, function: &'static str, code: c_int) -> Result<(), Failed> {
        match code {
            0 => Ok(()),
            _ => Err(Failed { function, message: self.message(code) }),
        }
    }

    fn message(&self, code: c_int) -> String {
        let mut text = [0u8; 1024];
        let mut length = 0;
        // SAFETY: no MPI library writes more than 512 bytes.
        let failed = unsafe { (self.error_string)(code, text.as_mut_ptr().cast(), &mut length) };
        match failed {
            0 => first_line(&text, length),
            _ => format!("error {code}"),
        }
    }
}

/// The first line of a text written by a C function.
fn first_line(text: &[u8], length: c_int) -> String {
    let text = &text[..usize::try_from(length).unwrap_or(0).min(text.len())];
    let text = String::from_utf8_lossy(text);
    let text = text.split(['\n', '\0']).next().unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl<H: Handle> Library for Functions<H> {
    fn version(&self) -> String {
        let mut text = vec![0u8; 16384];
        let mut length = 0;
        // SAFETY: no MPI library writes more than 8192 bytes.
        unsafe { (self.get_library_version)(text.as_mut_ptr().cast(), &mut length) };
        let line = first_line(&text, length);
        line.split(',').next().unwrap_or_default().to_owned()
    }

    fn start(&self) -> Result<bool, Failed> {
        let mut provided = 0;
        // SAFETY: null program arguments are allowed. Called once, see `mpi::STARTED`.
        let code = unsafe {
            (self.init_thread)(ptr::null_mut(), ptr::null_mut(), self.serialized, &mut provided)
        };
        self.check("MPI_Init_thread", code)?;
        // SAFETY: MPI is running, and both handles belong to this ABI.
        let code = unsafe { (self.comm_set_errhandler)(self.world, self.errors_return) };
        self.check("MPI_Comm_set_errhandler", code)?;
        Ok(provided >= self.serialized)
    }

    fn place(&self) -> Result<(u32, u32), Failed> {
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: MPI is running, and both numbers are written.
        self.check("MPI_Comm_rank", unsafe { (self.comm_rank)(self.world, &mut rank) })?;
        // SAFETY: as above.
        self.check("MPI_Comm_size", unsafe { (self.comm_size)(self.world, &mut ranks) })?;
        Ok((rank as u32, ranks as u32))
    }

    unsafe fn send(
        &self,
        bytes: *const u8,
        count: c_int,
        to: u32,
        tag: c_int,
    ) -> Result<Request, Failed> {
        let mut request = H::from_bits(0);
        // SAFETY: the caller keeps the bytes valid until the request is complete.
        let code = unsafe {
            (self.isend)(bytes.cast(), count, self.byte, to as c_int, tag, self.world, &mut request)
        };
        self.check("MPI_Isend", code)?;
        Ok(Request(request.to_bits()))
    }

    unsafe fn receive(&self, bytes: *mut u8, count: c_int, from: u32) -> Result<Request, Failed> {
        let mut request = H::from_bits(0);
        let (from, any) = (from as c_int, self.any_tag);
        // SAFETY: the caller keeps the bytes valid until the request is complete.
        let code = unsafe {
            (self.irecv)(bytes.cast(), count, self.byte, from, any, self.world, &mut request)
        };
        self.check("MPI_Irecv", code)?;
        Ok(Request(request.to_bits()))
    }

    fn test(&self, request: &mut Request) -> Result<Option<Done>, Failed> {
        let mut handle = H::from_bits(request.0);
        let mut done = 0;
        let mut status = Status([0; 16]);
        // SAFETY: MPI created the request, and the status is large enough.
        let code = unsafe { (self.test)(&mut handle, &mut done, &mut status) };
        request.0 = handle.to_bits();
        self.check("MPI_Test", code)?;
        if done == 0 {
            return Ok(None);
        }
        let mut count = 0;
        // SAFETY: MPI filled the status.
        let code = unsafe { (self.get_count)(&status, self.byte, &mut count) };
        self.check("MPI_Get_count", code)?;
        let bytes = usize::try_from(count).unwrap_or(0);
        Ok(Some(Done { tag: status.0[self.status_tag], bytes }))
    }

    fn finish(&self) -> Result<(), Failed> {
        // SAFETY: no request is in flight.
        self.check("MPI_Finalize", unsafe { (self.finalize)() })
    }

    fn abort(&self) {
        // SAFETY: MPI is running.
        unsafe { (self.abort)(self.world, 1) };
    }
}
