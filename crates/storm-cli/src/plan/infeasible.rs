//! Why nothing fits, and what would.

use super::json;
use super::request::{Request, StepSize};
use crate::size::show;
use anyhow::Error;
use std::fmt::Write;
use storm_plan::{Forced, PlanError, TooSmall};
use storm_train::{TrainError, TrainOptions};

/// How many consumers are named.
const CONSUMERS: usize = 6;

/// The error as people need it. With `as_json`, what it takes is also printed as an object.
pub(super) fn explained(request: &Request, error: TrainError, as_json: bool) -> Error {
    let TrainError::Plan(PlanError::TooSmall(problem)) = &error else { return error.into() };
    if as_json {
        println!("{:#}", json::infeasible(request, problem));
    }
    let message = message(request, problem);
    Error::new(error).context(message)
}

fn message(request: &Request, problem: &TooSmall) -> String {
    let TooSmall { budget, vram_min_bytes, ram_min_bytes, consumers } = problem;
    let mut text = "no plan fits the budget: ".to_owned();
    let lacks_ram = *ram_min_bytes > budget.ram_bytes;
    if lacks_ram {
        let _ = write!(
            text,
            "with all layers on the device it still takes {} of host memory and {} of device memory; \
             given are {} and {}",
            show(*ram_min_bytes),
            show(*vram_min_bytes),
            show(budget.ram_bytes),
            show(budget.vram_bytes),
        );
    } else {
        let _ = write!(
            text,
            "it takes at least {} of device memory with {} of host memory; given are {}",
            show(*vram_min_bytes),
            show(budget.ram_bytes),
            show(budget.vram_bytes),
        );
    }
    text.push_str("\nThe smallest plan holds on the device:");
    let overhead = (request.profile.overhead_bytes, "context and libraries");
    let regions = consumers.iter().map(|region| (region.bytes as u64, region.name.as_str()));
    let mut largest: Vec<(u64, &str)> = regions.chain([overhead]).collect();
    largest.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    for (bytes, name) in largest.iter().take(CONSUMERS) {
        let _ = write!(text, "\n  {:>12}  {name}", show(*bytes));
    }
    text.push_str("\nWhat would work:");
    for (change, least) in changes(request, problem) {
        let ram = match least.ram_min_bytes > budget.ram_bytes {
            true => format!(" --ram {}", argument(least.ram_min_bytes)),
            false => String::new(),
        };
        let vram = argument(least.vram_min_bytes);
        let fits = !lacks(request, &least);
        let _ = match fits {
            true => write!(text, "\n  {change}"),
            false => write!(text, "\n  {}", format!("{change} --vram {vram}{ram}").trim_start()),
        };
    }
    text
}

fn lacks(request: &Request, least: &TooSmall) -> bool {
    least.vram_min_bytes > request.vram.bytes || least.ram_min_bytes > request.ram.bytes
}

/// Rounded up, so that it works as written.
fn argument(bytes: u64) -> String {
    match bytes >= 10 << 30 {
        true => format!("{:.1}GiB", (bytes as f64 / f64::from(1 << 30) * 10.0).ceil() / 10.0),
        false => format!("{}MiB", bytes.div_ceil(1 << 20)),
    }
}

/// What a user may change, and the least memory that works then; only changes that take less.
fn changes(request: &Request, problem: &TooSmall) -> Vec<(String, TooSmall)> {
    let mut changes = vec![(String::new(), problem.clone())];
    let mut add = |change: String, least: Option<TooSmall>| {
        let Some(least) = least else { return };
        let takes_less = least.vram_min_bytes < problem.vram_min_bytes
            || (least.ram_min_bytes < problem.ram_min_bytes && lacks(request, problem));
        if takes_less {
            changes.push((change, least));
        }
    };
    let ram = request.ram.bytes;
    if !request.forced_words.is_empty() {
        let least = request.least(&request.options, &Forced::default(), ram);
        add(format!("without {}:", request.forced_words), least);
    }
    // More host memory, where a lack of it keeps things on the device.
    let everything_streamed = request.least(&request.options, &request.forced, u64::MAX);
    add(String::new(), everything_streamed);
    if let StepSize::MicroBatches(accumulate) = request.step {
        let batch = request.options.batch;
        for divisor in [2, 4, 8] {
            if batch.is_multiple_of(divisor) {
                let options = TrainOptions { batch: batch / divisor, ..request.options.clone() };
                let change =
                    format!("--batch {} --accumulate {}", batch / divisor, accumulate * divisor);
                add(change, request.least(&options, &request.forced, ram));
            }
        }
    }
    if request.options.sequence.is_multiple_of(2) {
        let sequence = request.options.sequence / 2;
        let options = TrainOptions { sequence, ..request.options.clone() };
        add(format!("--seq {sequence}"), request.least(&options, &request.forced, ram));
    }
    if request.options.chunk_rows > 512 {
        let options = TrainOptions { chunk_rows: 512, ..request.options.clone() };
        add("--chunk-rows 512".to_owned(), request.least(&options, &request.forced, ram));
    }
    changes
}
