//! Saving in the background: what the run reports and when, and how it ends if the disk fails.

use crate::{Heard, Made, broken, options, run, trainer};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use storm_device::cpu::CpuPlanDevice;
use storm_plan::UpdateTime;
use storm_train::{
    CheckpointError, Checkpoints, Disk, OutputFile, Run, RunError, RunOptions, Stop, Storage,
    TrainError,
};
use tempfile::TempDir;

fn files(folder: &TempDir) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for checkpoint in fs::read_dir(folder.path()).expect("a folder") {
        for file in fs::read_dir(checkpoint.expect("an entry").path()).expect("a folder") {
            let path = file.expect("an entry").path();
            let bytes = fs::read(&path).expect("a file");
            found.push((path.strip_prefix(folder.path()).expect("below").to_owned(), bytes));
        }
    }
    found.sort();
    found
}

#[test]
fn saving_beside_the_steps_leaves_the_same_files() {
    for update in [UpdateTime::EndOfStep, UpdateTime::NextStep] {
        let [paused, beside] = [(); 2].map(|()| TempDir::new().expect("a folder"));
        let every = RunOptions { save_every: Some(1), ..options(9, 0.05) };
        let mut expected = Heard::default();
        let mut at_once = run(&paused, trainer(update), every.clone());
        at_once.train(&Stop::new(), &mut expected).expect("a run");
        let mut heard = Heard::default();
        let mut going = run(&beside, trainer(update), every);
        going.save_in_background().expect("little memory");
        going.train(&Stop::new(), &mut heard).expect("a run");
        assert_eq!(heard.steps, expected.steps);
        assert_eq!(heard.evaluations, expected.evaluations);
        assert_eq!(heard.saved, expected.saved, "each is told of once, in order");
        assert!(files(&beside) == files(&paused), "other checkpoints");
    }
}

#[test]
fn a_number_that_is_none_waits_for_the_checkpoint_before() {
    let (error, saved) = broken(UpdateTime::NextStep, "layers.1.mlp.down.weight", |_| f32::NAN);
    assert!(error.contains("step-00000002") && saved.is_empty(), "{error}");
    // Saved in the same run, in the background, one step before.
    let folder = TempDir::new().expect("a folder");
    let every = RunOptions { save_every: Some(1), evaluate_every: None, ..options(9, 1e38) };
    let mut wild = run(&folder, trainer(UpdateTime::EndOfStep), every);
    wild.save_in_background().expect("little memory");
    let mut heard = Heard::default();
    let error = wild.train(&Stop::new(), &mut heard).expect_err("not finite");
    let RunError::NotFinite { step, checkpoint, .. } = error else { panic!("{error}") };
    let last = *heard.saved.last().expect("a checkpoint");
    assert_eq!(last + 1, step);
    let checkpoint = checkpoint.expect("a checkpoint");
    assert!(checkpoint.ends_with(format!("step-{last:08}")) && checkpoint.is_dir());
}

/// A disk that is full after this many files.
struct Filling {
    files_left: Arc<AtomicUsize>,
}

struct FillingFile(File);

impl Write for FillingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl OutputFile for FillingFile {
    fn sync(&mut self) -> io::Result<()> {
        self.0.sync()
    }
}

impl Storage for Filling {
    type File = FillingFile;

    fn create_directories(&self, path: &Path) -> io::Result<()> {
        Disk.create_directories(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<FillingFile> {
        let fewer = |left: usize| left.checked_sub(1);
        match self.files_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer) {
            Ok(_) => Disk.create_file(path).map(FillingFile),
            Err(_) => Err(io::ErrorKind::StorageFull.into()),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Disk.rename(from, to)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        Disk.sync_directory(path)
    }

    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        Disk.remove_tree(path)
    }
}

fn filling(folder: &TempDir, files: usize, options: RunOptions) -> Run<CpuPlanDevice, Filling> {
    let disk = Filling { files_left: Arc::new(AtomicUsize::new(files)) };
    let checkpoints = Checkpoints::open(folder.path(), disk).expect("a folder");
    let data = Box::new(Made { next: 0, end: None });
    let mut run =
        Run::new(trainer(UpdateTime::NextStep), data, None, checkpoints, options).expect("a run");
    run.save_in_background().expect("little memory");
    run
}

#[test]
fn a_disk_that_is_full_ends_the_run_and_leaves_what_was_saved() {
    // Two checkpoints of three files fit, and a part of the third.
    for files in 6..9 {
        let folder = TempDir::new().expect("a folder");
        let often = RunOptions { save_every: Some(2), evaluate_every: None, ..options(40, 0.05) };
        let mut run = filling(&folder, files, often);
        let mut heard = Heard::default();
        let error = run.train(&Stop::new(), &mut heard).expect_err("a full disk");
        let full = |error: &RunError| {
            matches!(
                error,
                RunError::Train(TrainError::Checkpoint(CheckpointError::DiskFull { .. }))
            )
        };
        assert!(full(&error), "{error}");
        assert_eq!(heard.saved, [2, 4]);
        // At the latest when the next is due.
        assert!((6..=8).contains(heard.steps.last().expect("steps")), "{:?}", heard.steps);
        let sound = Checkpoints::open(folder.path(), Disk).expect("a folder");
        assert_eq!(sound.steps().expect("a folder"), [2, 4]);
        let tensors = storm_train::TrainingState::tensors(run.trainer());
        sound.verify(4, &tensors).expect("whole");
    }
}

#[test]
fn a_full_disk_at_the_end_is_an_error() {
    let folder = TempDir::new().expect("a folder");
    let at_end = RunOptions { save_every: None, evaluate_every: None, ..options(3, 0.05) };
    let mut run = filling(&folder, 1, at_end);
    let error = run.train(&Stop::new(), &mut Heard::default()).expect_err("a full disk");
    assert!(error.to_string().contains("the disk is full"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
}
