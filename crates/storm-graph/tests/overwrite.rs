//! Gradients overwrite what they are a gradient of, unless somebody still needs it.

use storm_graph::*;

const HEADS: HeadLayout = HeadLayout { query_heads: 2, key_value_heads: 1, head_dim: 4 };

struct Builder {
    graph: Graph,
    x: TensorId,
}

impl Builder {
    /// Starts from an activation `x` (2, 3, 16) that somebody else owns.
    fn new() -> Builder {
        let mut graph = Graph::new();
        let x = graph.source("x", [2, 3, 16], DType::F32, TensorClass::Activation);
        Builder { graph, x }
    }

    fn apply(&mut self, name: &str, op: Op<TensorId>) -> TensorId {
        self.graph.apply_one(name, op).expect("fits")
    }

    /// `x · weightᵀ`, 16 wide.
    fn linear(&mut self, name: &str, x: TensorId) -> TensorId {
        let width = self.graph.tensor(x).shape.width();
        let weight = format!("{name}.weight");
        let weight = self.graph.parameter(&weight, [16, width], DType::F32, Training::Trainable);
        self.apply(name, Op::Linear { x, weight, bias: None, addend: None })
    }

    fn differentiate(mut self, results: &[TensorId]) -> Graph {
        let mut seeds = Vec::new();
        for &result in results {
            let Tensor { name, shape, dtype, .. } = self.graph.tensor(result).clone();
            let class = TensorClass::Activation;
            seeds.push((result, self.graph.source(format!("{name}.seed"), shape, dtype, class)));
        }
        let request = GradientRequest {
            seeds,
            wanted: vec![self.x],
            accumulators: [].into(),
            gradient_dtype: DType::F32,
        };
        differentiate(&mut self.graph, &request).expect("differentiable");
        self.graph
    }
}

/// The copies made are of the tensors named, and no op reads a tensor after it is overwritten.
fn check_copies(graph: &Graph, expected: &[&str]) {
    let copies: Vec<&str> = graph
        .nodes()
        .iter()
        .filter(|node| node.name.ends_with(".copy"))
        .flat_map(|node| node.op.operands())
        .map(|(_, id)| graph.tensor(id).name.as_str())
        .collect();
    assert_eq!(copies, expected, "{graph}");
    let mut gone: Vec<TensorId> = Vec::new();
    for node in graph.nodes() {
        let read = node.op.operands();
        assert!(read.iter().all(|(_, id)| !gone.contains(id)), "{}\n{graph}", node.name);
        gone.extend(node.op.in_place().into_iter().map(|(operand, _)| operand));
    }
}

#[test]
fn a_transformer_needs_no_copy() {
    let mut b = Builder::new();
    let gate_up = b.linear("gate_up", b.x);
    let y = b.apply("y", Op::SwiGlu { gate_up, function: ActivationFunction::Silu });
    let inner = b.linear("inner", y);
    let function = ActivationFunction::GeluTanh;
    let y = b.apply("z", Op::Activation { x: inner, function });
    let out = b.linear("out", y);
    let graph = b.differentiate(&[out]);
    check_copies(&graph, &[]);

    let kept = |names: &[&str]| {
        let mut again = graph.clone();
        recompute(&mut again, &[], |id| names.contains(&graph.tensor(id).name.as_str()));
        check_copies(&again, &[]);
    };
    kept(&[]);
    kept(&["gate_up"]);
    kept(&["gate_up", "inner"]);
    kept(&["y"]);
}

#[test]
fn what_comes_from_outside_is_copied() {
    let mut b = Builder::new();
    let y = b.apply("y", Op::SwiGlu { gate_up: b.x, function: ActivationFunction::Silu });
    check_copies(&b.differentiate(&[y]), &["x"]);
}

/// The gradient of the product comes after that of the gated unit, and reads its operand.
#[test]
fn what_an_earlier_node_reads_is_copied() {
    let mut b = Builder::new();
    let gate_up = b.linear("gate_up", b.x);
    let product = b.apply("product", Op::Mul { a: gate_up, b: gate_up });
    let y = b.apply("y", Op::SwiGlu { gate_up, function: ActivationFunction::Silu });
    check_copies(&b.differentiate(&[product, y]), &["gate_up"]);
}

/// Attention's gradient reads what attention made.
#[test]
fn what_its_producer_reads_is_copied() {
    let mut b = Builder::new();
    let qkv = b.linear("qkv", b.x);
    let (mask, scale) = (Mask::Causal, 0.5);
    let op = Op::Attention { qkv, segments: None, heads: HEADS, mask, scale };
    let attended = b.apply("attended", op);
    let y = b.apply("y", Op::SwiGlu { gate_up: attended, function: ActivationFunction::Silu });
    check_copies(&b.differentiate(&[y]), &["attended"]);
}

/// Two gradients of one tensor: the first may not overwrite it, the second may.
#[test]
fn only_the_last_reader_overwrites() {
    let mut b = Builder::new();
    let gate_up = b.linear("gate_up", b.x);
    let results = [1, 2, 3].map(|i| {
        b.apply(&format!("y{i}"), Op::SwiGlu { gate_up, function: ActivationFunction::Silu })
    });
    check_copies(&b.differentiate(&results), &["gate_up", "gate_up"]);
}

/// Here the backward pass needs `scaled` late, and makes it again from what was overwritten.
#[test]
fn recomputation_copies_what_it_reads_late() {
    let mut b = Builder::new();
    let gate_up = b.linear("gate_up", b.x);
    let scaled = b.apply("scaled", Op::Scale { x: gate_up, factor: 2.0 });
    let square = b.apply("square", Op::Mul { a: scaled, b: scaled });
    let y = b.apply("y", Op::SwiGlu { gate_up, function: ActivationFunction::Silu });
    let graph = b.differentiate(&[square, y]);
    check_copies(&graph, &[]);

    let mut again = graph.clone();
    recompute(&mut again, &[], |id| graph.tensor(id).name != "scaled");
    check_copies(&again, &["gate_up"]);
    let mut again = graph.clone();
    recompute(&mut again, &[], |_| false);
    check_copies(&again, &["gate_up.again"]);
}

/// The host reads a result after the step.
#[test]
fn a_result_of_a_section_is_copied() {
    let section = |name: &str, result: bool| {
        let mut b = Builder::new();
        let inner = b.linear("inner", b.x);
        let function = ActivationFunction::Silu;
        let out = b.apply("out", Op::Activation { x: inner, function });
        let loss = b.apply("loss", Op::Sum { x: out });
        let mut results = vec![("loss".to_owned(), loss)];
        if result {
            results.push(("inner".to_owned(), inner));
        }
        Section {
            name: name.to_owned(),
            graph: b.graph,
            carried_in: vec![Carried::new("x", b.x)],
            carried_out: vec![Carried::new("x", out)],
            results,
            ..Section::default()
        }
    };
    let mut first = Section { carried_in: Vec::new(), ..section("first", false) };
    first.results.clear();
    let stages =
        vec![Stage::once("first", 0), Stage::repeated("layers", 1, 2), Stage::once("last", 2)];
    for (result, copies) in [(false, &[][..]), (true, &["inner"][..])] {
        let mut last = section("last", result);
        last.carried_out.clear();
        let layer = Section { results: Vec::new(), ..section("layer", false) };
        let program = Program::new(vec![first.clone(), layer, last], stages.clone());
        let program = program.expect("fits");
        let program = program.differentiate(Accumulation::Start, DType::F32).expect("fits");
        check_copies(&program.section(2).graph, copies);
        check_copies(&program.section(1).graph, &[]);
    }
}
