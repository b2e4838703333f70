//! Chats rendered with models' own templates: the tokens of `transformers`, recorded by `python/record_chats.py`,
//! and which of them are learned. Templates are programs: some never end, some use all memory.

use crate::helpers::{Folder, packed};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::path::Path;
use storm_data::{ChatTemplate, Dataset, IfExists, PackOptions, Tokenizer, TokenizerSource};

#[derive(Deserialize)]
struct Recorded {
    template: String,
    name: String,
    /// As it was written: the order of fields matters.
    chat: Box<RawValue>,
    #[serde(default)]
    ids: Vec<i32>,
    learned: Option<Vec<u8>>,
    error: Option<String>,
}

fn chats() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/chats"))
}

/// A folder with the recorded tokenizer and a template.
fn model(template: &str) -> Folder {
    let folder = Folder::new();
    std::fs::copy(chats().join("tokenizer.json"), folder.path("tokenizer.json")).unwrap();
    let config = json!({
        "bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "add_bos_token": true,
        "added_tokens_decoder": {"1": {}}, "chat_template": template,
    });
    folder.write("tokenizer_config.json", config.to_string());
    folder
}

/// The ids of a chat and whether each is learned.
fn encoded(folder: &Folder, chat: &str) -> Result<(Vec<i32>, Vec<bool>), String> {
    encoded_with(folder, chat, ChatTemplate::OfTokenizer)
}

fn encoded_with(
    folder: &Folder,
    chat: &str,
    chat_template: ChatTemplate,
) -> Result<(Vec<i32>, Vec<bool>), String> {
    let input = folder.write("chat.jsonl", chat);
    let options = PackOptions {
        tokenizer: TokenizerSource::File(folder.path("tokenizer.json")),
        chat_template,
        if_exists: IfExists::Replace,
        threads: 1,
        shard_tokens: 1 << 20,
        ..folder.options(&[&input])
    };
    packed(&options).map_err(|error| error.to_string())?;
    let dataset = Dataset::open(&options.out).unwrap();
    let count = dataset.manifest().counts.tokens as usize;
    let (mut ids, mut learned) = (vec![0; count], vec![false; count]);
    dataset.read_tokens(0, &mut ids, &mut Vec::new()).unwrap();
    dataset.read_mask(0, &mut learned, &mut Vec::new()).unwrap();
    Ok((ids, learned))
}

/// The learned texts, one after another.
fn learned_text(folder: &Folder, (ids, learned): &(Vec<i32>, Vec<bool>)) -> String {
    let source = TokenizerSource::File(folder.path("tokenizer.json"));
    let tokenizer = Tokenizer::open(&source, None, &crate::helpers::worker()).unwrap();
    let ids: Vec<u32> = ids
        .iter()
        .zip(learned)
        .filter(|(_, learned)| **learned)
        .map(|(&id, _)| id as u32)
        .collect();
    tokenizer.decode(&ids).unwrap()
}

/// What is refused although `transformers` renders it, and why: the text would omit part of the chat, or contain
/// text that is not in it.
const REFUSED: [(&str, &str, &str); 7] = [
    ("gemma", "parts", "message 1: the chat template does not know content parts"),
    ("llama3", "parts", "message 1: the chat template does not know content parts"),
    ("marked", "parts", "message 1: the chat template does not know content parts"),
    ("qwen3", "parts", "message 1: the chat template does not show all content parts"),
    ("marked", "tools", "message 2: the chat template does not show tool calls"),
    ("phi3", "tools", "message 2: the chat template does not show tool calls"),
    ("mistral", "system", "message 1: the chat template does not show what `system` says"),
];

