//! The same records in every kind of file, and files that are damaged or lie about what they hold.

use crate::helpers::{Folder, packed};
use crate::packing::documents;
use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use storm_data::{DataError, IfExists, InputFormat, Kind, PackOptions};
use storm_graph::random::Random;
use storm_host::allocation::peak_bytes;

/// More than a megabyte of input in flight needs, and far less than a bomb unfolds to.
const MEMORY_MAX: isize = 48 << 20;

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub(crate) fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(bytes, 3).unwrap()
}

fn codecs() -> [Compression; 6] {
    [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::ZSTD(ZstdLevel::default()),
        Compression::GZIP(GzipLevel::default()),
        Compression::LZ4,
        Compression::LZ4_RAW,
    ]
}

/// One column of a Parquet file: values with their levels.
struct ParquetColumn {
    values: Vec<String>,
    definitions: Option<Vec<i16>>,
    repetitions: Option<Vec<i16>>,
}

fn parquet(schema: &str, codec: Compression, columns: Vec<ParquetColumn>) -> Vec<u8> {
    parquet_groups(schema, codec, vec![columns], true)
}

/// A file with several row groups, in whose columns each value may be written once.
fn parquet_groups(
    schema: &str,
    codec: Compression,
    groups: Vec<Vec<ParquetColumn>>,
    has_dictionary: bool,
) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = WriterProperties::builder()
        .set_compression(codec)
        .set_data_page_size_limit(2000)
        .set_write_batch_size(10)
        .set_dictionary_enabled(has_dictionary)
        .build();
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, Arc::new(properties)).unwrap();
    for columns in groups {
        let mut group = writer.next_row_group().unwrap();
        for column in columns {
            let values: Vec<ByteArray> =
                column.values.iter().map(|value| value.as_str().into()).collect();
            let mut writer = group.next_column().unwrap().unwrap();
            let (definitions, repetitions) = (column.definitions, column.repetitions);
            writer
                .typed::<ByteArrayType>()
                .write_batch(&values, definitions.as_deref(), repetitions.as_deref())
                .unwrap();
            writer.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
    bytes
}

/// A table of required columns of text.
fn parquet_texts(columns: &[(&str, Vec<String>)], codec: Compression) -> Vec<u8> {
    let fields: String =
        columns.iter().map(|(name, _)| format!("required byte_array {name} (utf8);")).collect();
    let columns = columns.iter().map(|(_, values)| ParquetColumn {
        values: values.clone(),
        definitions: None,
        repetitions: None,
    });
    parquet(&format!("message schema {{ {fields} }}"), codec, columns.collect())
}

/// Texts in row groups, and where the pages of each group begin and end.
pub(crate) fn parquet_in_groups(groups: &[Vec<String>]) -> (Vec<u8>, Vec<std::ops::Range<usize>>) {
    let column = |values: &Vec<String>| {
        vec![ParquetColumn { values: values.clone(), definitions: None, repetitions: None }]
    };
    let schema = "message schema { required byte_array text (utf8); }";
    let columns = groups.iter().map(column).collect();
    let bytes = parquet_groups(schema, Compression::SNAPPY, columns, false);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes).unwrap();
    let reader = SerializedFileReader::new(file).unwrap();
    let pages = reader.metadata().row_groups().iter().map(|group| {
        let (start, length) = group.column(0).byte_range();
        start as usize..(start + length) as usize
    });
    (bytes, pages.collect())
}

/// The file with a page at `at` that says that it unfolds to 2^31 - 1 bytes, which the process that reads it does not get.
/// What comes after it moves.
pub(crate) fn with_huge_page(whole: &[u8], at: usize) -> Vec<u8> {
    // The sizes are the second and third number of its header.
    assert_eq!([whole[at], whole[at + 2]], [0x15, 0x15], "{:?}", &whole[at..at + 20]);
    let mut bytes = whole[..at + 3].to_vec();
    let number = |bytes: &[u8]| 1 + bytes.iter().position(|byte| byte & 0x80 == 0).unwrap();
    let length = number(&whole[at + 3..]);
    bytes.extend([0xfe, 0xff, 0xff, 0xff, 0x0f]);
    bytes.extend(&whole[at + 3 + length..]);
    bytes
}

