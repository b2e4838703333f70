//! The config as text, with comments.

use super::found::Found;
use crate::size::show;
use crate::train;
use anyhow::Result;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Sequences of a step: large enough to learn steadily, small enough for any machine.
const STEP_ROWS: usize = 8;

/// Longer rows cost memory that a first run need not take.
const SEQ_DEFAULT: usize = 1024;

/// Of a small model of fresh weights.
const SMALL_SEQ: usize = 256;

/// What was chosen.
pub(super) struct Choices {
    pub(super) model: ModelChoice,
    pub(super) data: PathBuf,
    pub(super) length: Length,
    pub(super) seq: usize,
}

pub(super) enum ModelChoice {
    /// Weights to fine-tune.
    Weights { name: String, max_positions: usize },
    /// A preset in its own shape, from fresh weights.
    Preset { name: String },
    /// A few million parameters, from fresh weights.
    Small,
}

pub(super) enum Length {
    Epochs(f64),
    Steps(u64),
}

impl ModelChoice {
    pub(super) fn named(name: String) -> Result<ModelChoice> {
        Ok(match train::positions_of_weights(&name)? {
            Some(max_positions) => ModelChoice::Weights { name, max_positions },
            None => ModelChoice::Preset { name },
        })
    }

    pub(super) fn seq_default(&self) -> usize {
        match self {
            ModelChoice::Weights { max_positions, .. } => SEQ_DEFAULT.min(*max_positions),
            ModelChoice::Preset { .. } => SEQ_DEFAULT,
            ModelChoice::Small => SMALL_SEQ,
        }
    }
}

/// The file, as it is written.
pub(super) fn config(out: &Path, choices: &Choices, found: &Found) -> String {
    let shown = train::shell_word(out);
    let name = free_name(out);
    let Choices { model, data, length, seq } = choices;
    let mut text = format!(
        "# A run of `storm train`, written by `storm init`.\n\
         #\n\
         #     storm train {shown} --dry-run    checks it and prints what it takes\n\
         #     storm train {shown}              trains\n\
         #\n\
         # `storm train --help` lists all keys; each is also a flag.\n\
         \n\
         # The run writes everything to runs/{name}.\n\
         name = {}\n\n",
        quoted(&name)
    );
    let learning_rate = match model {
        ModelChoice::Weights { name, .. } => {
            text.push_str("# The model to fine-tune.\n");
            let _ = writeln!(text, "model = {}\n", quoted(name));
            train::FURTHER_RATE
        }
        ModelChoice::Preset { name } => {
            text.push_str("# A preset: random weights, with the vocabulary of the data.\n");
            let _ = writeln!(text, "model = {}\n", quoted(name));
            train::FRESH_RATE
        }
        ModelChoice::Small => {
            text.push_str(
                "# Random weights in the shape of Qwen3, but much smaller.\n\
                 model = \"qwen3-0.6b\"\nlayers = 4\nwidth = 128\nheads = 4\nmlp-width = 352\n\n",
            );
            3e-3
        }
    };
    text.push_str(
        "# Training data: text, chats or samples, or a dataset that `storm data pack` wrote.\n",
    );
    let _ = writeln!(text, "data = {}\n", quoted(&data.to_string_lossy()));
    match length {
        Length::Epochs(epochs) => {
            text.push_str("# Passes over the data; `steps` sets a number of steps instead.\n");
            let _ = writeln!(text, "epochs = {epochs:?}\n");
        }
        Length::Steps(steps) => {
            text.push_str("# Number of steps; `epochs` sets passes over the data instead.\n");
            let _ = writeln!(text, "steps = {steps}\n");
        }
    }
    let _ = writeln!(
        text,
        "# Tokens per sequence, and per step. STORM chooses the micro-batches of a step for speed.\n\
         seq = {seq}\n\
         tokens-per-step = {}\n",
        seq.saturating_mul(STEP_ROWS)
    );
    let _ = writeln!(
        text,
        "# Peak learning rate. It falls to a tenth along a cosine; `schedule` and `warmup` change that.\n\
         learning-rate = {learning_rate:e}\n"
    );
    device(&mut text, found);
    text.push_str(
        "\n# Steps between evaluations on held-out data, and between checkpoints. Default: one of each, at the end.\n\
         # eval-every = 100\n\
         # save-every = 100\n",
    );
    text
}

fn device(text: &mut String, found: &Found) {
    match &found.card {
        Some(card) => {
            let gib = card.memory_bytes as f64 * 0.9 / f64::from(1 << 30);
            let _ = writeln!(
                text,
                "# {} with {}. vram limits all device memory of the process.\n\
                 device = \"cuda\"\n\
                 vram = \"{:.0}GiB\"",
                card.name,
                show(card.memory_bytes),
                gib.floor().max(1.0)
            );
        }
        None => text.push_str(
            "# No usable GPU: `storm doctor` says what is missing.\n\
             device = \"cpu\"\n",
        ),
    }
    if let Some(bytes) = found.ram_bytes {
        let _ = writeln!(
            text,
            "# Host memory that the run may use. Default: what is available when it starts, now {}.\n\
             # ram = \"{}MiB\"",
            show(bytes),
            bytes >> 20
        );
    }
}

/// The name of the file, or one like it that no run has yet.
fn free_name(out: &Path) -> String {
    let stem = out.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let plain = |c: char| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let stem: String = stem.chars().map(plain).collect();
    let stem = match stem.trim_start_matches('.') {
        "" => "run",
        stem => stem,
    };
    let is_free = |name: &String| !Path::new("runs").join(name).exists();
    let numbered = (2u32..).map(|number| format!("{stem}-{number}"));
    let mut names = std::iter::once(stem.to_owned()).chain(numbered);
    names.find(is_free).unwrap_or_else(|| stem.to_owned())
}

/// As TOML writes text.
fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}
