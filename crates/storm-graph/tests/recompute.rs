//! What recomputation adds to the backward pass.

use std::collections::BTreeSet;
use storm_graph::*;

/// `hidden = norm(x + branch(x))`, then a projection: what lies around a residual sum.
fn residual_block() -> Graph {
    let mut graph = Graph::new();
    let x = graph.input("x", [4, 6], DType::F32);
    let mut weight =
        |name: &str, shape: &[usize]| graph.parameter(name, shape, DType::F32, Training::Trainable);
    let (inner, outer) = (weight("inner", &[6, 6]), weight("outer", &[3, 6]));
    let norm_weight = weight("norm", &[6]);
    let mut apply = |name: &str, op| graph.apply(name, op).expect("fits")[0];
    let linear = |x, weight| Op::Linear { x, weight, bias: None, addend: None };
    let up = apply("up", linear(x, inner));
    let function = ActivationFunction::Silu;
    let branch = apply("branch", Op::Activation { x: up, function });
    let hidden = apply(
        "hidden",
        Op::Norm {
            x,
            delta: Some(branch),
            weight: norm_weight,
            bias: None,
            kind: NormKind::Rms,
            epsilon: 1e-5,
        },
    );
    let y = apply("y", linear(hidden, outer));
    let seed = graph.input("seed", [4, 3], DType::F32);
    let request = GradientRequest {
        seeds: vec![(y, seed)],
        wanted: vec![x],
        accumulators: [].into(),
        gradient_dtype: DType::F32,
    };
    differentiate(&mut graph, &request).expect("differentiable");
    graph
}

/// Keeping the tensors named, the backward pass makes again what is listed: `name = op(operands)`.
fn check(kept: &[&str], again: &[&str]) {
    let before = residual_block();
    let mut graph = before.clone();
    let is_kept = |id: TensorId| kept.contains(&before.tensor(id).name.as_str());
    recompute(&mut graph, &[], is_kept);

    let made: Vec<String> = graph
        .nodes()
        .iter()
        .filter(|node| node.phase == Phase::Recompute)
        .map(|node| {
            let operands: Vec<&str> =
                node.op.operands().iter().map(|&(_, id)| graph.tensor(id).name.as_str()).collect();
            format!("{} = {}({})", node.name, node.op.name(), operands.join(", "))
        })
        .collect();
    assert_eq!(made, again, "{graph}");
    assert!(graph.saved().iter().all(|&id| is_kept(id)), "{graph}");

    // The forward pass and the gradients stay what they were.
    let forward = |graph: &Graph| -> Vec<Node> {
        graph.nodes().iter().filter(|node| node.phase == Phase::Forward).cloned().collect()
    };
    assert_eq!(forward(&graph), forward(&before));
    for id in before.ids() {
        assert_eq!(graph.tensor(id), before.tensor(id));
        assert_eq!(graph.producer(id).is_some(), before.producer(id).is_some());
    }
    // Each operand is made before it is read.
    let mut seen: BTreeSet<TensorId> =
        graph.ids().filter(|&id| graph.producer(id).is_none()).collect();
    for node in graph.nodes() {
        assert!(node.op.operands().iter().all(|(_, operand)| seen.contains(operand)), "{graph}");
        seen.extend(&node.outputs);
    }
}

#[test]
fn what_is_kept_is_not_made_again() {
    check(&["up", "branch", "hidden", "hidden.rstd", "hidden.sum"], &[]);
}

#[test]
fn only_what_is_read_must_be_kept() {
    check(&["up", "hidden", "hidden.rstd", "hidden.sum"], &[]);
}

#[test]
fn a_kept_sum_gives_a_plain_norm_of_it() {
    check(&["up", "hidden.sum"], &["hidden.again = Norm(hidden.sum, norm)"]);
    check(&["up", "hidden.sum", "hidden"], &["hidden.again = Norm(hidden.sum, norm)"]);
}

