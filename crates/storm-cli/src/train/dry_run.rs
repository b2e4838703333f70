//! `storm train --dry-run`: what a run would do, after every check that it makes before its first step.

use super::output::{Style, print};
use super::saving;
use super::setup::Setup;
use crate::disk;
use crate::model::grouped;
use crate::plan;
use crate::size::show;
use crate::streams::duration;
use anyhow::Result;
use serde_json::json;
use storm_data::Split;
use storm_plan::Tier;

/// The figures of a run.
struct Figures {
    train_tokens: u64,
    held_tokens: u64,
    step_tokens: u64,
    /// All steps, without evaluations and pauses for checkpoints.
    seconds: f64,
    disk_bytes: u64,
    free_bytes: Option<u64>,
}

impl Figures {
    fn of(setup: &Setup) -> Figures {
        let tokens = |split| {
            let range = setup.dataset.token_range(split);
            range.end - range.start
        };
        let step_seconds = setup.launch.plan().planned.prediction.step_seconds;
        Figures {
            train_tokens: tokens(Split::Train),
            held_tokens: tokens(Split::Held),
            step_tokens: setup.rows_per_step * setup.settings.seq.get() as u64,
            seconds: step_seconds * setup.steps as f64,
            disk_bytes: setup.request.checkpoint_bytes.saturating_mul(saving::at_a_time(setup)),
            free_bytes: disk::free_bytes_for(&setup.folder),
        }
    }
}

/// Prints what a run would do.
pub(super) fn show_run(setup: &Setup) -> Result<()> {
    let figures = Figures::of(setup);
    match setup.style {
        Style::Json => print(&object(setup, &figures)?.to_string()),
        Style::People => {
            print(&setup.shown()?);
            print("");
            lines(setup, &figures).iter().for_each(|line| print(line));
        }
        Style::Quiet => {}
    }
    Ok(())
}

fn lines(setup: &Setup, figures: &Figures) -> Vec<String> {
    let Figures { train_tokens, held_tokens, step_tokens, seconds, disk_bytes, free_bytes } =
        *figures;
    let prediction = &setup.launch.plan().planned.prediction;
    let mut disk = format!(
        "disk      {}: up to {} checkpoints of {}",
        show(disk_bytes),
        saving::at_a_time(setup),
        show(setup.request.checkpoint_bytes)
    );
    if let Some(free) = free_bytes {
        disk.push_str(&format!("; {} free", show(free)));
        if free < disk_bytes {
            disk.push_str(": too little, keep fewer (keep-last, keep-every, keep-best)");
        }
    }
    vec![
        format!(
            "data      {} tokens in {} rows of {}; {} tokens held out",
            grouped(train_tokens),
            grouped(setup.rows_per_epoch),
            setup.settings.seq,
            grouped(held_tokens)
        ),
        format!(
            "run       {} steps of {} tokens: {} tokens, {:.2} epochs",
            grouped(setup.steps),
            grouped(step_tokens),
            grouped(setup.steps.saturating_mul(step_tokens)),
            setup.epochs_of(setup.steps)
        ),
        format!(
            "time      about {} at {:.3} s a step, by the plan; evaluations and checkpoints come on top",
            duration(seconds),
            prediction.step_seconds
        ),
        format!(
            "memory    {} of {} on the device, {} of {} on the host",
            show(prediction.peak_bytes[Tier::DEVICE]),
            show(setup.request.vram.bytes),
            show(prediction.peak_bytes[Tier::HOST] + setup.request.beside_bytes),
            show(setup.request.ram.bytes)
        ),
        disk,
        format!("folder    {}; nothing was written", setup.folder.display()),
    ]
}

fn object(setup: &Setup, figures: &Figures) -> Result<serde_json::Value> {
    Ok(json!({
        "event": "dry_run",
        "folder": setup.folder.display().to_string(),
        "train_tokens": figures.train_tokens,
        "held_tokens": figures.held_tokens,
        "rows_per_epoch": setup.rows_per_epoch,
        "rows_per_step": setup.rows_per_step,
        "steps": setup.steps,
        "epochs": setup.epochs_of(setup.steps),
        "tokens": setup.steps.saturating_mul(figures.step_tokens),
        "seconds": figures.seconds,
        "disk_bytes": figures.disk_bytes,
        "disk_free_bytes": figures.free_bytes,
        "plan": plan::object(&setup.request, &setup.answer()?),
    }))
}
