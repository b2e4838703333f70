//! A plan in sentences.

use super::request::{Answer, Request};
use crate::size::show;
use storm_plan::{Decisions, Placement, Prediction, Queue, Storage, Streaming, UpdateTime};

/// What a plan would be faster with more of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bottleneck {
    /// The card computes all the time, and computes nothing twice.
    Compute,
    /// The card computes all the time, but some of it twice, for lack of memory.
    Memory,
    /// The card waits for copies.
    Bus,
    /// The card waits for the host to give out work.
    Launches,
}

/// A compute queue that works less than this waits for something worth naming.
const BUSY: f64 = 0.9;

/// Less than this made again is not worth naming.
const AGAIN: f64 = 0.02;

impl Bottleneck {
    pub(super) fn of(answer: &Answer) -> Bottleneck {
        let prediction = &answer.planned.prediction;
        let stalls = &answer.planned.simulation.stalls;
        if prediction.busy[Queue::Compute.index()] >= BUSY {
            return match prediction.recompute_fraction > AGAIN {
                true => Bottleneck::Memory,
                false => Bottleneck::Compute,
            };
        }
        match stalls.launch_seconds > stalls.total_seconds() / 2.0 {
            true => Bottleneck::Launches,
            false => Bottleneck::Bus,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Bottleneck::Compute => "compute",
            Bottleneck::Memory => "memory",
            Bottleneck::Bus => "pcie",
            Bottleneck::Launches => "launches",
        }
    }
}

/// How much of what layers save goes which way, as shares of its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Shares {
    pub(super) kept: f64,
    pub(super) offloaded: f64,
    pub(super) recomputed: f64,
}

