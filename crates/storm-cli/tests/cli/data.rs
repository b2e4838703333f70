//! `storm data` and `storm doctor`, as users run them.

use crate::{Done, storm, words};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use storm_data::Dataset;
use tempfile::TempDir;

/// A folder with files to pack.
struct Folder(TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(TempDir::new().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, content: &str) -> PathBuf {
        fs::write(self.path(name), content).unwrap();
        self.path(name)
    }

    /// Calls `storm data` with words. Those that begin with `@` are paths in the folder.
    fn data(&self, line: &str) -> Done {
        let word = |word: &str| -> OsString {
            word.strip_prefix('@').map_or_else(|| word.into(), |name| self.path(name).into())
        };
        storm([OsString::from("data")].into_iter().chain(line.split_whitespace().map(word)))
    }

    fn inspect(&self, line: &str) -> serde_json::Value {
        serde_json::from_str(&self.data(line).succeeded()).unwrap()
    }
}

#[test]
fn text_is_packed_and_shown() {
    let folder = Folder::new();
    folder.write("a.txt", "It is a truth universally acknowledged");
    folder.write("b.txt", "Call me Ishmael.\n");
    let done = folder.data("pack @a.txt @b.txt --tokenizer bytes --out @books --held-out 0.3");
    assert!(done.stderr.contains("packing: 100 %"), "{}", done.stderr);
    let report = done.succeeded();
    assert!(report.contains("packed 2 documents, 57 tokens"), "{report}");
    assert!(report.contains("18 tokens are held out"), "{report}");
    let shown = folder.data("inspect @books --verify").succeeded();
    for part in [
        "documents   2 (1 to train on, 1 held out)",
        "tokens      57 (39 to train on, 18 held out)",
        "bytes, vocabulary 257, end of text 256",
        "all match",
        "Call me Ishmael.\\n",
    ] {
        assert!(shown.contains(part), "{part} is not in: {shown}");
    }
    let json = folder.inspect("inspect @books --json --samples 1");
    assert_eq!(json["manifest"]["counts"]["tokens"], 57);
    assert_eq!(
        json["samples"][0]["beginning"][0]["text"],
        "It is a truth universally acknowledged"
    );
    assert_eq!(json["samples"].as_array().unwrap().len(), 1);
    assert_eq!(json["verified"], false);
}

#[test]
fn chats_are_packed_and_shown() {
    let folder = Folder::new();
    folder.write(
        "chat.jsonl",
        "{\"prompt\": \"2+2=\", \"completion\": \"4\"}\n\
         {\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n",
    );
    let pack = "pack @chat.jsonl --tokenizer bytes --out @chat";
    let words = ["chat.jsonl, line 2", "comes without one", "--chat-template: chatml, plain"];
    folder.data(pack).failed(4, &words);
    let report = folder.data(&format!("{pack} --chat-template plain")).succeeded();
    assert!(report.contains("left out 1 samples that had nothing to learn"), "{report}");
    let shown = folder.data("inspect @chat").succeeded();
    assert!(shown.contains("2+2=«4»") && shown.contains("«…» is learned"), "{shown}");
    assert!(shown.contains("learned     2 tokens, 33.3 %"), "{shown}");
    let json = folder.inspect("inspect @chat --json --verify");
    assert_eq!(json["verified"], true);
    assert_eq!(json["samples"][0]["beginning"][1]["learned"], true);
}

