//! Conversations with a model that learned one.

use crate::support::{Place, finish};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::process::{Command, Output, Stdio};

/// A token for each byte, and markers around messages.
pub(crate) fn byte_level(special: &[&str]) -> Value {
    let mut other = 256;
    let mut vocabulary = serde_json::Map::new();
    for byte in 0..=255_u32 {
        let is_shown = matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let letter = if is_shown { byte } else { other };
        other += u32::from(!is_shown);
        vocabulary.insert(char::from_u32(letter).expect("a letter").to_string(), json!(byte));
    }
    let added: Vec<Value> = special
        .iter()
        .enumerate()
        .map(|(at, name)| {
            json!({"id": 256 + at, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocabulary, "merges": []},
    })
}

const TEMPLATE: &str = "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}<end>{% endfor %}\
                        {% if add_generation_prompt %}<a>{% endif %}";

/// A place with a run that learned to answer `hi` with `yes é`, and `and` after that with `so`.
fn learned() -> Place {
    let place = Place::new();
    let folder = place.path().join("tok");
    fs::create_dir(&folder).unwrap();
    let special = ["<s>", "<u>", "<a>", "<end>", "<|endoftext|>"];
    fs::write(folder.join("tokenizer.json"), byte_level(&special).to_string()).unwrap();
    let config = json!({"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"});
    fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    let says = |role: &str, text: &str| json!({"role": role, "content": text});
    let chat = json!({"messages": [
        says("user", "hi"), says("assistant", "yes é"), says("user", "and"), says("assistant", "so"),
    ]});
    fs::write(place.path().join("chat.jsonl"), format!("{chat}\n").repeat(32)).unwrap();
    let line = "train --json --name a --model gpt2 --layers 1 --width 32 --heads 2 --data chat.jsonl --tokenizer tok \
                --held-out 0 --seq 32 --batch 4 --steps 80 --learning-rate 2e-2 --precision f32 --device cpu --threads 1 \
                --vram 64MiB --ram 256MiB";
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).args(line.split_whitespace());
    finish(command).succeeded();
    place
}

fn storm(place: &Place, line: &str, input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).args(line.split_whitespace());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // It may exit before it has read all.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

#[track_caller]
fn done(output: Output) -> (String, String) {
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{errors}");
    (String::from_utf8(output.stdout).unwrap(), errors)
}

#[test]
fn a_conversation_goes_on_ends_and_begins_anew() {
    let place = learned();
    let chat = "chat runs/a --temperature 0 --tokens 8";
    let input = "hi\n\nand\n/save talk.jsonl\n/reset\nhi\n/help\n/quit\nhi\n";
    let (out, err) = done(storm(&place, chat, input));
    assert_eq!(out, "yes é\nso\nyes é\n", "{err}");
    assert!(err.contains("saved 4 messages to talk.jsonl") && err.contains("/reset "), "{err}");
    let saved = fs::read_to_string(place.path().join("talk.jsonl")).unwrap();
    let mut saved: Value = serde_json::from_str(&saved).unwrap();
    assert_eq!(saved["messages"][1], json!({"role": "assistant", "content": "yes é"}));

    // A loaded conversation continues like one whose keys and values were cached.
    saved["messages"].as_array_mut().unwrap().truncate(2);
    fs::write(place.path().join("half.jsonl"), saved.to_string()).unwrap();
    let (out, _) = done(storm(&place, &format!("{chat} --load half.jsonl"), "and\n"));
    assert_eq!(out, "so\n");
    // The same holds for sampled text that was not learned.
    let hot = "chat runs/a --temperature 3 --tokens 6 --seed 5";
    let (both, _) = done(storm(&place, hot, "hi\nno\n/save hot.jsonl\n"));
    let saved = fs::read_to_string(place.path().join("hot.jsonl")).unwrap();
    let mut saved: Value = serde_json::from_str(&saved).unwrap();
    saved["messages"].as_array_mut().unwrap().truncate(2);
    fs::write(place.path().join("half.jsonl"), saved.to_string()).unwrap();
    let (second, _) = done(storm(&place, &format!("{hot} --load half.jsonl"), "no\n"));
    assert!(both.ends_with(&second), "{both:?} {second:?}");

    let sample = "sample runs/a --chat --prompt hi --temperature 0 --tokens 8";
    assert_eq!(done(storm(&place, sample, "")).0, "yes é\n");
    let (object, _) = done(storm(&place, &format!("{sample} --json"), ""));
    let object: Value = serde_json::from_str(&object).unwrap();
    assert_eq!(object["prompt_tokens"], json!([257, 104, 105, 259, 258]));
    assert_eq!(object["tokens"], json!([121, 101, 115, 32, 195, 169]));
    assert_eq!((&object["text"], &object["finish"]), (&json!("yes é"), &json!("end")));
    let (object, _) = done(storm(&place, &format!("{sample} --json --system x"), ""));
    let object: Value = serde_json::from_str(&object).unwrap();
    assert_eq!(object["prompt_tokens"], json!([256, 120, 259, 257, 104, 105, 259, 258]));
}

#[test]
fn what_cannot_be_said_is_refused_in_words() {
    let place = learned();
    let refused = |line: &str, input: &str, part: &str| {
        let output = storm(&place, line, input);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(matches!(output.status.code(), Some(2 | 4)), "{errors}");
        assert!(errors.contains(part), "{part} is not in {errors}");
        String::from_utf8(output.stdout).unwrap()
    };
    let chat = "chat runs/a --temperature 0 --tokens 8";
    // Two turns fill the model's 32 positions. A third does not fit.
    let out = refused(chat, "hi\nand\nthis is a long one\nhi\n", "the context holds 32; /reset");
    assert_eq!(out, "yes é\nso\n");
    let long = format!("{}\n", "n".repeat(29));
    let (_, err) = done(storm(&place, chat, &long));
    assert!(
        err.contains("the answer is cut off: the conversation fills the context of 32 tokens"),
        "{err}"
    );
    let (_, err) = done(storm(&place, "chat runs/a --temperature 0 --tokens 2", "hi\n"));
    assert!(err.contains("cut off after 2 tokens"), "{err}");
    refused(chat, "/rest\n", "/rest is not a command");
    refused(chat, "/save\n", "/save needs the name of a file");
    refused(chat, "/save chat.jsonl\n", "cannot save to chat.jsonl");
    refused(&format!("{chat} --load none.jsonl"), "hi\n", "cannot load none.jsonl");
    refused(&format!("{chat} --load text.txt"), "hi\n", "it is not a conversation");
    refused("chat runs/a --tokenizer bytes", "hi\n", "choose with --chat-template");
    let out = refused(&format!("{chat} --seq 64"), "hi\n", "the model has 32 positions");
    assert_eq!(out, "");
}
