//! PyTorch as the session sees it: memory is a storage, its origin a weak reference to one.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use storm_device::DeviceError;
use storm_device::foreign::{ComputeStream, Foreign};
use storm_exec::saved::{Framework, MemoryUse, Peak};

/// A storage, kept alive.
pub(crate) struct Storage {
    object: Py<PyAny>,
    address: usize,
    bytes: usize,
}

impl Storage {
    /// `object` is a `torch.UntypedStorage` with `bytes` from `address` on.
    pub(crate) fn new(object: Py<PyAny>, address: usize, bytes: usize) -> Storage {
        Storage { object, address, bytes }
    }

    pub(crate) fn object(&self) -> &Py<PyAny> {
        &self.object
    }
}

// SAFETY: PyTorch keeps a storage's memory while the object lives, and its allocator reuses it in the
// order of the stream that it was allocated in, which is the one that saved tensors are used in.
#[allow(unsafe_code)]
unsafe impl Foreign for Storage {
    fn address(&self) -> usize {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The stream that PyTorch computes in, by its handle.
pub(crate) fn compute_stream(handle: usize) -> ComputeStream {
    // SAFETY: Python hands over the handle of PyTorch's current stream, which PyTorch never destroys.
    #[allow(unsafe_code)]
    unsafe {
        ComputeStream::from_handle(handle)
    }
}

/// A weak reference to a storage.
pub(crate) struct WeakStorage {
    reference: usize,
    free: Py<PyAny>,
}

impl Drop for WeakStorage {
    fn drop(&mut self) {
        // Not while Python ends: then all is freed anyway.
        Python::try_attach(|py| {
            // It cannot fail: the reference is valid and freed once.
            let _ = self.free.call1(py, (self.reference,));
        });
    }
}

/// The functions of PyTorch that are called from here.
pub(crate) struct Torch {
    /// `(bytes) -> UntypedStorage` on the session's device and current stream.
    allocate: Py<PyAny>,
    /// `(forget the peak) -> (in use, taken, peak) | None`.
    memory_use: Py<PyAny>,
    expired: Py<PyAny>,
    upgrade: Py<PyAny>,
    free: Py<PyAny>,
}

impl Torch {
    pub(crate) fn new(
        py: Python<'_>,
        allocate: Py<PyAny>,
        memory_use: Py<PyAny>,
    ) -> PyResult<Torch> {
        let storage = py.import("torch")?.getattr("UntypedStorage")?;
        let method = |name: &str| -> PyResult<Py<PyAny>> { Ok(storage.getattr(name)?.unbind()) };
        Ok(Torch {
            allocate,
            memory_use,
            expired: method("_expired")?,
            upgrade: method("_new_with_weak_ptr")?,
            free: method("_free_weak_ref")?,
        })
    }

    /// A weak reference to the storage.
    pub(crate) fn origin(free: Py<PyAny>, storage: &Bound<'_, PyAny>) -> PyResult<WeakStorage> {
        let reference = storage.call_method0("_weak_ref")?.extract()?;
        Ok(WeakStorage { reference, free })
    }

    pub(crate) fn free_function(&self, py: Python<'_>) -> Py<PyAny> {
        self.free.clone_ref(py)
    }

    fn storage(object: &Bound<'_, PyAny>) -> PyResult<Storage> {
        let address = object.call_method0("data_ptr")?.extract()?;
        let bytes = object.call_method0("nbytes")?.extract()?;
        Ok(Storage::new(object.clone().unbind(), address, bytes))
    }
}

impl Framework for Torch {
    type Memory = Storage;
    type Origin = WeakStorage;
    type Error = Error;

    fn allocate(&self, bytes: usize, _stream: ComputeStream) -> Result<Storage, Error> {
        Python::attach(|py| {
            let object = self.allocate.bind(py).call1((bytes,))?;
            Ok(Torch::storage(&object)?)
        })
    }

    fn is_alive(&self, origin: &WeakStorage) -> bool {
        Python::attach(|py| {
            let expired = self.expired.call1(py, (origin.reference,));
            // A storage that cannot be asked is not relied upon.
            expired.and_then(|expired| expired.extract::<bool>(py)).is_ok_and(|expired| !expired)
        })
    }

    fn upgrade(&self, origin: &WeakStorage) -> Option<Storage> {
        Python::attach(|py| {
            let object = self.upgrade.bind(py).call1((origin.reference,)).ok()?;
            if object.is_none() { None } else { Torch::storage(&object).ok() }
        })
    }

    fn memory_use(&self, peak: Peak) -> Option<MemoryUse> {
        Python::attach(|py| {
            let counted = self.memory_use.call1(py, (peak == Peak::Forget,)).ok()?;
            let counted = counted.extract::<Option<(u64, u64, u64)>>(py).ok()?;
            let (in_use_bytes, taken_bytes, peak_bytes) = counted?;
            Some(MemoryUse { in_use_bytes, taken_bytes, peak_bytes })
        })
    }
}

/// Of Python, or of the device.
pub(crate) enum Error {
    Python(PyErr),
    Device(DeviceError),
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Error {
        Error::Device(error)
    }
}

impl From<PyErr> for Error {
    fn from(error: PyErr) -> Error {
        Error::Python(error)
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> PyErr {
        match error {
            Error::Python(error) => error,
            Error::Device(error) => PyRuntimeError::new_err(error.to_string()),
        }
    }
}
