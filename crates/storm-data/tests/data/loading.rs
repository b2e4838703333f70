//! Rows: each once per epoch, in a reproducible order, starting at any position.

use crate::helpers::{Folder, batches, packed, seeded, training};
use proptest::prelude::*;
use std::path::Path;
use std::sync::Arc;
use storm_data::{
    DataError, Dataset, Loader, LoaderOptions, Order, PackOptions, Passes, Position, Samples,
    Split, write_batches,
};
use storm_graph::IGNORE_INDEX;

/// All targets that count, in order.
fn targets(samples: &Samples) -> impl Iterator<Item = i32> + '_ {
    samples.targets.iter().copied().filter(|&target| target != IGNORE_INDEX)
}

/// The tokens of a dataset.
fn tokens(dataset: &Dataset, split: Split) -> Vec<i32> {
    let range = dataset.token_range(split);
    let mut tokens = vec![0; (range.end - range.start) as usize];
    dataset.read_tokens(range.start, &mut tokens, &mut Vec::new()).unwrap();
    tokens
}

#[test]
fn windows_follow_each_other() {
    let folder = Folder::new();
    let dataset = folder.text_dataset(1000, 0.1);
    for split in [Split::Train, Split::Held] {
        let expected = tokens(&dataset, split);
        let options = LoaderOptions {
            split,
            order: Order::Sequential,
            passes: Passes::One,
            ..training(3, 16, 0)
        };
        let mut loader = Loader::new(Arc::clone(&dataset), options).unwrap();
        let mut samples = Samples::default();
        let (mut found, mut rows) = (Vec::new(), 0);
        loop {
            let filled = loader.next_batch(&mut samples).unwrap();
            if filled == 0 {
                break;
            }
            rows += filled as u64;
            found.extend(targets(&samples));
            for (row, targets) in samples.tokens.chunks(16).zip(samples.targets.chunks(16)) {
                // A target is the token behind.
                for at in 1..16 {
                    assert!(targets[at] == IGNORE_INDEX || targets[at - 1] == row[at]);
                }
            }
            assert_eq!(samples.segments, None);
        }
        assert_eq!(found, expected[1..]);
        assert_eq!(rows, loader.rows_per_epoch());
        assert_eq!(loader.tokens_per_epoch(), rows * 16);
    }
}

proptest! {
    #![proptest_config(seeded())]

    #[test]
    fn each_row_once_per_epoch(
        bytes in 2usize..900, batch in 1usize..6, sequence in 1usize..40, seed: u64,
    ) {
        let folder = Folder::new();
        let dataset = folder.text_dataset(bytes, 0.0);
        let mut expected = tokens(&dataset, Split::Train)[1..].to_vec();
        expected.sort_unstable();
        let mut loader = Loader::new(Arc::clone(&dataset), training(1, sequence, seed)).unwrap();
        let rows = loader.rows_per_epoch() as usize;
        let first = batches(&mut loader, rows);
        prop_assert_eq!((loader.epoch(), loader.position().row), (1, 0));
        let second = batches(&mut loader, rows);
        for epoch in [&first, &second] {
            let mut found: Vec<i32> = epoch.iter().flat_map(targets).collect();
            found.sort_unstable();
            prop_assert_eq!(&found, &expected);
        }
        if rows > 20 {
            prop_assert!(first != second);
            let other = training(1, sequence, seed ^ 1);
            let mut other = Loader::new(Arc::clone(&dataset), other).unwrap();
            prop_assert!(first != batches(&mut other, rows));
        }
        // Batches of any size hold the same rows in the same order.
        let mut many = Loader::new(dataset, training(batch, sequence, seed)).unwrap();
        let rows_of = |batches: Vec<Samples>| -> Vec<i32> {
            batches.into_iter().flat_map(|samples| samples.tokens).collect()
        };
        let all: Vec<Samples> = first.into_iter().chain(second).collect();
        let found = rows_of(batches(&mut many, rows.div_ceil(batch)));
        let reference = rows_of(all);
        let both = found.len().min(reference.len());
        prop_assert_eq!(&found[..both], &reference[..both]);
    }

    #[test]
    fn resuming_gives_the_same_rows(
        bytes in 50usize..900, sequence in 1usize..30, before in 0usize..60, batch in 1usize..5,
    ) {
        let folder = Folder::new();
        let dataset = folder.text_dataset(bytes, 0.0);
        let options = training(batch, sequence, 5);
        let mut loader = Loader::new(Arc::clone(&dataset), options).unwrap();
        batches(&mut loader, before);
        let position = serde_json::to_string(&loader.position()).unwrap();
        let expected = batches(&mut loader, 10);
        let position: Position = serde_json::from_str(&position).unwrap();
        let mut resumed = Loader::new(dataset, options).unwrap();
        resumed.resume(&position).unwrap();
        prop_assert_eq!(resumed.position(), position);
        prop_assert_eq!(batches(&mut resumed, 10), expected);
        prop_assert_eq!(resumed.position(), loader.position());
    }
}

