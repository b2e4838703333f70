//! Reads that fail, stop short, are slow or return other bytes: the same batches, or an error that names the block.

use super::synthetic;
use rustix::io::Errno;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use storm_data::DataError;
use storm_data::records::{
    Codec, Order, PAGE_BYTES, ReadFault, ReadFaults, Reading, ReadingPath, RecordBatch,
    RecordLoader, RecordLoaderOptions, RecordSet,
};
use storm_graph::random::Random;

const COUNT: u64 = 20_000;
/// Windows of 28 blocks out of 70, and four compressed blocks on their way.
const DATA_RAM: u64 = 17 << 20;
/// More than an epoch of windows; of single reads a part of it.
fn batch_count(order: Order) -> usize {
    if order == Order::Window { 190 } else { 40 }
}

/// A read that the system did.
struct Read {
    number: u64,
    at: u64,
    bytes: usize,
}

/// What happens to a read.
type Rule = Box<dyn Fn(Read) -> Option<ReadFault> + Send + Sync>;

struct Faults {
    rule: Rule,
    reads: AtomicU64,
    /// The file of the last read that went wrong.
    last: Mutex<Option<PathBuf>>,
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").field("reads", &self.reads).finish_non_exhaustive()
    }
}

impl Faults {
    fn new(rule: impl Fn(Read) -> Option<ReadFault> + Send + Sync + 'static) -> Arc<Faults> {
        let (reads, last) = (AtomicU64::new(0), Mutex::new(None));
        Arc::new(Faults { rule: Box::new(rule), reads, last })
    }
}

impl ReadFaults for Faults {
    fn next(&self, path: &Path, at: u64, bytes: usize) -> Option<ReadFault> {
        let number = self.reads.fetch_add(1, Ordering::Relaxed);
        let fault = (self.rule)(Read { number, at, bytes });
        if fault.is_some() {
            *self.last.lock().unwrap() = Some(path.to_owned());
        }
        fault
    }
}

fn loader(
    dir: &Path,
    reading: Reading,
    order: Order,
    workers: usize,
    faults: Option<&Arc<Faults>>,
) -> RecordLoader {
    let set = RecordSet::open_with(dir, reading).unwrap();
    let set = match faults {
        None => set,
        Some(faults) => set.with_faults(&(Arc::clone(faults) as Arc<dyn ReadFaults>)),
    };
    let options =
        RecordLoaderOptions { order, workers, ..RecordLoaderOptions::training(100, 3, DATA_RAM) };
    RecordLoader::new(Arc::new(set), options).unwrap()
}

fn batches(loader: &mut RecordLoader, order: Order) -> Vec<RecordBatch> {
    let next = |_| {
        let mut batch = RecordBatch::default();
        loader.next_batch(&mut batch).unwrap();
        batch
    };
    (0..batch_count(order)).map(next).collect()
}

/// Calls `check` for every codec, order and way of reading, with the batches that must come.
fn everywhere(check: impl Fn(&Path, Reading, Order, &[RecordBatch])) {
    let folder = tempfile::tempdir().unwrap();
    for codec in [Codec::None, Codec::Zstd] {
        let dir = synthetic(folder.path(), COUNT, codec);
        for order in [Order::Window, Order::Global] {
            let expected = batches(&mut loader(&dir, Reading::Advised, order, 1, None), order);
            Reading::ALL.iter().for_each(|&reading| check(&dir, reading, order, &expected));
        }
    }
}

#[test]
fn interrupted_short_and_slow_reads_change_no_bit() {
    everywhere(|dir, reading, order, expected| {
        for workers in [1, 3] {
            let faults = Faults::new(|Read { number, bytes, .. }| {
                let mut random = Random(number);
                match random.below(7) {
                    0 => Some(ReadFault::Fails(Errno::INTR.raw_os_error())),
                    // Anywhere, and at the end of a page, where a direct read could go on.
                    1 => Some(ReadFault::Short(1 + random.below(bytes))),
                    2 => Some(ReadFault::Short(PAGE_BYTES * (1 + random.below(2)))),
                    3 => {
                        (0..random.below(50)).for_each(|_| std::thread::yield_now());
                        None
                    }
                    _ => None,
                }
            });
            let mut loader = loader(dir, reading, order, workers, Some(&faults));
            let got = batches(&mut loader, order);
            assert!(got == expected, "{reading:?} {order:?} {workers}");
            assert!(faults.last.lock().unwrap().is_some(), "something went wrong");
        }
    });
}

