//! Measures the speed of this machine's cores, well enough for a planner to weigh computing against
//! copying. It takes only about 0.2 seconds, because every run on the CPU starts with it.

use super::CpuDevice;
use super::kernels::gemm::Bf16Products;
use super::threads;
use crate::{Device, DeviceError};
use std::time::{Duration, Instant};
use storm_graph::{DType, Graph, HeadLayout, Mask, Op, Tensor, TensorId};
use storm_plan::{HardwareProfile, LinkProfile, Tier};

/// Duration of each measurement.
const FIGURE: Duration = Duration::from_millis(20);

/// Rows of the measured ops: a small micro-batch.
const ROWS: usize = 512;

/// A profile of the CPU device as it is now, with this many threads. The default is the size of the
/// caller's rayon pool.
///
/// # Errors
/// A few megabytes, or the threads, are not available.
pub fn probe_cpu(
    memory_bytes: u64,
    threads: Option<usize>,
    products: Bf16Products,
) -> Result<HardwareProfile, DeviceError> {
    // A separate pool, which frees its buffers before those of a plan are allocated.
    let pool = threads::pool(threads)?;
    pool.install(|| measured(memory_bytes, products))
}

fn measured(memory_bytes: u64, products: Bf16Products) -> Result<HardwareProfile, DeviceError> {
    let gemm_flops = products_per_second(DType::BF16, products)?;
    let gemm_f32_flops = products_per_second(DType::F32, products)?;
    let (attention_forward_flops, attention_backward_flops) = attention_per_second()?;
    let memory_bandwidth = moved_per_second()?;
    let copy_bandwidth = copied_per_second();
    Ok(HardwareProfile {
        name: "cpu".to_owned(),
        source: format!("measured on {} threads", rayon::current_num_threads()),
        uncertainty: None,
        memory_bytes,
        // Everything on the CPU device is in its block. Its threads use host memory.
        overhead_bytes: 0,
        multiprocessors: None,
        gemm_flops,
        gemm_f32_flops,
        gemm_fp8_flops: None,
        attention_forward_flops,
        attention_backward_flops,
        memory_bandwidth,
        links: vec![LinkProfile {
            near: Tier::DEVICE,
            far: Tier::HOST,
            to_near_bandwidth: copy_bandwidth,
            to_far_bandwidth: copy_bandwidth,
            // Both directions share the memory bus.
            duplex_bandwidth: copy_bandwidth,
            latency_seconds: 5e-6,
        }],
        data_bandwidth: None,
        kernel_seconds: 5e-6,
        launch_seconds: 1e-6,
        pinned_seconds_per_gib: 0.0,
        gemm: Vec::new(),
        attention: Vec::new(),
        elementwise: Vec::new(),
        disk: None,
        ranks: None,
    })
}

fn products_per_second(dtype: DType, products: Bf16Products) -> Result<f64, DeviceError> {
    let mut graph = Graph::new();
    let x = graph.input("x", [ROWS, 512], dtype);
    let weight = graph.input("weight", [1024, 512], dtype);
    let op = Op::Linear { x, weight, bias: None, addend: None };
    let seconds = seconds(&mut graph, op, products)?;
    Ok(2.0 * (ROWS * 512 * 1024) as f64 / seconds)
}

fn attention_per_second() -> Result<(f64, f64), DeviceError> {
    let heads = HeadLayout { query_heads: 4, key_value_heads: 4, head_dim: 64 };
    let mut graph = Graph::new();
    let qkv = graph.input("qkv", [2, 256, 3 * 256], DType::F32);
    let y = graph.input("y", [2, 256, 256], DType::F32);
    let log_sum_exp = graph.input("log_sum_exp", [2, 4, 256], DType::F32);
    let (segments, mask, scale) = (None, Mask::Causal, 0.125);
    let forward = Op::Attention { qkv, segments, heads, mask, scale };
    let backward = Op::AttentionGrad { dy: y, qkv, y, log_sum_exp, segments, heads, mask, scale };
    let flops = |graph: &Graph, op: &Op<TensorId>| {
        let op: Op<&Tensor> = op.clone().map(|_, id| graph.tensor(id));
        op.matrix_flops() as f64
    };
    let rates = [forward, backward].map(|op| {
        let flops = flops(&graph, &op);
        seconds(&mut graph.clone(), op, Bf16Products::Fma).map(|seconds| flops / seconds)
    });
    let [forward, backward] = rates;
    Ok((forward?, backward?))
}

fn moved_per_second() -> Result<f64, DeviceError> {
    let mut graph = Graph::new();
    let elements = 1 << 20;
    let a = graph.input("a", [ROWS, elements / ROWS], DType::F32);
    let b = graph.input("b", [ROWS, elements / ROWS], DType::F32);
    let seconds = seconds(&mut graph, Op::Add { a, b }, Bf16Products::Fma)?;
    Ok((3 * elements * size_of::<f32>()) as f64 / seconds)
}

/// Bytes per second of copies on one thread, as in a copy queue.
fn copied_per_second() -> f64 {
    const BYTES: usize = 8 << 20;
    let from = vec![1u8; BYTES];
    let mut to = vec![0u8; BYTES];
    let seconds = repeat(|| {
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
    });
    BYTES as f64 / seconds
}

/// Seconds of one run of an op over zeros.
fn seconds(
    graph: &mut Graph,
    op: Op<TensorId>,
    products: Bf16Products,
) -> Result<f64, DeviceError> {
    graph.apply("probe", op).expect("the probe's own ops are well-typed");
    let mut offsets = Vec::new();
    let mut end = 0;
    for tensor in graph.tensors() {
        offsets.push(end);
        end += tensor.size_bytes().next_multiple_of(CpuDevice::ALIGNMENT);
    }
    let mut device = CpuDevice::with_products(end, products)?;
    let node = &graph.nodes()[0];
    let instruction = device.prepare(graph, node, |id| offsets[id.index()], 0)?;
    device.run(&instruction)?;
    Ok(repeat(|| {
        let _ = device.run(&instruction);
    }))
}

/// Mean seconds of one call.
fn repeat(mut call: impl FnMut()) -> f64 {
    call();
    let start = Instant::now();
    let mut calls = 0;
    while start.elapsed() < FIGURE {
        call();
        calls += 1;
    }
    start.elapsed().as_secs_f64() / f64::from(calls.max(1))
}