/// Chats as Hugging Face exports them: lists of structs. Of each message role and content, of which the content may be
/// null.
fn parquet_chats(chats: &[Vec<[&str; 2]>], codec: Compression) -> Vec<u8> {
    let schema = "message schema { required int64 id; optional group messages (list) { repeated group list { \
                  optional group element { optional byte_array role (utf8); optional byte_array content (utf8); \
                  optional byte_array name (utf8); } } } }"
        .replace("required int64 id; ", "required byte_array id (utf8); ");
    let levels = |present: i16| -> ParquetColumn {
        let messages = || chats.iter().flat_map(|chat| chat.iter().enumerate());
        ParquetColumn {
            values: Vec::new(),
            definitions: Some(messages().map(|_| present).collect()),
            repetitions: Some(messages().map(|(at, _)| i16::from(at > 0)).collect()),
        }
    };
    let texts = |field: usize| ParquetColumn {
        values: chats.iter().flatten().map(|message| message[field].to_owned()).collect(),
        ..levels(4)
    };
    let ids = ParquetColumn {
        values: (0..chats.len()).map(|id| id.to_string()).collect(),
        definitions: None,
        repetitions: None,
    };
    parquet(&schema, codec, vec![ids, texts(0), texts(1), levels(3)])
}

/// A cell of CSV.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

fn table(delimiter: &str, header: &[&str], rows: &[Vec<String>]) -> String {
    let mut text = header.join(delimiter) + "\r\n";
    for row in rows {
        let cells: Vec<String> = row.iter().map(|cell| quoted(cell)).collect();
        text += &(cells.join(delimiter) + "\r\n");
    }
    text
}

/// The files of a dataset, without what is said of the files that it was made of.
fn content(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let mut bytes = fs::read(&path).unwrap();
        if name == "dataset.json" {
            let mut json: Value = serde_json::from_slice(&bytes).unwrap();
            json["counts"]["input_bytes"] = 0.into();
            bytes = serde_json::to_vec(&json).unwrap();
        }
        if name != "dataset.sha256" {
            files.insert(name, bytes);
        }
    }
    files
}

/// Packs each file with several numbers of threads, and compares all datasets with that of the first.
fn check_same(kind: Kind, files: &[(String, Vec<u8>)]) {
    let folder = Folder::new();
    let mut first = None;
    for (name, bytes) in files {
        let input = folder.write(name, bytes);
        for threads in [1, 3] {
            let options = PackOptions {
                threads,
                held_out: 0.2,
                shard_tokens: 1 << 15,
                if_exists: IfExists::Replace,
                ..folder.options(&[&input])
            };
            let summary = packed(&options).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!((summary.kind, summary.counts.input_bytes), (kind, bytes.len() as u64));
            let content = content(&options.out);
            assert!(*first.get_or_insert_with(|| content.clone()) == content, "{name}, {threads}");
        }
    }
}

/// The file, and the same in gzip and zstd.
fn compressed(name: &str, bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    // Two members are one file.
    let (begin, end) = bytes.split_at(bytes.len() / 2);
    vec![
        (name.to_owned(), bytes.to_vec()),
        (format!("{name}.gz"), [gzip(begin), gzip(end)].concat()),
        (format!("{name}.zst"), [zstd(begin), zstd(end)].concat()),
        // The name does not say it, the first bytes do.
        (format!("also-{name}"), zstd(bytes)),
    ]
}

fn texts() -> Vec<String> {
    let words =
        ["storm", "naïve", "a, b", "\"quoted\"", "tab\there", "two\nlines", "{\"text\"}", "\\"];
    let mut random = Random(3);
    let document = |_| -> String {
        let count = 1 + random.below(40);
        (0..count).map(|_| words[random.below(words.len())].to_owned() + " ").collect()
    };
    (0..400).map(document).collect()
}

fn lines(records: &[Value]) -> String {
    records.iter().map(|record| format!("{record}\n")).collect()
}

