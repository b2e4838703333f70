//! Chooses how a run saves checkpoints, and reports it before the first step.

use super::output::{Style, print};
use super::ranks::Crew;
use super::setup::Setup;
use crate::disk_tier::Share;
use crate::plan::Saving;
use crate::save_mode::SaveModeArg;
use crate::size::show;
use crate::{OverBudget, disk};
use anyhow::{Context, Result};
use serde_json::json;
use storm_device::PlanDevice;
use storm_train::Run;

/// Allocates the memory that saving needs, and prints the cost in memory, disk space and time.
pub(super) fn begin<D: PlanDevice>(setup: &Setup, run: &mut Run<D>) -> Result<()> {
    let request = &setup.request;
    let mut saving = request.saving(&setup.launch.plan().planned.prediction);
    let ranks = setup.crew.as_ref().map_or(1, Crew::count);
    // With several ranks, each saves what it owns: a snapshot would have to hold the state of all
    // ranks.
    if ranks > 1 && request.save_mode != SaveModeArg::Background && run.save_by_ranks()? {
        saving = Saving::ByRanks;
    }
    if saving == Saving::Background
        && let Err(error) = run.save_in_background()
    {
        if request.save_mode == SaveModeArg::Background {
            return Err(error).context("no memory for save-mode = \"background\"");
        }
        eprintln!("warning: {error}; steps pause while a checkpoint is written");
        saving = Saving::Refused;
    }
    let share = request.disk.as_ref().and_then(|disk| disk.saved(&setup.launch.plan().planned));
    let bytes = request.disk_bytes();
    let disk_bytes = bytes.saturating_mul(at_a_time(setup));
    // If the free space cannot be queried, the first checkpoint reports the problem.
    let free_bytes = disk::free_bytes(&setup.folder).ok();
    if let Some(free) = free_bytes.filter(|&free| share.is_some() && free < bytes) {
        return Err(OverBudget(format!(
            "a checkpoint takes {}, and the disk of {} has {} free beside what the run has on disk; give less with \
             --disk-space, a folder on another disk with --disk, or put the run on another disk with --runs",
            show(bytes),
            setup.folder.display(),
            show(free)
        ))
        .into());
    }
    if let Some(free) = free_bytes.filter(|&free| free < disk_bytes) {
        eprintln!(
            "warning: checkpoints take up to {} of disk, and {} are free; keep fewer (keep-last, keep-every, \
             keep-best)",
            show(disk_bytes),
            show(free)
        );
    }
    let bytes_per_second = match saving {
        Saving::Background => None,
        _ => disk::write_speed(&setup.folder, bytes).ok(),
    };
    let written_seconds = bytes_per_second.map(|speed| bytes as f64 / speed.max(1) as f64);
    let read_seconds = share.map(|share| share.seconds);
    // State on disk is copied: first read, then written.
    let pause_seconds =
        written_seconds.map(|seconds| seconds + read_seconds.unwrap_or(0.0)).or(read_seconds);
    if setup.style == Style::Json {
        let object = json!({
            "event": "checkpoints", "bytes": bytes, "disk_bytes": disk_bytes,
            "snapshot_bytes": saving.snapshot_bytes(request), "saved": saving.name(),
            "predicted_pause_seconds": pause_seconds,
            "read_from_disk_bytes": share.map_or(0, |share| share.bytes),
            "writers": if saving == Saving::ByRanks { ranks } else { 1 },
        });
        print(&object.to_string());
    }
    let mut words = format!(
        "checkpoints  {} each, up to {} at a time: {} of disk",
        show(bytes),
        at_a_time(setup),
        show(disk_bytes)
    );
    if let Some(free) = free_bytes {
        words.push_str(&format!(" of {} free", show(free)));
    }
    words.push_str(&match (pause_seconds, bytes_per_second) {
        (Some(seconds), None) => {
            format!("; saved in the {}, and steps pause about {seconds:.1} s", saving.name())
        }
        (Some(seconds), Some(speed)) => format!(
            "; steps pause about {seconds:.1} s for each, as the disk writes {}/s",
            show(speed)
        ),
        _ => format!("; saved in the {}", saving.name()),
    });
    if let Some(Share { bytes, seconds }) = share {
        words.push_str(&format!(
            "; {seconds:.1} s of that to read the {} that are on the scratch disk",
            show(bytes)
        ));
    }
    words.push_str(match (ranks, saving) {
        (1, _) => "",
        (_, Saving::ByRanks) => "; every rank writes what it owns",
        (_, Saving::Background) if request.save_mode == SaveModeArg::Background => {
            "; rank 0 collects what the others own"
        }
        _ => "; rank 0 collects what the others own, because they do not share the folder",
    });
    setup.style.say(&words);
    Ok(())
}

/// The most checkpoints on disk at once: those that are kept, and the one being written.
pub(super) fn at_a_time(setup: &Setup) -> u64 {
    let settings = &setup.settings;
    let marked = settings.keep_every.map_or(0, |every| setup.steps / every.get());
    let last = settings.keep_last.get() as u64;
    last.saturating_add(marked).saturating_add(u64::from(settings.keep_best) + 1)
}
