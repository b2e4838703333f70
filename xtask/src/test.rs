//! `cargo xtask test`: every test there is, in one command.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::args::Args;
use crate::process::{cargo, run as run_command};
use crate::python::Environment;
use crate::stage::{Stage, run_all};
use crate::workspace::{crate_dirs, entries, examples_dir, release_dir, root};

/// The packages whose release binaries the Python comparisons call, found through `STORM_BIN_DIR`.
const BINARY_PACKAGES: [&str; 2] = ["storm-cli", "storm-parity"];

pub(crate) fn run(args: Args) -> Result<()> {
    args.finish()?;

    run_all(vec![
        Stage::new("python set-up", || Environment::new().ensure()),
        Stage::new("rust tests", || {
            let test = ["test", "--workspace", "--lib", "--bins", "--tests"];
            let mut command = cargo();
            // PyTorch brings NVRTC along, with which every CUDA kernel is compiled: no GPU needed.
            command.env("VIRTUAL_ENV", Environment::new().folder()).env("STORM_REQUIRE_NVRTC", "1");
            run_command(command.args(test))
        }),
        Stage::new("doc tests", || run_command(cargo().args(["test", "--workspace", "--doc"]))),
        Stage::new("examples", run_examples),
        Stage::new("release binaries", || {
            let packages = BINARY_PACKAGES.iter().flat_map(|package| ["-p", package]);
            run_command(cargo().args(["build", "--release"]).args(packages))
        }),
        Stage::new("python wheel", || Environment::new().install_wheel()),
        Stage::new("python comparisons", run_pytest),
    ])
}

/// Builds all examples in one go, which costs less than one `cargo run` for each, and runs them.
fn run_examples() -> Result<()> {
    run_command(cargo().args(["build", "--workspace", "--examples"]))?;
    for dir in crate_dirs()? {
        for example in examples(&dir)? {
            let mut command = Command::new(examples_dir().join(example));
            run_command(command.current_dir(root()))?;
        }
    }
    Ok(())
}

/// The examples of a crate: `examples/NAME.rs` and `examples/NAME/main.rs`.
fn examples(crate_dir: &Path) -> Result<Vec<String>> {
    let is_example = |path: &PathBuf| {
        path.extension().is_some_and(|ext| ext == "rs") || path.join("main.rs").is_file()
    };
    let paths = entries(&crate_dir.join("examples"))?.into_iter();
    let stems = paths.filter(is_example).filter_map(|path| {
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
        .args(["-m", "pytest", "-p", "no:cacheprovider", "--durations=5"])
        .arg(tests)
        .env("STORM_BIN_DIR", release_dir());
    run_command(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_both_forms_of_examples() {
        let dir = std::env::temp_dir().join(format!("storm-xtask-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("examples/big")).unwrap();
        std::fs::create_dir_all(dir.join("examples/data")).unwrap();
        std::fs::write(dir.join("examples/big/main.rs"), "").unwrap();
        std::fs::write(dir.join("examples/small.rs"), "").unwrap();
        let found = examples(&dir);
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(found.unwrap(), ["big", "small"]);
        assert!(examples(&dir).unwrap().is_empty());
    }
}
