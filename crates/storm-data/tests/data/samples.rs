//! Chats and instructions: masks, rows of several samples, samples that do not fit.

use crate::helpers::{Folder, batches, packed, seeded, training};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use storm_data::{
    Dataset, Loader, LoaderOptions, Order, Overlong, PackOptions, Passes, Position, Samples,
    Tokenizer,
};
use storm_graph::IGNORE_INDEX;

/// The dataset of these records, and what happened to them.
fn dataset(folder: &Folder, records: &[serde_json::Value]) -> Arc<Dataset> {
    let lines: String = records.iter().map(|record| format!("{record}\n")).collect();
    let input = folder.write("samples.jsonl", lines);
    let options = PackOptions { shard_tokens: 200, ..folder.options(&[&input]) };
    packed(&options).unwrap();
    let dataset = Dataset::open(&options.out).unwrap();
    dataset.verify(&|_| {}).unwrap();
    Arc::new(dataset)
}

fn instruction(prompt: &str, completion: &str) -> serde_json::Value {
    serde_json::json!({"prompt": prompt, "completion": completion})
}

/// A sample as text, with the learned part in brackets; the end of text is `$`.
fn shown(dataset: &Dataset, number: u64) -> String {
    let range = dataset.sample(number).unwrap();
    let count = (range.end - range.start) as usize;
    let (mut tokens, mut learned) = (vec![0; count], vec![false; count]);
    let mut bytes = Vec::new();
    dataset.read_tokens(range.start, &mut tokens, &mut bytes).unwrap();
    dataset.read_mask(range.start, &mut learned, &mut bytes).unwrap();
    let mut text = String::new();
    let mut at = 0;
    for span in learned.chunk_by(|a, b| a == b) {
        let part: String =
            tokens[at..at + span.len()].iter().map(|&token| character(token)).collect();
        text += &if span[0] { format!("[{part}]") } else { part };
        at += span.len();
    }
    text
}

fn character(token: i32) -> char {
    if token == 256 { '$' } else { char::from(token as u8) }
}

#[test]
fn answers_are_learned() {
    let folder = Folder::new();
    let message = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let chat = serde_json::json!({"messages": [
        message("system", "be brief"), message("user", "hi"), message("assistant", "ho"),
        message("user", "well?"), message("assistant", "well."),
    ], "prompt": "of another form"});
    let unanswered = serde_json::json!({"messages": [message("user", "hello?")]});
    let open =
        serde_json::json!({"messages": [message("assistant", "yes"), message("user", "no")]});
    let records = [
        instruction("2+2=", "4"),
        chat,
        unanswered,
        instruction("", ""),
        instruction("a", ""),
        open,
    ];
    let dataset = dataset(&folder, &records);
    assert_eq!(shown(&dataset, 0), "2+2=[4$]");
    let expected =
        "system: be brief\nuser: hi\nassistant:[ ho\n]user: well?\nassistant:[ well.\n$]";
    assert_eq!(shown(&dataset, 1), expected);
    // An empty answer is an answer: it ends the turn.
    assert_eq!(shown(&dataset, 2), "a[$]");
    assert_eq!(shown(&dataset, 3), "assistant:[ yes\n]user: no\n$");
    let counts = dataset.manifest().counts;
    assert_eq!((counts.samples, counts.empty_samples, counts.unlearned_samples), (4, 1, 1));
    assert_eq!(counts.learned_tokens, 2 + 4 + 8 + 1 + 5);
}

#[test]
fn rows_hold_whole_samples() {
    let folder = Folder::new();
    let records = [instruction("aaa", "bb"), instruction("c", "d"), instruction("eeeeeeee", "f")];
    let dataset = dataset(&folder, &records);
    let options =
        LoaderOptions { order: Order::Sequential, passes: Passes::One, ..training(3, 9, 0) };
    let mut loader = Loader::new(dataset, options).unwrap();
    let mut samples = Samples::default();
    assert_eq!(loader.next_batch(&mut samples).unwrap(), 2);
    let text = |row: usize, values: &[i32]| -> String {
        let character = |&value: &i32| if value == IGNORE_INDEX { '.' } else { character(value) };
        values[row * 9..(row + 1) * 9].iter().map(character).collect()
    };
    let segments = samples.segments.clone().unwrap();
    // Longest first: nine places, then five and two in one row.
    assert_eq!(text(0, &samples.tokens), "eeeeeeeef");
    assert_eq!(text(0, &samples.targets), ".......f$");
    assert_eq!(segments[..9], [0; 9]);
    assert_eq!(text(1, &samples.tokens), "aaabbcd$$");
    assert_eq!(text(1, &samples.targets), "..bb$d$..");
    assert_eq!(segments[9..18], [0, 0, 0, 0, 0, 1, 1, 2, 2]);
    // A row beyond the last has no targets.
    assert_eq!(text(2, &samples.targets), ".........");
    assert_eq!(loader.next_batch(&mut samples).unwrap(), 0);
    let report = loader.report();
    assert_eq!((report.rows, report.samples, report.padding_tokens), (2, 3, 2));
}

