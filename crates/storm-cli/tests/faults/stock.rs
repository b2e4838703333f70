//! Tiny inputs of every kind, made by `storm` itself, to be copied for each case.

use crate::outcome::Call;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use storm_plan::HardwareProfile;
use tempfile::TempDir;

/// A model of a few thousand parameters that trains in no time.
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

/// Steps of the run that is in the stock.
pub(crate) const STEPS: u64 = 2;

pub(crate) struct Stock {
    folder: TempDir,
}

impl Stock {
    pub(crate) fn new() -> Stock {
        let stock = Stock { folder: TempDir::new().expect("a folder") };
        let write = |name: &str, text: &str| {
            fs::write(stock.folder.path().join(name), text).expect("a file");
        };
        let text: String = (0..150).map(|i| format!("{} and {}; ", i * 7 % 100, i % 13)).collect();
        write("text.txt", &text);
        write("chat.jsonl", &chat());
        write("tiny.toml", CONFIG);
        write("tokenizer.json", &tokenizer().to_string());
        fs::create_dir(stock.folder.path().join("templated")).expect("a folder");
        write("templated/tokenizer.json", &tokenizer().to_string());
        write("templated/tokenizer_config.json", &tokenizer_config().to_string());
        write("templated/chat_template.jinja", TEMPLATE);
        write("profile.json", &HardwareProfile::builtin("rtx-4090").expect("built in").to_json());
        for line in [
            "data pack text.txt --tokenizer bytes --held-out 0.2 --shard-tokens 1024 --out data",
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
        // Only its adapter is wanted.
        fs::remove_dir_all(stock.folder.path().join("runs/adapted")).expect("removed");
        stock
    }

    /// A folder with copies of some of it.
    pub(crate) fn copy(&self, names: &[&str]) -> TempDir {
        let folder = TempDir::new().expect("a folder");
        for name in names {
            copy(&self.folder.path().join(name), &folder.path().join(name));
        }
        folder
    }
}

/// With a loop, a condition, a filter, a method and a special token.
const TEMPLATE: &str = "{% for message in messages %}{% if message.role == 'user' %}; {% endif %}\
    {{ message['content'].strip() | trim }}{{ eos_token }}{% endfor %}\n";

/// What comes beside a tokenizer.
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
