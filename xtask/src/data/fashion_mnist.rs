//! `cargo xtask data fashion-mnist`: extracts the files of Fashion-MNIST from Debian's package.

use crate::args::Args;
use crate::data::apt_download;
use crate::process::run as run_command;
use crate::workspace::{entries, name, target_dir};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGE: &str = "dataset-fashion-mnist";
const INSIDE: &str = "usr/share/datasets/fashion-mnist";
const FILES: [&str; 4] = [
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
];

pub(crate) fn run(args: Args) -> Result<()> {
    args.finish()?;
    let folder = target_dir().join("data/fashion-mnist");
    let packages = folder.join("packages");
    fs::create_dir_all(&packages).with_context(|| format!("making {}", packages.display()))?;
    if package(&packages)?.is_none() {
        apt_download(&packages, PACKAGE)?;
    }
    let package = package(&packages)?.context("apt-get did not leave the package")?;
    let unpacked = folder.join("unpacked");
    run_command(Command::new("dpkg-deb").arg("-x").args([&package, &unpacked]))?;
    for file in FILES {
        let from = unpacked.join(INSIDE).join(file);
        fs::rename(&from, folder.join(file)).with_context(|| format!("{}", from.display()))?;
    }
    fs::remove_dir_all(&unpacked)?;
    println!("{}: {}", folder.display(), FILES.join(", "));
    Ok(())
}

fn package(packages: &Path) -> Result<Option<PathBuf>> {
    let is_it = |path: &PathBuf| name(path).starts_with(&format!("{PACKAGE}_"));
    Ok(entries(packages)?.into_iter().find(is_it))
}