#[test]
fn foreign_tokenizers_run_apart() {
    let folder = Folder::new();
    folder.write("a.txt", "one two one");
    let model = |vocabulary: &str| {
        format!(
            "{{\"version\": \"1.0\", \"added_tokens\": [], \"normalizer\": null, \"pre_tokenizer\": \
             {{\"type\": \"Whitespace\"}}, \"post_processor\": null, \"decoder\": null, \"model\": \
             {{\"type\": \"WordLevel\", \"vocab\": {vocabulary}, \"unk_token\": \"?\"}}}}"
        )
    };
    folder.write("tokenizer.json", &model("{\"one\": 0, \"two\": 1, \"?\": 2, \"</s>\": 3}"));
    let report = folder.data("pack @a.txt --tokenizer @tokenizer.json --out @out").succeeded();
    assert!(report.contains("4 tokens"), "{report}");
    let json = folder.inspect("inspect @out --json");
    assert_eq!(json["manifest"]["tokenizer"]["end_of_text"], 3);
    assert_eq!(json["samples"][0]["beginning"][0]["text"], "one two one </s>");
    // A token by name, and one that does not exist.
    let chosen = "pack @a.txt --tokenizer @tokenizer.json --out @chosen -q --end-of-text";
    assert_eq!(folder.data(&format!("{chosen} two")).succeeded(), "");
    let json = folder.inspect("inspect @chosen --json");
    assert_eq!(json["manifest"]["tokenizer"]["end_of_text"], 1);
    folder
        .data("pack @a.txt --tokenizer @tokenizer.json --out @x --end-of-text <no>")
        .failed(4, &["tokenizer.json", "it has no token `<no>`"]);
    // Merges shorter than the prefix that they must have: third-party code panics on these.
    let crafted = "{\"version\": \"1.0\", \"added_tokens\": [], \"model\": {\"type\": \"BPE\", \
                   \"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [[\"a\", \"b\"]], \
                   \"continuing_subword_prefix\": \"######\"}}";
    folder.write("crafted.json", crafted);
    folder.data("pack @a.txt --tokenizer @crafted.json --out @x").failed(4, &["crafted.json"]);
    folder.data("pack @a.txt --tokenizer @missing.json --out @x").failed(4, &["missing.json"]);
    assert!(!folder.path("x").exists());
}

#[test]
fn bad_calls() {
    let folder = Folder::new();
    folder.write("a.txt", "text");
    folder.write("a.jsonl", "{\"text\": \"x\"}\n{\"text\": }\n");
    folder.data("pack @a.jsonl --tokenizer bytes --out @x").failed(4, &["a.jsonl, line 2"]);
    folder.data("pack @b.txt --tokenizer bytes --out @x").failed(4, &["b.txt: No such file"]);
    folder.data("pack @a.txt --tokenizer bytes --out @x --held-out 1.5").failed(2, &["held out"]);
    folder.data("pack --tokenizer bytes --out @x").failed(2, &["INPUT"]);
    folder.data("pack @a.txt --tokenizer bytes --out @a.txt").failed(4, &["a.txt"]);
    folder.data("inspect @missing").failed(4, &["is not a dataset", "storm data pack"]);
    assert!(!folder.path("x").exists());
    let pack = "pack @a.txt --tokenizer bytes --out @out --quiet";
    let done = folder.data(pack);
    assert_eq!(done.stderr, "");
    assert_eq!(done.succeeded(), "");
    folder.data(pack).failed(4, &["exists already", "--overwrite"]);
    folder.data(&format!("{pack} --overwrite")).succeeded();
    let shard = folder.path("out/shard-00000.storm");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[4100] ^= 1;
    fs::write(&shard, bytes).unwrap();
    for call in ["inspect @out", "inspect @out --verify"] {
        folder.data(call).failed(4, &["shard-00000.storm", "checksum"]);
    }
}

#[test]
fn text_is_compressed_and_the_ratio_is_told() {
    let folder = Folder::new();
    folder.write("a.txt", &"a line of text, and more of it\n".repeat(5_000));
    for codec in ["zstd", "lz4"] {
        let pack = format!("pack @a.txt --tokenizer bytes --codec {codec} --out @{codec}");
        let expected = format!("{codec} makes the tokens ");
        let report = folder.data(&pack).succeeded();
        assert!(report.contains(&expected), "{report}");
        let shown = folder.data(&format!("inspect @{codec} --verify")).succeeded();
        assert!(shown.contains(&expected), "{shown}");
        let json = folder.inspect(&format!("inspect @{codec} --json"));
        let ratio = json["ratio"].as_f64().unwrap();
        assert!(ratio > 10.0 && json["manifest"]["stored"]["codec"] == codec, "{json}");
        let bytes = fs::read(folder.path(codec).join("shard-00000.storm")).unwrap().len();
        assert!((bytes as f64) < 2.0 * 155_000.0 / ratio + 10_000.0, "{bytes}");
    }
}

