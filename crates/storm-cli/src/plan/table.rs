//! A plan as tables, at most 100 columns wide.

use super::request::{Answer, Request, StepSize};
use super::words::{self, percent};
use crate::hardware::bus;
use crate::memory_limits::Limit;
use crate::model::grouped;
use crate::size::show;
use storm_plan::{
    Holding, Prediction, Queue, SavedUnit, Storage, TensorKind, UpdateTime,
};

pub(super) fn print(request: &Request, answer: &Answer) {
    head(request, answer);
    tensors(request, answer);
    policies(request, answer);
    println!();
    for sentence in words::summary(request, answer) {
        println!("{sentence}");
    }
}

fn head(request: &Request, answer: &Answer) {
    let Answer { batch, accumulate, planned, .. } = answer;
    let sequence = request.options.sequence;
    let precision = match request.options.precision {
        storm_train::Precision::F32 => "f32",
        storm_train::Precision::Bf16Master => "bf16 with f32 master weights",
        storm_train::Precision::Bf16Stochastic => "bf16, stochastic rounding",
    };
    println!(
        "model     {}: {} parameters, {} layers, {precision}",
        request.model,
        grouped(request.config.parameter_count()),
        request.config.layer_count
    );
    println!(
        "step      {} tokens: {accumulate} micro-batches of {batch} × {sequence}, {} through a layer \
         together",
        grouped(answer.tokens_per_step(request) as u64),
        planned.decisions.group,
    );
    if request.step != StepSize::MicroBatches(*accumulate) {
        println!("          {}", tried(answer));
    }
    let profile = &request.profile;
    println!(
        "hardware  {}: {}, {:.0} TFLOP/s, PCIe {} GB/s",
        profile.name,
        show(profile.memory_bytes),
        profile.gemm_flops / 1e12,
        bus(profile),
    );
    println!("budget    {} of device memory{}", show(request.vram.bytes), origin(&request.vram));
    println!("          {} of host memory{}", show(request.ram.bytes), origin(&request.ram));
}

/// How the size of micro-batches was chosen.
fn tried(answer: &Answer) -> String {
    let sizes: Vec<String> = answer
        .tried
        .iter()
        .map(|tried| match tried.guessed_seconds {
            Some(seconds) => format!("{} about {seconds:.2} s", tried.batch),
            None => format!("{} does not fit", tried.batch),
        })
        .collect();
    format!("micro-batch chosen among {}", sizes.join(", "))
}

fn origin(limit: &Limit) -> String {
    limit.origin.as_ref().map_or_else(String::new, |origin| format!(": {origin}"))
}

/// One row: a name, where it is, four sizes.
fn row(name: &str, place: &str, sizes: [u64; 4]) {
    let [device, host, into, out] = sizes.map(|bytes| match bytes {
        0 => "-".to_owned(),
        bytes => show(bytes),
    });
    println!("{name:<19} {place:<32} {device:>11} {host:>11} {into:>11} {out:>11}");
}

fn tensors(request: &Request, answer: &Answer) {
    let planned = &answer.planned;
    let decisions = &planned.decisions;
    let layers = decisions.boundary.len();
    let groups = answer.accumulate / decisions.group;
    println!(
        "\n{:<19} {:<32} {:>11} {:>11} {:>11} {:>11}",
        "tensors", "where", "device", "host", "in / step", "out / step"
    );
    for holding in planned.plan.holdings() {
        let Holding { kind, device_bytes, host_bytes, h2d_bytes, d2h_bytes } = holding;
        let place = match kind {
            TensorKind::Weights => words::place(decisions.weights, layers),
            TensorKind::Gradients => words::place(decisions.gradients, layers),
            TensorKind::OptimizerState => words::place(decisions.states, layers),
            TensorKind::EmbeddingAndHead => match decisions.edge_states_resident {
                true => "device".to_owned(),
                false => "device; optimizer state host".to_owned(),
            },
            TensorKind::Activations => "as listed below".to_owned(),
            TensorKind::LayerInputs => words::layer_inputs(decisions),
            TensorKind::WorkArea => "device".to_owned(),
            TensorKind::Inputs => "host and device".to_owned(),
        };
        row(kind.name(), &place, [device_bytes, host_bytes, h2d_bytes, d2h_bytes]);
        let moves = match kind {
            TensorKind::Weights => words::weights_move(decisions, groups),
            TensorKind::Gradients => words::gradients_move(decisions, groups),
            TensorKind::OptimizerState => words::states_move(decisions),
            TensorKind::Activations => {
                answer.units.iter().enumerate().for_each(|(i, unit)| saved(answer, i, unit));
                continue;
            }
            TensorKind::LayerInputs if decisions.boundary.contains(&Storage::Offload) => {
                "out after the layer's forward; in before its backward"
            }
            TensorKind::EmbeddingAndHead if !decisions.edge_states_resident => {
                match decisions.update {
                    UpdateTime::EndOfStep => "state in and out with the update",
                    UpdateTime::NextStep => "state in and out beside the next step's forward",
                }
            }
            _ => continue,
        };
        if moves != "stay" {
            println!("{:<19} {moves}", "");
        }
    }
    row("context, libraries", "device", [request.profile.overhead_bytes, 0, 0, 0]);
    let Prediction { vram_peak_bytes, ram_peak_bytes, h2d_bytes, d2h_bytes, .. } =
        planned.prediction;
    row("peak", "", [vram_peak_bytes, ram_peak_bytes, h2d_bytes, d2h_bytes]);
    row("budget", "", [request.vram.bytes, request.ram.bytes, 0, 0]);
}

/// What happens to one saved unit of the layers.
fn saved(answer: &Answer, index: usize, unit: &SavedUnit) {
    let decisions = &answer.planned.decisions;
    let count = |wanted: Storage| {
        decisions.saved.iter().filter(|saved| saved[index] == wanted).count()
    };
    let (kept, offloaded) = (count(Storage::Keep), count(Storage::Offload));
    let parts =
        [(kept, "kept"), (offloaded, "offloaded"), (count(Storage::Recompute), "recomputed")];
    let bytes = |layers: usize, times: usize| (layers * times * unit.size_bytes) as u64;
    let moved = bytes(offloaded, answer.accumulate);
    row(
        &format!("  {}", unit.name),
        &words::counted(&parts, decisions.saved.len()),
        [bytes(kept, decisions.group), bytes(offloaded, decisions.group), moved, moved],
    );
}

fn policies(request: &Request, answer: &Answer) {
    println!(
        "\n{:<14} {:>9} {:>8} {:>11} {:>11} {:>11} {:>8} {:>5} {:>5} {:>7}",
        "", "tokens/s", "step s", "device", "host", "moved", "compute", "in", "out", "again"
    );
    let line = |name: &str, prediction: &Prediction| {
        let [compute, into, out] = Queue::ALL.map(|queue| percent(prediction.busy[queue.index()]));
        let speed = answer.tokens_per_second(request, prediction.step_seconds);
        println!(
            "{name:<14} {:>9} {:>8.3} {:>11} {:>11} {:>11} {compute:>8} {into:>5} {out:>5} {:>7}",
            grouped(speed.round() as u64),
            prediction.step_seconds,
            show(prediction.vram_peak_bytes),
            show(prediction.ram_peak_bytes),
            show(prediction.h2d_bytes + prediction.d2h_bytes),
            percent(prediction.recompute_fraction),
        );
    };
    line("this plan", &answer.planned.prediction);
    for policy in &answer.policies {
        match &policy.prediction {
            Some(prediction) => line(policy.name, prediction),
            None => println!("{:<14} does not fit: {}", policy.name, policy.description),
        }
    }
}
