//! Programs built by the caller.

use crate::support::{BATCH, SEQUENCE, options};
use std::sync::Arc;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_graph::{ActivationFunction, DType, Program, SectionBuilder, Stage};
use storm_model::{Initialization, SaveOptions};
use storm_plan::{Budget, Forced, HardwareProfile, Tier, plan};
use storm_train::{Batch, Precision, TrainError, TrainOptions, Trainer, task_of_program};

const TOKENS: usize = 11;
const TARGETS: usize = 7;

/// Has other input tokens than it predicts.
fn program(batch: usize) -> Program {
    let mut embedding = SectionBuilder::new("embedding", batch, SEQUENCE, DType::F32);
    let hidden = embedding.embedding("tokens", TOKENS, 8).unwrap();
    let embedding = embedding.hand_on(hidden);
    let (mut layer, hidden) = SectionBuilder::after(&embedding, "layer").unwrap();
    let up = layer.linear("up", hidden, 16).unwrap();
    let active = layer.activation("gelu", up, ActivationFunction::GeluTanh).unwrap();
    let hidden = layer.linear_onto("down", active, hidden).unwrap();
    let layer = layer.hand_on(hidden);
    let (head, hidden) = SectionBuilder::after(&layer, "head").unwrap();
    let head = head.loss(hidden, TARGETS, 8).unwrap();
    let stages =
        vec![Stage::once("embedding", 0), Stage::repeated("layers", 1, 4), Stage::once("head", 2)];
    Program::new(vec![embedding, layer, head], stages).unwrap()
}

fn trainer(program: &Program, vram_bytes: u64) -> Result<Trainer<CpuPlanDevice>, TrainError> {
    trainer_by(program, program, vram_bytes)
}

/// A trainer of a program with the plan of another.
fn trainer_by(
    program: &Program,
    planned: &Program,
    vram_bytes: u64,
) -> Result<Trainer<CpuPlanDevice>, TrainError> {
    let options: TrainOptions = options(Precision::F32);
    let task = task_of_program(planned, &options, 1)?;
    let mut profile = HardwareProfile::builtin("reference").unwrap();
    profile.overhead_bytes = 0;
    let budget = Budget::new(vram_bytes, 1 << 30);
    let planned = plan(&task, &profile, budget, &Forced::default())?;
    assert!(planned.prediction.peak_bytes[Tier::DEVICE] <= vram_bytes);
    let start = |_: &str| Initialization::Normal { deviation: 0.2 };
    let (plan, device) = (Arc::new(planned.plan), CpuPlanOptions::default());
    Trainer::of_program(program, options, plan, device, start)
}

fn batch(token: usize, target: usize) -> Batch {
    let rows = BATCH * SEQUENCE;
    Batch::new(vec![token as i32; rows], vec![target as i32; rows], SEQUENCE)
}

#[test]
fn a_small_budget_changes_no_bit() {
    let program = program(BATCH);
    let task = task_of_program(&program, &options(Precision::F32), 1).unwrap();
    let profile =
        HardwareProfile { overhead_bytes: 0, ..HardwareProfile::builtin("reference").unwrap() };
    let nothing = Budget::new(1 << 30, 1 << 30);
    let least = plan(&task, &profile, nothing, &Forced::default()).unwrap().vram_min_bytes;
    let mut runs = [1 << 30, least].map(|vram_bytes| trainer(&program, vram_bytes).unwrap());
    assert_ne!(runs[0].plan().bytes[Tier::DEVICE], runs[1].plan().bytes[Tier::DEVICE]);
    for step in 0..5 {
        let batches = [batch(step, step % TARGETS)];
        let [spare, small] = runs.each_mut().map(|run| run.step(&batches, 0.01).unwrap());
        assert_eq!(spare, small, "step {step}");
    }
    let names: Vec<String> = runs[0].parameter_names().map(str::to_owned).collect();
    assert_eq!(names.len(), 1 + 4 * 2 + 1);
    for name in names {
        let [spare, small] = runs.each_mut().map(|run| run.read(&name).unwrap());
        assert_eq!(spare, small, "{name}");
    }
}

#[test]
fn ids_are_held_against_the_tables_of_the_program() {
    let mut trainer = trainer(&program(BATCH), 1 << 30).unwrap();
    trainer.step(&[batch(TOKENS - 1, TARGETS - 1)], 0.01).unwrap();
    for (bad, part) in [
        (batch(TOKENS, 0), "`tokens` has 11 at entry 0; the model knows 0 to 10"),
        (batch(0, TARGETS), "`targets` has 7 at entry 0; the model knows 0 to 6"),
    ] {
        let error = trainer.step(&[bad], 0.01).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let larger = program(BATCH + 1);
    let error = trainer_by(&program(BATCH), &larger, 1 << 30).err().unwrap().to_string();
    assert!(error.contains("`tokens` has 27 entries of i32 there, not 18 of i32"), "{error}");
    let error = trainer(&larger, 1 << 30).unwrap().step(&[batch(0, 0)], 0.01).unwrap_err();
    assert!(error.to_string().contains("`tokens` has 18 entries, not 27"), "{error}");
    let mut trainer = trainer(&program(BATCH), 1 << 30).unwrap();
    assert!(trainer.model().is_none());
    let folder = tempfile::tempdir().unwrap();
    let error = trainer.save(&folder.path().join("model"), &SaveOptions::default());
    assert!(error.unwrap_err().to_string().contains("no Hugging Face form"));
}
