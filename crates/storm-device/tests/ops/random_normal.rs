//! Initial weights: their distribution, and what they depend on.

use crate::reference::Value;
use crate::support::*;
use storm_graph::random::{SEED_WORDS, Seed};
use storm_graph::{DType, Graph, Op, Shape};

fn draw(shape: Shape, dtype: DType, deviation: f32, seed: u64, stream: u16) -> Vec<f64> {
    let mut graph = Graph::new();
    let random = graph.input("random", [SEED_WORDS], DType::I32);
    let op = Op::RandomNormal { random, shape, dtype, deviation, stream };
    let x = graph.apply_one("x", op).expect("fits");
    let words = Seed { seed, step: 0 }.to_words().map(f64::from).to_vec();
    let words = Value::new(Shape::from([SEED_WORDS]), words);
    let mut machine = Machine::new(&graph, &[(random, words)].into());
    machine.run();
    machine.get(x).data
}

/// Mean, variance, skewness and kurtosis, each within five of its own standard errors, and no
/// correlation of neighbours.
#[test]
fn values_are_normal() {
    for (dtype, deviation) in [(DType::F32, 0.02), (DType::BF16, 1.5)] {
        let x = draw(Shape::from([317, 311]), dtype, deviation, 9, 4);
        let x: Vec<f64> = x.iter().map(|x| x / f64::from(deviation)).collect();
        let count = x.len() as f64;
        let moment = |power: i32| x.iter().map(|x| x.powi(power)).sum::<f64>() / count;
        let pairs = |lag: usize| x.iter().zip(&x[lag..]).map(|(a, b)| a * b).sum::<f64>() / count;
        let five = 5.0 / count.sqrt();
        assert!(moment(1).abs() < five, "{dtype}: mean {}", moment(1));
        assert!((moment(2) - 1.0).abs() < five * 1.5, "{dtype}: variance {}", moment(2));
        assert!(moment(3).abs() < five * 4.0, "{dtype}: skewness {}", moment(3));
        assert!((moment(4) - 3.0).abs() < five * 10.0, "{dtype}: kurtosis {}", moment(4));
        for lag in 1..5 {
            assert!(pairs(lag).abs() < five, "{dtype}: lag {lag} gives {}", pairs(lag));
        }
        let largest = x.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
        assert!((3.5..7.0).contains(&largest), "{dtype}: largest {largest}");
    }
}

/// An element is a function of seed, stream and position: not of the shape around it.
#[test]
fn values_depend_on_seed_stream_and_element_alone() {
    let shape = |elements: usize| Shape::from([elements]);
    let base = draw(shape(1000), DType::F32, 1.0, 1, 1);
    assert_eq!(base, draw(Shape::from([10, 100]), DType::F32, 1.0, 1, 1));
    for elements in [1, 2, 3, 5, 129, 999] {
        assert_eq!(base[..elements], draw(shape(elements), DType::F32, 1.0, 1, 1));
    }
    for (seed, stream) in [(2, 1), (1 << 32 | 1, 1), (1, 2)] {
        let other = draw(shape(1000), DType::F32, 1.0, seed, stream);
        let same = base.iter().zip(&other).filter(|(a, b)| a == b).count();
        assert!(same < 10, "seed {seed}, stream {stream}");
    }
}
