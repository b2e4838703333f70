//! `storm model`: lists and shows models. Also finds models on a hub.

use crate::{progress, size};
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use storm_hub::{Hub, HubName, Wanted};
use storm_model::{
    HfConfig, HfDirectory, ImageConfig, ImageDirectory, ModelConfig, ParameterLayout, image_preset,
    image_preset_names, is_carried, preset, preset_names,
};

#[derive(Subcommand)]
pub(crate) enum ModelCommand {
    /// List the presets.
    List(ListArgs),
    /// Show the shape of a model, its parameters, and the memory that training needs.
    Show(ShowArgs),
}

#[derive(Args)]
pub(crate) struct ListArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(crate) struct ShowArgs {
    /// A preset (`storm model list`); a Hugging Face directory, whose tensors are checked; or a model on the hub
    /// (`OWNER/MODEL`), of which only config.json is read.
    model: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(command: &ModelCommand) -> Result<()> {
    match command {
        ModelCommand::List(args) => list(args.json),
        ModelCommand::Show(args) => show(&args.model, args.json),
    }
}

fn list(as_json: bool) -> Result<()> {
    if as_json {
        let presets = preset_names().map(|name| Ok(object(name, "preset", &preset(name)?)));
        let presets: Result<Vec<Value>> = presets.collect();
        let image_presets: Vec<Value> = image_preset_names()
            .filter_map(|name| Some(image_object(name, &image_preset(name)?)))
            .collect();
        println!("{:#}", json!({"presets": presets?, "image_presets": image_presets}));
        return Ok(());
    }
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
    println!("\n{:<16} {:>15} {:>7}", "for pictures", "parameters", "layers");
    for config in image_preset_names().filter_map(|name| Some((name, image_preset(name)?))) {
        let (name, config) = config;
        let parameters = grouped(config.parameter_count());
        println!("{name:<16} {parameters:>15} {:>7}", config.layer_count());
    }
    Ok(())
}

/// Resolves a hub name (config only), a directory (checking its tensors), or else a preset.
fn resolve(model: &str) -> Result<(ModelConfig, &'static str)> {
    if let Some(located) = locate(model, Wanted::Config)? {
        let config = HfConfig::of_directory(&located.directory)?;
        return Ok((config.model, "config.json of a hub"));
    }
    if Path::new(model).is_dir() {
        let directory = open(Path::new(model))?;
        let kind = match directory.has_head() {
            true => "directory; all tensors present and well-shaped",
            false => "directory; without a head, and all other tensors present and well-shaped",
        };
        return Ok((directory.model().clone(), kind));
    }
    Ok((preset(model)?, "preset"))
}

/// Bytes per parameter for weights, gradients and optimizer state.
const TRAINING_BYTES: [(&str, u64); 3] = [
    ("bf16, stochastic rounding, bf16 state", 2 + 2 + 4),
    ("bf16 with f32 master, gradients, state", 2 + 4 + 12),
    ("f32", 4 + 4 + 8),
];

/// Describes a model as JSON.
fn object(name: &str, kind: &str, config: &ModelConfig) -> Value {
    let count = config.parameter_count();
    let [stochastic, master, f32] = TRAINING_BYTES.map(|(_, bytes)| count * bytes);
    json!({
        "name": name,
        "kind": kind,
        "family": config.family.model_type(),
        "parameters": count,
        "layers": config.layer_count,
        "width": config.hidden_size,
        "mlp_width": config.intermediate_size,
        "heads": config.query_heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "tied_embeddings": config.tied_embeddings,
        "max_positions": config.max_positions,
        "training_bytes": {"bf16-stochastic": stochastic, "bf16-master": master, "f32": f32},
    })
}

/// Describes an image classifier as JSON.
fn image_object(name: &str, config: &ImageConfig) -> Value {
    json!({
        "name": name,
        "parameters": config.parameter_count(),
        "layers": config.layer_count(),
        "config": config,
    })
}

fn show(model: &str, as_json: bool) -> Result<()> {
    let directory = Path::new(model);
    let image = match directory.is_dir() {
        true if ImageDirectory::is_one(directory) => {
            Some(ImageDirectory::open(directory)?.config().clone())
        }
        true => None,
        false => image_preset(model),
    };
    if let Some(config) = image {
        let object = image_object(model, &config);
        match as_json {
            true => println!("{object:#}"),
            false => {
                println!("{model}: an image classifier");
                println!("  parameters  {}", grouped(config.parameter_count()));
                println!("  layers      {}", config.layer_count());
                let [height, width] = config.image_size;
                println!("  pictures    {height} × {width} × {}", config.channels);
                println!("  classes     {}", config.classes);
            }
        }
        return Ok(());
    }
    let (config, kind) = resolve(model)?;
    if as_json {
        println!("{:#}", object(model, kind, &config));
        return Ok(());
    }
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
    for (name, bytes) in TRAINING_BYTES {
        println!("  {name:<40} {:>12}", size::show(count * bytes));
    }
    Ok(())
}

/// A hub model in the local cache.
pub(crate) struct Located {
    pub(crate) directory: PathBuf,
    /// The name with its commit, which identifies the same model everywhere.
    pub(crate) name: String,
}

/// Finds a model by its hub name, in the local cache or by downloading it, and prints how. `None` if this is not a hub
/// name, or names a local path.
pub(crate) fn locate(named: &str, wanted: Wanted) -> Result<Option<Located>> {
    let Some((located, how)) = find(named, wanted)? else { return Ok(None) };
    eprintln!("{how}");
    Ok(Some(located))
}

/// [`locate`] without output, for a model that is located again later.
pub(crate) fn locate_quietly(named: &str, wanted: Wanted) -> Result<Option<Located>> {
    Ok(find(named, wanted)?.map(|(located, _)| located))
}

/// Finds a hub model, and describes how it was found.
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

/// Whether this names a hub model that is not in the local cache.
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

/// The cached directory of a hub model, if everything wanted is in it.
pub(crate) fn cached(named: &str, wanted: Wanted) -> Option<PathBuf> {
    let found = Hub::from_environment().ok()?.find(&HubName::parse(named)?, wanted)?;
    Some(found.directory)
}

/// Opens a model's directory, and prints which fields of its config are ignored and what is unusual about its files.
pub(crate) fn open(directory: &Path) -> Result<HfDirectory> {
    let opened = HfDirectory::open(directory)
        .with_context(|| format!("cannot use {}", directory.display()))?;
    let fields = opened.config().left_behind();
    if !fields.is_empty() {
        let fields: Vec<String> = fields.iter().map(|field| format!("`{field}`")).collect();
        eprintln!(
            "warning: {}: {} change nothing in this model and are ignored",
            directory.join("config.json").display(),
            fields.join(", ")
        );
    }
    for remark in opened.remarks() {
        eprintln!("{}: {remark}", directory.display());
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
