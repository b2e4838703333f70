//! Records that cannot be packed, skipped and counted.

use crate::containers::{gzip, parquet_in_groups, paths, with_huge_page};
use crate::helpers::{Folder, packed};
use crate::packing::documents;
use std::path::{Path, PathBuf};
use storm_data::{DataError, PackOptions, PackSummary};
use storm_host::allocation::peak_bytes;

fn pack(folder: &Folder, inputs: &[PathBuf]) -> Result<PackSummary, DataError> {
    let inputs: Vec<&Path> = inputs.iter().map(|path| path.as_path()).collect();
    packed(&PackOptions { skip_bad: true, threads: 3, ..folder.options(&inputs) })
}

#[test]
fn bad_records_are_counted_and_the_first_are_named() {
    let folder = Folder::new();
    let lines = b"nonsense\n{\"text\": \"one\"}\n{\"txt\": \"a\"}\n{\"text\": \"\xff\"}\n\
                  {\"prompt\": \"a\", \"completion\": \"b\"}\n{\"text\": \"two\"}\n[1]";
    let inputs = paths(
        &folder,
        &[
            ("a.jsonl", lines),
            ("b.json", b"[{\"text\": 5}, {\"text\": \"three\"}, {\"a\": }]"),
            ("c.csv", b"text,b\nfour,1\nx\n\xff,2\n"),
        ],
    );
    let summary = pack(&folder, &inputs).unwrap();
    assert_eq!(documents(&folder.path("out")), ["one", "two", "three", "four"]);
    assert_eq!((summary.counts.samples, summary.counts.skipped), (4, 9));
    assert_eq!(summary.skipped.len(), 5, "{:?}", summary.skipped);
    for (told, expected) in summary.skipped.iter().zip([
        "a.jsonl, line 1: expected",
        "a.jsonl, line 3: has neither",
        "a.jsonl, line 4: is not UTF-8",
        "a.jsonl, line 5: is a chat",
        "a.jsonl, line 7: invalid type",
    ]) {
        assert!(told.contains(expected), "{told}");
    }
}

#[test]
fn what_is_left_is_the_dataset_without_them() {
    let good: Vec<String> =
        (0..30_000).map(|number| format!("{{\"text\": \"document {number}\"}}\n")).collect();
    let folders = [Folder::new(), Folder::new()];
    let mixed: String = good.iter().map(|line| line.clone() + "{\"tex\n").collect();
    let texts = [good.concat(), mixed];
    let ids = texts.iter().zip(&folders).map(|(text, folder)| {
        let input = folder.write("a.jsonl", text);
        let summary = pack(folder, &[input]).unwrap();
        let shards = std::fs::read(folder.path("out/shard-00000.storm")).unwrap();
        (summary.counts.tokens, shards)
    });
    let ids: Vec<_> = ids.collect();
    assert!(ids[0] == ids[1]);
}

#[test]
fn refused_chats_are_skipped_but_not_a_missing_template() {
    let folder = Folder::new();
    let chat = |role: &str| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"hi\"}}, \
             {{\"role\": \"{role}\", \"content\": \"ho\"}}]}}\n"
        )
    };
    let lines = chat("assistant") + &chat("alien") + &chat("assistant");
    let input = folder.write("a.jsonl", lines);
    let summary = pack(&folder, std::slice::from_ref(&input)).unwrap();
    assert_eq!((summary.counts.samples, summary.counts.skipped), (2, 1));
    assert!(summary.skipped[0].contains("line 2: message 2: role `alien`"), "{summary:?}");
    // That no chat can be rendered is not the fault of a record.
    let options = PackOptions {
        skip_bad: true,
        out: folder.path("other"),
        chat_template: storm_data::ChatTemplate::OfTokenizer,
        ..folder.options(&[&input])
    };
    let error = packed(&options).unwrap_err().to_string();
    assert!(error.contains("--chat-template"), "{error}");
}

#[test]
fn files_that_are_not_text_are_skipped_as_a_whole() {
    let folder = Folder::new();
    let long = [&b"text ".repeat(1 << 20)[..], b"\xff"].concat();
    let files: [(&str, &[u8]); 3] =
        [("a.txt", &long), ("b.txt", b"good"), ("c.txt.gz", &gzip(b"\xff\xff"))];
    let inputs = paths(&folder, &files);
    let summary = pack(&folder, &inputs).unwrap();
    assert_eq!(documents(&folder.path("out")), ["good"]);
    assert_eq!(summary.counts.skipped, 2);
    assert!(summary.skipped[0].contains("a.txt: is not UTF-8 text at byte 5242880"), "{summary:?}");
}

