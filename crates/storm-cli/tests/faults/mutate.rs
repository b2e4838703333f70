//! Damaged files of every kind, each given to a command that reads it. It must report an error, or
//! give the same result.

use crate::campaign::{self, Case, attack};
use crate::made::Made;
use crate::mutation::mutate;
use crate::outcome::{Call, Outcome, Verdict};
use crate::random::Random;
use crate::stock::Stock;
use std::fs;
use std::path::Path;

/// Mutants of each kind of file.
fn mutants_per_kind() -> u64 {
    if campaign::is_whole() { 650 } else { 18 }
}

/// What must be the same if a damaged file is accepted.
#[derive(Clone, Copy)]
enum Same {
    /// Nothing: the file has no checksum, and tells the command what to do.
    Nothing,
    /// What the command prints.
    Output,
    /// The file that it writes.
    File(&'static str),
    /// Everything that it writes in this folder.
    Made(&'static str),
    /// The weights that it writes there.
    Weights(&'static str),
}

/// A file, and commands that read it.
struct Kind {
    name: &'static str,
    file: &'static str,
    needs: &'static [&'static str],
    readers: &'static [(&'static str, Same)],
}

/// A run of one step. Its flags set its size, whatever a config file says.
const TRAIN: &str = "train tiny.toml --json --name new --steps 1 --layers 2 --width 16 --heads 2 --seq 16 --batch 2 \
                     --device cpu --threads 2 --vram 1GiB --ram 256MiB --hardware reference";

const RESUME: &str = "train tiny.toml --json --name run --steps 4 --resume";

const DATASET: &[(&str, Same)] = &[
    ("data inspect data --verify --json", Same::Output),
    ("data batches data --seq 8 --batch 2 --count 40 --out batches", Same::File("batches")),
    (TRAIN, Same::Made("runs/new")),
];

const RUN: &[&str] = &["tiny.toml", "data", "runs"];

/// A dataset of records.
const RECORDS: &[(&str, Same)] = &[("data inspect records --verify --json", Same::Output)];

