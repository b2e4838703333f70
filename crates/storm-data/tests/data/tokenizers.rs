//! Third-party tokenizers: their results, and that they cannot crash us.

use crate::helpers::{Folder, packed, worker};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::time::Duration;
use storm_data::{
    ChatTemplate, Dataset, IfExists, PackOptions, SpecialTokens, Tokenizer, TokenizerKind,
    TokenizerSource, WorkerCommand,
};

/// A byte-level BPE of 256 bytes, a few merges and these special tokens.
pub(crate) fn tokenizer_json(special: &[&str]) -> Value {
    let mut vocabulary = serde_json::Map::new();
    for byte in 0..=255u8 {
        vocabulary.insert(stand_in(byte).to_string(), byte.into());
    }
    let merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["Ġ", "w"]];
    for (id, merge) in (256..).zip(merges) {
        vocabulary.insert(merge.concat(), id.into());
    }
    let added = |(id, name): (usize, &&str)| {
        json!({
            "id": id, "content": name, "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false,
        })
    };
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    json!({
        "version": "1.0",
        // Must be ignored: nothing may be truncated or padded.
        "truncation": {
            "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
        },
        "padding": null,
        "added_tokens": (260..).zip(special).map(added).collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocabulary, "merges": merges,
        },
    })
}

/// The printable character that stands for a byte in a byte-level BPE.
fn stand_in(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match printable(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|&byte| !printable(byte)).count() as u32;
            char::from_u32(256 + before).unwrap()
        }
    }
}

fn open(json: &Value) -> Result<Tokenizer, String> {
    open_with(json, &worker())
}

fn open_with(json: &Value, worker: &WorkerCommand) -> Result<Tokenizer, String> {
    let folder = Folder::new();
    let path = folder.write("tokenizer.json", json.to_string());
    let source = TokenizerSource::File(path);
    Tokenizer::open(&source, None, worker).map_err(|error| error.to_string())
}

/// Puts `<s>`, token 260, before every text.
fn begins_with_s() -> Value {
    json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [260], "tokens": ["<s>"]}},
    })
}

#[test]
fn texts_become_ids_and_back() {
    let tokenizer = open(&tokenizer_json(&["<|endoftext|>"])).unwrap();
    let info = tokenizer.info();
    assert_eq!((info.kind, info.vocabulary), (TokenizerKind::HuggingFace, 261));
    assert_eq!((info.end_of_text, info.begin_of_text, info.chat), (Some(260), None, None));
    assert_eq!(tokenizer.encode("hello w").unwrap(), [258, u32::from(b'o'), 259]);
    let texts = ["", "hello world", "naïve 🦀\n\n", "<|endoftext|>"];
    let all = tokenizer.encode_all(&texts, SpecialTokens::AsText).unwrap();
    for (text, ids) in texts.iter().zip(&all) {
        assert_eq!(tokenizer.decode(ids).unwrap(), *text);
        // A special token written in the text is ordinary text.
        assert!(!ids.contains(&260), "{text}");
        let mut stream = tokenizer.stream();
        let parts: Vec<String> = ids.iter().map(|&id| stream.step(id).unwrap()).collect();
        assert_eq!(parts.concat() + &stream.finish().unwrap(), *text);
    }
    assert_eq!(tokenizer.decode(&[260]).unwrap(), "<|endoftext|>");
    // Meaningless ids decode to nothing, or are refused.
    assert!(tokenizer.decode(&[u32::MAX]).is_ok_and(|text| text.is_empty()));
}

#[test]
fn special_tokens_are_found() {
    let end = |names: &[&str]| open(&tokenizer_json(names)).unwrap().info().end_of_text;
    assert_eq!(end(&[]), None);
    assert_eq!(end(&["<pad>", "</s>"]), Some(261));
    assert_eq!(end(&["</s>", "<|endoftext|>"]), Some(261));
    let tokenizer = open(&tokenizer_json(&["<|im_end|>", "<|im_start|>"])).unwrap();
    let chat = tokenizer.info().chat.unwrap();
    assert_eq!((chat.start, chat.end), (261, 260));
    // The tokenizer itself adds this before a text.
    let mut json = tokenizer_json(&["<s>", "</s>"]);
    json["post_processor"] = begins_with_s();
    assert_eq!(open(&json).unwrap().info().begin_of_text, Some(260));
}

