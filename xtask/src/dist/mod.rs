//! `cargo xtask dist`: builds the release files in `target/dist`.

mod licences;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use crate::args::Args;
use crate::bundle::copy_stripped;
use crate::process::{cargo, output, run as run_command};
use crate::python::Environment;
use crate::workspace::{entries, name, release_dir, root, target_dir};

/// Shells, and the names of their completion scripts.
const COMPLETIONS: [(&str, &str); 3] =
    [("bash", "storm.bash"), ("zsh", "_storm"), ("fish", "storm.fish")];

pub(crate) fn run(args: Args) -> Result<()> {
    args.finish()?;
    let dist = target_dir().join("dist");
    if dist.exists() {
        fs::remove_dir_all(&dist).context("removing what an earlier run left")?;
    }
    fs::create_dir_all(dist.join("completions"))?;
    fs::create_dir_all(dist.join("man"))?;

    run_command(cargo().args(["build", "--release", "-p", "storm-cli"]))?;
    let binary = dist.join("storm");
    copy_stripped(&release_dir().join("storm"), &binary)?;
    for (shell, file) in COMPLETIONS {
        let script = output(Command::new(&binary).args(["completions", shell]))?;
        fs::write(dist.join("completions").join(file), script)?;
    }
    run_command(Command::new(&binary).arg("man").arg(dist.join("man")))?;
    fs::write(dist.join("LICENSES-third-party.txt"), licences::text()?)?;
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        fs::copy(root().join(licence), dist.join(licence))?;
    }

    let python = Environment::new();
    python.ensure()?;
    let wheel = python.build_wheel(&dist, "release")?;
    let script = root().join("xtask/src/dist/add-command.py");
    run_command(python.python().arg(script).arg(&wheel).arg(&binary))?;
    check_wheel(&python, &wheel, &binary)?;

    let sums = check_sums(&dist)?;
    fs::write(dist.join("SHA256SUMS"), &sums)?;
    println!("\n{sums}\nin {}", dist.display());
    for file in [&binary, &wheel] {
        let mib = fs::metadata(file)?.len() as f64 / (1 << 20) as f64;
        println!("{:>8.1} MiB  {}", mib, name(file));
    }
    Ok(())
}

/// Installs the wheel into a new environment and checks that its command is the one that was built.
fn check_wheel(python: &Environment, wheel: &Path, binary: &Path) -> Result<()> {
    let environment = target_dir().join("dist-check");
    run_command(python.python().args(["-m", "venv", "--clear"]).arg(&environment))?;
    let installed = environment.join("bin");
    run_command(
        Command::new(installed.join("python"))
            .args(["-m", "pip", "install", "--quiet", "--no-index", "--no-deps"])
            .arg("--disable-pip-version-check")
            .arg(wheel),
    )?;
    let version = |storm: &Path| output(Command::new(storm).arg("--version"));
    ensure!(
        version(&installed.join("storm"))? == version(binary)?,
        "the wheel's command is not the one that was built"
    );
    fs::remove_dir_all(&environment).context("removing the environment of the check")
}

/// A line for each file, in the format of `sha256sum --check`.
fn check_sums(dist: &Path) -> Result<String> {
    let mut files: Vec<PathBuf> = Vec::new();
    let mut folders = vec![dist.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for path in entries(&folder)? {
            match path.is_dir() {
                true => folders.push(path),
                false => files.push(path),
            }
        }
    }
    files.sort();
    let mut lines = String::new();
    for file in files {
        let bytes = fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        let Some(inside) = file.strip_prefix(dist).ok().and_then(Path::to_str) else {
            bail!("{} has a name that is not text", file.display());
        };
        lines.push_str(&format!("{:x}  {inside}\n", Sha256::digest(&bytes)));
    }
    Ok(lines)
}
