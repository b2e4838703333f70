//! A plan as tables, at most 100 columns wide.

use super::ranks;
use super::request::{Answer, Request};
use super::words::{self, percent};
use crate::disk_tier::DiskTier;
use crate::hardware::{bus, caution};
use crate::memory_limits::Limit;
use crate::model::grouped;
use crate::size::show;
use crate::streams::columns;
use storm_graph::{ActivationCodec, FP8_MULTIPLE};
use storm_model::Unit;
use storm_model::fp8_projections;
use storm_plan::{
    GroupDecisions, Holding, Lanes, PerQueue, PerTier, Prediction, Queue, SavedUnit, Storage,
    TensorKind, Tier,
};
use storm_train::{Moments, Precision, StepSize};

/// Maximum width of a line.
const WIDTH: usize = 100;

/// Tables and sentences.
pub(super) fn text(request: &Request, answer: &Answer) -> String {
    let mut lines = head(request, answer);
    lines.push(String::new());
    lines.extend(tensors(request, answer));
    lines.push(String::new());
    if !answer.policies.is_empty() {
        lines.extend(policies(request, answer));
        lines.push(String::new());
    }
    for sentence in words::summary(request, answer) {
        lines.extend(wrapped("", &sentence));
    }
    lines.join("\n")
}

/// Breaks text into lines between words, each starting with `indent`.
fn wrapped(indent: &str, text: &str) -> Vec<String> {
    let width = columns(std::io::stdout()).map_or(WIDTH, |columns| columns.min(WIDTH));
    let mut lines = vec![indent.to_owned()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("at least one");
        if line.len() == indent.len() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(format!("{indent}{word}"));
        }
    }
    lines
}

/// Which projections multiply 8-bit floats.
fn fp8_words(request: &Request, batch: usize) -> String {
    let tokens = batch.saturating_mul(request.options.sequence);
    let projections = request.config.language().map(|config| fp8_projections(config, tokens));
    let (fp8, others): (Vec<_>, Vec<_>) =
        projections.unwrap_or_default().into_iter().partition(|(_, suits)| *suits);
    let names = |projections: Vec<(String, bool)>| {
        projections.into_iter().map(|(name, _)| name).collect::<Vec<_>>().join(", ")
    };
    match (fp8.is_empty(), others.is_empty()) {
        (_, true) => "fp8: all projections of layers".to_owned(),
        (true, _) => format!(
            "fp8: no projection, since {tokens} tokens of a micro-batch or the widths are no multiple of {FP8_MULTIPLE}"
        ),
        _ => format!(
            "fp8: {}; in bf16, since a width is no multiple of {FP8_MULTIPLE}: {}",
            names(fp8),
            names(others)
        ),
    }
}

fn head(request: &Request, answer: &Answer) -> Vec<String> {
    let Answer { batch, accumulate, planned, .. } = answer;
    let profile = &request.profile;
    let precision = match request.options.precision {
        Precision::F32 => "f32",
        Precision::Bf16Master => "bf16 with f32 master weights",
        Precision::Bf16Stochastic => "bf16, stochastic rounding",
        Precision::Fp8 => "bf16, stochastic rounding, fp8 products",
    };
    let moments = match request.options.optimizer.moments {
        Moments::Full => "",
        Moments::Int8 => ", moments in 8 bits",
    };
    let together = match planned.decisions.group_max() {
        1 => String::new(),
        _ => format!(", {} at a time through each layer", planned.decisions.group_sizes()),
    };
    let lanes = match request.options.lanes {
        Lanes::ONE => String::new(),
        lanes => format!(", in {lanes} lanes"),
    };
    let mut lines = vec![
        format!(
            "model     {}: {} parameters, {} layers, {precision}{moments}",
            request.model,
            grouped(request.config.parameter_count()),
            request.config.layer_count()
        ),
        format!(
            "step      {} {}: {} of {batch}{}{lanes}{together}",
            grouped(answer.units_per_step(request) as u64),
            request.config.unit(),
            micro_batches(*accumulate),
            sequence_words(request),
        ),
    ];
    if request.options.precision == Precision::Fp8 {
        lines.extend(wrapped("          ", &fp8_words(request, *batch)));
    }
    for (number, line) in wrapped("          ", &ranks::words(request, answer)).iter().enumerate() {
        if request.rank.is_shared() {
            let head = if number == 0 { "ranks     " } else { "          " };
            lines.push(format!("{head}{}", line.trim_start()));
        }
    }
    if request.options.activation_codec == ActivationCodec::Int8 {
        lines.push("          activations in 8 bits".to_owned());
    }
    if matches!(request.step, StepSize::Tokens(_)) {
        lines.extend(wrapped("          ", &tried(answer)));
    }
    lines.push(format!(
        "hardware  {}: {}, {}/s, copies {} GB/s",
        profile.name,
        show(profile.memory_bytes),
        words::arithmetic(words::gemm_flops(request)),
        bus(profile),
    ));
    if let Some(caution) = caution(profile) {
        lines.extend(wrapped("          ", &caution));
    }
    let limit = |limit: &Limit, what: &str| {
        let origin = limit.origin.as_ref().map_or_else(String::new, |origin| format!(": {origin}"));
        format!("{} of {what} memory{origin}", show(limit.bytes))
    };
    lines.push(format!("budget    {}", limit(&request.vram, "device")));
    lines.push(format!("          {}", limit(&request.ram, "host")));
    lines.extend(request.disk.iter().flat_map(|disk| wrapped("          ", &disk.words())));
    lines
}

