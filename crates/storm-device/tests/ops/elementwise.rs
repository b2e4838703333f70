//! Elementwise ops and their gradients.

use crate::support::*;
use storm_graph::{ActivationFunction, Op};

#[test]
fn arithmetic() {
    check("arithmetic", 80, |b| {
        let shape = random_shape(b);
        let a = b.input("a", &shape);
        let op = match b.rng.below(4) {
            0 => Op::Scale { x: a, factor: b.rng.pick(&[0.0, -1.0, 0.3, 1e-3]) },
            1 => Op::Mul { a, b: a },
            2 => Op::Mul { a, b: b.input("b", &shape) },
            _ => Op::Add { a, b: b.input("b", &shape) },
        };
        b.result("y", op);
    });
}

const FUNCTIONS: [ActivationFunction; 4] = [
    ActivationFunction::GeluTanh,
    ActivationFunction::Silu,
    ActivationFunction::Gelu,
    ActivationFunction::Relu,
];

#[test]
fn activations() {
    for function in FUNCTIONS {
        check(&format!("{function:?}"), 50, |b| {
            let shape = random_shape(b);
            // Far out, where exponentials overflow, as well.
            let scale = b.rng.pick(&[1.0, 1.0, 4.0, 100.0]);
            let x = b.scaled_input("x", &shape, scale);
            b.result("y", Op::Activation { x, function });
        });
    }
}

#[test]
fn tanh() {
    check("Tanh", 50, |b| {
        let shape = random_shape(b);
        let scale = b.rng.pick(&[1e-3, 1.0, 1.0, 100.0]);
        let x = b.scaled_input("x", &shape, scale);
        b.result("y", Op::Tanh { x });
    });
}

#[test]
fn swiglu() {
    check("SwiGlu", 60, |b| {
        let width = 2 * b.rng.extent(600);
        let shape = b.rng.row_shape(33, width);
        let scale = b.rng.pick(&[1.0, 1.0, 4.0, 60.0]);
        let gate_up = b.scaled_input("gate_up", &shape, scale);
        let function = b.rng.pick(&FUNCTIONS);
        b.result("y", Op::SwiGlu { gate_up, function });
    });
}

/// Gradients overwrite what they are a gradient of; here others still need it.
#[test]
fn operands_of_several_ops() {
    check("shared operands", 40, |b| {
        let width = 2 * b.rng.extent(65);
        let shape = b.rng.row_shape(33, width);
        let input = b.input("input", &shape);
        let x = b.apply("x", Op::Scale { x: input, factor: 0.5 })[0];
        let function = b.rng.pick(&FUNCTIONS);
        let ops = [
            Op::SwiGlu { gate_up: x, function },
            Op::Activation { x, function },
            Op::Mul { a: x, b: input },
            Op::SwiGlu { gate_up: x, function },
            Op::SwiGlu { gate_up: input, function },
        ];
        let first = b.rng.below(ops.len());
        for turn in 0..ops.len() {
            b.result("y", ops[(first + turn) % ops.len()].clone());
        }
    });
}

/// Any rank, scalars included.
fn random_shape(b: &mut Builder) -> Vec<usize> {
    if b.rng.below(8) == 0 {
        return Vec::new();
    }
    let width = b.rng.extent(600);
    b.rng.row_shape(65, width)
}