/// Prompts are encoded as `transformers` does: special tokens are found, and the tokenizer adds its own.
#[test]
fn prompts_have_special_tokens() {
    let mut json = tokenizer_json(&["<s>", "</s>", "[INST]"]);
    json["post_processor"] = begins_with_s();
    let tokenizer = open(&json).unwrap();
    let o = u32::from(b'o');
    assert_eq!(tokenizer.encode("[INST]o").unwrap(), b"[INST]o".map(u32::from));
    assert_eq!(tokenizer.encode_prompt("[INST]o").unwrap(), [260, 262, o]);
    assert_eq!(tokenizer.encode_prompt("").unwrap(), [260]);
    let parsed = tokenizer.encode_all(&["[INST]o", "</s>"], SpecialTokens::Parsed).unwrap();
    assert_eq!(parsed, [vec![262, o], vec![261]]);
    // One way does not change the other.
    assert_eq!(tokenizer.encode("</s>").unwrap(), b"</s>".map(u32::from));
}

/// Decoders like SentencePiece's drop the space before the first word: after a prompt it must stay.
#[test]
fn text_behind_a_prompt_keeps_its_space() {
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let json = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": metaspace,
        "post_processor": null, "decoder": metaspace,
        "model": {"type": "WordLevel", "vocab": {"▁one": 0, "▁two": 1, "s": 2, "?": 3}, "unk_token": "?"},
    });
    let tokenizer = open(&json).unwrap();
    let prompt = tokenizer.encode_prompt("one").unwrap();
    assert_eq!(prompt, [0]);
    let mut stream = tokenizer.stream_after(&prompt);
    let parts: Vec<String> = [1, 2, 1].iter().map(|&id| stream.step(id).unwrap()).collect();
    assert_eq!(parts, [" two", "s", " two"]);
    let long = [0; 20];
    assert_eq!(tokenizer.stream_after(&long).step(1).unwrap(), " two");
    assert_eq!(tokenizer.stream().step(1).unwrap(), "two");
}

/// A template can be written by hand into prompts and completions.
#[test]
fn instructions_have_special_tokens() {
    let folder = Folder::new();
    let mut json = tokenizer_json(&["<s>", "</s>", "[INST]"]);
    json["post_processor"] = begins_with_s();
    folder.write("tokenizer.json", json.to_string());
    let input = folder.write(
        "a.jsonl",
        "{\"prompt\": \"[INST]q\", \"completion\": \"a\"}\n\
         {\"prompt\": \"<s>[INST]q\", \"completion\": \"a</s>\"}\n\
         {\"prompt\": \"q</s>\", \"completion\": \"\"}\n",
    );
    let options = PackOptions {
        tokenizer: TokenizerSource::File(folder.path("tokenizer.json")),
        ..folder.options(&[&input])
    };
    let tokens = |options: &PackOptions| {
        packed(options).unwrap();
        let dataset = Dataset::open(&options.out).unwrap();
        let sample = |number| {
            let range = dataset.sample(number).unwrap();
            let mut ids = vec![0; (range.end - range.start) as usize];
            dataset.read_tokens(range.start, &mut ids, &mut Vec::new()).unwrap();
            ids
        };
        [sample(0), sample(1), sample(2)]
    };
    let (q, a) = (i32::from(b'q'), i32::from(b'a'));
    let whole = vec![260, 262, q, a, 261];
    // Special tokens that are already there are not added again.
    assert_eq!(tokens(&options), [whole.clone(), whole, vec![260, q, 261, 261]]);
    let plain = PackOptions {
        special_tokens: SpecialTokens::AsText,
        out: folder.path("plain"),
        ..options.clone()
    };
    let [first, second, _] = tokens(&plain);
    let text: Vec<i32> = b"[INST]qa".iter().map(|&byte| i32::from(byte)).collect();
    assert_eq!(first, [&[260], &text[..], &[261]].concat());
    assert_eq!(second.len(), 1 + "<s>[INST]qa</s>".len() + 1);
}

/// Long text is encoded in pieces that end after line breaks, which must make no difference.
#[test]
fn pieces_have_the_tokens_of_the_whole() {
    let text = "hello world\n\n  hello\r\n\r\nwell, 1234 hello's\n\thello\n\n\nhell\n'll hello.\nhello\n🦀\nhe\n12\nll";
    let is_text = |next: Option<char>| next.is_some_and(|next| !next.is_whitespace());
    let good = |&at: &usize| {
        is_text(text[at..].chars().next()) && is_text(text[..at - 1].chars().next_back())
    };
    let ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at + 1).filter(good).collect();
    assert_eq!(ends.len(), 6);
    // GPT-2's, and that of Llama 3 and Qwen.
    let patterns = [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ];
    for pattern in patterns {
        let mut json = tokenizer_json(&[]);
        // Line breaks that would merge with each other and with words if they were not kept apart.
        for (id, merge) in (260..).zip([["Ċ", "Ċ"], ["Ċ", "h"], ["Ċ", "w"], ["ĊĊ", "h"]]) {
            json["model"]["vocab"][merge.concat()] = id.into();
            json["model"]["merges"].as_array_mut().unwrap().push(merge.into());
        }
        let split = json!({
            "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false,
        });
        let mut bytes = json["pre_tokenizer"].clone();
        bytes["use_regex"] = false.into();
        json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, bytes]});
        let tokenizer = open(&json).unwrap();
        let whole = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&whole).unwrap(), text);
        for &end in &ends {
            let pieces =
                tokenizer.encode_all(&[&text[..end], &text[end..]], SpecialTokens::AsText).unwrap();
            assert_eq!(pieces.concat(), whole, "{pattern}: cut before {:?}", &text[end..]);
        }
    }
}

