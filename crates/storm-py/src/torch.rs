//! Implements a session's framework for PyTorch: memory is a storage, and an origin is a weak
//! reference to one.

use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::sync::Arc;
use storm_device::DeviceError;
use storm_device::foreign::{ComputeStream, Foreign};
use storm_saved::{Framework, MemoryUse, Peak};

/// A storage, kept alive.
pub(crate) struct Storage {
    object: Py<PyAny>,
    address: usize,
    bytes: usize,
}

impl Storage {
    pub(crate) fn object(&self) -> &Py<PyAny> {
        &self.object
    }
}

// SAFETY: a storage's memory stays valid while the object lives. After that, PyTorch's allocator reuses it in
// the order of the stream that it was allocated in, which is the stream that uses the saved tensors.
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
    // SAFETY: Python passes the handle of PyTorch's current stream, which PyTorch never destroys.
    #[allow(unsafe_code)]
    unsafe {
        ComputeStream::from_handle(handle)
    }
}

/// A weak reference to a storage.
pub(crate) struct WeakStorage {
    reference: usize,
    storages: Arc<Storages>,
}

impl Drop for WeakStorage {
    fn drop(&mut self) {
        // Does nothing while Python shuts down, when everything is freed anyway.
        Python::try_attach(|py| {
            // It cannot fail: the reference is valid and freed once.
            let _ = self.storages.free.call1(py, (self.reference,));
        });
    }
}

/// Calls into `torch.UntypedStorage` for storages of one device. Methods are called through the
/// class, so an object that only resembles a storage, or overrides methods, is not trusted.
pub(crate) struct Storages {
    class: Py<PyAny>,
    device: Py<PyAny>,
    data_ptr: Py<PyAny>,
    nbytes: Py<PyAny>,
    weak_ref: Py<PyAny>,
    expired: Py<PyAny>,
    upgrade: Py<PyAny>,
    free: Py<PyAny>,
}

impl Storages {
    /// For the GPU with this number, or for the CPU if `None`.
    pub(crate) fn new(py: Python<'_>, cuda_device: Option<usize>) -> PyResult<Arc<Storages>> {
        let torch = py.import("torch")?;
        let class = torch.getattr("UntypedStorage")?;
        let device = match cuda_device {
            Some(ordinal) => torch.call_method1("device", ("cuda", ordinal))?,
            None => torch.call_method1("device", ("cpu",))?,
        };
        let method = |name: &str| -> PyResult<Py<PyAny>> { Ok(class.getattr(name)?.unbind()) };
        Ok(Arc::new(Storages {
            device: device.unbind(),
            data_ptr: method("data_ptr")?,
            nbytes: method("nbytes")?,
            weak_ref: method("_weak_ref")?,
            expired: method("_expired")?,
            upgrade: method("_new_with_weak_ptr")?,
            free: method("_free_weak_ref")?,
            class: class.unbind(),
        }))
    }

    /// The memory of a storage. Fails if `object` is not a storage on this device.
    pub(crate) fn open(&self, object: &Bound<'_, PyAny>) -> PyResult<Storage> {
        let py = object.py();
        if !object.get_type().is(self.class.bind(py)) {
            let found = object.get_type().name()?;
            let message = format!("expected a torch.UntypedStorage, not an object of type {found}");
            return Err(PyTypeError::new_err(message));
        }
        let (found, wanted) = (object.getattr("device")?, self.device.bind(py));
        if !found.eq(wanted)? {
            let message = format!("the storage is on {found}, and this engine is for {wanted}");
            return Err(PyValueError::new_err(message));
        }
        let address = self.data_ptr.bind(py).call1((object,))?.extract()?;
        let bytes = self.nbytes.bind(py).call1((object,))?.extract()?;
        if address == 0 && bytes > 0 {
            return Err(PyValueError::new_err("the storage has no memory"));
        }
        Ok(Storage { object: object.clone().unbind(), address, bytes })
    }

    /// Identifies a live storage uniquely.
    pub(crate) fn number(&self, storage: &Bound<'_, PyAny>) -> PyResult<usize> {
        storage.getattr("_cdata")?.extract()
    }

    /// A weak reference to the storage.
    pub(crate) fn origin(self: &Arc<Self>, storage: &Bound<'_, PyAny>) -> PyResult<WeakStorage> {
        let reference = self.weak_ref.bind(storage.py()).call1((storage,))?.extract()?;
        Ok(WeakStorage { reference, storages: Arc::clone(self) })
    }
}

/// The PyTorch functions called from here.
pub(crate) struct Torch {
    /// `(bytes) -> UntypedStorage` on the session's device and current stream.
    allocate: Py<PyAny>,
    /// `(forget the peak) -> (in use, taken, peak) | None`.
    memory_use: Py<PyAny>,
    storages: Arc<Storages>,
}

impl Torch {
    pub(crate) fn new(
        allocate: Py<PyAny>,
        memory_use: Py<PyAny>,
        storages: Arc<Storages>,
    ) -> Torch {
        Torch { allocate, memory_use, storages }
    }
}

impl Framework for Torch {
    type Memory = Storage;
    type Origin = WeakStorage;
    type Error = Error;

    fn allocate(&self, bytes: usize, _stream: ComputeStream) -> Result<Storage, Error> {
        Python::attach(|py| {
            let object = self.allocate.bind(py).call1((bytes,))?;
            Ok(self.storages.open(&object)?)
        })
    }

    fn is_alive(&self, origin: &WeakStorage) -> bool {
        Python::attach(|py| {
            let expired = self.storages.expired.call1(py, (origin.reference,));
            // If the check fails, the storage counts as gone.
            expired.and_then(|expired| expired.extract::<bool>(py)).is_ok_and(|expired| !expired)
        })
    }

    fn upgrade(&self, origin: &WeakStorage) -> Option<Storage> {
        Python::attach(|py| {
            let object = self.storages.upgrade.bind(py).call1((origin.reference,)).ok()?;
            if object.is_none() { None } else { self.storages.open(&object).ok() }
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

/// An error of Python or of the device.
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
