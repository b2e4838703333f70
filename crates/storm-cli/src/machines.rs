//! Which ranks share a machine.

use crate::UsageError;
use storm_ranks::{Engine, RankError, machines_of_ranks};

/// Says how many ranks in a row count as one machine, instead of what their hosts are called: containers have names of their own, and
/// tests have one machine.
const MACHINE_RANKS: &str = "STORM_MACHINE_RANKS";

/// How many ranks in a row count as one machine; none if this process was not told.
pub(crate) fn given(ranks: u32) -> Result<Option<u32>, UsageError> {
    machine_ranks(std::env::var(MACHINE_RANKS).ok().as_deref(), ranks)
}

/// The machine of each rank, as a number. All ranks call this with what they were told, and get the same.
pub(crate) fn of_ranks(engine: &mut dyn Engine, given: Option<u32>) -> Result<Vec<u32>, RankError> {
    // A launcher may have told only some of them.
    let mut in_a_row = [i64::from(given.unwrap_or(0))];
    engine.agree(&mut in_a_row)?;
    match u32::try_from(in_a_row[0]) {
        Ok(in_a_row @ 1..) => Ok((0..engine.place().ranks).map(|rank| rank / in_a_row).collect()),
        _ => machines_of_ranks(engine),
    }
}

fn machine_ranks(given: Option<&str>, ranks: u32) -> Result<Option<u32>, UsageError> {
    let Some(text) = given else { return Ok(None) };
    let number = text.parse().ok().filter(|&number| number > 0 && ranks.is_multiple_of(number));
    number.map(Some).ok_or_else(|| {
        UsageError(format!(
            "{MACHINE_RANKS} is `{text}`; it says how many of the {ranks} ranks each machine has, and must divide them"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_have_equally_many_ranks() {
        assert_eq!(machine_ranks(None, 4).ok(), Some(None));
        assert_eq!(machine_ranks(Some("2"), 4).ok(), Some(Some(2)));
        for text in ["", "0", "3", "-1", "two"] {
            let Err(UsageError(problem)) = machine_ranks(Some(text), 4) else { panic!("{text}") };
            assert!(problem.contains("STORM_MACHINE_RANKS is `") && problem.contains("4 ranks"));
        }
    }
}
