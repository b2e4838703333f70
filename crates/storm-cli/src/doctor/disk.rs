//! The directory that runs are written to: room, and what kind of disk it is on.

use super::Finding;
use crate::data::disk_rates;
use crate::disk::{Medium, free_bytes, medium, write_speed};
use crate::disk_tier;
use crate::size;
use std::path::Path;

/// Less does not hold a checkpoint of a small model.
const FREE_BYTES_MIN: u64 = 1 << 30;

pub(super) fn look(dir: &Path) -> Vec<Finding> {
    let name = "run directory";
    let shown = dir.display();
    if !dir.is_dir() {
        let remedy = format!("`mkdir -p {shown}`");
        return vec![Finding::missing(name, format!("{shown} is not a directory"), &remedy)];
    }
    let mut findings = Vec::new();
    match free_bytes(dir) {
        Ok(free) => {
            let what = format!("{shown} has {} free", size::show(free));
            findings.push(match free >= FREE_BYTES_MIN {
                true => Finding::good(name, what),
                false => Finding::missing(
                    name,
                    what,
                    "free some space, or choose another directory with --dir",
                ),
            });
        }
        Err(error) => {
            let what = format!("{shown}: {error}");
            findings.push(Finding::missing(name, what, "choose another directory with --dir"));
        }
    }
    findings.push(speed(dir));
    findings.push(reading(dir));
    findings.push(state(dir));
    findings
}

/// How fast the disk writes, and what it is.
fn speed(dir: &Path) -> Finding {
    let name = "disk";
    let medium = medium(dir);
    match write_speed(dir, u64::MAX) {
        Ok(bytes_per_second) => {
            let what = format!("{}; writes {}/s", medium.words(), size::show(bytes_per_second));
            match medium {
                medium if medium.is_slow() && bytes_per_second < 500 << 20 => {
                    let remedy = "checkpoints and data will be slow; prefer a local NVMe disk";
                    Finding::limited(name, what, remedy)
                }
                Medium::Memory => {
                    Finding::limited(name, what, "choose a directory on disk with --dir")
                }
                _ => Finding::good(name, what),
            }
        }
        Err(error) => {
            let what = format!("{} cannot be written to: {error}", dir.display());
            Finding::missing(name, what, "choose another directory with --dir")
        }
    }
}

/// How fast optimizer state would go there and back.
fn state(dir: &Path) -> Finding {
    let name = "state on disk";
    match disk_tier::probe(dir) {
        Ok(Some(probed)) => Finding::good(name, probed.words()),
        Ok(None) => {
            let what = format!("{} cannot hold optimizer state", dir.display());
            Finding::limited(name, what, "give `storm train` another folder with --disk")
        }
        Err(error) => Finding::limited(name, error.to_string(), "unset the variable"),
    }
}

/// How fast datasets are read there.
fn reading(dir: &Path) -> Finding {
    let name = "reading data";
    match disk_rates::measure(dir) {
        Ok(disk) => Finding::good(name, disk_rates::words(&disk)),
        Err(error) => {
            let what = format!("cannot be measured in {}: {error:#}", dir.display());
            Finding::limited(name, what, "free some space, or choose another directory with --dir")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn directories_that_cannot_be_used() {
        let missing = &look(Path::new("/nonexistent/runs"))[0];
        assert!(missing.state == State::Missing);
        assert!(missing.remedy.as_ref().is_some_and(|remedy| remedy.contains("mkdir")));
        let file = look(Path::new("/proc/self/status"));
        assert!(file[0].state == State::Missing);
        // There, but not writable.
        let read_only = speed(Path::new("/proc"));
        assert!(read_only.state == State::Missing, "{}", read_only.what);
    }
}
