//! A plan in sentences.

use super::request::{Answer, Request, WhatIf};
use super::saving;
use crate::model::grouped;
use crate::size::show;
use storm_plan::{
    Bottleneck, Decisions, Link, Placement, Prediction, Queue, StageDecisions, Storage, Streaming,
    TensorKind, Tier, UpdateTime,
};
use storm_train::Precision;

/// Shares of the bytes that layers save, by what happens to them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Shares {
    pub(super) kept: f64,
    pub(super) offloaded: f64,
    pub(super) recomputed: f64,
}

impl Shares {
    pub(super) fn of(answer: &Answer) -> Shares {
        let mut shares = Shares::default();
        let decisions = &answer.planned.decisions;
        let stage = layers(decisions);
        let groups = decisions.groups.iter();
        let all = groups.flat_map(|group| {
            let count = (group.micro_batches * group.times) as f64;
            group.stages[stage].saved.iter().map(move |saved| (count, saved))
        });
        for (count, saved) in all {
            for (unit, storage) in answer.units.iter().zip(saved) {
                let bytes = count * unit.size_bytes as f64;
                match storage {
                    Storage::Keep => shares.kept += bytes,
                    Storage::Offload => shares.offloaded += bytes,
                    Storage::Recompute => shares.recomputed += bytes,
                }
            }
        }
        let all = (shares.kept + shares.offloaded + shares.recomputed).max(1.0);
        Shares {
            kept: shares.kept / all,
            offloaded: shares.offloaded / all,
            recomputed: shares.recomputed / all,
        }
    }
}

/// The share of all copy time that is hidden.
pub(super) fn hidden_share(answer: &Answer) -> f64 {
    let transfers = &answer.planned.simulation.transfers;
    let busy: f64 = transfers.iter().map(|transfer| transfer.busy_seconds).sum();
    let exposed: f64 = transfers.iter().map(|transfer| transfer.exposed_seconds).sum();
    if busy > 0.0 { (1.0 - exposed / busy).clamp(0.0, 1.0) } else { 1.0 }
}

/// `17 %`, with a decimal from 0.05 % to 0.95 %.
pub(super) fn percent(share: f64) -> String {
    let value = 100.0 * share;
    match (0.05..0.95).contains(&value) {
        true => format!("{value:.1} %"),
        false => format!("{value:.0} %"),
    }
}

/// What limits the plan, what it does with activations, and why.
pub(super) fn summary(request: &Request, answer: &Answer) -> Vec<String> {
    let checkpoints = saving::words(request, answer);
    let mut sentences = vec![limit(answer), activations(answer)];
    sentences.extend(balance(request));
    sentences.extend([checkpoints, least(answer)]);
    sentences.extend(answer.what_if.iter().map(|other| what_if(request, answer, other)));
    sentences.extend(what_if_hint(request, answer));
    sentences
}

/// What another option would gain.
fn what_if(request: &Request, answer: &Answer, other: &WhatIf) -> String {
    let WhatIf { option, prediction } = other;
    let gain = answer.planned.prediction.step_seconds / prediction.step_seconds - 1.0;
    let speed = match gain > 0.0005 {
        true => format!("{} faster", percent(gain)),
        false => "no faster".to_owned(),
    };
    let memory = |tier: Tier| show(prediction.peak_bytes[tier]);
    format!(
        "With {option} it would be {speed}: {} {}/s with {} of device and {} of host memory. That changes results \
         slightly, so STORM does not choose it for you.",
        grouped(answer.units_per_second(request, prediction.step_seconds).round() as u64),
        request.config.unit(),
        memory(Tier::DEVICE),
        memory(Tier::HOST),
    )
}

/// Points to `--what-if` if memory costs time.
fn what_if_hint(request: &Request, answer: &Answer) -> Option<String> {
    let is_short = answer.planned.prediction.recompute_fraction > 0.0
        || answer.planned.bottleneck() != Bottleneck::Compute;
    let unknown = answer.what_if.is_empty() && !request.other_options(answer).is_empty();
    (is_short && unknown).then(|| {
        "`storm plan --what-if` shows what activations and moments in 8 bits would gain.".to_owned()
    })
}

