//! From options to all that a run needs, before anything is trained.

use super::checks;
use super::config;
use super::data::{self, DataForm, RunData};
use super::device::{self, Asked, CpuUse, DeviceKind, Machine};
use super::folder::{self, Claimed, Start};
use super::model::{self, Model};
use super::options::{Given, Settings};
use super::output::{Style, print};
use super::pictures;
use super::probe;
use super::ranks::{self, Crew};
use super::schedule;
use super::values::{OptimizerArg, OverlongArg};
use crate::forced::{ForcedArgs, UpdateArg};
use crate::lora::LoraArg;
use crate::model::{grouped, must_be_downloaded};
use crate::model_tokenizer::OtherTokenizer;
use crate::plan::{self, Answer, DeviceMemory, Request, explained};
use crate::precision::check_fp8;
use crate::predict::PredictArg;
use crate::source::NoModel;
use crate::{UsageError, disk_tier, host_memory};
use anyhow::{Context, Result};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;
use std::num::{NonZeroU64, NonZeroUsize};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;
use storm_files::{FolderLock, replace_file};
use storm_graph::{AdamWParameters, MomentumDirection, SgdParameters};
use storm_model::{AnyModel, Augmentation, Packing, Unit};
use storm_plan::Lanes;
use storm_train::{
    AnyBatch, BatchSource, Launch, OptimizerMethod, OptimizerOptions, PredictOptions, Progress,
    Retention, RunError, RunOptions, StepSize, TimedSplit, TrainOptions, TrialOptions, base_hash,
    checkpoint_bytes, predict_bytes, predict_saved_bytes,
};
use tempfile::TempDir;

/// What a run of adapters records of the weights that they stand beside.
const BASE_HASH: &str = "base-hash";

/// What a run of an image classifier records of it: the model's config.json.
pub(crate) const IMAGE_CONFIG: &str = "image-config";

/// Options that a run cannot change on its way: with another value it would be another run.
const FIXED: [&str; 30] = [
    "model",
    IMAGE_CONFIG,
    "data-ram",
    "label-smoothing",
    "flip",
    "crop",
    "cutout",
    "lora",
    "base",
    BASE_HASH,
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
    "lanes",
    "precision",
    "activation-codec",
    "cpu-products",
    "chunk-rows",
    "optimizer",
    "moments",
    "seed",
    "predict",
];

/// Options that change what is learned from here on.
const LEARNING: [&str; 16] = [
    "steps",
    "epochs",
    "learning-rate",
    "final-learning-rate",
    "warmup",
    "schedule",
    "cooldown",
    "cooldown-shape",
    "weight-decay",
    "decay-targets",
    "beta1",
    "beta2",
    "epsilon",
    "momentum",
    "nesterov",
    "clip",
];

/// What a run records of its evaluations: the most `eval-steps` that it had so far.
const EVAL_STEPS_MOST: &str = "eval-steps-most";

/// The momentum of `sgd` if none is given.
const MOMENTUM: f64 = 0.9;

/// Everything that is known before the first step.
pub(super) struct Setup {
    pub(super) settings: Settings,
    pub(super) style: Style,
    pub(super) start: Start,
    /// `runs/NAME`.
    pub(super) folder: PathBuf,
    /// No other process writes there while this is held.
    _lock: Option<FolderLock>,
    /// Text of a dry run is packed here.
    _scratch: Option<TempDir>,
    /// What was given, and what was chosen for what was not.
    given: Given,
    pub(super) data: RunData,
    pub(super) model: Model,
    /// Of the weights beside which adapters are trained.
    base_hash: Option<String>,
    /// The most `eval-steps` that the run had so far, with these.
    eval_steps_most: u64,
    pub(super) machine_kind: DeviceKind,
    /// Of the CPU device.
    pub(super) cpu: CpuUse,
    /// Of the whole run.
    pub(super) steps: u64,
    pub(super) rows_per_epoch: u64,
    pub(super) rows_per_step: u64,
    pub(super) request: Request,
    /// The plan, and how it got there.
    pub(super) launch: Launch,
    planning_seconds: f64,
    /// Sizes of micro-batches that were tried.
    pub(super) splits: Vec<TimedSplit>,
    purpose: Purpose,
    /// The ranks that compute it; none if this process does that alone.
    pub(super) crew: Option<Crew>,
}