#[test]
fn chats_have_the_tokens_of_transformers() {
    let text = std::fs::read_to_string(chats().join("expected.json")).unwrap();
    let recorded: Vec<Recorded> = serde_json::from_str(&text).unwrap();
    let mut compared = 0;
    for case in &recorded {
        let template = std::fs::read_to_string(chats().join(format!("{}.jinja", case.template)));
        let folder = model(&template.unwrap());
        let found = encoded(&folder, case.chat.get());
        let place = format!("{}, {}", case.template, case.name);
        let refused = REFUSED
            .iter()
            .find(|(template, name, _)| *template == case.template && *name == case.name);
        match (refused, &case.error) {
            (Some((.., words)), _) => {
                let error = found.expect_err(&place);
                assert!(error.contains("line 1") && error.contains(words), "{place}: {error}");
            }
            (None, Some(said)) => {
                let error = found.expect_err(&place);
                // Messages of a template are passed on; those of Jinja are worded differently.
                let passed_on = error.contains(&format!("the chat template refuses it: {said}"));
                let failed = error.contains("the chat template fails, line ");
                assert!(passed_on || (failed && said.contains("concatenate")), "{place}: {error}");
            }
            (None, None) => {
                let found = found.unwrap_or_else(|error| panic!("{place}: {error}"));
                assert_eq!(found.0, case.ids, "{place}");
                if let Some(learned) = &case.learned {
                    let learned: Vec<bool> = learned.iter().map(|&learned| learned == 1).collect();
                    assert_eq!(found.1, learned, "{place}");
                }
                compared += 1;
            }
        }
    }
    assert!(compared >= 40, "{compared} of {}", recorded.len());
}

