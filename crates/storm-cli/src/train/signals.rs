//! Signal handling: the first Ctrl-C stops the run cleanly, the second exits at once.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs;
use std::thread;
use storm_train::Stop;

/// The exit code a shell reports for a program ended by Ctrl-C.
const INTERRUPTED: i32 = 130;

/// Makes signals request a stop of the run.
pub(super) fn listen(stop: &Stop) -> Result<()> {
    let stop = stop.clone();
    on_signals(move || {
        if stop.request() {
            // Safe even during a save: a checkpoint is moved into place only when complete, so the last one is intact.
            std::process::exit(INTERRUPTED);
        }
        eprintln!("\nfinishing the step, then saving; press Ctrl-C again to exit at once");
    })
}

/// Makes signals request a stop on a rank other than the first, which ends the run. Ctrl-C reaches all ranks, so a second
/// one does nothing here: the first rank exits at once, and with it all of them.
pub(super) fn pass_on(stop: &Stop) -> Result<()> {
    let stop = stop.clone();
    on_signals(move || {
        stop.request();
    })
}

/// Calls a function for each signal to end. An ignored SIGHUP, as under `nohup`, stays ignored.
fn on_signals(mut react: impl FnMut() + Send + 'static) -> Result<()> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mut listened = vec![SIGINT, SIGTERM];
    if !is_ignored(SIGHUP, &status) {
        listened.push(SIGHUP);
    }
    let mut signals = Signals::new(listened).context("cannot listen to signals")?;
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || signals.forever().for_each(|_| react()))
        .context("cannot start a thread that listens to signals")?;
    Ok(())
}

/// Whether the process ignores a signal, from the text of `/proc/self/status`.
fn is_ignored(signal: i32, status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linux_says_what_is_ignored() {
        let status = "Name:\tstorm\nSigBlk:\tffffffffffffffff\nSigIgn:\t0000000000001001\n";
        assert!(is_ignored(SIGHUP, status) && !is_ignored(SIGINT, status));
        assert!(!is_ignored(SIGHUP, "SigIgn:\t0000000000001000\n"));
        assert!(!is_ignored(SIGHUP, "") && !is_ignored(SIGHUP, "SigIgn: none"));
    }
}