fn limit(answer: &Answer) -> String {
    let Prediction { busy, recompute_fraction, .. } = &answer.planned.prediction;
    let compute = percent(busy[Queue::COMPUTE]);
    let recomputed = percent(*recompute_fraction);
    let stalls = &answer.planned.simulation.stalls;
    let step = answer.planned.prediction.step_seconds;
    match answer.planned.bottleneck() {
        Bottleneck::Compute => {
            format!(
                "Limited by compute: the device computes {compute} of the step and recomputes almost nothing."
            )
        }
        Bottleneck::Memory => format!(
            "Limited by memory: the device computes {compute} of the step, but {recomputed} of that is \
             recomputed because it does not fit."
        ),
        Bottleneck::Bus => format!(
            "Limited by copies: the device waits {} of the step for copies in and {} for copies out.",
            percent(stalls.copy_seconds[Queue::HOST_TO_DEVICE] / step),
            percent((stalls.copy_seconds[Queue::DEVICE_TO_HOST] + stalls.drain_seconds) / step),
        ),
        Bottleneck::Disk => format!(
            "Limited by the disk: the device waits {} of the step for it.",
            percent(stalls.disk_seconds / step)
        ),
        Bottleneck::Data => format!(
            "Limited by data: the device waits {} of the step for the data of the next.",
            percent(stalls.data_seconds / step)
        ),
        Bottleneck::Launches => format!(
            "Limited by the host: the device waits {} of the step for kernels to be launched.",
            percent(stalls.launch_seconds / step)
        ),
    }
}

fn activations(answer: &Answer) -> String {
    let shares = Shares::of(answer);
    let Prediction { recompute_fraction, recompute_flops, .. } = &answer.planned.prediction;
    let again = match *recompute_fraction > 0.0 {
        true => format!(
            "recomputes {} of time ({} a step)",
            percent(*recompute_fraction),
            arithmetic(*recompute_flops)
        ),
        false => "recomputes nothing".to_owned(),
    };
    // If all blocks of a network differ, no stage represents the others.
    let shares = match answer.units.is_empty() {
        true => "It".to_owned(),
        false => format!(
            "It offloads {} of activations, keeps {} and drops {}; it",
            percent(shares.offloaded),
            percent(shares.kept),
            percent(shares.recomputed),
        ),
    };
    format!("{shares} {again}, and {} of copy time is hidden.", percent(hidden_share(answer)))
}

/// `665 TFLOP`.
pub(super) fn arithmetic(flops: f64) -> String {
    match flops >= 1e12 {
        true => format!("{:.0} TFLOP", flops / 1e12),
        false => format!("{:.0} GFLOP", flops / 1e9),
    }
}

/// Matrix products per second in the precision of the run.
pub(super) fn gemm_flops(request: &Request) -> f64 {
    let profile = &request.profile;
    match request.options.precision {
        Precision::F32 => profile.gemm_f32_flops,
        Precision::Bf16Master | Precision::Bf16Stochastic => profile.gemm_flops,
        Precision::Fp8 => profile.gemm_fp8_flops.unwrap_or(profile.gemm_flops),
    }
}

/// Why this device favors copying or recomputing. Recomputing one byte of a bf16 product costs as
/// many FLOP as the product's inner dimension.
fn balance(request: &Request) -> Option<String> {
    let profile = &request.profile;
    let per_byte = gemm_flops(request) / profile.link(Link::HOST_TO_DEVICE).bandwidth;
    let again = request.config.language()?.hidden_size as f64 * 2.0
        / request.options.precision.compute().size_bytes() as f64;
    let favour = match per_byte > again {
        true => "recomputing costs less than a copy that is not hidden",
        false => "a copy costs less than recomputing even where it is not hidden",
    };
    Some(format!(
        "It does {per_byte:.0} FLOP in the time of a byte between host and device; recomputing a byte \
         costs about {again:.0}: {favour}."
    ))
}

fn least(answer: &Answer) -> String {
    format!(
        "The smallest --vram that works for this step is {}. Planning took {:.1} s.",
        show(answer.planned.vram_min_bytes),
        answer.planning_seconds
    )
}

/// The layers: the stage with the most blocks.
pub(super) fn layers(decisions: &Decisions) -> usize {
    let stages = decisions.usual_group().stages.iter().enumerate();
    let most = stages.max_by_key(|(_, stage)| stage.inputs.len());
    most.expect("a program has a stage").0
}

/// The number of layers.
pub(super) fn layer_count(decisions: &Decisions) -> usize {
    decisions.usual_group().stages[layers(decisions)].inputs.len()
}