impl Shares {
    pub(super) fn of(answer: &Answer) -> Shares {
        let mut shares = Shares::default();
        for saved in &answer.planned.decisions.saved {
            for (unit, storage) in answer.units.iter().zip(saved) {
                let bytes = unit.size_bytes as f64;
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

/// The part of all copying that costs no time.
pub(super) fn hidden_share(answer: &Answer) -> f64 {
    let transfers = &answer.planned.simulation.transfers;
    let busy: f64 = transfers.iter().map(|transfer| transfer.busy_seconds).sum();
    let exposed: f64 = transfers.iter().map(|transfer| transfer.exposed_seconds).sum();
    if busy > 0.0 { (1.0 - exposed / busy).clamp(0.0, 1.0) } else { 1.0 }
}

/// `17 %`, with a decimal where it would say nothing otherwise.
pub(super) fn percent(share: f64) -> String {
    let value = 100.0 * share;
    match value > 0.0 && value < 0.95 {
        true => format!("{value:.1} %"),
        false => format!("{value:.0} %"),
    }
}

/// What limits the plan, what it does with activations, and why.
pub(super) fn summary(request: &Request, answer: &Answer) -> Vec<String> {
    vec![limit(answer), activations(answer), balance(request), least(answer)]
}

fn limit(answer: &Answer) -> String {
    let Prediction { busy, recompute_fraction, .. } = &answer.planned.prediction;
    let compute = percent(busy[Queue::Compute.index()]);
    let again = percent(*recompute_fraction);
    let stalls = &answer.planned.simulation.stalls;
    let step = answer.planned.prediction.step_seconds;
    match Bottleneck::of(answer) {
        Bottleneck::Compute => {
            format!("Limited by compute: the card computes {compute} of the step, nearly nothing twice.")
        }
        Bottleneck::Memory => format!(
            "Limited by memory: the card computes {compute} of the step, but {again} of that is \
             computed again because it does not fit."
        ),
        Bottleneck::Bus => format!(
            "Limited by PCIe: the card waits {} of the step for copies in and {} for copies out.",
            percent(stalls.host_to_device_seconds / step),
            percent((stalls.device_to_host_seconds + stalls.drain_seconds) / step),
        ),
        Bottleneck::Launches => format!(
            "Limited by the host: the card waits {} of the step for kernels to be launched.",
            percent(stalls.launch_seconds / step)
        ),
    }
}

fn activations(answer: &Answer) -> String {
    let shares = Shares::of(answer);
    let Prediction { recompute_fraction, recompute_flops, .. } = &answer.planned.prediction;
    let again = match *recompute_fraction > 0.0 {
        true => format!(
            "recomputes {} of time ({:.0} TFLOP a step)",
            percent(*recompute_fraction),
            recompute_flops / 1e12
        ),
        false => "recomputes nothing".to_owned(),
    };
    format!(
        "It offloads {} of activations, keeps {}, drops {} and {again}; {} of copy time is hidden.",
        percent(shares.offloaded),
        percent(shares.kept),
        percent(shares.recomputed),
        percent(hidden_share(answer)),
    )
}

/// Why this card favours one over the other: a product's output costs its inner length in FLOP per byte
/// of bf16 to make again.
fn balance(request: &Request) -> String {
    let profile = &request.profile;
    let per_byte = profile.gemm_flops / profile.host_to_device_bandwidth;
    let again = request.config.hidden_size as f64 * 2.0
        / request.options.precision.compute().size_bytes() as f64;
    let favour = match per_byte > again {
        true => "recomputing costs less than a copy that is not hidden",
        false => "a copy costs less than recomputing even where it is not hidden",
    };
    format!(
        "This card does {per_byte:.0} FLOP in the time of a byte over PCIe, and making a byte again \
         costs about {again:.0}: {favour}."
    )
}

fn least(answer: &Answer) -> String {
    format!(
        "The smallest --vram that works for this step is {}.",
        show(answer.planned.vram_min_bytes)
    )
}

/// `2 of 28 layers on the device`.
pub(super) fn place(streaming: Streaming, layers: usize) -> String {
    match streaming.pinned {
        pinned if pinned == layers => "device".to_owned(),
        0 => format!("host, {} on the device", slots(streaming.ring)),
        pinned => format!("{pinned} layers device, {} host", layers - pinned),
    }
}

fn slots(count: usize) -> String {
    if count == 1 { "1 slot".to_owned() } else { format!("{count} slots") }
}

/// When the weights, gradients and state of layers move.
pub(super) fn weights_move(decisions: &Decisions, groups: usize) -> &'static str {
    match (is_streamed(decisions.weights, decisions), groups) {
        (false, _) => "stay",
        (true, 1) => "in before forward and backward; out when updated",
        (true, _) => "in before forward and backward of each group; out when updated",
    }
}

pub(super) fn gradients_move(decisions: &Decisions, groups: usize) -> &'static str {
    match (is_streamed(decisions.gradients, decisions), groups) {
        (false, _) => "stay",
        (true, 1) => "out after backward; in for the update",
        (true, _) => "in and out around each group's backward; in for the update",
    }
}

pub(super) fn states_move(decisions: &Decisions) -> &'static str {
    match (is_streamed(decisions.states, decisions), decisions.update) {
        (false, _) => "stay",
        (true, UpdateTime::EndOfStep) => "in and out with the update, at the end of the step",
        (true, UpdateTime::NextStep) => "in and out with the update, beside the next step's forward",
    }
}

fn is_streamed(streaming: Streaming, decisions: &Decisions) -> bool {
    streaming.pinned < decisions.boundary.len()
}

/// Where the inputs of layers are between forward and backward.
pub(super) fn layer_inputs(decisions: &Decisions) -> String {
    let count = |wanted: Storage| decisions.boundary.iter().filter(|&&s| s == wanted).count();
    let parts = [
        (count(Storage::Keep), "kept"),
        (count(Storage::Offload), "host"),
        (count(Storage::Recompute), "again"),
    ];
    counted(&parts, decisions.boundary.len())
}

/// `kept in 3, host in 20, again in 5`, or only the word where it holds for all.
pub(super) fn counted(parts: &[(usize, &str)], all: usize) -> String {
    let present: Vec<&(usize, &str)> = parts.iter().filter(|(count, _)| *count > 0).collect();
    match present[..] {
        [(count, word)] if *count == all => (*word).to_owned(),
        _ => present
            .iter()
            .map(|(count, word)| format!("{word} in {count}"))
            .collect::<Vec<_>>()
            .join(", "),
    }
}

/// As the flags call it.
pub(super) fn placement(streaming: Streaming, layers: usize) -> Placement {
    if streaming.pinned == layers { Placement::Resident } else { Placement::Streamed }
}