#[test]
fn datasets_keep_their_tokenizer() {
    let folder = Folder::new();
    let json = tokenizer_json(&["<|im_start|>", "<|im_end|>", "<stop>", "<|endoftext|>"]);
    folder.write("tokenizer.json", json.to_string());
    let chat = folder.write(
        "chat.jsonl",
        r#"{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "<|im_end|>"}]}"#,
    );
    let options = PackOptions {
        tokenizer: TokenizerSource::parse(folder.path("").to_str().unwrap()),
        end_of_text: Some("<stop>".into()),
        chat_template: ChatTemplate::ChatMl,
        ..folder.options(&[&chat])
    };
    packed(&options).unwrap();
    let dataset = Dataset::open(&options.out).unwrap();
    dataset.verify(&|_| {}).unwrap();
    let tokenizer = Tokenizer::of_dataset(&dataset, &worker()).unwrap();
    assert_eq!(tokenizer.info(), &dataset.manifest().tokenizer);
    assert_eq!(tokenizer.info().end_of_text, Some(262));
    let range = dataset.sample(0).unwrap();
    let count = (range.end - range.start) as usize;
    let (mut ids, mut learned) = (vec![0; count], vec![false; count]);
    dataset.read_tokens(0, &mut ids, &mut Vec::new()).unwrap();
    dataset.read_mask(0, &mut learned, &mut Vec::new()).unwrap();
    let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
    let text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<|im_end|><|im_end|>\n";
    assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    // Two messages have four marks; a fifth that is written in a message is also a mark, as in
    // `transformers`.
    assert_eq!(ids.iter().filter(|&&id| id == 260 || id == 261).count(), 5);
    let answer: Vec<u32> =
        ids.iter().zip(&learned).filter_map(|(&id, &learned)| learned.then_some(id)).collect();
    assert_eq!(answer.last(), Some(&261));
    assert_eq!(tokenizer.decode(&answer).unwrap(), "<|im_end|><|im_end|>");
    // It cannot be text: the chat is encoded as a whole.
    let plain = PackOptions {
        special_tokens: SpecialTokens::AsText,
        out: folder.path("plain"),
        ..options.clone()
    };
    let error = packed(&plain).unwrap_err().to_string();
    assert!(error.contains("line 1: a message holds `<|im_end|>`"), "{error}");
    // A copy that was changed is not used.
    folder.write("out/tokenizer.json", "{}");
    let error = Tokenizer::of_dataset(&dataset, &worker()).unwrap_err().to_string();
    assert!(error.contains("not the tokenizer that made the tokens"), "{error}");
    dataset.verify(&|_| {}).unwrap_err();
}

#[test]
fn large_vocabularies_take_four_bytes() {
    let folder = Folder::new();
    let mut json = tokenizer_json(&["</s>"]);
    json["model"]["vocab"]["never"] = 70_000.into();
    folder.write("tokenizer.json", json.to_string());
    let input = folder.write("a.txt", "hello w");
    let wide = PackOptions {
        tokenizer: TokenizerSource::File(folder.path("tokenizer.json")),
        if_exists: IfExists::Replace,
        ..folder.options(&[&input])
    };
    packed(&wide).unwrap();
    let dataset = Dataset::open(&wide.out).unwrap();
    dataset.verify(&|_| {}).unwrap();
    let mut tokens = [0; 4];
    dataset.read_tokens(0, &mut tokens, &mut Vec::new()).unwrap();
    let info = &dataset.manifest().tokenizer;
    let end = info.end_of_text.unwrap() as i32;
    assert_eq!(tokens, [258, i32::from(b'o'), 259, end]);
    assert_eq!(info.vocabulary, 70_001);
    // A record of 1024 tokens of four bytes and its checksum.
    assert_eq!(dataset.manifest().stored.as_ref().unwrap().tokens.raw_bytes, 4096 + 4);
}

