//! Every damaged byte is found, and the previous checkpoint is used.

use crate::support::{save, train, trainer};
use std::fs;
use std::path::{Path, PathBuf};
use storm_plan::UpdateTime;
use storm_train::{CheckpointError, Checkpoints, Disk, Precision, StateTensor, TrainingState};
use tempfile::TempDir;

/// Two checkpoints, and the tensors in them.
struct Saved {
    folder: TempDir,
    checkpoints: Checkpoints,
    tensors: Vec<StateTensor>,
}

impl Saved {
    fn new() -> Saved {
        let folder = TempDir::new().expect("a folder");
        let checkpoints = Checkpoints::open(folder.path(), Disk).expect("a folder");
        let mut trainer = trainer(Precision::Bf16Master, UpdateTime::EndOfStep);
        for step in [1, 2] {
            train(&mut trainer, step - 1..step);
            save(&checkpoints, &mut trainer, step).expect("a checkpoint");
        }
        let tensors = TrainingState::tensors(&trainer);
        Saved { folder, checkpoints, tensors }
    }

    fn files(&self) -> Vec<PathBuf> {
        let newest = self.folder.path().join("step-00000002");
        ["manifest.json", "optimizer.safetensors", "parameters.safetensors"]
            .map(|name| newest.join(name))
            .into()
    }

    /// The newest is skipped, and the previous one is used.
    #[track_caller]
    fn falls_back(&self, what: &str) {
        let mut skipped = Vec::new();
        let found = self
            .checkpoints
            .newest(&self.tensors, |step, error| skipped.push((step, error.to_string())))
            .unwrap_or_else(|error| panic!("{what}: {error}"))
            .unwrap_or_else(|| panic!("{what}: no checkpoint"));
        assert_eq!(found.progress().step, 1, "{what} was not noticed");
        assert_eq!(skipped.len(), 1, "{what}: {skipped:?}");
        assert_eq!(skipped[0].0, 2);
    }
}

/// Ends of a safetensors file's length, header and tensors.
fn boundaries(path: &Path, bytes: &[u8]) -> Vec<usize> {
    let mut ends = vec![0, bytes.len()];
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        let file = storm_model::SafetensorsFile::open(path).expect("a whole file");
        let tensors = file.tensors().values().map(|entry| entry.range.end as usize);
        ends.extend([8].into_iter().chain(tensors));
        ends.push(8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize);
    }
    ends
}

#[test]
fn truncation_is_found() {
    let saved = Saved::new();
    for path in saved.files() {
        let whole = fs::read(&path).expect("a file");
        for boundary in boundaries(&path, &whole) {
            for length in [boundary.wrapping_sub(1), boundary, boundary + 1] {
                if length >= whole.len() {
                    continue;
                }
                fs::write(&path, &whole[..length]).expect("a shorter file");
                saved.falls_back(&format!("{} cut to {length} bytes", path.display()));
            }
        }
        let longer = [whole.as_slice(), b"\0"].concat();
        fs::write(&path, longer).expect("a longer file");
        saved.falls_back(&format!("{} with a byte more", path.display()));
        fs::remove_file(&path).expect("a file");
        saved.falls_back(&format!("{} missing", path.display()));
        fs::write(&path, &whole).expect("a file");
    }
}

#[test]
fn special_files_are_passed_over_at_once() {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let saved = Saved::new();
        for path in saved.files() {
            let whole = fs::read(&path).expect("a file");
            fs::remove_file(&path).expect("a file");
            let made = std::process::Command::new("mkfifo").arg(&path).status();
            assert!(made.expect("mkfifo runs").success());
            saved.falls_back(&format!("{} as a FIFO", path.display()));
            for target in ["/dev/zero", "/dev/tty", "."] {
                fs::remove_file(&path).expect("a file");
                std::os::unix::fs::symlink(target, &path).expect("a link");
                saved.falls_back(&format!("{} as a link to {target}", path.display()));
            }
            fs::remove_file(&path).expect("a file");
            fs::write(&path, &whole).expect("a file");
        }
        done.send(()).expect("the test waits");
    });
    // It takes a moment, or hangs.
    is_done.recv_timeout(std::time::Duration::from_secs(60)).expect("it does not hang");
}

#[test]
fn garbage_is_found() {
    let saved = Saved::new();
    for path in saved.files() {
        let whole = fs::read(&path).expect("a file");
        // The manifest is small, so every byte is tried.
        let stride = if whole.len() < 4096 { 1 } else { 256 };
        for at in (0..whole.len()).step_by(stride) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << (at % 8);
            fs::write(&path, &damaged).expect("a file");
            saved.falls_back(&format!("{} changed at byte {at}", path.display()));
        }
        let noise: Vec<u8> = (0..whole.len()).map(|i| (i * 37 + i / 251) as u8).collect();
        fs::write(&path, noise).expect("a file");
        saved.falls_back(&format!("{} as noise", path.display()));
        fs::write(&path, &whole).expect("a file");
    }
}

#[test]
fn a_damaged_checkpoint_is_replaced_by_a_new_one_of_its_step() {
    let saved = Saved::new();
    let path = &saved.files()[1];
    let length = fs::metadata(path).expect("a file").len();
    fs::write(path, vec![0; length as usize]).expect("a file");
    let mut trainer = trainer(Precision::Bf16Master, UpdateTime::EndOfStep);
    train(&mut trainer, 0..2);
    save(&saved.checkpoints, &mut trainer, 2).expect("a checkpoint");
    let newest = saved.checkpoints.newest(&saved.tensors, |_, error| panic!("{error}"));
    assert_eq!(newest.expect("readable").expect("there").progress().step, 2);
}

#[test]
fn checkpoints_of_which_none_can_be_used_are_an_error() {
    let saved = Saved::new();
    for step in [1, 2] {
        let folder = saved.checkpoints.path(step);
        fs::remove_file(folder.join("parameters.safetensors")).expect("a file");
    }
    let mut skipped = Vec::new();
    let error = saved
        .checkpoints
        .newest(&saved.tensors, |step, _| skipped.push(step))
        .expect_err("there is no checkpoint to go on from");
    assert!(matches!(error, CheckpointError::NoneUsable { count: 2, .. }), "{error}");
    assert_eq!(skipped, [2, 1]);
}

#[test]
fn nothing_at_all_is_no_checkpoint() {
    let folder = TempDir::new().expect("a folder");
    let checkpoints = Checkpoints::open(folder.path(), Disk).expect("a folder");
    assert!(checkpoints.newest(&[], |_, _| {}).expect("readable").is_none());
    assert!(checkpoints.newest_progress().expect("readable").is_none());
}
