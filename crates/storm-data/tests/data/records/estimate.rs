//! Estimates: what follows from rates, sizes and `data_ram`.

use super::synthetic;
use std::sync::Arc;
use storm_data::records::{
    Codec, Order, RecordDemand, RecordEstimate, RecordLoaderOptions, RecordRates, RecordSet,
    estimate_records,
};

const RATES: RecordRates = RecordRates {
    sequential_bytes_per_second: 1e9,
    decoding_bytes_per_second: 1e10,
    random_reads_per_second: 20_000.0,
};

/// An estimate for five million records of 1016 bytes.
fn estimate(order: Order, data_ram: u64, rate: f64) -> RecordEstimate {
    let folder = tempfile::tempdir().unwrap();
    let set = Arc::new(RecordSet::open(&synthetic(folder.path(), 2_000, Codec::None)).unwrap());
    let options = RecordLoaderOptions { order, ..RecordLoaderOptions::training(100, 1, data_ram) };
    let demand =
        RecordDemand { records: 5_000_000, rate: Some(rate), bus_bytes_per_second: Some(1e10) };
    estimate_records(&set, &options, &RATES, &demand).unwrap()
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
        let set = RecordSet::open(&synthetic(folder.path(), 2_000, codec)).unwrap();
        let options = RecordLoaderOptions::training(100, 1, 64 << 20);
        let rates = RecordRates::measure(&set, &options).unwrap();
        assert!(rates.sequential_bytes_per_second > 0.0 && rates.random_reads_per_second > 0.0);
    }
}

/// In global order a record of a compressed block costs the whole block, unless the block is in memory.
#[test]
fn global_order_reads_whole_compressed_blocks_except_those_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let set = RecordSet::open(&synthetic(folder.path(), 20_000, Codec::Zstd)).unwrap();
    let stages = |data_ram: u64| {
        let options = RecordLoaderOptions {
            order: Order::Global,
            // Little memory would allow only one anyway.
            workers: 1,
            ..RecordLoaderOptions::training(10, 1, data_ram)
        };
        let records = set.records(options.part);
        let demand = RecordDemand { records, rate: None, bus_bytes_per_second: None };
        let estimate = estimate_records(&set, &options, &RATES, &demand).unwrap();
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
