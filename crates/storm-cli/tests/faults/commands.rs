//! Random command lines from the table of all options, with extreme values. Each must end soon,
//! with one of our exit codes, within its memory limit, and harm nothing that is not its own.

use crate::campaign::{self, Case, attack};
use crate::outcome::{Call, Verdict, Work};
use crate::random::Random;
use crate::stock::Stock;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use serde::Deserialize;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::symlink;
use std::path::Path;

/// Number of random command lines.
fn line_count() -> u64 {
    if campaign::is_whole() { 10_000 } else { 200 }
}

/// Stride through the numbers tried for each option in the short campaign.
const SWEEP_STRIDE: usize = 89;

/// A working call to mutate, and its weight in the draw.
struct Base {
    line: &'static str,
    weight: u64,
}

const BASES: &[Base] = &[
    Base { line: "train tiny.toml --json --name new --steps 1", weight: 30 },
    Base { line: "train tiny.toml --name run --steps 3 --resume", weight: 10 },
    Base {
        line: "train --quiet --name new --steps 1 --model gpt2 --layers 1 --width 8 --heads 1 --data text.txt --seq 8 \
               --vram 1GiB --ram 256MiB --device cpu --hardware reference --threads 1",
        weight: 10,
    },
    Base {
        line: "train tiny.toml --json --name new --epochs 0.1 --schedule wsd --dry-run",
        weight: 8,
    },
    Base {
        line: "train tiny.toml --json --name new --steps 1 --optimizer-state streamed --on-disk moments --disk runs \
               --disk-space 8MiB",
        weight: 4,
    },
    Base { line: "init new.toml --data text.txt --yes", weight: 4 },
    Base { line: "data pack text.txt --tokenizer bytes --out out", weight: 12 },
    Base {
        line: "data pack chat.jsonl --tokenizer tokenizer.json --chat-template plain --out out",
        weight: 4,
    },
    Base { line: "data pack chat.jsonl --tokenizer templated --out out", weight: 4 },
    Base { line: "data pack table.csv --tokenizer bytes --skip-bad --out out", weight: 2 },
    Base { line: "data pack images --codec zstd --out out", weight: 3 },
    Base { line: "data pack digits --out out", weight: 2 },
    Base { line: "data pack --synthetic 20 --shape 3,4 --out out", weight: 3 },
    Base { line: "data inspect data", weight: 5 },
    Base { line: "data inspect records --verify", weight: 2 },
    Base { line: "data estimate records --batch 2 --rate 100 --hardware reference", weight: 2 },
    Base {
        line: "data estimate records --batch 2 --model small-cnn --hardware reference",
        weight: 1,
    },
    Base {
        line: "data batches data --seq 8 --batch 2 --count 3 --out batches.safetensors",
        weight: 8,
    },
    Base { line: "eval model --data data --seq 8 --batches 1", weight: 8 },
    Base { line: "sample model --tokenizer bytes --prompt 7 --tokens 2", weight: 8 },
    Base { line: "chat model --tokenizer bytes --chat-template plain --tokens 2", weight: 4 },
    Base { line: "export model out", weight: 8 },
    Base { line: "export runs/run out", weight: 3 },
    Base { line: "merge adapter --base-model model --out out", weight: 4 },
    Base { line: "eval adapter --base-model model --data data --seq 8 --batches 1", weight: 3 },
    Base {
        line: "train --quiet --name new --steps 1 --model model --lora rank=2 --base int8 --data text.txt \
               --tokenizer bytes --seq 8 --vram 1GiB --ram 256MiB --device cpu --hardware reference --threads 1",
        weight: 6,
    },
    Base { line: "report runs/run", weight: 3 },
    Base { line: "model show model", weight: 2 },
    Base { line: "model list", weight: 1 },
    Base {
        line: "plan --model model --batch 1 --seq 8 --vram 1GiB --ram 256MiB --hardware reference",
        weight: 15,
    },
    Base {
        line: "plan --model qwen2.5-0.5b --batch 2 --seq 512 --ram 16GiB --vram 3GiB --hardware profile.json",
        weight: 5,
    },
    Base { line: "plan tiny.toml --hardware reference --vram 1GiB", weight: 4 },
    Base {
        line: "plan --model gpt2 --batch 1 --seq 64 --vram 1GiB --ram 1GiB --hardware reference --optimizer-state streamed \
               --on-disk second-moments --disk-space 4GB --disk-drives 2",
        weight: 4,
    },
    Base { line: "completions bash", weight: 1 },
    Base { line: "man out", weight: 1 },
    Base { line: "doctor", weight: 2 },
    Base { line: "probe --device cpu --out new.json", weight: 1 },
    Base {
        line: "verify --device cpu --data --data-size 6MB --data-ram 5MiB --data-batch 2 --data-seconds 0.01 --hardware \
               reference",
        weight: 1,
    },
    Base { line: "bench cpu --steps 1 --warmup 0", weight: 1 },
    Base {
        line: "bench train --device cpu --model gpt2 --layers 1 --batch 1 --seq 8 --accumulate 1 --chunk-rows 8 \
               --steps 1 --warmup 0",
        weight: 1,
    },
    Base {
        line: "bench curve --device cpu --model gpt2 --layers 1 --batch 1 --seq 8 --accumulate 1 --chunk-rows 8 \
               --steps 1 --warmup 0",
        weight: 1,
    },
    Base {
        line: "bench checkpoint --device cpu --model gpt2 --layers 1 --batch 1 --seq 8 --accumulate 1 --chunk-rows 8 \
               --vram 1GiB --ram 2GiB --steps 1 --warmup 0 --rounds 1",
        weight: 1,
    },
    Base {
        line: "bench predict tiny.toml --steps 10 --full 2 --correct 1 --probe-batches 2 --methods null --rates 1 --seeds 1 \
               --runs new",
        weight: 1,
    },
    Base { line: "bench loss tiny.toml --change --precision=f32 --seeds 1 --runs new", weight: 1 },
    Base {
        line: "bench generate --device cpu --model gpt2 --layers 1 --prompt 2 --tokens 2",
        weight: 1,
    },
];

