//! Packing takes no more memory than docs/data.md says.

use crate::helpers::{Folder, rerun, rerun_folder};
use std::fs;
use storm_data::{PackOptions, SHARD_TOKENS_DEFAULT, pack};

/// Packs the folder's `a.jsonl` on eight threads in a child process; returns its output and its peak memory.
fn peak_of_packing(test: &str, content: &str) -> (String, u64) {
    let folder = Folder::new();
    folder.write("a.jsonl", content);
    let output = rerun(test, &folder);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let line = |start: &str| text.lines().find_map(|line| line.strip_prefix(start)).unwrap();
    let kilobytes = line("VmHWM:").trim().trim_end_matches(" kB").parse::<u64>().unwrap();
    (line("packed: ").to_owned(), kilobytes << 10)
}

/// The other process.
fn pack_and_report(folder: &Folder) {
    let options = PackOptions {
        threads: 8,
        shard_tokens: SHARD_TOKENS_DEFAULT,
        ..folder.options(&[&folder.path("a.jsonl")])
    };
    let result = pack(&options, &|_| {});
    println!("\npacked: {:?}", result.map(|summary| summary.counts.tokens));
    println!("{}", fs::read_to_string("/proc/self/status").unwrap());
}

/// A long line takes less than the stated 16 bytes per byte of input, which also cover short lines.
#[test]
fn a_long_record_takes_what_is_stated() {
    if let Some(folder) = rerun_folder() {
        return pack_and_report(&folder);
    }
    let bytes = 24 << 20;
    let answer = "answer\n".repeat(bytes / 7);
    let record = serde_json::json!({"prompt": "", "completion": answer}).to_string();
    let (packed, peak) = peak_of_packing("memory::a_long_record_takes_what_is_stated", &record);
    assert_eq!(packed, format!("Ok({})", answer.len() + 1));
    assert!(peak < 11 * record.len() as u64, "{} MiB", peak >> 20);
}

/// A message takes many times the memory of its text, so millions of them are refused before they are parsed.
#[test]
fn millions_of_messages_are_refused_in_little_memory() {
    if let Some(folder) = rerun_folder() {
        return pack_and_report(&folder);
    }
    let mut record = r#"{"messages": [{"role":"user","content":""}"#.to_owned();
    record += &r#",{"role":"user","content":""}"#.repeat(2_000_000);
    record += "]}";
    let test = "memory::millions_of_messages_are_refused_in_little_memory";
    let (packed, peak) = peak_of_packing(test, &record);
    assert!(packed.contains("Line(1)") && packed.contains("more than 65536 messages"), "{packed}");
    assert!(peak < 4 * record.len() as u64, "{} MiB", peak >> 20);
}