#[test]
fn direct_reads_that_are_refused_are_done_another_way() {
    everywhere(|dir, reading, order, expected| {
        if reading == Reading::Advised {
            return;
        }
        for (errno, path) in [
            // For the moment.
            (Errno::AGAIN, RecordSet::open_with(dir, reading).unwrap().reading_path()),
            // For good.
            (Errno::INVAL, ReadingPath::Advised),
        ] {
            // With one worker, what follows a refusal is the next read.
            let faults = Faults::new(move |read| {
                match errno {
                    Errno::AGAIN => read.number % 7 == 0,
                    _ => read.number == 0,
                }
                .then_some(ReadFault::Fails(errno.raw_os_error()))
            });
            let mut loader = loader(dir, reading, order, 1, Some(&faults));
            assert!(batches(&mut loader, order) == expected, "{reading:?} {order:?} {errno}");
            assert_eq!(loader.set().reading_path(), path);
        }
    });
}

/// Loads batches while reads of some numbers go wrong; checks the errors and that nothing else changed.
fn with_failures(
    fault: fn(Read) -> ReadFault,
    is_expected: impl Fn(&DataError, &Path) -> bool + Copy,
) {
    everywhere(|dir, reading, order, expected| {
        for workers in [1, 3] {
            let faults = Faults::new(move |read| (read.number % 401 == 5).then(|| fault(read)));
            let mut loader = loader(dir, reading, order, workers, Some(&faults));
            let (mut errors, mut batch) = (0, RecordBatch::default());
            for expected in expected {
                let mut tries = 0;
                while let Err(error) = {
                    let before = loader.position();
                    let result = loader.next_batch(&mut batch);
                    assert!(result.is_ok() || loader.position() == before);
                    result
                } {
                    let path = faults.last.lock().unwrap().clone().unwrap();
                    assert!(is_expected(&error, &path), "{error:?}");
                    errors += 1;
                    tries += 1;
                    assert!(tries < 20, "it never goes on: {error}");
                }
                assert!(batch == *expected, "{reading:?} {order:?} {workers}");
            }
            // Blocks that are read before they are wanted are read again. Single records come only when they are wanted.
            let must_show = order == Order::Global;
            assert!(errors > 0 || !must_show, "{reading:?} {order:?}");
        }
    });
}

#[test]
fn a_read_that_fails_once_is_an_error_that_names_the_block() {
    let number = Errno::IO.raw_os_error();
    with_failures(
        |_| ReadFault::Fails(Errno::IO.raw_os_error()),
        |error, shard| {
            matches!(error, DataError::ReadBlock { path, source, .. }
            if path == shard && source.raw_os_error() == Some(number))
        },
    );
}

#[test]
fn other_bytes_than_those_written_never_reach_a_batch() {
    with_failures(
        |read| ReadFault::Corrupt(read.bytes / 2),
        |error, shard| {
            matches!(error, DataError::DamagedBlock { path, problem, .. }
            if path == shard && problem.contains("checksum"))
        },
    );
}

/// Where a block of a shard begins: the header says where the index is.
fn block_start(shard: &Path, block: usize) -> u64 {
    let bytes = std::fs::read(shard).unwrap();
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    number(number(32) as usize + 32 * block)
}

#[test]
fn a_block_that_can_never_be_read_is_named_every_time() {
    let folder = tempfile::tempdir().unwrap();
    for codec in [Codec::None, Codec::Zstd] {
        let dir = synthetic(folder.path(), COUNT, codec);
        let shard = dir.join("shard-00000.storm");
        let place = block_start(&shard, 17)..block_start(&shard, 18);
        for reading in Reading::ALL {
            for order in [Order::Window, Order::Global] {
                let place = place.clone();
                let faults = Faults::new(move |read| {
                    place.contains(&read.at).then_some(ReadFault::Fails(Errno::IO.raw_os_error()))
                });
                let mut loader = loader(&dir, reading, order, 2, Some(&faults));
                let mut batch = RecordBatch::default();
                while loader.next_batch(&mut batch).is_ok() {
                    assert_eq!(loader.epoch(), 0, "every block is read in an epoch");
                }
                let position = loader.position();
                for _ in 0..3 {
                    let error = loader.next_batch(&mut batch).unwrap_err();
                    assert!(
                        matches!(&error, DataError::ReadBlock { path, block: 17, .. } if *path == shard),
                        "{error:?}"
                    );
                    assert_eq!(loader.position(), position);
                }
            }
        }
    }
}
