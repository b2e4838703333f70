//! Losses of rows whose targets are numbers, and their gradients.

use crate::support::*;
use storm_graph::{DType, GradientRequest, Graph, Op, differentiate};

#[test]
fn squared_errors() {
    check("SquaredError", 60, |b| {
        let width = b.rng.extent(129);
        let shape = b.rng.row_shape(33, width);
        let x = b.input("x", &shape);
        let target = b.trained("target", &shape, storm_graph::Training::Frozen);
        b.result("y", Op::SquaredError { x, target });
    });
}

#[test]
fn outcomes() {
    check("OutcomeLoss", 60, |b| {
        let shape = b.rng.row_shape(65, 3);
        let heads = b.input("heads", &shape);
        let rows = &shape[..shape.len() - 1];
        let count = rows.iter().product();
        let changes = (0..count).map(|_| b.rng.normal()).collect();
        let change = b.constant("change", rows, changes);
        let accepted = (0..count).map(|_| f64::from(u8::from(b.rng.coin()))).collect();
        let accepted = b.constant("accepted", rows, accepted);
        b.loosen(3.0);
        b.result("y", Op::OutcomeLoss { heads, change, accepted });
    });
}

#[test]
fn targets_have_no_gradient() {
    let mut graph = Graph::new();
    let [x, target] = ["x", "target"].map(|name| graph.input(name, [2, 3], DType::F32));
    let seed = graph.input("seed", [2], DType::F32);
    let loss = graph.apply_one("loss", Op::SquaredError { x, target }).expect("fits");
    let request = GradientRequest {
        seeds: vec![(loss, seed)],
        wanted: vec![x, target],
        accumulators: Default::default(),
        gradient_dtype: DType::F32,
    };
    let error = differentiate(&mut graph, &request).expect_err("none").to_string();
    assert!(error.contains("SquaredError"), "{error}");
}
