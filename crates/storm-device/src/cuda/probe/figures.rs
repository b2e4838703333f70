//! Derives a profile from measured times.

use super::cases::{Case, Pass, Subject};
use crate::cuda::Card;
use storm_graph::{DType, Op, Tensor};
use storm_plan::{AttentionPoint, ElementwisePoint, GemmPoint, HardwareProfile, LinkProfile, Tier};

/// What was measured besides the cases.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rates {
    pub(super) overhead_bytes: u64,
    /// Bytes per second.
    pub(super) to_device: f64,
    pub(super) to_host: f64,
    pub(super) duplex: f64,
    pub(super) copy_latency_seconds: f64,
    pub(super) kernel_seconds: f64,
    pub(super) launch_seconds: f64,
    pub(super) pinned_seconds_per_gib: f64,
}

/// The profile of a card, given each case with its seconds.
///
/// Costs are counted by the profile's own rules, so that it predicts what was measured.
pub(super) fn profile(card: &Card, times: &[(&Case, f64)], rates: Rates) -> HardwareProfile {
    let mut profile = HardwareProfile {
        name: short_name(&card.name),
        source: String::new(),
        uncertainty: None,
        memory_bytes: card.memory_bytes as u64,
        overhead_bytes: rates.overhead_bytes,
        // Set below, once rates are known.
        multiprocessors: None,
        // Until these rates are known, products and moves take no time.
        gemm_flops: f64::INFINITY,
        gemm_f32_flops: f64::INFINITY,
        gemm_fp8_flops: None,
        attention_forward_flops: f64::INFINITY,
        attention_backward_flops: f64::INFINITY,
        memory_bandwidth: f64::INFINITY,
        links: vec![LinkProfile {
            near: Tier::DEVICE,
            far: Tier::HOST,
            to_near_bandwidth: figure(rates.to_device),
            to_far_bandwidth: figure(rates.to_host),
            duplex_bandwidth: figure(rates.duplex),
            latency_seconds: figure(rates.copy_latency_seconds),
        }],
        data_bandwidth: None,
        kernel_seconds: 0.0,
        launch_seconds: figure(rates.launch_seconds),
        pinned_seconds_per_gib: figure(rates.pinned_seconds_per_gib),
        gemm: Vec::new(),
        attention: Vec::new(),
        elementwise: Vec::new(),
        disk: None,
        ranks: None,
    };
    // Each case starts a kernel, which the profile adds.
    let work = |seconds: f64| (seconds - rates.kernel_seconds).max(0.5 * seconds);
    for (case, seconds) in times.iter().map(|&(case, seconds)| (case, work(seconds))) {
        let flops = figure(timed_op(case).0.matrix_flops() as f64 / seconds);
        match case.subject {
            Subject::Gemm { kind, rows, columns, inner, dtype } => profile.gemm.push(GemmPoint {
                kind,
                rows: rows as u64,
                columns: columns as u64,
                inner: inner as u64,
                bf16: dtype == DType::BF16,
                flops,
            }),
            Subject::Attention { sequence, head_dim, pass } => {
                let (sequence, head_dim) = (sequence as u64, head_dim as u64);
                let known = profile
                    .attention
                    .iter_mut()
                    .find(|point| point.sequence == sequence && point.head_dim == head_dim);
                match (pass, known) {
                    (Pass::Forward, Some(point)) => point.forward_flops = flops,
                    (Pass::Backward, Some(point)) => point.backward_flops = flops,
                    (_, None) => profile.attention.push(AttentionPoint {
                        sequence,
                        head_dim,
                        forward_flops: flops,
                        backward_flops: flops,
                    }),
                }
            }
            Subject::Fp8 | Subject::Moving | Subject::Memory | Subject::Tiny => {}
        }
    }
    let of = |bf16| profile.gemm.iter().filter(move |p| p.bf16 == bf16).map(|p| p.flops).collect();
    (profile.gemm_flops, profile.gemm_f32_flops) = (median(of(true)), median(of(false)));
    if let Some((case, seconds)) = times.iter().find(|(case, _)| case.subject == Subject::Fp8) {
        // Until this rate is known, the profile treats it as a product in bf16.
        let share = predicted(&profile, case) / work(*seconds);
        profile.gemm_fp8_flops = Some(figure(profile.gemm_flops * share));
    }
    let attention = &profile.attention;
    profile.attention_forward_flops = median(attention.iter().map(|p| p.forward_flops).collect());
    profile.attention_backward_flops = median(attention.iter().map(|p| p.backward_flops).collect());

    // The time of an op that its products do not take is the time of its bytes.
    let mut bandwidths = Vec::new();
    for (case, seconds) in times.iter().map(|&(case, seconds)| (case, work(seconds))) {
        let bandwidth = figure(moved_bytes(case) / (seconds - predicted(&profile, case)));
        match case.subject {
            Subject::Moving if bandwidth.is_finite() && bandwidth > 0.0 => {
                let op = timed_op(case).0.timed_as().to_owned();
                bandwidths.push(ElementwisePoint { op, bandwidth });
            }
            Subject::Memory => profile.memory_bandwidth = bandwidth,
            _ => {}
        }
    }
    profile.elementwise = bandwidths;
    profile.kernel_seconds = figure(rates.kernel_seconds);
    profile.multiprocessors = u32::try_from(card.multiprocessors).ok();
    profile
}

