//! Uses of tensors that differentiation refuses, because their gradients would be wrong.

use std::collections::BTreeMap;
use storm_graph::*;

/// Differentiates what `build` makes, with a seed for each tensor that it returns.
fn refusal(build: impl FnOnce(&mut Graph) -> Vec<TensorId>) -> String {
    let mut graph = Graph::new();
    let results = build(&mut graph);
    let seeds = results
        .into_iter()
        .map(|id| {
            let Tensor { name, shape, dtype, .. } = graph.tensor(id).clone();
            (id, graph.source(format!("{name}.seed"), shape, dtype, TensorClass::Activation))
        })
        .collect();
    let request = GradientRequest {
        seeds,
        wanted: Vec::new(),
        accumulators: BTreeMap::new(),
        gradient_dtype: DType::F32,
    };
    differentiate(&mut graph, &request).expect_err("must be refused").to_string()
}

fn weight(graph: &mut Graph, shape: &[usize]) -> TensorId {
    graph.parameter("w", shape, DType::F32, Training::Trainable)
}

/// A sum passes one gradient on to both operands; a parameter's is summed in place, which would
/// overwrite the other's.
#[test]
fn a_parameter_as_an_addend() {
    let problem = refusal(|graph| {
        let x = graph.input("x", [4, 5], DType::F32);
        let other = graph.input("other", [3, 5], DType::F32);
        let w = weight(graph, &[3, 5]);
        let linear = Op::Linear { x, weight: w, bias: None, addend: None };
        let y = graph.apply_one("y", linear).expect("fits");
        vec![y, graph.apply_one("z", Op::Add { a: w, b: other }).expect("fits")]
    });
    assert!(problem.contains("Add makes no gradient of parameter `w`"), "{problem}");
}

#[test]
fn one_parameter_in_two_roles_of_an_op() {
    let problem = refusal(|graph| {
        let x = graph.input("x", [4, 8], DType::F32);
        let w = weight(graph, &[8]);
        let (kind, epsilon) = (NormKind::Layer, 1e-5);
        let op = Op::Norm { x, delta: None, weight: w, bias: Some(w), kind, epsilon };
        vec![graph.apply_one("y", op).expect("fits")]
    });
    assert!(problem.contains("in one role per op"), "{problem}");

    let problem = refusal(|graph| {
        let heads = HeadLayout { query_heads: 2, key_value_heads: 1, head_dim: 4 };
        let qkv = graph.input("qkv", [2, 3, 16], DType::F32);
        let w = weight(graph, &[4]);
        let (table, epsilon) = (None, 1e-5);
        let op = Op::QkNorm { qkv, query_weight: w, key_weight: w, table, heads, epsilon };
        vec![graph.apply_one("y", op).expect("fits")]
    });
    assert!(problem.contains("in one role per op"), "{problem}");
}

/// Statistics that an op yields for its own backward pass have no gradient.
#[test]
fn a_loss_of_the_statistics() {
    let problem = refusal(|graph| {
        let x = graph.input("x", [4, 8], DType::F32);
        let w = weight(graph, &[8]);
        let (kind, epsilon) = (NormKind::Rms, 1e-5);
        let op = Op::Norm { x, delta: None, weight: w, bias: None, kind, epsilon };
        graph.apply("y", op).expect("fits")[..2].to_vec()
    });
    assert!(problem.contains("gradients of `y.rstd` were asked for"), "{problem}");
}

/// Text is written, not learned, through a cache.
#[test]
fn a_cache() {
    let problem = refusal(|graph| {
        let heads = HeadLayout { query_heads: 2, key_value_heads: 1, head_dim: 4 };
        let x = graph.input("x", [1, 3, 8], DType::F32);
        let w = weight(graph, &[16, 8]);
        let op = Op::Linear { x, weight: w, bias: None, addend: None };
        let qkv = graph.apply_one("qkv", op).expect("fits");
        let cache = graph.source("cache", [1, 9, 8], DType::F32, TensorClass::Cache);
        let positions = graph.input("positions", [1, 3], DType::I32);
        let op =
            Op::CachedAttention { qkv, cache, positions, heads, mask: Mask::Causal, scale: 1.0 };
        vec![graph.apply_one("y", op).expect("fits")]
    });
    assert!(problem.contains("CachedAttention `y` cannot be differentiated"), "{problem}");
}