/// These refuse to start without a GPU, and measure for minutes with one. Only the former can be
/// tested here.
const GPU_BASES: &[Base] = &[
    Base { line: "probe", weight: 1 },
    Base { line: "verify", weight: 1 },
    Base { line: "bench attention", weight: 1 },
];

/// Commands that do as much work as these options ask for. The user decides how much that is, so
/// they are interrupted. Planning is no such work: it must end by itself whatever the sizes.
const WORKING: [&str; 7] =
    ["train", "data batches", "data pack", "eval", "sample", "bench", "verify"];
const WORK_OPTIONS: [&str; 24] = [
    "--accumulate",
    "--batch",
    "--batches",
    "--count",
    "--data-batch",
    "--data-models",
    "--data-ram",
    "--data-seconds",
    "--data-size",
    "--eval-steps",
    "--layers",
    "--mlp-width",
    "--model",
    "--points",
    "--rounds",
    "--sample-tokens",
    "--seq",
    "--shape",
    "--steps",
    "--synthetic",
    "--tokens",
    "--tokens-per-step",
    "--warmup",
    "--width",
];

const NUMBERS: [&str; 36] = [
    "0",
    "1",
    "2",
    "3",
    "8",
    "64",
    "1000",
    "65536",
    "-0",
    "-1",
    "-2147483649",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "1099511627776",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775809",
    "18446744073709551615",
    "18446744073709551616",
    "340282366920938463463374607431768211456",
    "0.5",
    "1.5",
    "1e-5",
    "1e-320",
    "1e308",
    "1e400",
    "-1e308",
    "NaN",
    "-nan",
    "inf",
    "-inf",
    "0x10",
    "1_000",
    "٣",
];

const SIZES: [&str; 16] = [
    "0B",
    "1B",
    "1KiB",
    "10MB",
    "64MiB",
    "1GiB",
    "16GiB",
    "7.5GiB",
    "1e3MiB",
    "8999999999GB",
    "1e400GiB",
    "-1GiB",
    "NaNGB",
    "GiB",
    "5 parsecs",
    "1 GiB GiB",
];

/// Names in the folder of a case, and some that do not exist. No absolute path of a real device or
/// folder: a command that replaces the wrong file may only harm its own case.
const PATHS: [&str; 27] = [
    "",
    ".",
    "..",
    "./",
    "text.txt",
    "chat.jsonl",
    "tiny.toml",
    "tokenizer.json",
    "templated",
    "templated/chat_template.jinja",
    "profile.json",
    "data",
    "model",
    "sharded",
    "adapter",
    "runs",
    "runs/run",
    "runs/run/checkpoints",
    "fifo",
    "null",
    "zero",
    "full",
    "dangling",
    "empty",
    "missing/deep/path",
    "text.txt/below",
    "/proc/nothing/here",
];

const TEXTS: [&str; 14] = [
    "bytes",
    "gpt2",
    "list",
    "-",
    "--",
    "---",
    "=",
    "--help",
    "a\nb",
    "\u{1b}[31mred",
    "💥",
    "a b",
    "../out",
    "%s%n${HOME}$(id)",
];

/// Special files of a case.
const SPECIAL: [&str; 4] = ["fifo", "null", "zero", "full"];

/// A command as `storm option-table` prints it.
#[derive(Deserialize)]
struct TableRow {
    command: Vec<String>,
    hidden: bool,
    options: Vec<TableOption>,
}

#[derive(Deserialize)]
struct TableOption {
    flag: Option<String>,
    switch: bool,
    values: Vec<String>,
}

