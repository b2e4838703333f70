//! Checks dependencies for known vulnerabilities, licenses and sources, if cargo-deny is installed.

use std::path::PathBuf;
use std::process::Stdio;

use anyhow::Result;

use crate::process::{cargo, run as run_command};
use crate::stage::Verdict;

pub(crate) fn run() -> Result<Verdict> {
    if !has_cargo_deny() {
        eprintln!(
            "skipped: cargo-deny is not installed; `cargo install --locked cargo-deny` adds it"
        );
        return Ok(Verdict::Skipped);
    }
    // Offline: a check must not depend on the network or on what has been published since.
    let deny = ["deny", "--offline", "check"];
    if has_advisories() {
        run_command(cargo().args(deny))?;
    } else {
        eprintln!("without advisories: there is no copy of them; `cargo deny fetch` makes one");
        run_command(cargo().args(deny).args(["bans", "licenses", "sources"]))?;
    }
    Ok(Verdict::Passed)
}

fn has_cargo_deny() -> bool {
    let mut version = cargo();
    version.args(["deny", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    version.status().is_ok_and(|status| status.success())
}

/// Whether cargo-deny has fetched advisories before.
fn has_advisories() -> bool {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let copies = home.and_then(|home| home.join("advisory-dbs").read_dir().ok());
    copies.is_some_and(|copies| copies.flatten().any(|copy| copy.path().is_dir()))
}
