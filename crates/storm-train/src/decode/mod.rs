//! A model that reads a text once, token by token: with everything in device memory, or streamed through it by a plan.

mod resident;
mod streamed;

use crate::TrainError;
use resident::ResidentEngine;
use std::collections::BTreeSet;
use std::sync::Arc;
use storm_device::{Device, DeviceError, PlanDevice};
use storm_exec::Planned;
use storm_model::{DecodeOptions, ModelConfig, ParameterSource, build_streamed_decoder};
use storm_plan::{CheckedPlan, RankPlace, Task};
use streamed::StreamedEngine;

/// So many tokens of a prompt are read one by one at most: a piece costs about as much.
const SINGLE_TOKENS_MAX: usize = 4;

/// The logits of what follows a text. Keys and values of the text so far are kept, so that a longer one
/// costs only what is new. On the CPU the result is, to the bit, that of the whole text at once; on a GPU it does
/// not depend on how the text grew.
pub struct Decoder {
    engine: Box<dyn Engine>,
    window: usize,
    /// The text whose keys and values the caches hold.
    cached: Vec<u32>,
    logits: Vec<f32>, // (V)
    /// Room for what a run takes.
    ids: Vec<i32>,
    positions: Vec<i32>,
}

/// Which tokens are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    /// Of a prompt, without logits.
    Prompt,
    /// The last ones so far, with logits.
    Last,
}

/// What computes.
trait Engine {
    /// Tokens that such a run takes.
    fn tokens(&self, run: Run) -> usize;

    /// Reads tokens at their positions, as many as the run takes. Logits are kept for the one at `last`.
    fn run(
        &mut self,
        run: Run,
        ids: &[i32],
        positions: &[i32],
        last: usize,
    ) -> Result<(), TrainError>;

    /// The logits of the last run that has them, widened to f32.
    fn logits(&mut self, logits: &mut [f32]) -> Result<(), TrainError>;

    /// Seconds that the nodes of each name take in the run of a token, all layers together; nothing where nodes are
    /// not run by themselves.
    fn node_seconds(&mut self, times: usize) -> Result<Vec<(String, f64)>, TrainError>;
}

/// What [`Decoder::streamed`] runs, before any decision about memory.
///
/// # Errors
/// The window does not fit the model.
pub fn decoding_task(config: &ModelConfig, options: &DecodeOptions) -> Result<Task, TrainError> {
    let forward = build_streamed_decoder(config, options)?.program;
    Ok(Task {
        forward,
        training: None,
        micro_batches: 1,
        lanes: 1,
        lane_groups: 1,
        rank: RankPlace::default(),
        data: BTreeSet::new(),
    })
}

impl Decoder {
    /// Loads a model with everything in the memory of a device, which `open` gives.
    ///
    /// # Errors
    /// The window does not fit the model, the files do not hold it, or the memory cannot be had.
    pub fn load<D: Device + 'static>(
        config: &ModelConfig,
        options: &DecodeOptions,
        source: &impl ParameterSource,
        open: impl FnOnce(usize) -> Result<D, DeviceError>,
    ) -> Result<Decoder, TrainError> {
        let engine = ResidentEngine::load(config, options, source, open)?;
        Ok(Decoder::new(config, options, Box::new(engine)))
    }

    /// Device memory that [`Decoder::load`] takes.
    ///
    /// # Errors
    /// The window does not fit the model.
    pub fn size_bytes(config: &ModelConfig, options: &DecodeOptions) -> Result<usize, TrainError> {
        resident::size_bytes(config, options)
    }

    /// Puts a plan of [`decoding_task`] with the same config and options on a device, and loads the model. The plan
    /// may use less memory than the model needs.
    ///
    /// # Errors
    /// The plan is of something else, the files do not hold the model, or the memory cannot be had.
    pub fn streamed<D: PlanDevice + 'static>(
        config: &ModelConfig,
        options: &DecodeOptions,
        source: &impl ParameterSource,
        plan: Arc<CheckedPlan>,
        device: D::Options,
    ) -> Result<Decoder, TrainError> {
        let tokens = build_streamed_decoder(config, options)?.tokens;
        let mut planned: Planned<D> = Planned::commit(plan, device)?;
        crate::weights::load(&mut planned, &config.into(), source)?;
        let engine = StreamedEngine::new(planned, config.vocab_size, tokens, options.dtype)?;
        Ok(Decoder::new(config, options, Box::new(engine)))
    }

    fn new(config: &ModelConfig, options: &DecodeOptions, engine: Box<dyn Engine>) -> Decoder {
        Decoder {
            engine,
            window: options.window,
            cached: Vec::new(),
            logits: vec![0.0; config.vocab_size],
            ids: Vec::new(),
            positions: Vec::new(),
        }
    }

    /// Tokens that a text may have.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Seconds that the nodes of each name take for one token, all layers together, as the mean of `times` runs: for
    /// benchmarks. Nothing for a plan, whose nodes do not run by themselves. The text so far is forgotten.
    ///
    /// # Errors
    /// From the device.
    pub fn node_seconds(&mut self, times: usize) -> Result<Vec<(String, f64)>, TrainError> {
        self.cached.clear();
        self.engine.node_seconds(times)
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
        if self.engine.tokens(Run::Prompt) > self.engine.tokens(Run::Last) {
            while before.len() - self.cached.len() > SINGLE_TOKENS_MAX {
                self.read(Run::Prompt, before)?;
            }
        }
        while self.cached.len() < text.len() {
            self.read(Run::Last, text)?;
        }
        self.engine.logits(&mut self.logits)?;
        // All at once first: that is quick, and the rule.
        const EXPONENT: u32 = 0x7f80_0000;
        let is_odd = |logit: &f32| logit.to_bits() & EXPONENT == EXPONENT;
        let any_is_odd = self.logits.iter().fold(false, |any, logit| any | is_odd(logit));
        if let Some(&value) = self.logits.iter().find(|logit| any_is_odd && is_odd(logit)) {
            return Err(TrainError::NonFiniteResult { what: "next token's logit", value });
        }
        Ok(&self.logits)
    }

    /// Reads the next tokens of `text` at once. A run is filled up with tokens whose results are ignored;
    /// at the window's end it begins earlier instead, and computes those entries of the cache again.
    fn read(&mut self, run: Run, text: &[u32]) -> Result<(), TrainError> {
        let count = self.engine.tokens(run);
        let first = self.cached.len().min(self.window - count);
        let piece = &text[first..text.len().min(first + count)];
        self.ids.clear();
        self.ids.extend(piece.iter().map(|&token| token as i32));
        self.ids.resize(count, 0);
        self.positions.clear();
        self.positions.extend((first..first + count).map(|at| at as i32));
        // Until it has run, nothing of it counts.
        self.cached.truncate(first);
        self.engine.run(run, &self.ids, &self.positions, piece.len() - 1)?;
        self.cached.extend_from_slice(piece);
        Ok(())
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
