//! Probes with matrices in 8 bits: their losses are those of a frozen base in 8 bits, and training keeps every bit.

use crate::exact::state_is_equal;
use crate::resume::{killed_anywhere, mixed, stopped_after};
use crate::support::{
    Case, CpuRun, F32, Heard, HeldOut, STEPS, end, in_int8, predict, probe_device, run,
    run_options, tiny, train_options, trainer, whole,
};
use std::sync::Arc;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_device::{NullDevice, NullOptions};
use storm_graph::QuantizedFormat;
use storm_model::{
    Adapters, AnyModel, BaseFormat, HfDirectory, Initialization, LoraOptions, ModelConfig,
    SaveOptions, WeightDtype, image_preset,
};
use storm_plan::{Budget, Forced, HardwareProfile, Idle, Tier, UpdateTime, plan};
use storm_train::{
    AnyBatch, Checkpoints, Controller, Direction, Disk, MicroBatch, Precision, PredictOptions,
    ProbeDevice, Run, Stop, TrainOptions, Trainer, Verdict, predict_bytes, task_of_program,
    training_task,
};

/// Every precision, both times of an update, and weights that do not fit on the device.
fn cases() -> [Case; 4] {
    let update = UpdateTime::NextStep;
    [
        F32,
        Case { precision: Precision::Bf16Master, ..F32 },
        Case { precision: Precision::Bf16Stochastic, update, ..F32 },
        Case { update, device_bytes: 28_000, ..F32 },
    ]
}

/// A run that was stopped after a step, and what it reported.
fn stopped_at(case: &Case, step: u64, options: PredictOptions) -> (CpuRun, Heard) {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = Some((options, HeldOut::Alike));
    let mut run = run(folder.path(), case, run_options(case, STEPS), settings);
    let mut heard = Heard { stop_after: Some(step), ..Heard::default() };
    let stop = heard.stop.clone();
    run.train(&stop, &mut heard).expect("a run");
    (run, heard)
}

/// The loss of the current weights as the frozen base of a LoRA run with `base = "int8"`, whose adapters are still zero.
/// Batches have as many targets each, so their mean is exact.
fn loss_as_base(run: &mut CpuRun, case: &Case, batches: &[AnyBatch]) -> f64 {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model");
    let dtype = match case.precision {
        Precision::F32 => WeightDtype::F32,
        _ => WeightDtype::Bf16,
    };
    let save = SaveOptions { dtype, ..SaveOptions::default() };
    run.trainer().save(&path, &save).expect("a model");
    let config = tiny(case);
    let base = BaseFormat::Quantized(QuantizedFormat::Int8);
    let adapters = Adapters::new(&config, LoraOptions::new(3, 6.0)).expect("they fit");
    let config = ModelConfig { base, adapters: Some(adapters), ..config };
    let options = train_options(case);
    let task = training_task(&config, &options, 2).expect("a model");
    let profile = HardwareProfile::builtin("reference").expect("built in");
    let planned = plan(&task, &profile, Budget::new(1 << 40, 1 << 40), &Forced::default());
    let plan = planned.expect("a plan").plan.into();
    let device = CpuPlanOptions { threads: Some(1), ..CpuPlanOptions::default() };
    let mut trainer: Trainer<CpuPlanDevice> =
        Trainer::new(&config, options, plan, device).expect("a trainer");
    trainer.load(&HfDirectory::open(&path).expect("a model")).expect("its weights");
    let losses = batches.iter().map(|batch| {
        assert_eq!(batch.counted(), batches[0].counted());
        let loss = trainer.evaluate(std::slice::from_ref(batch)).expect("an evaluation").loss;
        f64::from(loss) / batches.len() as f64
    });
    losses.sum()
}

