//! The memory of predictions: as estimated, and no more over time.

use crate::support::{
    DIRECTIONS, F32, HeldOut, always, cases, predict, run, run_options, tiny, train_options,
    trainer, whole,
};
use storm_host::allocation::peak_bytes;
use storm_plan::Tier;
use storm_train::{
    AnyBatch, BatchSource, Controller, Direction, PhaseLengths, PredictOptions, RunOptions, Stop,
    predict_bytes,
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
