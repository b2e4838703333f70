//! From options to all that a run needs, before anything is trained.

use super::config;
use super::data;
use super::device::{DeviceKind, Machine};
use super::folder::{self, Claimed, Start};
use super::model::Model;
use super::options::{Given, Settings};
use super::output::Style;
use super::values::OverlongArg;
use crate::forced::ForcedArgs;
use crate::model_tokenizer::OtherTokenizer;
use crate::plan::{self, Answer, DeviceMemory, Request, explained};
use crate::{UsageError, host_memory};
use anyhow::Result;
use std::collections::BTreeMap;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use storm_data::Dataset;
use storm_files::{FolderLock, replace_file};
use storm_graph::AdamWParameters;
use storm_train::{
    Launch, OptimizerOptions, Progress, Retention, RunError, RunOptions, Schedule, StepSize,
    TimedSplit, TrainOptions, TrialOptions, checkpoint_bytes,
};

/// Options that a run cannot change on its way: with another value it would be another run.
const FIXED: [&str; 15] = [
    "model",
    "layers",
    "width",
    "heads",
    "kv-heads",
    "mlp-width",
    "tokenizer",
    "chat-template",
    "seq",
    "batch",
    "accumulate",
    "tokens-per-step",
    "precision",
    "chunk-rows",
    "seed",
];

/// Options that change what is learned from here on.
const LEARNING: [&str; 11] = [
    "steps",
    "learning-rate",
    "final-learning-rate",
    "warmup",
    "schedule",
    "weight-decay",
    "decay-targets",
    "beta1",
    "beta2",
    "epsilon",
    "clip",
];

/// Everything that is known before the first step.
pub(super) struct Setup {
    pub(super) settings: Settings,
    pub(super) style: Style,
    pub(super) start: Start,
    /// `runs/NAME`.
    pub(super) folder: PathBuf,
    /// No other process writes there while this is held.
    _lock: Option<FolderLock>,
    /// What was given, and what was chosen for what was not.
    given: Given,
    pub(super) dataset: Arc<Dataset>,
    pub(super) model: Model,
    pub(super) machine_kind: DeviceKind,
    /// Of the CPU device; none on a card.
    pub(super) threads: usize,
    pub(super) request: Request,
    /// The plan, and how it got there.
    pub(super) launch: Launch,
    planning_seconds: f64,
    /// Sizes of micro-batches that were tried.
    pub(super) splits: Vec<TimedSplit>,
}

