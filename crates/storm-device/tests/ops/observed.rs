//! Sums over updates: against f64, whatever the storage, and without a change of any other bit.

use crate::reference::Value;
use crate::support::*;
use half::bf16;
use std::collections::BTreeMap;
use storm_device::cpu::kernels::simd::{Isa, force_isa, isa};
use storm_graph::random::{SEED_WORDS, Seed};
use storm_graph::{
    AdamWParameters, DType, Graph, MOMENT_GROUP, MOMENT_GROUP_BYTES, MomentFormat, OBSERVED_BLOCK,
    OBSERVED_SUMS, Op, Rounding, Shape, StepScalars, TensorClass, TensorId, Training,
    decode_first_moment, decode_second_moment, moment_scale,
};

const HYPER: AdamWParameters =
    AdamWParameters { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };
const RATE: f32 = 1e-2;
const NUMBER: u32 = 7;
const CLIP: f32 = 0.375;

/// What is updated.
struct Case {
    dtype: DType,
    moments: DType,
    parameter: Vec<f64>,
    master: Option<Vec<f64>>,
    gradient: Vec<f64>,
    /// As they lie in memory.
    first: Vec<f64>,
    second: Vec<f64>,
}

fn stored(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::BF16 => f64::from(bf16::from_f32(x as f32).to_f32()),
        _ => f64::from(x as f32),
    }
}

impl Case {
    fn new(rng: &mut Rng, elements: usize, dtype: DType, moments: DType, master: bool) -> Case {
        let mut draw = |dtype, scale: f64| -> Vec<f64> {
            (0..elements).map(|_| stored(dtype, scale * rng.normal())).collect()
        };
        let (parameter, gradient) = (draw(dtype, 1.0), draw(DType::F32, 0.1));
        let master = master.then(|| draw(DType::F32, 1.0));
        let (mut first, mut second) = (draw(moments, 0.05), draw(moments, 0.1));
        second.iter_mut().for_each(|x| *x = stored(moments, *x * *x));
        if moments == DType::U8 {
            [first, second] = [(); 2].map(|()| {
                let groups = elements.div_ceil(MOMENT_GROUP);
                let mut bytes = Vec::new();
                for _ in 0..groups {
                    bytes.extend((0..MOMENT_GROUP).map(|_| rng.below(256) as u8));
                    bytes.extend(((0.01 * rng.unit()) as f32).to_le_bytes());
                }
                bytes.into_iter().map(f64::from).collect()
            });
        }
        Case { dtype, moments, parameter, master, gradient, first, second }
    }

    /// Both moments before the update.
    fn moments(&self) -> [Vec<f64>; 2] {
        if self.moments != DType::U8 {
            return [self.first.clone(), self.second.clone()];
        }
        let of = |stored: &[f64], decode: fn(u8, f32) -> f32| -> Vec<f64> {
            let bytes: Vec<u8> = stored.iter().map(|&byte| byte as u8).collect();
            let groups = bytes.chunks_exact(MOMENT_GROUP_BYTES);
            let decoded = groups.flat_map(|group| {
                let scale = moment_scale(group);
                let codes = group[..MOMENT_GROUP].to_vec();
                codes.into_iter().map(move |code| f64::from(decode(code, scale)))
            });
            decoded.take(self.parameter.len()).collect()
        };
        [of(&self.first, decode_first_moment), of(&self.second, decode_second_moment)]
    }

    /// The sums in f64, and the sums of the magnitudes of their terms.
    fn expected(&self) -> Vec<[(f64, f64); OBSERVED_SUMS]> {
        let (beta1, beta2) = (f64::from(HYPER.beta1), f64::from(HYPER.beta2));
        let correction = |beta: f64| 1.0 - beta.powi(NUMBER as i32);
        let bound = match self.moments {
            DType::U8 => (1.0 - beta1) / ((1.0 - beta2) * (1.0 - beta1 * beta1 / beta2)).sqrt(),
            _ => f64::INFINITY,
        };
        let change = |first: f64, second: f64| {
            let first = if second > 0.0 || bound.is_infinite() {
                first.clamp(-bound * second.sqrt(), bound * second.sqrt())
            } else {
                0.0
            };
            let root = (second / correction(beta2)).sqrt() + f64::from(HYPER.epsilon);
            f64::from(RATE) * first / correction(beta1) / root
        };
        let [firsts, seconds] = self.moments();
        let values = self.master.as_ref().unwrap_or(&self.parameter);
        let mut blocks =
            vec![[(0.0, 0.0); OBSERVED_SUMS]; self.parameter.len().div_ceil(OBSERVED_BLOCK)];
        for (at, &value) in values.iter().enumerate() {
            // Two of eight runs of 256 elements, others in each block.
            if (at / 2048 + at % 2048 / 256) % 4 != 0 {
                continue;
            }
            let gradient = f64::from(CLIP) * self.gradient[at];
            let before = change(firsts[at], seconds[at]);
            let now = change(
                beta1 * firsts[at] + (1.0 - beta1) * gradient,
                beta2 * seconds[at] + (1.0 - beta2) * gradient * gradient,
            );
            let terms = [now * now, now * before, before * before, value * value];
            for ((sum, magnitude), term) in blocks[at / OBSERVED_BLOCK].iter_mut().zip(terms) {
                *sum += term;
                *magnitude += term.abs();
            }
        }
        blocks
    }

