//! The gates of a GRU and their gradients.

use crate::support::*;
use storm_graph::Op;

#[test]
fn gru_gates() {
    check("GRU", 80, |b| {
        let width = b.rng.extent(600);
        let shape = b.rng.row_shape(33, width);
        let scale = b.rng.pick(&[1.0, 1.0, 4.0, 60.0]);
        let gate = b.scaled_input("gate", &shape, scale);
        let hidden = b.input("hidden", &shape);
        if b.rng.coin() {
            b.result("reset", Op::GruReset { gate, hidden });
        } else {
            let candidate = b.input("candidate", &shape);
            b.result("state", Op::GruState { gate, candidate, hidden });
        }
    });
}

/// A few steps of a cell, with products in between: gradients of shared weights and states add up.
#[test]
fn gru_cells() {
    check("GRU cells", 20, |b| {
        let width = b.rng.extent(17);
        let shape = [b.rng.extent(5), width];
        let mut hidden = b.input("hidden", &shape);
        let input = b.input("input", &shape);
        let of_input = b.parameter("input.weight", &[width, width]);
        let of_hidden = b.parameter("hidden.weight", &[width, width]);
        let bias = Some(b.parameter("bias", &[width]));
        b.loosen(20.0);
        for _ in 0..3 {
            let addend = None;
            let part = Op::Linear { x: hidden, weight: of_hidden, bias: None, addend };
            let part = b.apply("part", part)[0];
            let gate = Op::Linear { x: input, weight: of_input, bias, addend: Some(part) };
            let gate = b.apply("gate", gate)[0];
            let kept = b.apply("kept", Op::GruReset { gate, hidden })[0];
            let candidate = Op::Linear { x: kept, weight: of_hidden, bias: None, addend };
            let candidate = b.apply("candidate", candidate)[0];
            hidden = b.apply("state", Op::GruState { gate, candidate, hidden })[0];
        }
        b.seed(hidden);
    });
}
