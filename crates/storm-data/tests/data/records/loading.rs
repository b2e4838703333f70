//! Loading: every record once per epoch, from any position, with any number of workers.

use super::{options, packed, synthetic};
use std::path::Path;
use std::sync::Arc;
use storm_data::records::{
    Codec, Order, Reading, RecordBatch, RecordInput, RecordLoader, RecordLoaderOptions,
    RecordPackOptions, RecordSet, Repeated,
};
use storm_data::{Passes, Split};
use storm_graph::random::Random;

const COUNT: u64 = 9_000;
const TRAINING: u64 = 8_100;
const ORDERS: [Order; 3] = [Order::Global, Order::Window, Order::Sequential];

/// Enough for windows of eight blocks.
const DATA_RAM: u64 = 5 << 20;

fn open(dir: &Path) -> Arc<RecordSet> {
    Arc::new(RecordSet::open(dir).unwrap())
}

fn loader_options(order: Order, workers: usize) -> RecordLoaderOptions {
    RecordLoaderOptions { order, workers, ..RecordLoaderOptions::training(100, 7, DATA_RAM) }
}

/// The number that a record carries.
fn index_of(batch: &RecordBatch, row: usize) -> u64 {
    u64::from_le_bytes(batch.column("index").unwrap().row(row).try_into().unwrap())
}

#[test]
fn every_record_comes_once_per_epoch_over_random_resumes() {
    let folder = tempfile::tempdir().unwrap();
    for codec in [Codec::None, Codec::Zstd] {
        let set = open(&synthetic(folder.path(), COUNT, codec));
        for order in ORDERS {
            let mut random = Random(3);
            let mut seen = vec![0u8; COUNT as usize];
            let mut loader = RecordLoader::new(Arc::clone(&set), loader_options(order, 2)).unwrap();
            let mut batch = RecordBatch::default();
            while loader.epoch() < 2 {
                if random.below(8) == 0 {
                    // As if the process had been killed after its last checkpoint.
                    let position = loader.position();
                    let options = RecordLoaderOptions {
                        batch: 1 + random.below(150),
                        ..loader_options(order, 1 + random.below(3))
                    };
                    loader = RecordLoader::new(Arc::clone(&set), options).unwrap();
                    loader.resume(&position).unwrap();
                }
                let rows = loader.next_batch(&mut batch).unwrap();
                for row in 0..rows {
                    let [low, high, epoch] = batch.samples[row];
                    assert_eq!(high, 0);
                    assert!(epoch < 2 || loader.epoch() == 2);
                    if epoch < 2 {
                        let index = index_of(&batch, row);
                        assert!(low as u64 <= COUNT);
                        seen[index as usize] += 1;
                        assert!(
                            seen[index as usize] <= 1 + epoch as u8,
                            "{order:?}: {index} again"
                        );
                    }
                }
            }
            let counts = [0, 2].map(|times| seen.iter().filter(|&&seen| seen == times).count());
            assert_eq!(counts.map(|count| count as u64), [COUNT - TRAINING, TRAINING], "{order:?}");
        }
    }
}

#[test]
fn neither_workers_nor_codecs_nor_the_way_of_reading_change_a_bit() {
    let folder = tempfile::tempdir().unwrap();
    let dirs =
        [Codec::None, Codec::Zstd, Codec::Lz4].map(|codec| synthetic(folder.path(), COUNT, codec));
    for dir in &dirs[1..] {
        assert!(open(dir).manifest().ratio() > 1.2, "blocks are compressed");
    }
    let batches = |set: Arc<RecordSet>, order, workers, data_ram| {
        let options = RecordLoaderOptions { data_ram, ..loader_options(order, workers) };
        let mut loader = RecordLoader::new(set, options).unwrap();
        let mut all = Vec::new();
        for _ in 0..50 {
            let mut batch = RecordBatch::default();
            assert_eq!(loader.next_batch(&mut batch).unwrap(), 100);
            all.push(batch);
        }
        all
    };
    for order in ORDERS {
        let expected = batches(open(&dirs[0]), order, 1, DATA_RAM);
        for workers in [2, 5] {
            assert!(batches(open(&dirs[0]), order, workers, DATA_RAM) == expected, "{order:?}");
        }
        for dir in &dirs {
            for reading in Reading::ALL {
                let set = Arc::new(RecordSet::open_with(dir, reading).unwrap());
                assert!(batches(set, order, 2, DATA_RAM) == expected, "{order:?} {reading:?}");
            }
            if order == Order::Global {
                // All of it in memory.
                assert!(batches(open(dir), order, 2, 1 << 30) == expected, "{order:?}");
            }
        }
    }
}

/// All records come before any of them comes again.
#[test]
fn a_set_is_repeated_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let dir = synthetic(folder.path(), 600, Codec::None);
    let input = RecordInput::Repeated(Repeated { dir, count: 1_200 });
    let out = folder.path().join("repeated");
    let repeated = packed(&RecordPackOptions { held_out: 0.0, ..options(input, &out, Codec::Lz4) });
    let mut loader =
        RecordLoader::new(open(&repeated), loader_options(Order::Sequential, 2)).unwrap();
    let mut batch = RecordBatch::default();
    let mut seen = Vec::new();
    for _ in 0..12 {
        let rows = loader.next_batch(&mut batch).unwrap();
        seen.extend((0..rows).map(|row| index_of(&batch, row)));
    }
    let once = (0..600).filter(|index| index % 10 != 9);
    assert!(seen.into_iter().eq(once.cycle().take(1_200)));
}

#[test]
fn an_evaluation_sees_the_held_out_part_once() {
    let folder = tempfile::tempdir().unwrap();
    let set = open(&synthetic(folder.path(), COUNT, Codec::None));
    assert_eq!(
        [Split::Train, Split::Held].map(|part| set.records(part)),
        [TRAINING, COUNT - TRAINING]
    );
    let options = RecordLoaderOptions::evaluation(256, DATA_RAM);
    assert_eq!(options.passes, Passes::One);
    let mut loader = RecordLoader::new(Arc::clone(&set), options).unwrap();
    let mut batch = RecordBatch::default();
    let mut held = Vec::new();
    let mut sizes = Vec::new();
    loop {
        let rows = loader.next_batch(&mut batch).unwrap();
        if rows == 0 {
            break;
        }
        sizes.push(rows);
        held.extend((0..rows).map(|row| index_of(&batch, row)));
        let targets = batch.column("targets").unwrap().to_i32().unwrap();
        assert!(targets[..rows].iter().all(|target| (0..10).contains(target)));
        assert!(targets[rows..].iter().all(|&target| target == storm_graph::IGNORE_INDEX));
    }
    assert_eq!(sizes, [256, 256, 256, 132]);
    assert!(held.into_iter().eq((0..COUNT).filter(|index| index % 10 == 9)), "evenly taken");
    assert_eq!(loader.next_batch(&mut batch).unwrap(), 0);
    let end = loader.position();
    loader.resume(&end).unwrap();
    assert_eq!(loader.next_batch(&mut batch).unwrap(), 0);
}
