//! Host memory a run uses outside its plan: for threads of the CPU device and for the batches of a step.
//! `train/pictures.rs` counts what classifying sample images takes.

use crate::{OverBudget, UsageError, memory_limits, size};
use anyhow::Result;
use storm_device::cpu::{THREAD_BYTES, THREADS_MAX};
use storm_model::AnyModel;
use storm_train::{StepSize, TrainOptions};

/// By default, threads may use one part in this many of host memory.
const THREADS_SHARE: u64 = 4;

/// A token has up to four columns in a batch: token, target, position and sample. The numbers of an image besides its
/// pixels (class, index and epoch) take as many.
const COLUMNS: u64 = 4;

/// A step's data exists in the layout the plan fetches, plus the row order of tokens. Evaluations hold batches of their
/// own.
const ROW_BYTES: u64 = (COLUMNS + 1 + COLUMNS) * size_of::<i32>() as u64;

/// Bytes per token or image of a step.
pub(crate) fn of_unit(model: &AnyModel) -> u64 {
    let pixels = model.image().map_or(0, |config| {
        let [height, width] = config.image_size;
        (height * width * config.channels) as u64
    });
    ROW_BYTES + 2 * pixels
}

/// Bytes per batch besides its tokens, for fetched and evaluated batches.
const BATCH_BYTES: u64 = 512;

/// Threads of the CPU device: as requested, or one per core as far as memory allows.
pub(crate) fn threads(asked: Option<usize>, ram_bytes: u64) -> Result<usize> {
    let Some(threads) = asked else {
        let enough = ram_bytes / THREADS_SHARE / THREAD_BYTES;
        let most = usize::try_from(enough).unwrap_or(usize::MAX).min(THREADS_MAX);
        return Ok(rayon::current_num_threads().min(most).max(1));
    };
    if threads > THREADS_MAX {
        let problem = format!("threads is {threads}; there can be at most {THREADS_MAX}");
        return Err(UsageError(problem).into());
    }
    let bytes = of_threads(threads);
    if bytes > ram_bytes {
        return Err(OverBudget(format!(
            "threads = {threads} takes {} of host memory for stacks and buffers, and ram is {}; give fewer \
             threads, or more ram",
            size::show(bytes),
            size::show(ram_bytes)
        ))
        .into());
    }
    Ok(threads)
}

/// Host memory for this many threads.
pub(crate) fn of_threads(threads: usize) -> u64 {
    (threads as u64).saturating_mul(THREAD_BYTES)
}

/// Host memory for the tokens or images of a step. All of them are loaded before its first micro-batch, because the
/// loss is a mean over them.
pub(crate) fn of_step(step: StepSize, options: &TrainOptions, unit_bytes: u64) -> u64 {
    let sequence = options.sequence as u64;
    let (tokens, batches) = match step {
        StepSize::MicroBatches(count) => {
            let of_one = sequence.saturating_mul(options.batch as u64);
            (of_one.saturating_mul(count as u64), count as u64)
        }
        // With micro-batches of one sequence there are the most of them.
        StepSize::Tokens(tokens) => (tokens as u64, tokens as u64 / sequence.max(1)),
    };
    let tokens_bytes = tokens.saturating_mul(unit_bytes);
    tokens_bytes.saturating_add(batches.saturating_mul(BATCH_BYTES))
}

/// Refuses a step whose batches do not fit in the budget or in the machine.
pub(crate) fn check_step(step_bytes: u64, ram_bytes: u64) -> Result<()> {
    // If the machine's memory is unknown, only the budget limits the step.
    let machine = memory_limits::host(None).map_or(u64::MAX, |limit| limit.bytes);
    let limit = ram_bytes.min(machine);
    if step_bytes <= limit {
        return Ok(());
    }
    Err(OverBudget(format!(
        "the data of one step takes {} of host memory, and there is {}; give a smaller accumulate, batch or \
         tokens-per-step",
        size::show(step_bytes),
        size::show(limit)
    ))
    .into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_train::Precision;

    #[test]
    fn threads_are_counted_and_capped() {
        let enough = |threads: u64| threads * THREAD_BYTES;
        assert_eq!(threads(Some(7), enough(7)).expect("they fit"), 7);
        let error = threads(Some(256), 220 << 20).expect_err("too little").to_string();
        assert!(
            error.contains("threads = 256 takes 1.") && error.contains("220.00 MiB"),
            "{error}"
        );
        let error = threads(Some(5000), u64::MAX).expect_err("too many").to_string();
        assert!(error.contains("5000") && error.contains("1024"), "{error}");
        // Without being asked, fewer rather than none.
        assert_eq!(threads(None, 1 << 20).expect("one"), 1);
        let cores = rayon::current_num_threads().min(THREADS_MAX);
        assert_eq!(threads(None, u64::MAX).expect("all"), cores);
    }

    #[test]
    fn tokens_of_a_step_are_counted() {
        let options = TrainOptions::new(3, 100, Precision::F32);
        assert_eq!(of_step(StepSize::MicroBatches(2), &options, ROW_BYTES), 600 * 36 + 2 * 512);
        assert_eq!(of_step(StepSize::Tokens(600), &options, ROW_BYTES), 600 * 36 + 6 * 512);
        // A million micro-batches of a few tokens.
        let few = TrainOptions::new(1, 16, Precision::F32);
        assert_eq!(of_step(StepSize::MicroBatches(1_000_000), &few, ROW_BYTES), 1_088_000_000);
        assert_eq!(of_step(StepSize::MicroBatches(usize::MAX), &options, ROW_BYTES), u64::MAX);
        check_step(100, 100).expect("it fits");
        let error = check_step(101, 100).expect_err("too large").to_string();
        assert!(error.contains("101 B") && error.contains("100 B"), "{error}");
    }
}
