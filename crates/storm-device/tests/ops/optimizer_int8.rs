//! Updates with moments in 8 bits: against f64, over many steps of hard gradients, in pieces.

use crate::reference::Value;
use crate::support::*;
use half::bf16;
use rayon::ThreadPoolBuilder;
use std::collections::BTreeMap;
use std::ops::Range;
use storm_graph::random::{SEED_WORDS, Seed};
use storm_graph::{
    AdamWParameters, DType, Graph, MOMENT_GROUP, MOMENT_GROUP_BYTES, MomentFormat, Op,
    PIECE_ALIGNMENT, Rounding, Shape, StepScalars, TensorClass, TensorId, Training,
};

const HYPER: AdamWParameters =
    AdamWParameters { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };

/// From one element to more than a thread's share.
const SIZES: [usize; 7] = [1, 2, 127, 128, 129, 600, 40_001];

/// A parameter in training.
#[derive(Clone, Debug, PartialEq)]
struct State {
    parameter: Vec<f64>,
    master: Option<Vec<f64>>,
    /// As they lie in memory.
    moments: [Vec<u8>; 2],
}

/// One update.
#[derive(Clone, Copy)]
struct Step {
    dtype: DType,
    hyper: AdamWParameters,
    rate: f32,
    number: u32,
    first_element: usize,
}

impl State {
    fn new(parameter: Vec<f64>) -> State {
        let bytes = MomentFormat::Int8.size_bytes(parameter.len());
        State { parameter, master: None, moments: [vec![0; bytes], vec![0; bytes]] }
    }

    /// Random codes and scales, with every code that there is.
    fn random(rng: &mut Rng, dtype: DType, elements: usize, has_master: bool) -> State {
        let values =
            |rng: &mut Rng| (0..elements).map(|_| stored(dtype, rng.normal())).collect::<Vec<_>>();
        let mut state = State::new(values(rng));
        state.master = has_master.then(|| values(rng));
        for moment in &mut state.moments {
            for group in moment.chunks_exact_mut(MOMENT_GROUP_BYTES) {
                group.iter_mut().for_each(|code| *code = rng.below(256) as u8);
                let scale = (0.01 * rng.unit()) as f32;
                group[MOMENT_GROUP..].copy_from_slice(&scale.to_le_bytes());
            }
        }
        state
    }

    fn piece(&self, elements: Range<usize>) -> State {
        let int8 = MomentFormat::Int8;
        let bytes = int8.size_bytes(elements.start)..int8.size_bytes(elements.end);
        State {
            parameter: self.parameter[elements.clone()].to_vec(),
            master: self.master.as_ref().map(|master| master[elements.clone()].to_vec()),
            moments: self.moments.each_ref().map(|moment| moment[bytes.clone()].to_vec()),
        }
    }

    /// The values of both moments, in f64.
    fn values(&self) -> [Vec<f64>; 2] {
        let of = |moment: &[u8], value: fn(u8) -> f64| -> Vec<f64> {
            let groups = moment.chunks_exact(MOMENT_GROUP_BYTES);
            let values = groups.flat_map(|group| {
                let scale: [u8; 4] = group[MOMENT_GROUP..].try_into().expect("four bytes");
                let scale = f64::from(f32::from_le_bytes(scale));
                group[..MOMENT_GROUP].iter().map(move |&code| value(code) * scale)
            });
            values.take(self.parameter.len()).collect()
        };
        [of(&self.moments[0], first_level), of(&self.moments[1], second_level)]
    }

