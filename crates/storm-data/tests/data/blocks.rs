//! Text in blocks: rows are those of version 1, in each order once per epoch, from any position, with any number of workers.

use crate::helpers::{Folder, batches, packed, training, version_1_samples, version_1_text};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use storm_data::records::{Codec, Reading, RecordDemand};
use storm_data::{
    DataError, Dataset, Loader, LoaderOptions, Order, Overlong, PackOptions, Passes, Samples,
    Split, estimator_of_text,
};
use storm_graph::random::Random;

const ORDERS: [Order; 3] = [Order::Global, Order::Window, Order::Sequential];
const TOKENS: usize = 3_000_000;
/// Enough for windows of eight blocks, of the 23 that there are.
const DATA_RAM: u64 = 5 << 20;

/// Random letters, so that no two rows begin alike.
fn letters(count: usize) -> String {
    let mut random = Random(5);
    (0..count).map(|_| char::from(b'a' + random.below(26) as u8)).collect()
}

fn text(folder: &Folder, codec: Codec) -> PathBuf {
    let input = folder.write("input.txt", letters(TOKENS - 1));
    let out = folder.path(codec.name());
    let shard_tokens = 1 << 20;
    packed(&PackOptions { codec, out, shard_tokens, ..folder.options(&[&input]) }).unwrap();
    folder.path(codec.name())
}

/// Chats of very different lengths.
fn samples(folder: &Folder, codec: Codec) -> PathBuf {
    let (all, mut random) = (letters(TOKENS / 2), Random(9));
    let line = |number: usize| {
        let (start, length) = (60 * number, 16 + random.below(200));
        let (question, answer) = all[start..start + length].split_at(8 + length / 3);
        format!("{{\"prompt\": \"{question}\", \"completion\": \"{answer}\"}}\n")
    };
    let input = folder.write("input.jsonl", (0..20_000).map(line).collect::<String>());
    let out = folder.path(codec.name());
    packed(&PackOptions { codec, out, ..folder.options(&[&input]) }).unwrap();
    folder.path(codec.name())
}

fn open(dir: &std::path::Path) -> Arc<Dataset> {
    Arc::new(Dataset::open(dir).unwrap())
}

fn options(order: Order, sequence: usize) -> LoaderOptions {
    LoaderOptions { order, data_ram: DATA_RAM, ..training(100, sequence, 7) }
}

fn error_of(loader: Result<Loader, DataError>) -> String {
    loader.unwrap_err().to_string()
}

/// Rows of 300 tokens lie in one or two records of 1024; those are reads of their own, or in the same block of 128.
#[test]
fn estimates_count_what_rows_of_text_read() {
    let folder = Folder::new();
    for codec in [Codec::None, Codec::Zstd] {
        let dataset = open(&text(&folder, codec));
        for order in [Order::Global, Order::Window] {
            let options = options(order, 300);
            let estimator = estimator_of_text(&dataset, &options).unwrap().unwrap();
            let loader = Loader::new(Arc::clone(&dataset), options).unwrap();
            assert_eq!(estimator.rows(), loader.rows_per_epoch());
            assert!(!estimator.is_resident().unwrap());
            let rates = estimator.measure().unwrap();
            let reads = match codec {
                Codec::None => 1.25..1.35,
                _ => 0.9..1.05,
            };
            assert!(reads.contains(&rates.reads_per_row), "{codec:?}: {rates:?}");
            let demand =
                RecordDemand { records: estimator.rows(), rate: None, bus_bytes_per_second: None };
            let estimate = estimator.estimate(&rates, &demand).unwrap();
            let reading = estimate.stages.iter().find(|stage| stage.name == "reading").unwrap();
            let expected = match order {
                Order::Window => {
                    let bytes = estimate.disk_bytes as f64 / estimator.rows() as f64;
                    rates.sequential_bytes_per_second / bytes
                }
                _ => {
                    let reads = rates.reads_per_row * (1.0 - estimate.found_share);
                    rates.random_reads_per_second / reads
                }
            };
            assert!((reading.rate / expected - 1.0).abs() < 1e-3, "{order:?} {codec:?}");
            assert_eq!(estimate.found_share > 0.4, codec != Codec::None && order == Order::Global);
        }
        // All of it in memory.
        let enough = LoaderOptions { data_ram: 1 << 30, ..options(Order::Global, 300) };
        let estimator = estimator_of_text(&dataset, &enough).unwrap().unwrap();
        assert!(estimator.is_resident().unwrap());
    }
    let old = open(&folder.version_1("text"));
    assert!(estimator_of_text(&old, &options(Order::Global, 7)).unwrap().is_none());
}

