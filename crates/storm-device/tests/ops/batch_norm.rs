//! Norms of channels over a batch, and their gradients.

use crate::reference::{Value, evaluate_graph};
use crate::support::*;
use storm_graph::random::{PHASE_WORDS, PhaseWords};
use storm_graph::{DType, Graph, NormActivation, Op, Shape, TensorId, Training};

fn phase(b: &mut Builder, training: bool) -> TensorId {
    let words = PhaseWords { training, seed: 5 << 33 }.to_words();
    b.integers("phase", &[PHASE_WORDS], |_, i| words[i])
}

/// A norm of `x`, with or without addend and ReLU.
fn norm(b: &mut Builder, name: &str, x: TensorId, shape: &[usize], training: bool) -> Op<TensorId> {
    let width = shape[shape.len() - 1];
    let running: Vec<f64> = (0..width).map(|_| b.rng.normal()).collect();
    let running_mean = b.constant("running_mean", &[width], running.clone());
    let squares = running.iter().map(|x| x * x + 0.1).collect();
    let running_variance = b.constant("running_variance", &[width], squares);
    let phase = phase(b, training);
    let op = Op::BatchStatistics { x, running_mean, running_variance, phase };
    let statistics = b.apply(&format!("{name}.statistics"), op);
    let learns = b.rng.pick(&[Training::Trainable, Training::Trainable, Training::Frozen]);
    let weight = b.trained(&format!("{name}.weight"), &[width], learns);
    let bias = b.trained(&format!("{name}.bias"), &[width], learns);
    let addend = b.maybe(|b| b.input("addend", shape));
    let activation = b.rng.pick(&[NormActivation::None, NormActivation::Relu]);
    let epsilon = b.rng.pick(&[1e-5, 1e-2]);
    let (mean, variance) = (statistics[0], statistics[1]);
    Op::BatchNorm { x, mean, variance, weight, bias, addend, epsilon, activation }
}

fn random_shape(b: &mut Builder) -> Vec<usize> {
    let width = b.rng.extent(129);
    match b.rng.below(3) {
        0 => vec![b.rng.extent(if width > 33 { 33 } else { 600 }), width],
        1 => vec![b.rng.extent(3), b.rng.extent(5), b.rng.extent(7), width],
        _ => vec![2, b.rng.extent(if width > 33 { 17 } else { 257 }), width],
    }
}

#[test]
fn batch_norms() {
    check("BatchNorm", 120, |b| {
        let shape = random_shape(b);
        let rows: usize = shape[..shape.len() - 1].iter().product();
        let x = b.input("x", &shape);
        // Two numbers less their mean are 0 or ±1 whatever they are.
        b.loosen(if rows <= 3 { 200.0 } else { 8.0 });
        let op = norm(b, "y", x, &shape, true);
        b.result("y", op);
        if b.rng.coin() {
            b.result("x.other", Op::Scale { x, factor: 0.5 });
        }
    });
}

/// As in a residual block: the sum of one norm is normalized again.
#[test]
fn stacked_batch_norms() {
    check("two batch norms", 20, |b| {
        let shape = [2, 3, 5, b.rng.pick(&[3, 8])];
        let x = b.input("x", &shape);
        b.loosen(40.0);
        let mut first = norm(b, "first", x, &shape, true);
        // Without it the second norm undoes the first, and gradients are what is left of terms that cancel.
        if let Op::BatchNorm { activation, .. } = &mut first {
            *activation = NormActivation::Relu;
        }
        let hidden = b.apply("first", first)[0];
        let second = norm(b, "second", hidden, &shape, true);
        b.result("y", second);
    });
}

#[test]
fn group_norms() {
    check("GroupNorm", 80, |b| {
        let groups = b.rng.pick(&[1, 2, 3, 8]);
        let width = groups * b.rng.pick(&[1, 2, 5, 9]);
        let shape = match b.rng.below(3) {
            0 => vec![b.rng.extent(3), b.rng.pick(&[5, 17, 300]), width],
            _ => vec![b.rng.extent(5), b.rng.pick(&[3, 5]), b.rng.pick(&[2, 7]), width],
        };
        let x = b.input("x", &shape);
        let learns = b.rng.pick(&[Training::Trainable, Training::Trainable, Training::Frozen]);
        let [weight, bias] = ["weight", "bias"].map(|name| b.trained(name, &[width], learns));
        let addend = b.maybe(|b| b.input("addend", &shape));
        let activation = b.rng.pick(&[NormActivation::None, NormActivation::Relu]);
        b.loosen(8.0);
        let epsilon = b.rng.pick(&[1e-5, 1e-2]);
        b.result("y", Op::GroupNorm { x, weight, bias, addend, groups, epsilon, activation });
    });
}