/// Calls `storm data pack -` with this on standard input.
fn pack_stdin(folder: &Folder, options: &str, input: &[u8]) -> (Option<i32>, String, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_storm"))
        .current_dir(folder.path(""))
        .args(["data", "pack", "-", "--tokenizer", "bytes"])
        .args(options.split_whitespace())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A refused call reads nothing.
    child.stdin.take().unwrap().write_all(input).ok();
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn standard_input_is_packed_like_a_file() {
    let folder = Folder::new();
    let records: String = (0..5_000)
        .map(|i| format!("{{\"prompt\": \"question {i}\", \"completion\": \"answer {i}\"}}\n"))
        .collect();
    folder.write("a.jsonl", &records);
    folder.data("pack @a.jsonl --tokenizer bytes --out @file").succeeded();
    let zipped = zstd::bulk::compress(records.as_bytes(), 1).unwrap();
    let shard = |name: &str| fs::read(folder.path(name).join("shard-00000.storm")).unwrap();
    for (name, input) in [("plain", records.as_bytes()), ("zipped", &zipped)] {
        let options = format!("--format jsonl --out {name}");
        let (code, _, errors) = pack_stdin(&folder, &options, input);
        assert_eq!(code, Some(0), "{errors}");
        assert!(shard(name) == shard("file"), "{name}");
        let json = folder.inspect(&format!("inspect @{name} --json"));
        assert_eq!(json["manifest"]["counts"]["input_bytes"], input.len());
    }
    let (code, _, errors) = pack_stdin(&folder, "--out x", records.as_bytes());
    assert!(code == Some(2) && errors.contains("--format: standard input has no name"), "{errors}");
    let (code, _, errors) = pack_stdin(&folder, "--out x --format parquet", b"PAR1");
    assert!(code == Some(2) && errors.contains("cannot be read from standard input"), "{errors}");
    let (code, _, errors) = pack_stdin(&folder, "- --out x --format text", b"a");
    assert!(code == Some(2) && errors.contains("can be read once"), "{errors}");
    let (code, _, errors) = pack_stdin(&folder, "--out x --format jsonl", b"{\"text\": 1}");
    assert!(code == Some(4) && errors.contains("standard input, line 1"), "{errors}");
    assert!(!folder.path("x").exists());
}

#[test]
fn bad_records_are_skipped_and_told() {
    let folder = Folder::new();
    folder.write("a.jsonl", "{\"text\": \"x\"}\nnonsense\n{\"text\": \"y\"}\n{}\n");
    let pack = "pack @a.jsonl --tokenizer bytes";
    folder.data(&format!("{pack} --out @x")).failed(4, &["a.jsonl, line 2"]);
    let report = folder.data(&format!("{pack} --out @out --skip-bad")).succeeded();
    for part in ["packed 2 documents", "skipped 2 that cannot be packed", "line 2: ", "line 4: has"]
    {
        assert!(report.contains(part), "{report}");
    }
    let shown = folder.data("inspect @out").succeeded();
    assert!(shown.contains("skipped     2 that could not be packed"), "{shown}");
    let printed = folder.inspect(&format!("{pack} --out @json --skip-bad --json"));
    assert_eq!(printed["counts"]["skipped"], 2);
    assert!(printed["skipped"][0].as_str().unwrap().contains("line 2"), "{printed}");
    folder.data("pack @a.jsonl --tokenizer bytes --out @x --size 3").failed(2, &["--size"]);
    folder.data("pack --synthetic 3 --out @x --size 3x4").failed(2, &["--size"]);
    folder.data("pack --synthetic 3 --out @x --size 3x4x5").failed(2, &["HEIGHTxWIDTH"]);
}

#[test]
fn a_folder_with_nothing_usable_says_what_it_holds() {
    let folder = Folder::new();
    fs::create_dir(folder.path("in")).unwrap();
    let pack = "pack @in --tokenizer bytes --out @out";
    folder.data(pack).failed(4, &["nothing that can be packed", "no files"]);
    folder.write("in/a.py", "import this");
    folder.write("in/b.zip", "PK");
    folder.data(pack).failed(4, &["found 1 .py, 1 .zip", ".jsonl"]);
    folder.write("in/c.txt", "text");
    let report = folder.data(pack).succeeded();
    assert!(report.contains("packed 1 documents"), "{report}");
    assert!(report.contains("ignored 2 files of other formats"), "{report}");
    // Text needs a tokenizer.
    folder.data("pack @in --out @x").failed(2, &["--tokenizer"]);
}

#[test]
fn a_killed_pack_leaves_no_dataset() {
    let folder = Folder::new();
    let input = folder.write("a.txt", &"a line of text\n".repeat(1 << 20));
    let out = folder.path("out");
    let mut child = Command::new(env!("CARGO_BIN_EXE_storm"))
        .args([OsStr::new("data"), OsStr::new("pack"), input.as_os_str(), OsStr::new("--out")])
        .args([out.as_os_str(), OsStr::new("--tokenizer"), OsStr::new("bytes")])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("packing: "), "{line}");
    child.kill().unwrap();
    child.wait().unwrap();
    // If it finished before the signal, it is complete.
    if out.exists() {
        Dataset::open(&out).unwrap().verify(&|_| {}).unwrap();
        fs::remove_dir_all(&out).unwrap();
    }
    folder.data("pack @a.txt --tokenizer bytes --out @out").succeeded();
    let mut names: Vec<_> =
        fs::read_dir(folder.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["a.txt", "out"]);
}

