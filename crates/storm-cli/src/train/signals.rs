//! Ctrl-C and its like: the first ends the run well, the second at once.

use anyhow::{Context, Result};
use storm_train::Stop;

/// What a shell reports of a program that Ctrl-C ended.
const INTERRUPTED: i32 = 130;

/// Makes signals ask the run to stop.
pub(super) fn listen(stop: &Stop) -> Result<()> {
    let stop = stop.clone();
    ctrlc::set_handler(move || {
        if stop.request() {
            // A checkpoint that is being written is not in its place yet: the last one is whole.
            std::process::exit(INTERRUPTED);
        }
        eprintln!("\nfinishing the step, then saving; once more to leave at once");
    })
    .context("cannot listen to signals")
}
