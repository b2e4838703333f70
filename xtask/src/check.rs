//! `cargo xtask check`: every check of the code that does not run it.

use anyhow::Result;

use crate::args::Args;
use crate::audit;
use crate::process::{cargo, run as run_command};
use crate::stage::{Stage, run_all};
use crate::tidy;

pub(crate) fn run(args: Args) -> Result<()> {
    args.finish()?;
    run_all(vec![
        Stage::new("tidy", tidy::run),
        Stage::new("format", || run_command(cargo().args(["fmt", "--all", "--check"]))),
        Stage::new("clippy", || {
            let clippy = ["clippy", "--workspace", "--all-targets"];
            run_command(cargo().args(clippy).args(["--", "-D", "warnings"]))
        }),
        Stage::skippable("audit", audit::run),
        Stage::new("docs", || {
            let doc = ["doc", "--no-deps", "--workspace"];
            run_command(cargo().args(doc).env("RUSTDOCFLAGS", "-D warnings"))
        }),
    ])
}