    /// What the device makes of it.
    fn update(&self, gradient: &[f64], step: Step) -> State {
        let (mut graph, mut values) = (Graph::new(), BTreeMap::new());
        let shape = Shape::from([self.parameter.len()]);
        let mut operand = |graph: &mut Graph, dtype, class, data: &[f64]| {
            let shape = match dtype {
                DType::U8 => MomentFormat::Int8.shape(&shape),
                _ => shape.clone(),
            };
            let id = graph.source("operand", shape.clone(), dtype, class);
            values.insert(id, Value::new(shape, data.to_vec()));
            id
        };
        let state = TensorClass::OptimizerState;
        let class = TensorClass::Parameter(Training::Trainable);
        let parameter = operand(&mut graph, step.dtype, class, &self.parameter);
        let gradient = operand(&mut graph, DType::F32, TensorClass::Gradient, gradient);
        let [first_moment, second_moment] = self.moments.each_ref().map(|moment| {
            let bytes: Vec<f64> = moment.iter().copied().map(f64::from).collect();
            operand(&mut graph, DType::U8, state, &bytes)
        });
        let master =
            self.master.as_ref().map(|master| operand(&mut graph, DType::F32, state, master));
        let mut input = |graph: &mut Graph, len: usize, dtype, data: Vec<f64>| -> TensorId {
            let id = graph.input("input", [len], dtype);
            values.insert(id, Value::new(Shape::from([len]), data));
            id
        };
        let scalars = StepScalars::adamw(step.rate, &step.hyper, step.number).to_array();
        let scalars = scalars.map(f64::from).to_vec();
        let scalars = input(&mut graph, StepScalars::LEN, DType::F32, scalars);
        let words = Seed { seed: 3, step: step.number }.to_words().map(f64::from).to_vec();
        let random = input(&mut graph, SEED_WORDS, DType::I32, words);
        let rounding = match step.dtype {
            DType::BF16 if master.is_none() => Rounding::Stochastic,
            _ => Rounding::Nearest,
        };
        let op = Op::AdamW {
            parameter,
            gradient,
            first_moment,
            second_moment,
            master,
            scalars,
            clip: None,
            random: Some(random),
            observed: None,
            hyper: step.hyper,
            rounding,
            moment_rounding: Rounding::Stochastic,
            stream: 4,
            first_element: step.first_element,
        };
        let outputs = graph.apply("update", op).unwrap_or_else(|error| panic!("{error}"));
        let mut machine = Machine::new(&graph, &values);
        machine.run();
        State {
            parameter: machine.get(outputs[0]).data,
            master: outputs.get(3).map(|&id| machine.get(id).data),
            moments: [outputs[1], outputs[2]].map(|id| machine.bytes(id)),
        }
    }
}

/// What a code stands for, from the definition.
fn first_level(code: u8) -> f64 {
    let code = f64::from(code.cast_signed()).max(-127.0);
    let z = code.abs() / 127.0;
    code.signum() * z / (2.0 - z)
}

fn second_level(code: u8) -> f64 {
    (f64::from(code) / 255.0).powi(4)
}

/// `x` as memory of a dtype holds it.
fn stored(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::BF16 => f64::from(bf16::from_f32(x as f32).to_f32()),
        _ => f64::from(x as f32),
    }
}

/// Everything in f64: parameter and moments before they are rounded.
fn exact(state: &State, gradient: &[f64], step: Step) -> [Vec<f64>; 3] {
    let (beta1, beta2) = (f64::from(step.hyper.beta1), f64::from(step.hyper.beta2));
    let bound = (1.0 - beta1) / ((1.0 - beta2) * (1.0 - beta1 * beta1 / beta2)).sqrt();
    let correction = |beta: f64| 1.0 - beta.powi(step.number as i32);
    let start = state.master.as_ref().unwrap_or(&state.parameter);
    let [firsts, seconds] = state.values();
    let mut made = [Vec::new(), Vec::new(), Vec::new()];
    for (((&p, &g), m), v) in start.iter().zip(gradient).zip(firsts).zip(seconds) {
        let (m, v) = (beta1 * m + (1.0 - beta1) * g, beta2 * v + (1.0 - beta2) * g * g);
        let m = m.clamp(-bound * v.sqrt(), bound * v.sqrt());
        let root = (v / correction(beta2)).sqrt() + f64::from(step.hyper.epsilon);
        let decayed = p * (1.0 - f64::from(step.rate) * f64::from(step.hyper.weight_decay));
        let value = decayed - f64::from(step.rate) * m / correction(beta1) / root;
        [value, m, v].into_iter().zip(&mut made).for_each(|(value, made)| made.push(value));
    }
    made
}

