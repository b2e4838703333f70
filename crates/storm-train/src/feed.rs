//! Fills a plan's inputs and receives its results.

use crate::input_rules::{DENOMINATOR, InputRules, Reading};
use crate::micro_batch::MicroBatch;
use crate::optimizer::names;
use crate::{Found, TrainError};
use storm_device::bytes_of;
use storm_exec::Feed;
use storm_graph::random::{DROPOUT_WORDS, DropoutWords, PHASE_WORDS, PhaseWords, SEED_WORDS, Seed};
use storm_graph::{StepScalars, Tensor};
use storm_model::{DROPOUT_INPUT, PHASE_INPUT};
use storm_plan::CheckedPlan;

/// The result to minimize.
const LOSS: &str = "loss";

/// The number of targets predicted correctly, for a classifier.
pub(crate) const CORRECT: &str = "correct";

/// Where the data of an input comes from.
#[derive(Clone, Debug)]
enum Source {
    MicroBatch(Reading),
    Denominator,
    Scalars,
    Random,
    Dropout,
    Phase,
}

/// The micro-batches of a step or an evaluation.
#[derive(Clone, Copy)]
pub(crate) enum Batches<'a, B> {
    /// The feed provides their data.
    Given(&'a [B]),
    /// The plan fetches their data; this is their number.
    Fetched(usize),
}

impl<B> Batches<'_, B> {
    fn count(&self) -> usize {
        match self {
            Batches::Given(batches) => batches.len(),
            Batches::Fetched(count) => *count,
        }
    }
}

/// Maps a rank's micro-batches to their numbers in the step of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbering {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// Micro-batches per lane.
    pub(crate) in_lane: usize,
}

impl Numbering {
    /// The global number of a micro-batch of this rank.
    pub(crate) fn of(self, micro_batch: usize) -> usize {
        let lane = micro_batch / self.in_lane * self.ranks + self.rank;
        lane * self.in_lane + micro_batch % self.in_lane
    }
}

/// One rank has all micro-batches.
impl Default for Numbering {
    fn default() -> Numbering {
        Numbering { rank: 0, ranks: 1, in_lane: 1 }
    }
}

/// The seeds of a step.
#[derive(Clone, Copy)]
pub(crate) struct StepSeeds {
    /// Seed of the update that is applied.
    pub(crate) update: Seed,
    /// Seed of the update that the forward pass belongs to; `None` for an evaluation, which has no dropout.
    pub(crate) forward: Option<Seed>,
}

/// The dropout input of a micro-batch.
pub(crate) fn dropout_words(seed: Option<Seed>, micro_batch: usize) -> [i32; DROPOUT_WORDS] {
    let drops = seed.is_some();
    let seed = seed.unwrap_or(Seed { seed: 0, step: 0 });
    DropoutWords { seed, micro_batch: micro_batch as u32, drops }.to_words()
}

/// The input that tells training from evaluation.
pub(crate) fn phase_words(seed: Option<Seed>) -> [i32; PHASE_WORDS] {
    PhaseWords { training: seed.is_some(), seed: seed.map_or(0, |seed| seed.seed) }.to_words()
}

/// The sources of a plan's inputs, and its results other than loss and norm.
pub(crate) struct Exchange {
    sources: Vec<Source>,
    /// Scratch space for a sorted order.
    staging: Vec<i32>,
    /// The latest values of other results.
    others: Vec<(String, Vec<u8>)>,
    /// Whether the plan counts correct predictions.
    classifies: bool,
}

impl Exchange {
    /// For micro-batches that follow `rules`.
    ///
    /// # Errors
    /// The plan has an input that is not in the rules' program, or has another form there.
    pub(crate) fn new(plan: &CheckedPlan, rules: &InputRules) -> Result<Exchange, TrainError> {
        let mut sources = Vec::new();
        for input in &plan.inputs {
            let Tensor { name, shape, dtype, .. } = &input.tensor;
            let reading = rules.reading(name);
            if let Some(Reading::Entries(name)) = &reading {
                rules.check_form(name, *dtype, shape.elements())?;
            }
            sources.push(match (name.as_str(), reading) {
                (_, Some(reading)) => Source::MicroBatch(reading),
                (DENOMINATOR, _) => Source::Denominator,
                (names::SCALARS, _) => Source::Scalars,
                (names::RANDOM, _) => Source::Random,
                (DROPOUT_INPUT, _) => Source::Dropout,
                (PHASE_INPUT, _) => Source::Phase,
                _ => return Err(foreign(format!("it has an input `{name}`, which this has not"))),
            });
        }
        let mut others: Vec<(String, Vec<u8>)> = Vec::new();
        let is_known = |name: &str| [LOSS, CORRECT, names::NORM].contains(&name);
        for result in plan.results.iter().filter(|result| !is_known(&result.tensor.name)) {
            if others.iter().all(|(known, _)| *known != result.tensor.name) {
                others.push((result.tensor.name.clone(), vec![0; result.tensor.size_bytes()]));
            }
        }
        let classifies = plan.results.iter().any(|result| result.tensor.name == CORRECT);
        Ok(Exchange { sources, staging: vec![0; rules.count_max()], others, classifies })
    }

