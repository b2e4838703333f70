//! A run resumed from a checkpoint equals one that never stopped.

use crate::support::{
    CpuTrainer, int8_trainer, progress, save, sgd_trainer, state, tiny, train, trainer, trainer_of,
};
use storm_model::{Adapters, LoraOptions, ModelConfig};
use storm_plan::UpdateTime;
use storm_train::{
    CheckpointError, Checkpoints, Disk, Keep, Precision, Retention, Saver, Snapshot, TrainingState,
    checkpoint_bytes,
};
use tempfile::TempDir;

const PRECISIONS: [Precision; 3] =
    [Precision::F32, Precision::Bf16Master, Precision::Bf16Stochastic];
const UPDATES: [UpdateTime; 2] = [UpdateTime::EndOfStep, UpdateTime::NextStep];

#[test]
fn saving_changes_nothing_and_restoring_gives_all_of_it() {
    for (precision, update) in PRECISIONS.into_iter().flat_map(|p| UPDATES.map(|u| (p, u))) {
        let case = format!("{precision:?} {update:?}");
        saving_changes_nothing(&case, || trainer(precision, update));
    }
    for update in UPDATES {
        saving_changes_nothing(&format!("8 bits, {update:?}"), || int8_trainer(update));
    }
    for (precision, update) in PRECISIONS.into_iter().flat_map(|p| UPDATES.map(|u| (p, u))) {
        let case = format!("momentum, {precision:?} {update:?}");
        saving_changes_nothing(&case, || sgd_trainer(precision, update));
        let tensors = TrainingState::tensors(&sgd_trainer(precision, update));
        let momentum = tensors.iter().filter(|tensor| tensor.name.ends_with(".momentum")).count();
        assert!(momentum > 0 && tensors.iter().all(|t| !t.name.ends_with("_moment")), "{case}");
    }
}

fn saving_changes_nothing(case: &str, trainer: impl Fn() -> CpuTrainer) {
    let mut whole = trainer();
    let expected = train(&mut whole, 0..7);

    let folder = TempDir::new().expect("a folder");
    let checkpoints = Checkpoints::open(folder.path(), Disk).expect("a folder");
    let mut first = trainer();
    let mut found = train(&mut first, 0..4);
    save(&checkpoints, &mut first, 4).expect("a checkpoint");
    let mut second = trainer();
    // It has its own state, which must not show.
    train(&mut second, 9..11);
    let tensors = TrainingState::tensors(&second);
    let verified = checkpoints
        .newest(&tensors, |_, error| panic!("{case}: {error}"))
        .expect("a folder")
        .expect("a checkpoint");
    assert_eq!(verified.progress(), &progress(4, &first));
    verified.restore(&mut second).expect("a restore");
    found.extend(train(&mut second, 4..7));
    assert_eq!(found, expected, "{case}: resumed");
    assert_eq!(state(&mut second), state(&mut whole), "{case}: resumed");

    let went_on = train(&mut first, 4..7);
    assert_eq!(went_on, expected[4..], "{case}: went on after saving");
    assert_eq!(state(&mut first), state(&mut whole), "{case}: went on after saving");
}

/// Dropout belongs to a step, even if its gradients are applied in the next one.
#[test]
fn a_resumed_run_drops_what_it_would_have_dropped() {
    for update in UPDATES {
        let lora = LoraOptions { dropout: 0.4, ..LoraOptions::new(2, 4.0) };
        let adapters = Some(Adapters::new(&tiny(), lora).expect("adapters"));
        let config = ModelConfig { adapters, ..tiny() };
        let trainer = || trainer_of(&config, Precision::F32, update);
        let expected = train(&mut trainer(), 0..6);
        let folder = TempDir::new().expect("a folder");
        let checkpoints = Checkpoints::open(folder.path(), Disk).expect("a folder");
        let mut first = trainer();
        let mut found = train(&mut first, 0..3);
        save(&checkpoints, &mut first, 3).expect("a checkpoint");
        let mut second = trainer();
        let tensors = TrainingState::tensors(&second);
        let newest = checkpoints.newest(&tensors, |_, error| panic!("{error}")).expect("a folder");
        newest.expect("a checkpoint").restore(&mut second).expect("a restore");
        found.extend(train(&mut second, 3..6));
        assert_eq!(found, expected, "{update:?}");
    }
}

#[test]
fn a_snapshot_is_the_state_of_its_step_whatever_comes_after() {
    for (precision, update) in PRECISIONS.into_iter().flat_map(|p| UPDATES.map(|u| (p, u))) {
        let case = format!("{precision:?} {update:?}");
        let [paused, beside] = [(); 2].map(|()| TempDir::new().expect("a folder"));
        let mut whole = trainer(precision, update);
        let at_once = Checkpoints::open(paused.path(), Disk).expect("a folder");
        let mut going = trainer(precision, update);
        let mut saver = Saver::new(Checkpoints::open(beside.path(), Disk).expect("a folder"));
        saver.use_snapshot(Snapshot::new(&going).expect("little memory"));
        let keep = Keep { retention: Retention { last: 9, every: None }, best: None };
        for step in 1..=3 {
            train(&mut whole, step - 1..step);
            save(&at_once, &mut whole, step).expect("a checkpoint");
            train(&mut going, step - 1..step);
            let before = saver.wait().expect("a checkpoint");
            assert_eq!(before.map(|saved| saved.step), (step > 1).then(|| step - 1), "{case}");
            let progress = progress(step, &going);
            saver.save(&mut going, &progress, keep).expect("a snapshot");
        }
        // The last one may still be written meanwhile.
        assert_eq!(train(&mut going, 3..6), train(&mut whole, 3..6), "{case}");
        saver.wait().expect("a checkpoint");
        assert_eq!(state(&mut going), state(&mut whole), "{case}");
        for step in 1..=3 {
            for file in ["manifest.json", "parameters.safetensors", "optimizer.safetensors"] {
                let [expected, found] = [&paused, &beside].map(|folder| {
                    let path = folder.path().join(format!("step-{step:08}")).join(file);
                    std::fs::read(path).expect("a file")
                });
                assert!(found == expected, "{case}: {file} of step {step}");
            }
        }
    }
}

