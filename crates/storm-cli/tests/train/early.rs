//! Cheap checks come before anything is created.

use crate::support::{Place, finish, tree};
use std::fs;
use std::path::Path;
use std::process::Command;

/// An error has this exit code, and leaves no folder, no dataset and no lock behind.
#[track_caller]
fn check(place: &Place, flags: &[&str], code: i32, parts: &[&str]) {
    place.run("early", flags).failed(code, parts);
    assert!(!place.path().join("runs").exists(), "{flags:?} made the folder of a run");
}

#[test]
fn mistakes_are_found_before_text_is_packed() {
    let place = Place::new();
    let most = "at most";
    for (flags, parts) in [
        (&["--learning-rate=-1"][..], &["learning-rate"][..]),
        (&["--learning-rate", "nan"], &["learning-rate"]),
        (&["--final-learning-rate", "1"], &["final-learning-rate"]),
        (&["--steps", "10", "--warmup", "11"], &["warmup", "10"]),
        (&["--beta2", "1"], &["beta2 is 1", "less than 1"]),
        (&["--epsilon", "1e-60"], &["epsilon", "positive"]),
        (&["--weight-decay=-0.1"], &["weight-decay", "not negative"]),
        (&["--clip=-1"], &["clip is -1"]),
        (&["--temperature", "nan"], &["temperature"]),
        (&["--held-out", "1"], &["held-out is 1"]),
        (&["--steps", "1000000001"], &["steps is 1000000001", most]),
        (&["--seq", "16777217"], &["seq is 16777217", most]),
        (&["--threads", "1025"], &["threads is 1025", most]),
        (&["--sample-tokens", "2000000"], &["sample-tokens", most]),
        (&["--steps", "3", "--epochs", "1"], &["steps and epochs"]),
        (&["--epochs", "0"], &["epochs is 0"]),
        (&["--cooldown", "0.1"], &["cooldown", "wsd"]),
        (&["--schedule", "wsd", "--steps", "9", "--cooldown", "10"], &["cooldown: 10 steps"]),
        (&["--tokens-per-step", "64", "--batch", "3"], &["tokens-per-step is 64"]),
        (&["--tokens-per-step", "64", "--accumulate", "2"], &["tokens-per-step chooses"]),
        (&["--model", "gpt2", "--heads", "3"], &[]),
    ] {
        fs::create_dir_all(place.path().join("empty")).expect("a folder");
        let code = if parts.is_empty() { 4 } else { 2 };
        check(&place, flags, code, parts);
    }
    check(&place, &["--hardware", "h201"], 4, &["h201"]);
    check(&place, &["--data", "empty"], 4, &["empty", "nothing that can be packed", ".parquet"]);
    check(&place, &["--data", "missing.txt"], 4, &["missing.txt"]);
    check(&place, &["--tokenizer", "missing.json"], 4, &["missing.json"]);
    check(&place, &["--model", "gpt-5"], 4, &["gpt-5"]);
    check(&place, &["--threads", "256"], 3, &["threads = 256 takes"]);
    check(&place, &["--accumulate", "1000000"], 3, &["data of one step"]);
    // A checkpoint of petabytes fits on no disk, which shows long before the plan for it.
    let huge = ["--layers", "4000", "--width", "65536", "--heads", "512"];
    check(&place, &huge, 3, &["a checkpoint takes", "free", "--runs"]);
}

/// Prints the remedies of `storm doctor`, and no plan for a missing card.
#[test]
fn a_missing_gpu_is_an_error_at_once() {
    if Path::new("/proc/driver/nvidia").exists() {
        return;
    }
    let place = Place::new();
    let parts = ["no GPU can be used", "driver", "nvidia-smi", "--device cpu"];
    check(&place, &["--device", "cuda"], 1, &parts);
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path());
    let output = command.args(["train", "tiny.toml", "--device", "cuda"]).output().expect("storm");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Several ranks that cannot be connected would each train the whole run.
#[test]
fn ranks_without_mpi_are_refused() {
    let place = Place::new();
    let names = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"];
    let sizes = ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"];
    let mut command = place.command("early", &[]);
    command.envs(names.map(|name| (name, "0"))).envs(sizes.map(|name| (name, "4")));
    command.env("STORM_MPI_LIBRARY", place.path().join("libmpi.so.40"));
    finish(command).failed(2, &["mpirun of Open MPI", "4 ranks", "STORM_MPI_LIBRARY is"]);
    assert!(!place.path().join("runs").exists());
    let mut command = place.command("early", &["--steps", "1"]);
    command.envs(names.map(|name| (name, "0"))).envs(sizes.map(|name| (name, "1")));
    finish(command).succeeded();
}

/// An existing run stays as it is, to the byte.
#[test]
fn a_refused_resume_changes_nothing() {
    let place = Place::new();
    place.run("a", &["--steps", "1"]).succeeded();
    let folder = place.run_folder("a");
    let before = tree(&folder);
    place.run("a", &["--steps", "2"]).failed(2, &["has checkpoints already"]);
    place
        .run("a", &["--resume", "--steps", "2", "--learning-rate=-1"])
        .failed(2, &["learning-rate"]);
    place.run("a", &["--begin-anew", "--beta1", "2"]).failed(2, &["beta1"]);
    assert!(tree(&folder) == before, "the folder of the run changed");
}
