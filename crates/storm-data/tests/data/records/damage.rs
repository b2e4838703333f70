//! Damaged datasets of records: typed errors that name the shard and the block.

use super::synthetic;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use storm_data::records::{
    Codec, Order, Reading, RecordBatch, RecordLoader, RecordLoaderOptions, RecordSet,
};
use storm_data::{DataError, Dataset};
use storm_graph::random::Random;
use storm_host::allocation::peak_bytes;

const SHARD: &str = "shard-00000.storm";

/// Where the third block of a shard begins: the header says where the index is.
fn third_block(shard: &[u8]) -> usize {
    let number = |at: usize| u64::from_le_bytes(shard[at..at + 8].try_into().unwrap()) as usize;
    number(number(32) + 2 * 32)
}

fn loader(dir: &Path, order: Order) -> RecordLoader {
    let options = RecordLoaderOptions { order, ..RecordLoaderOptions::training(100, 1, 5 << 20) };
    RecordLoader::new(Arc::new(RecordSet::open(dir).unwrap()), options).unwrap()
}

/// The first error of two epochs.
fn first_error(loader: &mut RecordLoader) -> Option<DataError> {
    let mut batch = RecordBatch::default();
    while loader.epoch() < 2 {
        if let Err(error) = loader.next_batch(&mut batch) {
            return Some(error);
        }
    }
    None
}

#[test]
fn a_damaged_block_is_named_and_the_loader_stays() {
    for codec in [Codec::None, Codec::Lz4] {
        let folder = tempfile::tempdir().unwrap();
        let dir = synthetic(folder.path(), 5_000, codec);
        let path = dir.join(SHARD);
        let whole = fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        bytes[third_block(&whole) + 1000] ^= 1;
        fs::write(&path, &bytes).unwrap();
        for order in [Order::Global, Order::Window, Order::Sequential] {
            let mut loader = loader(&dir, order);
            let error = first_error(&mut loader).expect("the block is read");
            assert!(
                matches!(&error, DataError::DamagedBlock { path, block: 2, .. } if path.ends_with(SHARD)),
                "{error:?}"
            );
            let position = loader.position();
            let mut batch = RecordBatch::default();
            loader.next_batch(&mut batch).unwrap_err();
            assert_eq!(loader.position(), position);
            // Once it is readable again, the run goes on.
            fs::write(&path, &whole).unwrap();
            assert_eq!(loader.next_batch(&mut batch).unwrap(), 100);
            fs::write(&path, &bytes).unwrap();
        }
        let error = RecordSet::open(&dir).unwrap().verify(&|_| {}).unwrap_err();
        assert!(matches!(error, DataError::DamagedBlock { block: 2, .. }), "{error:?}");
    }
}

#[test]
fn a_shard_that_is_truncated_while_it_is_used_is_an_error() {
    for reading in Reading::ALL {
        let folder = tempfile::tempdir().unwrap();
        let dir = synthetic(folder.path(), 5_000, Codec::None);
        let set = Arc::new(RecordSet::open_with(&dir, reading).unwrap());
        let options = RecordLoaderOptions::training(10, 1, 5 << 20);
        let mut loader = RecordLoader::new(set, options).unwrap();
        fs::File::options().write(true).open(dir.join(SHARD)).unwrap().set_len(4096).unwrap();
        let error = first_error(&mut loader).expect("blocks are missing");
        assert!(matches!(error, DataError::DamagedBlock { .. }), "{error:?}");
    }
}

/// Changes the manifest and makes its checksum right again.
pub(super) fn rewrite(dir: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let path = dir.join("dataset.json");
    let mut value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    let json = serde_json::to_vec(&value).unwrap();
    use sha2::{Digest, Sha256};
    let digest: String = Sha256::digest(&json).iter().map(|byte| format!("{byte:02x}")).collect();
    fs::write(path, json).unwrap();
    fs::write(dir.join("dataset.sha256"), format!("{digest}  dataset.json\n")).unwrap();
}