/// The held-out rows of a test.
pub(super) struct TestRows {
    /// At the first of them.
    pub(super) source: Box<dyn BatchSource>,
    pub(super) rows: Range<u64>,
}

/// What a setup is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Train,
    /// To say what training would do; nothing is written that stays.
    DryRun,
}

impl Setup {
    /// Cheap checks first: nothing is made, downloaded, packed, measured or planned before all of them have passed.
    pub(super) fn new(
        mut given: Given,
        start: Start,
        other: OtherTokenizer,
        purpose: Purpose,
        style: Style,
        crew: Option<&Crew>,
    ) -> Result<Setup> {
        let settings = given.clone().resolve();
        checks::settings(&settings)?;
        let folder = settings.runs.join(settings.name.as_deref().unwrap_or_default());
        let before = match (purpose, start) {
            // Whether there is a run already is for the claim to say, and whether another process holds it.
            (Purpose::Train, Start::Fresh | Start::Anew) => None,
            _ => folder::look(&folder, start)?,
        };
        let machine_kind = check_outline(&given, &folder, before.as_ref(), start, style, crew)?;
        disk_tier::check(Asked::from(&settings).disk)?;
        if let (Some(crew), DeviceKind::Cuda) = (crew, machine_kind) {
            crew.connect_cards()?;
        }

        let (lock, scratch, before) = match purpose {
            Purpose::DryRun => (None, Some(TempDir::new().context("no temporary folder")?), before),
            Purpose::Train => {
                let Claimed { lock, before } = folder::claim(&folder, start)?;
                (lock, None, before)
            }
        };
        if let Some(before) = &before {
            take_over(&mut given, before);
        }
        if purpose == Purpose::DryRun {
            check_cached(&given)?;
        }
        let model = Model::new(&given.clone().resolve())?;
        given.model = Some(model.name.clone());
        model::take_adapter(&mut given, &model.config)?;
        schedule::choose_rate(&mut given, &model, style);
        // A resumed run was checked when it began.
        let other = if before.is_some() { OtherTokenizer::Allowed } else { other };
        let source = data::Source {
            model: &model,
            run: &folder,
            scratch: scratch.as_ref().map(TempDir::path),
            start,
            other,
            style,
        };
        let data = source.open(&mut given)?;
        let settings = given.clone().resolve();
        let model = model.for_data(&settings, &data.form())?;
        let rows_per_epoch = data.rows_per_epoch(&settings, &model.config)?;
        let language = model.config.language();
        if let Some(words) = language.and_then(|config| config.rotary_words(settings.seq.get())) {
            eprintln!("{}: {words}", model.name);
        }
        let base = model.weights.as_ref().and_then(|weights| weights.language());
        let base_hash = match (model.config.adapters(), base, purpose) {
            (Some(_), Some(weights), Purpose::Train) => Some(base_hash(weights)?),
            _ => None,
        };
        let step = step_size(&settings)?;
        let rows_per_step = rows_per_step(&settings, step);
        let steps = schedule::steps(&settings, rows_per_epoch, rows_per_step);
        schedule::of(&settings, steps)?;
        if let Some(warning) = schedule::warning(&settings) {
            eprintln!("{warning}");
        }
        settings.predict.as_ref().map(|predict| predict.options(steps)).transpose()?;
        if settings.epochs.is_none() {
            given.steps = NonZeroU64::new(steps);
        }
        device::check_size(settings.device, machine_kind, model.config.parameter_count())?;
        if let Some(warning) = settings.cpu_products.warning() {
            eprintln!("{warning}");
        }

        let share = crew.map(|crew| crew.share);
        let mut machine = Machine::shared(machine_kind, &(&settings).into(), share, None)?;
        if let Some(cards) = crew.and_then(Crew::cards) {
            cards.count_memory(&mut machine);
            cards.share(&mut machine, &settings);
        }
        let cpu = machine.cpu;
        let options = train_options(&settings, &model.config, data.packing());
        let loading = data.loading_bytes(&settings);
        let config = model.config.clone();
        let mut request = request(&settings, &model.name, config, options, machine, loading)?;
        if let Some(crew) = crew {
            let exchange = crew.exchange(settings.lanes);
            request.rank = crew.place(exchange);
            if request.options.lanes.groups() > 1 || crew.has_machines() {
                style.say(&format!("exchange on {exchange}"));
            }
        }
        let begun = Instant::now();
        // The other ranks are not there yet.
        let mut trial = TrialOptions::of_run(steps).filter(|_| crew.is_none());
        if let (DeviceKind::Cpu, Some(trial)) = (machine_kind, &mut trial) {
            // A step on the CPU takes long, and depends little on the size of micro-batches.
            trial.splits = 1;
        }
        let eval_steps_before = before.as_ref().map_or(0, |run| eval_steps_most(&run.settings));
        let launch = Launch::new(request.launch(trial))
            .map_err(|error| explained(&request, error, false))?;
        if let (Some(disk), Purpose::Train) = (&request.disk, purpose) {
            disk.check_wear(&launch.plan().planned, settings.accept_wear)?;
        }
        let mut setup = Setup {
            _lock: lock,
            _scratch: scratch,
            given,
            style,
            start,
            folder,
            data,
            model,
            base_hash,
            eval_steps_most: eval_steps_before.max(settings.eval_steps.get()),
            machine_kind,
            cpu,
            steps,
            rows_per_epoch,
            rows_per_step,
            splits: Vec::new(),
            request,
            launch,
            planning_seconds: begun.elapsed().as_secs_f64(),
            settings,
            purpose,
            crew: crew.cloned(),
        };
        setup.settle();
        setup.check_probe()?;
        setup.test()?;
        if let Some(before) = &before {
            let mut now = setup.record();
            if setup.base_hash.is_none() {
                // A dry run does not read the weights.
                now.extend(
                    before.settings.get_key_value(BASE_HASH).map(|(k, v)| (k.clone(), v.clone())),
                );
            }
            compare(&before.settings, &now)?;
            check_tested_rows(&before.settings, &setup.settings)?;
        }
        setup.say_epochs();
        Ok(setup)
    }