#[test]
fn documents_are_the_same_from_every_file() {
    let texts = texts();
    let records: Vec<Value> = texts.iter().map(|text| json!({"id": 1, "text": text})).collect();
    let rows: Vec<Vec<String>> =
        texts.iter().map(|text| vec!["1".to_owned(), text.clone()]).collect();
    let header = ["id", "text"];
    let mut files = compressed("a.jsonl", lines(&records).as_bytes());
    files.extend(compressed("a.txt", texts.join("<|endoftext|>").as_bytes()));
    files.extend(compressed("a.json", serde_json::to_string_pretty(&records).unwrap().as_bytes()));
    files.extend(compressed("a.csv", table(",", &header, &rows).as_bytes()));
    files.extend(compressed("a.tsv", table("\t", &header, &rows).as_bytes()));
    // Several values one after another, and a byte order mark.
    files.push(("b.json".to_owned(), format!("\u{feff} {}", lines(&records)).into_bytes()));
    files
        .push(("b.csv".to_owned(), format!("\u{feff}{}", table(",", &header, &rows)).into_bytes()));
    for (number, codec) in codecs().into_iter().enumerate() {
        let ids = vec!["1".to_owned(); texts.len()];
        let bytes = parquet_texts(&[("id", ids), ("text", texts.clone())], codec);
        files.push((format!("{number}.parquet"), bytes));
    }
    check_same(Kind::Text, &files);
}

#[test]
fn instructions_are_the_same_from_every_file() {
    let texts = texts();
    let pairs: Vec<(&String, &String)> = texts.iter().zip(texts.iter().rev()).collect();
    let records: Vec<Value> = pairs
        .iter()
        .map(|(prompt, completion)| json!({"completion": completion, "prompt": prompt}))
        .collect();
    let rows: Vec<Vec<String>> = pairs
        .iter()
        .map(|&(prompt, completion)| vec![completion.clone(), prompt.clone()])
        .collect();
    let columns = [
        ("prompt", pairs.iter().map(|(prompt, _)| (*prompt).clone()).collect()),
        ("completion", pairs.iter().map(|(_, completion)| (*completion).clone()).collect()),
    ];
    let files = [
        ("a.jsonl".to_owned(), lines(&records).into_bytes()),
        ("a.json.gz".to_owned(), gzip(serde_json::to_string(&records).unwrap().as_bytes())),
        ("a.tsv".to_owned(), table("\t", &["completion", "prompt"], &rows).into_bytes()),
        ("a.parquet".to_owned(), parquet_texts(&columns, Compression::SNAPPY)),
    ];
    check_same(Kind::Samples, &files);
}

#[test]
fn chats_are_the_same_from_every_file() {
    let texts = texts();
    let chats: Vec<Vec<[&str; 2]>> = texts
        .chunks(4)
        .map(|parts| {
            let message = |(at, text)| [["user", "assistant"][at % 2], text];
            parts.iter().map(String::as_str).enumerate().map(message).collect()
        })
        .collect();
    let messages: Vec<Value> = chats
        .iter()
        .map(|chat| {
            chat.iter().map(|[role, content]| json!({"role": role, "content": content})).collect()
        })
        .collect();
    let records: Vec<Value> =
        messages.iter().map(|messages| json!({"messages": messages})).collect();
    let cells: Vec<String> = messages.iter().map(ToString::to_string).collect();
    let rows: Vec<Vec<String>> = cells.iter().map(|cell| vec![cell.clone()]).collect();
    let shared: Vec<Value> = chats
        .iter()
        .map(|chat| {
            let said = chat.iter().map(|[role, content]| json!({"from": role, "value": content}));
            json!({"conversations": said.collect::<Vec<_>>()})
        })
        .collect();
    let files = [
        ("a.jsonl".to_owned(), lines(&records).into_bytes()),
        ("b.jsonl".to_owned(), lines(&shared).into_bytes()),
        ("a.json".to_owned(), serde_json::to_vec(&records).unwrap()),
        ("a.csv".to_owned(), table(",", &["messages"], &rows).into_bytes()),
        ("text.parquet".to_owned(), parquet_texts(&[("messages", cells)], Compression::LZ4_RAW)),
        ("list.parquet".to_owned(), parquet_chats(&chats, Compression::ZSTD(ZstdLevel::default()))),
    ];
    check_same(Kind::Samples, &files);
}