/// With records of 3, 12, 25 and 52 places and rows of 10.
#[test]
fn long_samples_are_left_out_cut_or_refused() {
    let folder = Folder::new();
    let learned = |count: usize| "x".repeat(count);
    let records = [
        instruction("a", "bc"),
        instruction("d", &learned(11)),
        instruction(&"?".repeat(15), &learned(10)),
        instruction(&"!".repeat(42), &learned(10)),
    ];
    let dataset = dataset(&folder, &records);
    let load = |overlong| {
        let options = LoaderOptions { overlong, order: Order::Sequential, ..training(1, 10, 0) };
        Loader::new(Arc::clone(&dataset), options)
    };
    let tokens = |overlong| {
        let mut loader = load(overlong).unwrap();
        let rows = loader.rows_per_epoch() as usize;
        let report = loader.report();
        assert_eq!((report.overlong_samples, report.longest_sample), (3, 52));
        let batches = batches(&mut loader, rows);
        let all = batches.iter().flat_map(|batch| &batch.targets);
        let targets = all.filter(|&&target| target != IGNORE_INDEX).count();
        (rows, report.dropped_samples, targets)
    };
    // What is learned: two and the end; eleven and the end, of which ten fit; ten and the end twice.
    assert_eq!(tokens(Overlong::Drop), (1, 3, 3));
    assert_eq!(tokens(Overlong::Truncate), (2, 2, 3 + 10));
    let (_, dropped, targets) = tokens(Overlong::Split);
    assert_eq!((dropped, targets), (0, 3 + 12 + 11 + 11));
    let error = load(Overlong::Error).unwrap_err().to_string();
    for part in ["3 samples of the training part", "a row of 10 tokens", "a sequence of 52"] {
        assert!(error.contains(part), "{error}");
    }
    // The rows differ: a position of one is not valid for the other.
    let position = load(Overlong::Truncate).unwrap().position();
    let error = load(Overlong::Drop).unwrap().resume(&position).unwrap_err().to_string();
    assert!(error.contains("overlong was Truncate and is Drop now"), "{error}");
    // A position without the field is from a version that truncated.
    let mut written = serde_json::to_value(&position).unwrap();
    written.as_object_mut().unwrap().remove("overlong").unwrap();
    assert_eq!(serde_json::from_value::<Position>(written).unwrap(), position);
    // Nothing is left.
    let options = LoaderOptions { overlong: Overlong::Drop, ..training(1, 2, 0) };
    let error = Loader::new(Arc::clone(&dataset), options).unwrap_err().to_string();
    assert!(error.contains("its 4 samples are longer than a row; a sequence of 52"), "{error}");
}

#[test]
fn long_samples_lose_their_end() {
    let folder = Folder::new();
    let long = "x".repeat(50);
    let records = [instruction("p", &long), instruction(&long, "nothing of it is left")];
    let dataset = dataset(&folder, &records);
    let options = LoaderOptions { overlong: Overlong::Truncate, ..training(1, 10, 0) };
    let mut loader = Loader::new(dataset, options).unwrap();
    let report = loader.report();
    assert_eq!((report.overlong_samples, report.dropped_samples, report.rows), (2, 1, 1));
    let batch = &batches(&mut loader, 1)[0];
    assert_eq!(batch.targets, [i32::from(b'x'); 10]);
    assert_eq!(batch.segments, Some(vec![0; 10]));
}

#[test]
fn samples_are_held_out_whole() {
    let folder = Folder::new();
    let records: Vec<_> = (0..10).map(|i| instruction("question", &i.to_string())).collect();
    let lines: String = records.iter().map(|record| format!("{record}\n")).collect();
    let input = folder.write("samples.jsonl", lines);
    let options = PackOptions { held_out: 0.25, ..folder.options(&[&input]) };
    let summary = packed(&options).unwrap();
    assert_eq!(summary.held_out.from_sample, 7);
    let dataset = Dataset::open(&options.out).unwrap();
    assert_eq!(dataset.sample(7).unwrap().start, summary.held_out.from_token);
    assert_eq!(shown(&dataset, 7), "question[7$]");
}