#[test]
fn the_doctor_names_what_is_missing() {
    let folder = Folder::new();
    let dir = folder.path("");
    let doctor = |more: &[&str]| {
        let words = ["doctor", "--dir"].map(OsStr::new).into_iter().chain([dir.as_os_str()]);
        storm(words.chain(more.iter().map(OsStr::new)))
    };
    let report = doctor(&[]).succeeded();
    assert!(report.contains("training on the CPU: ready"), "{report}");
    let json: serde_json::Value = serde_json::from_str(&doctor(&["--json"]).succeeded()).unwrap();
    assert_eq!(json["cpu_ready"], true);
    let findings =
        json["machine"].as_array().unwrap().iter().chain(json["gpu"].as_array().unwrap());
    for found in findings {
        let missing = found["state"] == "missing";
        assert!(!missing || found["remedy"].is_string(), "{found}");
    }
    words("doctor --dir /nonexistent/runs").failed(1, &["cannot train"]);
}

/// As `datetime.now()` in transformers. The first and the last time zone never have the same date.
#[test]
fn templates_see_the_local_date() {
    let folder = Folder::new();
    let chat = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    let input = folder.write("chat.jsonl", chat);
    let template =
        "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}";
    let template = folder.write("template.jinja", template);
    let pack = |zone: &str, epoch: Option<&str>| {
        let out = folder.path(&format!("out{zone}{}", epoch.is_some()));
        let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
        command.args(["data", "pack", "--tokenizer", "bytes", "--json", "--out"]).arg(out);
        command.arg("--chat-template").arg(&template).arg(&input).env("TZ", zone);
        command.env_remove("SOURCE_DATE_EPOCH");
        command.envs(epoch.map(|epoch| ("SOURCE_DATE_EPOCH", epoch)));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        json["id"].as_str().unwrap().to_owned()
    };
    let [east, west] = ["EAST-14", "WEST+11"];
    assert_ne!(pack(east, None), pack(west, None));
    assert_eq!(pack(east, Some("1735689599")), pack(west, Some("1735689599")));
}

#[test]
fn each_way_of_reading_can_be_forced() {
    let folder = Folder::new();
    folder.data("pack --synthetic 100 --out @records").succeeded();
    let inspect = |reading: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
        command.env("STORM_READING", reading).args(["data", "inspect", "--verify", "--json"]);
        command.arg(folder.path("records")).output().unwrap()
    };
    // A system may refuse the faster paths.
    let paths = ["io_uring O_DIRECT", "O_DIRECT pread", "pread+fadvise"];
    for (fastest, reading) in ["io_uring", "direct", "cached"].into_iter().enumerate() {
        let output = inspect(reading);
        let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let path = shown["reading_path"].as_str().unwrap();
        assert!(paths[fastest..].contains(&path), "{reading}: {path}");
    }
    let output = inspect("fast");
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("STORM_READING") && errors.contains("cached"), "{errors}");
}