/// The seconds that the profile predicts for a case.
fn predicted(profile: &HardwareProfile, case: &Case) -> f64 {
    let (op, outputs) = timed_op(case);
    profile.op_seconds(&op, &outputs)
}

/// Bytes that the profile counts for a case: its predicted seconds at one byte per second, with
/// products that take no time.
fn moved_bytes(case: &Case) -> f64 {
    let unit = HardwareProfile {
        name: String::new(),
        source: String::new(),
        uncertainty: None,
        memory_bytes: 0,
        overhead_bytes: 0,
        multiprocessors: None,
        gemm_flops: f64::INFINITY,
        gemm_f32_flops: f64::INFINITY,
        gemm_fp8_flops: None,
        attention_forward_flops: f64::INFINITY,
        attention_backward_flops: f64::INFINITY,
        memory_bandwidth: 1.0,
        links: Vec::new(),
        kernel_seconds: 0.0,
        launch_seconds: 0.0,
        data_bandwidth: None,
        pinned_seconds_per_gib: 0.0,
        gemm: Vec::new(),
        attention: Vec::new(),
        elementwise: Vec::new(),
        disk: None,
        ranks: None,
    };
    predicted(&unit, case)
}

pub(super) fn timed_op(case: &Case) -> (Op<&Tensor>, Vec<&Tensor>) {
    let node = case.graph.nodes().last().expect("a case has a node");
    let op = node.op.clone().map(|_, id| case.graph.tensor(id));
    (op, node.outputs.iter().map(|&id| case.graph.tensor(id)).collect())
}

/// Rounds to four digits, because more are not reproducible.
fn figure(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

/// The middle value. NaN if there are no values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Shortens a card's name: `NVIDIA GeForce RTX 4090` becomes `rtx-4090`.
fn short_name(name: &str) -> String {
    let words = name.split_whitespace().map(str::to_lowercase);
    let telling: Vec<String> = words.filter(|word| word != "nvidia" && word != "geforce").collect();
    telling.join("-")
}

#[cfg(test)]
mod tests {
    use super::super::cases::{Sizes, all};
    use super::*;

    fn card() -> Card {
        let name = "NVIDIA GeForce RTX 4090".to_owned();
        Card { name, capability: (8, 9), multiprocessors: 128, memory_bytes: 24 << 30 }
    }

    const RATES: Rates = Rates {
        overhead_bytes: 500 << 20,
        to_device: 50e9,
        to_host: 49e9,
        duplex: 80e9,
        copy_latency_seconds: 3e-6,
        kernel_seconds: 2e-6,
        launch_seconds: 4e-6,
        pinned_seconds_per_gib: 0.3,
    };

    /// A profile that is made from times predicts these times.
    #[test]
    fn a_profile_predicts_what_was_measured() {
        let cases = all(Sizes { rows: &[8192], tokens: 16384, shrink: 1 }).expect("they fit");
        // Products at 500 TFLOP/s and up, bytes at 3 TB/s and down.
        let times: Vec<(&Case, f64)> = cases
            .iter()
            .enumerate()
            .map(|(index, case)| {
                let flops = timed_op(case).0.matrix_flops() as f64;
                let moved = match case.subject {
                    Subject::Gemm { .. } | Subject::Fp8 | Subject::Attention { .. } => 0.0,
                    _ => moved_bytes(case),
                };
                let grade = 1.0 + index as f64 / 100.0;
                let products = match case.subject {
                    Subject::Moving => flops / 501e12,
                    _ => flops / (500e12 * grade),
                };
                (case, products + moved * grade / 3e12)
            })
            .collect();
        let profile = profile(&card(), &times, RATES);
        assert_eq!(profile.name, "rtx-4090");
        for (case, seconds) in &times {
            let (op, _) = timed_op(case);
            let predicted = predicted(&profile, case);
            let wanted = seconds.max(RATES.kernel_seconds);
            // The profile does not use the time of the tiny case.
            let off = (predicted / wanted - 1.0).abs();
            assert!(off < 0.02 || case.subject == Subject::Tiny, "{}: {off}", op.name());
        }
        assert!((450e12..1200e12).contains(&profile.gemm_flops));
        let text = profile.to_json();
        assert_eq!(HardwareProfile::from_json(&text).expect("it is one"), profile);
    }

    #[test]
    fn names_are_short() {
        assert_eq!(short_name("NVIDIA H200"), "h200");
        assert_eq!(short_name("NVIDIA A100-SXM4-80GB"), "a100-sxm4-80gb");
    }
}
