//! What a codec of activations changes in a differentiated graph.

use storm_graph::*;

/// A gated unit between two projections, differentiated, its operand in 8 bits. `handed_out` picks tensors that are read
/// after the graph has run.
fn coded_unit(down: Training, handed_out: impl Fn(&Graph) -> Vec<TensorId>) -> Graph {
    let mut graph = Graph::new();
    let x = graph.input("x", [4, 6], DType::F32);
    let inner = graph.parameter("inner", [8, 6], DType::F32, Training::Trainable);
    let outer = graph.parameter("outer", [6, 4], DType::F32, down);
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
    let results = handed_out(&graph);
    assert_eq!(encode_units(&mut graph, &results), 1, "{graph}");
    graph
}

fn ops(graph: &Graph, is_forward: bool) -> Vec<&'static str> {
    let nodes = graph.nodes().iter().filter(|node| (node.phase == Phase::Forward) == is_forward);
    nodes.map(|node| node.op.name()).collect()
}

fn saved(graph: &Graph) -> Vec<&str> {
    graph.saved().into_iter().map(|id| graph.tensor(id).name.as_str()).collect()
}

/// Neither the operand of the unit nor what it made waits for the backward pass, and what reads the output comes after the
/// gradient that makes it again.
#[test]
fn the_code_alone_is_saved() {
    let graph = coded_unit(Training::Trainable, |_| Vec::new());
    assert_eq!(ops(&graph, true), ["Linear", "SwiGluCoded", "Linear"], "{graph}");
    assert_eq!(
        ops(&graph, false),
        [
            "LinearInputGrad",
            "SwiGluCodedGrad",
            "LinearWeightGrad",
            "LinearWeightGrad",
            "LinearInputGrad",
        ],
        "{graph}"
    );
    assert_eq!(saved(&graph), ["unit.code"]);
    let code = graph.tensor(graph.saved()[0]);
    assert_eq!((code.dtype, code.shape.axes()), (DType::U8, &[4, 2 * 32][..]));
}

#[test]
fn a_frozen_projection_needs_no_output() {
    let graph = coded_unit(Training::Frozen, |_| Vec::new());
    let gradient = graph.nodes().iter().find(|node| node.op.name() == "SwiGluCodedGrad");
    let gradient = gradient.expect("a gradient");
    assert!(matches!(gradient.op, Op::SwiGluCodedGrad { output: UnitOutput::Skip, .. }), "{graph}");
    assert_eq!(gradient.outputs.len(), 1);
}

/// Where the code is not kept, no code is computed: the forward pass has the plain unit, and the gradient rounds the
/// recomputed operand, which it overwrites.
#[test]
fn a_code_that_is_not_kept_is_not_made() {
    for down in [Training::Trainable, Training::Frozen] {
        let mut graph = coded_unit(down, |_| Vec::new());
        recompute(&mut graph, &[], |_| false);
        assert_eq!(ops(&graph, true), ["Linear", "SwiGlu", "Linear"], "{graph}");
        let gradient = graph.nodes().iter().find_map(|node| match node.op {
            Op::SwiGluGrad { codec, .. } if down == Training::Frozen => Some(codec),
            Op::SwiGluGradAndOutput { codec, .. } if down == Training::Trainable => Some(codec),
            _ => None,
        });
        assert_eq!(gradient, Some(ActivationCodec::Int8), "{graph}");
        let made = ops(&graph, false);
        assert!(!made.contains(&"SwiGlu") && !made.contains(&"SwiGluCoded"), "{graph}");
        assert_eq!(saved(&graph), [""; 0]);
    }
}

/// A kept code is read as it is; nothing is recomputed for it.
#[test]
fn a_kept_code_is_read() {
    let mut graph = coded_unit(Training::Trainable, |_| Vec::new());
    let before = graph.clone();
    let code = graph.saved()[0];
    recompute(&mut graph, &[], |id| id == code);
    assert_eq!(graph, before);
}

/// The output takes the memory of the gradient that came in, unless that is read later.
#[test]
fn a_gradient_that_is_handed_out_is_not_overwritten() {
    let dy = |graph: &Graph| {
        let found = graph.nodes().iter().find_map(|node| match node.op {
            Op::SwiGluGrad { dy, .. } => Some(dy),
            _ => None,
        });
        found.into_iter().collect()
    };
    let graph = coded_unit(Training::Trainable, dy);
    let copies = graph.nodes().iter().filter(|node| node.name.ends_with(".copy")).count();
    assert_eq!(copies, 1, "{graph}");
    let graph = coded_unit(Training::Trainable, |_| Vec::new());
    assert!(graph.nodes().iter().all(|node| !node.name.ends_with(".copy")), "{graph}");
}
