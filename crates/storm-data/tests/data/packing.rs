//! From files to datasets.

use crate::helpers::{Folder, packed};
use std::fs;
use std::path::Path;
use storm_data::{Dataset, IfExists, InputFormat, PackOptions, Split, Tokenizer};

/// The documents of a dataset of bytes.
pub(crate) fn documents(dir: &Path) -> Vec<String> {
    let dataset = Dataset::open(dir).unwrap();
    dataset.verify(&|_| {}).unwrap();
    (0..dataset.manifest().counts.samples)
        .map(|number| {
            let range = dataset.sample(number).unwrap();
            let mut tokens = vec![0; (range.end - range.start) as usize];
            dataset.read_tokens(range.start, &mut tokens, &mut Vec::new()).unwrap();
            assert_eq!(tokens.pop(), Some(256), "documents end with the end of text");
            let ids: Vec<u32> = tokens.iter().map(|&token| token as u32).collect();
            Tokenizer::bytes().decode(&ids).unwrap()
        })
        .collect()
}

#[test]
fn files_are_documents() {
    let folder = Folder::new();
    let long = "Ünïcödé, and more of it.\n".repeat(30);
    let files = [
        folder.write("a.txt", "first"),
        folder.write("empty.txt", ""),
        folder.write("b.md", format!("\u{feff}{long}")),
        folder.write("c.txt", "\n"),
    ];
    let files: Vec<&Path> = files.iter().map(|path| path.as_path()).collect();
    let summary = packed(&folder.options(&files)).unwrap();
    assert_eq!(documents(&folder.path("out")), ["first", &long, "\n"]);
    let counts = summary.counts;
    assert_eq!((counts.samples, counts.empty_samples, counts.input_files), (3, 1, 4));
    assert_eq!(counts.tokens, (5 + long.len() + 1 + 3) as u64);
    assert_eq!(counts.learned_tokens, counts.tokens);
    // One of tokens, one of starts.
    assert_eq!(summary.shards, 2);
}

#[test]
fn files_may_hold_several_documents() {
    let check = |text: &str, expected: &[&str], empty: u64| {
        let folder = Folder::new();
        let input = folder.write("a.txt", text);
        let options = PackOptions { shard_tokens: 1 << 24, ..folder.options(&[&input]) };
        let counts = packed(&options).unwrap().counts;
        assert_eq!((counts.empty_samples, counts.samples), (empty, expected.len() as u64));
        assert!(documents(&options.out) == expected);
    };
    check("one<|endoftext|>two", &["one", "two"], 0);
    check("one\r\n<|endoftext|>\n\ntwo\n<|endoftext|>\n", &["one", "two"], 0);
    check("\none\n<|endoftext|><|endoftext|> two\n", &["\none", " two\n"], 1);
    check("not <|endoftex at all\n", &["not <|endoftex at all\n"], 0);
    // Separators at every place around the boundaries of reading, and documents longer than a read.
    for shift in 0..14 {
        let first = "é".repeat(shift) + &"a line\n".repeat((1 << 20) / 7 - 2);
        let last = "more\n".repeat(300_000);
        let text = format!("{first}\n<|endoftext|>\n{last}<|endoftext|>short");
        check(&text, &[first.trim_end(), last.trim_end(), "short"], 0);
    }
}

#[test]
fn records_of_text_are_documents() {
    let folder = Folder::new();
    let input = folder.write(
        "a.jsonl",
        "{\"text\": \"one\", \"meta\": {\"x\": [1]}}\n\n  \n{\"text\":\"\"}\r\n{\"text\":\"two\\n\\u00e9\"}",
    );
    let plain = folder.write("b.txt", "three");
    let summary = packed(&folder.options(&[&input, &plain])).unwrap();
    assert_eq!(documents(&folder.path("out")), ["one", "two\né", "three"]);
    assert_eq!(summary.counts.empty_samples, 1);
}

