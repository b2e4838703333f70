//! A model that reads a text once, token by token.

use crate::{TrainError, weights};
use half::bf16;
use storm_device::cpu::CpuDevice;
use storm_exec::{Resident, Schedule, ScheduleId, SlotId, Slots};
use storm_graph::{DType, Program, ProgramParameter, Tensor, TensorClass, Training};
use storm_model::{DecodeOptions, ModelConfig, ParameterSource, build_decoder};

/// So many tokens of a prompt are read one by one at most: a piece costs about as much.
const SINGLE_TOKENS_MAX: usize = 4;

/// The logits of what follows a text. Keys and values of the text so far are kept, so that a longer one
/// costs only what is new; the result is, to the bit, that of the whole text at once.
pub struct Decoder {
    resident: Resident<CpuDevice>,
    prompt: Feed,
    step: Feed,
    window: usize,
    dtype: DType,
    /// The text whose keys and values the caches hold.
    cached: Vec<u32>,
    logits: Vec<f32>, // (V)
    narrow: Vec<bf16>,
}

/// A program and its inputs.
struct Feed {
    schedule: ScheduleId,
    tokens: SlotId,
    positions: SlotId,
    /// Tokens that it takes.
    count: usize,
}

impl Decoder {
    /// Loads a model.
    ///
    /// # Errors
    /// The window does not fit the model, the files do not hold it, or the memory cannot be had.
    pub fn load(
        config: &ModelConfig,
        options: &DecodeOptions,
        source: &impl ParameterSource,
    ) -> Result<Decoder, TrainError> {
        let programs = build_decoder(config, options)?;
        let mut slots = Slots::new();
        for instance in programs.step.parameter_instances() {
            let ProgramParameter { shape, dtype, .. } = instance.parameter;
            let class = TensorClass::Parameter(Training::Frozen);
            slots.declare(Tensor { name: instance.name, shape, dtype, class })?;
        }
        for cache in programs.step.caches() {
            slots.declare(cache)?;
        }
        let mut schedules = Vec::new();
        for program in [&programs.prompt, &programs.step] {
            schedules.push(schedule(program, &mut slots)?);
        }
        let mut resident = Resident::new(slots, schedules, CpuDevice::new)?;
        weights::load(&mut resident, config, source)?;
        let feed = |index, prefix: &str, count| -> Result<Feed, TrainError> {
            let slot = |name: &str| resident.slots().get(&format!("{prefix}.{name}"));
            let (tokens, positions) = (slot("tokens")?, slot("positions")?);
            Ok(Feed { schedule: resident.schedule(index), tokens, positions, count })
        };
        Ok(Decoder {
            prompt: feed(0, "prompt", programs.prompt_tokens)?,
            step: feed(1, "step", 1)?,
            window: options.window,
            dtype: options.dtype,
            cached: Vec::new(),
            logits: vec![0.0; config.vocab_size],
            narrow: vec![bf16::ZERO; config.vocab_size],
            resident,
        })
    }

    /// Tokens that a text may have.
    pub fn window(&self) -> usize {
        self.window
    }

    /// The logits of the token after `text`, (V), widened to f32.
    ///
    /// # Errors
    /// An empty text, one that is longer than the window, a token that the model does not know, or logits
    /// that are not finite.
    pub fn logits(&mut self, text: &[u32]) -> Result<&[f32], TrainError> {
        self.check(text)?;
        let Some((_, before)) = text.split_last() else { unreachable!("checked above") };
        let same = before.iter().zip(&self.cached).take_while(|(a, b)| a == b).count();
        self.cached.truncate(same);
        while before.len() - self.cached.len() > SINGLE_TOKENS_MAX {
            self.read_piece(before)?;
        }
        for at in self.cached.len()..text.len() {
            Self::run(&mut self.resident, &self.step, &text[at..=at], at)?;
            self.cached.push(text[at]);
        }
        match self.dtype {
            DType::BF16 => {
                self.resident.result(self.step.schedule, "logits", &mut self.narrow)?;
                for (logit, narrow) in self.logits.iter_mut().zip(&self.narrow) {
                    *logit = narrow.to_f32();
                }
            }
            _ => self.resident.result(self.step.schedule, "logits", &mut self.logits)?,
        }
        if let Some(&value) = self.logits.iter().find(|logit| !logit.is_finite()) {
            return Err(TrainError::NonFiniteResult { what: "next token's logit", value });
        }
        Ok(&self.logits)
    }

    /// Reads the next tokens of `text` at once. A piece is filled up with tokens that nobody looks at;
    /// at the window's end it begins earlier instead, and makes again what is there.
    fn read_piece(&mut self, text: &[u32]) -> Result<(), TrainError> {
        let count = self.prompt.count;
        let first = self.cached.len().min(self.window - count);
        let piece = &text[first..text.len().min(first + count)];
        Self::run(&mut self.resident, &self.prompt, piece, first)?;
        self.cached.truncate(first);
        self.cached.extend_from_slice(piece);
        Ok(())
    }

    /// Runs a program for the tokens at positions `first` and following.
    fn run(
        resident: &mut Resident<CpuDevice>,
        feed: &Feed,
        tokens: &[u32],
        first: usize,
    ) -> Result<(), TrainError> {
        let mut ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        ids.resize(feed.count, 0);
        let positions: Vec<i32> = (first..first + feed.count).map(|at| at as i32).collect();
        resident.write(feed.tokens, &ids)?;
        resident.write(feed.positions, &positions)?;
        Ok(resident.run(feed.schedule)?)
    }

    fn check(&self, text: &[u32]) -> Result<(), TrainError> {
        let (window, known) = (self.window, self.logits.len());
        let problem = if text.is_empty() {
            "there is no token to go on from".to_owned()
        } else if text.len() > window {
            format!("has {} tokens, and the model looks back on {window}", text.len())
        } else if let Some(token) = text.iter().find(|&&token| token as usize >= known) {
            format!("has token {token}; the model knows 0 to {}", known - 1)
        } else {
            return Ok(());
        };
        Err(TrainError::Option { option: "prompt", problem })
    }
}

/// Declares a program's inputs, and unrolls it.
fn schedule(program: &Program, slots: &mut Slots) -> Result<Schedule, TrainError> {
    for input in program.inputs() {
        slots.declare(input)?;
    }
    Ok(Schedule::of_program(program, slots)?)
}
