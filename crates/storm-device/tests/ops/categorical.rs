//! Categorical distributions: probabilities and divergence with their gradients, and samples.

use crate::reference::{Value, evaluate};
use crate::support::*;
use storm_graph::random::{SEED_WORDS, Seed};
use storm_graph::{DType, GradientRequest, Graph, KlBalance, Op, Shape, TensorId, differentiate};

const SEED: Seed = Seed { seed: 0x1234_5678_9abc, step: 3 };
const EVEN: KlBalance = KlBalance { posterior: 1.0, prior: 1.0 };

#[test]
fn probabilities() {
    check("Categorical", 60, |b| {
        let classes = b.rng.extent(33);
        let width = classes * b.rng.extent(17);
        let shape = b.rng.row_shape(17, width);
        let scale = b.rng.pick(&[1.0, 1.0, 10.0]);
        let logits = b.scaled_input("logits", &shape, scale);
        let uniform = b.rng.pick(&[0.0, 0.01, 0.5, 1.0]);
        b.result("y", Op::Categorical { logits, classes, uniform });
    });
}

/// Rows below and above the free amount.
#[test]
fn divergences() {
    check("Divergence", 60, |b| {
        let (classes, groups) = (2 + b.rng.below(15), 1 + b.rng.below(9));
        let shape = b.rng.row_shape(17, classes * groups);
        b.loosen(4.0);
        let [posterior, prior] = ["posterior", "prior"].map(|name| {
            let logits = b.input(name, &shape);
            b.apply("probabilities", Op::Categorical { logits, classes, uniform: 0.1 })[0]
        });
        let free = b.rng.pick(&[0.0, 0.3, 2.0]);
        b.result("y", Op::Divergence { posterior, prior, free, balance: EVEN });
    });
}

/// Gradients of posterior and prior with these weights, for rows of which the second is free.
fn divergence_gradients(balance: KlBalance) -> [Vec<f64>; 2] {
    let mut graph = Graph::new();
    let shape = Shape::from([2, 2]);
    let [posterior, prior, d_divergence] =
        [("q", shape.clone()), ("p", shape.clone()), ("d", [2].into())]
            .map(|(name, shape)| graph.input(name, shape, DType::F32));
    let op = Op::Divergence { posterior, prior, free: 0.1, balance };
    let divergence = graph.apply_one("divergence", op).expect("fits");
    let gradients = gradients(&mut graph, (divergence, d_divergence), [posterior, prior]);
    let value = |data: &[f64]| Value::new(shape.clone(), data.to_vec());
    let values = [
        (posterior, value(&[0.9, 0.1, 0.6, 0.4])),
        (prior, value(&[0.25, 0.75, 0.5, 0.5])),
        (d_divergence, Value::new([2].into(), vec![2.0, 2.0])),
    ];
    let mut machine = Machine::new(&graph, &values.into());
    machine.run();
    gradients.map(|gradient| machine.get(gradient).data)
}

fn gradients<const N: usize>(
    graph: &mut Graph,
    seed: (TensorId, TensorId),
    wanted: [TensorId; N],
) -> [TensorId; N] {
    let request = GradientRequest {
        seeds: vec![seed],
        wanted: wanted.to_vec(),
        accumulators: Default::default(),
        gradient_dtype: DType::F32,
    };
    let found = differentiate(graph, &request).expect("differentiable");
    wanted.map(|id| found[&id])
}

#[test]
fn the_balance_weights_gradients_and_what_is_free_has_none() {
    let even = divergence_gradients(EVEN);
    for (gradients, expected) in even.iter().zip([
        [2.0 * (3.6f64.ln() + 1.0), 2.0 * ((0.1f64 / 0.75).ln() + 1.0)],
        [-2.0 * 3.6, -2.0 * 0.1 / 0.75],
    ]) {
        assert_eq!(gradients[2..], [0.0, 0.0], "below the free amount");
        for (found, expected) in gradients.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-5, "{found} is not {expected}");
        }
    }
    let [of_posterior, of_prior] = divergence_gradients(KlBalance { posterior: 0.5, prior: 0.25 });
    assert!(of_posterior.iter().zip(&even[0]).all(|(half, whole)| *half == 0.5 * whole));
    assert!(of_prior.iter().zip(&even[1]).all(|(part, whole)| *part == 0.25 * whole));
}

