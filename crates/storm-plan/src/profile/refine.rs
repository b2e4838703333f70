//! Corrects a profile by what a real step took.

use super::{ElementwisePoint, GemmKind, HardwareProfile};
use crate::plan::{InstructionId, Plan, Work};
use crate::queue::Queue;
use crate::simulate::instruction_seconds;
use std::collections::BTreeMap;
use storm_graph::{DType, Op, Tensor};

/// A group of figures that is corrected together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    /// A kind of matrix product, and whether it is in bf16.
    Gemm(u8, bool),
    /// Products of 8-bit floats.
    Fp8,
    AttentionForward,
    AttentionBackward,
    /// Bytes moved by an op of this name.
    Moving(&'static str),
    Copies(Queue),
}

/// No machine is further from its profile, so a disturbed step cannot spoil it.
const FACTOR_MAX: f64 = 100.0;

/// A gated unit that a device computes in the product before it takes hardly any time of its own: less than this share of
/// what it would take if it were off by as much as most kernels.
const WITHIN_PRODUCT: f64 = 0.1;

/// Seconds as predicted and as measured.
#[derive(Clone, Copy, Debug, Default)]
struct Seconds {
    predicted: f64,
    measured: f64,
}

impl Seconds {
    /// How many times as long it took.
    fn factor(&self) -> f64 {
        match self.predicted > 0.0 && self.measured > 0.0 {
            true => (self.measured / self.predicted).clamp(1.0 / FACTOR_MAX, FACTOR_MAX),
            false => 1.0,
        }
    }
}

impl HardwareProfile {
    /// The profile under which the instructions of a step would have taken as long as measured.
    /// `measured` lists instructions of `plan`, once per run, with their seconds.
    pub fn refined(&self, plan: &Plan, measured: &[(InstructionId, f64)]) -> HardwareProfile {
        let mut refined = self.clone();
        refined.name = format!("{}, refined", self.name);
        refined.source = format!("{}; corrected by a measured step", self.source);
        refined.uncertainty = None;
        // The bytes that ops move besides their products can be told only once products are
        // corrected.
        refined.correct(plan, measured, |part| !matches!(part, Part::Moving(_)));
        refined.correct(plan, measured, |part| matches!(part, Part::Moving(_)));
        refined
    }

    fn correct(
        &mut self,
        plan: &Plan,
        measured: &[(InstructionId, f64)],
        wanted: impl Fn(Part) -> bool,
    ) {
        let predicted = instruction_seconds(plan, self);
        let typical = typical_factor(plan, measured, &predicted);
        let mut parts: BTreeMap<Part, Seconds> = BTreeMap::new();
        for &(id, seconds) in measured {
            let whole = predicted[id.index()];
            if is_gated_unit(plan, id) && seconds < WITHIN_PRODUCT * typical * whole {
                continue;
            }
            let Some((part, known)) = self.part(plan, id, whole) else { continue };
            if wanted(part) {
                let sum = parts.entry(part).or_default();
                sum.predicted += known;
                // The rest of the instruction is assumed to have taken as long as predicted.
                sum.measured += (seconds - (whole - known)).max(0.0);
            }
        }
        for (part, seconds) in parts {
            self.slow(plan, part, seconds.factor());
        }
    }

