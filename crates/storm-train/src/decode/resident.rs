//! Everything in device memory: one program reads pieces of a prompt, another a single token.

use super::{Engine, Run};
use crate::{TrainError, weights};
use half::bf16;
use std::time::Instant;
use storm_device::{Device, DeviceError};
use storm_exec::{Resident, Schedule, ScheduleId, SlotId, Slots};
use storm_graph::{DType, ProgramParameter, Tensor, TensorClass, Training};
use storm_model::{DecodeOptions, DecodePrograms, ModelConfig, ParameterSource, build_decoder};

pub(super) struct ResidentEngine<D: Device> {
    resident: Resident<D>,
    prompt: Feed,
    last: Feed,
    dtype: DType,
    narrow: Vec<bf16>, // (V)
}

/// A program and its inputs.
struct Feed {
    schedule: ScheduleId,
    tokens: SlotId,
    positions: SlotId,
    /// Tokens that it takes.
    count: usize,
}

impl<D: Device> ResidentEngine<D> {
    pub(super) fn load(
        config: &ModelConfig,
        options: &DecodeOptions,
        source: &impl ParameterSource,
        open: impl FnOnce(usize) -> Result<D, DeviceError>,
    ) -> Result<ResidentEngine<D>, TrainError> {
        let programs = build_decoder(config, options)?;
        let (slots, schedules) = schedules(&programs)?;
        let mut resident = Resident::new(slots, schedules, open)?;
        weights::load(&mut resident, &config.into(), source)?;
        let feed = |index, prefix: &str, count| -> Result<Feed, TrainError> {
            let slot = |name: &str| resident.slots().get(&format!("{prefix}.{name}"));
            let (tokens, positions) = (slot("tokens")?, slot("positions")?);
            Ok(Feed { schedule: resident.schedule(index), tokens, positions, count })
        };
        Ok(ResidentEngine {
            prompt: feed(0, "prompt", programs.prompt_tokens)?,
            last: feed(1, "step", 1)?,
            dtype: options.dtype,
            narrow: vec![bf16::ZERO; config.vocab_size],
            resident,
        })
    }

    fn feed(&self, run: Run) -> &Feed {
        match run {
            Run::Prompt => &self.prompt,
            Run::Last => &self.last,
        }
    }
}

/// Device memory of both programs and what they share.
pub(super) fn size_bytes(
    config: &ModelConfig,
    options: &DecodeOptions,
) -> Result<usize, TrainError> {
    let (slots, schedules) = schedules(&build_decoder(config, options)?)?;
    Ok(storm_exec::resident_bytes(&slots, &schedules))
}

/// Parameters, caches and inputs, and both programs unrolled.
fn schedules(programs: &DecodePrograms) -> Result<(Slots, Vec<Schedule>), TrainError> {
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
        for input in program.inputs() {
            slots.declare(input)?;
        }
        schedules.push(Schedule::of_program(program, &slots)?);
    }
    Ok((slots, schedules))
}

impl<D: Device> Engine for ResidentEngine<D> {
    fn tokens(&self, run: Run) -> usize {
        self.feed(run).count
    }

    fn run(
        &mut self,
        run: Run,
        ids: &[i32],
        positions: &[i32],
        _: usize,
    ) -> Result<(), TrainError> {
        let Feed { schedule, tokens, positions: places, .. } = *self.feed(run);
        self.resident.write(tokens, ids)?;
        self.resident.write(places, positions)?;
        Ok(self.resident.run(schedule)?)
    }

    fn logits(&mut self, logits: &mut [f32]) -> Result<(), TrainError> {
        let schedule = self.last.schedule;
        if self.dtype != DType::BF16 {
            return Ok(self.resident.result(schedule, "logits", logits)?);
        }
        self.resident.result(schedule, "logits", &mut self.narrow)?;
        for (logit, narrow) in logits.iter_mut().zip(&self.narrow) {
            // Without the care for NaN of `to_f32`, which keeps compilers from vector instructions; it stays one.
            *logit = f32::from_bits(u32::from(narrow.to_bits()) << 16);
        }
        Ok(())
    }

    fn node_seconds(&mut self, times: usize) -> Result<Vec<(String, f64)>, TrainError> {
        let schedule = self.last.schedule;
        let names: Vec<String> =
            self.resident.node_names(schedule).into_iter().map(str::to_owned).collect();
        let mut seconds = Vec::new();
        for name in names {
            self.resident.run_nodes(schedule, &name)?;
            self.resident.synchronize()?;
            let start = Instant::now();
            for _ in 0..times {
                self.resident.run_nodes(schedule, &name)?;
            }
            self.resident.synchronize()?;
            seconds.push((name, start.elapsed().as_secs_f64() / times.max(1) as f64));
        }
        Ok(seconds)
    }
}
