//! Programs: sections that fit, and what differentiation makes of tied and repeated parameters.

use storm_graph::*;

const SHAPE: [usize; 2] = [3, 4];

fn parameter(graph: &mut Graph, name: &str) -> TensorId {
    graph.parameter(name, [4, 4], DType::F32, Training::Trainable)
}

fn linear(graph: &mut Graph, name: &str, x: TensorId, weight: TensorId) -> TensorId {
    let op = Op::Linear { x, weight, bias: None, addend: None };
    graph.apply_one(name, op).expect("fits")
}

/// Looks up rows of `table`.
fn prologue() -> Section {
    let mut graph = Graph::new();
    let ids = graph.input("ids", [3], DType::I32);
    let table = parameter(&mut graph, "table");
    let hidden = graph.apply_one("hidden", Op::Embedding { ids, table }).expect("fits");
    Section { name: "prologue", graph, carried_out: vec![hidden], ..Section::default() }
}

/// Multiplies with `weight`.
fn layer() -> Section {
    let mut graph = Graph::new();
    let hidden = graph.source("hidden", SHAPE, DType::F32, TensorClass::Activation);
    let weight = parameter(&mut graph, "weight");
    let out = linear(&mut graph, "out", hidden, weight);
    Section {
        name: "layer",
        graph,
        carried_in: vec![hidden],
        carried_out: vec![out],
        ..Section::default()
    }
}

/// Sums the product with the parameter named `head`.
fn epilogue(head: &str) -> Section {
    let mut graph = Graph::new();
    let hidden = graph.source("hidden", SHAPE, DType::F32, TensorClass::Activation);
    let weight = parameter(&mut graph, head);
    let logits = linear(&mut graph, "logits", hidden, weight);
    let loss = graph.apply_one("loss", Op::Sum { x: logits }).expect("fits");
    let results = vec![("loss".to_owned(), loss)];
    Section { name: "epilogue", graph, carried_in: vec![hidden], results, ..Section::default() }
}

fn accumulators(section: &Section) -> Vec<bool> {
    let backward = section.backward.as_ref().expect("differentiated");
    backward.parameters.iter().map(|gradient| gradient.accumulator.is_some()).collect()
}

#[test]
fn sections_that_do_not_meet_are_refused() {
    let mut narrow = epilogue("head");
    narrow.carried_in.clear();
    let error = Program::new(prologue(), layer(), 2, narrow).unwrap_err().to_string();
    assert!(error.contains("`epilogue`: takes []"), "{error}");
    let error = Program::new(prologue(), layer(), 0, epilogue("head")).unwrap_err().to_string();
    assert!(error.contains("1 to 65535 times"), "{error}");
}

#[test]
fn a_tied_parameter_is_started_by_the_head_and_continued_by_the_table() {
    let program = Program::new(prologue(), layer(), 2, epilogue("table")).expect("fits");
    assert_eq!(program.parameters().len(), 2);
    let start = program.differentiate(Accumulation::Start, DType::F32).expect("differentiable");
    assert_eq!(accumulators(&start.epilogue), [false]);
    assert_eq!(accumulators(&start.layer), [false]);
    assert_eq!(accumulators(&start.prologue), [true]);
    let next = program.differentiate(Accumulation::Continue, DType::F32).expect("differentiable");
    for section in next.sections() {
        assert_eq!(accumulators(section), [true], "{}", section.name);
    }
}

/// A layer's parameter is another than the epilogue's of the same name.
#[test]
fn a_layer_has_names_of_its_own() {
    let program = Program::new(prologue(), layer(), 2, epilogue("weight")).expect("fits");
    assert_eq!(program.parameters().len(), 3);
    let start = program.differentiate(Accumulation::Start, DType::F32).expect("differentiable");
    assert_eq!(accumulators(&start.layer), [false]);
}

#[test]
fn an_export_that_learns_is_refused() {
    let mut prologue = prologue();
    prologue.exports.push(("hidden".to_owned(), prologue.carried_out[0]));
    let program = Program::new(prologue, layer(), 2, epilogue("head")).expect("fits");
    let error = program.differentiate(Accumulation::Start, DType::F32).unwrap_err().to_string();
    assert!(error.contains("exports have no gradient"), "{error}");
}

#[test]
fn gradients_are_floats() {
    let program = Program::new(prologue(), layer(), 1, epilogue("head")).expect("fits");
    let error = program.differentiate(Accumulation::Start, DType::I8).unwrap_err().to_string();
    assert!(error.contains("gradients are f32 or bf16, not i8"), "{error}");
}

#[test]
#[should_panic(expected = "has too many elements")]
fn a_shape_that_overflows_is_not_made() {
    Graph::new().input("x", [(1 << 62) + 1, 4], DType::F32);
}