fn micro_batches(count: usize) -> String {
    match count {
        1 => "1 micro-batch".to_owned(),
        count => format!("{} micro-batches", grouped(count as u64)),
    }
}

/// How the size of micro-batches was chosen.
fn tried(answer: &Answer) -> String {
    let sizes = answer.tried.iter().map(|tried| match tried.guessed_seconds {
        Some(seconds) => format!("{} (about {seconds:.2} s)", tried.batch),
        None => format!("{} (too large)", tried.batch),
    });
    let sizes: Vec<String> = sizes.collect();
    format!("micro-batches of {} chosen among {}", answer.batch, sizes.join(", "))
}

/// Widths of the name and place columns.
const NAME_WIDTH: usize = 19;
const PLACE_WIDTH: usize = 36;

/// A row: name, place, and four more columns. A name that does not fit gets a line of its own.
fn row(name: &str, place: &str, [device, host, into, out]: [&str; 4]) -> String {
    let (above, name) = match name.chars().count() > NAME_WIDTH {
        true => (format!("{name}\n"), ""),
        false => (String::new(), name),
    };
    format!(
        "{above}{name:<NAME_WIDTH$} {place:<PLACE_WIDTH$} {device:>10} {host:>10} {into:>10} {out:>10}"
    )
}

/// Sizes in the order of the columns.
fn sizes(bytes: PerTier<u64>, copied: PerQueue<u64>) -> [u64; 4] {
    let (into, out) = (copied[Queue::HOST_TO_DEVICE], copied[Queue::DEVICE_TO_HOST]);
    [bytes[Tier::DEVICE], bytes[Tier::HOST], into, out]
}

fn sizes_row(name: &str, place: &str, sizes: [u64; 4]) -> String {
    let sizes = sizes.map(|bytes| if bytes == 0 { "-".to_owned() } else { show(bytes) });
    row(name, place, sizes.each_ref().map(String::as_str))
}

fn tensors(request: &Request, answer: &Answer) -> Vec<String> {
    let planned = &answer.planned;
    let mut lines = vec![row("tensors", "where", ["device", "host", "in / step", "out / step"])];
    for holding in planned.plan.holdings() {
        let Holding { kind, bytes, copied_bytes } = holding;
        let place = words::place(kind, &planned.decisions);
        let sizes = sizes(bytes, copied_bytes);
        // The row describes the layers. The rest goes below it.
        let (place, rest) = place.split_once("; ").unwrap_or((&place, ""));
        lines.push(sizes_row(kind.name(), place, sizes));
        let moves = words::moves(kind, &planned.decisions, answer.groups());
        for below in [Some(rest).filter(|rest| !rest.is_empty()), moves].into_iter().flatten() {
            lines.push(format!("{:<NAME_WIDTH$} {below}", ""));
        }
        if kind == TensorKind::Activations {
            lines.extend(answer.units.iter().enumerate().map(|(i, unit)| saved(answer, i, unit)));
        }
    }
    lines.push(sizes_row(
        "context, libraries",
        "device",
        [request.profile.overhead_bytes, 0, 0, 0],
    ));
    let Prediction { peak_bytes, copied_bytes, .. } = planned.prediction;
    lines.push(sizes_row("peak", "", sizes(peak_bytes, copied_bytes)));
    let snapshot = request.saving(&planned.prediction).snapshot_bytes(request);
    if snapshot > 0 {
        lines.push(sizes_row("snapshot", "host, for checkpoints", [0, snapshot, 0, 0]));
    }
    lines.push(sizes_row("budget", "", [request.vram.bytes, request.ram.bytes, 0, 0]));
    if let Some(disk) = &request.disk {
        let words = disk.use_words(planned, &request.forced);
        let words = words.unwrap_or_else(|| DiskTier::UNUSED.to_owned());
        lines.extend(wrapped("disk                ", &words));
    }
    lines
}