#[test]
fn the_size_of_a_checkpoint_is_known_beforehand() {
    for precision in PRECISIONS {
        let trainer = trainer(precision, UpdateTime::EndOfStep);
        let tensors = TrainingState::tensors(&trainer);
        let bytes: usize = tensors.iter().map(|tensor| tensor.size_bytes()).sum();
        let known = checkpoint_bytes(tiny(), trainer.options()).expect("a valid model");
        assert_eq!(known, bytes as u64, "{precision:?}");
    }
}

/// A format of moments is part of a run: bytes of one are never read as another.
#[test]
fn moments_of_another_format_are_refused() {
    let full = || trainer(Precision::Bf16Stochastic, UpdateTime::EndOfStep);
    let int8 = || int8_trainer(UpdateTime::EndOfStep);
    let bytes =
        |trainer: &CpuTrainer| checkpoint_bytes(tiny(), trainer.options()).expect("a valid model");
    assert_ne!(bytes(&full()), bytes(&int8()));
    for (mut saved, resumed) in [(full(), int8()), (int8(), full())] {
        let folder = TempDir::new().expect("a folder");
        let checkpoints = Checkpoints::open(folder.path(), Disk).expect("a folder");
        train(&mut saved, 0..1);
        save(&checkpoints, &mut saved, 1).expect("a checkpoint");
        let tensors = TrainingState::tensors(&resumed);
        let error = checkpoints.newest(&tensors, |_, _| {}).expect_err("another format");
        assert!(matches!(error, CheckpointError::OtherRun { .. }), "{error}");
        assert!(error.to_string().contains("first_moment"), "{error}");
    }
}

#[test]
fn evaluating_changes_nothing() {
    for (precision, update) in PRECISIONS.into_iter().flat_map(|p| UPDATES.map(|u| (p, u))) {
        let mut plain = trainer(precision, update);
        let expected = train(&mut plain, 0..5);
        let mut evaluated = trainer(precision, update);
        let mut found = Vec::new();
        for step in 0..5 {
            let first = evaluated.evaluate(&crate::support::batches(100)).expect("a loss").loss;
            let again = evaluated.evaluate(&crate::support::batches(100)).expect("a loss").loss;
            assert_eq!(first.to_bits(), again.to_bits(), "{precision:?} {update:?}");
            found.extend(train(&mut evaluated, step..step + 1));
        }
        assert_eq!(found, expected, "{precision:?} {update:?}");
        assert_eq!(state(&mut evaluated), state(&mut plain), "{precision:?} {update:?}");
    }
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let folder = TempDir::new().expect("a folder");
    let checkpoints = Checkpoints::open(folder.path(), Disk).expect("a folder");
    let mut small = trainer(Precision::F32, UpdateTime::EndOfStep);
    save(&checkpoints, &mut small, 1).expect("a checkpoint");
    let mut config = tiny();
    config.intermediate_size = 16;
    for other in [
        trainer_of(&config, Precision::F32, UpdateTime::EndOfStep),
        trainer(Precision::Bf16Stochastic, UpdateTime::EndOfStep),
    ] {
        let tensors = TrainingState::tensors(&other);
        let error = checkpoints.newest(&tensors, |_, _| {}).expect_err("another model");
        assert!(matches!(error, CheckpointError::OtherRun { .. }), "{error}");
    }
}

#[test]
fn what_is_unfinished_is_no_checkpoint_and_is_deleted() {
    let folder = TempDir::new().expect("a folder");
    let checkpoints = Checkpoints::open(folder.path(), Disk).expect("a folder");
    let mut trainer = trainer(Precision::F32, UpdateTime::EndOfStep);
    for step in [10, 20, 30] {
        save(&checkpoints, &mut trainer, step).expect("a checkpoint");
    }
    for name in ["step-00000040.partial", "step-00000005.deleting", "step-00000010.replaced"] {
        std::fs::create_dir(folder.path().join(name)).expect("a folder");
    }
    std::fs::create_dir(folder.path().join("notes.partial")).expect("a folder");
    assert_eq!(checkpoints.steps().expect("steps"), [10, 20, 30]);
    checkpoints.remove_unfinished().expect("a clean folder");
    let keep = Keep { retention: Retention { last: 1, every: None }, best: Some(10) };
    checkpoints.keep(keep, &TrainingState::tensors(&trainer)).expect("fewer");
    let mut names: Vec<_> = std::fs::read_dir(folder.path())
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("text"))
        .collect();
    names.sort();
    // Foreign files stay.
    assert_eq!(names, ["notes.partial", "step-00000010", "step-00000030"]);
}
