//! Files that commands write: plain files, complete, and nothing else replaced.

use crate::storm;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::fs;
use tempfile::TempDir;

#[test]
fn outputs_are_plain_files() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    mknodat(CWD, path("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    fs::create_dir(path("folder")).unwrap();
    fs::write(path("a.txt"), "some text").unwrap();
    let pack = ["data", "pack", &path("a.txt"), "--tokenizer", "bytes", "--out", &path("data")];
    storm(pack).succeeded();
    let trace = |out: &str| storm(["plan", "--model", "gpt2", "--batch", "1", "--trace", out]);
    let (data, shape) = (path("data"), ["--seq", "4", "--batch", "1", "--count", "1"]);
    let batches = |out: &str| {
        storm(["data", "batches", &data].into_iter().chain(shape).chain(["--out", out]))
    };
    let probe = |out: &str| storm(["probe", "--out", out]);
    let bench =
        |out: &str| storm(["bench", "train", "--vram", "1MiB", "--model", "gpt2", "--trace", out]);
    for (name, kind) in [("fifo", "a FIFO"), ("folder", "a directory")] {
        let said = format!("{kind}, not a plain file");
        for done in
            [trace(&path(name)), batches(&path(name)), probe(&path(name)), bench(&path(name))]
        {
            done.failed(4, &[name, &said]);
        }
        assert!(!fs::symlink_metadata(path(name)).unwrap().is_file());
    }
    for done in [trace(&path("trace")), batches(&path("batches"))] {
        done.succeeded();
    }
    // Again: the existing file is replaced.
    let first = fs::read(path("trace")).unwrap();
    fs::write(path("trace"), "old").unwrap();
    trace(&path("trace")).succeeded();
    assert_eq!(fs::read(path("trace")).unwrap(), first);
    let mut names: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["a.txt", "batches", "data", "fifo", "folder", "trace"]);
}
