//! Generates the defaults in `--help` and the table in docs/config.md from the one definition of
//! the options.

use super::options::Given;
use crate::size;
use clap::{Arg, Args, Command};
use std::collections::BTreeMap;

/// The flags that are also config keys.
pub(super) fn flags() -> Vec<Arg> {
    Given::augment_args(Command::new("train")).get_arguments().cloned().collect()
}

/// The default of a key, as a config file would write it.
fn default_of(key: &str) -> Option<toml::Value> {
    let defaults = toml::Table::try_from(Given::defaults())
        .unwrap_or_else(|error| unreachable!("options are plain: {error}"));
    defaults.get(key).cloned()
}

/// Options with their values, grouped by heading in the order of their definition.
pub(crate) fn by_heading(
    settings: &BTreeMap<String, String>,
) -> Vec<(String, Vec<(String, String)>)> {
    let mut groups: Vec<(String, Vec<(String, String)>)> = Vec::new();
    for flag in flags() {
        let Some((key, value)) = flag.get_long().and_then(|key| settings.get_key_value(key)) else {
            continue;
        };
        let heading = flag.get_help_heading().unwrap_or_default();
        if groups.last().is_none_or(|(last, _)| last != heading) {
            groups.push((heading.to_owned(), Vec::new()));
        }
        if let Some((_, rows)) = groups.last_mut() {
            rows.push((key.clone(), value.clone()));
        }
    }
    groups
}

/// The command line, with defaults in the help of `storm train`.
pub(crate) fn with_defaults(command: Command) -> Command {
    command.mut_subcommand("train", |mut train| {
        for flag in flags() {
            let (Some(key), Some(help)) = (flag.get_long(), flag.get_help()) else { continue };
            if let Some(value) = default_of(key) {
                let help = format!("{help} [default: {}]", shown(&value));
                train = train
                    .mut_arg(flag.get_id().clone(), |arg| arg.help(help.clone()).long_help(help));
            }
        }
        train
    })
}

fn shown(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) if text.is_empty() => "nothing".to_owned(),
        toml::Value::String(text) => size::parse(text).map_or_else(|_| text.clone(), size::exact),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write;

    /// What docs/config.md is to say.
    fn document() -> String {
        let mut text = "# Config of a run\n\n\
            Every key of a config file for `storm train`, and, with `--` before it, every flag. Flags override\n\
            the file. `storm train --help` says the same; this file is made from the same definitions\n\
            (`STORM_WRITE_DOCS=1 cargo test -p storm-cli reference`), and a test compares it with them.\n"
            .to_owned();
        let mut heading = String::new();
        for flag in flags() {
            let of = flag.get_help_heading().unwrap_or_default();
            if of != heading {
                heading = of.to_owned();
                let _ = write!(
                    text,
                    "\n## {heading}\n\n| key | default | what it is |\n|---|---|---|\n"
                );
            }
            let key = flag.get_long().expect("every option has a name");
            let default = default_of(key).map_or("".to_owned(), |value| format!("`{value}`"));
            let mut help = flag.get_help().expect("every option is explained").to_string();
            let values: Vec<String> = flag
                .get_possible_values()
                .iter()
                .map(|value| {
                    let help = value.get_help().map_or(String::new(), |help| format!(" ({help})"));
                    format!("`{}`{help}", value.get_name())
                })
                .collect();
            if !values.is_empty() && !["keep-best", "nesterov"].contains(&key) {
                let _ = write!(help, ": {}", values.join(", "));
            }
            let _ = writeln!(text, "| `{key}` | {default} | {help} |");
        }
        text
    }

    #[test]
    fn the_document_is_that_of_the_options() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/config.md");
        if std::env::var_os("STORM_WRITE_DOCS").is_some() {
            std::fs::write(path, document()).expect("docs can be written");
        }
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            written == document(),
            "docs/config.md is out of date: STORM_WRITE_DOCS=1 cargo test -p storm-cli reference"
        );
    }

    #[test]
    fn help_names_defaults() {
        let command = Command::new("storm").subcommand(Given::augment_args(Command::new("train")));
        let mut command = with_defaults(command);
        let train = command.find_subcommand_mut("train").expect("there");
        let help = train.render_help().to_string();
        assert!(help.contains("[default: runs]") && help.contains("[default: cosine]"), "{help}");
    }
}