/// An evaluation normalizes by the running statistics and passes them on.
#[test]
fn evaluations_use_running_statistics() {
    for seed in 0..40 {
        for dtype in [DType::F32, DType::BF16] {
            let case = Case::build(seed, dtype, Precision::Rounded, |b| {
                let shape = random_shape(b);
                let x = b.input("x", &shape);
                let op = norm(b, "y", x, &shape, false);
                b.result("y", op);
            });
            let want = evaluate_graph(&case.graph, &case.values);
            let machine = case.run();
            let (statistics, norm) = (&case.graph.nodes()[0], &case.graph.nodes()[1]);
            for &id in &statistics.outputs[..3] {
                assert_eq!(machine.get(id), want[&id], "seed {seed}");
            }
            let tolerance = if dtype == DType::F32 { F32_TOLERANCE } else { BF16_TOLERANCE };
            let y = norm.outputs[0];
            assert_close(&format!("seed {seed}"), &machine.get(y), &want[&y], tolerance, 1.0);
        }
    }
}

/// Mean and variance of each channel, from the device.
fn statistics(shape: &[usize], data: Vec<f64>) -> (Vec<Value>, Vec<Value>) {
    let mut graph = Graph::new();
    let width = shape[shape.len() - 1];
    let x = graph.input("x", shape, DType::F32);
    let running_mean = graph.input("running_mean", [width], DType::F32);
    let running_variance = graph.input("running_variance", [width], DType::F32);
    let phase = graph.input("phase", [PHASE_WORDS], DType::I32);
    let op = Op::BatchStatistics { x, running_mean, running_variance, phase };
    let outputs = graph.apply("statistics", op).expect("fits");
    let zeros = Value::new(Shape::from([width]), vec![f64::NAN; width]);
    let values = [
        (x, Value::new(Shape::from(shape), data)),
        (running_mean, zeros.clone()),
        (running_variance, zeros),
        (phase, Value::new(Shape::from([PHASE_WORDS]), vec![1.0, 0.0, 0.0])),
    ]
    .into();
    let want = evaluate_graph(&graph, &values);
    let mut machine = Machine::new(&graph, &values);
    machine.run();
    let made = outputs[..3].iter().map(|&id| machine.get(id)).collect();
    (made, outputs[..3].iter().map(|id| want[id].clone()).collect())
}

/// More blocks of rows than lanes, and few; a mean that is far from 0 costs no precision, nor does an outlier in the first row.
#[test]
fn statistics_of_many_rows_and_of_distant_means() {
    for (rows, width) in [(40_003, 3), (33_000, 1), (257, 70), (7, 129), (1, 4)] {
        for (mean, deviation) in [(0.0, 1.0), (1000.0, 1.0), (-3e4, 30.0)] {
            for outlier in [0.0, 1e3] {
                let mut rng = Rng::new(rows as u64);
                let mut data: Vec<f64> = (0..rows * width)
                    .map(|_| f64::from((mean + deviation * rng.normal()) as f32))
                    .collect();
                data[..width].iter_mut().for_each(|x| *x += outlier);
                let (made, want) = statistics(&[rows, width], data);
                for (name, (made, want)) in
                    ["mean", "variance", "unbiased"].iter().zip(made.iter().zip(&want))
                {
                    for (got, want) in made.data.iter().zip(&want.data) {
                        let allowed = 5e-5 * want.abs() + 1e-6 * deviation;
                        assert!(
                            (got - want).abs() <= allowed,
                            "{name} of ({rows}, {width}) around {mean}: {got}, not {want}"
                        );
                    }
                }
            }
        }
    }
}

/// A NaN is neither lost in a comparison nor turned off by the ReLU.
#[test]
fn a_nan_shows() {
    let (made, _) = statistics(&[300, 2], {
        let mut data = vec![1.0; 600];
        data[403] = f64::NAN;
        data
    });
    for value in &made {
        assert!(value.data[0].is_finite() && value.data[1].is_nan(), "{made:?}");
    }
}

/// By other statistics than those of its operand, a norm has another gradient, which is not supported.
#[test]
fn statistics_of_something_else_have_no_gradient() {
    let mut graph = Graph::new();
    let x = graph.input("x", [4, 3], DType::F32);
    let [mean, variance] = ["mean", "variance"].map(|name| graph.input(name, [3], DType::F32));
    let weight = graph.parameter("weight", [3], DType::F32, Training::Trainable);
    let bias = graph.parameter("bias", [3], DType::F32, Training::Trainable);
    let op = Op::BatchNorm {
        x,
        mean,
        variance,
        weight,
        bias,
        addend: None,
        epsilon: 1e-5,
        activation: NormActivation::None,
    };
    let y = graph.apply_one("y", op).expect("fits");
    let seed = graph.input("seed", [4, 3], DType::F32);
    let request = storm_graph::GradientRequest {
        seeds: vec![(y, seed)],
        wanted: vec![x],
        accumulators: Default::default(),
        gradient_dtype: DType::F32,
    };
    let error = storm_graph::differentiate(&mut graph, &request).unwrap_err().to_string();
    assert!(error.contains("BatchNorm `y` cannot be differentiated"), "{error}");
}
