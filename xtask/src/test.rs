//! `cargo xtask test`: runs every test. `--quick` leaves out slow tests.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::args::Args;
use crate::chromium;
use crate::process::{cargo, run as run_command};
use crate::python::Environment;
use crate::stage::{Stage, Verdict, run_all};
use crate::workspace::{crate_dirs, debug_dir, entries, root};

/// Test targets that take most of the time. `--quick` leaves them out.
const SLOW_TARGETS: [&str; 4] = ["faults", "planned", "plans", "train"];

pub(crate) fn run(mut args: Args) -> Result<()> {
    let is_quick = args.flag("--quick");
    args.finish()?;
    match is_quick {
        true => run_all(vec![Stage::new("quick rust tests", run_quick)]),
        false => run_everything(),
    }
}

/// Unit tests and the quick test targets. Needs no Python environment.
fn run_quick() -> Result<()> {
    let mut command = cargo();
    command.args(["test", "--workspace", "--lib", "--bins"]);
    for target in quick_targets(&crate_dirs()?)? {
        command.args(["--test", &target]);
    }
    run_command(&mut command)
}

/// The names of all test targets that are not slow, each once.
fn quick_targets(crate_dirs: &[PathBuf]) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for dir in crate_dirs {
        names.extend(targets(&dir.join("tests"))?);
    }
    names.sort();
    names.dedup();
    names.retain(|name| !SLOW_TARGETS.contains(&name.as_str()));
    Ok(names)
}

fn run_everything() -> Result<()> {
    run_all(vec![
        Stage::new("python set-up", || Environment::new().ensure()),
        Stage::skippable("browser for pages", find_browser),
        Stage::new("rust tests", || {
            let test = ["test", "--workspace", "--lib", "--bins", "--tests"];
            let mut command = cargo();
            // PyTorch's packages include NVRTC, which compiles every CUDA kernel without a GPU.
            command.env("VIRTUAL_ENV", Environment::new().folder()).env("STORM_REQUIRE_NVRTC", "1");
            // The same environment has the launchers of ranks.
            command.env("STORM_REQUIRE_LAUNCHERS", "1");
            run_command(command.args(test))
        }),
        Stage::new("doc tests", || run_command(cargo().args(["test", "--workspace", "--doc"]))),
        Stage::new("examples", run_examples),
        Stage::new("python wheel", || Environment::new().install_wheel()),
        Stage::new("python comparisons", run_pytest),
    ])
}

/// The tests of pages search for Chromium themselves and pass without it. This stage reports in the
/// table whether they can run.
fn find_browser() -> Result<Verdict> {
    match chromium::find() {
        Some(program) => {
            eprintln!("{}", program.display());
            Ok(Verdict::Passed)
        }
        None => {
            eprintln!("{}", chromium::INSTALL);
            Ok(Verdict::Skipped)
        }
    }
}

/// Builds all examples with one command, which is faster than a `cargo run` for each, and runs
/// them. Also builds the binaries, which the Python comparisons call.
fn run_examples() -> Result<()> {
    run_command(cargo().args(["build", "--workspace", "--bins", "--examples"]))?;
    for dir in crate_dirs()? {
        for example in targets(&dir.join("examples"))? {
            let mut command = Command::new(debug_dir().join("examples").join(example));
            run_command(command.current_dir(root()))?;
        }
    }
    Ok(())
}

/// The targets in a folder of examples or tests: `NAME.rs` and `NAME/main.rs`.
fn targets(folder: &Path) -> Result<Vec<String>> {
    let is_target = |path: &PathBuf| {
        path.extension().is_some_and(|ext| ext == "rs") || path.join("main.rs").is_file()
    };
    let paths = entries(folder)?.into_iter();
    let stems = paths.filter(is_target).filter_map(|path| {
        let stem = path.file_stem()?.to_str()?;
        Some(stem.to_owned())
    });
    Ok(stems.collect())
}

fn run_pytest() -> Result<()> {
    let tests = root().join("python/tests");
    if !tests.is_dir() {
        bail!("python/tests is missing");
    }
    let mut command = Environment::new().python();
    command
        // Each comparison uses one thread and about a gigabyte.
        .args(["-m", "pytest", "-p", "no:cacheprovider", "--durations=5"])
        .args(["--numprocesses=auto", "--maxprocesses=4", "--dist=worksteal"])
        .arg(tests)
        .env("STORM_BIN_DIR", debug_dir());
    run_command(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_both_forms_of_targets() {
        let dir = std::env::temp_dir().join(format!("storm-xtask-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("tests/big")).unwrap();
        std::fs::create_dir_all(dir.join("tests/plans")).unwrap();
        std::fs::create_dir_all(dir.join("tests/data")).unwrap();
        std::fs::write(dir.join("tests/big/main.rs"), "").unwrap();
        std::fs::write(dir.join("tests/plans/main.rs"), "").unwrap();
        std::fs::write(dir.join("tests/small.rs"), "").unwrap();
        let (found, quick) =
            (targets(&dir.join("tests")), quick_targets(std::slice::from_ref(&dir)));
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(found.unwrap(), ["big", "plans", "small"]);
        assert_eq!(quick.unwrap(), ["big", "small"]);
        assert!(targets(&dir).unwrap().is_empty());
    }

    /// A slow target that is renamed would silently become a quick one.
    #[test]
    fn slow_targets_exist() {
        let mut names = Vec::new();
        for dir in crate_dirs().unwrap() {
            names.extend(targets(&dir.join("tests")).unwrap());
        }
        for slow in SLOW_TARGETS {
            assert!(names.iter().any(|name| name == slow), "no test target is named `{slow}`");
        }
    }
}