    /// The feed of a step or an evaluation over these batches, whose loss is divided by `denominator`.
    pub(crate) fn feed<'a, B: MicroBatch>(
        &'a mut self,
        batches: Batches<'a, B>,
        denominator: f32,
        scalars: StepScalars,
        seeds: StepSeeds,
    ) -> StepFeed<'a, B> {
        StepFeed {
            batches,
            exchange: self,
            denominator: [denominator],
            scalars: scalars.to_array(),
            random: seeds.update.to_words(),
            forward: seeds.forward,
            dropout: [0; DROPOUT_WORDS],
            phase: phase_words(seeds.forward),
            loss: 0.0,
            losses: None,
            found: None,
            numbering: Numbering::default(),
            correct: 0.0,
            gradient_norm: f32::NAN,
        }
    }

    /// The bytes of a result other than loss and norm, from the last micro-batch.
    pub(crate) fn result(&self, name: &str) -> Option<&[u8]> {
        let result = self.others.iter().find(|(known, _)| known == name);
        result.map(|(_, bytes)| bytes.as_slice())
    }
}

/// The error for a plan of another model.
pub(crate) fn foreign(problem: String) -> TrainError {
    TrainError::Option { option: "plan", problem: format!("was made for another model: {problem}") }
}

/// The data of one step, and its results.
pub(crate) struct StepFeed<'a, B> {
    batches: Batches<'a, B>,
    exchange: &'a mut Exchange,
    denominator: [f32; 1],
    scalars: [f32; StepScalars::LEN],
    random: [i32; SEED_WORDS],
    forward: Option<Seed>,
    dropout: [i32; DROPOUT_WORDS],
    phase: [i32; PHASE_WORDS],
    loss: f32,
    /// Receives the loss of each micro-batch, if set.
    pub(crate) losses: Option<&'a mut [f32]>,
    /// Receives the number of correct predictions of each micro-batch, if set.
    pub(crate) found: Option<&'a mut [f32]>,
    pub(crate) numbering: Numbering,
    correct: f32,
    pub(crate) gradient_norm: f32,
}

impl<B> StepFeed<'_, B> {
    /// The combined result of all micro-batches.
    pub(crate) fn found(&self) -> Found {
        let accuracy = self.exchange.classifies.then_some(self.correct / self.denominator[0]);
        Found { loss: self.loss, accuracy }
    }
}

impl<B: MicroBatch> Feed for StepFeed<'_, B> {
    type Error = TrainError;

    fn input(
        &mut self,
        index: usize,
        _: &Tensor,
        micro_batch: Option<usize>,
    ) -> Result<&[u8], TrainError> {
        let Exchange { sources, staging, .. } = &mut *self.exchange;
        Ok(match &sources[index] {
            Source::MicroBatch(reading) => {
                let Batches::Given(batches) = self.batches else {
                    return Err(foreign("it does not fetch what micro-batches hold".to_owned()));
                };
                // The last group of an evaluation may be larger than the rest of the batches. Repeat the last batch;
                // its results are not counted again.
                let batch = &batches[micro_batch.unwrap_or(0).min(batches.len() - 1)];
                reading.entries(batch, staging).bytes()
            }
            Source::Denominator => bytes_of(&self.denominator),
            Source::Scalars => bytes_of(&self.scalars),
            Source::Random => bytes_of(&self.random),
            Source::Dropout => {
                let number = self.numbering.of(micro_batch.unwrap_or(0));
                self.dropout = dropout_words(self.forward, number);
                bytes_of(&self.dropout)
            }
            Source::Phase => bytes_of(&self.phase),
        })
    }

    fn result(&mut self, _: usize, tensor: &Tensor, micro_batch: Option<usize>, bytes: &[u8]) {
        if micro_batch.is_some_and(|micro_batch| micro_batch >= self.batches.count()) {
            return;
        }
        let value = || f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        match tensor.name.as_str() {
            // Results arrive in the order of micro-batches, which is also the order of the sum.
            LOSS => {
                self.loss += value();
                if let (Some(losses), Some(micro_batch)) = (&mut self.losses, micro_batch) {
                    losses[micro_batch] = value();
                }
            }
            CORRECT => {
                self.correct += value();
                if let (Some(found), Some(micro_batch)) = (&mut self.found, micro_batch) {
                    found[micro_batch] = value();
                }
            }
            names::NORM => self.gradient_norm = value(),
            name => {
                let known = self.exchange.others.iter_mut().find(|(known, _)| known == name);
                if let Some((_, stored)) = known {
                    stored.copy_from_slice(bytes);
                }
            }
        }
    }
}