impl Setup {
    pub(super) fn new(
        mut given: Given,
        start: Start,
        other: OtherTokenizer,
        style: Style,
    ) -> Result<Setup> {
        let name = given.name.clone().unwrap_or_default();
        let is_plain = !name.is_empty()
            && name.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c))
            && !name.starts_with('.');
        if !is_plain {
            let problem = format!("`{name}` is no name for a run: use letters, digits, - _ and .");
            return Err(UsageError(problem).into());
        }
        let folder = given.clone().resolve().runs.join(&name);
        let Claimed { lock, before } = folder::claim(&folder, start)?;
        if let Some(before) = &before {
            take_over(&mut given, before);
        }
        let model = Model::new(&given.clone().resolve())?;
        given.model = Some(model.name.clone());
        // A resumed run was checked when it began.
        let other = if before.is_some() { OtherTokenizer::Allowed } else { other };
        let source = data::Source { model: &model, run: &folder, start, other, style };
        let dataset = source.open(&mut given)?;
        let settings = given.clone().resolve();
        let vocabulary = dataset.manifest().tokenizer.vocabulary as usize;
        let model = model.for_vocabulary(&settings, vocabulary)?;
        data::check_lengths(&settings, &dataset, model.config.max_positions)?;
        if let Some(words) = model.config.rotary_words(settings.seq.get()) {
            eprintln!("{}: {words}", model.name);
        }
        let machine = Machine::new(&(&settings).into(), model.config.parameter_count(), style)?;
        let train_options = train_options(&settings, &dataset);
        let forced = forced(&settings);
        let (machine_kind, threads) = (machine.kind, machine.threads);
        let step = step_size(&settings)?;
        let step_bytes = host_memory::of_step(step, &train_options);
        host_memory::check_step(step_bytes, machine.ram.bytes)?;
        let checkpoint_bytes = checkpoint_bytes(&model.config, &train_options)?;
        let request = Request {
            model: model.name.clone(),
            config: model.config.clone(),
            options: train_options,
            step,
            profile: machine.profile,
            vram: machine.vram,
            ram: machine.ram,
            forced: forced.forced(),
            forced_words: forced.words(),
            device_memory: match machine_kind {
                DeviceKind::Cpu => DeviceMemory::OfHost,
                DeviceKind::Cuda => DeviceMemory::Own,
            },
            save_mode: settings.save_mode,
            checkpoint_bytes,
            beside_bytes: step_bytes.saturating_add(host_memory::of_threads(threads)),
        };
        let begun = Instant::now();
        let mut trial = TrialOptions::of_run(settings.steps.get());
        if let (DeviceKind::Cpu, Some(trial)) = (machine_kind, &mut trial) {
            // A step on the CPU takes long, and depends little on the size of micro-batches.
            trial.splits = 1;
        }
        let launch = Launch::new(request.launch(trial))
            .map_err(|error| explained(&request, error, false))?;
        let mut setup = Setup {
            _lock: lock,
            given,
            settings,
            style,
            start,
            folder,
            dataset,
            model,
            machine_kind,
            threads,
            splits: Vec::new(),
            request,
            launch,
            planning_seconds: begun.elapsed().as_secs_f64(),
        };
        setup.settle();
        if let Some(before) = &before {
            compare(&before.settings, &setup.record())?;
        }
        Ok(setup)
    }

    /// Takes down what the launch has chosen. A resumed run keeps it.
    pub(super) fn settle(&mut self) {
        let plan = self.launch.plan();
        self.given.batch = NonZeroUsize::new(plan.batch);
        self.given.accumulate = NonZeroUsize::new(plan.accumulate);
    }

    /// The plan, for people.
    pub(super) fn shown(&self) -> Result<String> {
        let mut answer = Answer::new(&self.request, self.launch.plan().clone())?;
        answer.planning_seconds = self.planning_seconds;
        Ok(plan::shown(&self.request, &answer))
    }

    /// Every option that has a value, as text.
    fn record(&self) -> BTreeMap<String, String> {
        record(&self.given.clone().or(Given::defaults()))
    }

    /// Makes the folder that of this run, once nothing keeps it from going on: deletes what a killed process left
    /// half-done, and writes `config.toml`.
    pub(super) fn write_down(&self) -> Result<()> {
        folder::checkpoints(&self.folder)?.remove_unfinished()?;
        let path = self.folder.join("config.toml");
        let config = config::write(&self.given.clone().or(Given::defaults()));
        let written = replace_file(&path, |out| out.write_all(config.as_bytes()));
        Ok(written.map_err(RunError::write(&path))?)
    }

    pub(super) fn run_options(&self, device: String) -> Result<RunOptions> {
        let settings = &self.settings;
        let steps = settings.steps.get();
        let last = settings.final_learning_rate.unwrap_or(0.1 * settings.learning_rate);
        let decay = settings.schedule.into();
        Ok(RunOptions {
            steps,
            schedule: Schedule::new(settings.learning_rate, last, settings.warmup, steps, decay)?,
            evaluate_every: settings.eval_every.map(Into::into),
            evaluation_steps: settings.eval_steps.get(),
            patience: settings.patience.map(Into::into),
            save_every: settings.save_every.map(Into::into),
            retention: Retention {
                last: settings.keep_last.get(),
                every: settings.keep_every.map(Into::into),
            },
            keep_best: settings.keep_best,
            settings: self.record(),
            device,
        })
    }
}

