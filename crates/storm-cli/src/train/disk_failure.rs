//! Explains how to resume after a disk failure ended a run. Scratch space is lost; checkpoints are
//! not.

use super::folder;
use super::output::resume_command;
use super::setup::Setup;
use crate::plan::Request;
use crate::size;
use anyhow::Error;
use std::path::Path;
use storm_device::{DeviceError, DiskProblem};
use storm_exec::ExecError;
use storm_plan::{Forced, Tier};
use storm_train::{CheckpointError, RunError, TrainError};

/// Which disk failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// The disk with the scratch file.
    Scratch(DiskProblem),
    /// The disk with the checkpoints has no room for another.
    NoRoomToSave,
}

/// Adds the commands that resume the run, if a disk caused the error.
pub(super) fn explained(setup: &Setup, error: Error) -> Error {
    let Some(failure) = failure_of(&error) else { return error };
    let resume = resume_command(&setup.folder);
    let ways = match (failure, &setup.settings.disk) {
        (Failure::Scratch(_), None) => return error,
        (Failure::Scratch(problem), Some(disk)) => {
            without_scratch(problem, disk, &resume, without_disk(&setup.request))
        }
        (Failure::NoRoomToSave, _) => {
            format!("  {resume}   once there is room in {}", setup.folder.display())
        }
    };
    let newest = folder::checkpoints(&setup.folder).and_then(|all| Ok(all.newest_progress()?));
    let saved = match newest.ok().flatten() {
        Some(progress) => {
            format!("The last checkpoint is that of step {}. To resume from it", progress.step)
        }
        None => "No checkpoint was saved yet. To begin again".to_owned(),
    };
    Error::msg(format!("{error:#}\n{saved}:\n{ways}"))
}

/// The disk failure behind an error, if there is one.
fn failure_of(error: &Error) -> Option<Failure> {
    let train = match error.downcast_ref::<RunError>() {
        Some(RunError::Train(error)) => Some(error),
        _ => error.downcast_ref::<TrainError>(),
    };
    match train {
        Some(TrainError::Exec(ExecError::Device(DeviceError::Disk { problem, .. }))) => {
            Some(Failure::Scratch(*problem))
        }
        Some(TrainError::Checkpoint(CheckpointError::DiskFull { .. })) => {
            Some(Failure::NoRoomToSave)
        }
        _ => None,
    }
}

/// Host memory the run needs without a disk; `None` if it does not fit.
fn without_disk(request: &Request) -> Option<u64> {
    let mut launch = request.launch(None);
    launch.budget = launch.budget.with(Tier::DISK, 0);
    launch.profile.links.retain(|link| link.far != Tier::DISK);
    launch.forced = Forced { on_disk: None, ..launch.forced };
    let plan = launch.plan().ok()?;
    Some(plan.planned.prediction.peak_bytes[Tier::HOST])
}

/// The commands that resume without this scratch file.
fn without_scratch(
    problem: DiskProblem,
    disk: &Path,
    resume: &str,
    host_bytes: Option<u64>,
) -> String {
    let with_disk = match problem {
        DiskProblem::Full => format!("once there is room in {}", disk.display()),
        DiskProblem::Faulty | DiskProblem::Unusable => "with a folder on another disk".to_owned(),
    };
    let flag = if problem == DiskProblem::Full { "" } else { " --disk FOLDER" };
    let without = match host_bytes {
        Some(bytes) => {
            format!("\n  {resume} --no-disk   without a disk: {} of host memory", size::show(bytes))
        }
        None => "\nWithout a disk, the run does not fit into host memory.".to_owned(),
    };
    format!("  {resume}{flag}   {with_disk}{without}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device_error(problem: DiskProblem) -> TrainError {
        let reason = "writing 4.00 MiB at byte 0 of the scratch file".to_owned();
        TrainError::Exec(ExecError::Device(DeviceError::Disk { problem, reason }))
    }

    #[test]
    fn errors_of_disks_are_told_from_others() {
        let scratch = |problem| Some(Failure::Scratch(problem));
        let full = device_error(DiskProblem::Full);
        assert_eq!(failure_of(&Error::new(full)), scratch(DiskProblem::Full));
        let run = RunError::Train(device_error(DiskProblem::Faulty));
        assert_eq!(failure_of(&Error::new(run).context("more")), scratch(DiskProblem::Faulty));
        let thread = DeviceError::Thread { reason: String::new() };
        assert_eq!(failure_of(&Error::new(TrainError::Exec(ExecError::Device(thread)))), None);
        assert_eq!(failure_of(&Error::msg("the disk tier")), None);
        let saving = |error| Error::new(RunError::Train(TrainError::Checkpoint(error)));
        let path = Path::new("runs/a").to_owned();
        let full = CheckpointError::DiskFull { path: path.clone() };
        assert_eq!(failure_of(&saving(full)), Some(Failure::NoRoomToSave));
        let damaged = CheckpointError::Damaged { path, problem: String::new() };
        assert_eq!(failure_of(&saving(damaged)), None);
    }

    #[test]
    fn commands_can_be_pasted() {
        let resume = "storm train runs/a/config.toml --resume";
        let ways = |problem, bytes| without_scratch(problem, Path::new("/scratch"), resume, bytes);
        assert_eq!(
            ways(DiskProblem::Full, Some(3 << 30)),
            "  storm train runs/a/config.toml --resume   once there is room in /scratch\n  storm train runs/a/config.toml \
             --resume --no-disk   without a disk: 3.00 GiB of host memory"
        );
        assert_eq!(
            ways(DiskProblem::Faulty, None),
            "  storm train runs/a/config.toml --resume --disk FOLDER   with a folder on another disk\nWithout a disk, the \
             run does not fit into host memory."
        );
    }
}