/// What is sampled from probabilities, and the gradient that reaches these.
fn sampled(
    dtype: DType,
    (seed, stream): (Seed, u16),
    classes: usize,
    probabilities: &Value,
    dy: &Value,
) -> [Value; 2] {
    let mut graph = Graph::new();
    let shape = &probabilities.shape;
    let [x, d_sample] = ["x", "dy"].map(|name| graph.input(name, shape.clone(), dtype));
    let random = graph.input("random", [SEED_WORDS], DType::I32);
    let op = Op::SampleClass { probabilities: x, random, classes, stream };
    let sample = graph.apply_one("sample", op).expect("fits");
    let [gradient] = gradients(&mut graph, (sample, d_sample), [x]);
    let words = Value::new([SEED_WORDS].into(), seed.to_words().map(f64::from).to_vec());
    let values = [(x, probabilities.clone()), (d_sample, dy.clone()), (random, words)];
    let mut machine = Machine::new(&graph, &values.into());
    machine.run();
    [sample, gradient].map(|id| machine.get(id))
}

/// Groups of the same probabilities.
fn groups(count: usize, of_group: &[f64]) -> Value {
    Value::new([count * of_group.len()].into(), of_group.repeat(count))
}

/// In sixteenths, which bf16 and sums of f32 hold.
const SHARES: [f64; 5] = [0.25, 0.0625, 0.5, 0.0, 0.1875];

#[test]
fn samples_are_those_of_their_definition_and_pass_gradients_through() {
    for dtype in [DType::F32, DType::BF16] {
        for (count, stream) in [(1, 0), (6, 1), (501, 65_535)] {
            let probabilities = groups(count, &SHARES);
            let dy = Value::new(
                probabilities.shape.clone(),
                (0..5 * count).map(|at| (at % 7) as f64 - 3.0).collect(),
            );
            let [sample, gradient] = sampled(dtype, (SEED, stream), 5, &probabilities, &dy);
            let random = Value::new([SEED_WORDS].into(), SEED.to_words().map(f64::from).to_vec());
            let op = Op::SampleClass {
                probabilities: &probabilities,
                random: &random,
                classes: 5,
                stream,
            };
            assert_eq!(sample, evaluate(&op)[0], "{count} groups of {dtype}");
            assert_eq!(gradient, dy);
        }
    }
}

/// Within five standard errors; what is impossible never happens.
#[test]
fn classes_come_up_as_often_as_they_should() {
    let count = 20_000;
    let probabilities = groups(count, &SHARES);
    let of = |seed: Seed, stream: u16| {
        sampled(DType::F32, (seed, stream), 5, &probabilities, &probabilities)[0].clone()
    };
    let sample = of(SEED, 1);
    for (class, share) in SHARES.into_iter().enumerate() {
        let found = sample.data.iter().skip(class).step_by(5).sum::<f64>() / count as f64;
        let five = 5.0 * (share * (1.0 - share) / count as f64).sqrt();
        assert!((found - share).abs() <= five, "class {class}: {found}");
    }
    for other in [of(SEED, 2), of(Seed { step: 4, ..SEED }, 1), of(Seed { seed: 9, ..SEED }, 1)] {
        let same = sample.data.iter().zip(&other.data).filter(|(a, b)| **a == 1.0 && a == b);
        // Two draws agree with probability Σ p².
        let agreed = same.count() as f64 / count as f64;
        assert!((0.33..0.37).contains(&agreed), "{agreed}");
    }
    // Probabilities that are rounded down: the last class takes the rest.
    let [rest, _] =
        sampled(DType::F32, (SEED, 1), 2, &groups(500, &[0.0, 0.0]), &groups(500, &[0.0, 0.0]));
    assert!(rest.data.iter().skip(1).step_by(2).all(|taken| *taken == 1.0));
}
