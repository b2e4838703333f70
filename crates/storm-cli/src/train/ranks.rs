//! Refuses several ranks: each would train the whole run alone and write to the same folder.

use crate::UsageError;
use storm_ranks::Launch;

pub(super) fn check() -> Result<(), UsageError> {
    let launch = Launch::of_this_process().map_err(|error| UsageError(error.to_string()))?;
    match launch.ranks {
        1 => Ok(()),
        ranks => Err(UsageError(format!(
            "{} started {ranks} ranks of this run, and storm train has one rank: each would train all of it and write to \
             the same folder. Start storm train by itself, once",
            launch.launcher
        ))),
    }
}