/// The code is of one of the two levels around the value, within what f32 can tell.
fn assert_neighbor(context: &str, got: f64, want: f64, scale: f64, levels: &[f64]) {
    let y = want / scale;
    let above = levels.partition_point(|&level| level < y * (1.0 - 1e-5)).max(1);
    let around = &levels[above - 1..(above + 2).min(levels.len())];
    let near = |level: &f64| (got / scale - level).abs() <= 1e-6 * level.abs().max(1e-6);
    assert!(around.iter().any(near), "{context}: {want} of {scale} became {got}");
}

#[test]
fn adamw_matches_the_definition() {
    let mut first: Vec<f64> = (0..=255u8).map(first_level).collect();
    first.sort_by(f64::total_cmp);
    first.dedup();
    let second: Vec<f64> = (0..=255u8).map(second_level).collect();
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let elements = rng.pick(&SIZES);
        let (dtype, has_master) =
            rng.pick(&[(DType::F32, false), (DType::BF16, true), (DType::BF16, false)]);
        let state = State::random(&mut rng, dtype, elements, has_master);
        let gradient: Vec<f64> =
            (0..elements).map(|_| stored(DType::F32, 0.1 * rng.normal())).collect();
        let number = 1 + rng.below(100) as u32;
        let step = Step { dtype, hyper: HYPER, rate: 1e-2, number, first_element: 0 };
        let [values, firsts, seconds] = exact(&state, &gradient, step);
        let made = state.update(&gradient, step);
        let context = format!("seed {seed}");
        let updated = made.master.as_ref().unwrap_or(&made.parameter);
        // A step of bf16, up or down.
        let tolerance = if has_master || dtype == DType::F32 { 1e-5 } else { 0.0079 };
        for (want, got) in values.iter().zip(updated) {
            let error = (want - got).abs();
            assert!(error <= tolerance * want.abs().max(0.01), "{context}: {got}, not {want}");
        }
        for (which, (wanted, levels)) in
            [(&firsts, &first), (&seconds, &second)].into_iter().enumerate()
        {
            let stored = &made.values()[which];
            for (group, (want, got)) in
                wanted.chunks(MOMENT_GROUP).zip(stored.chunks(MOMENT_GROUP)).enumerate()
            {
                let largest = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let scale = made.moments[which][group * MOMENT_GROUP_BYTES..][MOMENT_GROUP..][..4]
                    .try_into()
                    .expect("four bytes");
                let scale = f64::from(f32::from_le_bytes(scale));
                assert!((scale / largest - 1.0).abs() < 1e-5, "{context}: {scale} for {largest}");
                for (&want, &got) in want.iter().zip(got) {
                    assert_neighbor(&context, got, want, scale, levels);
                }
            }
        }
    }
}

/// The longest step, as a multiple of the learning rate, that Adam can make at all.
fn longest_step(hyper: &AdamWParameters, number: u32) -> f64 {
    let correction = |beta: f32| 1.0 - f64::from(beta).powi(number as i32);
    let bound = f64::from(hyper.first_moment_bound().expect("there is one"));
    bound * correction(hyper.beta2).sqrt() / correction(hyper.beta1)
}

/// An element of a gradient by step, position and a random number.
type Gradient = fn(u32, usize, f64) -> f64;