const KINDS: [Kind; 26] = [
    Kind {
        name: "config-toml",
        file: "tiny.toml",
        needs: &["tiny.toml", "data"],
        readers: &[(TRAIN, Same::Nothing)],
    },
    Kind {
        name: "config-json",
        file: "model/config.json",
        needs: &["model"],
        readers: &[
            ("export model out/new", Same::Nothing),
            ("model show model", Same::Nothing),
            (
                "plan --model model --batch 1 --seq 8 --vram 1GiB --ram 256MiB --hardware reference",
                Same::Nothing,
            ),
        ],
    },
    Kind {
        name: "tokenizer-json",
        file: "tokenizer.json",
        needs: &["tokenizer.json", "text.txt", "model"],
        readers: &[
            (
                "data pack text.txt --tokenizer tokenizer.json --threads 2 --out out/new",
                Same::Nothing,
            ),
            ("sample model --tokenizer tokenizer.json --prompt 7 --tokens 2", Same::Nothing),
        ],
    },
    Kind {
        name: "safetensors",
        file: "model/model.safetensors",
        needs: &["model", "data"],
        readers: &[
            ("export model out/new", Same::Nothing),
            ("eval model --data data --seq 8 --batches 1", Same::Nothing),
            ("sample model --tokenizer bytes --prompt 7 --tokens 2", Same::Nothing),
        ],
    },
    Kind {
        name: "adapter-json",
        file: "adapter/adapter_config.json",
        needs: &["adapter", "model"],
        readers: &[("merge adapter --base-model model --out out/new", Same::Nothing)],
    },
    Kind {
        name: "adapter-weights",
        file: "adapter/adapter_model.safetensors",
        needs: &["adapter", "model"],
        readers: &[("merge adapter --base-model model --out out/new", Same::Nothing)],
    },
    Kind {
        name: "index-json",
        file: "sharded/model.safetensors.index.json",
        needs: &["sharded"],
        readers: &[("export sharded out/new", Same::Nothing)],
    },
    Kind {
        name: "dataset-shard",
        file: "data/shard-00000.storm",
        needs: &["tiny.toml", "data"],
        readers: DATASET,
    },
    Kind {
        name: "dataset-starts",
        file: "data/starts-00000.storm",
        needs: &["tiny.toml", "data"],
        readers: DATASET,
    },
    Kind {
        name: "dataset-manifest",
        file: "data/dataset.json",
        needs: &["tiny.toml", "data"],
        readers: DATASET,
    },
    Kind {
        name: "dataset-checksum",
        file: "data/dataset.sha256",
        needs: &["tiny.toml", "data"],
        readers: DATASET,
    },
    Kind {
        name: "records-shard",
        file: "records/shard-00000.storm",
        needs: &["records"],
        readers: RECORDS,
    },
    Kind {
        name: "records-manifest",
        file: "records/dataset.json",
        needs: &["records"],
        readers: RECORDS,
    },
    Kind {
        name: "image-png",
        file: "images/one/a.png",
        needs: &["images"],
        readers: &[("data pack images --out out/new", Same::Nothing)],
    },
    Kind {
        name: "image-jpeg",
        file: "images/two/b.jpg",
        needs: &["images"],
        readers: &[
            ("data pack images --out out/new", Same::Nothing),
            ("data pack images --skip-bad --codec lz4 --out out/new", Same::Nothing),
        ],
    },
    Kind {
        name: "idx",
        file: "digits/train-images-idx3-ubyte",
        needs: &["digits"],
        readers: &[("data pack digits --out out/new", Same::Nothing)],
    },
    Kind {
        name: "checkpoint-manifest",
        file: "runs/run/checkpoints/step-00000002/manifest.json",
        needs: RUN,
        readers: &[(RESUME, Same::Made("runs/run"))],
    },
    Kind {
        name: "checkpoint-parameters",
        file: "runs/run/checkpoints/step-00000002/parameters.safetensors",
        needs: RUN,
        readers: &[(RESUME, Same::Made("runs/run"))],
    },
    Kind {
        name: "checkpoint-optimizer",
        file: "runs/run/checkpoints/step-00000002/optimizer.safetensors",
        needs: RUN,
        readers: &[(RESUME, Same::Made("runs/run"))],
    },
    Kind {
        name: "metrics",
        file: "runs/run/metrics.jsonl",
        needs: RUN,
        readers: &[(RESUME, Same::Weights("runs/run"))],
    },
    Kind {
        name: "config-of-run",
        file: "runs/run/config.toml",
        needs: RUN,
        readers: &[(RESUME, Same::Weights("runs/run"))],
    },
    Kind {
        name: "hardware-profile",
        file: "profile.json",
        needs: &["profile.json", "model"],
        readers: &[(
            "plan --model model --batch 1 --seq 8 --vram 1GiB --ram 256MiB --hardware profile.json",
            Same::Nothing,
        )],
    },
    Kind {
        name: "jsonl",
        file: "chat.jsonl",
        needs: &["chat.jsonl", "templated"],
        readers: &[
            (
                "data pack chat.jsonl --tokenizer bytes --chat-template plain --threads 2 --out out/new",
                Same::Nothing,
            ),
            ("data pack chat.jsonl --tokenizer templated --threads 2 --out out/new", Same::Nothing),
        ],
    },
    Kind {
        name: "chat-template",
        file: "templated/chat_template.jinja",
        needs: &["chat.jsonl", "templated"],
        readers: &[(
            "data pack chat.jsonl --tokenizer templated --threads 2 --out out/new",
            Same::Nothing,
        )],
    },
    Kind {
        name: "tokenizer-config",
        file: "templated/tokenizer_config.json",
        needs: &["chat.jsonl", "templated"],
        readers: &[(
            "data pack chat.jsonl --tokenizer templated --threads 2 --out out/new",
            Same::Nothing,
        )],
    },
    Kind {
        name: "text",
        file: "text.txt",
        needs: &["text.txt", "tokenizer.json"],
        readers: &[
            ("data pack text.txt --tokenizer bytes --threads 2 --out out/new", Same::Nothing),
            (
                "data pack text.txt --tokenizer tokenizer.json --threads 2 --out out/new",
                Same::Nothing,
            ),
        ],
    },
];

