//! Norms, clipping and updates.

use crate::reference::{Value, evaluate};
use crate::support::*;
use half::bf16;
use std::collections::BTreeMap;
use std::ops::Range;
use storm_graph::random::{SEED_WORDS, Seed};
use storm_graph::{
    AdamWParameters, DType, Graph, MomentumDirection, Op, PIECE_ALIGNMENT, Rounding, SUM_BLOCK,
    SgdParameters, Shape, StepScalars, TensorClass, TensorId, Training,
};

const HYPER: AdamWParameters =
    AdamWParameters { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };

/// From one element to more than a thread's share.
const SIZES: [usize; 7] = [1, 2, 7, 33, 129, 600, 40_001];

/// A graph of one update, with the values of its operands.
struct Update {
    graph: Graph,
    values: BTreeMap<TensorId, Value>,
    rng: Rng,
    /// Of the whole parameter.
    elements: usize,
    /// Those that are updated.
    piece: Range<usize>,
}

impl Update {
    fn new(seed: u64, elements: usize) -> Update {
        Update::of_piece(seed, elements, 0..elements)
    }

    fn of_piece(seed: u64, elements: usize, piece: Range<usize>) -> Update {
        let (graph, values, rng) = (Graph::new(), BTreeMap::new(), Rng::new(seed));
        Update { graph, values, rng, elements, piece }
    }

    fn operand(&mut self, dtype: DType, class: TensorClass, f: fn(f64) -> f64) -> TensorId {
        let shape = Shape::from([self.piece.len()]);
        let id = self.graph.source("operand", shape.clone(), dtype, class);
        let whole: Vec<f64> =
            (0..self.elements).map(|_| stored(dtype, f(self.rng.normal()))).collect();
        self.values.insert(id, Value::new(shape, whole[self.piece.clone()].to_vec()));
        id
    }

    fn parameter(&mut self, dtype: DType) -> TensorId {
        self.operand(dtype, TensorClass::Parameter(Training::Trainable), |x| x)
    }

    fn gradient(&mut self, dtype: DType) -> TensorId {
        self.operand(dtype, TensorClass::Gradient, |x| 0.1 * x)
    }

    fn scalars(&mut self, rate: f32, update: u32) -> TensorId {
        let id = self.graph.input("scalars", [StepScalars::LEN], DType::F32);
        let scalars = StepScalars::adamw(rate, &HYPER, update).to_array();
        let data = scalars.iter().copied().map(f64::from).collect();
        self.values.insert(id, Value::new(Shape::from([StepScalars::LEN]), data));
        id
    }

    fn clip(&mut self) -> Option<TensorId> {
        self.rng.coin().then(|| {
            let id = self.graph.input("clip", Shape::scalar(), DType::F32);
            self.values.insert(id, Value::scalar(0.375));
            id
        })
    }

    fn random(&mut self, seed: u64, step: u32) -> TensorId {
        let id = self.graph.input("random", [SEED_WORDS], DType::I32);
        let data = Seed { seed, step }.to_words().map(f64::from).to_vec();
        self.values.insert(id, Value::new(Shape::from([SEED_WORDS]), data));
        id
    }

    /// What the device and what the reference make of the op.
    fn run(&mut self, op: Op<TensorId>) -> Vec<(Value, Value)> {
        let want = evaluate(&op.clone().map(|_, id| &self.values[&id]));
        let outputs = match self.graph.apply("update", op) {
            Ok(outputs) => outputs,
            Err(error) => panic!("{error}"),
        };
        let mut machine = Machine::new(&self.graph, &self.values);
        machine.run();
        outputs.iter().map(|&id| machine.get(id)).zip(want).collect()
    }
}

/// `x` as memory of a dtype holds it.
fn stored(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::BF16 => f64::from(bf16::from_f32(x as f32).to_f32()),
        _ => f64::from(x as f32),
    }
}