#[test]
fn a_manifest_of_other_records_is_refused_in_little_memory() {
    type Change = fn(&mut serde_json::Value);
    let changes: [Change; 9] = [
        |json| json["columns"][0]["shape"] = serde_json::json!([1u64 << 40, 1u64 << 40]),
        |json| json["columns"][0]["shape"] = serde_json::json!([10, 101]),
        |json| json["columns"][0]["shape"] = serde_json::json!([0]),
        |json| json["columns"] = serde_json::json!([]),
        |json| json["columns"][1]["name"] = "images".into(),
        |json| json["columns"][1]["kind"] = "bytes".into(),
        |json| json["counts"]["records"] = 7.into(),
        |json| json["shards"][0]["part"] = "held".into(),
        |json| json["shards"][0]["checksum"] = 7.into(),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let dir = synthetic(folder.path(), 1_000, Codec::None);
        rewrite(&dir, change);
        let (opened, peak) = peak_bytes(|| RecordSet::open(&dir));
        let error = opened.expect_err(&format!("change {number}"));
        assert!(matches!(error, DataError::Damaged { .. }), "{number}: {error:?}");
        assert!(peak < 1 << 20, "{number}: {peak}");
    }
}

#[test]
fn labels_that_a_manifest_forbids_are_damage() {
    let folder = tempfile::tempdir().unwrap();
    let dir = synthetic(folder.path(), 1_000, Codec::None);
    rewrite(&dir, |json| json["columns"][1]["below"] = 3.into());
    let error = first_error(&mut loader(&dir, Order::Window)).expect("most are larger");
    assert!(error.to_string().contains("is not below 3"), "{error}");
}

#[test]
fn damaged_headers_and_indices_are_refused_in_little_memory() {
    let folder = tempfile::tempdir().unwrap();
    let dir = synthetic(folder.path(), 2_000, Codec::Zstd);
    let path = dir.join(SHARD);
    let whole = fs::read(&path).unwrap();
    let mut random = Random(5);
    for number in 0..200 {
        let mut bytes = whole.clone();
        let index = bytes.len() - 200;
        match random.below(4) {
            0 => bytes.truncate(random.below(bytes.len())),
            1 => bytes[random.below(100)] ^= 1 << random.below(8),
            2 => bytes[index + random.below(200)] ^= 1 << random.below(8),
            _ => bytes.extend(vec![0; 1 + random.below(10_000)]),
        }
        if bytes == whole {
            continue;
        }
        fs::write(&path, &bytes).unwrap();
        let (opened, peak) = peak_bytes(|| RecordSet::open(&dir));
        assert!(peak < 1 << 20, "{number}: {peak}");
        // What the header's checksum does not cover is in blocks.
        match opened {
            Err(error) => assert!(matches!(error, DataError::Damaged { .. }), "{error:?}"),
            Ok(set) => assert!(set.verify(&|_| {}).is_err(), "{number}"),
        }
    }
}

#[test]
fn tokens_and_records_are_told_apart() {
    let folder = crate::helpers::Folder::new();
    let tokens = folder.text_dataset(1_000, 0.0);
    let error = RecordSet::open(tokens.dir()).unwrap_err();
    assert!(matches!(error, DataError::OtherKind { .. }), "{error:?}");
    let records = synthetic(&folder.path("records"), 10, Codec::None);
    let error = Dataset::open(&records).unwrap_err();
    assert!(error.to_string().contains("holds records such as images"), "{error}");
}

#[test]
fn positions_of_other_loaders_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let dir = synthetic(folder.path(), 5_000, Codec::None);
    let set = Arc::new(RecordSet::open(&dir).unwrap());
    let options = RecordLoaderOptions::training(100, 1, 5 << 20);
    let position = loader(&dir, Order::Window).position();
    let others = [
        RecordLoaderOptions { seed: 2, ..options },
        RecordLoaderOptions { order: Order::Global, ..options },
        RecordLoaderOptions { data_ram: 8 << 20, ..options },
        RecordLoaderOptions { part: storm_data::Split::Held, ..options },
    ];
    for other in others {
        let mut loader = RecordLoader::new(Arc::clone(&set), other).unwrap();
        let error = loader.resume(&position).unwrap_err();
        assert!(matches!(error, DataError::Position { .. }), "{error:?}");
    }
    for data_ram in [0, 1 << 20] {
        let options = RecordLoaderOptions { data_ram, ..options };
        let error = RecordLoader::new(Arc::clone(&set), options).unwrap_err();
        assert!(matches!(error, DataError::Option { option: "data-ram", .. }), "{error:?}");
    }
}
