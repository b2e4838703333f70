//! Image classifiers under plans: the same bits, whatever is kept, offloaded or recomputed. Also
//! saved models.

use std::sync::Arc;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_graph::random::Random;
use storm_graph::{DType, MomentumDirection, SgdParameters};
use storm_model::{
    AnyModel, Augmentation, BuildOptions, IfExists, ImageConfig, ImageDirectory, ImageNetwork,
    SaveOptions, WeightDtype, image_preset, image_preset_names,
};
use storm_plan::{
    Budget, Forced, HardwareProfile, LinkProfile, Lowering, SeamMemory, Tier, check, plan,
    random_decisions, random_decisions_with_disk,
};
use storm_train::{
    Inference, NamedInputs, OptimizerMethod, OptimizerOptions, Precision, ReferenceTrainer,
    TrainOptions, Trainer, Viewer, training_task,
};

const BATCH: usize = 3;
const SIDE: usize = 8;
const CLASSES: usize = 5;
const STEPS: u64 = 3;

/// Narrow networks of every kind.
fn networks() -> [ImageNetwork; 3] {
    [
        ImageNetwork::SmallCnn { widths: vec![4, 8], hidden: 16, dropout: 0.5 },
        ImageNetwork::Resnet { widths: vec![4, 8], blocks: 2 },
        ImageNetwork::Resnet9 { widths: [4, 4, 8, 8], logit_scale: 0.125 },
    ]
}

fn options(precision: Precision) -> TrainOptions {
    TrainOptions {
        optimizer: OptimizerOptions {
            method: OptimizerMethod::Sgd(SgdParameters {
                momentum: 0.9,
                direction: MomentumDirection::Nesterov,
                weight_decay: 5e-4,
            }),
            ..OptimizerOptions::default()
        },
        label_smoothing: 0.1,
        augmentation: Augmentation { flip: true, crop: 1, cutout: 2 },
        seed: 7,
        ..TrainOptions::new(BATCH, 1, precision)
    }
}

/// Pictures that are brighter in one place, which determines their class.
fn micro_batch(random: &mut Random) -> NamedInputs {
    let mut images = vec![0u8; BATCH * SIDE * SIDE * 3];
    let (mut targets, mut samples) = (Vec::new(), Vec::new());
    for image in images.chunks_mut(SIDE * SIDE * 3) {
        let class = random.bits() as usize % CLASSES;
        for (at, pixel) in image.iter_mut().enumerate() {
            let bright = if at % CLASSES == class { 128 } else { 0 };
            *pixel = bright + (random.bits() % 128) as u8;
        }
        targets.push(class as i32);
        samples.extend([(random.bits() % 1000) as i32, 0, 0]);
    }
    NamedInputs::new(BATCH).with("images", images).with("targets", targets).with("samples", samples)
}

fn step(micro_batches: usize, step: u64) -> Vec<NamedInputs> {
    let mut random = Random(step + 1);
    (0..micro_batches).map(|_| micro_batch(&mut random)).collect()
}