proptest! {
    #![proptest_config(seeded())]

    /// Every learned token of every sample that fits occurs once per epoch, in the right segment.
    #[test]
    fn each_sample_once_per_epoch(
        lengths in prop::collection::vec((0usize..30, 1usize..30), 1..60),
        sequence in 60usize..90, batch in 1usize..4, seed: u64,
    ) {
        let folder = Folder::new();
        let letter = |i: usize| char::from(b'a' + (i % 26) as u8).to_string();
        let records: Vec<_> = (0..).zip(&lengths)
            .map(|(i, &(prompt, completion))| {
                instruction(&"?".repeat(prompt), &letter(i).repeat(completion))
            })
            .collect();
        let dataset = dataset(&folder, &records);
        let mut expected = BTreeMap::new();
        for number in 0..dataset.manifest().counts.samples {
            *expected.entry(shown(&dataset, number)).or_insert(0) += 1;
        }
        let options = training(batch, sequence, seed);
        let mut loader = Loader::new(Arc::clone(&dataset), LoaderOptions { batch: 1, ..options }).unwrap();
        let rows = loader.rows_per_epoch() as usize;
        let mut first = Vec::new();
        for epoch in 0..2 {
            let mut found = BTreeMap::new();
            let epoch_rows = batches(&mut loader, rows);
            for row in &epoch_rows {
                for sample in samples_of(row) {
                    *found.entry(sample).or_insert(0) += 1;
                }
            }
            prop_assert_eq!(&found, &expected);
            if epoch == 0 {
                first = epoch_rows;
            }
        }
        prop_assert_eq!(loader.epoch(), 2);
        // From any position, in batches of any size.
        let mut position = loader.position();
        (position.epoch, position.row) = (0, seed % rows as u64);
        let mut resumed = Loader::new(dataset, options).unwrap();
        resumed.resume(&position).unwrap();
        let next = &batches(&mut resumed, 1)[0];
        prop_assert_eq!(&next.tokens[..sequence], &first[position.row as usize].tokens[..]);
    }
}

/// The samples of a row as [`shown`] shows them.
fn samples_of(row: &Samples) -> Vec<String> {
    let segments = row.segments.as_ref().unwrap();
    let mut found = Vec::new();
    let mut at = 0;
    for segment in segments.chunk_by(|a, b| a == b) {
        let tokens = &row.tokens[at..at + segment.len()];
        let targets = &row.targets[at..at + segment.len()];
        at += segment.len();
        // Padding has no targets.
        if targets.iter().all(|&target| target == IGNORE_INDEX) {
            continue;
        }
        let mask = targets.iter().position(|&target| target != IGNORE_INDEX).unwrap();
        // Instructions: everything after the prompt is learned.
        let prompt: String = tokens[..=mask].iter().map(|&token| character(token)).collect();
        let learned: String = targets[mask..].iter().map(|&token| character(token)).collect();
        // With an empty prompt, the first token of the answer is not a target.
        let text = match prompt.starts_with('?') {
            true => format!("{prompt}[{learned}]"),
            false => format!("[{prompt}{learned}]"),
        };
        found.push(text);
    }
    found
}

/// From files that are mapped. Blocks are read by other threads, which use buffers again.
#[test]
fn loading_takes_no_memory() {
    let folder = Folder::new();
    for name in ["samples", "text"] {
        let dataset = Arc::new(Dataset::open(&folder.version_1(name)).unwrap());
        let mut loader = Loader::new(dataset, training(4, 64, 0)).unwrap();
        let mut samples = Samples::default();
        // Rows of all lengths.
        (0..50).for_each(|_| assert_eq!(loader.next_batch(&mut samples).unwrap(), 4));
        let before = storm_host::allocation::count();
        for _ in 0..50 {
            loader.next_batch(&mut samples).unwrap();
        }
        assert_eq!(storm_host::allocation::count(), before);
    }
}

#[test]
fn bytes_decode_as_they_come() {
    let tokenizer = Tokenizer::bytes();
    let text = "naïve 🦀 text";
    let ids = tokenizer.encode(text).unwrap();
    assert_eq!(ids.len(), text.len());
    let mut stream = tokenizer.stream();
    let parts: Vec<String> = ids.iter().map(|&id| stream.step(id).unwrap()).collect();
    assert_eq!(parts.concat(), text);
    // A crab takes four bytes, and comes with the last.
    assert_eq!(parts.iter().filter(|part| part.is_empty()).count(), 3 + 1);
    let mut stream = tokenizer.stream();
    assert_eq!(stream.step(0xf0).unwrap(), "");
    assert_eq!(stream.step(256).unwrap(), "");
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
}
