//! What is to be planned, resolved from the command line, and the planner's answer.

use super::PlanArgs;
use super::saving::DeviceMemory;
use crate::base::BaseArg;
use crate::codec::CodecArg;
use crate::disk_tier::{self, DiskTier};
use crate::memory_limits::{self, Limit};
use crate::precision::{MomentsArg, PrecisionArg, check_fp8};
use crate::save_mode::SaveModeArg;
use crate::{UsageError, hardware, train};
use anyhow::{Context, Result};
use std::path::Path;
use std::time::Instant;
use storm_graph::ActivationCodec;
use storm_hub::Wanted;
use storm_model::{AnyModel, HfConfig, ImageDirectory, ModelConfig, Unit, image_preset, preset};
use storm_plan::{
    Budget, Forced, HardwareProfile, PlanError, Planned, Policy, Prediction, RankPlace, SavedUnit,
    TooSmall, plan, policies,
};
use storm_train::{
    GuessedSplit, LaunchRequest, Moments, OptimizerOptions, Precision, StepPlan, StepSize,
    TrainError, TrainOptions, TrialOptions, checkpoint_bytes, training_task,
};

/// Tokens per sequence, if neither a flag nor a config sets it.
const SEQUENCE_DEFAULT: usize = 1024;

/// Rows of logits computed at a time, as in a run.
const CHUNK_ROWS_DEFAULT: usize = 2048;

pub(crate) struct Request {
    /// As the user gave it.
    pub(crate) model: String,
    pub(crate) config: AnyModel,
    /// The batch is meaningless if the planner chooses it.
    pub(crate) options: TrainOptions,
    pub(crate) step: StepSize,
    /// The place of this rank among those that share a step.
    pub(crate) rank: RankPlace,
    pub(crate) profile: HardwareProfile,
    pub(crate) vram: Limit,
    pub(crate) ram: Limit,
    /// Disk that optimizer state and frozen weights may use.
    pub(crate) disk: Option<DiskTier>,
    pub(crate) device_memory: DeviceMemory,
    pub(crate) forced: Forced,
    /// The flags that force decisions, as given. Empty if there are none.
    pub(crate) forced_words: String,
    pub(crate) save_mode: SaveModeArg,
    /// Size of a checkpoint, and of the snapshot that it is written from.
    pub(crate) checkpoint_bytes: u64,
    /// Host memory that a run uses outside its plan, such as for threads and the tokens of a step.
    pub(crate) beside_bytes: u64,
    /// The part of `beside_bytes` for predictions.
    pub(crate) predict_bytes: u64,
    /// What copies of predictions add to a checkpoint, at most.
    pub(crate) predict_saved_bytes: u64,
}

pub(crate) struct Answer {
    pub(crate) batch: usize,
    pub(crate) accumulate: usize,
    /// Lanes of a step.
    pub(crate) lanes: usize,
    pub(crate) planned: Planned,
    /// Time that a rank would take for its share of the step without the others. `None` if there
    /// are no others, or if it was not asked for.
    pub(crate) alone_seconds: Option<f64>,
    /// Empty if policies were not compared.
    pub(crate) policies: Vec<Policy>,
    pub(crate) units: Vec<SavedUnit>,
    /// Effects of other options, if asked for.
    pub(crate) what_if: Vec<WhatIf>,
    /// Micro-batch sizes that were compared, if the planner chose one.
    pub(crate) tried: Vec<GuessedSplit>,
    pub(crate) planning_seconds: f64,
}

/// The same step with an option that changes results, so the planner never chooses it.
pub(crate) struct WhatIf {
    /// As in a config file.
    pub(crate) option: &'static str,
    pub(crate) prediction: Prediction,
}

