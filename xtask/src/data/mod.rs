//! `cargo xtask data`: public data for long runs, fetched and rebuilt below `target/`. Nothing of it is committed.

mod html;
mod text;

use crate::args::Args;
use anyhow::{Result, bail};

pub(crate) fn run(mut args: Args) -> Result<()> {
    match args.word().as_deref() {
        Some("text") => text::run(args),
        _ => bail!("say which data to make: `cargo xtask data text`"),
    }
}