#[test]
fn an_estimate_may_ask_the_planner_for_the_rate() {
    let folder = Folder::new();
    folder.data("pack --synthetic 100 --out @records").succeeded();
    let rate = |model: &str| {
        let line = format!("estimate @records --model {model} --hardware reference --json");
        let stages = folder.inspect(&line)["stages"].clone();
        let stages = stages.as_array().unwrap();
        let stage = stages.iter().find(|stage| stage["name"] == "model").unwrap();
        stage["records_per_second"].as_f64().unwrap()
    };
    let (small, large) = (rate("small-cnn"), rate("resnet-18"));
    assert!(small > 2.0 * large && large > 0.0, "{small} {large}");
    folder.data("estimate @records --model none-such").failed(2, &["none-such", "resnet-18"]);
    folder.data("estimate @records --model small-cnn --rate 5").failed(2, &["--rate"]);
}

/// Text is counted in tokens, not in rows.
#[test]
fn text_is_estimated_like_records() {
    let folder = Folder::new();
    folder.write("a.txt", &"Call me Ishmael. ".repeat(40_000));
    folder.data("pack @a.txt --tokenizer bytes --out @books").succeeded();
    let line = "estimate @books --seq 256 --batch 4 --data-ram 8MiB --hardware reference";
    let json = |more: &str| folder.inspect(&format!("{line} {more} --json"));
    let estimate = json("--rate 5120");
    let rows = 680_001_u64.div_ceil(256);
    assert_eq!(estimate["tokens"].as_u64(), Some(256 * rows));
    let stages = estimate["stages"].as_array().unwrap();
    let rate = |name: &str| {
        let stage = stages.iter().find(|stage| stage["name"] == name);
        stage.map(|stage| stage["tokens_per_second"].as_f64().unwrap())
    };
    assert_eq!(rate("model"), Some(5120.0));
    let seconds = estimate["epoch_seconds"].as_f64().unwrap();
    assert!((seconds / (rows as f64 / 20.0) - 1.0).abs() < 1e-9, "{estimate}");
    assert_eq!(estimate["resident"], true);
    // More than `--data-ram` holds.
    folder.write("b.txt", &"Call me Ishmael. ".repeat(400_000));
    folder.data("pack @b.txt --tokenizer bytes --out @more").succeeded();
    let small = folder.inspect(
        "estimate @more --seq 256 --batch 4 --data-ram 4MiB --order window --hardware reference --json",
    );
    let stages = small["stages"].as_array().unwrap();
    assert_eq!(small["resident"], false);
    assert!(stages.iter().any(|stage| stage["name"] == "reading"), "{small}");
    let shown = folder.data(&format!("{line} --model gpt2")).succeeded();
    for part in ["tokens in 2,657 rows of 256", "tokens/s", "batches ahead", "the slowest"] {
        assert!(shown.contains(part), "{part} is not in: {shown}");
    }
    folder.data(&format!("{line} --records 5")).failed(2, &["--records", "--seq"]);
    folder.data(&format!("{line} --model small-cnn")).failed(2, &["language model", "gpt2"]);
}

#[test]
fn a_probe_of_the_cpu_measures_the_disk_and_an_estimate_uses_it() {
    let folder = Folder::new();
    fs::create_dir(folder.path("disk")).unwrap();
    let line = ["probe", "--device", "cpu", "--json", "--out"].map(OsString::from);
    let more = [folder.path("profile.json").into(), "--at".into(), folder.path("disk").into()];
    let printed = storm(line.into_iter().chain(more)).succeeded();
    let profile: serde_json::Value = serde_json::from_str(&printed).unwrap();
    let disk = &profile["disk"];
    assert!(disk["decode_bytes_per_second"].as_f64().unwrap() > 0.0, "{disk}");
    assert_eq!(fs::read_dir(folder.path("disk")).unwrap().count(), 0, "nothing is left");
    let line = "estimate --records 5000 --batch 8 --data-ram 8MiB --hardware @profile.json --json";
    let mut line = line.replace("@profile.json", folder.path("profile.json").to_str().unwrap());
    let estimate = folder.inspect(&line);
    for key in ["sequential_bytes_per_second", "random_reads_per_second"] {
        assert_eq!(estimate[key], disk[key], "{key}");
    }
    assert!(estimate["reading_path"].as_str().unwrap().ends_with("by storm probe"));
    line.push_str(" --at @disk");
    let measured = folder.inspect(&line);
    assert_ne!(measured["random_reads_per_second"], disk["random_reads_per_second"]);
}

