//! Dropout: against its definition, how much is dropped, and what that depends on.

use crate::reference::Value;
use crate::support::*;
use storm_graph::random::{DROPOUT_WORDS, DropoutWords, Seed};
use storm_graph::{DType, Graph, Op, Shape};

const SEED: Seed = Seed { seed: 0x1234_5678_9abc, step: 3 };

/// Forward against f64, and the gradient against finite differences: the mask does not change with `x`.
#[test]
fn dropout() {
    check("Dropout", 60, |b| {
        let width = b.rng.extent(600);
        let shape = b.rng.row_shape(33, width);
        let x = b.input("x", &shape);
        let words = DropoutWords {
            seed: SEED,
            micro_batch: b.rng.below(3) as u32,
            drops: b.rng.below(4) > 0,
        };
        let random = b.integers("random", &[DROPOUT_WORDS], |_, i| words.to_words()[i]);
        let addend = b.maybe(|b| b.input("addend", &shape));
        let rate = b.rng.pick(&[0.0, 0.05, 0.5, 0.9]);
        b.result("y", Op::Dropout { x, random, addend, rate, stream: 2 });
    });
}

/// What dropout makes of ones.
fn mask(elements: usize, words: DropoutWords, rate: f32, stream: u16) -> Vec<f64> {
    let mut graph = Graph::new();
    let x = graph.input("x", [elements], DType::F32);
    let random = graph.input("random", [DROPOUT_WORDS], DType::I32);
    let op = Op::Dropout { x, random, addend: None, rate, stream };
    let y = graph.apply_one("y", op).expect("fits");
    let words = words.to_words().map(f64::from).to_vec();
    let words = Value::new(Shape::from([DROPOUT_WORDS]), words);
    let ones = Value::new(Shape::from([elements]), vec![1.0; elements]);
    let mut machine = Machine::new(&graph, &[(x, ones), (random, words)].into());
    machine.run();
    machine.get(y).data
}

fn words(step: u32, micro_batch: u32) -> DropoutWords {
    DropoutWords { seed: Seed { step, ..SEED }, micro_batch, drops: true }
}

/// The share that is dropped, its mean, and neighbours, each within five standard errors.
#[test]
fn the_rate_is_the_share_that_is_dropped() {
    let count = 200_000;
    for rate in [0.05f32, 0.5, 0.9] {
        let x = mask(count, words(1, 0), rate, 0);
        let p = f64::from(rate);
        let dropped: Vec<f64> = x.iter().map(|&x| f64::from(u8::from(x == 0.0)) - p).collect();
        let five = 5.0 / (count as f64).sqrt();
        let share = dropped.iter().sum::<f64>() / count as f64;
        assert!(share.abs() < five * (p * (1.0 - p)).sqrt(), "{rate}: {share}");
        for lag in [1, 2, 4, 600] {
            let pairs = dropped.iter().zip(&dropped[lag..]).map(|(a, b)| a * b).sum::<f64>();
            assert!((pairs / count as f64).abs() < five * p * (1.0 - p), "{rate}, lag {lag}");
        }
        let kept = f64::from(1.0 / (1.0 - rate));
        assert!(x.iter().all(|&x| x == 0.0 || x == kept), "{rate}");
    }
    assert!(mask(1000, words(1, 0), 0.0, 0).iter().all(|&x| x == 1.0));
    let off = DropoutWords { drops: false, ..words(1, 0) };
    assert!(mask(1000, off, 0.5, 0).iter().all(|&x| x == 1.0));
}

/// A step that is split into more micro-batches drops the same elements; another step, stream or micro-batch others.
#[test]
fn masks_belong_to_elements_of_the_step() {
    for parts in [2, 5, 10] {
        let whole = mask(1230, words(4, 0), 0.3, 1);
        let split: Vec<f64> =
            (0..parts).flat_map(|part| mask(1230 / parts, words(4, part as u32), 0.3, 1)).collect();
        assert_eq!(whole, split, "{parts} parts");
    }
    let base = mask(4096, words(4, 0), 0.5, 1);
    for (other, what) in [
        (mask(4096, words(5, 0), 0.5, 1), "step"),
        (mask(4096, words(4, 1), 0.5, 1), "micro-batch"),
        (mask(4096, words(4, 0), 0.5, 2), "stream"),
    ] {
        let same = base.iter().zip(&other).filter(|(a, b)| a == b).count();
        assert!((1800..2300).contains(&same), "{what}: {same} of 4096 are alike");
    }
}