#[test]
fn adamw() {
    for seed in 0..60 {
        let elements = Rng::new(seed + 1000).pick(&SIZES);
        let mut update = Update::new(seed, elements);
        let floats = [DType::F32, DType::BF16];
        let dtype = update.rng.pick(&floats);
        let moments = update.rng.pick(&floats);
        let gradients = update.rng.pick(&floats);
        let parameter = update.parameter(dtype);
        let gradient = update.gradient(gradients);
        let state = TensorClass::OptimizerState;
        let first_moment = update.operand(moments, state, |x| 0.05 * x);
        let second_moment = update.operand(moments, state, |x| 0.01 * x * x);
        let master = update.rng.coin().then(|| update.operand(DType::F32, state, |x| x));
        let step = 1 + update.rng.below(100) as u32;
        let scalars = update.scalars(1e-2, step);
        let clip = update.clip();
        let op = Op::AdamW {
            parameter,
            gradient,
            first_moment,
            second_moment,
            master,
            scalars,
            clip,
            random: None,
            observed: None,
            hyper: HYPER,
            rounding: Rounding::Nearest,
            moment_rounding: Rounding::Nearest,
            stream: 0,
            first_element: 0,
        };
        let made = update.run(op);
        let dtypes = [dtype, moments, moments, DType::F32];
        for (i, ((got, want), dtype)) in made.iter().zip(dtypes).enumerate() {
            let context = format!("AdamW, seed {seed}, output {i}");
            match dtype {
                DType::BF16 => assert_rounded_once(&context, got, want),
                _ => assert_close(&context, got, want, F32_TOLERANCE, 0.0),
            }
        }
        if let [(parameter, _), _, _, (master, _)] = &made[..] {
            let rounded: Vec<f64> = master.data.iter().map(|&x| stored(dtype, x)).collect();
            assert_eq!(parameter.data, rounded, "the parameter is the master's rounding");
        }
    }
}

#[test]
fn sgd() {
    for seed in 0..30 {
        let elements = Rng::new(seed + 1000).pick(&SIZES);
        let mut update = Update::new(seed, elements);
        let dtype = update.rng.pick(&[DType::F32, DType::BF16]);
        let gradients = update.rng.pick(&[DType::F32, DType::BF16]);
        let parameter = update.parameter(dtype);
        let gradient = update.gradient(gradients);
        let scalars = update.scalars(0.5, 1);
        let clip = update.clip();
        let op = Op::Sgd {
            parameter,
            gradient,
            momentum: None,
            master: None,
            scalars,
            clip,
            random: None,
            hyper: SgdParameters::plain(0.1),
            rounding: Rounding::Nearest,
            moment_rounding: Rounding::Nearest,
            stream: 0,
            first_element: 0,
        };
        let (got, want) = &update.run(op)[0];
        let context = format!("Sgd, seed {seed}");
        match dtype {
            DType::BF16 => assert_rounded_once(&context, got, want),
            _ => assert_close(&context, got, want, F32_TOLERANCE, 0.0),
        }
    }
}

/// Momentum and Nesterov's direction, with and without a master.
#[test]
fn sgd_with_momentum() {
    for seed in 0..60 {
        let elements = Rng::new(seed + 1000).pick(&SIZES);
        let mut update = Update::new(seed, elements);
        let floats = [DType::F32, DType::BF16];
        let (dtype, moments) = (update.rng.pick(&floats), update.rng.pick(&floats));
        let gradients = update.rng.pick(&floats);
        let state = TensorClass::OptimizerState;
        let parameter = update.parameter(dtype);
        let gradient = update.gradient(gradients);
        let momentum = Some(update.operand(moments, state, |x| 0.3 * x));
        let master = update.rng.coin().then(|| update.operand(DType::F32, state, |x| x));
        let scalars = update.scalars(0.5, 1);
        let clip = update.clip();
        let direction =
            update.rng.pick(&[MomentumDirection::Momentum, MomentumDirection::Nesterov]);
        let op = Op::Sgd {
            parameter,
            gradient,
            momentum,
            master,
            scalars,
            clip,
            random: None,
            hyper: SgdParameters { momentum: 0.9, direction, weight_decay: 0.1 },
            rounding: Rounding::Nearest,
            moment_rounding: Rounding::Nearest,
            stream: 0,
            first_element: 0,
        };
        let made = update.run(op);
        assert_eq!(made.len(), 2 + usize::from(master.is_some()));
        for (i, ((got, want), dtype)) in made.iter().zip([dtype, moments, DType::F32]).enumerate() {
            let context = format!("Sgd with momentum, seed {seed}, output {i}");
            match dtype {
                DType::BF16 => assert_rounded_once(&context, got, want),
                _ => assert_close(&context, got, want, F32_TOLERANCE, 0.1),
            }
        }
    }
}