/// On the CPU the figures depend on other load. The checks must be there, and count.
#[test]
fn training_from_disk_is_compared_with_training_from_memory() {
    let folder = Folder::new();
    folder.data("pack --synthetic 150 --shape 32,32,3 --out @pictures").succeeded();
    let at = folder.path("pictures");
    let line = "verify --device cpu --data-size 8MB --data-ram 5MiB --data-batch 2 --data-seconds 0.02 \
                --hardware reference --json --data";
    let line = line.split_whitespace().map(OsString::from);
    let more = [at.into(), "--data-at".into(), folder.path(".").into()];
    let sheet = |flags: &[&str]| -> (serde_json::Value, Option<i32>) {
        let flags = flags.iter().map(OsString::from);
        let done = storm(line.clone().chain(more.clone()).chain(flags));
        (serde_json::from_str(&done.stdout).expect(&done.stderr), done.code)
    };
    let name = |check: &serde_json::Value, key: &str| check[key].as_str().unwrap().to_owned();
    let names = |check| ["model", "codec", "order"].map(|key| name(check, key));
    let (one, _) = sheet(&["--data-codecs", "lz4", "--data-models", "small-cnn"]);
    let found: Vec<_> = one["checks"].as_array().unwrap().iter().map(names).collect();
    assert_eq!(found, [["small-cnn", "lz4", "window"], ["small-cnn", "lz4", "global"]]);

    let (sheet, code) = sheet(&[]);
    let checks = sheet["checks"].as_array().unwrap();
    let mut expected = Vec::new();
    for model in ["small-cnn", "tiny-gpt2"] {
        for codec in ["none", "zstd"] {
            for order in ["window", "global"] {
                expected.push([model, codec, order].map(str::to_owned));
            }
        }
    }
    assert_eq!(checks.iter().map(names).collect::<Vec<_>>(), expected);
    for check in checks {
        let is_text = check["model"] == "tiny-gpt2";
        let rate = if is_text { "tokens_per_second" } else { "images_per_second" };
        assert!(check[rate].as_f64().unwrap() > 0.0, "{check}");
        assert!(
            check["reading_path"].as_str().unwrap().contains("pread")
                || check["reading_path"] == "io_uring O_DIRECT"
        );
        if !is_text && check["order"] == "global" {
            let loading = &check["loading"];
            let number = |key: &str| loading[key].as_f64().unwrap();
            let is_compressed = check["codec"] == "zstd";
            assert_eq!(number("expected_found_share") > 0.3, is_compressed, "{loading}");
            assert!(number("found_share") < 1.0 && number("in_flight") >= 1.0, "{loading}");
            assert!(number("bytes_per_read") >= 4096.0 && number("reads_per_second") > 0.0);
            let times =
                ["waiting_share", "decoding_share", "submitting_and_copying_share"].map(number);
            assert!(times.iter().all(|share| (0.0..=1.0).contains(share)), "{loading}");
        }
        if is_text || check["order"] == "window" {
            assert_eq!(check["device_bytes"], check["memory_device_bytes"]);
            let slowdown = check["slowdown"].as_f64().unwrap();
            assert_eq!(check["verdict"] == "pass", slowdown <= 0.01, "{check}");
        }
    }
    let failed = checks.iter().filter(|check| check["verdict"] == "fail").count();
    assert_eq!((&sheet["failed"], code == Some(0)), (&failed.into(), failed == 0));
    let left: Vec<_> = fs::read_dir(folder.path(".")).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    storm(line.map(|word| if word == "8MB" { "1MB".into() } else { word }))
        .failed(2, &["--data-size"]);
    words("verify --device cpu --ops").failed(2, &["--data alone"]);
}
