//! `storm bench generate`: how fast a model generates text. Its weights are random, so nothing is
//! downloaded.

use crate::UsageError;
use crate::decoder::{self, PlaceArgs};
use crate::precision::DtypeArg;
use crate::size::{self, positive};
use anyhow::Result;
use clap::Args;
use std::ops::Range;
use std::time::Instant;
use storm_graph::DType;
use storm_graph::random::Random;
use storm_model::{DecodeOptions, Element, ModelError, ParameterSource, ParameterSpec, preset};
use storm_train::{Decoder, Generator, Sampling};

#[derive(Args)]
pub(crate) struct GenerateBenchArgs {
    /// Preset; `storm model list` lists them.
    #[arg(long, default_value = "qwen2.5-1.5b")]
    model: String,
    /// Number format of weights, activations and the KV cache.
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16)]
    precision: DtypeArg,
    /// Tokens in the prompt.
    #[arg(long, default_value_t = 128, value_parser = positive)]
    prompt: usize,
    /// Tokens to generate.
    #[arg(long, default_value_t = 256, value_parser = positive)]
    tokens: usize,
    /// Length of the context in tokens. Default: prompt and generated text.
    #[arg(long, value_parser = positive)]
    seq: Option<usize>,
    /// Sampling temperature; 0 always takes the most likely token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Number of layers. Default: the preset's.
    #[arg(long, value_parser = positive)]
    layers: Option<usize>,
    /// Also time the nodes of the graph, summed by name, if everything is in device memory.
    #[arg(long)]
    nodes: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: PlaceArgs,
}

pub(super) fn run(args: &GenerateBenchArgs) -> Result<()> {
    let mut config = preset(&args.model)?;
    if let Some(layers) = args.layers {
        config.layer_count = layers;
    }
    let dtype = DType::from(args.precision);
    let window = args.seq.unwrap_or(args.prompt.saturating_add(args.tokens));
    if window > config.max_positions || args.prompt > window {
        return Err(UsageError(format!(
            "a prompt of {} tokens and a window of {window} do not fit: {} has {} positions, and the prompt must fit \
             in the window; give a smaller --prompt, --tokens or --seq",
            args.prompt, args.model, config.max_positions
        ))
        .into());
    }
    let options = DecodeOptions { window, dtype };
    let begun = Instant::now();
    let loaded = decoder::load(&args.place, &config, &options, &RandomWeights::new())?;
    let loading = begun.elapsed().as_secs_f64();
    let mut model = loaded.decoder;
    let mut random = Random(1);
    let prompt: Vec<u32> =
        (0..args.prompt).map(|_| random.below(config.vocab_size) as u32).collect();
    let sampling = Sampling { temperature: args.temperature, ..Sampling::default() };
    // Warm up: the first run of a kernel loads its code.
    write(&mut model, &prompt, sampling, 4.min(args.tokens))?;
    // A different prompt, so that nothing cached is reused.
    let other: Vec<u32> =
        prompt.iter().map(|&token| (token + 1) % config.vocab_size as u32).collect();
    let times = write(&mut model, &other, sampling, args.tokens)?;
    let to_first = times[0];
    let mut later = times[1..].to_vec();
    later.sort_by(f64::total_cmp);
    let rest: f64 = later.iter().sum();
    let speed = later.len() as f64 / rest;
    let weights = config.parameter_count() * dtype.size_bytes() as u64;
    let median = later.get(later.len() / 2).copied().unwrap_or(f64::NAN);
    let fastest = later.first().copied().unwrap_or(f64::NAN);
    let nodes = if args.nodes { model.node_seconds(20)? } else { Vec::new() };
    if args.json {
        let nodes: serde_json::Map<String, serde_json::Value> =
            nodes.into_iter().map(|(name, seconds)| (name, seconds.into())).collect();
        let object = serde_json::json!({
            "model": args.model, "dtype": dtype.to_string(), "device": loaded.words, "weight_bytes": weights,
            "window": window, "prompt_tokens": args.prompt, "tokens": args.tokens, "loading_seconds": loading,
            "first_token_seconds": to_first, "tokens_per_second": speed, "median_seconds": median,
            "fastest_seconds": fastest, "node_seconds": nodes,
        });
        println!("{object}");
        return Ok(());
    }
    println!("{}, {dtype}, {} of weights, window {window}", args.model, size::show(weights));
    println!("{}", loaded.words.as_deref().unwrap_or("device cpu"));
    println!("loading      {loading:.1} s");
    println!(
        "first token  {to_first:.3} s after a prompt of {}: {:.0} tokens/s",
        args.prompt,
        args.prompt as f64 / to_first
    );
    println!(
        "then         {speed:.1} tokens/s; a token takes {:.3} ms, {:.3} at best: {:.0} GB/s of weights",
        median * 1e3,
        fastest * 1e3,
        weights as f64 / median / 1e9
    );
    let all: f64 = nodes.iter().map(|(_, seconds)| seconds).sum();
    for (name, seconds) in &nodes {
        println!("  {name:<24} {:>8.1} µs  {:>4.1} %", seconds * 1e6, 100.0 * seconds / all);
    }
    if !nodes.is_empty() {
        println!("  {:<24} {:>8.1} µs", "all", all * 1e6);
    }
    Ok(())
}

/// Generates tokens. Returns the seconds that each took.
fn write(
    model: &mut Decoder,
    prompt: &[u32],
    sampling: Sampling,
    tokens: usize,
) -> Result<Vec<f64>> {
    let mut generator = Generator::new(model, prompt.to_vec(), sampling)?;
    let mut times = Vec::new();
    for _ in 0..tokens {
        let start = Instant::now();
        generator.next_token()?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(times)
}

/// Values in the table of [`RandomWeights`].
const VALUES: usize = (1 << 16) - 1;

/// Random weights, copied from one table, which is fast even for large models.
struct RandomWeights {
    values: Vec<f32>,
}

impl RandomWeights {
    fn new() -> RandomWeights {
        const SPREAD: f64 = 0.04;
        let mut random = Random(7);
        let value = |_| ((random.unit() - 0.5) * 2.0 * SPREAD) as f32;
        RandomWeights { values: (0..VALUES).map(value).collect() }
    }
}

impl ParameterSource for RandomWeights {
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        // The weights of norms are ones.
        let is_norm = spec.name.ends_with("norm.weight");
        let start =
            spec.name.bytes().fold(0, |sum: usize, byte| sum.wrapping_mul(31) ^ byte as usize);
        if is_norm {
            dest.fill(E::from_f32(1.0));
            return Ok(());
        }
        let mut values: Vec<E> = self.values.iter().map(|&value| E::from_f32(value)).collect();
        values.rotate_left((start % VALUES + rows.start * spec.row_elements()) % VALUES);
        // Copies the table as a whole, so that memory is the limit.
        for some in dest.chunks_mut(values.len()) {
            some.copy_from_slice(&values[..some.len()]);
        }
        Ok(())
    }
}