/// The update of many elements with stochastic rounding: what is stored of the parameter (and of
/// the moments), and what was meant.
fn stochastic(adamw: bool, seed: u64, step: u32, stream: u16) -> Vec<(Value, Value)> {
    let mut update = Update::new(5, 40_001);
    let parameter = update.parameter(DType::BF16);
    let gradient = update.gradient(DType::F32);
    let scalars = update.scalars(1e-3, 7);
    let random = Some(update.random(seed, step));
    let rounding = Rounding::Stochastic;
    let op = if adamw {
        let state = TensorClass::OptimizerState;
        Op::AdamW {
            parameter,
            gradient,
            first_moment: update.operand(DType::BF16, state, |x| 0.05 * x),
            second_moment: update.operand(DType::BF16, state, |x| 0.01 * x * x + 0.001),
            master: None,
            scalars,
            clip: None,
            random,
            observed: None,
            hyper: HYPER,
            rounding,
            moment_rounding: Rounding::Stochastic,
            stream,
            first_element: 0,
        }
    } else {
        Op::Sgd {
            parameter,
            gradient,
            momentum: None,
            master: None,
            scalars,
            clip: None,
            random,
            hyper: SgdParameters::plain(0.1),
            rounding,
            moment_rounding: Rounding::Nearest,
            stream,
            first_element: 0,
        }
    };
    update.run(op)
}

#[test]
fn stochastic_rounding_goes_to_a_neighbour_and_is_unbiased() {
    for adamw in [true, false] {
        // By output: error of each element in deviations.
        let mut errors: Vec<Vec<f64>> = Vec::new();
        for step in 0..8 {
            let outputs = stochastic(adamw, 42, step, 3);
            errors.resize(outputs.len(), Vec::new());
            for ((got, want), errors) in outputs.iter().zip(&mut errors) {
                let pairs = got.data.iter().zip(&want.data);
                errors.extend(pairs.map(|(&got, &want)| rounding_error(got, want)));
            }
        }
        for (output, error) in errors.iter().enumerate() {
            let context = format!("adamw {adamw}, output {output}");
            // Zeros are elements that tell nothing.
            let count = error.iter().filter(|&&e| e != 0.0).count() as f64;
            assert!(count > 100_000.0, "{context}: {count} elements are rounded");
            let deviations = error.iter().sum::<f64>() / count.sqrt();
            assert!(deviations.abs() < 4.0, "{context}: off by {deviations} deviations");
            let spread = error.iter().map(|e| e * e).sum::<f64>() / count;
            assert!((0.95..1.05).contains(&spread), "{context}: spread {spread}");
            // Each output draws bits of its own.
            for other in &errors[..output] {
                let together: f64 = error.iter().zip(other).map(|(a, b)| a * b).sum();
                let deviations = together / (error.len() as f64).sqrt();
                assert!(deviations.abs() < 4.5, "{context}: correlated, {deviations} deviations");
            }
        }
    }
}

/// How far a value was rounded, in standard deviations of a fair choice between its neighbours.
fn rounding_error(got: f64, want: f64) -> f64 {
    let below = neighbour_below(want);
    let above = neighbour_above(below);
    let gap = above - below;
    let up = (want - below) / gap;
    // The device works in f32: next to a grid point it may see the other side of it, and there the
    // deviation tells nothing.
    if !(0.01..0.99).contains(&up) {
        let nearest = if up < 0.5 { below } else { above };
        assert!((got - nearest).abs() <= gap * 1.001, "{want} became {got}");
        return 0.0;
    }
    assert!(got == below || got == above, "{want} became {got}");
    (got - want) / gap / (up * (1.0 - up)).sqrt()
}

