//! What to do after the disk of a run has failed: its state there is lost, its checkpoints are not.

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
use storm_train::{RunError, TrainError};

/// The error, with the commands that resume the run if it is of the disk tier.
pub(super) fn explained(setup: &Setup, error: Error) -> Error {
    let Some(problem) = problem_of(&error) else { return error };
    let Some(disk) = &setup.settings.disk else { return error };
    let newest = folder::checkpoints(&setup.folder).and_then(|all| Ok(all.newest_progress()?));
    let step = newest.ok().flatten().map(|progress| progress.step);
    let host_bytes = without_disk(&setup.request);
    let advice = advice(problem, step, disk, &resume_command(&setup.folder), host_bytes);
    Error::msg(format!("{error:#}\n{advice}"))
}

/// What is wrong with the disk, if that is why the run ended.
fn problem_of(error: &Error) -> Option<DiskProblem> {
    let train = match error.downcast_ref::<RunError>() {
        Some(RunError::Train(error)) => Some(error),
        _ => error.downcast_ref::<TrainError>(),
    };
    match train {
        Some(TrainError::Exec(ExecError::Device(DeviceError::Disk { problem, .. }))) => {
            Some(*problem)
        }
        _ => None,
    }
}

/// The host memory of the run without a disk; none if it does not fit.
fn without_disk(request: &Request) -> Option<u64> {
    let mut launch = request.launch(None);
    launch.budget = launch.budget.with(Tier::DISK, 0);
    launch.profile.links.retain(|link| link.far != Tier::DISK);
    launch.forced = Forced { on_disk: None, ..launch.forced };
    let plan = launch.plan().ok()?;
    Some(plan.planned.prediction.peak_bytes[Tier::HOST])
}

fn advice(
    problem: DiskProblem,
    step: Option<u64>,
    disk: &Path,
    resume: &str,
    host_bytes: Option<u64>,
) -> String {
    let saved = match step {
        Some(step) => format!("The last checkpoint is that of step {step}. To resume from it"),
        None => "No checkpoint was saved yet. To begin again".to_owned(),
    };
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
    format!("{saved}:\n  {resume}{flag}   {with_disk}{without}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device_error(problem: DiskProblem) -> TrainError {
        let reason = "writing 4.00 MiB at byte 0 of the scratch file".to_owned();
        TrainError::Exec(ExecError::Device(DeviceError::Disk { problem, reason }))
    }

    #[test]
    fn errors_of_the_disk_are_told_from_others() {
        let full = device_error(DiskProblem::Full);
        assert_eq!(problem_of(&Error::new(full)), Some(DiskProblem::Full));
        let run = RunError::Train(device_error(DiskProblem::Faulty));
        assert_eq!(problem_of(&Error::new(run).context("more")), Some(DiskProblem::Faulty));
        let thread = DeviceError::Thread { reason: String::new() };
        assert_eq!(problem_of(&Error::new(TrainError::Exec(ExecError::Device(thread)))), None);
        assert_eq!(problem_of(&Error::msg("the disk tier")), None);
    }

    #[test]
    fn commands_can_be_pasted() {
        let resume = "storm train runs/a/config.toml --resume";
        let advice = |problem, step, host_bytes| {
            advice(problem, step, Path::new("/scratch"), resume, host_bytes)
        };
        assert_eq!(
            advice(DiskProblem::Full, Some(4), Some(3 << 30)),
            "The last checkpoint is that of step 4. To resume from it:\n  storm train runs/a/config.toml --resume   once there \
             is room in /scratch\n  storm train runs/a/config.toml --resume --no-disk   without a disk: 3.00 GiB of host \
             memory"
        );
        assert_eq!(
            advice(DiskProblem::Faulty, None, None),
            "No checkpoint was saved yet. To begin again:\n  storm train runs/a/config.toml --resume --disk FOLDER   with \
             a folder on another disk\nWithout a disk, the run does not fit into host memory."
        );
    }
}
