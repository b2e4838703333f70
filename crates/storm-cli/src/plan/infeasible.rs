//! Why no plan fits, and what would.

use super::json;
use super::request::Request;
use crate::disk_tier::DiskTier;
use crate::model::grouped;
use crate::size::show;
use anyhow::Error;
use std::fmt::Write;
use storm_plan::{Forced, PlanError, Tier, TooSmall};
use storm_train::{StepPlan, StepSize, TrainError, TrainOptions};

/// Adds what would work to the error. With `as_json`, also prints the memory needed as JSON.
pub(crate) fn explained(request: &Request, error: TrainError, as_json: bool) -> Error {
    let TrainError::Plan(PlanError::TooSmall(problem)) = &error else { return error.into() };
    if as_json {
        println!("{:#}", json::infeasible(request, problem));
    }
    let message = message(request, problem);
    Error::new(error).context(message)
}

fn message(request: &Request, problem: &TooSmall) -> String {
    let mut text = format!("no plan fits the budget: {problem}");
    text.push_str("\nWhat would work:");
    for Change { flags, least } in changes(request, problem) {
        let more = more(request, &least);
        let takes = format!("(takes {})", show(least.min_bytes[Tier::DEVICE]));
        let words = match more.is_empty() {
            true => [flags, takes],
            false => [flags, more.join(" ")],
        };
        let words: Vec<&str> = words.iter().map(String::as_str).filter(|w| !w.is_empty()).collect();
        let _ = write!(text, "\n  {}", words.join(" "));
    }
    if let Some(words) = with_disk(request) {
        text.push_str("\n  ");
        text.push_str(&words);
    }
    text
}

/// More than any drive has.
const ANY_SPACE: u64 = 1 << 50;

/// What a disk would gain and cost, if none was given and it would be enough.
fn with_disk(request: &Request) -> Option<String> {
    if request.disk.is_some() {
        return None;
    }
    let disk = DiskTier::assumed(ANY_SPACE, &request.profile);
    let mut launch = request.launch(None);
    DiskTier::in_profile(Some(&disk), &mut launch.profile);
    launch.budget = DiskTier::in_budget(Some(&disk), launch.budget);
    let StepPlan { batch, accumulate, planned, .. } = launch.plan().ok()?;
    let used = disk.use_words(&planned, &request.forced)?;
    let seconds = planned.prediction.step_seconds;
    let per_step = batch * accumulate * request.options.sequence;
    Some(format!(
        "--disk FOLDER --disk-space {} ({seconds:.3} s a step, {} {}/s with a drive that {}; {used})",
        argument(planned.plan.bytes[Tier::DISK] as u64),
        grouped((per_step as f64 / seconds).round() as u64),
        request.config.unit(),
        disk.rates_words(),
    ))
}

/// Something that a user may change, and the least memory that works then.
struct Change {
    /// The change, as flags.
    flags: String,
    least: TooSmall,
}

/// The flag and size for each tier that is too small. Empty if all are large enough.
fn more(request: &Request, least: &TooSmall) -> Vec<String> {
    let (budget, reserved) = (request.budget(), request.reserved_bytes());
    let tiers = [
        (Tier::DEVICE, "--vram", 0),
        (Tier::HOST, "--ram", reserved),
        (Tier::DISK, "--disk-space", 0),
    ];
    let lacking = tiers.into_iter().filter(|&(tier, ..)| least.min_bytes[tier] > budget[tier]);
    lacking
        .map(|(tier, flag, besides)| {
            format!("{flag} {}", argument(least.min_bytes[tier] + besides))
        })
        .collect()
}

/// Rounded up, so that it works as printed.
fn argument(bytes: u64) -> String {
    match bytes >= 10 << 30 {
        true => format!("{:.1}GiB", (bytes as f64 / f64::from(1 << 30) * 10.0).ceil() / 10.0),
        false => format!("{}MiB", bytes.div_ceil(1 << 20)),
    }
}

/// All changes that make a difference.
fn changes(request: &Request, problem: &TooSmall) -> Vec<Change> {
    let mut changes = vec![Change { flags: String::new(), least: problem.clone() }];
    let mut add = |flags: String, least: Option<TooSmall>| {
        let worthwhile = |least: &TooSmall| {
            more(request, least).is_empty()
                || least.min_bytes[Tier::DEVICE] < problem.min_bytes[Tier::DEVICE] / 10 * 9
        };
        if let Some(least) = least.filter(worthwhile) {
            changes.push(Change { flags, least });
        }
    };
    let ram = request.budget()[Tier::HOST];
    let (options, forced) = (&request.options, &request.forced);
    if !request.forced_words.is_empty() {
        let least = request.least(options, &Forced::default(), ram);
        add(format!("without {}", request.forced_words), least);
    }
    match enough_ram(request) {
        Some(ram_bytes) => {
            add(format!("--ram {}", argument(ram_bytes + request.reserved_bytes())), {
                request.least(options, forced, ram_bytes).map(|mut least| {
                    // `--ram` already covers the host.
                    let host = &mut least.min_bytes[Tier::HOST];
                    *host = ram.min(*host);
                    least
                })
            })
        }
        None => add(String::new(), request.least(options, forced, u64::MAX)),
    }
    if let StepSize::MicroBatches(accumulate) = request.step {
        for divisor in [2, 4, 8] {
            if options.batch.is_multiple_of(divisor) {
                let batch = options.batch / divisor;
                let smaller = TrainOptions { batch, ..options.clone() };
                let least = request.least(&smaller, forced, ram);
                add(format!("--batch {batch} --accumulate {}", accumulate * divisor), least);
            }
        }
    }
    if options.sequence.is_multiple_of(2) {
        let sequence = options.sequence / 2;
        let shorter = TrainOptions { sequence, ..options.clone() };
        add(format!("--seq {sequence}"), request.least(&shorter, forced, ram));
    }
    if options.chunk_rows > 512 {
        let smaller = TrainOptions { chunk_rows: 512, ..options.clone() };
        add("--chunk-rows 512".to_owned(), request.least(&smaller, forced, ram));
    }
    changes
}

/// The least host memory, to an eighth of a GiB, with which the device memory is enough. `None` if
/// no amount helps.
fn enough_ram(request: &Request) -> Option<u64> {
    const STEP: u64 = 1 << 27;
    let least = |ram_bytes: u64| request.least(&request.options, &request.forced, ram_bytes);
    let works = |ram_bytes: u64| {
        least(ram_bytes).is_some_and(|least| {
            least.min_bytes[Tier::DEVICE] <= request.vram.bytes
                && least.min_bytes[Tier::HOST] <= ram_bytes
        })
    };
    let most =
        least(u64::MAX).filter(|least| least.min_bytes[Tier::DEVICE] <= request.vram.bytes)?;
    let (mut too_little, mut enough) =
        (request.budget()[Tier::HOST] / STEP, most.min_bytes[Tier::HOST].div_ceil(STEP));
    while enough > too_little + 1 {
        let middle = too_little + (enough - too_little) / 2;
        if works(middle * STEP) { enough = middle } else { too_little = middle }
    }
    Some(enough * STEP)
}