    /// All outputs; the sums last, if they are asked for.
    fn update(&self, observes: bool) -> Vec<Vec<f64>> {
        let (mut graph, mut values) = (Graph::new(), BTreeMap::new());
        let shape = Shape::from([self.parameter.len()]);
        let mut operand = |graph: &mut Graph, shape: Shape, dtype, class, data: &[f64]| {
            let id = graph.source("operand", shape.clone(), dtype, class);
            values.insert(id, Value::new(shape, data.to_vec()));
            id
        };
        let state = TensorClass::OptimizerState;
        let class = TensorClass::Parameter(Training::Trainable);
        let moment = MomentFormat::of(self.moments).shape(&shape);
        let sums = MomentFormat::Observed;
        let parameter = operand(&mut graph, shape.clone(), self.dtype, class, &self.parameter);
        let gradient =
            operand(&mut graph, shape.clone(), DType::F32, TensorClass::Gradient, &self.gradient);
        let first_moment = operand(&mut graph, moment.clone(), self.moments, state, &self.first);
        let second_moment = operand(&mut graph, moment, self.moments, state, &self.second);
        let master = self
            .master
            .as_ref()
            .map(|master| operand(&mut graph, shape.clone(), DType::F32, state, master));
        let observed = observes.then(|| {
            let shape = sums.shape(&shape);
            let before = vec![-1.0; shape.elements()];
            operand(&mut graph, shape, sums.dtype(), state, &before)
        });
        let mut input = |graph: &mut Graph, shape: Shape, dtype, data: Vec<f64>| -> TensorId {
            let id = graph.input("input", shape.clone(), dtype);
            values.insert(id, Value::new(shape, data));
            id
        };
        let scalars = StepScalars::adamw(RATE, &HYPER, NUMBER).to_array().map(f64::from).to_vec();
        let scalars = input(&mut graph, Shape::from([StepScalars::LEN]), DType::F32, scalars);
        let clip = input(&mut graph, Shape::scalar(), DType::F32, vec![f64::from(CLIP)]);
        let words = Seed { seed: 3, step: NUMBER }.to_words().map(f64::from).to_vec();
        let random = input(&mut graph, Shape::from([SEED_WORDS]), DType::I32, words);
        let stochastic = |is_stochastic: bool| match is_stochastic {
            true => Rounding::Stochastic,
            false => Rounding::Nearest,
        };
        let op = Op::AdamW {
            parameter,
            gradient,
            first_moment,
            second_moment,
            master,
            scalars,
            clip: Some(clip),
            random: Some(random),
            observed,
            hyper: HYPER,
            rounding: stochastic(self.dtype == DType::BF16 && self.master.is_none()),
            moment_rounding: stochastic(self.moments != DType::F32),
            stream: 4,
            first_element: 0,
        };
        let outputs = graph.apply("update", op).unwrap_or_else(|error| panic!("{error}"));
        let mut machine = Machine::new(&graph, &values);
        machine.run();
        outputs.iter().map(|&id| machine.get(id).data).collect()
    }
}

#[test]
fn sums_over_updates() {
    let mut rng = Rng::new(17);
    for dtype in [DType::F32, DType::BF16] {
        for moments in [DType::F32, DType::BF16, DType::U8] {
            for (elements, master) in [(1, false), (9, true), (2047, false), (40_001, true)] {
                let case = Case::new(&mut rng, elements, dtype, moments, master);
                let context = format!("{dtype}, moments in {moments}, {elements} elements");
                let plain = case.update(false);
                let mut made = case.update(true);
                let sums = made.pop().expect("they were asked for");
                assert!(made == plain, "{context}: another output changed");
                let expected = case.expected();
                assert_eq!(sums.len(), OBSERVED_SUMS * expected.len(), "{context}");
                for (at, (got, (want, magnitude))) in
                    sums.iter().zip(expected.into_iter().flatten()).enumerate()
                {
                    let got = f64::from(f32::from_bits((*got as i32).cast_unsigned()));
                    let error = (got - want).abs();
                    assert!(error <= 1e-5 * magnitude, "{context}, sum {at}: {got}, not {want}");
                }
            }
        }
    }
}

/// The order of the sum is part of what is promised: a CUDA block adds up in it.
#[test]
fn sums_are_added_up_in_one_order() {
    let mut rng = Rng::new(5);
    let case = Case::new(&mut rng, OBSERVED_BLOCK, DType::F32, DType::F32, false);
    let made = case.update(true).pop().expect("sums");
    let squares: Vec<f32> = case.parameter.iter().map(|&x| (x as f32) * (x as f32)).collect();
    // Eight elements of a thread, 32 threads of a warp by halves, then eight warps and 24 zeros by halves.
    let halves = |values: &[f32]| -> f32 {
        let mut values = values.to_vec();
        while values.len() > 1 {
            let (low, high) = values.split_at(values.len() / 2);
            values = low.iter().zip(high).map(|(a, b)| a + b).collect();
        }
        values[0]
    };
    let threads: Vec<f32> = squares.chunks_exact(8).map(halves).collect();
    let mut warps: Vec<f32> = threads.chunks_exact(32).map(halves).collect();
    // The first and the fifth are observed.
    warps.iter_mut().enumerate().filter(|(at, _)| at % 4 != 0).for_each(|(_, warp)| *warp = 0.0);
    warps.resize(32, 0.0);
    assert_eq!((made[3] as i32).cast_unsigned(), halves(&warps).to_bits());
}

/// Each instruction set has its own way to merge vectors. Tests that run meanwhile are promised the same results.
#[test]
fn any_instruction_set_gives_the_same_updates_and_sums() {
    let mut rng = Rng::new(23);
    for moments in [DType::F32, DType::BF16, DType::U8] {
        let case = Case::new(&mut rng, 5001, DType::F32, moments, false);
        let (before, widest) = (isa(), case.update(true));
        for other in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            force_isa(other);
            let made = case.update(true);
            force_isa(before);
            assert!(made == widest, "moments in {moments}, {other:?}");
        }
    }
}