/// Before the jump, after it, and after its correction.
#[test]
fn losses_are_those_of_a_base_in_8_bits() {
    let (jumps, corrections) = {
        let mut batches = HeldOut::Alike.batches();
        let corrections = batches.split_off(batches.len() / 2);
        (batches, corrections)
    };
    let controller = Controller::Constant { tau: 1.0 };
    let options = PredictOptions { controller, ..predict(Direction::LastUpdate) };
    // The largest weights of the last one are rounded in pieces.
    for case in cases().into_iter().chain([WIDE]) {
        // Nothing is measured before the weights at step 7.
        let folder = tempfile::tempdir().expect("a folder");
        let mut plain = run(folder.path(), &case, run_options(&case, 7), None);
        plain.train(&Stop::new(), &mut Heard::default()).expect("a run");
        let (mut jumped, heard) = stopped_at(&case, 7, in_int8(options));
        let (_, jump) = heard.jumps[0];
        assert_eq!(jump.loss_before, loss_as_base(&mut plain, &case, &jumps), "{case:?}");
        if case == WIDE {
            continue;
        }
        assert_eq!(jump.verdict, Verdict::Accepted, "{case:?}");
        assert_eq!(jump.loss, loss_as_base(&mut jumped, &case, &jumps), "{case:?}");
        let (mut corrected, heard) = stopped_at(&case, 9, in_int8(options));
        let (_, judgement) = heard.judgements[0];
        assert!(judgement.kept, "{judgement:?}");
        let judged = loss_as_base(&mut corrected, &case, &corrections);
        assert_eq!(judgement.loss, judged, "{case:?}");
        // The same weights, with another loss.
        let (_, other) = stopped_at(&case, 7, options);
        assert!(other.jumps[0].1.loss_before != jump.loss_before, "{case:?}");
        assert_eq!(other.jumps[0].1.distance, jump.distance, "{case:?}");
    }
}

#[test]
fn refused_and_undone_jumps_leave_every_bit() {
    let mut not_finite = 0;
    for case in cases() {
        let (plain, _) = whole(&case, STEPS, None);
        for direction in [Direction::Random { window: 2 }, Direction::None { window: 2 }] {
            let options = PredictOptions { noise: 1e9, ..in_int8(predict(direction)) };
            let (end, heard) = whole(&case, STEPS, Some((options, HeldOut::Alike)));
            state_is_equal(&case, &end, &plain);
            assert_eq!(heard.jumps.len(), 4);
            assert!(heard.jumps.iter().all(|(_, jump)| jump.verdict != Verdict::Accepted));
        }
        let options = in_int8(predict(Direction::LastUpdate));
        for tau in [1e12, 1e20] {
            let huge = PredictOptions { controller: Controller::Constant { tau }, ..options };
            let (end, heard) = whole(&case, STEPS, Some((huge, HeldOut::Alike)));
            state_is_equal(&case, &end, &plain);
            let bad = heard.jumps.iter().filter(|(_, jump)| jump.verdict == Verdict::NotFinite);
            not_finite += bad.count();
        }
        let options = PredictOptions { margin: 0.0, ..options };
        let (end, heard) = whole(&case, STEPS, Some((options, HeldOut::Opposed)));
        assert!(heard.kept() == 0 && !heard.judgements.is_empty(), "{case:?}");
        let (plain, _) = whole(&case, STEPS - 2 * heard.judgements.len() as u64, None);
        state_is_equal(&case, &end, &plain);
    }
    assert!(not_finite > 0, "no jump was too far");
}

#[test]
fn no_plan_changes_a_bit() {
    let of = |update: UpdateTime, device_bytes: u64| {
        let case = Case { update, device_bytes, ..F32 };
        let settings = (in_int8(predict(Direction::LastUpdate)), HeldOut::Alike);
        let (end, heard) = whole(&case, STEPS, Some(settings));
        let losses: Vec<u64> = heard.judgements.iter().map(|(_, j)| j.loss.to_bits()).collect();
        (end, heard.jumps, losses)
    };
    let roomy = of(UpdateTime::EndOfStep, 1 << 40);
    let accepted = roomy.1.iter().filter(|(_, jump)| jump.verdict == Verdict::Accepted);
    assert!(accepted.count() > 2 && !roomy.2.is_empty());
    for other in [of(UpdateTime::NextStep, 1 << 40), of(UpdateTime::NextStep, 28_000)] {
        assert!(other == roomy);
    }
}