#[test]
fn tasks_are_chats_in_tables_too() {
    let rows = [["do", "", "done"], ["add", "1 2", "3"]].map(|row| row.map(str::to_owned).to_vec());
    let records: Vec<Value> = rows
        .iter()
        .map(|row| json!({"instruction": row[0], "input": row[1], "output": row[2]}))
        .collect();
    let header = ["instruction", "input", "output"];
    let files = [
        ("a.jsonl".to_owned(), lines(&records).into_bytes()),
        ("a.csv".to_owned(), table(",", &header, &rows).into_bytes()),
    ];
    check_same(Kind::Samples, &files);
}

#[test]
fn a_json_file_may_be_one_record() {
    let folder = Folder::new();
    let input = folder.write("a.json", r#" {"text": "one [\" \\\" {", "more": [{}, "]"]} "#);
    packed(&folder.options(&[&input])).unwrap();
    assert_eq!(documents(&folder.path("out")), ["one [\" \\\" {"]);
}

#[test]
fn folders_are_read_by_name_and_whatever_is_in_them() {
    let folder = Folder::new();
    for dir in ["in", "in/b", "in/b/a", "in/.hidden"] {
        fs::create_dir(folder.path(dir)).unwrap();
    }
    folder.write("in/c.txt", "third");
    folder.write("in/b/a/x.jsonl.gz", gzip(br#"{"text": "first"}"#));
    folder.write("in/b/z.csv", "text\nsecond\n");
    folder.write("in/.hidden/a.txt", "hidden");
    folder.write("in/b/script.py", "import this");
    let options =
        PackOptions { if_exists: IfExists::Replace, ..folder.options(&[&folder.path("in")]) };
    let summary = packed(&options).unwrap();
    assert_eq!(documents(&options.out), ["first", "second", "third"]);
    assert_eq!(summary.counts.input_files, 3);
    assert!(summary.passed_over.iter().eq([&folder.path("in/b/script.py")]), "{summary:?}");
    // One format alone.
    let options = PackOptions { format: InputFormat::Csv, ..options };
    packed(&options).unwrap();
    assert_eq!(documents(&options.out), ["second"]);
    let options = PackOptions { format: InputFormat::Json, ..options };
    let error = packed(&options).unwrap_err().to_string();
    for part in ["nothing that can be packed", "1 .csv", "1 .gz", "1 .py", "1 .txt"] {
        assert!(error.contains(part), "{error}");
    }
    fs::create_dir(folder.path("empty")).unwrap();
    let error = packed(&folder.options(&[&folder.path("empty")])).unwrap_err().to_string();
    assert!(error.contains("it has no files"), "{error}");
}

/// Packs a file in little memory, and returns what is wrong with it.
#[track_caller]
fn refusal(name: &str, bytes: &[u8]) -> String {
    let folder = Folder::new();
    let input = folder.write(name, bytes);
    let (result, peak) = peak_bytes(|| packed(&folder.options(&[&input])));
    assert!(peak < MEMORY_MAX, "{name} took {peak} bytes");
    let error = result.expect_err(name);
    let is_typed = matches!(error, DataError::Input { .. } | DataError::Record { .. });
    assert!(is_typed && error.to_string().contains(name), "{error:?}");
    assert!(!folder.path("out").exists());
    error.to_string()
}

#[test]
fn bad_tables_and_values_are_named() {
    let check = |name: &str, bytes: &[u8], expected: &str| {
        let refusal = refusal(name, bytes);
        assert!(refusal.contains(expected), "{refusal}");
    };
    check("a.csv", b"a,b\n1,2\n", "it has a, b; it needs `text`");
    check("a.csv", b"text,text\n1,2\n", "two columns `text`");
    check("a.csv", b"text,b\nx,1\ny\n", "row 2: has 1 cells, and the header 2");
    check("a.csv", b"text\nx\n\xff\n", "row 2: `text` is not UTF-8 text");
    check("a.csv", b"prompt\nx\n", "row 1: has neither `text`");
    check("a.csv", b"messages\nnonsense\n", "row 1: `messages`: expected");
    check("a.csv", b"messages\n\"[], \"\"text\"\": \"\"x\"\"\"\n", "row 1: `messages`: trailing");
    check("a.tsv", b"", "nothing in it to pack");
    check("a.csv", b"text\n", "nothing in it to pack");
    check("a.csv", &vec![b','; 1 << 20], "longer than 256 KiB");
    check("a.json", b"[{\"text\": \"a\"}, {\"text\": 5}]", "record 2: invalid type");
    check("a.json", b"[{\"text\": \"a\"}", "ends inside of its array, after record 1");
    check(
        "a.json",
        b"[{\"text\": \"a\"} {\"text\": \"b\"}]",
        "neither a comma nor `]` follows record 1",
    );
    check("a.json", b"[{\"text\": \"a\"},]", "no value follows the comma");
    check("a.json", b"[{\"text\": \"a\"}] {}", "something follows the end");
    check("a.json", b"[]", "nothing in it to pack");
    check("a.json", b"{\"text\": \"cut", "record 1: EOF while parsing");
    check("a.json", b"3, 4", "record 1: invalid type");
    check("a.json", b"[\"text\"]", "record 1: invalid type");
    check("a.json", &vec![b'['; 1 << 20], "record 1");
    check("a.arrow", b"ARROW1", "write it as Parquet");
    check("a.parquet.gz", b"", "decompress it first");
    check("a.jsonl.gz", b"{\"text\": \"a\"}", "its name says gzip");
    check("a.txt.zst", &gzip(b"text"), "its name says zstd");
    let whole = gzip(b"some text that is long enough");
    check("a.txt.gz", &whole[..whole.len() - 9], "gzip cannot be decompressed");
    let whole = zstd(b"some text that is long enough");
    check("a.txt.zst", &whole[..whole.len() - 9], "zstd cannot be decompressed");
    check("a.csv.gz", &gzip(b"text\n\xff"), "row 1: `text` is not UTF-8 text");
}

/// So many zeros, from a few bytes.
fn zeros(
    bytes: u64,
    compress: impl FnOnce(&mut Vec<u8>, &mut dyn FnMut(&mut dyn Write)),
) -> Vec<u8> {
    let mut out = Vec::new();
    compress(&mut out, &mut |to| {
        let block = vec![b' '; 1 << 20];
        (0..bytes >> 20).for_each(|_| to.write_all(&block).unwrap());
    });
    out
}

#[test]
fn bombs_are_read_in_little_memory() {
    // A record of a gigabyte of spaces: after 64 MiB it is too long.
    let gigabyte = |begin: &'static [u8]| {
        zeros(1 << 30, move |out, fill| {
            let mut encoder = zstd::stream::Encoder::new(out, 1).unwrap();
            encoder.write_all(begin).unwrap();
            fill(&mut encoder);
            encoder.finish().unwrap();
        })
    };
    let check = |name: &str, bytes: &[u8], memory_max: isize| {
        assert!(bytes.len() < 1 << 20);
        let folder = Folder::new();
        let input = folder.write(name, bytes);
        let (result, peak) = peak_bytes(|| packed(&folder.options(&[&input])));
        let error = result.unwrap_err().to_string();
        assert!(error.contains("longer than 64 MiB"), "{error}");
        assert!(peak < memory_max, "{name} took {peak} bytes");
    };
    // The record itself, which grows by doubling.
    check("a.jsonl.zst", &gigabyte(b"{\"text\": \""), 224 << 20);
    check("a.json.zst", &gigabyte(b"[{\"text\": \""), 224 << 20);
    check("a.csv.zst", &gigabyte(b"text\n\""), 224 << 20);
    // Of a column that is not used, nothing is kept.
    check("b.csv.zst", &gigabyte(b"text,other\n,\""), 8 << 20);
}

/// A frame of zstd that asks for a window of 2^31 bytes.
#[test]
fn a_window_of_zstd_that_is_too_large_is_refused() {
    let refusal = refusal("a.txt.zst", &[0x28, 0xb5, 0x2f, 0xfd, 0x00, 21 << 3, 0x01, 0x00, 0x00]);
    assert!(refusal.contains("too much memory"), "{refusal}");
}

/// One bit, one byte, some bytes, or the end is not as it was.
pub(crate) fn damage(whole: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    let at = random.below(bytes.len());
    match random.below(4) {
        0 => bytes.truncate(at),
        1 => bytes[at] ^= 1 << random.below(8),
        2 => bytes[at] = random.below(256) as u8,
        _ => bytes[at..].iter_mut().take(8).for_each(|byte| *byte = 0xff),
    }
    bytes
}

#[test]
fn damaged_files_are_errors_and_nothing_else() {
    let records: Vec<Value> = texts().iter().map(|text| json!({"text": text})).collect();
    let rows: Vec<Vec<String>> = texts().into_iter().map(|text| vec![text]).collect();
    let lines = lines(&records);
    let files = [
        ("a.jsonl", lines.clone().into_bytes()),
        ("a.jsonl.gz", gzip(lines.as_bytes())),
        ("a.jsonl.zst", zstd(lines.as_bytes())),
        ("a.json", serde_json::to_vec(&records).unwrap()),
        ("a.csv", table(",", &["text"], &rows).into_bytes()),
        ("a.txt.gz", gzip(lines.as_bytes())),
    ];
    let mut random = Random(12);
    for (name, whole) in files {
        let folder = Folder::new();
        for case in 0..20 {
            let input = folder.write(name, damage(&whole, &mut random));
            for skip_bad in [false, true] {
                let options = PackOptions {
                    skip_bad,
                    shard_tokens: 1 << 20,
                    if_exists: IfExists::Replace,
                    ..folder.options(&[&input])
                };
                let (result, peak) = peak_bytes(|| packed(&options));
                assert!(peak < MEMORY_MAX, "{name}, {case} took {peak} bytes");
                if let Err(error) = result {
                    let is_typed =
                        matches!(error, DataError::Input { .. } | DataError::Record { .. });
                    assert!(is_typed, "{name}, {case}: {error:?}");
                }
            }
        }
    }
}

#[test]
fn damaged_parquet_is_an_error_and_nothing_else() {
    let texts = texts();
    let whole = parquet_texts(&[("text", texts)], Compression::SNAPPY);
    let folder = Folder::new();
    let input = folder.path("a.parquet");
    let mut random = Random(11);
    let cases = if std::env::var_os("STORM_LONG_TESTS").is_some() { 2000 } else { 60 };
    for case in 0..cases {
        let mut bytes = whole.clone();
        match random.below(4) {
            0 => bytes.truncate(random.below(bytes.len())),
            // The description is at the end.
            1 => {
                let at = bytes.len() - 1 - random.below(400.min(bytes.len()));
                bytes[at] ^= 1 << random.below(8);
            }
            2 => {
                let at = random.below(bytes.len());
                bytes[at] = random.below(256) as u8;
            }
            _ => {
                let at = bytes.len() - 1 - random.below(400.min(bytes.len() - 8));
                bytes[at..].iter_mut().take(8).for_each(|byte| *byte = 0xff);
            }
        }
        fs::write(&input, &bytes).unwrap();
        let options = PackOptions {
            shard_tokens: 1 << 20,
            if_exists: IfExists::Replace,
            ..folder.options(&[&input])
        };
        let (result, peak) = peak_bytes(|| packed(&options));
        assert!(peak < MEMORY_MAX, "{case} took {peak} bytes");
        if let Err(error) = result {
            let is_typed = matches!(error, DataError::Input { .. } | DataError::Record { .. });
            assert!(is_typed, "{case}: {error:?}");
        }
    }
}

#[test]
fn parquet_that_lies_is_refused() {
    let texts = || vec![("text", vec!["x".repeat(1 << 16); 8])];
    let whole = parquet_texts(&texts(), Compression::SNAPPY);
    let check = |bytes: &[u8], expected: &str| {
        let refusal = refusal("a.parquet", bytes);
        assert!(refusal.contains(expected), "{refusal}");
    };
    check(b"PAR1PAR1", "not a Parquet file");
    check(b"some text of a file that is long enough", "not a Parquet file");
    // The length of the description, which stands before the last four bytes.
    let mut bytes = whole.clone();
    let at = bytes.len() - 8;
    bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    check(&bytes, "its description would have 4294967295 bytes");
    check(
        &parquet_texts(&[("content", vec!["a".to_owned()])], Compression::SNAPPY),
        "it has content",
    );
    refusal("a.parquet", &with_huge_page(&whole, 4));
}

pub(crate) fn paths(folder: &Folder, files: &[(&str, &[u8])]) -> Vec<PathBuf> {
    files.iter().map(|(name, bytes)| folder.write(name, bytes)).collect()
}