/// Sizes of micro-batches and the tokenizer are chosen once: a resumed run keeps them.
fn take_over(given: &mut Given, before: &Progress) {
    let saved = |key: &str| before.settings.get(key)?.parse::<NonZeroUsize>().ok();
    if given.tokens_per_step.is_some() && given.batch.is_none() && given.accumulate.is_none() {
        given.batch = saved("batch");
        given.accumulate = saved("accumulate");
    }
    // Runs that do not say had the ends of long samples cut off.
    if given.overlong.is_none() && !before.settings.contains_key("overlong") {
        given.overlong = Some(OverlongArg::Truncate);
    }
    // A name on a hub is that of another model later.
    let began = before.settings.get("model");
    let is_same = |began: &&String| {
        given
            .model
            .as_deref()
            .is_some_and(|name| began.strip_prefix(name).is_some_and(|rest| rest.starts_with('@')))
    };
    given.model = began.filter(is_same).cloned().or(given.model.take());
    given.tokenizer = given.tokenizer.take().or_else(|| before.settings.get("tokenizer").cloned());
}

fn train_options(settings: &Settings, dataset: &Dataset) -> TrainOptions {
    let batch = settings.batch.map_or(1, NonZeroUsize::get);
    TrainOptions {
        packing: data::packing(dataset),
        chunk_rows: settings.chunk_rows.get(),
        optimizer: OptimizerOptions {
            adamw: AdamWParameters {
                beta1: settings.beta1 as f32,
                beta2: settings.beta2 as f32,
                epsilon: settings.epsilon as f32,
                weight_decay: settings.weight_decay as f32,
            },
            decay: settings.decay_targets.into(),
            max_norm: (settings.clip != 0.0).then_some(settings.clip as f32),
        },
        seed: settings.seed.0,
        ..TrainOptions::new(batch, settings.seq.get(), settings.precision.into())
    }
}

fn step_size(settings: &Settings) -> Result<StepSize> {
    let Settings { tokens_per_step, batch, accumulate, seq, .. } = settings;
    let accumulate = accumulate.map_or(1, NonZeroUsize::get);
    match (tokens_per_step, batch) {
        (Some(tokens), Some(batch)) => {
            let product = [batch.get(), accumulate, seq.get()].map(|factor| factor as u128);
            let product = product.into_iter().fold(1, u128::saturating_mul);
            match product == tokens.get() as u128 {
                true => Ok(StepSize::MicroBatches(accumulate)),
                false => Err(UsageError(format!(
                    "tokens-per-step is {tokens}, but batch × accumulate × seq is {product}; give one or \
                     the other"
                ))
                .into()),
            }
        }
        (Some(tokens), None) => Ok(StepSize::Tokens(tokens.get())),
        (None, _) => Ok(StepSize::MicroBatches(accumulate)),
    }
}

fn forced(settings: &Settings) -> ForcedArgs {
    ForcedArgs {
        activations: settings.activations,
        layer_inputs: settings.layer_inputs,
        checkpoint_every: settings.checkpoint_every.map(NonZeroUsize::get),
        weights: settings.weights,
        gradients: settings.gradients,
        optimizer_state: settings.optimizer_state,
        update: settings.update,
        group: settings.group.map(NonZeroUsize::get),
    }
}

/// Every option that has a value, as text.
pub(super) fn record(all: &Given) -> BTreeMap<String, String> {
    let table = toml::Table::try_from(all)
        .unwrap_or_else(|error| unreachable!("options are plain: {error}"));
    let text = |value: toml::Value| match value {
        toml::Value::String(text) => text,
        other => other.to_string(),
    };
    table.into_iter().map(|(key, value)| (key, text(value))).collect()
}

/// Refuses options that would make it another run; says which make it learn differently.
fn compare(before: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Result<()> {
    let show = |value: Option<&String>| value.map_or("not given".to_owned(), Clone::clone);
    for key in FIXED {
        if before.get(key) != now.get(key) {
            let problem = format!(
                "{key} was {} when the run began and is {} now; go on as it began, or give another --name",
                show(before.get(key)),
                show(now.get(key))
            );
            return Err(UsageError(problem).into());
        }
    }
    for key in LEARNING.into_iter().filter(|key| before.get(*key) != now.get(*key)) {
        eprintln!(
            "warning: {key} was {} and is {} from here on",
            show(before.get(key)),
            show(now.get(key))
        );
    }
    Ok(())
}