/// Without marks in the template: what the assistant says, and what ends its turn.
#[test]
fn answers_are_learned_with_what_ends_them() {
    let say = |role: &str, content: &str| json!({"role": role, "content": content});
    let chat = json!({"messages": [
        say("user", "hi"), say("assistant", "ho"), say("user", "so?"), say("assistant", "so."),
    ]});
    let call = json!({"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}});
    let tools = json!({"messages": [
        say("user", "time?"), {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "abcdefghi"}, say("assistant", "seven"),
    ]});
    let thoughts = json!({"messages": [
        say("user", "1"), say("assistant", "<think>\na\n</think>\n\none"),
        say("user", "2"), say("assistant", "<think>\nb\n</think>\n\ntwo"),
    ]});
    let check = |template: &str, chat: &Value, expected: &str| {
        let path = chats().join(format!("{template}.jinja"));
        let folder = model(&std::fs::read_to_string(path).unwrap());
        let found = encoded(&folder, &chat.to_string())
            .unwrap_or_else(|error| panic!("{template}: {error}"));
        assert_eq!(learned_text(&folder, &found), expected, "{template}");
    };
    check("qwen2.5", &chat, "ho<|im_end|>so.<|im_end|>");
    check("qwen3", &chat, "ho<|im_end|><think>\n\n</think>\n\nso.<|im_end|>");
    check("llama3", &chat, "ho<|eot_id|>so.<|eot_id|>");
    check("mistral", &chat, " ho</s> so.</s>");
    check("gemma", &chat, "ho<end_of_turn>so.<end_of_turn>");
    check("gemma3", &chat, "ho<end_of_turn>so.<end_of_turn>");
    check("phi3", &chat, "ho<|end|>so.<|end|>\n</s>");
    let called =
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call><|im_end|>";
    check("qwen2.5", &tools, &format!("{called}seven<|im_end|>"));
    check("qwen3", &tools, &format!("{called}<think>\n\n</think>\n\nseven<|im_end|>"));
    let called = "{\"name\": \"f\", \"parameters\": {\"x\": 1}}<|eot_id|>seven<|eot_id|>";
    check("llama3", &tools, called);
    // Older thoughts are left out.
    check("qwen3", &thoughts, "one<|im_end|><think>\nb\n</think>\n\ntwo<|im_end|>");
    // A template that begins every answer with thoughts.
    let begins = "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}</s>{% endfor %}\
                  {% if add_generation_prompt %}<|assistant|><think>{% endif %}";
    let folder = model(begins);
    let found = encoded(&folder, &thoughts.to_string()).unwrap();
    assert_eq!(learned_text(&folder, &found), "\n\none</s>\n\ntwo</s>");
}

#[test]
fn templates_are_found_and_chosen() {
    let chat = json!({"messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"},
    ]});
    let text = |folder: &Folder, template: ChatTemplate| {
        let found = encoded_with(folder, &chat.to_string(), template).unwrap();
        let all = vec![true; found.0.len()];
        (learned_text(folder, &(found.0.clone(), all)), learned_text(folder, &found))
    };
    let of_model = |folder: &Folder| text(folder, ChatTemplate::OfTokenizer).0;
    let print = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let folder = model(&format!("config:{print}"));
    assert_eq!(of_model(&folder), "config:hiho");
    // The separate file takes precedence.
    folder.write("chat_template.jinja", format!("file:{print}"));
    assert_eq!(of_model(&folder), "file:hiho");
    let other = folder.write("other.jinja", format!("other:{print}\n"));
    assert_eq!(text(&folder, ChatTemplate::File(other)).0, "other:hiho");
    let (all, learned) = text(&folder, ChatTemplate::ChatMl);
    assert_eq!(all, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n");
    assert_eq!(learned, "ho<|im_end|>");
    let (all, learned) = text(&folder, ChatTemplate::Plain);
    assert_eq!((all.as_str(), learned.as_str()), ("user: hi\nassistant: ho\n</s>", " ho\n</s>"));
    // Several by name: the default one, and another for tools.
    let folder = model("");
    let named = json!({"bos_token": null, "chat_template": [
        {"name": "tool_use", "template": format!("tools:{{{{ tools | tojson }}}}{print}")},
        {"name": "default", "template": format!("default:{print}")},
    ]});
    folder.write("tokenizer_config.json", named.to_string());
    assert_eq!(of_model(&folder), "default:hiho");
    let mut with_tools = chat.clone();
    with_tools["tools"] = json!([{"name": "f"}]);
    let (ids, _) = encoded(&folder, &with_tools.to_string()).unwrap();
    let all = vec![true; ids.len()];
    assert_eq!(learned_text(&folder, &(ids, all)), "tools:[{\"name\": \"f\"}]hiho");
    // None at all.
    folder.write("tokenizer_config.json", "{\"chat_template\": null}");
    let error = encoded(&folder, &chat.to_string()).unwrap_err();
    assert!(
        error.contains("line 1") && error.contains("--chat-template: chatml, plain"),
        "{error}"
    );
    // Data without chats needs no template.
    encoded(&folder, r#"{"prompt": "1", "completion": "2"}"#).unwrap();
    let missing =
        encoded_with(&folder, &chat.to_string(), ChatTemplate::File(folder.path("gone.jinja")));
    assert!(missing.unwrap_err().contains("gone.jinja: No such file"));
}

#[test]
fn what_templates_and_chats_must_not_do() {
    let say = |role: &str, content: Value| json!({"role": role, "content": content});
    let turn = [say("user", json!("hi")), say("assistant", json!("ho"))];
    let check = |template: &str, messages: &[Value], expected: &str| {
        let folder = model(template);
        let error = encoded(&folder, &json!({"messages": messages}).to_string()).unwrap_err();
        assert!(error.contains(expected), "{template}: {error}");
    };
    let print = "{% for m in messages %}{{ m.content }}</s>{% endfor %}";
    check("{% for %}", &turn, "line 1: the chat template fails, line 1: unexpected end of block");
    check("{{ raise_exception('never') }}", &turn, "the chat template refuses it: never");
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    check(endless, &turn, "the chat template takes more than 20000000 steps");
    let huge = "{% set ns = namespace(x='0123456789abcdef') %}{% for a in range(40) %}\
                {% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}";
    check(huge, &turn, "its process ended");
    check("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", &turn, "recursion");
    check("{% include '/etc/passwd' %}", &turn, "the chat template fails");
    check("constant", &turn, "message 1: the chat template does not show what `user` says");
    let hidden = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}";
    let with_tool = [&turn[..], &[say("tool", json!("7"))]].concat();
    check(hidden, &with_tool, "message 3: the chat template does not show what `tool` says");
    // Nothing separates the answer from the question before it.
    let mixed = "{{ messages[1].content | upper }}{{ messages[0].content }}{% if messages[2] %}{{ messages[2].content }}{% endif %}";
    let three = [&turn[..], &[say("user", json!("x"))]].concat();
    check(mixed, &three, "message 2: what the assistant says cannot be told");
    check(print, &[say("alien", json!("x"))], "message 1: role `alien` is unknown");
    check(print, &[say("user", json!(5))], "message 1: its `content` is a number");
    check(print, &[say("user", Value::Null)], "message 1: it has no `content`");
    check(print, &[json!("hi")], "message 1: string where an object");
    let image = json!([{"type": "image", "url": "x"}]);
    check(print, &[say("user", image)], "message 1: a content part of type `image`");
    check(print, &[say("user", json!("\u{fdd0}"))], "which are no characters");
    let calls = json!([{"role": "user", "content": "x", "tool_calls": [1]}]);
    check(print, calls.as_array().unwrap(), "only the assistant calls tools");
}