#[test]
fn a_run_that_stops_or_is_killed_goes_on_bit_by_bit() {
    let settings = mixed(Direction::Average { window: 3 }).into_iter().cycle();
    for (case, (options, held_out)) in cases().into_iter().zip(settings) {
        // In warm-up, in a full phase, after jumps, and in their correction.
        stopped_after(&case, (in_int8(options), held_out), [2, 5, 7, 8].into_iter());
    }
    let (options, held_out) = mixed(Direction::LastUpdate)[0];
    killed_anywhere(&cases()[2], (in_int8(options), held_out), 11);
}

/// Weights of a size that pages can show, all on the device.
const WIDE: Case = Case { hidden: 256, ..F32 };

/// Measured while losses are: the state of the optimizer and the probe, without the weights of the step.
#[test]
fn predictions_take_less_device_memory_than_with_full_weights() {
    let options = predict(Direction::LastUpdate);
    let measured = |options: PredictOptions| {
        let (_, heard) = whole(&WIDE, 9, Some((options, HeldOut::Alike)));
        assert_eq!(heard.predictions.len(), 1);
        heard.predictions[0].1.device_bytes
    };
    let (full, int8) = (measured(options), measured(in_int8(options)));
    let mut trainer = trainer(&WIDE);
    let plan = trainer.plan();
    let step = plan.bytes[Tier::DEVICE] as u64;
    let released = plan.idle(Idle::WithParameters).into_iter().map(|range| range.len() as u64);
    let state = step - released.sum::<u64>();
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    let elements = |name: &String| trainer.read(name).expect("a parameter").len() as u64;
    let weights = 4 * names.iter().map(elements).sum::<u64>();
    println!(
        "steps {step}, predictions {full}, in 8 bits {int8}, weights {weights}, state {state}"
    );
    assert!(state >= 2 * weights && int8 >= state && int8 < full && full < step);
    // A quarter of the weights, and one matrix at a time in full.
    assert!(int8 < state + weights / 2 && full >= state + weights, "{int8} of {full}");
}

#[test]
fn the_price_is_what_is_taken() {
    let folder = tempfile::tempdir().expect("a folder");
    for case in cases() {
        let options = in_int8(predict(Direction::LastUpdate));
        let mut run = run(folder.path(), &case, run_options(&case, STEPS), None);
        let before = end(&mut run);
        let device = probe_device(&options);
        let taken = run.predict(options, HeldOut::Alike.batches(), device).expect("memory");
        let price = |options| predict_bytes(tiny(&case), &train_options(&case), &options);
        assert_eq!(taken, price(options).expect("a model"));
        assert!(taken > price(predict(Direction::LastUpdate)).expect("a model"));
        assert!(end(&mut run).state == before.state, "weights are back: {case:?}");
    }
}

