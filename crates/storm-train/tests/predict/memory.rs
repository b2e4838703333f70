//! The memory of predictions: as estimated, and no more over time.

use crate::support::{
    Case, DIRECTIONS, F32, Heard, HeldOut, RSSM, always, cases, in_int8, predict, run, run_options,
    tiny, train_options, trainer, whole,
};
use std::path::Path;
use storm_host::allocation::peak_bytes;
use storm_plan::Tier;
use storm_train::{
    Accept, AnyBatch, BatchSource, Controller, Direction, PhaseLengths, Precision, PredictOptions,
    Retention, RunOptions, Stop, Verdict, checkpoint_bytes, predict_bytes, predict_saved_bytes,
};

#[test]
fn the_price_is_what_is_taken() {
    let folder = tempfile::tempdir().expect("a folder");
    for case in cases() {
        for direction in DIRECTIONS {
            let mut run = run(folder.path(), &case, run_options(&case, 24), None);
            let mut source = crate::support::Made { next: 0, shift: 0 };
            let mut batches = vec![AnyBatch::default(); 4];
            for batch in &mut batches {
                source.next_batch(batch).expect("a batch");
            }
            let taken = run.predict(predict(direction), batches, None).expect("memory");
            let price = |options| predict_bytes(tiny(&case), &train_options(&case), &options);
            let full = price(predict(direction)).expect("a model");
            assert_eq!(taken, full, "{direction:?} {case:?}");
            let taken = run.predict(always(direction, 1.0), Vec::new(), None).expect("memory");
            assert_eq!(taken, price(always(direction, 1.0)).expect("a model"));
            assert!(taken < full, "no moments are copied");
        }
    }
}

/// Bytes of the tensors in a checkpoint's folder.
fn tensor_bytes(checkpoint: &Path) -> u64 {
    let files =
        std::fs::read_dir(checkpoint).expect("a folder").map(|file| file.expect("a file").path());
    let files = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
    files
        .map(|path| {
            let bytes = std::fs::read(path).expect("a file");
            let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
            bytes.len() as u64 - 8 - header
        })
        .sum()
}

/// The largest checkpoint has what is said of it, and nothing that predictions only work with.
#[test]
fn checkpoints_take_what_is_said() {
    for case in [F32, Case { precision: Precision::Bf16Master, ..F32 }] {
        let jumps = DIRECTIONS.into_iter().flat_map(|d| [predict(d), always(d, 0.5)]);
        let rssm = PredictOptions { controller: RSSM, ..predict(Direction::LastUpdate) };
        let int8 = in_int8(predict(Direction::LastUpdate));
        for options in jumps.chain([rssm, int8]) {
            let folder = tempfile::tempdir().expect("a folder");
            let retention = Retention { last: 100, every: None };
            let saved = RunOptions { save_every: Some(1), retention, ..run_options(&case, 12) };
            let mut run = run(folder.path(), &case, saved, Some((options, HeldOut::Alike)));
            let mut heard = Heard::default();
            run.train(&Stop::new(), &mut heard).expect("a run");
            let checkpoints = std::fs::read_dir(folder.path()).expect("a folder");
            let largest =
                checkpoints.map(|checkpoint| tensor_bytes(&checkpoint.expect("one").path())).max();
            let train = train_options(&case);
            let plain = checkpoint_bytes(tiny(&case), &train).expect("a model");
            let most = plain + predict_saved_bytes(tiny(&case), &train, &options).expect("a model");
            let is_moved = heard.jumps.iter().any(|(_, jump)| jump.verdict == Verdict::Accepted);
            let largest = largest.expect("a checkpoint");
            match is_moved || options.accept == Accept::Always {
                true => assert_eq!(largest, most, "{options:?}"),
                false => assert!(largest < most, "{options:?}"),
            }
        }
    }
}

/// A thousand predictions take no more memory than a hundred.
#[test]
fn memory_does_not_grow_with_predictions() {
    let peak = |steps: u64| {
        let folder = tempfile::tempdir().expect("a folder");
        let options = PredictOptions {
            lengths: PhaseLengths { warm_up: 1, full: 1, correct: 1 },
            controller: Controller::Constant { tau: 1e-3 },
            noise: 1e9,
            ..predict(Direction::LastUpdate)
        };
        let settings = Some((options, HeldOut::Alike));
        let evaluate_every = None;
        let run_options = RunOptions { evaluate_every, ..run_options(&F32, steps + 2) };
        let mut run = run(folder.path(), &F32, run_options, settings);
        let mut count = Count(0);
        let (_, bytes) = peak_bytes(|| run.train(&Stop::new(), &mut count).expect("a run"));
        assert_eq!(count.0, steps);
        bytes
    };
    // Inside the thread pool, because what a thread hands to a pool is freed by another one.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    let [few, many] = [100, 1000].map(|steps| pool.install(|| peak(steps)));
    assert!(many <= few + (4 << 10), "{few} bytes for 100 predictions, {many} for 1000");
}

struct Count(u64);

impl storm_train::Observer for Count {
    fn step(
        &mut self,
        _: &storm_train::StepEvent,
        _: &mut dyn storm_train::Observed,
    ) -> Result<(), storm_train::RunError> {
        Ok(())
    }

    fn event(&mut self, event: &storm_train::Event<'_>) -> Result<(), storm_train::RunError> {
        if let storm_train::Event::Predicted { .. } = event {
            self.0 += 1;
        }
        Ok(())
    }
}

/// Measured during loss evaluations, when a step's working memory is released.
#[test]
fn predictions_take_less_device_memory_than_steps() {
    let plan_bytes = trainer(&F32).plan().bytes[Tier::DEVICE] as u64;
    let options = predict(Direction::LastUpdate);
    let (_, heard) = whole(&F32, 24, Some((options, HeldOut::Alike)));
    assert!(heard.predictions.len() > 1);
    for (step, prediction) in &heard.predictions {
        let bytes = prediction.device_bytes;
        assert!(bytes > 0 && bytes < plan_bytes, "step {step}: {bytes} of {plan_bytes}");
    }
    // Nothing is measured, so nothing is released.
    let (_, heard) = whole(&F32, 24, Some((always(Direction::LastUpdate, 1.0), HeldOut::Alike)));
    assert!(heard.predictions.iter().all(|(_, prediction)| prediction.device_bytes == 0));
}
