//! `cargo xtask data`: downloads and rebuilds public data for long runs, below `target/`. None of
//! it is committed.

mod cifar10;
mod fashion_mnist;
mod html;
mod text;

use crate::args::Args;
use crate::process::run as run_command;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

pub(crate) fn run(mut args: Args) -> Result<()> {
    match args.word().as_deref() {
        Some("text") => text::run(args),
        Some("cifar10") => cifar10::run(args),
        Some("fashion-mnist") => fashion_mnist::run(args),
        _ => bail!("say which data to make: text, cifar10 or fashion-mnist"),
    }
}

/// Downloads a Debian package into a folder.
fn apt_download(folder: &Path, package: &str) -> Result<()> {
    run_command(Command::new("apt-get").current_dir(folder).args(["download", package])).context(
        "this command needs Debian's apt and a network; if apt-get reports \"404 Not Found\", its list of packages is \
         out of date: run `apt-get update` and try again",
    )
}