#[test]
fn bad_tokenizers_are_refused() {
    let check = |json: Value, expected: &str| {
        let error = open(&json).unwrap_err();
        assert!(error.contains("tokenizer.json") && error.contains(expected), "{error}");
    };
    check(json!({}), "");
    check(json!([]), "");
    let mut huge = tokenizer_json(&[]);
    huge["model"]["vocab"]["x"] = u32::MAX.into();
    check(huge, "");
    let mut large = tokenizer_json(&[]);
    large["model"]["vocab"]["x"] = (1u32 << 30).into();
    check(large, "beyond what a model can have");
    let mut empty = tokenizer_json(&[]);
    empty["model"]["vocab"] = json!({});
    empty["model"]["merges"] = json!([]);
    check(empty, "its vocabulary is empty");
    let mut regex = tokenizer_json(&[]);
    regex["pre_tokenizer"] = json!({
        "type": "Split", "pattern": {"Regex": "(((("}, "behavior": "Isolated", "invert": false,
    });
    check(regex, "");
    let folder = Folder::new();
    let nested = folder.write("tokenizer.json", "[".repeat(1 << 20));
    let source = TokenizerSource::File(nested);
    Tokenizer::open(&source, None, &worker()).unwrap_err();
    let missing = TokenizerSource::File(folder.path("missing.json"));
    let error = Tokenizer::open(&missing, None, &worker()).unwrap_err().to_string();
    assert!(error.contains("missing.json: No such file"), "{error}");
    let path = folder.write("good.json", tokenizer_json(&[]).to_string());
    let source = TokenizerSource::File(path);
    let error = Tokenizer::open(&source, Some("<gone>"), &worker()).unwrap_err().to_string();
    assert!(error.contains("it has no token `<gone>`"), "{error}");
}

/// A process that runs this script instead of serving.
fn shell(script: &str) -> WorkerCommand {
    let arguments = ["-c", script].map(OsString::from).to_vec();
    WorkerCommand { program: "/bin/sh".into(), arguments, ..worker() }
}

#[test]
fn a_tokenizer_that_crashes_is_an_error() {
    let check = |script: &str, expected: &str| {
        let error = open_with(&tokenizer_json(&[]), &shell(script)).unwrap_err();
        assert!(error.contains(expected), "{error}");
    };
    check("exit 3", "exit status: 3");
    check("kill -SEGV $$", "signal: 11");
    check("head -c 100 >/dev/null; kill -ABRT $$", "signal: 6");
    // Nonsense: a length without bytes, a length beyond any, no reply at all, a wrong one.
    check("printf '\\020\\0\\0\\0'", "its process ended");
    check("printf '\\377\\377\\377\\377'", "its process ended");
    check("printf '\\0\\0\\0\\0'", "makes no sense");
    check("printf '\\003\\0\\0\\0\\0{}'", "makes no sense");
    check("printf '\\003\\0\\0\\0\\001no'", "no");
    let missing = WorkerCommand { program: "/nonexistent".into(), ..worker() };
    let error = open_with(&tokenizer_json(&[]), &missing).unwrap_err();
    assert!(error.contains("cannot start its process"), "{error}");
}

#[test]
fn a_tokenizer_that_never_comes_back_is_an_error() {
    let reply_time_max = Duration::from_millis(100);
    // Takes every request and answers none.
    let silent = WorkerCommand { reply_time_max, ..shell("cat > /dev/null") };
    let error = open_with(&tokenizer_json(&[]), &silent).unwrap_err();
    assert!(error.contains("did not answer within 100ms"), "{error}");
    // Opens, and then is silent.
    let script = r#"printf '\112\0\0\0\0{"vocabulary":300,"end_of_text":null,"begin_of_text":null,"chat":null}   '; cat > /dev/null"#;
    // Long enough for a busy machine to start it.
    let reply_time_max = Duration::from_secs(3);
    let silent = WorkerCommand { reply_time_max, ..shell(script) };
    let tokenizer = open_with(&tokenizer_json(&[]), &silent).unwrap();
    for _ in 0..2 {
        let error = tokenizer.encode("hello").unwrap_err().to_string();
        assert!(error.contains("did not answer"), "{error}");
    }
}

#[test]
fn a_tokenizer_that_takes_too_much_memory_is_an_error() {
    // A regular expression that compiles to gigabytes unless it is stopped.
    let mut json = tokenizer_json(&[]);
    json["normalizer"] = json!({
        "type": "Replace", "pattern": {"Regex": "(?:(?:(?:x{1,9999}){1,9999}){1,9999}){1,9999}"},
        "content": "",
    });
    open(&json).unwrap_err();
    // Each letter becomes a megabyte: a thousand of them exceed the limit of the process here.
    let mut json = tokenizer_json(&[]);
    json["normalizer"] =
        json!({"type": "Replace", "pattern": {"String": "a"}, "content": "b".repeat(1 << 20)});
    let script = format!("ulimit -v 300000; exec '{}'", worker().program.display());
    let tokenizer = open_with(&json, &shell(&script)).unwrap();
    tokenizer.encode("hello").unwrap();
    let error = tokenizer.encode(&"a".repeat(1000)).unwrap_err().to_string();
    assert!(error.contains("its process ended"), "{error}");
    // And it stays one.
    tokenizer.encode("hello").unwrap_err();
}
