//! The config file: TOML, with the flag names as keys.

use super::options::Given;
use super::reference;
use crate::UsageError;
use std::io::Read;
use std::path::Path;
use storm_files::open_plain;

/// Size limit. A config with every option and many comments is far smaller.
const BYTES_MAX: u64 = 1 << 20;

/// Similarity below which an unknown key gets no "did you mean" suggestion.
const LIKENESS: f64 = 0.7;

/// Why a config file cannot be used.
#[derive(Debug)]
pub(crate) struct BadConfig(pub(super) String);

impl std::fmt::Display for BadConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadConfig {}

/// Reads the options of a config file.
pub(crate) fn read(path: &Path) -> Result<Given, BadConfig> {
    let bad = |problem: String| BadConfig(format!("{}: {problem}", path.display()));
    let mut text = String::new();
    let file = open_plain(path).map_err(|error| bad(error.to_string()))?;
    file.take(BYTES_MAX + 1).read_to_string(&mut text).map_err(|error| bad(error.to_string()))?;
    if text.len() as u64 > BYTES_MAX {
        return Err(bad(format!("a config has at most {BYTES_MAX} bytes")));
    }
    parse(&text).map_err(bad)
}

pub(super) fn parse(text: &str) -> Result<Given, String> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    for key in table.keys() {
        if !keys().contains(key) {
            return Err(unknown(key));
        }
    }
    toml::from_str(text).map_err(|error| error.to_string())
}

/// Every key, in the order of the options.
fn keys() -> Vec<String> {
    reference::flags().iter().filter_map(|flag| flag.get_long().map(str::to_owned)).collect()
}

fn unknown(key: &str) -> String {
    let known = keys();
    let likeness = |known: &&String| strsim::jaro_winkler(known, &key.replace('_', "-"));
    let nearest = known.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    match nearest.filter(|nearest| likeness(nearest) >= LIKENESS) {
        Some(nearest) => format!("unknown key `{key}`; did you mean `{nearest}`?"),
        None => format!("unknown key `{key}`; docs/config.md and `storm train --help` list all"),
    }
}

/// Refuses values that a config file cannot hold: integers above TOML's range (only seeds may have those) and paths
/// that are not UTF-8.
pub(crate) fn check_values(given: &Given) -> Result<(), UsageError> {
    let all = serde_json::to_value(given).map_err(|error| {
        UsageError(format!("the run's config file cannot hold an option: {error}; use UTF-8 paths"))
    })?;
    let all = all.as_object().into_iter().flatten();
    for (key, value) in all {
        if let Some(number) = value.as_u64().filter(|&number| i64::try_from(number).is_err()) {
            return Err(UsageError(format!("{key} is {number}; at most {} is possible", i64::MAX)));
        }
    }
    Ok(())
}

/// Writes a config file that gives the same options.
pub(crate) fn write(given: &Given) -> String {
    toml::to_string(given).unwrap_or_else(|error| unreachable!("options are plain: {error}"))
}

#[cfg(test)]
mod tests {
    use super::super::values::Seed;
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let text = "model = \"gpt2\"\nseq = 64\nvram = \"2MiB\"\nlearning-rate = 1e-3\n\
                    schedule = \"wsd\"\ncooldown = 0.25\n\
                    cooldown-shape = \"1-sqrt\"\nepochs = 1.5\nweights = \"streamed\"\nkeep-best = false\n";
        let given = parse(text).expect("a config");
        assert_eq!(given.vram.map(|size| size.0), Some(2 << 20));
        let again = parse(&write(&given)).expect("a config");
        assert_eq!(write(&again), write(&given));
        let all = Given::defaults();
        assert_eq!(write(&parse(&write(&all)).expect("a config")), write(&all));
    }

    #[test]
    fn seeds_have_all_of_64_bits() {
        for (seed, written) in [
            (0, "seed = 0"),
            (u64::MAX / 2, "seed = 9223372036854775807"),
            (u64::MAX / 2 + 1, "seed = \"9223372036854775808\""),
            (u64::MAX, "seed = \"18446744073709551615\""),
        ] {
            let given = Given { seed: Some(Seed(seed)), ..Given::default() };
            check_values(&given).expect("a seed");
            assert_eq!(write(&given).trim(), written);
            assert_eq!(parse(written).expect("a config").seed, Some(Seed(seed)));
            let flag: Seed = seed.to_string().parse().expect("a flag");
            assert_eq!(flag, Seed(seed));
        }
        for text in ["seed = -1", "seed = \"18446744073709551616\"", "seed = 1.5", "seed = \"x\""] {
            parse(text).expect_err("no seed");
        }
    }

    #[test]
    fn other_numbers_fit_a_config_file() {
        let most = std::num::NonZero::new(u64::MAX / 2);
        check_values(&Given { steps: most, ..Given::default() }).expect("it fits");
        let more = std::num::NonZero::new(u64::MAX / 2 + 1);
        let error =
            check_values(&Given { steps: more, ..Given::default() }).expect_err("too large");
        assert!(error.to_string().contains("steps is 9223372036854775808"), "{error}");
    }

    #[test]
    fn paths_that_are_not_text_are_refused() {
        use std::os::unix::ffi::OsStringExt;
        let runs = std::ffi::OsString::from_vec(vec![b'a', 0xff]);
        let given = Given { runs: Some(runs.into()), ..Given::default() };
        let error = check_values(&given).expect_err("not text");
        assert!(error.to_string().contains("UTF-8 paths"), "{error}");
    }

    #[test]
    fn flags_come_first_then_the_file_then_defaults() {
        let file = parse("seq = 64\nsteps = 7\n").expect("a config");
        let flags = Given { steps: std::num::NonZero::new(9), ..Given::default() };
        let settings = flags.over(file).resolve();
        assert_eq!((settings.seq.get(), settings.steps.map(Into::into)), (64, Some(9u64)));
        assert_eq!(settings.beta1, 0.9);
        assert!(settings.vram.is_none());
    }

    /// A flag drops the key that says the same in another way.
    #[test]
    fn a_flag_replaces_its_alternative() {
        let file = || parse("steps = 7\nbatch = 2\naccumulate = 3\n").expect("a config");
        let settings = Given { epochs: Some(2.0), ..Given::default() }.over(file()).resolve();
        assert_eq!((settings.epochs, settings.steps), (Some(2.0), None));
        let tokens = std::num::NonZero::new(64);
        let settings = Given { tokens_per_step: tokens, ..Given::default() }.over(file()).resolve();
        assert_eq!(
            (settings.tokens_per_step, settings.batch, settings.accumulate),
            (tokens, None, None)
        );
        assert_eq!(settings.steps.map(Into::into), Some(7u64));
    }

    #[test]
    fn unknown_keys_are_refused_with_a_suggestion() {
        let check = |text: &str, part: &str| {
            let error = parse(text).expect_err("a slip");
            assert!(error.contains(part), "{error}");
        };
        check("learning_rate = 1", "did you mean `learning-rate`?");
        check("warm-up = 3", "did you mean `warmup`?");
        check("zzz = 3", "docs/config.md");
        check("seq = 0", "seq");
        check("schedule = \"cosin\"", "cosine");
        check("vram = \"5 parsecs\"", "parsecs");
        check("seq = [", "TOML");
    }
}
