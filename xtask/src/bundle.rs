//! `cargo xtask gpu-bundle`: makes one folder to copy to a GPU machine without a Rust toolchain.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::args::Args;
use crate::process::{cargo, output, run as run_command};
use crate::workspace::{entries, name, root, target_dir};

/// The maximum size of the bundle.
const BYTES_MAX: u64 = 50 * MIB;
const MIB: u64 = 1024 * 1024;

/// Packages whose binaries go into `bin/`.
const BINARY_PACKAGES: [&str; 2] = ["storm-cli", "storm-parity"];

/// Packages whose test binaries go into `tests/`, those that matter most on a GPU first. Packages
/// that do not fit are left out, with a message.
const TEST_PACKAGES: [&str; 7] = [
    "storm-device",
    "storm-saved",
    "storm-verify",
    "storm-exec",
    "storm-graph",
    "storm-model",
    "storm-train",
];

/// Folders of the repository that are copied unchanged.
const FOLDERS: [&str; 2] = ["python", "corpus"];

const RUN_TESTS: &str = include_str!("run-tests.sh");

/// An executable that cargo built.
#[derive(Debug, PartialEq)]
struct Artifact {
    package: String,
    target: String,
    kind: String,
    path: PathBuf,
}

impl Artifact {
    /// `storm-graph.tests.shapes` for `tests/shapes.rs`, `storm-graph.lib` for the unit tests.
    fn test_name(&self) -> String {
        let Self { package, kind, .. } = self;
        match kind.as_str() {
            "test" => format!("{package}.tests.{}", self.target),
            kind => format!("{package}.{kind}"),
        }
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    args.finish()?;
    let bundle = target_dir().join("gpu-bundle");
    if bundle.exists() {
        fs::remove_dir_all(&bundle).context("removing the old bundle")?;
    }
    for dir in ["bin", "tests"] {
        fs::create_dir_all(bundle.join(dir))?;
    }
    for folder in FOLDERS {
        copy_folder(&root().join(folder), &bundle.join(folder))?;
    }
    write_script(&bundle.join("run-tests.sh"), RUN_TESTS)?;

    for artifact in build(&["build"], &BINARY_PACKAGES)? {
        copy_stripped(&artifact.path, &bundle.join("bin").join(&artifact.target))?;
    }
    let mut tests: HashMap<String, Vec<Artifact>> = HashMap::new();
    for artifact in build(&["test", "--no-run"], &TEST_PACKAGES)? {
        let package = tests.entry(artifact.package.clone()).or_default();
        package.push(artifact);
    }
    for package in TEST_PACKAGES {
        let artifacts = tests.remove(package).unwrap_or_default();
        let copied = artifacts
            .iter()
            .map(|artifact| {
                let copy = bundle.join("tests").join(artifact.test_name());
                copy_stripped(&artifact.path, &copy)?;
                Ok(copy)
            })
            .collect::<Result<Vec<_>>>()?;
        if bytes_below(&bundle)? >= BYTES_MAX {
            copied.iter().try_for_each(fs::remove_file)?;
            eprintln!("left out, would not fit: the tests of {package}");
        }
    }

    let bytes = print_sizes(&bundle)?;
    ensure!(
        bytes < BYTES_MAX,
        "the bundle has {}, its limit is {}: put less into it (see xtask/src/bundle.rs)",
        mib(bytes),
        mib(BYTES_MAX)
    );
    println!("copy the folder to the GPU machine and run ./run-tests.sh there");
    Ok(())
}

/// Builds with the release profile and returns the executables.
fn build(command: &[&str], packages: &[&str]) -> Result<Vec<Artifact>> {
    let mut cargo = cargo();
    cargo.args(command).arg("--release");
    cargo.arg("--message-format=json-render-diagnostics");
    cargo.args(packages.iter().flat_map(|package| ["-p", package]));
    if command[0] == "test" {
        // Without these, `cargo test` would also build examples and the plain binaries.
        cargo.args(["--lib", "--bins", "--tests"]);
    }
    let messages = output(cargo.stdin(Stdio::null()))?;
    let only_tests = command[0] == "test";
    let artifacts = parse_messages(&messages, only_tests)?;
    ensure!(!artifacts.is_empty(), "cargo built no executables");
    Ok(artifacts)
}

/// The executables in cargo's JSON messages. With `only_tests`, only those with a test harness;
/// otherwise only those without.
fn parse_messages(messages: &str, only_tests: bool) -> Result<Vec<Artifact>> {
    let mut artifacts = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value = serde_json::from_str(line).context("cargo's JSON messages")?;
        let is_test = message["profile"]["test"] == true;
        let Some(path) = message["executable"].as_str() else {
            continue;
        };
        if message["reason"] != "compiler-artifact" || is_test != only_tests {
            continue;
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        artifacts.push(Artifact {
            package: package_name(message["package_id"].as_str().unwrap_or_default()),
            target: text(&message["target"]["name"]),
            kind: text(&message["target"]["kind"][0]),
            path: path.into(),
        });
    }
    Ok(artifacts)
}

/// The name in a package ID: `path+file:///a/b#name@1.0` or `path+file:///a/name#1.0`.
fn package_name(id: &str) -> String {
    let (url, fragment) = id.split_once('#').unwrap_or((id, ""));
    let name = match fragment.split_once('@') {
        Some((name, _)) => name,
        None => url.rsplit('/').next().unwrap_or_default(),
    };
    name.to_owned()
}

/// Copies a binary without its symbols. `strip` is in the same package as the linker.
pub(crate) fn copy_stripped(from: &Path, to: &Path) -> Result<()> {
    let mut strip = Command::new("strip");
    run_command(strip.arg("-o").arg(to).arg(from))
        .context("removing symbols needs `strip`; on Debian and Ubuntu: apt install binutils")
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for path in entries(from)? {
        let copy = to.join(name(&path));
        match path.is_dir() {
            true if name(&path) == "__pycache__" => {}
            true => copy_folder(&path, &copy)?,
            false => {
                fs::copy(&path, &copy).with_context(|| format!("copying {}", path.display()))?;
            }
        }
    }
    Ok(())
}

fn write_script(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn bytes_below(path: &Path) -> Result<u64> {
    if !path.is_dir() {
        return Ok(fs::metadata(path)?.len());
    }
    entries(path)?.iter().map(|entry| bytes_below(entry)).sum()
}

fn print_sizes(bundle: &Path) -> Result<u64> {
    println!();
    for dir in ["bin", "tests"] {
        for file in entries(&bundle.join(dir))? {
            println!("{:>10}  {dir}/{}", mib(bytes_below(&file)?), name(&file));
        }
    }
    for folder in FOLDERS {
        println!("{:>10}  {folder}/", mib(bytes_below(&bundle.join(folder))?));
    }
    let bytes = bytes_below(bundle)?;
    println!("{:>10}  in all, {}", mib(bytes), bundle.display());
    Ok(bytes)
}

fn mib(bytes: u64) -> String {
    format!("{:.2} MiB", bytes as f64 / MIB as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: &str, name: &str, test: bool, executable: &str) -> String {
        format!(
            r#"{{"reason":"compiler-artifact","package_id":"path+file:///r/crates/storm-exec#0.1.0","target":{{"kind":["{kind}"],"name":"{name}"}},"profile":{{"test":{test}}},"executable":{executable}}}"#
        )
    }

    #[test]
    fn reads_the_executables_that_are_wanted() {
        let messages = [
            message("lib", "storm_exec", false, "null"),
            message("lib", "storm_exec", true, r#""/t/storm_exec-1""#),
            message("test", "overlap", true, r#""/t/overlap-2""#),
            message("bin", "storm", false, r#""/t/storm""#),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ]
        .join("\n");
        let names = |only_tests| {
            let artifacts = parse_messages(&messages, only_tests).unwrap();
            let names = artifacts.iter().map(Artifact::test_name);
            names.collect::<Vec<_>>()
        };
        assert_eq!(names(true), ["storm-exec.lib", "storm-exec.tests.overlap"]);
        assert_eq!(names(false), ["storm-exec.bin"]);
    }

    #[test]
    fn reads_package_ids() {
        assert_eq!(package_name("path+file:///r/crates/storm-exec#0.1.0"), "storm-exec");
        assert_eq!(package_name("path+file:///r/a#storm-exec@0.1.0"), "storm-exec");
    }
}