#[test]
fn positions_of_other_runs_are_refused() {
    let folder = Folder::new();
    let dataset = folder.text_dataset(500, 0.2);
    let options = training(2, 10, 1);
    let mut loader = Loader::new(Arc::clone(&dataset), options).unwrap();
    let good = loader.position();
    let check = |position: Position, expected: &str| {
        let error = loader.resume(&position).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let mut check = check;
    check(Position { dataset: "other".into(), ..good.clone() }, "another dataset");
    check(Position { sequence: 20, ..good.clone() }, "the sequence length was 20 and is 10 now");
    check(Position { seed: 2, ..good.clone() }, "the seed was 2");
    check(Position { split: Split::Held, ..good.clone() }, "the split was held-out");
    check(Position { order: Order::Sequential, ..good.clone() }, "the order");
    check(Position { row: u64::MAX, ..good.clone() }, "an epoch has");
    assert_eq!(loader.position(), good);
}

#[test]
fn impossible_options() {
    let folder = Folder::new();
    let dataset = folder.text_dataset(100, 0.0);
    let check = |options: LoaderOptions, expected: &str| {
        let error = Loader::new(Arc::clone(&dataset), options).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(training(0, 10, 0), "batch: 0");
    check(training(1, 0, 0), "sequence: 0");
    check(training(1, usize::MAX, 0), "sequence");
    let held = LoaderOptions { split: Split::Held, ..training(1, 10, 0) };
    check(held, "held-out part");
}

/// The header of a safetensors file and the data after it.
fn safetensors(path: &Path) -> (serde_json::Value, Vec<u8>) {
    let bytes = std::fs::read(path).unwrap();
    let (length, rest) = bytes.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    assert_eq!(header.len() % 8, 0);
    (serde_json::from_slice(header).unwrap(), data.to_vec())
}

#[test]
fn batches_are_written_as_they_are_loaded() {
    let folder = Folder::new();
    let chats = folder.write(
        "chats.jsonl",
        "{\"prompt\": \"a\", \"completion\": \"bc\"}\n{\"prompt\": \"d\", \"completion\": \"efgh\"}\n",
    );
    let options = PackOptions { out: folder.path("chats"), ..folder.options(&[&chats]) };
    packed(&options).unwrap();
    let samples = Arc::new(Dataset::open(&options.out).unwrap());
    let text = folder.text_dataset(100, 0.0);
    for (dataset, names) in
        [(text, &["tokens", "targets"][..]), (samples, &["tokens", "targets", "segments"])]
    {
        let options = training(3, 7, 5);
        let expected = batches(&mut Loader::new(Arc::clone(&dataset), options).unwrap(), 9);
        let file = folder.path("batches.safetensors");
        write_batches(&dataset, options, 9, &file).unwrap();
        let (header, data) = safetensors(&file);
        assert_eq!(header.as_object().unwrap().len(), names.len());
        for &name in names {
            let entry = &header[name];
            assert_eq!((&entry["dtype"], &entry["shape"]), (&"I32".into(), &[9, 3, 7][..].into()));
            let at = |end: usize| entry["data_offsets"][end].as_u64().unwrap() as usize;
            let found = data[at(0)..at(1)].chunks(4);
            let found: Vec<i32> =
                found.map(|bytes| i32::from_le_bytes(bytes.try_into().unwrap())).collect();
            let column = |samples: &Samples| match name {
                "tokens" => samples.tokens.clone(),
                "targets" => samples.targets.clone(),
                _ => samples.segments.clone().unwrap(),
            };
            assert_eq!(found, expected.iter().flat_map(column).collect::<Vec<_>>(), "{name}");
        }
    }
}

#[test]
fn batches_that_cannot_be_written_leave_nothing() {
    let folder = Folder::new();
    let dataset = folder.text_dataset(100, 0.0);
    let error = write_batches(&dataset, training(3, 7, 5), u64::MAX, &folder.path("batches"));
    assert!(error.unwrap_err().to_string().contains("too many"));
    let error = write_batches(&dataset, training(3, 7, 5), 1, &folder.path("nowhere/batches"));
    assert!(matches!(error, Err(DataError::Io { .. })), "{error:?}");
    assert_eq!(folder.names(), ["input.txt", "out"]);
}
