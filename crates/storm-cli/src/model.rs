//! `storm model`: presets and directories.

use crate::{progress, size};
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use std::path::{Path, PathBuf};
use storm_hub::{Hub, HubName, Wanted};
use storm_model::{
    HfConfig, HfDirectory, ModelConfig, ParameterLayout, is_carried, preset, preset_names,
};

#[derive(Subcommand)]
pub(crate) enum ModelCommand {
    /// List the presets.
    List,
    /// Show a model: shape, parameters, and the memory that its training needs.
    Show(ShowArgs),
}

#[derive(Args)]
pub(crate) struct ShowArgs {
    /// A preset (see `storm model list`), a Hugging Face directory, whose tensors are checked, or the name of a model on
    /// the hub, `OWNER/MODEL`, of which config.json is read.
    model: String,
}

pub(crate) fn run(command: &ModelCommand) -> Result<()> {
    match command {
        ModelCommand::List => list(),
        ModelCommand::Show(args) => show(&args.model),
    }
}

fn list() -> Result<()> {
    println!("{:<16} {:>15} {:>7} {:>7} {:>9}", "preset", "parameters", "layers", "width", "vocab");
    for name in preset_names() {
        let config = preset(name)?;
        println!(
            "{name:<16} {:>15} {:>7} {:>7} {:>9}",
            grouped(config.parameter_count()),
            config.layer_count,
            config.hidden_size,
            config.vocab_size
        );
    }
    Ok(())
}

/// A preset or, if there is one of that name, a directory with its weights checked.
fn resolve(model: &str) -> Result<(ModelConfig, &'static str)> {
    if let Some(located) = locate(model, Wanted::Config)? {
        let config = HfConfig::of_directory(&located.directory)?;
        return Ok((config.model, "config.json of a hub"));
    }
    if Path::new(model).is_dir() {
        let directory = open(Path::new(model))?;
        return Ok((directory.model().clone(), "directory; all tensors present and well-shaped"));
    }
    Ok((preset(model)?, "preset"))
}

fn show(model: &str) -> Result<()> {
    let (config, kind) = resolve(model)?;
    let count = config.parameter_count();
    println!("{model} ({kind})");
    println!("  family      {}", config.family.model_type());
    println!("  parameters  {}", grouped(count));
    println!(
        "  layers      {} of width {}, MLP {}",
        config.layer_count, config.hidden_size, config.intermediate_size
    );
    println!(
        "  heads       {} query, {} key/value, of {}",
        config.query_heads, config.kv_heads, config.head_dim
    );
    println!(
        "  vocabulary  {}, {}",
        config.vocab_size,
        if config.tied_embeddings { "tied" } else { "not tied" }
    );
    println!("  context     {}", config.max_positions);
    println!("\nParameters of one layer:");
    for spec in &ParameterLayout::new(&config).layer {
        println!("  {:<32} {:?}", spec.name, spec.shape);
    }
    println!("\nWeights, gradients and optimizer state in training:");
    for (name, bytes) in [
        ("bf16, stochastic rounding, bf16 state", 2 + 2 + 4),
        ("bf16 with f32 master, gradients, state", 2 + 4 + 12),
        ("f32", 4 + 4 + 8),
    ] {
        println!("  {name:<40} {:>12}", size::show(count * bytes));
    }
    Ok(())
}

/// A model of a hub, in the local cache.
pub(crate) struct Located {
    pub(crate) directory: PathBuf,
    /// With the commit that it is of: the same model wherever it is asked for.
    pub(crate) name: String,
}

/// Finds a model by its name on a hub, in the local cache or by downloading it, and says which; none if it is no such name,
/// or that of something that is here.
pub(crate) fn locate(named: &str, wanted: Wanted) -> Result<Option<Located>> {
    let Some((located, how)) = find(named, wanted)? else { return Ok(None) };
    eprintln!("{how}");
    Ok(Some(located))
}

/// [`locate`], for what is located again later: says nothing.
pub(crate) fn locate_quietly(named: &str, wanted: Wanted) -> Result<Option<Located>> {
    Ok(find(named, wanted)?.map(|(located, _)| located))
}

/// A model of a hub, and how it was found, in words.
fn find(named: &str, wanted: Wanted) -> Result<Option<(Located, String)>> {
    let Some(name) = HubName::parse(named).filter(|_| !is_meant_here(named)) else {
        return Ok(None);
    };
    let hub = Hub::from_environment()?;
    let found = hub.get(&name, wanted, is_carried, &mut |progress| {
        let [done, total] = [progress.done, progress.total].map(size::show);
        progress::show(&format!("{named}: {} {done} of {total}", progress.file));
    });
    progress::show("");
    let found = found?;
    let how = if found.is_new { "downloaded to" } else { "from" };
    let words = format!(
        "{named}: revision {}, {how} the Hugging Face cache {}",
        found.revision,
        hub.cache.display()
    );
    let name = name.at(&found.revision).to_string();
    Ok(Some((Located { directory: found.directory, name }, words)))
}

/// Whether a name is that of a model on a hub that is not in the local cache.
pub(crate) fn must_be_downloaded(named: &str) -> bool {
    let is_of_hub = HubName::parse(named).is_some() && !is_meant_here(named);
    is_of_hub && cached(named, Wanted::All).is_none()
}

/// Whether a path exists, or its parent folder does: `runs/typo` is never looked up on the hub.
fn is_meant_here(named: &str) -> bool {
    let path = Path::new(named);
    let folder = path.parent().filter(|_| !named.contains('@'));
    [Some(path), folder].into_iter().flatten().any(|path| path.symlink_metadata().is_ok())
}

/// A model of a hub that is in the local cache, if all that is wanted of it is.
pub(crate) fn cached(named: &str, wanted: Wanted) -> Option<PathBuf> {
    let found = Hub::from_environment().ok()?.find(&HubName::parse(named)?, wanted)?;
    Some(found.directory)
}

/// Opens a model's directory, and says what of its config is passed over.
pub(crate) fn open(directory: &Path) -> Result<HfDirectory> {
    let opened = HfDirectory::open(directory)
        .with_context(|| format!("cannot use {}", directory.display()))?;
    let fields = opened.config().left_behind();
    if !fields.is_empty() {
        let fields: Vec<String> = fields.iter().map(|field| format!("`{field}`")).collect();
        eprintln!(
            "warning: {}: {} change nothing in this model and are passed over",
            directory.join("config.json").display(),
            fields.join(", ")
        );
    }
    Ok(opened)
}

/// 1,234,567
pub(crate) fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
