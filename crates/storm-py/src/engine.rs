//! The classes that the hooks call.

use crate::report::Report;
use crate::torch::{Error, Storage, Storages, Torch, compute_stream};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use storm_device::foreign::{Copies, CopyOptions, Foreign};
use storm_saved::plan::Allowance;
use storm_saved::{PieceName, SavedOptions, Session, Source, Use};

/// A session that hooks on any thread use. A thread that waits for it releases the GIL, because the
/// thread that holds it may need the GIL to continue.
struct Shared {
    session: Mutex<Session<Torch>>,
    /// Names released while the session was in use.
    released: Mutex<Vec<(PieceName, Option<Use>)>>,
}

impl Shared {
    fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Session<Torch>>> {
        let mut session = self.session.lock_py_attached(py).map_err(|_| {
            PyRuntimeError::new_err(
                "the offload engine stopped after an internal error; make a new one",
            )
        })?;
        self.release_pending(&mut session);
        Ok(session)
    }

    fn release_pending(&self, session: &mut Session<Torch>) {
        let mut released = self.released.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let names = std::mem::take(&mut *released);
        drop(released);
        for (name, usage) in names {
            session.release(name, usage);
        }
    }

    fn release(&self, name: PieceName, usage: Option<Use>) {
        match self.session.try_lock() {
            Ok(mut session) => {
                session.release(name, usage);
                self.release_pending(&mut session);
            }
            // The thread that holds the session releases the name later. It may be this same
            // thread, because garbage collection can run anywhere.
            Err(TryLockError::WouldBlock) => {
                let released = self.released.lock();
                released.unwrap_or_else(|poisoned| poisoned.into_inner()).push((name, usage));
            }
            // The session can no longer be used.
            Err(TryLockError::Poisoned(_)) => {}
        }
    }
}

/// Saved tensors of one device.
#[pyclass(frozen, module = "storm._native")]
pub(crate) struct Engine {
    shared: Arc<Shared>,
    storages: Arc<Storages>,
}

#[pymethods]
impl Engine {
    /// `cuda_device` is the number of a GPU, or None for the CPU. `vram_bytes` is the budget, or None for
    /// the least that offloading can reach plus the window. `ram_bytes` limits host memory, or None for
    /// what is available.
    #[new]
    #[pyo3(signature = (cuda_device, vram_bytes, ram_bytes, window_bytes, allocate, memory_use, chaos_seed))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        cuda_device: Option<usize>,
        vram_bytes: Option<u64>,
        ram_bytes: Option<u64>,
        window_bytes: u64,
        allocate: Py<PyAny>,
        memory_use: Py<PyAny>,
        chaos_seed: Option<u64>,
    ) -> PyResult<Engine> {
        let options = CopyOptions { chaos_seed };
        let copies = match cuda_device {
            Some(ordinal) => Copies::cuda(ordinal, options),
            None => Copies::cpu(options),
        };
        let copies = copies.map_err(Error::from)?;
        let allowance = match vram_bytes {
            Some(bytes) => Allowance::Budget { bytes },
            None => Allowance::Least { window_bytes },
        };
        let storages = Storages::new(py, cuda_device)?;
        let torch = Torch::new(allocate, memory_use, Arc::clone(&storages));
        let host_bytes_max = ram_bytes.unwrap_or(u64::MAX);
        let options = SavedOptions { allowance, host_bytes_max, window_bytes };
        let session = Session::new(torch, copies, options);
        let shared = Shared { session: Mutex::new(session), released: Mutex::default() };
        Ok(Engine { shared: Arc::new(shared), storages })
    }

    /// Saves the bytes `start..end` of a storage, as they are after the work issued to `stream` so far.
    #[pyo3(signature = (storage, start, end, version, stream))]
    fn save(
        &self,
        storage: Bound<'_, PyAny>,
        start: usize,
        end: usize,
        version: u64,
        stream: usize,
    ) -> PyResult<Saved> {
        let py = storage.py();
        // Address and size come from the storage itself, never from the caller.
        let memory = self.storages.open(&storage)?;
        let bytes = memory.bytes();
        if start >= end || end > bytes {
            let range = format!("the range {start}..{end} is empty or outside of its storage");
            return Err(PyValueError::new_err(format!("{range}, which has {bytes} bytes")));
        }
        let origin = self.storages.origin(&storage)?;
        let source = Source { memory: self.storages.number(&storage)?, version, range: start..end };
        let mut session = self.shared.lock(py)?;
        let name = session.save(source, memory, || origin, compute_stream(stream))?;
        drop(session);
        Ok(Saved { shared: Arc::clone(&self.shared), name, used: AtomicBool::new(false) })
    }

    /// Statistics so far.
    fn report(&self, py: Python<'_>) -> PyResult<Report> {
        Ok(Report::new(self.shared.lock(py)?.report()?))
    }

    /// Returns unused host memory to the system.
    fn give_back_host_memory(&self, py: Python<'_>) -> PyResult<()> {
        Ok(self.shared.lock(py)?.give_back_host_memory()?)
    }
}

/// A saved piece of a storage. While it lives, its bytes can be fetched.
#[pyclass(frozen, module = "storm._native")]
pub(crate) struct Saved {
    shared: Arc<Shared>,
    name: PieceName,
    used: AtomicBool,
}

#[pymethods]
impl Saved {
    /// Returns a storage with the bytes, ready for work issued to `stream` from now on, and the
    /// offset in the original storage at which it begins.
    fn fetch(&self, py: Python<'_>, stream: usize) -> PyResult<(Py<PyAny>, usize)> {
        let usage = if self.used.swap(true, Ordering::Relaxed) { Use::Again } else { Use::First };
        let mut session = self.shared.lock(py)?;
        let hand_out = |storage: &Storage, start| (storage.object().clone_ref(py), start);
        Ok(session.need(self.name, usage, compute_stream(stream), hand_out)?)
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        Python::try_attach(|py| {
            // Objects may be dropped while an exception is pending: the calls here must not see it.
            let pending = PyErr::take(py);
            let usage = self.used.load(Ordering::Relaxed).then_some(Use::First);
            self.shared.release(self.name, usage);
            if let Some(error) = pending {
                error.restore(py);
            }
        });
    }
}