#[test]
fn records_that_are_too_long_are_passed_over_in_little_memory() {
    let folder = Folder::new();
    let long = " ".repeat(70 << 20);
    let files: [(&str, &str); 3] = [
        ("a.jsonl.gz", &format!("{{\"text\": \"{long}\"}}\n{{\"text\": \"one\"}}")),
        ("b.json.gz", &format!("[{{\"text\": \"{long}\"}}, {{\"text\": \"two\"}}]")),
        ("c.csv.gz", &format!("text\n\"{long}\"\nthree\n")),
    ];
    let inputs: Vec<PathBuf> =
        files.iter().map(|(name, text)| folder.write(name, gzip(text.as_bytes()))).collect();
    let (summary, peak) = peak_bytes(|| pack(&folder, &inputs));
    let summary = summary.unwrap();
    assert_eq!(documents(&folder.path("out")), ["one", "two", "three"]);
    assert_eq!(summary.counts.skipped, 3);
    assert!(peak < 224 << 20, "{peak}");
}

/// Rows of three groups of a Parquet file, each over several pages.
fn groups() -> Vec<Vec<String>> {
    let text = |group: usize, row: usize| format!("group {group}, row {row}: {}", "x".repeat(row));
    (0..3).map(|group| (0..400).map(|row| text(group, row)).collect()).collect()
}

/// What comes before the damage is packed, the rest of the row group is counted, and the groups after it are packed.
#[test]
fn a_damaged_page_of_parquet_costs_the_rest_of_its_row_group() {
    let folder = Folder::new();
    let groups = groups();
    let (mut bytes, pages) = parquet_in_groups(&groups);
    let middle = pages[1].start + pages[1].len() / 2;
    bytes[middle..middle + 600].fill(0xff);
    let inputs = paths(&folder, &[("a.parquet", &bytes)]);
    let summary = pack(&folder, &inputs).unwrap();
    let documents = documents(&folder.path("out"));
    let lost = 1200 - documents.len();
    assert!((1..400).contains(&lost), "{lost} rows are lost: {:?} {pages:?}", summary.skipped);
    let kept = [&groups[0][..], &groups[1][..400 - lost], &groups[2][..]].concat();
    assert!(documents == kept);
    assert_eq!(summary.counts.skipped, lost as u64);
    let expected = format!("a.parquet, rows {} to 800: ", 801 - lost);
    assert!(summary.skipped[0].contains(&expected), "{:?}", summary.skipped);
    // Without --skip-bad it ends the command.
    let options = PackOptions { out: folder.path("other"), ..folder.options(&[&inputs[0]]) };
    assert!(matches!(packed(&options), Err(DataError::Input { .. })));
}

/// A page that ends the process which reads it costs no more than one that is an error.
#[test]
fn a_row_group_that_ends_the_process_is_skipped() {
    let folder = Folder::new();
    let groups = groups();
    let (whole, pages) = parquet_in_groups(&groups);
    let bytes = with_huge_page(&whole, pages[2].start);
    let inputs = paths(&folder, &[("a.parquet", &bytes)]);
    let summary = pack(&folder, &inputs).unwrap();
    assert!(documents(&folder.path("out")) == groups[..2].concat());
    assert_eq!(summary.counts.skipped, 400);
    assert!(summary.skipped[0].contains("rows 801 to 1200: "), "{:?}", summary.skipped);
}

#[test]
fn nothing_but_bad_records_is_an_error() {
    let folder = Folder::new();
    let inputs = paths(&folder, &[("a.jsonl", b"1\n2\n")]);
    let error = pack(&folder, &inputs).unwrap_err().to_string();
    assert!(error.contains("none of the records can be packed; the first: "), "{error}");
    assert!(error.contains("line 1"), "{error}");
    let inputs = paths(&folder, &[("b.txt", b"\xff")]);
    let error = pack(&folder, &inputs).unwrap_err().to_string();
    assert!(error.contains("all of it was skipped; the first: "), "{error}");
}