/// A damaged file and its reader.
struct Mutant {
    kind: usize,
    number: u64,
}

impl Mutant {
    fn check(&self, stock: &Stock, undisturbed: &[Vec<Compared>]) -> Result<Verdict, String> {
        let kind = &KINDS[self.kind];
        let mut random = Random::of_case(campaign::seed(), self.number);
        let reader = random.index(kind.readers.len());
        let (line, same) = kind.readers[reader];
        let folder = stock.copy(kind.needs);
        let file = folder.path().join(kind.file);
        let mut bytes = fs::read(&file).expect("a file of the stock");
        mutate(&mut bytes, &mut random);
        fs::write(&file, bytes).expect("the damaged file");
        let outcome = Call::of(line).run(folder.path());
        let problem = match outcome.verdict {
            Verdict::Success => Compared::new(same, folder.path(), &outcome)
                .difference(&undisturbed[self.kind][reader]),
            verdict if verdict.is_fine() => None,
            _ => Some(outcome.to_string()),
        };
        problem.map_or(Ok(outcome.verdict), |problem| Err(format!("`storm {line}`: {problem}")))
    }
}

/// What to compare.
enum Compared {
    Nothing,
    Output(Vec<u8>),
    Made(Made),
    Weights(Made),
}

impl Compared {
    fn new(same: Same, folder: &Path, outcome: &Outcome) -> Compared {
        match same {
            Same::Nothing => Compared::Nothing,
            Same::Output => Compared::Output(outcome.stdout.clone()),
            Same::File(file) => Compared::Output(fs::read(folder.join(file)).unwrap_or_default()),
            Same::Made(made) => Compared::Made(Made::at(&folder.join(made))),
            Same::Weights(made) => Compared::Weights(Made::at(&folder.join(made))),
        }
    }

    fn difference(&self, undisturbed: &Compared) -> Option<String> {
        match (self, undisturbed) {
            (Compared::Output(ours), Compared::Output(theirs)) => {
                (ours != theirs).then(|| "it is accepted, and the result is another".to_owned())
            }
            (Compared::Made(ours), Compared::Made(theirs)) => ours.difference(theirs),
            (Compared::Weights(ours), Compared::Weights(theirs)) => ours.other_bytes(theirs),
            _ => None,
        }
    }
}

#[test]
fn damaged_files_are_refused_or_harmless() {
    let stock = Stock::new();
    let whole = |kind: &Kind| {
        let result = |&(line, same): &(&str, Same)| {
            let folder = stock.copy(kind.needs);
            let outcome = Call::of(line).succeed(folder.path());
            Compared::new(
                same,
                folder.path(),
                &outcome.unwrap_or_else(|problem| panic!("{problem}")),
            )
        };
        kind.readers.iter().map(result).collect()
    };
    let undisturbed: Vec<Vec<Compared>> = KINDS.iter().map(whole).collect();
    let kinds = 0..KINDS.len();
    let case = |kind: usize, number: u64| Case {
        name: format!("{}/{number}", KINDS[kind].name),
        what: Mutant { kind, number },
    };
    let cases =
        kinds.flat_map(|kind| (0..mutants_per_kind()).map(move |number| case(kind, number)));
    attack("damaged_files_are_refused_or_harmless", cases.collect(), |mutant| {
        mutant.check(&stock, &undisturbed)
    });
}