/// What happens to one saved unit of the layers.
fn saved(answer: &Answer, index: usize, unit: &SavedUnit) -> String {
    let decisions = &answer.planned.decisions;
    let stage = words::layers(decisions);
    let count = |group: &GroupDecisions, wanted: Storage| {
        group.stages[stage].saved.iter().filter(|saved| saved[index] == wanted).count()
    };
    let [kept, offloaded, recomputed] = [Storage::Keep, Storage::Offload, Storage::Recompute]
        .map(|wanted| count(decisions.usual_group(), wanted));
    let place =
        words::counted(&[(kept, "kept"), (offloaded, "offloaded"), (recomputed, "recomputed")]);
    let groups = || decisions.groups.iter();
    let bytes = |group: &GroupDecisions, wanted: Storage| {
        (count(group, wanted) * group.micro_batches * unit.size_bytes) as u64
    };
    let most = |wanted: Storage| groups().map(|group| bytes(group, wanted)).max().unwrap_or(0);
    let moved = |group: &GroupDecisions| group.times as u64 * bytes(group, Storage::Offload);
    let moved = answer.lanes as u64 * groups().map(moved).sum::<u64>();
    let sizes = [most(Storage::Keep), most(Storage::Offload), moved, moved];
    sizes_row(&format!("  {}", unit.name), &place, sizes)
}

/// Sequence length, if samples are sequences.
fn sequence_words(request: &Request) -> String {
    match request.config.unit() {
        Unit::Tokens => format!(" × {}", request.options.sequence),
        Unit::Images => String::new(),
    }
}

fn policies(request: &Request, answer: &Answer) -> Vec<String> {
    let mut lines = vec![format!(
        "{:<14} {:>9} {:>8} {:>11} {:>11} {:>11} {:>8} {:>5} {:>5} {:>10}",
        "",
        format!("{}/s", request.config.unit()),
        "step s",
        "device",
        "host",
        "moved",
        "compute",
        "in",
        "out",
        "recomputed"
    )];
    let line = |name: &str, prediction: &Prediction| {
        let [compute, into, out] = [Queue::COMPUTE, Queue::HOST_TO_DEVICE, Queue::DEVICE_TO_HOST]
            .map(|queue| percent(prediction.busy[queue]));
        let speed = answer.units_per_second(request, prediction.step_seconds);
        format!(
            "{name:<14} {:>9} {:>8.3} {:>11} {:>11} {:>11} {compute:>8} {into:>5} {out:>5} {:>10}",
            grouped(speed.round() as u64),
            prediction.step_seconds,
            show(prediction.peak_bytes[Tier::DEVICE]),
            show(prediction.peak_bytes[Tier::HOST]),
            show(prediction.copied_bytes.iter().map(|(_, bytes)| bytes).sum()),
            percent(prediction.recompute_fraction),
        )
    };
    lines.push(line("this plan", &answer.planned.prediction));
    for policy in &answer.policies {
        lines.push(match &policy.prediction {
            Some(prediction) => line(policy.name, prediction),
            None => format!("{:<14} does not fit: {}", policy.name, policy.description),
        });
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_broken_between_words() {
        let text = "word ".repeat(60);
        let lines = wrapped("  ", text.trim());
        assert!(lines.len() > 2);
        assert!(lines.iter().all(|line| line.len() <= WIDTH && line.starts_with("  word")));
        assert_eq!(lines.join(" ").split_whitespace().count(), 60);
    }
}
