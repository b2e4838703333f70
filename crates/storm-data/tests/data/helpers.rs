//! Folders of files to pack.

use proptest::test_runner::{Config as ProptestConfig, RngSeed};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;
use storm_data::records::Codec;
use storm_data::{
    ChatTemplate, DataError, Dataset, IfExists, InputFormat, Loader, LoaderOptions, PackOptions,
    PackSummary, Samples, SpecialTokens, TokenizerSource, WorkerCommand, pack,
};
use tempfile::TempDir;

/// A folder that is removed at the end of the test.
pub(crate) struct Folder {
    path: PathBuf,
    /// None if another process removes it.
    _owned: Option<TempDir>,
}

impl Folder {
    pub(crate) fn new() -> Folder {
        let owned = tempfile::tempdir().unwrap();
        Folder { path: owned.path().to_owned(), _owned: Some(owned) }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        path
    }

    /// What is in the folder, including hidden files.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.path).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Options that pack these files with bytes for tokens into `out`.
    pub(crate) fn options(&self, inputs: &[&Path]) -> PackOptions {
        PackOptions {
            inputs: inputs.iter().map(|path| path.to_path_buf()).collect(),
            format: InputFormat::ByName,
            tokenizer: TokenizerSource::Bytes,
            end_of_text: None,
            chat_template: ChatTemplate::Plain,
            special_tokens: SpecialTokens::Parsed,
            worker: worker(),
            out: self.path("out"),
            if_exists: IfExists::Refuse,
            held_out: 0.0,
            codec: Codec::None,
            skip_bad: false,
            threads: 2,
            shard_tokens: 100,
        }
    }

    /// A copy of a dataset of version 1, which nothing writes any more: `text` is [`version_1_text`], `samples` are
    /// [`version_1_samples`] with a tenth held out.
    pub(crate) fn version_1(&self, name: &str) -> PathBuf {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/version-1").join(name);
        let to = self.path(&format!("version-1-{name}"));
        fs::create_dir(&to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
        to
    }

    /// Packs a text of this many bytes, which makes one token more.
    pub(crate) fn text_dataset(&self, bytes: usize, held_out: f64) -> Arc<Dataset> {
        let text: String = (0..bytes).map(|i| char::from(b'a' + (i * i % 26) as u8)).collect();
        let input = self.write("input.txt", text);
        let options = PackOptions { held_out, ..self.options(&[&input]) };
        packed(&options).unwrap();
        Arc::new(Dataset::open(&options.out).unwrap())
    }
}

/// What `version-1/text` was packed from.
pub(crate) fn version_1_text() -> String {
    let letters = |count: u64, power: u32| -> String {
        (0..count).map(|i| char::from(b'a' + (i.pow(power) % 26) as u8)).collect()
    };
    letters(9000, 2) + "<|endoftext|>" + &letters(3000, 3)
}

/// What `version-1/samples` was packed from.
pub(crate) fn version_1_samples() -> String {
    let line = |i| format!("{{\"prompt\": \"question {i}\", \"completion\": \"answer {i}\"}}\n");
    (0..40).map(line).collect()
}

/// Tells a test that it runs in a child process, and on which folder.
const RERUN: &str = "STORM_TEST_RERUN";

/// Runs a test of this binary again in a child process, which may be killed.
pub(crate) fn rerun(test: &str, folder: &Folder) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(RERUN, folder.path(""));
    command.output().unwrap()
}

/// The folder to work on, in the child process.
pub(crate) fn rerun_folder() -> Option<Folder> {
    std::env::var_os(RERUN).map(|path| Folder { path: path.into(), _owned: None })
}

pub(crate) fn worker() -> WorkerCommand {
    let program = env!("CARGO_BIN_EXE_storm-data-worker").into();
    WorkerCommand { program, arguments: Vec::new(), reply_time_max: Duration::from_secs(300) }
}

pub(crate) fn packed(options: &PackOptions) -> Result<PackSummary, DataError> {
    pack(options, &|_| {})
}

/// Shuffled training rows without end.
pub(crate) fn training(batch: usize, sequence: usize, seed: u64) -> LoaderOptions {
    LoaderOptions::training(batch, sequence, seed)
}

/// The next `count` batches.
pub(crate) fn batches(loader: &mut Loader, count: usize) -> Vec<Samples> {
    (0..count)
        .map(|_| {
            let mut samples = Samples::default();
            loader.next_batch(&mut samples).unwrap();
            samples
        })
        .collect()
}

/// The same cases in every run.
pub(crate) fn seeded() -> ProptestConfig {
    let (rng_seed, failure_persistence) = (RngSeed::Fixed(7), None);
    ProptestConfig { cases: 24, rng_seed, failure_persistence, ..ProptestConfig::default() }
}
