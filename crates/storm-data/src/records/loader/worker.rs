//! Threads that read blocks and copy rows into batches.

use super::memory::Memory;
use super::planner::{Prefetch, Stretch};
use super::rows::{RowsOf, Scratch};
use crate::DataError;
use crate::records::batch::RecordBatch;
use crate::records::read::Buffers;
use crate::records::set::{ReadStatistics, Reader, RecordSet};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

pub(super) type Reply = Result<RecordBatch, DataError>;

/// A batch to make, and where it goes.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) stretches: Vec<Stretch>,
    pub(super) prefetch: Vec<Prefetch>,
    pub(super) batch: RecordBatch,
    /// Rows of the batch, with or without data.
    pub(super) rows: usize,
    pub(super) reply: Sender<Reply>,
}

/// What all workers together have done.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) reads: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) reading_ns: AtomicU64,
    pub(super) decoding_ns: AtomicU64,
}

/// The threads. Dropping them lets each finish what it is doing, and waits for that.
#[derive(Debug)]
pub(super) struct Workers {
    shared: Arc<Shared>,
    /// None while they are dropped.
    jobs: Option<Sender<(u64, Job)>>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    set: Arc<RecordSet>,
    rows: Arc<RowsOf>,
    buffers: Arc<Buffers>,
    counters: Counters,
    /// Reads in flight of each worker.
    in_flight: usize,
    /// Jobs of an earlier generation are not done any more.
    generation: AtomicU64,
}

impl Counters {
    fn add(&self, done: ReadStatistics) {
        for (counter, count) in [
            (&self.reads, done.reads),
            (&self.bytes, done.bytes),
            (&self.reading_ns, done.reading_ns),
            (&self.decoding_ns, done.decoding_ns),
        ] {
            counter.fetch_add(count, Ordering::Relaxed);
        }
    }
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
            counters: Counters::default(),
            in_flight: memory.in_flight,
            generation: AtomicU64::new(0),
        });
        let (sender, receiver) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        let mut workers = Workers { shared, jobs: Some(sender), threads: Vec::new() };
        for _ in 0..memory.workers {
            let (shared, receiver) = (Arc::clone(&workers.shared), Arc::clone(&receiver));
            let thread = thread::Builder::new()
                .name("storm-records".to_owned())
                .spawn(move || shared.work(&receiver));
            match thread {
                Ok(thread) => workers.threads.push(thread),
                // Fewer change no batch.
                Err(_) if !workers.threads.is_empty() => break,
                Err(source) => return Err(DataError::NoThread(source)),
            }
        }
        Ok(workers)
    }

    pub(super) fn send(&self, job: Job) {
        let generation = self.shared.generation.load(Ordering::Relaxed);
        if let Some(jobs) = &self.jobs {
            // If no worker is left to take it, its reply says so.
            jobs.send((generation, job)).ok();
        }
    }

    /// Lets jobs that have not begun end without a result.
    pub(super) fn forget(&self) {
        self.shared.generation.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.shared.counters
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.forget();
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A worker that panicked has said so on standard error.
            thread.join().ok();
        }
    }
}

/// A worker ended before it replied.
pub(super) fn lost() -> DataError {
    let source = io::Error::other("a thread ended before its time");
    DataError::Io { path: Path::new("reading records").to_owned(), source }
}

impl Shared {
    fn work(&self, jobs: &Mutex<Receiver<(u64, Job)>>) {
        let mut reader = Reader::new(&self.set, &self.buffers, self.in_flight);
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
            let Job { stretches, prefetch, batch, rows, reply } = job;
            let made = self.make(&stretches, batch, rows, &mut reader, &mut scratch);
            drop(stretches);
            // After a failure or a resume nothing waits for it.
            reply.send(made).ok();
            for Prefetch { window, blocks } in prefetch {
                window.fetch(blocks, &self.set, &mut reader, is_wanted);
            }
            self.counters.add(std::mem::take(&mut reader.statistics));
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