impl Request {
    pub(super) fn new(args: &PlanArgs) -> Result<Request> {
        if let Some(config) = &args.config {
            args.ranks.refuse_with_config()?;
            return train::request_of_config(config, args.given(), args.drives());
        }
        let Some(model) = &args.model else {
            return Err(UsageError(
                "give a config file, or --model: a preset or a directory".to_owned(),
            )
            .into());
        };
        let located = crate::model::locate(model, Wanted::Config)?;
        let directory = located.as_ref().map_or(Path::new(model), |located| &located.directory);
        let config = match (directory.is_dir(), image_preset(model)) {
            (true, _) if ImageDirectory::is_one(directory) => {
                ImageDirectory::read_config(directory)?.into()
            }
            (false, Some(config)) => config.into(),
            (true, _) => {
                let config = HfConfig::of_directory(directory);
                language(args, config.with_context(|| format!("cannot use {model}"))?.model)?
            }
            (false, None) => language(args, preset(model)?)?,
        };
        let step = match (args.tokens_per_step, args.batch) {
            (Some(tokens), _) => StepSize::Tokens(tokens),
            (None, Some(_)) => StepSize::MicroBatches(args.accumulate.unwrap_or(1)),
            (None, None) => {
                let problem = "give --batch (and --accumulate), or --tokens-per-step";
                return Err(UsageError(problem.to_owned()).into());
            }
        };
        let precision = args.precision.unwrap_or(PrecisionArg::Bf16Stochastic).into();
        let options = TrainOptions::new(
            args.batch.unwrap_or(1),
            match config.unit() {
                Unit::Tokens => args.seq.unwrap_or(SEQUENCE_DEFAULT),
                Unit::Images => 1,
            },
            precision,
        );
        let chunk_rows = args.chunk_rows.unwrap_or(CHUNK_ROWS_DEFAULT);
        let moments = args.moments.unwrap_or(MomentsArg::Full).into();
        let usual = OptimizerOptions::default();
        let max_norm = args.forced.max_norm(usual.max_norm);
        let optimizer = OptimizerOptions { moments, max_norm, ..usual };
        let codec = args.activation_codec.unwrap_or(CodecArg::None);
        codec.check(&config)?;
        check_fp8(&config, &options, step)?;
        let lanes = args.ranks.lanes()?;
        let options = TrainOptions {
            chunk_rows,
            optimizer,
            activation_codec: codec.into(),
            lanes,
            ..options
        };
        let checkpoint_bytes = checkpoint_bytes(&config, &options)?;
        let mut profile = hardware::named_or_found(args.hardware.as_deref())?;
        profile.ranks = args.ranks.link()?.or(profile.ranks);
        let disk = disk_tier::open(args.disk())?;
        let disk = disk.or_else(|| disk_tier::assume(args.disk(), &profile));
        DiskTier::in_profile(disk.as_ref(), &mut profile);
        Ok(Request {
            model: model.clone(),
            config,
            options,
            step,
            rank: args.ranks.place(lanes, profile.ranks.as_ref()),
            vram: memory_limits::device(args.vram, &profile),
            ram: memory_limits::host(args.ram)?,
            disk,
            profile,
            forced: args.forced.forced(),
            forced_words: args.forced.words(),
            device_memory: DeviceMemory::Own,
            save_mode: args.save_mode.unwrap_or(SaveModeArg::Auto),
            checkpoint_bytes,
            beside_bytes: 0,
            predict_bytes: 0,
            predict_saved_bytes: 0,
        })
    }

    /// Memory that the planner may use.
    pub(crate) fn budget(&self) -> Budget {
        let ram_bytes = self.ram.bytes.saturating_sub(self.reserved_bytes());
        DiskTier::in_budget(self.disk.as_ref(), Budget::new(self.vram.bytes, ram_bytes))
    }

    /// The request as the launcher takes it.
    pub(crate) fn launch(&self, trial: Option<TrialOptions>) -> LaunchRequest {
        LaunchRequest {
            model: self.config.clone(),
            options: self.options.clone(),
            step: self.step,
            profile: self.profile.clone(),
            budget: self.budget(),
            forced: self.forced.clone(),
            trial,
            rank: self.rank,
            decided: None,
        }
    }

    /// Time that a rank would take for its share of a step without the others. `None` if there are
    /// none.
    fn alone_seconds(&self, answer: &Answer) -> Result<Option<f64>, TrainError> {
        let ranks = self.rank.ranks as usize;
        if ranks == 1 {
            return Ok(None);
        }
        let launch = LaunchRequest {
            rank: RankPlace::default(),
            options: TrainOptions {
                lanes: (self.options.lanes.count() / ranks).into(),
                ..self.options.clone()
            },
            step: StepSize::MicroBatches(answer.accumulate / ranks),
            ..self.launch(None)
        };
        Ok(Some(launch.plan()?.predicted_seconds()))
    }