#[test]
fn rows_are_those_of_version_1() {
    let folder = Folder::new();
    for (name, input) in [("text", version_1_text()), ("samples", version_1_samples())] {
        let old = open(&folder.version_1(name));
        old.verify(&|_| {}).unwrap();
        let end = if name == "text" { "txt" } else { "jsonl" };
        let input = folder.write(&format!("{name}.{end}"), input);
        for codec in [Codec::None, Codec::Zstd, Codec::Lz4] {
            let out = folder.path(&format!("{name}-{}", codec.name()));
            let options = PackOptions { held_out: 0.1, codec, out, ..folder.options(&[&input]) };
            packed(&options).unwrap();
            let new = open(&options.out);
            new.verify(&|_| {}).unwrap();
            let (old_manifest, new_manifest) = (old.manifest(), new.manifest());
            assert_eq!(old_manifest.counts, new_manifest.counts);
            assert_eq!(old_manifest.held_out, new_manifest.held_out);
            for number in 0..old_manifest.counts.samples {
                assert_eq!(old.sample(number).unwrap(), new.sample(number).unwrap());
            }
            for (sequence, split, order, passes) in [
                (7, Split::Train, Order::Global, Passes::Endless),
                (64, Split::Train, Order::Global, Passes::Endless),
                (1500, Split::Train, Order::Global, Passes::Endless),
                (33, Split::Held, Order::Sequential, Passes::One),
            ] {
                let overlong = Overlong::Split;
                let options =
                    LoaderOptions { split, order, passes, overlong, ..training(3, sequence, 11) };
                let [mut old, mut new] =
                    [&old, &new].map(|set| Loader::new(Arc::clone(set), options).unwrap());
                assert_eq!(old.report(), new.report());
                let count = 2 + old.rows_per_epoch() as usize * 2 / 3;
                assert!(batches(&mut old, count) == batches(&mut new, count), "{name} {sequence}");
                let [old, new] = [old, new].map(|loader| loader.position());
                assert_eq!((old.epoch, old.row), (new.epoch, new.row));
            }
        }
    }
}

#[test]
fn a_position_from_before_there_were_windows_is_understood() {
    let folder = Folder::new();
    let dataset = open(&folder.version_1("text"));
    let mut loader = Loader::new(Arc::clone(&dataset), training(2, 64, 3)).unwrap();
    batches(&mut loader, 5);
    let position = format!(
        "{{\"dataset\": \"{}\", \"split\": \"train\", \"sequence\": 64, \"order\": \"shuffled\", \"seed\": 3, \
         \"epoch\": 0, \"row\": 10}}",
        dataset.id()
    );
    let mut resumed = Loader::new(dataset, training(2, 64, 3)).unwrap();
    resumed.resume(&serde_json::from_str(&position).unwrap()).unwrap();
    assert_eq!(resumed.position(), loader.position());
    assert!(batches(&mut resumed, 9) == batches(&mut loader, 9));
}

#[test]
fn windows_need_blocks() {
    let folder = Folder::new();
    let dataset = open(&folder.version_1("text"));
    let error = error_of(Loader::new(dataset, options(Order::Window, 64)));
    assert!(error.contains("order") && error.contains("pack it again"), "{error}");
}

/// The rows of an epoch by their first tokens, and which each is.
fn rows_of(dataset: &Arc<Dataset>, sequence: usize) -> HashMap<Vec<i32>, u64> {
    let options = LoaderOptions {
        passes: Passes::One,
        data_ram: 1 << 30,
        batch: 1,
        ..options(Order::Sequential, sequence)
    };
    let mut loader = Loader::new(Arc::clone(dataset), options).unwrap();
    let count = loader.rows_per_epoch();
    let all = batches(&mut loader, count as usize);
    let rows: HashMap<_, _> = all.iter().map(key).zip(0..).collect();
    assert_eq!(rows.len() as u64, count, "no two rows begin alike");
    rows
}

fn key(samples: &Samples) -> Vec<i32> {
    samples.tokens[..16.min(samples.tokens.len())].to_vec()
}