/// The probe is refused after the weights were released. The run is as before, and can go on without it.
#[test]
fn a_probe_that_cannot_be_had_leaves_every_bit() {
    let options = in_int8(predict(Direction::LastUpdate));
    let no_threads = |device: ProbeDevice<CpuPlanDevice>| ProbeDevice {
        options: CpuPlanOptions { threads: Some(0), ..device.options },
        ..device
    };
    let poor = |device: ProbeDevice<CpuPlanDevice>| ProbeDevice { budget_bytes: 1, ..device };
    type Change<'a> = &'a dyn Fn(ProbeDevice<CpuPlanDevice>) -> ProbeDevice<CpuPlanDevice>;
    let changes: [(Change<'_>, &str); 2] = [
        (&no_threads, "0 threads were asked for"),
        (&poor, "memory for the code and the workspace of its probe"),
    ];
    for case in cases() {
        let (plain, _) = whole(&case, STEPS, None);
        for (change, part) in changes {
            let folder = tempfile::tempdir().expect("a folder");
            let mut run = run(folder.path(), &case, run_options(&case, STEPS), None);
            let before = end(&mut run);
            let device = probe_device(&options).map(change);
            let error = run.predict(options, HeldOut::Alike.batches(), device);
            let error = error.expect_err("it is refused").to_string();
            assert!(error.contains(part), "{error}");
            assert!(end(&mut run).state == before.state, "{case:?}");
            run.train(&Stop::new(), &mut Heard::default()).expect("a run without predictions");
            state_is_equal(&case, &end(&mut run), &plain);
        }
    }
}

/// A device that releases nothing has no room for a probe, whatever the plan says is idle.
#[test]
fn a_probe_takes_no_more_than_what_is_released() {
    let options = in_int8(predict(Direction::LastUpdate));
    let (config, train) = (tiny(&WIDE), train_options(&WIDE));
    let task = training_task(&config, &train, 2).expect("a model");
    let profile = HardwareProfile::builtin("reference").expect("built in");
    let planned = plan(&task, &profile, Budget::new(1 << 40, 1 << 40), &Forced::default());
    let plan = Arc::new(planned.expect("a plan").plan);
    assert!(!plan.idle(Idle::WithParameters).is_empty());
    let of_step = NullOptions::of_profile(&plan, &profile);
    let of_probe = of_step.clone();
    let trainer: Trainer<NullDevice> =
        Trainer::new(config, train, plan, of_step).expect("a trainer");
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoints = Checkpoints::open(folder.path(), Disk).expect("a folder");
    let source = Box::new(crate::support::Made { next: 0, shift: 0 });
    let mut run =
        Run::new(trainer, source, None, checkpoints, run_options(&F32, STEPS)).expect("a run");
    let probe = ProbeDevice { profile, options: of_probe, budget_bytes: u64::MAX };
    let error = run.predict(options, HeldOut::Alike.batches(), Some(probe));
    let error = error.expect_err("nothing is released").to_string();
    assert!(error.contains("a device that can release memory between steps"), "{error}");
}

#[test]
fn what_cannot_be_in_8_bits_is_refused() {
    let options = in_int8(predict(Direction::LastUpdate));
    let held_out = || HeldOut::Alike.batches();
    let folder = tempfile::tempdir().expect("a folder");
    let refused = |mut run: CpuRun| {
        let before = end(&mut run);
        let error = run.predict(options, held_out(), probe_device(&options));
        assert!(end(&mut run).state == before.state, "it changes nothing");
        error.expect_err("it has no such form").to_string()
    };
    for int8_base in [false, true] {
        let case = Case { lora: true, int8_base, ..F32 };
        let error = predict_bytes(tiny(&case), &train_options(&case), &options);
        let error = error.expect_err("adapters").to_string();
        assert!(error.contains("with adapters, base = \"int8\""), "{error}");
        assert_eq!(refused(run(folder.path(), &case, run_options(&case, STEPS), None)), error);
    }
    let image = image_preset("resnet-18").expect("a preset");
    let images = TrainOptions { sequence: 1, ..train_options(&F32) };
    let error = predict_bytes(image, &images, &options).expect_err("images");
    assert!(error.to_string().contains("image classifiers"), "{error}");

    let train = train_options(&F32);
    let program = AnyModel::from(tiny(&F32)).build(&train.build_options()).expect("a model");
    let task = task_of_program(&program, &train, 2).expect("a program");
    let profile = HardwareProfile::builtin("reference").expect("built in");
    let planned = plan(&task, &profile, Budget::new(1 << 40, 1 << 40), &Forced::default());
    let (plan, device) = (planned.expect("a plan").plan.into(), CpuPlanOptions::default());
    let start = |_: &str| Initialization::Constant(0.5);
    let trainer = Trainer::of_program(&program, train, plan, device, start).expect("a trainer");
    let checkpoints = Checkpoints::open(folder.path(), Disk).expect("a folder");
    let source = Box::new(crate::support::Made { next: 0, shift: 0 });
    let run_of_program =
        Run::new(trainer, source, None, checkpoints, run_options(&F32, STEPS)).expect("a run");
    let error = refused(run_of_program);
    assert!(error.contains("a program without one"), "{error}");

    let mut run = run(folder.path(), &F32, run_options(&F32, STEPS), None);
    let error = run.predict(options, held_out(), None).expect_err("no device").to_string();
    assert!(error.contains("takes a device"), "{error}");
}
