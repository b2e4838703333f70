//! Where outputs go: what they never replace, and what a killed process leaves.

use crate::helpers::{Folder, packed, rerun, rerun_folder, training};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Signal, getpid, kill_process};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use storm_data::{IfExists, PackOptions, pack, write_batches};

#[test]
fn what_appears_while_packing_is_kept() {
    for if_exists in [IfExists::Refuse, IfExists::Replace] {
        let folder = Folder::new();
        let input = folder.write("a.txt", "text");
        let options = PackOptions { if_exists, ..folder.options(&[&input]) };
        let error = pack(&options, &|_| {
            fs::create_dir(&options.out).unwrap();
            fs::write(options.out.join("thesis.tex"), "x").unwrap();
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("out changed while it was being written"), "{error}");
        assert_eq!(fs::read(options.out.join("thesis.tex")).unwrap(), b"x");
        assert_eq!(folder.names(), ["a.txt", "out"]);
    }
}

#[test]
fn a_dataset_that_changes_while_it_is_replaced_is_kept() {
    let folder = Folder::new();
    let input = folder.write("a.txt", "text");
    let options = PackOptions { if_exists: IfExists::Replace, ..folder.options(&[&input]) };
    packed(&options).unwrap();
    let error = pack(&options, &|_| fs::write(options.out.join("thesis.tex"), "x").unwrap());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("holds thesis.tex"), "{error}");
    assert_eq!(fs::read(options.out.join("thesis.tex")).unwrap(), b"x");
    assert!(options.out.join("dataset.json").is_file());
    assert_eq!(folder.names(), ["a.txt", "out"]);
}

#[test]
fn a_killed_pack_leaves_nothing_for_the_next() {
    if let Some(folder) = rerun_folder() {
        let options = folder.options(&[&folder.path("a.txt")]);
        pack(&options, &|_| kill_process(getpid(), Signal::KILL).unwrap()).unwrap();
        return;
    }
    let folder = Folder::new();
    let input = folder.write("a.txt", "text");
    let killed = rerun("outputs::a_killed_pack_leaves_nothing_for_the_next", &folder);
    assert_eq!(killed.status.signal(), Some(Signal::KILL.as_raw()));
    assert!(folder.names()[0].starts_with(".out.packing-"), "{:?}", folder.names());
    packed(&folder.options(&[&input])).unwrap();
    assert_eq!(folder.names(), ["a.txt", "out"]);
}

#[test]
fn batches_replace_plain_files_only() {
    let folder = Folder::new();
    let dataset = folder.text_dataset(500, 0.0);
    let fifo = folder.path("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let write = |name: &str| write_batches(&dataset, training(1, 8, 0), 1, &folder.path(name));
    let error = write("fifo").unwrap_err().to_string();
    assert!(error.contains("fifo is a FIFO, not a plain file"), "{error}");
    assert!(!fifo.metadata().unwrap().is_file());
    let error = write("out").unwrap_err().to_string();
    assert!(error.contains("out is a directory, not a plain file"), "{error}");
    folder.write("batches", "old");
    write("batches").unwrap();
    assert!(fs::read(folder.path("batches")).unwrap().len() > 64);
    assert_eq!(folder.names(), ["batches", "fifo", "input.txt", "out"]);
}
