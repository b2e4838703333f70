//! `storm export`: checks a model and writes it as a Hugging Face directory.

use crate::source::{AnySource, ModelSource, Which};
use crate::{size, streams};
use anyhow::Result;
use clap::{Args, ValueEnum};
use std::ops::Range;
use std::path::PathBuf;
use storm_model::{
    IfExists, ParameterSource, ParameterSpec, SaveOptions, WeightDtype, save_adapter,
};

#[derive(Args)]
pub(crate) struct ExportArgs {
    /// Model to export: a Hugging Face directory, a run's folder (its newest checkpoint), a checkpoint's folder, or a
    /// model on the hub (`OWNER/MODEL`). Of a LoRA run or an adapter, the adapter is written.
    input: PathBuf,
    /// Directory to write. It must not exist, unless --replace is given.
    output: PathBuf,
    /// Data type of the written weights. Default: bf16; f32 for image classifiers.
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
    /// Largest size of a weight file.
    #[arg(long, default_value = "5GB", value_parser = size::parse)]
    shard_size: u64,
    /// Replace the output directory if it holds a model.
    #[arg(long)]
    replace: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    which: Which,
}

#[derive(Clone, Copy, ValueEnum)]
enum DtypeArg {
    F32,
    Bf16,
}

pub(crate) fn run(args: &ExportArgs) -> Result<()> {
    let source = AnySource::open(&args.input, &args.which)?;
    if let AnySource::Language(source) = &source
        && source.config.adapters.is_some()
    {
        return export_adapter(args, source);
    }
    let (model, files) = (
        source.model(),
        match &source {
            AnySource::Language(source) => source.files.clone(),
            AnySource::Image(_) => None,
        },
    );
    let options = SaveOptions {
        dtype: match args.dtype {
            Some(DtypeArg::F32) => WeightDtype::F32,
            Some(DtypeArg::Bf16) => WeightDtype::Bf16,
            None => model.saved_dtype(WeightDtype::Bf16),
        },
        shard_bytes: args.shard_size,
        source: files.as_deref(),
        if_exists: if args.replace { IfExists::Replace } else { IfExists::Refuse },
    };
    let total = model.parameter_count();
    let mut current = Loaded::new(total);
    model.save(&args.output, &options, |spec, range, dest: &mut [f32]| {
        current.provide(&source, spec, range, dest)?;
        Ok(())
    })?;
    current.progress.finish();
    if args.json {
        let output = args.output.display().to_string();
        println!("{}", serde_json::json!({"output": output, "parameters": total}));
        return Ok(());
    }
    println!("wrote {total} parameters to {}", args.output.display());
    Ok(())
}

/// Writes adapters in PEFT's format; `storm merge` turns them into a whole model.
fn export_adapter(args: &ExportArgs, source: &ModelSource) -> Result<()> {
    let if_exists = if args.replace { IfExists::Replace } else { IfExists::Refuse };
    let base = source.files.as_ref().and_then(|files| files.canonicalize().ok());
    let base = base.map(|base| base.display().to_string());
    let mut total = 0;
    save_adapter(&args.output, &source.config, base.as_deref(), if_exists, |spec, dest| {
        total += dest.len() as u64;
        Ok(source.weights.load(spec, dest)?)
    })?;
    if args.json {
        let output = args.output.display().to_string();
        println!("{}", serde_json::json!({"output": output, "parameters": total}));
        return Ok(());
    }
    println!("wrote an adapter of {total} parameters to {}", args.output.display());
    Ok(())
}

/// The parameter being written.
struct Loaded {
    name: String,
    values: Vec<f32>,
    progress: Progress,
}

impl Loaded {
    fn new(total: u64) -> Loaded {
        Loaded { name: String::new(), values: Vec::new(), progress: Progress { done: 0, total } }
    }

    fn provide(
        &mut self,
        weights: &AnySource,
        spec: &ParameterSpec,
        range: Range<usize>,
        dest: &mut [f32],
    ) -> Result<(), storm_model::ModelError> {
        if self.name != spec.name {
            self.values.resize(spec.element_count(), 0.0);
            weights.load(spec, &mut self.values)?;
            self.name.clone_from(&spec.name);
            self.progress.advance(spec.element_count() as u64, &spec.name);
        }
        dest.copy_from_slice(&self.values[range]);
        Ok(())
    }
}

/// A status line that is overwritten in place; prints nothing without a terminal.
struct Progress {
    done: u64,
    total: u64,
}

impl Progress {
    fn advance(&mut self, parameters: u64, name: &str) {
        self.done = (self.done + parameters).min(self.total);
        streams::status(&format!("{:3} % {name}", 100 * self.done / self.total.max(1)));
    }

    fn finish(&self) {
        streams::status("");
    }
}
