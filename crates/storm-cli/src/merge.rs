//! `storm merge`: merges an adapter into its base weights.

use crate::eval::{self, EvalArgs};
use crate::size::{self, positive};
use crate::source::{AnySource, ModelSource, Weights, Which};
use crate::{UsageError, streams};
use anyhow::Result;
use clap::{Args, ValueEnum};
use std::ops::Range;
use std::path::{Path, PathBuf};
use storm_model::{
    BaseFormat, Dequantized, Dtype, HfDirectory, IfExists, ModelConfig, ModelError,
    ParameterLayout, ParameterSpec, SaveOptions, WeightDtype, merge, save,
};

#[derive(Args)]
pub(crate) struct MergeArgs {
    /// Adapter directory, or the folder of a LoRA run (its newest checkpoint).
    adapter: PathBuf,
    /// Directory to write. It must not exist, unless --replace is given.
    #[arg(long)]
    out: PathBuf,
    #[command(flatten)]
    which: Which,
    /// Data type of the written weights. Default: that of the base.
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
    /// Which base weights to add the adapter to.
    #[arg(long, value_enum, default_value_t = Onto::Original)]
    onto: Onto,
    /// Largest size of a weight file.
    #[arg(long, default_value = "5GB", value_parser = size::parse)]
    shard_size: u64,
    /// Replace the output directory if it holds a model.
    #[arg(long)]
    replace: bool,
    /// Dataset that `storm data pack` wrote: also print the held-out loss of base, adapter and merged model.
    #[arg(long)]
    data: Option<PathBuf>,
    /// For --data: tokens per sequence.
    #[arg(long, default_value_t = 1024, value_parser = positive, requires = "data")]
    seq: usize,
    /// For --data: number of batches, of four sequences each, to evaluate. Default: all.
    #[arg(long, value_parser = positive, requires = "data")]
    batches: Option<usize>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum DtypeArg {
    F32,
    Bf16,
}

/// Weights of the base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Onto {
    /// The weights in the base's directory.
    Original,
    /// The weights as the run had them, rounded to int8 or nf4 (`base = "int8"` or `"nf4"`).
    Dequantized,
}

pub(crate) fn run(args: &MergeArgs) -> Result<()> {
    let source = ModelSource::open(&args.adapter, &args.which)?;
    let base = match &source.weights {
        Weights::Adapter(adapted) => adapted.base(),
        Weights::Adapted(adapted) => adapted.base(),
        Weights::Directory(_) | Weights::Checkpoint(_) => {
            let problem = format!(
                "{} has no adapter to merge; name an adapter directory or the folder of a LoRA run",
                args.adapter.display()
            );
            return Err(UsageError(problem).into());
        }
    };
    if args.onto == Onto::Dequantized && source.config.base == BaseFormat::Computed {
        let problem = format!(
            "--onto dequantized is for adapters that were trained beside a base in 8 or 4 bits, and {} was not; leave it out",
            args.adapter.display()
        );
        return Err(UsageError(problem).into());
    }
    let config =
        ModelConfig { adapters: None, base: BaseFormat::Computed, ..source.config.clone() };
    let options = SaveOptions {
        dtype: match args.dtype {
            Some(DtypeArg::F32) => WeightDtype::F32,
            Some(DtypeArg::Bf16) => WeightDtype::Bf16,
            None => dtype_of(base)?,
        },
        shard_bytes: args.shard_size,
        source: source.files.as_deref(),
        if_exists: if args.replace { IfExists::Replace } else { IfExists::Refuse },
    };
    let mut current = Merged::default();
    save(&args.out, &config, &options, |spec, range, dest: &mut [f32]| {
        Ok(current.provide(&source, args.onto, spec, range, dest)?)
    })?;
    streams::status("");
    let base = base.path().to_owned();
    let losses = args.data.as_ref().map(|data| losses(args, data, source, &base)).transpose()?;
    let out = args.out.display();
    if args.json {
        let losses = losses.map(|[base, adapter, merged]| {
            serde_json::json!({"base": base, "adapter": adapter, "merged": merged})
        });
        println!("{}", serde_json::json!({"output": out.to_string(), "losses": losses}));
        return Ok(());
    }
    println!("wrote {} parameters to {out}", config.parameter_count());
    if let Some([base, adapter, merged]) = losses {
        println!("held-out loss: base {base:.4}, adapter {adapter:.4}, merged {merged:.4}");
    }
    Ok(())
}

/// The data type of the base weights.
fn dtype_of(base: &HfDirectory) -> Result<WeightDtype> {
    let layout = ParameterLayout::new(base.model());
    let first = layout.iter().flat_map(|spec| spec.pieces).find_map(|piece| {
        let is_matrix = piece.shape.len() == 2;
        base.tensor(&piece.hf_name).filter(|_| is_matrix).map(|entry| entry.dtype)
    });
    match first {
        Some(Dtype::F32) => Ok(WeightDtype::F32),
        Some(Dtype::BF16) => Ok(WeightDtype::Bf16),
        other => {
            let name = other.map_or("unknown", Dtype::name);
            let problem = format!("the base is stored as {name}; give --dtype f32 or --dtype bf16");
            Err(UsageError(problem).into())
        }
    }
}

/// The losses of base, adapter and merged model.
fn losses(args: &MergeArgs, data: &Path, source: ModelSource, base: &Path) -> Result<[f64; 3]> {
    let evaluated =
        EvalArgs::of_data(args.adapter.clone(), data.to_owned(), args.seq, args.batches);
    let loss = |source: &AnySource| eval::measure(&evaluated, source).map(|measured| measured.loss);
    let before = AnySource::open(base, &Which::default())?;
    let merged = AnySource::open(&args.out, &Which::default())?;
    Ok([loss(&before)?, loss(&source.into())?, loss(&merged)?])
}

/// The parameter being written.
#[derive(Default)]
struct Merged {
    name: String,
    values: Vec<f32>,
}

impl Merged {
    fn provide(
        &mut self,
        source: &ModelSource,
        onto: Onto,
        spec: &ParameterSpec,
        range: Range<usize>,
        dest: &mut [f32],
    ) -> Result<(), ModelError> {
        if self.name != spec.name {
            self.values.resize(spec.element_count(), 0.0);
            let ModelSource { config, weights, .. } = source;
            match onto {
                Onto::Original => merge(config, weights, spec, &mut self.values)?,
                Onto::Dequantized => {
                    merge(config, &Dequantized::new(config, weights), spec, &mut self.values)?;
                }
            }
            self.name.clone_from(&spec.name);
            streams::status(&format!("merging {}", spec.name));
        }
        dest.copy_from_slice(&self.values[range]);
        Ok(())
    }
}