    /// Says how many steps epochs make.
    fn say_epochs(&self) {
        let Some(epochs) = self.settings.epochs else { return };
        let (rows, steps) = (self.rows_per_epoch, self.steps);
        self.style.say(&format!(
            "epochs = {epochs} of {} rows, {} a step: {} steps",
            grouped(rows),
            grouped(self.rows_per_step),
            grouped(steps)
        ));
        if self.style == Style::Json && self.purpose == Purpose::Train {
            let object = json!({
                "event": "epochs", "epochs": epochs, "rows_per_epoch": rows,
                "rows_per_step": self.rows_per_step, "steps": steps,
            });
            print(&object.to_string());
        }
    }

    /// Refuses predictions whose held-out data is missing, or is what evaluations look at.
    fn check_probe(&self) -> Result<()> {
        let probed = self.settings.predict.as_ref().filter(|p| p.held_out_batches() > 0);
        let Some(predict) = probed else { return Ok(()) };
        let batch = self.launch.plan().batch;
        let held = self.data.held_rows(&self.settings)?;
        probe::first_row(predict, batch, self.evaluated_rows(), held)?;
        Ok(())
    }

    /// Held-out rows that evaluations read, if there are enough.
    fn evaluated_rows(&self) -> u64 {
        self.settings.eval_steps.get().saturating_mul(self.rows_per_step)
    }

