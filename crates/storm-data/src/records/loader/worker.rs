//! Threads that read blocks and copy rows into batches.

use super::memory::Memory;
use super::planner::{Prefetch, Stretch};
use super::rows::{RowsOf, Scratch};
use crate::DataError;
use crate::records::batch::RecordBatch;
use crate::records::counters::{Count, ReadCounters};
use crate::records::read::Buffers;
use crate::records::set::{Reader, RecordSet};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub(super) type Reply = Result<RecordBatch, DataError>;

/// A batch to assemble, and the channel for it.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) stretches: Vec<Stretch>,
    pub(super) prefetch: Vec<Prefetch>,
    pub(super) batch: RecordBatch,
    /// Rows of the batch, including padding.
    pub(super) rows: usize,
    pub(super) reply: Sender<Reply>,
}

/// The worker threads. Dropping this lets each finish its current job, and joins it.
#[derive(Debug)]
pub(super) struct Workers {
    shared: Arc<Shared>,
    /// `None` while this is dropped.
    jobs: Option<Sender<(u64, Job)>>,
    threads: Vec<JoinHandle<()>>,
    /// Counters of each thread.
    counters: Vec<Arc<ReadCounters>>,
}

#[derive(Debug)]
struct Shared {
    set: Arc<RecordSet>,
    rows: Arc<RowsOf>,
    buffers: Arc<Buffers>,
    /// Queue depth per worker.
    in_flight: usize,
    /// Jobs of an earlier generation are skipped.
    generation: AtomicU64,
}

impl Workers {
    pub(super) fn start(
        set: &Arc<RecordSet>,
        rows: &Arc<RowsOf>,
        buffers: &Arc<Buffers>,
        memory: &Memory,
    ) -> Result<Workers, DataError> {
        let shared = Arc::new(Shared {
            set: Arc::clone(set),
            rows: Arc::clone(rows),
            buffers: Arc::clone(buffers),
            in_flight: memory.in_flight,
            generation: AtomicU64::new(0),
        });
        let (sender, receiver) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        let (threads, counters) = (Vec::new(), Vec::new());
        let mut workers = Workers { shared, jobs: Some(sender), threads, counters };
        for _ in 0..memory.workers {
            let (shared, receiver) = (Arc::clone(&workers.shared), Arc::clone(&receiver));
            let counters = Arc::<ReadCounters>::default();
            let counted = Arc::clone(&counters);
            let thread = thread::Builder::new()
                .name("storm-records".to_owned())
                .spawn(move || shared.work(&receiver, counted));
            match thread {
                Ok(thread) => {
                    workers.threads.push(thread);
                    workers.counters.push(counters);
                }
                // Fewer workers do not change the batches.
                Err(_) if !workers.threads.is_empty() => break,
                Err(source) => return Err(DataError::NoThread(source)),
            }
        }
        Ok(workers)
    }

    pub(super) fn send(&self, job: Job) {
        let generation = self.shared.generation.load(Ordering::Relaxed);
        if let Some(jobs) = &self.jobs {
            // If no worker is left, receiving the reply fails.
            jobs.send((generation, job)).ok();
        }
    }

    /// Cancels jobs that have not started.
    pub(super) fn forget(&self) {
        self.shared.generation.fetch_add(1, Ordering::Relaxed);
    }

    /// Time of the slowest batch since the last call.
    pub(super) fn take_longest(&self) -> Duration {
        let longest = self.counters().map(|counters| counters.take(Count::LongestNs)).max();
        Duration::from_nanos(longest.unwrap_or(0))
    }

    pub(super) fn counters(&self) -> impl Iterator<Item = &ReadCounters> {
        self.counters.iter().map(|counters| &**counters)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.forget();
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A worker that panicked has reported it on standard error.
            thread.join().ok();
        }
    }
}

/// The error for a worker that exited without a reply.
pub(super) fn lost() -> DataError {
    let source = io::Error::other("a thread ended before its time");
    DataError::Io { path: Path::new("reading records").to_owned(), source }
}

impl Shared {
    fn work(&self, jobs: &Mutex<Receiver<(u64, Job)>>, counters: Arc<ReadCounters>) {
        let mut reader = Reader::new(&self.set, &self.buffers, self.in_flight);
        reader.counters = counters;
        let mut scratch = Scratch::default();
        loop {
            let next = match jobs.lock() {
                Ok(jobs) => jobs.recv(),
                Err(_) => return,
            };
            let Ok((generation, job)) = next else { return };
            let is_wanted = || self.generation.load(Ordering::Relaxed) == generation;
            if !is_wanted() {
                continue;
            }
            let began = Instant::now();
            let Job { stretches, prefetch, batch, rows, reply } = job;
            let made = self.make(&stretches, batch, rows, &mut reader, &mut scratch);
            drop(stretches);
            reader.counters.raise(Count::LongestNs, began.elapsed());
            // Fails after an error or a resume, when nothing receives it.
            reply.send(made).ok();
            for Prefetch { window, blocks } in prefetch {
                window.fetch(blocks, &self.set, &mut reader, is_wanted);
            }
            reader.counters.add_time(Count::WorkingNs, began.elapsed());
        }
    }

    fn make(
        &self,
        stretches: &[Stretch],
        mut batch: RecordBatch,
        rows: usize,
        reader: &mut Reader,
        scratch: &mut Scratch,
    ) -> Reply {
        batch.prepare(self.rows.layout(&self.set), rows);
        for Stretch { window, epoch, places } in stretches {
            let first = batch.rows;
            self.rows.copy(window, places.clone(), &self.set, reader, scratch, &mut batch)?;
            for sample in &mut batch.samples[first..batch.rows] {
                sample[2] = *epoch as i32;
            }
        }
        batch.finish();
        Ok(batch)
    }
}