/// All commands and options.
fn table() -> Vec<TableRow> {
    let folder = tempfile::tempdir().expect("a folder");
    let outcome = Call::of("option-table").succeed(folder.path()).expect("the table");
    let lines = String::from_utf8(outcome.stdout).expect("text");
    lines.lines().map(|line| serde_json::from_str(line).expect("a row of the table")).collect()
}

/// A flag, a value, or both.
struct Item {
    flag: Option<String>,
    value: Option<OsString>,
}

/// The items of a base after the words of its command.
fn items(words: &[&str]) -> Vec<Item> {
    let mut items: Vec<Item> = Vec::new();
    for word in words {
        match items.last_mut() {
            _ if word.starts_with("--") => {
                items.push(Item { flag: Some((*word).to_owned()), value: None });
            }
            Some(last) if last.flag.is_some() && last.value.is_none() && !is_switch(last) => {
                last.value = Some(word.into());
            }
            _ => items.push(Item { flag: None, value: Some(word.into()) }),
        }
    }
    items
}

/// Whether it is one of the switches in the bases.
fn is_switch(item: &Item) -> bool {
    ["--json", "--quiet", "--resume"].contains(&item.flag.as_deref().unwrap_or_default())
}

/// Draws command lines.
struct Generator {
    table: Vec<TableRow>,
    bases: Vec<&'static Base>,
}

impl Generator {
    fn new() -> Generator {
        let mut bases: Vec<&Base> = BASES.iter().collect();
        if !Path::new("/proc/driver/nvidia").exists() {
            bases.extend(GPU_BASES);
        }
        Generator { table: table(), bases }
    }

    fn row(&self, line: &str) -> &TableRow {
        let is_of = |row: &&TableRow| {
            format!("{line} ").starts_with(&format!("{} ", row.command.join(" ")))
        };
        self.table.iter().find(is_of).unwrap_or_else(|| panic!("`{line}` is no command"))
    }

    /// A mutated base.
    fn draw(&self, random: &mut Random) -> Call {
        let total = self.bases.iter().map(|base| base.weight).sum();
        let mut at = random.below(total);
        let mut bases = self.bases.iter();
        let base = loop {
            let base = bases.next().expect("weights sum up");
            match at.checked_sub(base.weight) {
                Some(rest) => at = rest,
                None => break base,
            }
        };
        let row = self.row(base.line);
        let mut items = base.items(row);
        // Mostly one, because the first error hides the others.
        let edits = *random.pick(&[1, 1, 1, 2, 2, 3]);
        let edited: Vec<Option<String>> =
            (0..edits).map(|_| edit(&mut items, row, random)).collect();
        base.call(row, items, edited.iter().flatten(), random)
    }

    /// The first base of each command with each number for each option.
    fn sweep(&self) -> Vec<Case<Call>> {
        let mut cases = Vec::new();
        for row in &self.table {
            let is_of_row = |base: &&&Base| self.row(base.line).command == row.command;
            let Some(base) = self.bases.iter().find(is_of_row) else { continue };
            let takes_any = |option: &&TableOption| !option.switch && option.values.is_empty();
            for option in row.options.iter().filter(takes_any) {
                for number in NUMBERS {
                    let mut items = base.items(row);
                    set(&mut items, option, Some(number.into()));
                    let mut random = Random::new(cases.len() as u64);
                    let what = base.call(row, items, option.flag.iter(), &mut random);
                    cases.push(Case { name: format!("sweep-{}", cases.len()), what });
                }
            }
        }
        cases
    }
}

impl Base {
    /// The items after the words of the command.
    fn items(&self, row: &TableRow) -> Vec<Item> {
        items(&self.line.split_whitespace().skip(row.command.len()).collect::<Vec<_>>())
    }

    /// The call with these items. Options in `edited` have new values.
    fn call<'a>(
        &self,
        row: &TableRow,
        items: Vec<Item>,
        mut edited: impl Iterator<Item = &'a String>,
        random: &mut Random,
    ) -> Call {
        let works = WORKING.iter().any(|command| self.line.starts_with(command));
        let is_endless = self.line.starts_with("bench")
            || works && edited.any(|flag| WORK_OPTIONS.contains(&flag.as_str()));
        let mut words: Vec<OsString> = row.command.iter().map(Into::into).collect();
        for Item { flag, value } in items {
            match (flag, value) {
                // Without `=`, a value that begins with a dash is taken for a flag.
                (Some(flag), Some(value)) if random.below(4) > 0 => {
                    let mut word = OsString::from(flag + "=");
                    word.push(value);
                    words.push(word);
                }
                (flag, value) => {
                    words.extend(flag.map(OsString::from));
                    words.extend(value);
                }
            }
        }
        let work = if is_endless { Work::Endless } else { Work::Bounded };
        Call::new(words).with_work(work)
    }
}

