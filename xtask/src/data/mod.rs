//! `cargo xtask data`: public data for long runs, fetched and rebuilt below `target/`. Nothing of it is committed.

mod cifar10;
mod fashion_mnist;
mod html;
mod text;

use crate::args::Args;
use anyhow::{Result, bail};

pub(crate) fn run(mut args: Args) -> Result<()> {
    match args.word().as_deref() {
        Some("text") => text::run(args),
        Some("cifar10") => cifar10::run(args),
        Some("fashion-mnist") => fashion_mnist::run(args),
        _ => bail!("say which data to make: text, cifar10 or fashion-mnist"),
    }
}
