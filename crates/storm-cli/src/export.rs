//! `storm export`: a Hugging Face directory, checked and written anew.

use crate::size;
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use std::ops::Range;
use std::path::PathBuf;
use storm_model::{
    HfDirectory, IfExists, ParameterSpec, SaveOptions, WeightDtype, load_parameter, save,
};

#[derive(Args)]
pub(crate) struct ExportArgs {
    /// Hugging Face directory to read: config.json and safetensors.
    input: PathBuf,
    /// Directory to write. It must not exist, unless --replace is given.
    output: PathBuf,
    /// Type of the written weights.
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16)]
    dtype: DtypeArg,
    /// Largest file of weights.
    #[arg(long, default_value = "5GB", value_parser = size::parse)]
    shard_size: u64,
    /// Replace the output directory if it is a model directory.
    #[arg(long)]
    replace: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum DtypeArg {
    F32,
    Bf16,
}

pub(crate) fn run(args: &ExportArgs) -> Result<()> {
    let directory = HfDirectory::open(&args.input)
        .with_context(|| format!("cannot use {}", args.input.display()))?;
    let options = SaveOptions {
        dtype: match args.dtype {
            DtypeArg::F32 => WeightDtype::F32,
            DtypeArg::Bf16 => WeightDtype::Bf16,
        },
        shard_bytes: args.shard_size,
        source: Some(&args.input),
        if_exists: if args.replace { IfExists::Replace } else { IfExists::Refuse },
    };
    let mut current = Loaded::default();
    save(&args.output, directory.model(), &options, |spec, range, dest: &mut [f32]| {
        current.provide(&directory, spec, range, dest)?;
        Ok(())
    })?;
    println!(
        "wrote {} parameters to {}",
        directory.model().parameter_count(),
        args.output.display()
    );
    Ok(())
}

/// The parameter that is being written.
#[derive(Default)]
struct Loaded {
    name: String,
    values: Vec<f32>,
}

impl Loaded {
    fn provide(
        &mut self,
        directory: &HfDirectory,
        spec: &ParameterSpec,
        range: Range<usize>,
        dest: &mut [f32],
    ) -> Result<(), storm_model::ModelError> {
        if self.name != spec.name {
            self.values.resize(spec.element_count(), 0.0);
            load_parameter(directory, spec, &mut self.values)?;
            self.name.clone_from(&spec.name);
        }
        dest.copy_from_slice(&self.values[range]);
        Ok(())
    }
}