    /// The held-out rows for a test after the last step, if the options ask for one.
    pub(super) fn test(&self) -> Result<Option<TestRows>> {
        if !self.settings.test {
            return Ok(None);
        }
        let batch = self.launch.plan().batch;
        let predict = self.settings.predict.as_ref();
        let predicted = predict.map_or(0, |predict| predict.held_out_rows(batch));
        let leave = self.settings.test_leave.unwrap_or(predicted);
        let held = self.data.held_rows(&self.settings)?;
        let of = [self.evaluated_rows(), predicted, leave];
        let rows = probe::test_rows(of, held, self.rows_per_step)?;
        let (_, source) = self.data.sources(&self.settings, batch)?;
        let source = source.context("nothing is held out")?;
        Ok(Some(TestRows { source: probe::from_row(source, rows.start)?, rows }))
    }

    /// How the run predicts, and the held-out micro-batches for it.
    pub(super) fn prediction(&self) -> Result<Option<(PredictOptions, Vec<AnyBatch>)>> {
        let Some(predict) = &self.settings.predict else { return Ok(None) };
        let options = predict.options(self.steps)?;
        if predict.held_out_batches() == 0 {
            return Ok(Some((options, Vec::new())));
        }
        let batch = self.launch.plan().batch;
        let held = self.data.held_rows(&self.settings)?;
        let first = probe::first_row(predict, batch, self.evaluated_rows(), held)?;
        let (_, source) = self.data.sources(&self.settings, batch)?;
        let source = source.context("nothing is held out")?;
        let batches = probe::read(source, first, predict.held_out_batches())?;
        Ok(Some((options, batches)))
    }

    /// Records the measured cost of a prediction. A resumed run keeps it.
    pub(super) fn settle_cost(&mut self, steps: f64) {
        for predict in [&mut self.given.predict, &mut self.settings.predict].into_iter().flatten() {
            predict.set_cost(steps);
        }
    }

    /// The epoch that a number of steps comes to.
    pub(super) fn epochs_of(&self, steps: u64) -> f64 {
        steps as f64 * self.rows_per_step as f64 / self.rows_per_epoch as f64
    }

    /// Takes down what the launch has chosen. A resumed run keeps it.
    pub(super) fn settle(&mut self) {
        let plan = self.launch.plan();
        self.given.batch = NonZeroUsize::new(plan.batch);
        self.given.accumulate = NonZeroUsize::new(plan.accumulate);
    }

    /// The plan.
    pub(super) fn answer(&self) -> Result<Answer> {
        let mut answer = Answer::new(&self.request, self.launch.plan().clone())?;
        answer.planning_seconds = self.planning_seconds;
        Ok(answer)
    }

    /// The plan, for people.
    pub(super) fn shown(&self) -> Result<String> {
        let mut shown = plan::shown(&self.request, &self.answer()?);
        if let (Some(config), None, DataForm::Images { normalization, .. }) =
            (self.model.config.image(), &self.model.weights, self.data.form())
        {
            shown = format!("{shown}\n{}", normalization.words(config));
        }
        Ok(shown)
    }

    /// Every option that has a value, as text.
    pub(super) fn record(&self) -> BTreeMap<String, String> {
        let mut record = record(&self.given.clone().or(Given::defaults()));
        record.insert(EVAL_STEPS_MOST.to_owned(), self.eval_steps_most.to_string());
        record.extend(self.base_hash.clone().map(|hash| (BASE_HASH.to_owned(), hash)));
        let image = self.model.config.image().map(|config| json!(config).to_string());
        record.extend(image.map(|config| (IMAGE_CONFIG.to_owned(), config)));
        record
    }

