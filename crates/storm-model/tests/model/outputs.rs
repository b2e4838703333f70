//! Where models are saved: what they never replace, and what a killed process leaves.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use storm_model::{Family, IfExists, ModelError, SaveOptions, save};
use tempfile::TempDir;

use crate::support::tiny;

/// Tells a test that it runs in a process of its own, and on which folder.
const RERUN: &str = "STORM_TEST_RERUN";

/// Saves a model of zeros; `meanwhile` happens when half of it is written.
fn save_while(output: &Path, if_exists: IfExists, meanwhile: impl Fn()) -> Result<(), ModelError> {
    let options = SaveOptions { if_exists, ..SaveOptions::default() };
    save::<f32, _>(output, &tiny(Family::Gpt2), &options, |spec, _, _| {
        if spec.name == "final_norm.weight" {
            meanwhile();
        }
        Ok(())
    })
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_appears_while_saving_is_kept() {
    for if_exists in [IfExists::Refuse, IfExists::Replace] {
        let folder = TempDir::new().unwrap();
        let output = folder.path().join("model");
        let result = save_while(&output, if_exists, || {
            fs::create_dir(&output).unwrap();
            fs::write(output.join("config.json"), "another's").unwrap();
        });
        assert!(matches!(result, Err(ModelError::Output { .. })), "{result:?}");
        assert_eq!(fs::read(output.join("config.json")).unwrap(), b"another's");
        assert_eq!(names(folder.path()), ["model"]);
    }
}

#[test]
fn a_model_that_changes_while_it_is_replaced_is_kept() {
    let folder = TempDir::new().unwrap();
    let output = folder.path().join("model");
    save_while(&output, IfExists::Refuse, || {}).unwrap();
    // Something of value is put into it, or another model in its place.
    let result = save_while(&output, IfExists::Replace, || {
        fs::create_dir(output.join("work")).unwrap();
    });
    assert!(matches!(result, Err(ModelError::Output { .. })), "{result:?}");
    assert!(output.join("work").is_dir());
    fs::remove_dir(output.join("work")).unwrap();
    let result = save_while(&output, IfExists::Replace, || {
        fs::rename(&output, folder.path().join("before")).unwrap();
        fs::create_dir(&output).unwrap();
        fs::write(output.join("config.json"), "another's").unwrap();
    });
    assert!(matches!(result, Err(ModelError::Output { .. })), "{result:?}");
    assert_eq!(names(&output), ["config.json"]);
    assert_eq!(names(folder.path()), ["before", "model"]);
}

#[test]
fn a_killed_saving_leaves_nothing_for_the_next() {
    if let Some(output) = std::env::var_os(RERUN).map(PathBuf::from) {
        save_while(&output, IfExists::Refuse, || std::process::abort()).unwrap();
        return;
    }
    let folder = TempDir::new().unwrap();
    let output = folder.path().join("model");
    let test = ["--exact", "outputs::a_killed_saving_leaves_nothing_for_the_next"];
    let mut killed = Command::new(std::env::current_exe().unwrap());
    let killed = killed.args(test).env(RERUN, &output).output().unwrap();
    assert_eq!(killed.status.signal(), Some(6), "{killed:?}");
    assert!(names(folder.path())[0].starts_with(".model.saving-"), "{:?}", names(folder.path()));
    save_while(&output, IfExists::Refuse, || {}).unwrap();
    assert_eq!(names(folder.path()), ["model"]);
}
