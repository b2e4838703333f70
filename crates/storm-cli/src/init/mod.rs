//! `storm init`: a commented config for `storm train`, from what is found here and a few questions.

mod found;
mod text;

use crate::{UsageError, train};
use anyhow::{Context, Result};
use clap::Args;
use found::Found;
use std::io::{self, BufRead, Read, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use storm_files::{IfPresent, StageError, StagedFile};
use text::{Choices, Length, ModelChoice};

/// An answer is a path or a number.
const ANSWER_BYTES_MAX: u64 = 1 << 16;

#[derive(Args)]
#[command(
    after_help = "Suggestions come from what is in the current folder (a model directory, data) and from the GPU and \
                  memory of this machine. The config passes the checks of `storm train`."
)]
pub(crate) struct InitArgs {
    /// Config file to write; it must not exist.
    #[arg(default_value = "storm.toml")]
    out: PathBuf,
    /// A preset, a Hugging Face directory, or a model on the hub (`OWNER/MODEL`). If not given, the command asks.
    #[arg(long)]
    model: Option<String>,
    /// A dataset that `storm data pack` wrote, or files of text or chats. If not given, the command asks.
    #[arg(long)]
    data: Option<PathBuf>,
    /// Ask nothing: use what is given, what is found, and defaults.
    #[arg(long)]
    yes: bool,
}

pub(crate) fn run(args: &InitArgs) -> Result<()> {
    let out = &args.out;
    if out.symlink_metadata().is_ok() {
        let problem = format!("{} already exists; name another file", out.display());
        return Err(UsageError(problem).into());
    }
    let found = Found::here();
    let choices = choose(args, &found)?;
    let text = text::config(out, &choices, &found);
    train::check_config(&text)
        .context("no config was written, because this run could not start")?;
    write(out, &text).with_context(|| format!("cannot write {}", out.display()))?;
    println!("wrote {}. To see what the run would take:\n", out.display());
    println!("    storm train {} --dry-run", train::shell_word(out));
    Ok(())
}

fn choose(args: &InitArgs, found: &Found) -> Result<Choices> {
    let ask = Asker { is_silent: args.yes };
    let model = match (&args.model, &found.model) {
        (Some(model), _) => Some(model.clone()),
        (None, Some(model)) => Some(ask.text("Model directory, preset or hub name", Some(model))?),
        (None, None) => {
            let what =
                "Model directory, preset or hub name; Enter for a small model with random weights";
            Some(ask.text(what, Some(""))?).filter(|model| !model.is_empty())
        }
    };
    let model = match model {
        Some(name) => ModelChoice::named(name)?,
        None => ModelChoice::Small,
    };
    let data = match &args.data {
        Some(data) => data.clone(),
        None => {
            let here = found.data.as_deref().map(Path::to_string_lossy);
            PathBuf::from(ask.text("Text, chats (.jsonl) or a packed dataset", here.as_deref())?)
        }
    };
    let length = match &model {
        ModelChoice::Weights { .. } => {
            Length::Epochs(ask.number("Passes over the data (epochs)", 3.0)?)
        }
        ModelChoice::Preset { .. } | ModelChoice::Small => {
            Length::Steps(ask.number("Steps", 1000)?)
        }
    };
    let seq = ask.number("Tokens per sequence", model.seq_default())?;
    Ok(Choices { model, data, length, seq })
}

/// Asks on standard error and reads answers from standard input.
struct Asker {
    /// Defaults are the answers.
    is_silent: bool,
}

impl Asker {
    fn text(&self, what: &str, default: Option<&str>) -> Result<String> {
        if self.is_silent {
            return default.map(str::to_owned).ok_or_else(|| {
                let problem = "found no text and no dataset in this folder; give --data";
                UsageError(problem.to_owned()).into()
            });
        }
        loop {
            let shown = default.filter(|default| !default.is_empty());
            let shown = shown.map(|default| format!(" [{default}]")).unwrap_or_default();
            eprintln!("{what}{shown}:");
            let answer = read_line()?;
            match (answer.is_empty(), default) {
                (false, _) => return Ok(answer),
                (true, Some(default)) => return Ok(default.to_owned()),
                (true, None) => {}
            }
        }
    }

    fn number<T: FromStr + ToString>(&self, what: &str, default: T) -> Result<T> {
        let answer = self.text(what, Some(&default.to_string()))?;
        answer.parse().map_err(|_| UsageError(format!("`{answer}` is not a number")).into())
    }
}

fn read_line() -> Result<String> {
    let mut line = String::new();
    let mut input = io::stdin().lock().take(ANSWER_BYTES_MAX);
    let bytes = input.read_line(&mut line).context("cannot read from standard input")?;
    if bytes == 0 {
        let problem = "standard input ended before the last question; --yes uses the defaults";
        return Err(UsageError(problem.to_owned()).into());
    }
    Ok(line.trim().to_owned())
}

fn write(path: &Path, text: &str) -> Result<(), StageError> {
    let mut out = StagedFile::create(path, IfPresent::Refuse)?;
    let io = |source| StageError::Io { doing: "write", path: path.to_owned(), source };
    out.write_all(text.as_bytes()).map_err(io)?;
    out.finish()
}