    /// Tells the other ranks what is trained, if there are any.
    pub(super) fn tell_ranks(&self) -> Result<()> {
        let Some(crew) = &self.crew else { return Ok(()) };
        let config = config::write(&self.given.clone().or(Given::defaults()));
        ranks::tell(
            crew,
            config,
            &self.data.form(),
            self.data.packing(),
            self.launch.plan(),
            self.launch.profile(),
        )
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
        Ok(RunOptions {
            steps: self.steps,
            schedule: schedule::of(settings, self.steps)?,
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

/// Sizes of micro-batches, the tokenizer and what defaults gave are chosen once: a resumed run keeps them.
fn take_over(given: &mut Given, before: &Progress) {
    let saved = |key: &str| before.settings.get(key)?.parse::<NonZeroUsize>().ok();
    if given.tokens_per_step.is_some() && given.batch.is_none() && given.accumulate.is_none() {
        given.batch = saved("batch");
        given.accumulate = saved("accumulate");
    }
    given.lanes = given.lanes.or_else(|| before.settings.get("lanes")?.parse().ok());
    if !before.settings.contains_key(IMAGE_CONFIG) {
        given.seq = given.seq.or(saved("seq"));
    }
    let rate = before.settings.get("learning-rate").and_then(|rate| rate.parse().ok());
    given.learning_rate = given.learning_rate.or(rate);
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
    // The adapter that the run began with is in its checkpoints now.
    if let Some(lora) = before.settings.get("lora").and_then(|text| LoraArg::of_record(text).ok()) {
        given.adapter = None;
        given.lora = given.lora.take().or(Some(lora));
    }
    given.tokenizer = given.tokenizer.take().or_else(|| before.settings.get("tokenizer").cloned());
    if let Some(predict) = given.predict.as_mut().filter(|predict| predict.measures_cost()) {
        let recorded = before.settings.get("predict").and_then(|text| PredictArg::of_record(text));
        if let Some(steps) = recorded.and_then(|recorded| recorded.cost_steps()) {
            predict.set_cost(steps);
        }
    }
}

/// Checks all that can be known of a run without a lock on its folder, its weights or its packed data. Says which
/// device it takes.
pub(super) fn check_outline(
    given: &Given,
    folder: &Path,
    before: Option<&Progress>,
    start: Start,
    style: Style,
    crew: Option<&Crew>,
) -> Result<DeviceKind> {
    let mut given = given.clone();
    if let Some(before) = before {
        take_over(&mut given, before);
    }
    let settings = given.clone().resolve();
    let step = step_size(&settings)?;
    let data = data::Outline::new(&given, folder, start)?;
    let kind = device::find(settings.device, style)?;
    let model = model::Outline::new(&settings)?;
    if let Some(crew) = crew {
        ranks::check(&crew.launch, &settings, kind, model.config.unit())?;
    }
    model::take_adapter(&mut given, &model.config)?;
    let settings = given.resolve();
    let outline = checks::Outline { settings: &settings, folder, kind, model: &model, data: &data };
    outline.check(&train_options(&settings, &model.config, data.packing()), step)?;
    Ok(kind)
}

/// Refuses to download a model for a dry run.
fn check_cached(given: &Given) -> Result<(), NoModel> {
    let Some(name) = given.model.as_deref().filter(|name| must_be_downloaded(name)) else {
        return Ok(());
    };
    Err(NoModel::new(format!(
        "{name} is not in the Hugging Face cache, and a dry run downloads no weights; `storm plan CONFIG` needs only \
         its config.json"
    )))
}

/// What is to be planned for a run whose data takes so many bytes of host memory.
pub(super) fn request(
    settings: &Settings,
    name: &str,
    config: AnyModel,
    options: TrainOptions,
    machine: Machine,
    loading_bytes: u64,
) -> Result<Request> {
    settings.activation_codec.check(&config)?;
    let forced = forced(settings);
    let step = step_size(settings)?;
    check_fp8(&config, &options, step)?;
    let step_bytes = host_memory::of_step(step, &options, host_memory::of_unit(&config));
    host_memory::check_step(step_bytes, machine.ram.bytes)?;
    let (predict_bytes, predict_saved_bytes) = match &settings.predict {
        Some(predict) => {
            let batch = match step {
                StepSize::MicroBatches(_) => options.batch,
                // The largest that may be chosen.
                StepSize::Tokens(tokens) => (tokens / options.sequence).max(1),
            };
            let rows_bytes = host_memory::of_unit(&config)
                .saturating_mul(options.sequence as u64)
                .saturating_mul(predict.held_out_rows(batch));
            let steps = settings.steps.map_or(u64::MAX, NonZeroU64::get);
            let predict = predict.options(steps)?;
            let bytes = predict_bytes(&config, &options, &predict)?;
            let saved_bytes = predict_saved_bytes(&config, &options, &predict)?;
            (bytes.saturating_add(rows_bytes), saved_bytes)
        }
        None => (0, 0),
    };
    let viewer_bytes = pictures::viewer_bytes(&config, machine.ram.bytes)?;
    let idle = settings.predict.as_ref().and_then(PredictArg::releases);
    let mut profile = machine.profile;
    profile.overhead_bytes += device::probe_overhead_bytes(machine.kind, idle);
    Ok(Request {
        model: name.to_owned(),
        checkpoint_bytes: checkpoint_bytes(&config, &options)?,
        config,
        options,
        step,
        rank: storm_plan::RankPlace::default(),
        profile,
        vram: machine.vram,
        ram: machine.ram,
        disk: machine.disk,
        forced: forced.forced(),
        forced_words: forced.words(),
        device_memory: match machine.kind {
            DeviceKind::Cpu => DeviceMemory::OfHost,
            DeviceKind::Cuda => DeviceMemory::Own,
        },
        save_mode: settings.save_mode,
        beside_bytes: step_bytes
            .saturating_add(host_memory::of_threads(machine.cpu.threads))
            .saturating_add(loading_bytes)
            .saturating_add(viewer_bytes)
            .saturating_add(predict_bytes),
        predict_bytes,
        predict_saved_bytes,
    })
}

/// Rows that a step takes from the data.
fn rows_per_step(settings: &Settings, step: StepSize) -> u64 {
    let batch = settings.batch.map_or(1, NonZeroUsize::get) as u64;
    match step {
        StepSize::MicroBatches(count) => batch.saturating_mul(count as u64),
        StepSize::Tokens(tokens) => (tokens / settings.seq.get()) as u64,
    }
}

fn optimizer_method(settings: &Settings) -> OptimizerMethod {
    let weight_decay = settings.weight_decay as f32;
    match settings.optimizer {
        OptimizerArg::Adamw => OptimizerMethod::AdamW(AdamWParameters {
            beta1: settings.beta1 as f32,
            beta2: settings.beta2 as f32,
            epsilon: settings.epsilon as f32,
            weight_decay,
        }),
        OptimizerArg::Sgd => OptimizerMethod::Sgd(SgdParameters {
            momentum: settings.momentum.unwrap_or(MOMENTUM) as f32,
            direction: match settings.nesterov {
                Some(true) => MomentumDirection::Nesterov,
                _ => MomentumDirection::Momentum,
            },
            weight_decay,
        }),
    }
}

pub(super) fn train_options(
    settings: &Settings,
    model: &AnyModel,
    packing: Packing,
) -> TrainOptions {
    let batch = settings.batch.map_or(1, NonZeroUsize::get);
    let sequence = match model.unit() {
        Unit::Tokens => settings.seq.get(),
        Unit::Images => 1,
    };
    TrainOptions {
        packing,
        chunk_rows: settings.chunk_rows.get(),
        activation_codec: settings.activation_codec.into(),
        optimizer: OptimizerOptions {
            method: optimizer_method(settings),
            decay: settings.decay_targets.into(),
            max_norm: (settings.clip != 0.0).then_some(settings.clip as f32),
            moments: settings.moments.into(),
            observes: settings.predict.as_ref().is_some_and(PredictArg::observes_updates),
        },
        label_smoothing: settings.label_smoothing as f32,
        augmentation: Augmentation {
            flip: settings.flip,
            crop: settings.crop,
            cutout: settings.cutout,
        },
        lanes: settings.lanes,
        seed: settings.seed.0,
        ..TrainOptions::new(batch, sequence, settings.precision.into())
    }
}

fn step_size(settings: &Settings) -> Result<StepSize> {
    let size = given_step_size(settings)?;
    let lanes = settings.lanes;
    match size {
        StepSize::MicroBatches(count) if !count.is_multiple_of(lanes.count()) => {
            Err(UsageError(format!(
                "lanes is {}; it must divide the micro-batches of a step evenly, and accumulate is {count}",
                of_groups(lanes)
            ))
            .into())
        }
        _ if lanes.count() > 1 && settings.update == Some(UpdateArg::InBackward) => {
            Err(UsageError(format!(
                "updates in the backward pass come before all {} lanes of a step are summed: use one lane",
                lanes.count()
            ))
            .into())
        }
        size => Ok(size),
    }
}

/// `16 (2x8)`, or `8` if there are no groups.
fn of_groups(lanes: Lanes) -> String {
    match lanes.groups() {
        1 => lanes.to_string(),
        _ => format!("{} ({lanes})", lanes.count()),
    }
}

fn given_step_size(settings: &Settings) -> Result<StepSize> {
    let Settings { tokens_per_step, batch, accumulate, seq, .. } = settings;
    let accumulate_given = accumulate.is_some();
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
        (Some(_), None) if accumulate_given => {
            let problem =
                "tokens-per-step chooses batch and accumulate; give both of these, or neither";
            Err(UsageError(problem.to_owned()).into())
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
        on_disk: settings.on_disk,
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
        table @ toml::Value::Table(_) => serde_json::to_string(&table).unwrap_or_default(),
        other => other.to_string(),
    };
    table.into_iter().map(|(key, value)| (key, text(value))).collect()
}

/// The most `eval-steps` that a run had, by what it recorded.
fn eval_steps_most(recorded: &BTreeMap<String, String>) -> u64 {
    let steps = [EVAL_STEPS_MOST, "eval-steps"].into_iter().filter_map(|key| recorded.get(key));
    steps.filter_map(|steps| steps.parse().ok()).max().unwrap_or(0)
}

/// Refuses a test on rows that evaluations of the run have read: they chose its best checkpoint.
fn check_tested_rows(
    before: &BTreeMap<String, String>,
    settings: &Settings,
) -> Result<(), UsageError> {
    let (most, now) = (eval_steps_most(before), settings.eval_steps.get());
    match settings.test && now < most {
        true => Err(UsageError(format!(
            "evaluations of this run read the held-out rows of {most} steps, and eval-steps is {now} now: the test would \
             read rows that chose the best checkpoint; resume with eval-steps = {most} or more, or without test"
        ))),
        false => Ok(()),
    }
}

/// Refuses options that would make it another run; says which make it learn differently.
fn compare(before: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Result<()> {
    let show = |value: Option<&String>| value.map_or("not given".to_owned(), Clone::clone);
    if before.get(BASE_HASH) != now.get(BASE_HASH) && before.get("lora") == now.get("lora") {
        let problem = format!(
            "the weights of {} are not those that this run's adapters were trained on; restore them, or give another \
             --name",
            show(now.get("model"))
        );
        return Err(NoModel::new(problem).into());
    }
    // A run that began before there was an option began with its default.
    let defaults = record(&Given::defaults());
    // Pictures have no sequences, and the default of their length is another than it was.
    let is_without_effect = |key: &str| key == "seq" && now.contains_key(IMAGE_CONFIG);
    for key in FIXED.into_iter().filter(|key| !is_without_effect(key)) {
        if before.get(key).or_else(|| defaults.get(key)) != now.get(key) {
            let problem = format!(
                "{key} was {} when the run began and is {} now; resume with the same value, or give another --name",
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
