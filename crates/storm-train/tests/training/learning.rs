//! Steps accumulate, skip what is not finite, and leave frozen parameters alone.

use crate::support::{BATCH, SEQUENCE, batch, families, options, tiny};
use storm_graph::IGNORE_INDEX;
use storm_model::{BuildOptions, Packing, Trainable, build};
use storm_train::{Batch, Precision, ReferenceTrainer, TrainError};

fn trainer(name: &str, precision: Precision) -> ReferenceTrainer {
    ReferenceTrainer::new(tiny(name), options(precision, Packing::Single)).expect("a trainer")
}

#[test]
fn the_loss_of_a_repeated_batch_falls() {
    for config in families() {
        for precision in [Precision::F32, Precision::Bf16Master, Precision::Bf16Stochastic] {
            let options = options(precision, Packing::Single);
            let mut trainer = ReferenceTrainer::new(&config, options).expect("a trainer");
            let batches = [batch(&config, Packing::Single, 1)];
            let first = trainer.step(&batches, 1e-2).expect("a step").loss;
            let mut last = first;
            for _ in 0..30 {
                last = trainer.step(&batches, 1e-2).expect("a step").loss;
            }
            assert!(last < 0.6 * first, "{:?} {precision:?}: {first} to {last}", config.family);
        }
    }
}

/// Ignored rows in one micro-batch shift the weight to the other, as in one joint batch: a step
/// over [A, nothing] is a step over [A].
#[test]
fn an_ignored_micro_batch_changes_nothing() {
    let config = tiny("qwen2.5-0.5b");
    let counted = batch(&config, Packing::Single, 3);
    let mut ignored = batch(&config, Packing::Single, 4);
    ignored.targets.fill(IGNORE_INDEX);
    let mut alone = trainer("qwen2.5-0.5b", Precision::F32);
    let mut both = trainer("qwen2.5-0.5b", Precision::F32);
    let loss_alone = alone.accumulate(std::slice::from_ref(&counted)).expect("a pass").loss;
    let loss_both = both.accumulate(&[counted, ignored]).expect("a pass").loss;
    assert_eq!(loss_alone.to_bits(), loss_both.to_bits());
    for name in alone.parameter_names().map(str::to_owned).collect::<Vec<_>>() {
        let name = format!("{name}.grad");
        let (a, b) = (alone.read(&name).expect("read"), both.read(&name).expect("read"));
        assert!(a == b, "{name}");
    }
}

#[test]
fn frozen_parameters_have_no_gradient_and_do_not_move() {
    let config = tiny("llama-3.2-1b");
    let options = options(Precision::F32, Packing::Single);
    let build_options = BuildOptions {
        trainable: Trainable::Where(|name| name.starts_with("mlp.")),
        ..BuildOptions::training(BATCH, SEQUENCE, options.precision.compute())
    };
    let program = build(&config, &build_options).expect("a valid model");
    let mut trainer = ReferenceTrainer::of_program(&config, options, program).expect("a trainer");
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    let before: Vec<Vec<f32>> =
        names.iter().map(|name| trainer.read(name).expect("read")).collect();
    trainer.step(&[batch(&config, Packing::Single, 1)], 1e-2).expect("a step");
    for (name, before) in names.iter().zip(before) {
        let after = trainer.read(name).expect("read");
        let learns = name.contains(".mlp.");
        assert_eq!(after != before, learns, "{name}");
        assert_eq!(trainer.read(&format!("{name}.grad")).is_ok(), learns, "{name}");
    }
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    let config = tiny("gpt2");
    let mut trainer = trainer("gpt2", Precision::F32);
    let batches = [batch(&config, Packing::Single, 1)];
    trainer.accumulate(&batches).expect("a pass");
    trainer.write("final_norm.weight.grad", &[f32::NAN; 24]).expect("a gradient");
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    let before: Vec<Vec<f32>> =
        names.iter().map(|name| trainer.read(name).expect("read")).collect();
    assert!(!trainer.update(1e-2).expect("an update").is_finite());
    for (name, before) in names.iter().zip(before) {
        assert!(trainer.read(name).expect("read") == before, "{name}");
    }
}

#[test]
fn batches_that_do_not_fit_are_refused() {
    let config = tiny("gpt2");
    let mut trainer = trainer("gpt2", Precision::F32);
    let good = batch(&config, Packing::Single, 1);
    let mut refuse = |batch: Batch| match trainer.step(&[batch], 1e-3) {
        Err(TrainError::Batch { problem }) => problem,
        other => panic!("{other:?}"),
    };
    let mut bad = good.clone();
    bad.tokens[3] = 53;
    assert!(refuse(bad).contains("`tokens` has 53 at entry 3"));
    let mut bad = good.clone();
    bad.positions[0] = 40;
    assert!(refuse(bad).contains("`positions` has 40"));
    let mut bad = good.clone();
    bad.targets.fill(IGNORE_INDEX);
    assert!(refuse(bad).contains("every one is ignored"));
    let mut bad = good;
    bad.segments = Some(vec![0; BATCH * SEQUENCE]);
    assert!(refuse(bad).contains("single samples"));
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let mut options = options(Precision::F32, Packing::Single);
    options.optimizer.max_norm = Some(0.0);
    let error = ReferenceTrainer::new(tiny("gpt2"), options).err().expect("refused").to_string();
    assert_eq!(error, "max_norm: must be positive; leave it out to turn clipping off");
}

/// Writing one parameter sets its master to the values given, and leaves all others alone.
#[test]
fn a_written_parameter_keeps_its_precision() {
    let config = tiny("llama-3.2-1b");
    let mut trainer = trainer("llama-3.2-1b", Precision::Bf16Master);
    trainer.step(&[batch(&config, Packing::Single, 1)], 1e-2).expect("a step");
    let other = trainer.read("layers.0.mlp.down.weight.master").expect("read");
    trainer.write("final_norm.weight", &[1.000_1; 24]).expect("written");
    assert_eq!(trainer.read("final_norm.weight.master").expect("read"), [1.000_1; 24]);
    assert_eq!(trainer.read("final_norm.weight").expect("read"), [1.0; 24]);
    assert!(trainer.read("layers.0.mlp.down.weight.master").expect("read") == other);
    assert!(trainer.step::<Batch>(&[], 1e-2).unwrap_err().to_string().contains("no batches"));
    let error = trainer.step(&[batch(&config, Packing::Single, 1)], f32::NAN).unwrap_err();
    assert!(error.to_string().starts_with("learning_rate: must be a number"), "{error}");
}
