//! `storm train --dry-run`: reports what a run would do, after every check made before its first step.

use super::data::Amount;
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
use storm_model::Unit;
use storm_plan::Tier;

/// The numbers that a dry run reports.
struct Figures {
    /// Tokens or images, as the model reads them.
    train_units: u64,
    held_units: u64,
    step_units: u64,
    /// Time of all steps, without evaluations and checkpoints.
    seconds: f64,
    disk_bytes: u64,
    free_bytes: Option<u64>,
}

impl Figures {
    fn of(setup: &Setup) -> Figures {
        let Amount { train, held } = setup.data.amount();
        let sequence = setup.request.options.sequence as u64;
        let step_seconds = setup.launch.plan().planned.prediction.step_seconds;
        Figures {
            train_units: train,
            held_units: held,
            step_units: setup.rows_per_step * sequence,
            seconds: step_seconds * setup.steps as f64,
            disk_bytes: setup.request.disk_bytes().saturating_mul(saving::at_a_time(setup)),
            free_bytes: disk::free_bytes_for(&setup.folder),
        }
    }
}

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
    let Figures { train_units, held_units, step_units, seconds, disk_bytes, free_bytes } = *figures;
    let unit = setup.model.config.unit();
    let rows = match unit {
        Unit::Tokens => {
            format!(" in {} rows of {}", grouped(setup.rows_per_epoch), setup.settings.seq)
        }
        Unit::Images => String::new(),
    };
    let prediction = &setup.launch.plan().planned.prediction;
    let mut disk = format!(
        "disk      {}: up to {} checkpoints of {}",
        show(disk_bytes),
        saving::at_a_time(setup),
        show(setup.request.disk_bytes())
    );
    if let Some(free) = free_bytes {
        disk.push_str(&format!("; {} free", show(free)));
        if free < disk_bytes {
            disk.push_str(": too little, keep fewer (keep-last, keep-every, keep-best)");
        }
    }
    vec![
        format!(
            "data      {} {unit}{rows}; {} {unit} held out",
            grouped(train_units),
            grouped(held_units)
        ),
        format!(
            "run       {} steps of {} {unit}: {} {unit}, {:.2} epochs",
            grouped(setup.steps),
            grouped(step_units),
            grouped(setup.steps.saturating_mul(step_units)),
            setup.epochs_of(setup.steps)
        ),
        format!(
            "time      about {} at {:.3} s a step, by the plan, plus evaluations and checkpoints",
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
    let unit = setup.model.config.unit().name();
    Ok(json!({
        "event": "dry_run",
        "folder": setup.folder.display().to_string(),
        format!("train_{unit}"): figures.train_units,
        format!("held_{unit}"): figures.held_units,
        "rows_per_epoch": setup.rows_per_epoch,
        "rows_per_step": setup.rows_per_step,
        "steps": setup.steps,
        "epochs": setup.epochs_of(setup.steps),
        unit: setup.steps.saturating_mul(figures.step_units),
        "seconds": figures.seconds,
        "disk_bytes": figures.disk_bytes,
        "disk_free_bytes": figures.free_bytes,
        "plan": plan::object(&setup.request, &setup.answer()?),
    }))
}