/// Where a kind of tensor lives.
pub(super) fn place(kind: TensorKind, decisions: &Decisions) -> String {
    let number = layers(decisions);
    let (stage, count) = (&decisions.stages[number], layer_count(decisions));
    let streamed = |pinned: usize, ring: usize| match pinned {
        pinned if pinned == count => "device".to_owned(),
        0 if ring == 1 => "host, 1 slot on the device".to_owned(),
        0 => format!("host, {ring} slots on the device"),
        pinned => format!("{pinned} layers device, {} host", count - pinned),
    };
    // Stages that run once: embedding and head.
    let edges = |is_pinned: fn(&StageDecisions) -> bool| {
        let blocks = decisions.usual_group().stages.iter().map(|edge| edge.inputs.len());
        let edges = decisions.stages.iter().zip(blocks).filter(|(_, blocks)| *blocks < count);
        match edges.map(|(edge, _)| edge).all(is_pinned) {
            true => "",
            false => "; embedding and head host",
        }
    };
    match kind {
        TensorKind::Weights => {
            let place = streamed(stage.weights.pinned, stage.weights.ring);
            place + edges(|edge| edge.weights.pinned > 0)
        }
        TensorKind::Gradients if decisions.update == UpdateTime::InBackward => {
            format!("those of {} layers at a time on the device", stage.gradients.slots())
        }
        TensorKind::Gradients => {
            let place = streamed(stage.gradients.pinned, stage.gradients.ring);
            place + edges(|edge| edge.gradients.pinned > 0)
        }
        TensorKind::OptimizerState => {
            let place = streamed(stage.states_pinned, decisions.state_ring);
            place + edges(|edge| edge.states_pinned > 0)
        }
        TensorKind::Activations => "of layers, as listed".to_owned(),
        TensorKind::LayerInputs => {
            let inputs = &decisions.usual_group().stages[number].inputs;
            let [kept, offloaded, again] = [Storage::Keep, Storage::Offload, Storage::Recompute]
                .map(|wanted| inputs.iter().filter(|&&s| s == wanted).count());
            counted(&[(kept, "kept"), (offloaded, "offloaded"), (again, "recomputed")])
        }
        TensorKind::WorkArea => "device".to_owned(),
        TensorKind::Inputs => "host and device".to_owned(),
    }
}

/// When a kind of tensor is copied. `None` if it is not.
pub(super) fn moves(
    kind: TensorKind,
    decisions: &Decisions,
    groups: usize,
) -> Option<&'static str> {
    let all = |pinned: fn(&StageDecisions) -> usize| {
        let blocks = decisions.usual_group().stages.iter().map(|stage| stage.inputs.len());
        decisions.stages.iter().map(pinned).eq(blocks)
    };
    let stays = match kind {
        TensorKind::Weights => all(|stage| stage.weights.pinned),
        TensorKind::Gradients => all(|stage| stage.gradients.pinned),
        TensorKind::OptimizerState => all(|stage| stage.states_pinned),
        _ => false,
    };
    let number = layers(decisions);
    let stages = || decisions.groups.iter().map(|group| &group.stages[number]);
    match kind {
        _ if stays => None,
        TensorKind::Weights => Some(match groups {
            1 => "in before forward and backward; out when updated",
            _ => "in before forward and backward of each group; out when updated",
        }),
        TensorKind::Gradients if decisions.update == UpdateTime::InBackward => {
            Some("applied in the backward; none are stored")
        }
        TensorKind::Gradients => Some(match groups {
            1 => "out after backward; in for the update",
            _ => "in and out around each group's backward; in for the update",
        }),
        TensorKind::OptimizerState => Some(match decisions.update {
            UpdateTime::EndOfStep => "in and out with the update, at the end of the step",
            UpdateTime::NextStep => "in and out with the update, beside the next step's forward",
            UpdateTime::InBackward => "in and out with the update, beside the backward",
        }),
        TensorKind::Activations
            if stages().any(|stage| stage.saved.iter().flatten().any(is_offloaded)) =>
        {
            Some("out after the layer's forward; in before its backward")
        }
        TensorKind::LayerInputs if stages().any(|stage| stage.inputs.iter().any(is_offloaded)) => {
            Some("out after the layer's forward; in before its backward")
        }
        _ => None,
    }
}

fn is_offloaded(storage: &Storage) -> bool {
    *storage == Storage::Offload
}

/// `3 kept, 20 offloaded, 5 recomputed`, or the word alone if it applies to all.
pub(super) fn counted(parts: &[(usize, &str)]) -> String {
    let present: Vec<&(usize, &str)> = parts.iter().filter(|(count, _)| *count > 0).collect();
    match present[..] {
        [(_, word)] => (*word).to_owned(),
        _ => present
            .iter()
            .map(|(count, word)| format!("{count} {word}"))
            .collect::<Vec<_>>()
            .join(", "),
    }
}

/// The placement as in the flags.
pub(super) fn placement(streaming: Streaming, layers: usize) -> Placement {
    if streaming.pinned == layers { Placement::Resident } else { Placement::Streamed }
}