    /// Plans, and compares the plan with the fixed policies and, if asked, with other options.
    pub(super) fn answer(&self, what_if: bool) -> Result<Answer, TrainError> {
        let begun = Instant::now();
        let launch = self.launch(None);
        let mut answer = Answer::new(self, launch.plan()?)?;
        let task = launch.task(answer.batch, answer.accumulate)?;
        answer.policies = policies(&task, &self.profile, self.budget())?;
        answer.alone_seconds = self.alone_seconds(&answer)?;
        if what_if {
            let others = self.other_options(&answer).into_iter();
            let predicted = others.filter_map(|(option, options)| {
                let task = training_task(&self.config, &options, answer.accumulate).ok()?;
                let planned = plan(&task, &self.profile, self.budget(), &self.forced).ok()?;
                Some(WhatIf { option, prediction: planned.prediction })
            });
            answer.what_if = predicted.collect();
        }
        answer.planning_seconds = begun.elapsed().as_secs_f64();
        Ok(answer)
    }

    /// Options that would take less memory and are not in use, with micro-batches of the same size.
    pub(super) fn other_options(&self, answer: &Answer) -> Vec<(&'static str, TrainOptions)> {
        let options = TrainOptions { batch: answer.batch, ..self.options.clone() };
        let mut others = Vec::new();
        if options.activation_codec == ActivationCodec::None
            && CodecArg::Int8.check(&self.config).is_ok()
        {
            let activation_codec = ActivationCodec::Int8;
            let coded = TrainOptions { activation_codec, ..options.clone() };
            others.push(("activation-codec = \"int8\"", coded));
        }
        // Adapters are f32, and f32 parameters keep full moments.
        if options.optimizer.moments == Moments::Full
            && options.precision != Precision::F32
            && self.config.adapters().is_none()
        {
            let optimizer =
                OptimizerOptions { moments: Moments::Int8, ..options.optimizer.clone() };
            others.push(("moments = \"int8\"", TrainOptions { optimizer, ..options }));
        }
        others
    }

    /// The least memory that works for micro-batches of this size, with this much host memory.
    pub(super) fn least(
        &self,
        options: &TrainOptions,
        forced: &Forced,
        ram_bytes: u64,
    ) -> Option<TooSmall> {
        let accumulate = match self.step {
            StepSize::MicroBatches(accumulate) => accumulate,
            StepSize::Tokens(tokens) => (tokens / options.sequence / options.batch).max(1),
        };
        let task = training_task(&self.config, options, accumulate).ok()?;
        // With no device memory, the error says how much is needed.
        let budget = DiskTier::in_budget(self.disk.as_ref(), Budget::new(0, ram_bytes));
        match plan(&task, &self.profile, budget, forced) {
            Err(PlanError::TooSmall(least)) => Some(*least),
            _ => None,
        }
    }
}

/// A language model with the requested adapters.
fn language(args: &PlanArgs, config: ModelConfig) -> Result<AnyModel> {
    let config = args.lora.iter().try_fold(config, |config, lora| lora.apply_to(config))?;
    Ok(args.base.unwrap_or(BaseArg::Bf16).apply_to(config)?.into())
}

impl Answer {
    /// A plan, with the units that its layers save. The caller sets the planning time.
    pub(crate) fn new(request: &Request, plan: StepPlan) -> Result<Answer, TrainError> {
        let StepPlan { batch, accumulate, planned, guesses } = plan;
        let task = request.launch(None).task(batch, accumulate)?;
        let most = |&stage: &usize| task.forward.stages()[stage].repeat;
        let layers = (0..task.forward.stages().len()).max_by_key(most).unwrap_or(0);
        let units = task.saved_units(layers);
        Ok(Answer {
            batch,
            accumulate,
            lanes: task.lanes,
            planned,
            alone_seconds: None,
            policies: Vec::new(),
            units,
            what_if: Vec::new(),
            tried: guesses,
            planning_seconds: 0.0,
        })
    }

    pub(super) fn units_per_step(&self, request: &Request) -> usize {
        self.batch * self.accumulate * request.options.sequence
    }

    /// How often a step goes through the layers.
    pub(super) fn groups(&self) -> usize {
        let of_lane: usize = self.planned.decisions.groups.iter().map(|group| group.times).sum();
        self.lanes * of_lane
    }

    pub(super) fn units_per_second(&self, request: &Request, step_seconds: f64) -> f64 {
        self.units_per_step(request) as f64 / step_seconds
    }
}