/// Which rows come in two epochs, over many resumes with other batches and workers.
fn check_once_per_epoch(dataset: &Arc<Dataset>, sequence: usize) {
    let known = rows_of(dataset, sequence);
    for order in ORDERS {
        let mut random = Random(3);
        let mut seen = vec![0; known.len()];
        let mut loader = Loader::new(Arc::clone(dataset), options(order, sequence)).unwrap();
        let mut left = 2 * known.len();
        let mut orders = Vec::new();
        while left > 0 {
            let batch = left.min(1 + random.below(400));
            let position = loader.position();
            let options =
                LoaderOptions { batch, workers: 1 + random.below(3), ..options(order, sequence) };
            // As if the process had been killed after its last checkpoint.
            loader = Loader::new(Arc::clone(dataset), options).unwrap();
            loader.resume(&position).unwrap();
            let mut samples = Samples::default();
            for _ in 0..(left / batch).min(1 + random.below(20)) {
                assert_eq!(loader.next_batch(&mut samples).unwrap(), batch);
                for row in samples.tokens.chunks(sequence) {
                    let number = known[&row[..16.min(sequence)]];
                    orders.push(number);
                    seen[number as usize] += 1;
                }
                left -= batch;
            }
        }
        assert!(seen.iter().all(|&times| times == 2), "{order:?}");
        let (first, second) = orders.split_at(known.len());
        assert_eq!(first == second, order == Order::Sequential);
        assert_eq!(first.is_sorted(), order == Order::Sequential);
        assert_eq!((loader.epoch(), loader.position().row), (2, 0));
    }
}

#[test]
fn each_row_of_text_comes_once_per_epoch_over_random_resumes() {
    let folder = Folder::new();
    let dataset = open(&text(&folder, Codec::Zstd));
    // Letters take five bits of sixteen.
    let (codec, ratio) = dataset.manifest().codec();
    assert!(codec == Codec::Zstd && ratio > 2.4, "{ratio}");
    check_once_per_epoch(&dataset, 700);
}

/// Rows that are longer than a block, so that some blocks have no row that begins there.
#[test]
fn each_long_row_comes_once_per_epoch() {
    let folder = Folder::new();
    let dataset = open(&text(&folder, Codec::None));
    check_once_per_epoch(&dataset, 150_000);
    let error = error_of(Loader::new(dataset, options(Order::Window, 600_000)));
    assert!(error.contains("data-ram") && error.contains("are less than"), "{error}");
}

#[test]
fn each_packed_row_comes_once_per_epoch_over_random_resumes() {
    let folder = Folder::new();
    let dataset = open(&samples(&folder, Codec::Lz4));
    check_once_per_epoch(&dataset, 230);
}

#[test]
fn neither_workers_nor_codecs_nor_the_way_of_reading_change_a_bit() {
    for make in [text, samples] {
        let folder = Folder::new();
        let dirs = [Codec::None, Codec::Zstd].map(|codec| make(&folder, codec));
        let load = |dataset: Arc<Dataset>, order, workers, data_ram| {
            let options = LoaderOptions { workers, data_ram, ..options(order, 230) };
            let mut loader = Loader::new(dataset, options).unwrap();
            let all = batches(&mut loader, 12);
            assert!(loader.statistics().unwrap().read_bytes > 0);
            all
        };
        for order in ORDERS {
            let expected = load(open(&dirs[0]), order, 1, DATA_RAM);
            for dir in &dirs {
                for (reading, workers) in Reading::ALL.into_iter().zip([5, 2, 3]) {
                    let dataset = Arc::new(Dataset::open_with(dir, reading).unwrap());
                    let found = load(Arc::clone(&dataset), order, workers, DATA_RAM);
                    assert!(found == expected, "{order:?} {reading:?}");
                    let cached = dataset.token_blocks().unwrap().cached_bytes().unwrap();
                    assert!(cached < 1 << 20, "{cached} bytes stay in the page cache");
                }
                if order == Order::Global {
                    // All of it in memory.
                    assert!(load(open(dir), order, 2, 1 << 30) == expected);
                }
            }
        }
    }
}

#[test]
fn a_window_of_another_size_is_another_order() {
    let folder = Folder::new();
    let dataset = open(&text(&folder, Codec::None));
    let mut loader = Loader::new(Arc::clone(&dataset), options(Order::Window, 100)).unwrap();
    batches(&mut loader, 3);
    let position = loader.position();
    assert_eq!(position.window_blocks, 8);
    let other = LoaderOptions { data_ram: 2 * DATA_RAM, ..options(Order::Window, 100) };
    let mut other = Loader::new(dataset, other).unwrap();
    let error = other.resume(&position).unwrap_err().to_string();
    assert!(error.contains("data-ram") && error.contains("was 8 and is 17 now"), "{error}");
}

/// A record ends with its checksum, so the checksum of a block that is stored as it is says nothing of its content.
#[test]
fn an_id_says_what_is_in_a_dataset() {
    let folder = Folder::new();
    let id = |text: &str, name: &str| {
        let input = folder.write("input.txt", text);
        let options = PackOptions { out: folder.path(name), ..folder.options(&[&input]) };
        packed(&options).unwrap().id
    };
    let one = letters(5000);
    let mut other = one.clone();
    other.replace_range(4000..4001, "!");
    let [one, same, other] =
        [(&one, "1"), (&one, "2"), (&other, "3")].map(|(text, name)| id(text, name));
    assert!(one == same && one != other);
}