#[test]
fn stochastic_rounding_depends_on_seed_step_and_stream_alone() {
    let values = |seed, step, stream| {
        let outputs = stochastic(true, seed, step, stream);
        outputs.into_iter().map(|(got, _)| got.data).collect::<Vec<_>>()
    };
    let base = values(1, 1, 1);
    assert_eq!(base, values(1, 1, 1));
    for (seed, step, stream) in [(2, 1, 1), (1 << 32 | 1, 1, 1), (1, 2, 1), (1, 1, 2)] {
        for (base, other) in base.iter().zip(values(seed, step, stream)) {
            assert_ne!(*base, other, "seed {seed}, step {step}, stream {stream}");
        }
    }
}

/// What one piece of a parameter and of its state becomes, to the bit.
fn piece_bits(adamw: bool, dtype: DType, has_master: bool, piece: Range<usize>) -> Vec<Vec<u64>> {
    let first_element = piece.start;
    let mut update = Update::of_piece(21, PIECES[PIECES.len() - 1], piece);
    let parameter = update.parameter(dtype);
    let gradient = update.gradient(dtype);
    let scalars = update.scalars(1e-2, 3);
    let random = Some(update.random(77, 5));
    let stochastic = match dtype {
        DType::BF16 => Rounding::Stochastic,
        _ => Rounding::Nearest,
    };
    let rounding = if has_master { Rounding::Nearest } else { stochastic };
    let (clip, stream) = (None, 9);
    let op = if adamw {
        let state = TensorClass::OptimizerState;
        Op::AdamW {
            parameter,
            gradient,
            first_moment: update.operand(dtype, state, |x| 0.05 * x),
            second_moment: update.operand(dtype, state, |x| 0.01 * x * x),
            master: has_master.then(|| update.operand(DType::F32, state, |x| x)),
            scalars,
            clip,
            random,
            observed: None,
            hyper: HYPER,
            rounding,
            moment_rounding: stochastic,
            stream,
            first_element,
        }
    } else {
        let weight_decay = 0.1;
        Op::Sgd {
            parameter,
            gradient,
            momentum: Some(update.operand(dtype, TensorClass::OptimizerState, |x| 0.3 * x)),
            master: has_master
                .then(|| update.operand(DType::F32, TensorClass::OptimizerState, |x| x)),
            scalars,
            clip,
            random,
            hyper: SgdParameters {
                momentum: 0.9,
                direction: MomentumDirection::Nesterov,
                weight_decay,
            },
            rounding,
            moment_rounding: stochastic,
            stream,
            first_element,
        }
    };
    let outputs = update.run(op).into_iter();
    outputs.map(|(got, _)| got.data.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Where pieces are cut; the last is the parameter's size.
const PIECES: [usize; 4] = [0, PIECE_ALIGNMENT, 3 * PIECE_ALIGNMENT, 40_001];

#[test]
fn updates_in_pieces_give_the_same_bits_as_the_whole() {
    for dtype in [DType::F32, DType::BF16] {
        for (adamw, has_master) in [(true, false), (true, true), (false, false), (false, true)] {
            let whole = piece_bits(adamw, dtype, has_master, 0..PIECES[PIECES.len() - 1]);
            let mut joined: Vec<Vec<u64>> = vec![Vec::new(); whole.len()];
            for cut in PIECES.windows(2) {
                let piece = piece_bits(adamw, dtype, has_master, cut[0]..cut[1]);
                joined.iter_mut().zip(piece).for_each(|(joined, piece)| joined.extend(piece));
            }
            assert!(joined == whole, "adamw {adamw}, {dtype}, master {has_master}");
        }
    }
}

/// The largest bf16 that is not above `x`.
fn neighbour_below(x: f64) -> f64 {
    let near = bf16::from_f64(x);
    let bits = near.to_bits();
    if near.to_f64() <= x {
        near.to_f64()
    } else if near.to_f64() > 0.0 {
        bf16::from_bits(bits - 1).to_f64()
    } else {
        bf16::from_bits(bits + 1).to_f64()
    }
}

/// The smallest bf16 above the bf16 `x`.
fn neighbour_above(x: f64) -> f64 {
    -neighbour_below_strictly(-x)
}

fn neighbour_below_strictly(x: f64) -> f64 {
    let bits = bf16::from_f64(x).to_bits();
    bf16::from_bits(if x > 0.0 { bits - 1 } else { (bits | 0x8000) + 1 }).to_f64()
}

#[test]
fn global_norm_and_sum_of_squares() {
    for (seed, dtype) in (0..20).flat_map(|seed| [(seed, DType::F32), (seed, DType::BF16)]) {
        let mut rng = Rng::new(seed);
        let (mut graph, mut values, mut parts) = (Graph::new(), BTreeMap::new(), Vec::new());
        let mut squares = 0.0;
        for _ in 0..1 + rng.below(5) {
            let width = rng.extent(129);
            let shape = Shape::from(&rng.row_shape(33, width)[..]);
            let x = graph.input("x", shape.clone(), dtype);
            let data: Vec<f64> =
                (0..shape.elements()).map(|_| stored(dtype, rng.normal())).collect();
            squares += data.iter().map(|x| x * x).sum::<f64>();
            values.insert(x, Value::new(shape, data));
            parts.push(graph.apply_one("part", Op::SumOfSquares { x }).expect("fits"));
        }
        let norm = graph.apply_one("norm", Op::GlobalNorm { parts }).expect("fits");
        let mut machine = Machine::new(&graph, &values);
        machine.run();
        let context = format!("GlobalNorm, seed {seed}, {dtype}");
        let want = Value::scalar(squares.sqrt());
        assert_close(&context, &machine.get(norm), &want, F32_TOLERANCE, 0.0);
    }
}

/// The partial sums of pieces, one after another, add up to the bits of the whole.
#[test]
fn sums_of_squares_in_pieces() {
    let mut rng = Rng::new(4);
    for dtype in [DType::F32, DType::BF16] {
        let sizes = [2 * SUM_BLOCK, SUM_BLOCK, 777];
        let elements = sizes.iter().sum();
        let data: Vec<f64> = (0..elements).map(|_| stored(dtype, rng.normal())).collect();
        let (mut graph, mut values, mut start) = (Graph::new(), BTreeMap::new(), 0);
        let mut squares = |size: usize, start: usize| {
            let x = graph.input("x", [size], dtype);
            let data = data[start..start + size].to_vec();
            values.insert(x, Value::new(Shape::from([size]), data));
            graph.apply("squares", Op::SumOfSquares { x }).expect("fits")
        };
        let whole = squares(elements, 0)[0];
        let mut pieces = Vec::new();
        for size in sizes {
            pieces.push(squares(size, start)[1]);
            start += size;
        }
        let mut machine = Machine::new(&graph, &values);
        machine.run();
        let partials: Vec<f64> = pieces.iter().flat_map(|&id| machine.get(id).data).collect();
        let whole = machine.get(whole).data[0];
        let mut graph = Graph::new();
        let id = graph.input("partials", [partials.len()], DType::F32);
        let sum = graph.apply_one("sum", Op::SumOfPartials { partials: id }).expect("fits");
        let shape = Shape::from([partials.len()]);
        let mut machine = Machine::new(&graph, &[(id, Value::new(shape, partials))].into());
        machine.run();
        assert_eq!(machine.get(sum).data[0].to_bits(), whole.to_bits(), "{dtype}");
    }
}

#[test]
fn clip_scale() {
    let unlimited = f32::INFINITY;
    let cases = [
        (0.5, 1.0, 1.0),
        (1.0, 1.0, 1.0),
        (4.0, 1.0, 0.25),
        (0.0, 1.0, 1.0),
        (1e30, 1.0, 1e-30),
        (1e30, unlimited, 1.0),
        (f64::NAN, 1.0, 0.0),
        (f64::NAN, unlimited, 0.0),
        (f64::INFINITY, 1.0, 0.0),
        (f64::INFINITY, unlimited, 0.0),
        (f64::NEG_INFINITY, 1.0, 0.0),
    ];
    for (norm_value, max_norm, want) in cases {
        let mut graph = Graph::new();
        let norm = graph.input("norm", Shape::scalar(), DType::F32);
        let scale = graph.apply_one("scale", Op::ClipScale { norm, max_norm }).expect("fits");
        let mut machine = Machine::new(&graph, &[(norm, Value::scalar(norm_value))].into());
        machine.run();
        let got = machine.get(scale).data[0];
        assert!((got - want).abs() <= 1e-6 * want, "{norm_value} of {max_norm}: {got}, not {want}");
    }
}
