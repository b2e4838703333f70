//! Checkpoints are not deleted in favor of ones that cannot be used.

use crate::support::{CpuTrainer, progress, save, trainer};
use std::fs;
use storm_plan::UpdateTime;
use storm_train::{Checkpoints, Disk, Keep, Precision, Retention, Saver, Snapshot, TrainingState};
use tempfile::TempDir;

fn keep(last: usize) -> Keep {
    Keep { retention: Retention { last, every: None }, best: None }
}

/// As a new process sees them: nothing is known of what is on the disk.
fn open(folder: &TempDir) -> Checkpoints {
    Checkpoints::open(folder.path(), Disk).expect("a folder")
}

/// Checkpoints of these steps, by a process that has ended.
fn with_checkpoints(trainer: &mut CpuTrainer, steps: &[u64]) -> TempDir {
    let folder = TempDir::new().expect("a folder");
    for &step in steps {
        save(&open(&folder), trainer, step).expect("a checkpoint");
    }
    folder
}

/// Flips a bit of a checkpoint.
fn damage(folder: &TempDir, step: u64) {
    let path = open(folder).path(step).join("optimizer.safetensors");
    let mut bytes = fs::read(&path).expect("a file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).expect("a file");
}

#[test]
fn what_was_just_saved_stays_beside_newer_ones_that_are_damaged() {
    for in_background in [false, true] {
        let mut trainer = trainer(Precision::F32, UpdateTime::EndOfStep);
        let folder = with_checkpoints(&mut trainer, &[180, 200]);
        damage(&folder, 180);
        damage(&folder, 200);
        let mut saver = Saver::new(open(&folder));
        if in_background {
            saver.use_snapshot(Snapshot::new(&trainer).expect("little memory"));
        }
        let tensors = TrainingState::tensors(&trainer);
        for step in [20, 40, 60, 80, 100] {
            let progress = progress(step, &trainer);
            saver.save(&mut trainer, &progress, keep(2)).expect("a checkpoint");
            saver.wait().expect("a checkpoint");
            let newest = open(&folder).newest(&tensors, |_, _| {}).expect("a checkpoint");
            assert_eq!(newest.expect("a checkpoint").progress().step, step);
        }
        assert_eq!(open(&folder).steps().expect("a folder"), [80, 100, 180, 200]);
    }
}

#[test]
fn the_only_whole_one_is_never_deleted() {
    let mut trainer = trainer(Precision::F32, UpdateTime::EndOfStep);
    let tensors = TrainingState::tensors(&trainer);
    let folder = with_checkpoints(&mut trainer, &[10, 20, 30, 40]);
    damage(&folder, 40);
    damage(&folder, 30);
    open(&folder).keep(keep(1), &tensors).expect("a folder");
    assert_eq!(open(&folder).steps().expect("a folder"), [20, 30, 40]);
    let found = open(&folder).newest(&tensors, |_, _| {}).expect("a checkpoint");
    assert_eq!(found.expect("a checkpoint").progress().step, 20);
    damage(&folder, 20);
    open(&folder).keep(keep(1), &tensors).expect("a folder");
    assert_eq!(open(&folder).steps().expect("a folder"), [20, 30, 40], "nothing is whole");
}

#[test]
fn what_lost_a_file_since_it_was_saved_does_not_count() {
    let mut trainer = trainer(Precision::F32, UpdateTime::EndOfStep);
    let tensors = TrainingState::tensors(&trainer);
    for lost in ["manifest.json", "parameters.safetensors"] {
        let folder = TempDir::new().expect("a folder");
        let checkpoints = open(&folder);
        for step in [10, 20, 30] {
            save(&checkpoints, &mut trainer, step).expect("a checkpoint");
        }
        fs::remove_file(checkpoints.path(30).join(lost)).expect("a file");
        checkpoints.keep(keep(1), &tensors).expect("a folder");
        assert_eq!(checkpoints.steps().expect("a folder"), [20, 30], "{lost}");
        // Saved again, it counts.
        save(&checkpoints, &mut trainer, 30).expect("a checkpoint");
        checkpoints.keep(keep(1), &tensors).expect("a folder");
        assert_eq!(checkpoints.steps().expect("a folder"), [30], "{lost}");
    }
}