/// Gradients that are hard on groups with one scale: no step is longer than any of Adam's, and nothing becomes NaN. Without the
/// bound, small moments that are rounded up against second moments that are rounded to nothing make steps dozens of
/// times as long.
#[test]
fn hard_gradients_make_no_long_steps() {
    let gradients: [(&str, Gradient); 6] = [
        ("one huge element in a group", |_, i, x| if i % 128 == 5 { 1e3 } else { 1e-3 * x }),
        (
            "another huge one each time",
            |t, i, x| {
                if i as u32 % 128 == t % 128 { 1e4 } else { 1e-3 * x }
            },
        ),
        ("alternating", |t, i, _| if t % 2 == 0 { 1.0 + i as f64 } else { -1.0 - i as f64 }),
        ("mostly nothing", |t, i, x| if (t + i as u32).is_multiple_of(17) { x } else { 0.0 }),
        ("a wide range", |_, i, x| x * 10f64.powi(i as i32 % 16 - 12)),
        ("tiny", |_, _, x| 1e-21 * x),
    ];
    for (name, gradient) in gradients {
        for beta2 in [0.95, 0.999] {
            let hyper = AdamWParameters { beta2, weight_decay: 0.0, epsilon: 1e-30, ..HYPER };
            let mut rng = Rng::new(7);
            let mut state = State::new(vec![0.0; 300]);
            for number in 1..60 {
                let given: Vec<f64> = (0..300)
                    .map(|i| stored(DType::F32, gradient(number, i, rng.normal())))
                    .collect();
                let step = Step { dtype: DType::F32, hyper, rate: 1e-3, number, first_element: 0 };
                let made = state.update(&given, step);
                let most = 1e-3 * longest_step(&hyper, number) * 1.0001;
                for (i, (old, new)) in state.parameter.iter().zip(&made.parameter).enumerate() {
                    let length = (old - new).abs();
                    assert!(
                        length <= most + 1e-7,
                        "{name}, beta2 {beta2}, update {number}, element {i}: {length} of {most}"
                    );
                }
                state = made;
            }
        }
    }
}

/// Parameters that get no gradient stay where they are, and so do those whose updates are cancelled.
#[test]
fn no_gradient_is_no_step() {
    let mut rng = Rng::new(1);
    let hyper = AdamWParameters { weight_decay: 0.0, ..HYPER };
    let mut state = State::new((0..200).map(|_| stored(DType::BF16, rng.normal())).collect());
    let before = state.clone();
    for number in 1..5 {
        let step = Step { dtype: DType::BF16, hyper, rate: 0.1, number, first_element: 0 };
        state = state.update(&vec![0.0; 200], step);
    }
    assert_eq!(state, before);
}

/// Where a parameter ends after many steps of usual gradients, against Adam in f64: on average what it should be.
#[test]
fn many_steps_end_where_exact_moments_do() {
    let elements = 1 << 14;
    for beta2 in [0.95, 0.999] {
        let hyper = AdamWParameters { beta2, weight_decay: 0.0, ..HYPER };
        let (beta1, beta2) = (f64::from(hyper.beta1), f64::from(hyper.beta2));
        let mut rng = Rng::new(11);
        let mut state = State::new(vec![0.0; elements]);
        let mut exact = vec![(0.0f64, 0.0f64, 0.0f64); elements];
        for number in 1..80 {
            // Each element has a slope of its own, and noise.
            let gradient: Vec<f64> = (0..elements)
                .map(|i| stored(DType::F32, (i % 7) as f64 * 0.02 + 0.1 * rng.normal()))
                .collect();
            let step = Step { dtype: DType::F32, hyper, rate: 1e-3, number, first_element: 0 };
            state = state.update(&gradient, step);
            for ((p, m, v), g) in exact.iter_mut().zip(&gradient) {
                *m = beta1 * *m + (1.0 - beta1) * g;
                *v = beta2 * *v + (1.0 - beta2) * g * g;
                let root = (*v / (1.0 - beta2.powi(number as i32))).sqrt() + 1e-8;
                *p -= 1e-3 * *m / (1.0 - beta1.powi(number as i32)) / root;
            }
        }
        for slope in 0..7 {
            let mean = |values: &mut dyn Iterator<Item = f64>| -> f64 {
                let values: Vec<f64> = values.skip(slope).step_by(7).collect();
                values.iter().sum::<f64>() / values.len() as f64
            };
            let got = mean(&mut state.parameter.iter().copied());
            let want = mean(&mut exact.iter().map(|&(p, ..)| p));
            let scale = mean(&mut exact.iter().map(|&(p, ..)| p.abs()));
            assert!((got - want).abs() < 0.02 * scale, "slope {slope}: {got}, not {want}");
        }
    }
}

