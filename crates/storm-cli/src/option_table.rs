//! `storm option-table`: every command and option as JSON, for tests that run all of them.

use clap::{Arg, ArgAction, Command};
use serde_json::{Value, json};

/// Prints one JSON object per command, with its words and options.
pub(crate) fn print(command: &Command) {
    for line in commands(command, &[]) {
        println!("{line}");
    }
}

/// The runnable commands at and below `command`.
fn commands(command: &Command, parents: &[&str]) -> Vec<Value> {
    let below = command.get_subcommands().flat_map(|below| {
        let words = [parents, &[below.get_name()]].concat();
        commands(below, &words)
    });
    let mut found: Vec<Value> = below.collect();
    if found.is_empty() {
        let options: Vec<Value> = command.get_arguments().map(option).collect();
        found.push(json!({
            "command": parents,
            "hidden": command.is_hide_set(),
            "options": options,
        }));
    }
    found
}

fn option(arg: &Arg) -> Value {
    let is_switch = !matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    let values = arg.get_possible_values();
    json!({
        "name": arg.get_id().as_str(),
        "flag": arg.get_long().map(|long| format!("--{long}")),
        "required": arg.is_required_set(),
        "switch": is_switch,
        "values": values.iter().map(|value| value.get_name()).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn every_command_is_there_with_its_options() {
        let found = commands(&crate::Cli::command(), &[]);
        let options = |words: &[&str]| {
            let of = found.iter().find(|entry| entry["command"] == json!(words));
            of.unwrap_or_else(|| panic!("{words:?} is missing"))["options"].clone()
        };
        for words in [&["train"][..], &["data", "pack"], &["bench", "cpu"], &["doctor"]] {
            assert!(options(words).as_array().is_some_and(|all| !all.is_empty()), "{words:?}");
        }
        let pack = options(&["data", "pack"]);
        let format = pack.as_array().unwrap().iter().find(|option| option["name"] == "format");
        assert_eq!(
            format.unwrap(),
            &json!({
                "name": "format", "flag": "--format", "required": false, "switch": false,
                "values": ["auto", "text", "jsonl", "json", "csv", "tsv", "parquet"],
            })
        );
    }
}
