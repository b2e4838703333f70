//! `storm bench attention`: forward and backward of one attention op on a GPU.

use anyhow::Result;
use clap::Args;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Instant;
use storm_device::Device;
use storm_device::cuda::{CudaDevice, CudaInstruction};
use storm_graph::{
    DType, GradientRequest, Graph, HeadLayout, Mask, Node, Op, TensorClass, TensorId, differentiate,
};

#[derive(Args)]
pub(crate) struct AttentionBenchArgs {
    /// Number of sequences.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Query heads.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    heads: u32,
    /// Key and value heads. Default: as many as query heads.
    #[arg(long)]
    kv_heads: Option<u32>,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    seq: u32,
    /// Width of a head.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    head_dim: u32,
    /// No causal mask: every query sees every key.
    #[arg(long)]
    full: bool,
    /// Number of runs to time.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &AttentionBenchArgs) -> Result<()> {
    let heads = HeadLayout {
        query_heads: args.heads as usize,
        key_value_heads: args.kv_heads.unwrap_or(args.heads) as usize,
        head_dim: args.head_dim as usize,
    };
    let mask = if args.full { Mask::Full } else { Mask::Causal };
    let shape = [args.batch as usize, args.seq as usize, heads.qkv_width()];
    let mut graph = Graph::new();
    let qkv = graph.source("qkv", shape, DType::BF16, TensorClass::Activation);
    let scale = 1.0 / (heads.head_dim as f32).sqrt();
    let y = graph.apply_one("y", Op::Attention { qkv, segments: None, heads, mask, scale })?;
    let dy_shape = graph.tensor(y).shape.clone();
    let dy = graph.source("dy", dy_shape, DType::BF16, TensorClass::Activation);
    let request = GradientRequest {
        seeds: vec![(y, dy)],
        wanted: vec![qkv],
        accumulators: BTreeMap::new(),
        gradient_dtype: DType::BF16,
    };
    differentiate(&mut graph, &request)?;

    let mut offsets = Vec::new();
    let mut size = 0;
    for tensor in graph.tensors() {
        offsets.push(size);
        size += tensor.size_bytes().next_multiple_of(CudaDevice::ALIGNMENT);
    }
    let mut device = CudaDevice::new(0, size)?;
    for (id, seed) in [(qkv, 1), (dy, 2)] {
        device.write(offsets[id.index()], &random_bits(graph.tensor(id).shape.elements(), seed))?;
    }
    let place = |id: TensorId| offsets[id.index()];
    let prepare = |node: &Node| device.prepare(&graph, node, place, 0);
    let [forward, backward] = graph.nodes() else { unreachable!("one op and its gradient") };
    let (forward_run, backward_run) = (prepare(forward)?, prepare(backward)?);

    let flops = |node: &Node| node.op.clone().map(|_, id| graph.tensor(id)).matrix_flops() as f64;
    let (forward_flops, backward_flops) = (flops(forward), flops(backward));
    let card = device.card().name.clone();
    if !args.json {
        println!("{card}");
        println!(
            "batch {}, {} query and {} key/value heads of {}, {} tokens, {mask:?}, bf16",
            args.batch, heads.query_heads, heads.key_value_heads, heads.head_dim, args.seq
        );
    }
    // Warm up with both, so that the card is as warm for the first figure as for the last.
    time(&mut device, &[&forward_run, &backward_run], args.runs)?;
    let rows: [(&str, &[&CudaInstruction], f64); 3] = [
        ("forward", &[&forward_run], forward_flops),
        ("backward", &[&backward_run], backward_flops),
        ("both", &[&forward_run, &backward_run], forward_flops + backward_flops),
    ];
    let mut timed = serde_json::Map::new();
    for (name, instructions, flops) in rows {
        let seconds = time(&mut device, instructions, args.runs)?;
        let tflops = flops / seconds / 1e12;
        timed.insert(name.to_owned(), json!({"seconds": seconds, "tflops": tflops}));
        if !args.json {
            println!("{name:<9} {:>8.3} ms {tflops:>6.0} TFLOP/s", seconds * 1e3);
        }
    }
    if args.json {
        let object = json!({
            "card": card, "batch": args.batch, "heads": heads.query_heads,
            "kv_heads": heads.key_value_heads, "head_dim": heads.head_dim, "sequence": args.seq,
            "causal": !args.full, "times": timed,
        });
        println!("{object}");
    }
    Ok(())
}

/// Seconds per run of the instructions, with all runs queued at once.
fn time(device: &mut CudaDevice, instructions: &[&CudaInstruction], runs: u32) -> Result<f64> {
    device.synchronize()?;
    let start = Instant::now();
    for _ in 0..runs {
        for instruction in instructions {
            device.run(instruction)?;
        }
    }
    device.synchronize()?;
    Ok(start.elapsed().as_secs_f64() / f64::from(runs))
}

/// bf16 values between -2 and 2, as bytes.
fn random_bits(elements: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(2 * elements);
    for _ in 0..elements {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let value = (state >> 40) as f32 / (1 << 22) as f32 - 2.0;
        bytes.extend(((value.to_bits() >> 16) as u16).to_le_bytes());
    }
    bytes
}
