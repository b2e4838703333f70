//! Estimates: what follows from rates, sizes and `data_ram`.

use super::synthetic;
use std::sync::Arc;
use storm_data::records::{
    Codec, Estimator, Order, ReadingPath, RecordBatch, RecordDemand, RecordEstimate, RecordLoader,
    RecordLoaderOptions, RecordRates, RecordSet,
};

const RATES: RecordRates = RecordRates {
    sequential_bytes_per_second: 1e9,
    decoding_bytes_per_second: 1e10,
    reads_per_row: 1.0,
    random_reads_per_second: 20_000.0,
};

/// An estimate for five million records of 1016 bytes.
fn estimate(order: Order, data_ram: u64, rate: f64) -> RecordEstimate {
    let folder = tempfile::tempdir().unwrap();
    let set = Arc::new(RecordSet::open(&synthetic(folder.path(), 2_000, Codec::None)).unwrap());
    let options = RecordLoaderOptions { order, ..RecordLoaderOptions::training(100, 1, data_ram) };
    let demand =
        RecordDemand { records: 5_000_000, rate: Some(rate), bus_bytes_per_second: Some(1e10) };
    Estimator::of_records(set, options).unwrap().estimate(&RATES, &demand).unwrap()
}

#[test]
fn the_slowest_stage_decides() {
    let window = estimate(Order::Window, 64 << 20, 100_000.0);
    assert_eq!(window.stages[0].name, "model");
    assert_eq!((window.epoch_seconds, window.advice.len()), (50.0, 0));
    assert!((5_000_000 * 1016..5_100_000 * 1016).contains(&window.disk_bytes));
    assert!(window.block_bytes + window.ahead_bytes <= 64 << 20);
    let global = estimate(Order::Global, 64 << 20, 100_000.0);
    assert_eq!((global.stages[0].name, global.epoch_seconds), ("reading", 250.0));
    assert!(global.advice[0].contains("window order"), "{:?}", global.advice);
    let resident = estimate(Order::Global, 8 << 30, 1e9);
    assert!(resident.is_resident && resident.stages[0].name == "copies to the device");
}

#[test]
fn rates_are_measured_on_the_dataset() {
    let folder = tempfile::tempdir().unwrap();
    for codec in [Codec::None, Codec::Zstd] {
        let set = Arc::new(RecordSet::open(&synthetic(folder.path(), 2_000, codec)).unwrap());
        let options = RecordLoaderOptions::training(100, 1, 64 << 20);
        let rates = Estimator::of_records(set, options).unwrap().measure().unwrap();
        assert!(rates.sequential_bytes_per_second > 0.0 && rates.random_reads_per_second > 0.0);
    }
}

/// In global order a record of a compressed block costs the whole block, unless the block is in memory.
#[test]
fn global_order_reads_whole_compressed_blocks_except_those_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let set = Arc::new(RecordSet::open(&synthetic(folder.path(), 20_000, Codec::Zstd)).unwrap());
    let stages = |data_ram: u64| {
        let options = RecordLoaderOptions {
            order: Order::Global,
            // Little memory would allow only one anyway.
            workers: 1,
            ..RecordLoaderOptions::training(10, 1, data_ram)
        };
        let records = set.records(options.part);
        let demand = RecordDemand { records, rate: None, bus_bytes_per_second: None };
        let estimator = Estimator::of_records(Arc::clone(&set), options).unwrap();
        let estimate = estimator.estimate(&RATES, &demand).unwrap();
        let rate = |name: &str| {
            let stage = estimate.stages.iter().find(|stage| stage.name == name).unwrap();
            stage.rate
        };
        (rate("reading"), rate("decoding"))
    };
    let enough = set.data_ram_to_hold(storm_data::Split::Train);
    let (little, half) = (stages(8 << 20), stages(enough / 2));
    // 256 KiB hold 258 records of 1016 bytes.
    let decoded = 1e10 / (258.0 * 1016.0);
    assert!((1.0..1.6).contains(&(little.0 / 20_000.0)), "{little:?}");
    assert!((0.9..1.6).contains(&(little.1 / decoded)), "{little:?}");
    assert!((1.7..2.1).contains(&(half.0 / 20_000.0)), "{half:?}");
    assert!((half.1 / half.0 / (little.1 / little.0) - 1.0).abs() < 1e-9);
}

/// A loader finds as many blocks in memory as the estimate says, and has as many reads in flight as it may. Neither depends on
/// a clock.
#[test]
fn a_loader_does_what_the_estimate_takes_for_granted() {
    let folder = tempfile::tempdir().unwrap();
    let set = Arc::new(RecordSet::open(&synthetic(folder.path(), 50_000, Codec::Zstd)).unwrap());
    // A sixteenth holds eight blocks, of the 175 that there are.
    let options = RecordLoaderOptions {
        order: Order::Global,
        workers: 1,
        ..RecordLoaderOptions::training(500, 1, 16 * 9 * (256 << 10))
    };
    let records = set.records(options.part);
    let demand = RecordDemand { records, rate: None, bus_bytes_per_second: None };
    let estimator = Estimator::of_records(Arc::clone(&set), options).unwrap();
    let estimate = estimator.estimate(&RATES, &demand).unwrap();
    assert_eq!((estimate.workers, estimate.in_flight), (1, 8));
    assert!((0.5..0.7).contains(&estimate.found_share), "{}", estimate.found_share);
    let mut loader = RecordLoader::new(Arc::clone(&set), options).unwrap();
    let mut batch = RecordBatch::default();
    while loader.epoch() == 0 {
        loader.next_batch(&mut batch).unwrap();
    }
    let done = loader.statistics();
    let off = done.found_share() - estimate.found_share;
    assert!(off.abs() < 0.03, "{done:?} {estimate:?}");
    // Batches ahead have been read too.
    let wanted = done.reads + done.found;
    assert!((records..records + 12_000).contains(&wanted), "{done:?}");
    if set.reading_path() == ReadingPath::Ring {
        // Of sixteen wanted blocks, less than half are read at once; few are at the ends of batches.
        assert!((5.5..8.0).contains(&done.mean_in_flight()), "{}", done.mean_in_flight());
    }
    assert!(done.decoded_bytes >= done.reads * (255 << 10), "{done:?}");
}

/// What is prepared ahead is what the model uses while a batch is read and decoded.
#[test]
fn slower_disks_and_faster_models_prepare_more_batches() {
    let ahead = |order, rate| estimate(order, 64 << 20, rate).ahead;
    // Two threads make a batch of 100 rows in 10 ms, by 20,000 reads a second.
    for (rate, expected) in [(1e3, 2), (1e4, 2), (2e4, 3), (4e4, 5), (1e7, 16)] {
        assert_eq!(ahead(Order::Global, rate), expected, "{rate}");
    }
    assert_eq!(ahead(Order::Window, 4e4), 2);
    // As many as memory allows.
    assert_eq!(estimate(Order::Global, 5 << 20, 1e7).ahead, 3);
}