fn bits(names: &[String], mut read: impl FnMut(&str) -> Vec<f32>) -> Vec<Vec<u32>> {
    names.iter().map(|name| read(name).iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn random_plans_of_image_classifiers_are_exact() {
    let mut profile = HardwareProfile::builtin("reference").unwrap();
    profile.links.push(LinkProfile {
        near: Tier::HOST,
        far: Tier::DISK,
        to_near_bandwidth: 3e9,
        to_far_bandwidth: 2e9,
        duplex_bandwidth: 4e9,
        latency_seconds: 1e-4,
    });
    let folder = tempfile::tempdir().unwrap();
    let mut on_disk = 0;
    for (number, network) in networks().into_iter().enumerate() {
        let config = ImageConfig::new([SIDE, SIDE], CLASSES, network);
        for (precision, micro_batches) in
            [(Precision::F32, 2), (Precision::Bf16Stochastic, 1), (Precision::Bf16Master, 3)]
        {
            let options = options(precision);
            let mut expected = ReferenceTrainer::new(&config, options.clone()).unwrap();
            let mut names: Vec<String> = expected.parameter_names().map(str::to_owned).collect();
            let learned = names.iter().filter(|name| !name.contains(".running_"));
            let momenta: Vec<String> = learned.map(|name| format!("{name}.momentum")).collect();
            names.extend(momenta);
            let reports: Vec<_> = (0..STEPS)
                .map(|at| expected.step(&step(micro_batches, at), 0.05).unwrap())
                .collect();
            assert!(reports.iter().all(|report| report.accuracy.is_some()));
            let at_end = bits(&names, |name| expected.read(name).unwrap());

            let pictures = step(1, 9).remove(0);
            let mut viewer = Viewer::new(&config, BATCH, pictures.clone()).unwrap();
            let task = training_task(&config, &options, micro_batches).unwrap();
            let lowering = Lowering::new(&task, &profile).unwrap();
            for variant in 0..3 {
                let about = format!("network {number}, {precision:?}, plan {variant}");
                let decisions = match variant {
                    2 => random_decisions_with_disk(&task, variant),
                    _ => random_decisions(&task, variant),
                };
                let plan = lowering
                    .lower_with_evaluation(&decisions)
                    .unwrap_or_else(|error| panic!("{about}: {error}"));
                on_disk += usize::from(plan.bytes[Tier::DISK] > 0);
                let budget = plan.bytes;
                let plan = Arc::new(check(plan, budget).unwrap());
                let device = CpuPlanOptions {
                    threads: Some(1),
                    chaos_seed: Some(variant),
                    ..CpuPlanOptions::default()
                };
                let mut trainer: Trainer<CpuPlanDevice> =
                    Trainer::new(&config, options.clone(), plan, device).unwrap();
                for (at, expected) in reports.iter().enumerate() {
                    let batches = step(micro_batches, at as u64);
                    if at == variant as usize % 2 {
                        let found = trainer.evaluate(&batches).unwrap();
                        assert!(found.loss.is_finite() && found.accuracy.is_some(), "{about}");
                        assert_eq!(viewer.look(&mut trainer).unwrap().len(), BATCH, "{about}");
                    }
                    let found = trainer.step(&batches, 0.05).unwrap();
                    assert_eq!(found, *expected, "step {at} of {about}");
                }
                let found = bits(&names, |name| trainer.read(name).unwrap());
                for ((name, found), expected) in names.iter().zip(&found).zip(&at_end) {
                    assert_eq!(found, expected, "{name} of {about}");
                }
                // Training classifies with the model that would be saved.
                let path = folder.path().join(&about);
                let save = SaveOptions { dtype: WeightDtype::F32, ..SaveOptions::default() };
                trainer.save(&path, &save).unwrap();
                let seen = viewer.look(&mut trainer).unwrap();
                let directory = ImageDirectory::open(&path).unwrap();
                let mut other = Viewer::new(&config, BATCH, pictures.clone()).unwrap();
                assert_eq!(seen, other.look_with(&directory).unwrap(), "{about}");
                assert!(seen.iter().all(|guess| guess.probability >= 1.0 / CLASSES as f32));
            }
        }
    }
    assert!(on_disk > 3, "{on_disk} plans with momentum on disk");
}

/// The planner's choices for half and a quarter of what everything takes, and for the least that works.
#[test]
fn image_classifiers_are_exact_at_every_budget() {
    let profile =
        HardwareProfile { overhead_bytes: 0, ..HardwareProfile::builtin("reference").unwrap() };
    let options = options(Precision::Bf16Stochastic);
    let mut shared = 0;
    for network in networks() {
        let config = ImageConfig::new([SIDE, SIDE], CLASSES, network);
        let task = training_task(&config, &options, 1).unwrap();
        let ample = Budget::new(1 << 40, 1 << 40);
        let everything = plan(&task, &profile, ample, &Forced::default()).unwrap();
        let most = everything.prediction.peak_bytes[Tier::DEVICE];
        let least = everything.vram_min_bytes;
        let mut runs = Vec::new();
        for vram_bytes in [most, (most / 2).max(least), (most / 4).max(least), least] {
            let budget = ample.with(Tier::DEVICE, vram_bytes);
            let chosen = plan(&task, &profile, budget, &Forced::default()).unwrap();
            let seams = chosen.decisions.groups.iter().map(|group| group.seams);
            shared += seams.filter(|&seams| seams == SeamMemory::Shared).count();
            let device = CpuPlanOptions { threads: Some(1), ..CpuPlanOptions::default() };
            let mut trainer: Trainer<CpuPlanDevice> =
                Trainer::new(&config, options.clone(), Arc::new(chosen.plan), device).unwrap();
            assert!(trainer.memory_taken()[Tier::DEVICE] as u64 <= vram_bytes);
            let reports: Vec<_> =
                (0..STEPS).map(|at| trainer.step(&step(1, at), 0.05).unwrap()).collect();
            let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
            runs.push((reports, bits(&names, |name| trainer.read(name).unwrap())));
        }
        assert!(runs.iter().all(|run| *run == runs[0]), "{config:?}");
    }
    assert!(shared >= 3, "{shared} plans share memory between inputs and gradients");
}

/// With the batch of the examples, beside what the card's libraries take.
#[test]
fn networks_fit_in_a_part_of_their_memory() {
    let profile =
        HardwareProfile { overhead_bytes: 0, ..HardwareProfile::builtin("h200").unwrap() };
    let options = TrainOptions {
        optimizer: options(Precision::Bf16Stochastic).optimizer,
        ..TrainOptions::new(512, 1, Precision::Bf16Stochastic)
    };
    for (preset, part) in [("small-cnn", 0.45), ("resnet-9", 0.43), ("resnet-18", 0.25)] {
        let task = training_task(image_preset(preset).unwrap(), &options, 1).unwrap();
        let everything =
            plan(&task, &profile, Budget::new(1 << 40, 1 << 40), &Forced::default()).unwrap();
        let most = everything.prediction.peak_bytes[Tier::DEVICE];
        let least = everything.vram_min_bytes;
        let reached = least as f64 / most as f64;
        assert!(reached <= part, "{preset}: {least} of {most} bytes, {reached:.3}");
    }
}

/// A saved model is read back to the bit, with PyTorch's shapes, and gives finite logits.
#[test]
fn a_saved_classifier_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    for (number, network) in networks().into_iter().enumerate() {
        let config = ImageConfig::new([SIDE, SIDE], CLASSES, network);
        let mut trainer = ReferenceTrainer::new(&config, options(Precision::F32)).unwrap();
        trainer.step(&step(1, 3), 0.05).unwrap();
        let path = folder.path().join(number.to_string());
        let save = SaveOptions {
            dtype: WeightDtype::F32,
            if_exists: IfExists::Refuse,
            ..SaveOptions::default()
        };
        trainer.save(&path, &save).unwrap();
        assert!(ImageDirectory::is_one(&path));
        let directory = ImageDirectory::open(&path).unwrap();
        assert_eq!(*directory.config(), config);
        let mut again = ReferenceTrainer::new(&config, options(Precision::F32)).unwrap();
        again.load(&directory).unwrap();
        let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
        let saved = bits(&names, |name| trainer.read(name).unwrap());
        assert_eq!(bits(&names, |name| again.read(name).unwrap()), saved);
        for spec in AnyModel::from(&config).parameters() {
            let is_convolution = spec.name.contains("conv") && spec.name.ends_with("weight");
            assert_eq!(
                spec.pieces[0].shape.len() == 4,
                is_convolution || spec.name.contains("downsample.0"),
                "{}",
                spec.name
            );
        }
        let build = BuildOptions::training(BATCH, 1, DType::F32);
        let mut inference = Inference::load(&config, &build, &directory).unwrap();
        let logits = inference.logits(&step(1, 4)[0]).unwrap();
        assert_eq!(logits.len(), BATCH * CLASSES);
        assert!(logits.iter().all(|logit| logit.is_finite()));
    }
}

#[test]
fn presets_have_the_parameters_of_their_networks() {
    let counts = [("small-cnn", 620_352), ("resnet-9", 6_573_120), ("resnet-18", 11_173_952)];
    assert!(image_preset_names().eq(counts.map(|(name, _)| name)));
    for (name, count) in counts {
        let config = image_preset(name).unwrap();
        config.validate().unwrap();
        assert_eq!(config.parameter_count(), count, "{name}");
    }
    assert!(image_preset("resnet-19").is_none());
}

#[test]
fn configs_that_make_no_sense_are_refused() {
    let good = image_preset("resnet-18").unwrap();
    let check = |change: &dyn Fn(&mut ImageConfig), part: &str| {
        let mut config = good.clone();
        change(&mut config);
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    check(&|config| config.image_size = [7, 32], "at least 8");
    check(&|config| config.classes = 0, "classes is 0");
    check(&|config| config.std = vec![0.0, 1.0, 1.0], "positive");
    check(&|config| config.mean = vec![0.5], "3 channels");
    let empty = ImageNetwork::Resnet { widths: Vec::new(), blocks: 2 };
    check(&|config| config.network = empty.clone(), "the number of widths");
    let error = good.check_images([32, 32, 1], 10).unwrap_err().to_string();
    assert!(error.contains("[32, 32, 3]"), "{error}");
    let error = good.check_images([32, 32, 3], 11).unwrap_err().to_string();
    assert!(error.contains("at most 10"), "{error}");
}