    /// Which part an instruction measures, and how many of its seconds belong to it; none if it is
    /// too short to tell.
    fn part(&self, plan: &Plan, id: InstructionId, predicted: f64) -> Option<(Part, f64)> {
        let compute = match &plan.instruction(id).work {
            Work::Copy(copy) => {
                let latency = self.link(copy.link()).latency_seconds;
                return Some((Part::Copies(plan.queue(id)), predicted - latency));
            }
            Work::Compute(compute) => compute,
            Work::Fetch(_) | Work::ReadAhead(_) | Work::Collective(_) => return None,
        };
        let work_seconds = predicted - self.start_seconds();
        if work_seconds <= self.kernel_seconds {
            return None;
        }
        let graph = &plan.graphs[compute.graph.0 as usize];
        let node = &graph.nodes()[compute.node as usize];
        let op = node.op.clone().map(|_, tensor| graph.tensor(tensor));
        let outputs: Vec<&Tensor> = node.outputs.iter().map(|&id| graph.tensor(id)).collect();
        let is_bf16 = |tensor: &Tensor| tensor.dtype == DType::BF16;
        let part = match &op {
            Op::Linear { x, .. } => Part::Gemm(GemmKind::Forward as u8, is_bf16(x)),
            Op::LinearInputGrad { dy, .. } => {
                Part::Gemm(GemmKind::InputGradient as u8, is_bf16(dy))
            }
            Op::LinearWeightGrad { dy, .. } => {
                Part::Gemm(GemmKind::WeightGradient as u8, is_bf16(dy))
            }
            Op::Fp8Linear { .. } | Op::Fp8WeightGrad { .. } => Part::Fp8,
            Op::Attention { .. } => Part::AttentionForward,
            Op::AttentionGrad { .. } => Part::AttentionBackward,
            _ => return Some((Part::Moving(op.timed_as()), self.moving_seconds(&op, &outputs))),
        };
        Some((part, work_seconds))
    }

    /// Makes a part take `factor` times as long.
    fn slow(&mut self, plan: &Plan, part: Part, factor: f64) {
        match part {
            Part::Gemm(kind, bf16) => {
                let points = self.gemm.iter_mut();
                for point in points.filter(|p| p.kind as u8 == kind && p.bf16 == bf16) {
                    point.flops /= factor;
                }
                // A third each: the three kinds do about the same arithmetic.
                let default = match bf16 {
                    true => &mut self.gemm_flops,
                    false => &mut self.gemm_f32_flops,
                };
                *default /= factor.cbrt();
            }
            // Relative to bf16, which may have been corrected, too.
            Part::Fp8 => {
                self.gemm_fp8_flops = Some(self.fp8_share() * self.gemm_flops / factor);
            }
            Part::AttentionForward => {
                self.attention_forward_flops /= factor;
                self.attention.iter_mut().for_each(|point| point.forward_flops /= factor);
            }
            Part::AttentionBackward => {
                self.attention_backward_flops /= factor;
                self.attention.iter_mut().for_each(|point| point.backward_flops /= factor);
            }
            Part::Moving(op) => match self.elementwise.iter_mut().find(|point| point.op == op) {
                Some(point) => point.bandwidth /= factor,
                None => {
                    let bandwidth = self.bandwidth(op) / factor;
                    self.elementwise.push(ElementwisePoint { op: op.to_owned(), bandwidth });
                }
            },
            Part::Copies(queue) => {
                let link = plan.links.link(queue).expect("copies go over a link");
                let known = self.links.iter_mut().find(|known| known.has(link));
                known.expect("it was predicted with").slow(link, factor);
            }
        }
    }
}

/// How many times as long as predicted kernels took: the median.
fn typical_factor(plan: &Plan, measured: &[(InstructionId, f64)], predicted: &[f64]) -> f64 {
    let kernels = measured.iter().filter(|(id, _)| plan.queue(*id) == Queue::COMPUTE);
    let factors = kernels.map(|(id, seconds)| seconds / predicted[id.index()]);
    let mut factors: Vec<f64> = factors.filter(|factor| factor.is_finite()).collect();
    factors.sort_by(f64::total_cmp);
    factors.get(factors.len() / 2).copied().unwrap_or(1.0)
}

fn is_gated_unit(plan: &Plan, id: InstructionId) -> bool {
    let Work::Compute(compute) = &plan.instruction(id).work else { return false };
    let op = &plan.graphs[compute.graph.0 as usize].nodes()[compute.node as usize].op;
    matches!(op, Op::SwiGlu { .. } | Op::SwiGluGrad { .. } | Op::SwiGluGradAndOutput { .. })
}