/// Sets the value of an option, and replaces the one it has.
fn set(items: &mut Vec<Item>, option: &TableOption, value: Option<OsString>) {
    match items.iter_mut().find(|item| item.flag == option.flag) {
        Some(item) => item.value = value,
        None => items.push(Item { flag: option.flag.clone(), value }),
    }
}

/// Changes a command line in one place, and returns the option that has a new value.
fn edit(items: &mut Vec<Item>, row: &TableRow, random: &mut Random) -> Option<String> {
    match random.below(20) {
        // Remove, duplicate, or add something.
        0 if !items.is_empty() => return items.remove(random.index(items.len())).flag,
        1 if !items.is_empty() => {
            let Item { flag, value } = &items[random.index(items.len())];
            let doubled = Item { flag: flag.clone(), value: value.clone() };
            items.push(doubled);
        }
        2 => items.push(Item { flag: None, value: Some(value(&[], random)) }),
        3 => items.push(Item { flag: Some("--help".to_owned()), value: None }),
        _ if row.options.is_empty() => {
            items.push(Item { flag: None, value: Some(value(&[], random)) });
        }
        _ => {
            let option = random.pick(&row.options);
            let value =
                (!option.switch || random.below(8) == 0).then(|| value(&option.values, random));
            set(items, option, value);
            return option.flag.clone();
        }
    }
    None
}

fn value(possible: &[String], random: &mut Random) -> OsString {
    if !possible.is_empty() && random.below(4) > 0 {
        return random.pick(possible).into();
    }
    match random.below(20) {
        0..9 => random.pick(&NUMBERS).into(),
        9..12 => random.pick(&SIZES).into(),
        12..17 => random.pick(&PATHS).into(),
        17 => "x".repeat(1 << random.below(17)).into(),
        18 => OsString::from_vec(
            (0..1 + random.below(8)).map(|_| 128 + random.below(128) as u8).collect(),
        ),
        _ => random.pick(&TEXTS).into(),
    }
}

/// Adds special, dangling, and empty files to the folder of a case.
fn add_special(folder: &Path) {
    let path = |name: &str| folder.join(name);
    mknodat(CWD, path("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a FIFO");
    for (name, minor) in [("null", 3), ("zero", 5), ("full", 7)] {
        let mode = Mode::RUSR | Mode::WUSR;
        // Only root can create devices. For others, links do as well.
        if mknodat(CWD, path(name), FileType::CharacterDevice, mode, makedev(1, minor)).is_err() {
            symlink(Path::new("/dev").join(name), path(name)).expect("a link");
        }
    }
    symlink("nowhere", path("dangling")).expect("a link");
    fs::write(path("empty"), "").expect("a file");
}

fn check(stock: &Stock, call: &Call) -> Result<Verdict, String> {
    let all = [
        "text.txt",
        "chat.jsonl",
        "tiny.toml",
        "tokenizer.json",
        "templated",
        "profile.json",
        "data",
        "model",
        "runs",
        "sharded",
        "adapter",
        "images",
        "digits",
        "records",
    ];
    let folder = stock.copy(&all);
    add_special(folder.path());
    let kind =
        |name: &str| fs::symlink_metadata(folder.path().join(name)).map(|of| of.file_type()).ok();
    let before = SPECIAL.map(kind);
    let outcome = call.run(folder.path());
    if !outcome.verdict.is_fine() {
        return Err(format!("`{call}`: {outcome}"));
    }
    match SPECIAL.iter().zip(before).find(|(name, before)| kind(name) != *before) {
        Some((name, _)) => Err(format!("`{call}` replaced the special file `{name}`")),
        None => Ok(outcome.verdict),
    }
}

#[test]
fn command_lines_end_well_or_in_words() {
    let (stock, generator) = (Stock::new(), Generator::new());
    let case = |number: u64| {
        let mut random = Random::of_case(campaign::seed(), number);
        Case { name: number.to_string(), what: generator.draw(&mut random) }
    };
    let stride = if campaign::is_whole() { 1 } else { SWEEP_STRIDE };
    let sweep = generator.sweep().into_iter().step_by(stride);
    let cases = (0..line_count()).map(case).chain(sweep).collect();
    attack("command_lines_end_well_or_in_words", cases, |call| check(&stock, call));
}

/// New commands must be attacked, too.
#[test]
fn every_command_has_a_base() {
    let bases: Vec<&str> = BASES.iter().chain(GPU_BASES).map(|base| base.line).collect();
    for row in table().iter().filter(|row| !row.hidden) {
        let words = row.command.join(" ");
        let is_there = bases
            .iter()
            .any(|line| OsStr::new(line) == &*words || line.starts_with(&format!("{words} ")));
        assert!(is_there, "`storm {words}` is not among the commands that are attacked");
    }
}