#[test]
fn long_texts_are_packed_in_pieces() {
    let folder = Folder::new();
    // Multibyte characters cross every read boundary.
    let lines: String = (0..200_000).map(|i| format!("línea número {i}\n")).collect();
    let input = folder.write("long.txt", &lines);
    let record = serde_json::json!({ "text": lines }).to_string();
    let records = folder.write("long.jsonl", record);
    for input in [&input, &records] {
        let options = PackOptions {
            shard_tokens: 1 << 20,
            if_exists: IfExists::Replace,
            ..folder.options(&[input])
        };
        packed(&options).unwrap();
        assert!(documents(&options.out) == [lines.as_str()]);
    }
}

#[test]
fn the_same_input_gives_the_same_dataset() {
    let folder = Folder::new();
    let records: String =
        (0..20_000).map(|i| format!("{{\"text\": \"document number {i} of many\"}}\n")).collect();
    let input = folder.write("a.jsonl", records);
    let pack = |threads| {
        let options = PackOptions {
            threads,
            shard_tokens: 100_000,
            held_out: 0.1,
            if_exists: IfExists::Replace,
            ..folder.options(&[&input])
        };
        packed(&options).unwrap().id
    };
    let first = pack(1);
    assert_eq!(pack(4), first);
    assert_eq!(Dataset::open(&folder.path("out")).unwrap().id(), first);
}

#[test]
fn the_end_is_held_out() {
    let check = |texts: &[&str], share: f64, tokens: u64, samples: u64| {
        let folder = Folder::new();
        let name = |i: usize| format!("{i}.txt");
        let files: Vec<_> =
            (0..).zip(texts).map(|(i, text)| folder.write(&name(i), text)).collect();
        let files: Vec<&Path> = files.iter().map(|path| path.as_path()).collect();
        let options = PackOptions { held_out: share, ..folder.options(&files) };
        packed(&options).unwrap();
        let dataset = Dataset::open(&options.out).unwrap();
        let (train, held) = (dataset.token_range(Split::Train), dataset.token_range(Split::Held));
        assert_eq!((train.start, train.end), (0, held.start));
        assert_eq!(held.end - held.start, tokens, "{texts:?}");
        let held = dataset.sample_range(Split::Held);
        assert_eq!(held.end - held.start, samples, "{texts:?}");
    };
    // Inside of the only document.
    check(&["nine byte"], 0.2, 2, 0);
    check(&["nine byte"], 0.0, 0, 0);
    // Between two documents: ten tokens each, eight wanted.
    check(&["nine byte", "nine byte", "nine byte", "nine byte"], 0.2, 10, 1);
    check(&["nine byte", "nine byte", "nine byte", "nine byte"], 0.3, 10, 1);
    check(&["nine byte", "nine byte", "nine byte", "nine byte"], 0.5, 20, 2);
}

#[test]
fn bad_input_is_named() {
    let folder = Folder::new();
    let check = |name: &str, content: &[u8], expected: &str| {
        let input = folder.write(name, content);
        let error = packed(&folder.options(&[&input])).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(expected), "{error}");
        fs::remove_file(input).unwrap();
        assert!(folder.names().is_empty(), "{:?}", folder.names());
    };
    check("a.txt", b"abc\xff", "not UTF-8 text at byte 3");
    check("a.txt", "cut off é".as_bytes().split_last().unwrap().1, "not UTF-8 text at byte 8");
    check("a.txt", b"", "nothing in it to pack");
    check("a.jsonl", b"\n\n", "nothing in it to pack");
    check("a.jsonl", b"{\"text\": \"a\"}\n{\"text\": 5}", "line 2: invalid type");
    check("a.jsonl", b"{\"text\": \"a\"}\nnonsense", "line 2: expected ident");
    check("a.jsonl", b"{\"text\": \"a\"}\n[1]", "line 2");
    check("a.jsonl", b"{\"txt\": \"a\"}", "line 1: has neither `text`");
    check("a.jsonl", b"{\"prompt\": \"a\"}", "line 1: has neither `text`");
    check("a.jsonl", b"{\"text\": \"\xff\"}", "line 1: is not UTF-8");
    check("a.jsonl", &[b'['; 100_000], "line 1");
    let chat = br#"{"messages": [{"role": "alien", "content": "x"}]}"#;
    check("a.jsonl", chat, "line 1: message 1: role `alien` is unknown; roles are system");
    let many = vec![r#"{"role":"user","content":""}"#; (1 << 16) + 1].join(",");
    let chat = r#"{"messages": [{"role": "user", "content": "x"}]}"#;
    let many = format!("{chat}\n{{\"messages\": [{many}]}}");
    check("a.jsonl", many.as_bytes(), "line 2: more than 65536 messages in a record; split it");
    let mixed = b"{\"text\": \"a\"}\n{\"prompt\": \"a\", \"completion\": \"b\"}";
    check("a.jsonl", mixed, "line 2: is a chat or an instruction");
    let mixed = b"{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"text\": \"a\"}";
    check("a.jsonl", mixed, "line 2: is text");
    let error = packed(&folder.options(&[&folder.path("missing")])).unwrap_err().to_string();
    assert!(error.contains("missing: No such file"), "{error}");
    let error = packed(&folder.options(&[Path::new("/dev/zero")])).unwrap_err().to_string();
    assert!(error.contains("/dev/zero: is a device, not a plain file"), "{error}");
}

