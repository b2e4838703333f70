//! `storm sample`: generates text and prints it as it comes.

use crate::size::positive;
use crate::source::{ModelSource, Which};
use crate::writing::{self, Ends, Finish, WritingArgs, show};
use crate::{UsageError, data};
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;
use std::time::Instant;
use storm_data::{ChatMessage, ChatTokenizer, DecodeStream, Tokenizer};
use storm_train::Generator;

#[derive(Args)]
pub(crate) struct SampleArgs {
    /// Model: a Hugging Face directory, a run's folder (its newest checkpoint), a checkpoint's folder, an adapter's
    /// folder, or a model on the hub (`OWNER/MODEL`).
    model: PathBuf,
    #[command(flatten)]
    which: Which,
    /// Prompt to continue. Special tokens in it are parsed, and the tokenizer adds its own at the start, as in
    /// `transformers`; --plain-text turns both off.
    #[arg(long, default_value = "")]
    prompt: String,
    /// Treat the prompt as plain text: special tokens in it are text, and none are added.
    #[arg(long, conflicts_with = "chat")]
    plain_text: bool,
    /// Treat the prompt as a user message, and generate the answer with the model's chat template.
    #[arg(long)]
    chat: bool,
    /// System message for --chat.
    #[arg(long, requires = "chat")]
    system: Option<String>,
    #[command(flatten)]
    writing: WritingArgs,
    /// Most tokens to generate; the model may end its text earlier.
    #[arg(long, default_value_t = 256, value_parser = positive)]
    tokens: usize,
    /// Length of the context in tokens. When the text gets longer, the model continues with the last half of it.
    /// Default: the prompt and all generated text, up to 4096 tokens and the model's positions.
    #[arg(long, value_parser = positive)]
    seq: Option<usize>,
    /// Print one JSON object instead of the text: the tokens of prompt and text, the text, and what ended it: the model
    /// (`end`) or --tokens (`length`).
    #[arg(long)]
    json: bool,
    /// Print the time to the first token and the speed after it, on standard error.
    #[arg(long)]
    timing: bool,
}

pub(crate) fn run(args: &SampleArgs) -> Result<()> {
    let source = ModelSource::open(&args.model, &args.which)?;
    let writer = Writer::open(args, &source)?;
    let prompt = writer.prompt(args)?;
    let all = prompt.len().saturating_add(args.tokens);
    let window = args.seq.unwrap_or_else(|| writing::window(&source.config, all));
    let mut model = args.writing.load(&source, window)?;
    let text = writer.stream(&prompt);
    let mut generator = Generator::new(&mut model, prompt.clone(), args.writing.sampling())?;
    if !args.json && !args.chat {
        show(&args.prompt)?;
    }
    let begun = Instant::now();
    let mut first = None;
    let mut answer = String::new();
    let written =
        writing::write(&mut generator, text, &writer.ends(&source)?, args.tokens, |piece| {
            first.get_or_insert_with(Instant::now);
            answer.push_str(piece);
            if args.json { Ok(()) } else { show(piece) }
        })?;
    if args.json {
        let finish = match written.finish {
            Finish::End => "end",
            Finish::Length => "length",
        };
        let object = serde_json::json!({
            "prompt_tokens": prompt, "tokens": written.tokens, "text": answer, "finish": finish,
        });
        println!("{object}");
    } else {
        show("\n")?;
    }
    if let (true, Some(first)) = (args.timing, first) {
        let (to_first, after) = (first - begun, first.elapsed().as_secs_f64());
        let speed = written.tokens.len().saturating_sub(1) as f64 / after;
        eprintln!("first token after {:.3} s, then {speed:.1} tokens/s", to_first.as_secs_f64());
    }
    Ok(())
}

/// Encodes the prompt and decodes the text.
enum Writer {
    Text(Tokenizer),
    Chat(ChatTokenizer),
}

impl Writer {
    fn open(args: &SampleArgs, source: &ModelSource) -> Result<Writer> {
        let tokenizer = source.tokenizer(args.writing.tokenizer.as_deref())?;
        let worker = data::worker()?;
        if !args.chat {
            return Ok(Writer::Text(Tokenizer::open(&tokenizer, None, &worker)?));
        }
        let template = source.chat_template(args.writing.chat_template.as_deref());
        Ok(Writer::Chat(ChatTokenizer::open(&tokenizer, &template, &worker)?))
    }

    fn prompt(&self, args: &SampleArgs) -> Result<Vec<u32>> {
        let tokenizer = match self {
            Writer::Chat(chats) => {
                let system = args.system.iter().map(|text| ChatMessage::new("system", text));
                let message = ChatMessage::new("user", &args.prompt);
                return Ok(chats.prompt(&system.chain([message]).collect::<Vec<_>>())?);
            }
            Writer::Text(tokenizer) => tokenizer,
        };
        let mut prompt = match args.plain_text {
            true => tokenizer.encode(&args.prompt)?,
            false => tokenizer.encode_prompt(&args.prompt)?,
        };
        if prompt.is_empty() {
            let Some(end_of_text) = tokenizer.info().end_of_text else {
                let problem = "give a --prompt: the tokenizer has no token to begin a text with";
                return Err(UsageError(problem.to_owned()).into());
            };
            prompt.push(end_of_text);
        }
        Ok(prompt)
    }

    fn stream(&self, prompt: &[u32]) -> DecodeStream<'_> {
        match self {
            Writer::Text(tokenizer) => tokenizer.stream_after(prompt),
            // An answer is decoded on its own, without the prompt before it.
            Writer::Chat(chats) => chats.tokenizer().stream(),
        }
    }

    fn ends(&self, source: &ModelSource) -> Result<Ends> {
        match self {
            Writer::Text(tokenizer) => source.ends(tokenizer),
            Writer::Chat(chats) => source.ends_of_answer(chats),
        }
    }
}
