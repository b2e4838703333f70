//! `storm sample`: text by a model, as it is written.

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
    /// A Hugging Face directory, the folder of a run (its newest checkpoint), that of a checkpoint, or the name of a model
    /// on the hub, `OWNER/MODEL`.
    model: PathBuf,
    #[command(flatten)]
    which: Which,
    /// What to go on with. Special tokens that are written out in it are tokens, and the tokenizer puts its own
    /// before it, as `transformers` has it.
    #[arg(long, default_value = "")]
    prompt: String,
    /// Take the prompt for text alone: special tokens in it are text, and none is put before it.
    #[arg(long, conflicts_with = "chat")]
    plain_text: bool,
    /// Take the prompt for a message, and write the answer by the model's chat template.
    #[arg(long)]
    chat: bool,
    /// For --chat: what the assistant is told before the message.
    #[arg(long, requires = "chat")]
    system: Option<String>,
    #[command(flatten)]
    writing: WritingArgs,
    /// Tokens to write at most; less if the model ends its text.
    #[arg(long, default_value_t = 256, value_parser = positive)]
    tokens: usize,
    /// Tokens that the model looks back on. If not given, all of prompt and text, up to 4096 and to the
    /// positions that the model has. When there are more, it goes on from the last half of them.
    #[arg(long, value_parser = positive)]
    seq: Option<usize>,
    /// Print one object of JSON instead of the text: the tokens of prompt and text, the text, and whether the model ended
    /// it (`end`) or --tokens did (`length`).
    #[arg(long)]
    json: bool,
    /// Say afterwards how fast it was, on standard error.
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

/// What turns text into tokens and back.
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
                let problem = "give a --prompt: the tokenizer has no token that texts begin with";
                return Err(UsageError(problem.to_owned()).into());
            };
            prompt.push(end_of_text);
        }
        Ok(prompt)
    }

    fn stream(&self, prompt: &[u32]) -> DecodeStream<'_> {
        match self {
            Writer::Text(tokenizer) => tokenizer.stream_after(prompt),
            // An answer stands for itself.
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
