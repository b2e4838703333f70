//! The runs to compare. Each is a separate `storm train` process.

use super::compare::Curve;
use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use storm_files::open_plain;
use storm_train::{Event, RunError, Sink, StepRecord, read_metrics};

/// Maximum bytes read of a config. `storm train` refuses longer ones.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// A way to run the config.
pub(super) struct Variant {
    /// Name shown to users.
    pub(super) name: String,
    /// Flags for `storm train`.
    pub(super) flags: Vec<String>,
}

impl Variant {
    /// The config as it is.
    pub(super) fn unchanged() -> Variant {
        Variant { name: "as it is".to_owned(), flags: Vec::new() }
    }

    pub(super) fn new(flags: &str) -> Variant {
        let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
        let name = flags.join(" ").replace("--", "");
        Variant { name, flags }
    }
}

pub(super) struct Runs<'a> {
    config: &'a Path,
    folder: &'a Path,
    /// Hash of the config, so that runs of another config are not mistaken for runs of this one.
    hash: String,
}

impl<'a> Runs<'a> {
    pub(super) fn new(config: &'a Path, folder: &'a Path) -> Result<Runs<'a>> {
        let cannot = || format!("cannot read {}", config.display());
        let mut text = Vec::new();
        let file = open_plain(config).with_context(cannot)?;
        file.take(CONFIG_BYTES_MAX).read_to_end(&mut text).with_context(cannot)?;
        Ok(Runs { config, folder, hash: hex(&Sha256::digest(&text)) })
    }

    /// Trains a variant with a seed, unless that is already done, and returns its losses.
    pub(super) fn curve(&self, variant: &Variant, seed: u64) -> Result<Curve> {
        let flags = hex(&Sha256::digest(variant.flags.join("\n")));
        let name = format!("{}-{flags}-{seed}", self.hash);
        let folder = self.folder.join(&name);
        let mut command =
            Command::new(std::env::current_exe().context("cannot find storm itself")?);
        command.arg("train").arg(self.config).arg("--quiet").args(["--name", &name]);
        command.arg("--runs").arg(self.folder).args(["--seed", &seed.to_string()]);
        command.args(&variant.flags);
        if folder.join("checkpoints").is_dir() {
            command.arg("--resume");
        }
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
        let status = status.context("cannot start storm train")?;
        if !status.success() {
            bail!("the run {} of \"{}\" ended early ({status})", folder.display(), variant.name);
        }
        let metrics = folder.join("metrics.jsonl");
        let mut curve = Curve::default();
        read_metrics(&metrics, &mut Collect(&mut curve))?;
        if curve.held_out.is_empty() || curve.steps.is_empty() {
            bail!(
                "{} has no held-out loss: the config needs eval-every and held-out data",
                PathBuf::from(&metrics).display()
            );
        }
        Ok(curve)
    }
}

fn hex(hash: &[u8]) -> String {
    hash[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Collects every loss.
struct Collect<'c>(&'c mut Curve);

impl Sink for Collect<'_> {
    fn step(&mut self, record: &StepRecord) -> Result<(), RunError> {
        self.0.steps.push((record.step, f64::from(record.loss)));
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        if let Event::Evaluated { step, loss, .. } = event {
            self.0.held_out.push((*step, *loss));
        }
        Ok(())
    }
}
