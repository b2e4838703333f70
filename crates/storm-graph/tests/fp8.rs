//! Codes of 8-bit floats in differentiated and recomputed graphs.

use std::collections::BTreeMap;
use storm_graph::{
    ActivationFunction, DType, Fp8Form, GradientRequest, Graph, GraphError, Op, Phase, Shape,
    TensorClass, TensorId, Training, differentiate, recompute,
};

const ROWS: usize = 32;
const WIDTH: usize = 16;
const INNER: usize = 48;

fn project(graph: &mut Graph, name: &str, x: TensorId, outputs: usize) -> TensorId {
    let inputs = graph.tensor(x).shape.width();
    let weight = graph.parameter(name, [outputs, inputs], DType::BF16, Training::Trainable);
    let mut codes = |of: &str, x, form| {
        graph.apply_one(&format!("{name}.{of}"), Op::ToFp8 { x, form }).expect("it fits")
    };
    let x = codes("x", x, Fp8Form::Both);
    let weight = codes("weight", weight, Fp8Form::Rows);
    let output = Shape::from([ROWS, outputs]);
    let op = Op::Fp8Linear { x, weight, bias: None, addend: None, output };
    graph.apply_one(name, op).expect("it fits")
}

/// Gate and up, a gated unit, down; differentiated.
fn layer() -> Graph {
    let mut graph = Graph::new();
    let x = graph.source("x", [ROWS, WIDTH], DType::BF16, TensorClass::Activation);
    let gate_up = project(&mut graph, "gate_up", x, 2 * INNER);
    let op = Op::SwiGlu { gate_up, function: ActivationFunction::Silu };
    let active = graph.apply_one("unit", op).expect("it fits");
    let y = project(&mut graph, "down", active, WIDTH);
    let dy = graph.source("dy", [ROWS, WIDTH], DType::BF16, TensorClass::Activation);
    let request = GradientRequest {
        seeds: vec![(y, dy)],
        wanted: vec![x],
        accumulators: BTreeMap::new(),
        gradient_dtype: DType::BF16,
    };
    let gradients = differentiate(&mut graph, &request).expect("it has gradients");
    assert_eq!(gradients.len(), 3);
    graph
}

/// Forms of the codes that a phase makes, by node.
fn forms(graph: &Graph, phase: Phase) -> BTreeMap<String, Fp8Form> {
    let nodes = graph.nodes().iter().filter(|node| node.phase == phase);
    let forms = nodes.filter_map(|node| match node.op {
        Op::ToFp8 { form, .. } => {
            let has = |output: usize, of: &str| {
                let name = &graph.tensor(node.outputs[output]).name;
                assert!(name.contains(of), "{name} of {form:?}");
            };
            has(0, if form.has_rows() { ".rows" } else { ".columns" });
            has(node.outputs.len() - 2, if form.has_columns() { ".columns" } else { ".rows" });
            has(node.outputs.len() - 1, ".largest");
            Some((node.name.clone(), form))
        }
        _ => None,
    });
    forms.collect()
}

fn named<const N: usize>(forms: [(&str, Fp8Form); N]) -> BTreeMap<String, Fp8Form> {
    forms.map(|(name, form)| (name.to_owned(), form)).into()
}

#[test]
fn the_backward_pass_saves_codes_instead_of_activations() {
    let graph = layer();
    let saved: Vec<&str> =
        graph.saved().into_iter().map(|id| graph.tensor(id).name.as_str()).collect();
    assert_eq!(saved, ["gate_up.x.columns", "gate_up", "down.x.columns"], "{graph}");
    let codes = named([
        ("down.dy", Fp8Form::Both),
        ("down.weight", Fp8Form::Columns),
        ("gate_up.dy", Fp8Form::Both),
        ("gate_up.weight", Fp8Form::Columns),
    ]);
    assert_eq!(forms(&graph, Phase::Backward), codes, "{graph}");
}