#[test]
fn a_dropped_sum_is_made_again_with_its_norm() {
    check(&["up", "branch"], &["hidden.again = Norm(x, branch, norm)"]);
    check(
        &["up"],
        &["branch.again = Activation(up)", "hidden.again = Norm(x, branch.again, norm)"],
    );
}

#[test]
fn with_nothing_kept_all_comes_from_outside() {
    check(
        &[],
        &[
            "up.again = Linear(x, inner)",
            "branch.again = Activation(up.again)",
            "hidden.again = Norm(x, branch.again, norm)",
        ],
    );
}

/// A gated unit between two projections, differentiated, with nothing of it kept.
fn gated_unit(results: impl Fn(&Graph) -> Vec<TensorId>) -> Graph {
    let mut graph = Graph::new();
    let x = graph.input("x", [4, 6], DType::F32);
    let mut weight =
        |name: &str, shape: &[usize]| graph.parameter(name, shape, DType::F32, Training::Trainable);
    let (inner, outer) = (weight("inner", &[8, 6]), weight("outer", &[6, 4]));
    let mut apply = |name: &str, op| graph.apply_one(name, op).expect("fits");
    let linear = |x, weight| Op::Linear { x, weight, bias: None, addend: None };
    let gate_up = apply("gate_up", linear(x, inner));
    let unit = apply("unit", Op::SwiGlu { gate_up, function: ActivationFunction::Silu });
    let y = apply("y", linear(unit, outer));
    let seed = graph.input("seed", [4, 6], DType::F32);
    let request = GradientRequest {
        seeds: vec![(y, seed)],
        wanted: vec![x],
        accumulators: [].into(),
        gradient_dtype: DType::F32,
    };
    differentiate(&mut graph, &request).expect("differentiable");
    let results = results(&graph);
    recompute(&mut graph, &results, |_| false);
    graph
}

fn backward_ops(graph: &Graph) -> Vec<&'static str> {
    let backward = graph.nodes().iter().filter(|node| node.phase != Phase::Forward);
    backward.map(|node| node.op.name()).collect()
}

/// The gradient of a gated unit also recomputes its output, and what reads that comes after.
#[test]
fn a_gated_unit_is_recomputed_by_its_gradient() {
    let graph = gated_unit(|_| Vec::new());
    assert_eq!(
        backward_ops(&graph),
        [
            "Linear",
            "LinearInputGrad",
            "SwiGluGradAndOutput",
            "LinearWeightGrad",
            "LinearWeightGrad",
            "LinearInputGrad",
        ],
        "{graph}"
    );
}

/// It takes the memory of the gradient that it came from, unless that is read later.
#[test]
fn a_gradient_that_is_handed_out_is_not_overwritten() {
    let graph = gated_unit(|graph| {
        let gradient = graph.nodes().iter().find_map(|node| match node.op {
            Op::SwiGluGrad { dy, .. } => Some(dy),
            _ => None,
        });
        gradient.into_iter().collect()
    });
    let ops = backward_ops(&graph);
    assert!(ops.contains(&"SwiGlu") && ops.contains(&"SwiGluGrad"), "{graph}");
}

/// A chain as long as this must not overflow the stack.
#[test]
fn long_chains_are_made_again() {
    let mut graph = Graph::new();
    let x = graph.input("x", [2], DType::F32);
    let mut y = x;
    for _ in 0..20_000 {
        let function = ActivationFunction::GeluTanh;
        y = graph.apply_one("y", Op::Activation { x: y, function }).expect("fits");
    }
    let seed = graph.input("seed", [2], DType::F32);
    let request = GradientRequest {
        seeds: vec![(y, seed)],
        wanted: vec![x],
        accumulators: [].into(),
        gradient_dtype: DType::F32,
    };
    differentiate(&mut graph, &request).expect("differentiable");
    recompute(&mut graph, &[], |_| false);
    // The input belongs to somebody else: its gradient overwrites a copy.
    assert_eq!(graph.nodes().len(), 20_000 + 19_999 + 1 + 20_000);
}