#[test]
fn pieces_give_the_same_bits_as_the_whole() {
    const CUTS: [usize; 4] = [0, PIECE_ALIGNMENT, 3 * PIECE_ALIGNMENT, 40_001];
    for (dtype, has_master) in [(DType::F32, false), (DType::BF16, true), (DType::BF16, false)] {
        let mut rng = Rng::new(5);
        let state = State::random(&mut rng, dtype, CUTS[3], has_master);
        let gradient: Vec<f64> =
            (0..CUTS[3]).map(|_| stored(DType::F32, 0.1 * rng.normal())).collect();
        let step = Step { dtype, hyper: HYPER, rate: 1e-2, number: 9, first_element: 0 };
        let whole = state.update(&gradient, step);
        for cut in CUTS.windows(2) {
            let piece = cut[0]..cut[1];
            let step = Step { first_element: piece.start, ..step };
            let made = state.piece(piece.clone()).update(&gradient[piece.clone()], step);
            assert!(made == whole.piece(piece.clone()), "{dtype}, {piece:?}");
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let mut rng = Rng::new(6);
    let state = State::random(&mut rng, DType::BF16, 100_001, false);
    let gradient: Vec<f64> = (0..100_001).map(|_| stored(DType::F32, 0.1 * rng.normal())).collect();
    let step = Step { dtype: DType::BF16, hyper: HYPER, rate: 1e-2, number: 3, first_element: 0 };
    let run = |threads: usize| {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        pool.install(|| state.update(&gradient, step))
    };
    let alone = run(1);
    for threads in [2, 3, 8] {
        assert!(run(threads) == alone, "{threads} threads");
    }
}

#[test]
fn what_cannot_be_updated_is_refused() {
    let problem = |hyper: AdamWParameters, rounding: Rounding, groups: usize| {
        let mut graph = Graph::new();
        let class = TensorClass::OptimizerState;
        let parameter = graph.parameter("p", [300], DType::BF16, Training::Trainable);
        let gradient = graph.source("g", [300], DType::BF16, TensorClass::Gradient);
        let mut moment = |name: &str| graph.source(name, [groups, 132], DType::U8, class);
        let (first_moment, second_moment) = (moment("m"), moment("v"));
        let scalars = graph.input("scalars", [StepScalars::LEN], DType::F32);
        let random = Some(graph.input("random", [SEED_WORDS], DType::I32));
        let op = Op::AdamW {
            parameter,
            gradient,
            first_moment,
            second_moment,
            master: None,
            scalars,
            clip: None,
            random,
            observed: None,
            hyper,
            rounding: Rounding::Stochastic,
            moment_rounding: rounding,
            stream: 0,
            first_element: 0,
        };
        graph.apply("update", op).map(drop).map_err(|error| error.to_string())
    };
    let stochastic = Rounding::Stochastic;
    assert_eq!(problem(HYPER, stochastic, 3), Ok(()));
    let error = problem(HYPER, Rounding::Nearest, 3).expect_err("not rounded like that");
    assert!(error.contains("rounded stochastically"), "{error}");
    let error = problem(HYPER, stochastic, 2).expect_err("too few groups");
    assert!(error.contains("(3, 132)"), "{error}");
    let hyper = AdamWParameters { beta1: 0.95, beta2: 0.9, ..HYPER };
    let error = problem(hyper, stochastic, 3).expect_err("no bound");
    assert!(error.contains("beta1 squared to be less than beta2"), "{error}");
}