#[test]
fn impossible_options() {
    let folder = Folder::new();
    let input = folder.write("a.txt", "text");
    let good = folder.options(&[&input]);
    let check = |options: PackOptions, expected: &str| {
        let error = packed(&options).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(folder.names(), ["a.txt"]);
    };
    check(PackOptions { inputs: Vec::new(), ..good.clone() }, "input");
    for share in [-0.1, 1.0, f64::NAN] {
        check(PackOptions { held_out: share, ..good.clone() }, "held out");
    }
    check(PackOptions { threads: 0, ..good.clone() }, "threads");
    check(PackOptions { shard_tokens: 0, ..good.clone() }, "shard tokens");
    check(PackOptions { out: "/".into(), ..good.clone() }, "/");
    check(PackOptions { end_of_text: Some("</s>".into()), ..good.clone() }, "end of text");
    check(PackOptions { format: InputFormat::Jsonl, ..good }, "line 1");
}

#[test]
fn what_is_there_is_kept() {
    let folder = Folder::new();
    let input = folder.write("a.txt", "text");
    let refuse = folder.options(&[&input]);
    let replace = PackOptions { if_exists: IfExists::Replace, ..refuse.clone() };
    // An empty folder is nothing.
    fs::create_dir(&refuse.out).unwrap();
    packed(&refuse).unwrap();
    let error = packed(&refuse).unwrap_err().to_string();
    assert!(error.contains("exists already") && error.contains("--overwrite"), "{error}");
    // A dataset is replaced, but only by a complete one.
    let bad = folder.write("bad.txt", b"\xff");
    packed(&PackOptions { inputs: vec![bad], ..replace.clone() }).unwrap_err();
    assert_eq!(documents(&refuse.out), ["text"]);
    folder.write("a.txt", "other");
    packed(&replace).unwrap();
    assert_eq!(documents(&refuse.out), ["other"]);
    // A dataset with something else in it is not.
    fs::write(refuse.out.join("thesis.tex"), "x").unwrap();
    let error = packed(&replace).unwrap_err().to_string();
    assert!(error.contains("holds thesis.tex"), "{error}");
    assert!(refuse.out.join("thesis.tex").is_file());
    // Nor is anything else.
    for name in ["precious", "file"] {
        let out = folder.path(name);
        match name {
            "file" => fs::write(&out, "x").unwrap(),
            _ => {
                fs::create_dir(&out).unwrap();
                fs::write(out.join("thesis.tex"), "x").unwrap();
            }
        }
        packed(&PackOptions { out: out.clone(), ..replace.clone() }).unwrap_err();
        assert!(out.exists());
    }
    assert_eq!(folder.names(), ["a.txt", "bad.txt", "file", "out", "precious"]);
}
