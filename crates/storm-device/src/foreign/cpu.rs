//! Copies by threads, for frameworks that compute on the CPU.

use super::slab::{Slab, SlabMemory};
use super::{CopyOptions, Mark, RawCopy};
use crate::DeviceError;
use crate::chaos::Chaos;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use storm_host::HostPages;
use storm_plan::Queue;

/// A thread for each direction.
#[derive(Debug)]
pub(super) struct CpuCopies {
    out: Worker,
    back: Worker,
}

impl CpuCopies {
    pub(super) fn new(options: CopyOptions) -> Result<CpuCopies, DeviceError> {
        let chaos = |queue| options.chaos_seed.map(|seed| Chaos::new(seed, queue));
        Ok(CpuCopies {
            out: Worker::new("storm-out", chaos(Queue::DEVICE_TO_HOST))?,
            back: Worker::new("storm-in", chaos(Queue::HOST_TO_DEVICE))?,
        })
    }

    pub(super) fn slab(bytes: usize) -> Result<SlabMemory, DeviceError> {
        Ok(SlabMemory::Pages(HostPages::new(bytes, |_| {})?))
    }

    /// # Safety
    /// The device bytes stay valid until the ticket is done. If the framework writes them meanwhile, the copy
    /// holds old or new bytes, and nothing relies on those. Nothing else uses the slot's bytes, except the
    /// copies that the slot waits for.
    pub(super) unsafe fn store(&self, copy: &RawCopy<'_>) -> Arc<Ticket> {
        self.out.queue(Job {
            from: copy.device,
            to: copy.slot.address(),
            bytes: copy.bytes,
            after: copy.slot.waits_to_store().to_vec(),
            slab: copy.slot.slab(),
            done: Arc::default(),
        })
    }

    /// # Safety
    /// The device bytes stay valid until the ticket is done, and nothing else uses them meanwhile.
    pub(super) unsafe fn fetch(&self, copy: &RawCopy<'_>) -> Arc<Ticket> {
        self.back.queue(Job {
            from: copy.slot.address(),
            to: copy.device,
            bytes: copy.bytes,
            after: copy.slot.stored().into_iter().cloned().collect(),
            slab: copy.slot.slab(),
            done: Arc::default(),
        })
    }
}

/// Signals the end of a copy.
#[derive(Debug, Default)]
pub(crate) struct Ticket {
    /// How long the copy took, once it is done.
    seconds: Mutex<Option<f64>>,
    changed: Condvar,
}

impl Ticket {
    fn lock(&self) -> MutexGuard<'_, Option<f64>> {
        self.seconds.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn is_done(&self) -> bool {
        self.lock().is_some()
    }

    pub(super) fn seconds(&self) -> Option<f64> {
        *self.lock()
    }

    /// Waits, and returns how long that took.
    pub(super) fn wait(&self) -> f64 {
        let mut seconds = self.lock();
        if seconds.is_some() {
            return 0.0;
        }
        let start = Instant::now();
        while seconds.is_none() {
            seconds = self.changed.wait(seconds).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        start.elapsed().as_secs_f64()
    }

    fn finish(&self, took: Duration) {
        *self.lock() = Some(took.as_secs_f64());
        self.changed.notify_all();
    }
}

struct Job {
    from: usize,
    to: usize,
    bytes: usize,
    after: Vec<Mark>,
    /// Keeps the host's bytes.
    slab: Arc<Slab>,
    done: Arc<Ticket>,
}

#[derive(Debug)]
struct Worker {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn new(name: &str, chaos: Option<Chaos>) -> Result<Worker, DeviceError> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let mut chaos = chaos;
        let work = move || {
            for job in queue {
                for mark in &job.after {
                    // All marks here belong to this device, so they cannot fail.
                    let _ = mark.wait();
                }
                if let Some(chaos) = &mut chaos {
                    keep_busy(Duration::from_nanos(u64::from(chaos.delay_ns())));
                }
                let start = Instant::now();
                // SAFETY: whoever queued the job promised that both ranges stay valid and unused by others
                // until the ticket is done. Host slabs and the framework's memory never overlap.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        job.from as *const u8,
                        job.to as *mut u8,
                        job.bytes,
                    );
                }
                job.done.finish(start.elapsed());
                drop(job.slab);
            }
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(work)
            .map_err(|error| DeviceError::Thread { reason: error.to_string() })?;
        Ok(Worker { jobs: Some(jobs), thread: Some(thread) })
    }

    fn queue(&self, job: Job) -> Arc<Ticket> {
        let done = Arc::clone(&job.done);
        let jobs = self.jobs.as_ref().expect("open until dropped");
        jobs.send(job).expect("the thread ends after the queue");
        done
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs.take();
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, its tickets stay open, but nothing waits for them any more.
            let _ = thread.join();
        }
    }
}

/// Delays are far shorter than the resolution of a sleep.
fn keep_busy(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::thread::yield_now();
    }
}
