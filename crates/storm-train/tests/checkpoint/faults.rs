//! A disk that fails at any moment of a save: a typed error, and the previous checkpoint stays.

use crate::support::{CpuTrainer, progress, save, train, trainer};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use storm_plan::UpdateTime;
use storm_train::{
    Begun, CheckpointError, Checkpoints, Disk, Keep, OutputFile, Precision, Retention, Saver,
    Snapshot, Storage, TrainError, TrainingState,
};
use tempfile::TempDir;

/// Lets this many operations succeed, and none after them.
#[derive(Clone)]
struct FailingDisk {
    left: Arc<AtomicUsize>,
    error: io::ErrorKind,
}

impl FailingDisk {
    fn pass(&self) -> io::Result<()> {
        let fewer = |left: usize| left.checked_sub(1);
        let passed = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer);
        passed.map(drop).map_err(|_| self.error.into())
    }
}

struct FailingFile {
    file: File,
    disk: FailingDisk,
}

impl Write for FailingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.disk.pass().is_err() {
            // A full disk writes what it can.
            self.file.write_all(&bytes[..bytes.len() / 2])?;
            return Err(self.disk.error.into());
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl OutputFile for FailingFile {
    fn sync(&mut self) -> io::Result<()> {
        self.disk.pass()?;
        self.file.sync()
    }
}

impl Storage for FailingDisk {
    type File = FailingFile;

    fn create_directories(&self, path: &Path) -> io::Result<()> {
        self.pass()?;
        Disk.create_directories(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<FailingFile> {
        self.pass()?;
        Ok(FailingFile { file: Disk.create_file(path)?, disk: self.clone() })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.pass()?;
        Disk.rename(from, to)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.pass()?;
        Disk.sync_directory(path)
    }

    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        self.pass()?;
        Disk.remove_tree(path)
    }
}

/// Saves by `way` on a disk that fails after any number of operations.
fn check(way: fn(&mut CpuTrainer, Checkpoints<FailingDisk>) -> Result<PathBuf, TrainError>) {
    let mut trainer = trainer(Precision::F32, UpdateTime::NextStep);
    train(&mut trainer, 0..2);
    let tensors = TrainingState::tensors(&trainer);
    for error in [io::ErrorKind::StorageFull, io::ErrorKind::Other] {
        let mut operations = 0;
        loop {
            let folder = TempDir::new().expect("a folder");
            let sound = Checkpoints::open(folder.path(), Disk).expect("a folder");
            save(&sound, &mut trainer, 1).expect("a checkpoint");
            // One for opening.
            let disk = FailingDisk { left: Arc::new(AtomicUsize::new(operations + 1)), error };
            let failing = Checkpoints::open(folder.path(), disk.clone()).expect("a folder");
            let saved = way(&mut trainer, failing);
            let newest = sound
                .newest(&tensors, |_, error| panic!("after {operations} operations: {error}"))
                .expect("a folder that can be read")
                .expect("at least the checkpoint before");
            match saved {
                Ok(_) => {
                    assert_eq!(newest.progress().step, 2);
                    break;
                }
                Err(TrainError::Checkpoint(CheckpointError::DiskFull { .. })) => {
                    assert_eq!(error, io::ErrorKind::StorageFull);
                }
                Err(TrainError::Checkpoint(CheckpointError::Io { .. })) => {
                    assert_eq!(error, io::ErrorKind::Other);
                }
                Err(other) => panic!("after {operations} operations: {other}"),
            }
            // The rename may have succeeded, and what follows it may have failed.
            assert!([1, 2].contains(&newest.progress().step));
            // The next run continues as if nothing had happened.
            sound.remove_unfinished().expect("a clean folder");
            save(&sound, &mut trainer, 2).expect("a checkpoint");
            operations += 1;
        }
        assert!(operations > 50, "only {operations} operations");
    }
}

#[test]
fn a_disk_that_fails_leaves_the_checkpoint_before() {
    check(|trainer, checkpoints| save(&checkpoints, trainer, 2));
}

#[test]
fn a_disk_that_fails_in_the_background_leaves_the_checkpoint_before() {
    check(|trainer, checkpoints| {
        let mut saver = Saver::new(checkpoints);
        saver.use_snapshot(Snapshot::new(trainer).expect("little memory"));
        let keep = Keep { retention: Retention { last: 2, every: None }, best: None };
        let progress = progress(2, trainer);
        assert!(matches!(saver.save(trainer, &progress, keep)?, Begun::Writing));
        assert_eq!(saver.writing(), Some(2));
        let saved = saver.wait();
        // The error is reported once, and the snapshot is available for the next save.
        assert!(saver.wait().expect("told before").is_none());
        assert_eq!(saver.writing(), None);
        Ok(saved?.expect("it was being written").path)
    });
}