/// Codes come only in the forms that are read: where everything is kept, where nothing is, and where the activation that they are
/// of is recomputed.
#[test]
fn forms_that_nothing_reads_are_not_made() {
    let (rows, columns, both) = (Fp8Form::Rows, Fp8Form::Columns, Fp8Form::Both);
    let forward = |x, down| {
        let weights = [("gate_up.weight", rows), ("down.weight", rows)];
        named([("gate_up.x", x), weights[0], ("down.x", down), weights[1]])
    };
    let mut kept = layer();
    recompute(&mut kept, &[], |_| true);
    assert_eq!(forms(&kept, Phase::Forward), forward(both, both), "{kept}");
    assert_eq!(forms(&kept, Phase::Recompute), named([]), "{kept}");

    let mut dropped = layer();
    recompute(&mut dropped, &[], |_| false);
    assert_eq!(forms(&dropped, Phase::Forward), forward(rows, rows), "{dropped}");
    let again = named([
        // The product is recomputed from its rows, and the gradient of the weight reads columns.
        ("gate_up.x.again", both),
        ("gate_up.weight.again", rows),
        ("down.x.again", columns),
    ]);
    assert_eq!(forms(&dropped, Phase::Recompute), again, "{dropped}");

    let mut without_unit = layer();
    let gate_up = without_unit.nodes().iter().find(|node| node.name == "gate_up");
    let gate_up = gate_up.expect("a projection").outputs[0];
    recompute(&mut without_unit, &[], |id| id == gate_up);
    assert_eq!(forms(&without_unit, Phase::Forward), forward(rows, rows), "{without_unit}");
    let again = named([("gate_up.x.again", columns), ("down.x.again", columns)]);
    assert_eq!(forms(&without_unit, Phase::Recompute), again, "{without_unit}");
}

/// A unit that is recomputed shares a kernel with its gradient, though codes are between it and the gradient of the weight.
#[test]
fn a_unit_and_its_gradient_share_a_kernel() {
    let mut graph = layer();
    recompute(&mut graph, &[], |_| false);
    let count = |wanted: fn(&Op<TensorId>) -> bool, phase| {
        graph.nodes().iter().filter(|node| node.phase == phase && wanted(&node.op)).count()
    };
    let both = count(|op| matches!(op, Op::SwiGluGradAndOutput { .. }), Phase::Backward);
    let alone = count(|op| matches!(op, Op::SwiGlu { .. }), Phase::Recompute);
    assert_eq!([both, alone], [1, 0], "{graph}");
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let refused = |make: &dyn Fn(&mut Graph) -> Result<Vec<TensorId>, GraphError>| {
        make(&mut Graph::new()).expect_err("it does not fit").to_string()
    };
    let float = |graph: &mut Graph, shape: [usize; 2], dtype| {
        graph.source("x", shape, dtype, TensorClass::Activation)
    };
    let error = refused(&|graph| {
        let x = float(graph, [24, 16], DType::BF16);
        graph.apply("codes", Op::ToFp8 { x, form: Fp8Form::Rows })
    });
    assert!(error.contains("24 rows of 16") && error.contains("multiples of 16"), "{error}");
    let error = refused(&|graph| {
        let x = float(graph, [16, 16], DType::F32);
        graph.apply("codes", Op::ToFp8 { x, form: Fp8Form::Rows })
    });
    assert!(error.contains("must be bf16"), "{error}");
    for (shape, problem) in [([17, 32], "is 32 wide"), ([16, 16], "multiples of 16")] {
        let error = refused(&|graph| {
            let x = float(graph, shape, DType::U8);
            let weight = float(graph, [33, 16], DType::U8);
            let output = Shape::from([16, 32]);
            graph.apply("y", Op::Fp8Linear { x, weight, bias: None, addend: None, output })
        });
        assert!(error.contains(problem), "{error}");
    }
}
