//! Tiny inputs of every kind, made by `storm` itself and copied for each case.

use crate::outcome::Call;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use storm_plan::HardwareProfile;
use tempfile::TempDir;

/// A model of a few thousand parameters that trains quickly.
const CONFIG: &str = r#"# A tiny run.
model = "gpt2"
layers = 2
width = 16
heads = 2
data = "data"
seq = 16
batch = 2
learning-rate = 1e-2
schedule = "constant"
seed = 5
device = "cpu"
threads = 2
vram = "1GiB"
ram = "256MiB"
hardware = "reference"
save-every = 1
eval-every = 2
eval-steps = 1
"#;

/// Steps of the run in the stock.
pub(crate) const STEPS: u64 = 2;

pub(crate) struct Stock {
    folder: TempDir,
}

impl Stock {
    pub(crate) fn new() -> Stock {
        let stock = Stock { folder: folder() };
        let write = |name: &str, text: &str| {
            fs::write(stock.folder.path().join(name), text).expect("a file");
        };
        let text: String = (0..150).map(|i| format!("{} and {}; ", i * 7 % 100, i % 13)).collect();
        write("text.txt", &text);
        write("table.csv", "text,label\none line,1\n\"two, three\",2\nshort\n");
        write("chat.jsonl", &chat());
        write("tiny.toml", CONFIG);
        write("tokenizer.json", &tokenizer().to_string());
        fs::create_dir(stock.folder.path().join("templated")).expect("a folder");
        write("templated/tokenizer.json", &tokenizer().to_string());
        write("templated/tokenizer_config.json", &tokenizer_config().to_string());
        write("templated/chat_template.jinja", TEMPLATE);
        for name in ["images", "images/one", "images/two", "digits", "scratch"] {
            fs::create_dir(stock.folder.path().join(name)).expect("a folder");
        }
        write("scratch/mine.txt", "not a run's");
        let write_bytes = |name: &str, bytes: Vec<u8>| {
            fs::write(stock.folder.path().join(name), bytes).expect("a file");
        };
        write_bytes("images/one/a.png", png());
        write_bytes("images/two/b.jpg", jpeg());
        write_bytes("digits/train-images-idx3-ubyte", idx(&[9, 4, 5]));
        write_bytes("digits/train-labels-idx1-ubyte", idx(&[9]));
        write("profile.json", &HardwareProfile::builtin("rtx-4090").expect("built in").to_json());
        for line in [
            "data pack text.txt --tokenizer bytes --held-out 0.2 --shard-tokens 1024 --out data",
            "data pack --synthetic 300 --shape 20,50 --codec zstd --held-out 0.2 --out records",
            &format!("train tiny.toml --json --name run --steps {STEPS}"),
            "export runs/run/model model --dtype f32",
            "export model sharded --dtype f32 --shard-size 8KiB",
            "train --quiet --name adapted --steps 1 --model model --data text.txt --tokenizer bytes --seq 8 --vram 1GiB \
             --ram 256MiB --device cpu --hardware reference --threads 1 --lora rank=2",
            "export runs/adapted/adapter adapter --base-model model",
        ] {
            Call::of(line)
                .succeed(stock.folder.path())
                .unwrap_or_else(|problem| panic!("{problem}"));
        }
        // Only its adapter is needed.
        fs::remove_dir_all(stock.folder.path().join("runs/adapted")).expect("removed");
        stock
    }

    /// A folder with copies of these inputs.
    pub(crate) fn copy(&self, names: &[&str]) -> TempDir {
        let folder = folder();
        for name in names {
            copy(&self.folder.path().join(name), &folder.path().join(name));
        }
        folder
    }
}

/// A folder on a disk, because the system's temporary folder may be in memory.
fn folder() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

/// A gray image of 16 × 8: a header, uncompressed pixels, and an end.
fn png() -> Vec<u8> {
    let mut bytes = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut chunk = |kind: &[u8; 4], data: &[u8]| {
        let body = [kind, data].concat();
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(&body);
        bytes.extend(crc32(&body).to_be_bytes());
    };
    chunk(b"IHDR", &[0, 0, 0, 16, 0, 0, 0, 8, 8, 0, 0, 0, 0]);
    // Eight rows, each with a filter byte, and the Adler checksum of that many zeros.
    let rows = [0; 8 * 17];
    let length = rows.len() as u16;
    let mut stream = vec![0x78, 0x01, 0x01];
    stream.extend(length.to_le_bytes());
    stream.extend((!length).to_le_bytes());
    stream.extend(rows);
    stream.extend([0, length as u8, 0, 1]);
    chunk(b"IDAT", &stream);
    chunk(b"IEND", &[]);
    bytes
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |sum: u32, byte: &u8| {
        let bit = |sum: u32, _| if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 };
        (0..8).fold(sum ^ u32::from(*byte), bit)
    };
    !bytes.iter().fold(!0, step)
}

/// A gray image of 16 × 8 in two blocks of one value each: a zero difference and an end, one bit
/// each.
fn jpeg() -> Vec<u8> {
    let mut bytes = vec![0xff, 0xd8, 0xff, 0xdb, 0, 67, 0];
    bytes.extend([1; 64]);
    bytes.extend([0xff, 0xc0, 0, 11, 8, 0, 8, 0, 16, 1, 1, 0x11, 0]);
    for class in [0x00, 0x10] {
        bytes.extend([0xff, 0xc4, 0, 20, class, 1]);
        bytes.extend([0; 16]);
    }
    bytes.extend([0xff, 0xda, 0, 8, 1, 1, 0, 0, 63, 0, 0x0f, 0xff, 0xd9]);
    bytes
}

/// Zeros in the format of MNIST.
fn idx(dimensions: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, dimensions.len() as u8];
    bytes.extend(dimensions.iter().flat_map(|length| length.to_be_bytes()));
    bytes.extend(vec![0; dimensions.iter().product::<u32>() as usize]);
    bytes
}

/// A template with a loop, a condition, a filter, a method and a special token.
const TEMPLATE: &str = "{% for message in messages %}{% if message.role == 'user' %}; {% endif %}\
    {{ message['content'].strip() | trim }}{{ eos_token }}{% endfor %}\n";

/// The config beside a tokenizer.
fn tokenizer_config() -> Value {
    json!({
        "add_bos_token": false,
        "eos_token": {"content": "<|endoftext|>", "special": true},
        "chat_template": [{"name": "default", "template": TEMPLATE}],
    })
}

/// Some chats and instructions.
fn chat() -> String {
    let lines = (0..40).map(|i| match i % 2 {
        0 => json!({"messages": [
            {"role": "user", "content": format!("what is {i}")},
            {"role": "assistant", "content": format!("{i} and {}", i + 1)},
        ]}),
        _ => json!({"prompt": format!("{i} and"), "completion": format!(" {}", i + 1)}),
    });
    lines.map(|line| format!("{line}\n")).collect()
}

/// A tokenizer of words.
fn tokenizer() -> Value {
    let words = ["<|endoftext|>", "?", "and", ";"].into_iter().map(str::to_owned);
    let numbers = (0..100).map(|number| number.to_string());
    let vocabulary: BTreeMap<String, usize> =
        words.chain(numbers).enumerate().map(|(id, word)| (word, id)).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": 0, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true,
        }],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": null,
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    })
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::create_dir_all(to).expect("a folder");
        for entry in fs::read_dir(from).expect("a folder").flatten() {
            copy(&entry.path(), &to.join(entry.file_name()));
        }
        return;
    }
    fs::create_dir_all(to.parent().expect("a folder")).expect("a folder");
    fs::copy(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
}
