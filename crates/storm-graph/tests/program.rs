//! Programs: sections that fit, and what differentiation makes of tied and repeated parameters.

use std::collections::BTreeSet;
use std::ops::Range;
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
fn embedding() -> Section {
    let mut graph = Graph::new();
    let ids = graph.input("ids", [3], DType::I32);
    let table = parameter(&mut graph, "table");
    let hidden = graph.apply_one("hidden", Op::Embedding { ids, table }).expect("fits");
    let carried_out = vec![Carried::new("hidden", hidden)];
    Section { name: "embedding".to_owned(), graph, carried_out, ..Section::default() }
}

/// Multiplies with `weight`.
fn layer() -> Section {
    let mut graph = Graph::new();
    let hidden = graph.source("hidden", SHAPE, DType::F32, TensorClass::Activation);
    let weight = parameter(&mut graph, "weight");
    let out = linear(&mut graph, "out", hidden, weight);
    Section {
        name: "layer".to_owned(),
        graph,
        carried_in: vec![Carried::new("hidden", hidden)],
        carried_out: vec![Carried::new("hidden", out)],
        ..Section::default()
    }
}

/// Sums the product with the parameter named `head`.
fn head(head: &str) -> Section {
    let mut graph = Graph::new();
    let hidden = graph.source("hidden", SHAPE, DType::F32, TensorClass::Activation);
    let weight = parameter(&mut graph, head);
    let logits = linear(&mut graph, "logits", hidden, weight);
    let loss = graph.apply_one("loss", Op::Sum { x: logits }).expect("fits");
    let results = vec![("loss".to_owned(), loss)];
    let carried_in = vec![Carried::new("hidden", hidden)];
    Section { name: "head".to_owned(), graph, carried_in, results, ..Section::default() }
}

fn stages(layers: usize) -> Vec<Stage> {
    vec![Stage::once("embedding", 0), Stage::repeated("layers", 1, layers), Stage::once("head", 2)]
}

fn program(layers: usize, head_weight: &str) -> Program {
    Program::new(vec![embedding(), layer(), head(head_weight)], stages(layers)).expect("fits")
}

fn accumulators(section: &Section) -> Vec<bool> {
    let backward = section.backward.as_ref().expect("differentiated");
    backward.parameters.iter().map(|gradient| gradient.accumulator.is_some()).collect()
}

/// What refusing these templates and stages says.
fn refusal(templates: Vec<Section>, stages: Vec<Stage>) -> String {
    Program::new(templates, stages).unwrap_err().to_string()
}

#[test]
fn stages_that_do_not_meet_are_refused() {
    let all = || vec![embedding(), layer(), head("head")];
    let mut deaf = all();
    deaf[2].carried_in.clear();
    let error = refusal(deaf, stages(2));
    assert!(error.contains("`layer`: passes on `hidden`, which no later block takes"), "{error}");

    let mut mute = all();
    mute[0].carried_out.clear();
    let error = refusal(mute, stages(2));
    assert!(error.contains("`layer`: takes `hidden` in stage `layers`, which no block"), "{error}");

    let mut other_form = all();
    let id = other_form[0].graph.input("other", [3, 5], DType::F32);
    other_form[0].carried_out[0].tensor = id;
    let error = refusal(other_form, stages(2));
    assert!(
        error.contains("takes `hidden` as f32 (3, 4), but `embedding` passes on f32 (3, 5)"),
        "{error}"
    );

    let error = refusal(all(), stages(0));
    assert!(error.contains("1 to 65535 times"), "{error}");
    let error = refusal(all(), vec![]);
    assert!(error.contains("no stages"), "{error}");
    let error = refusal(all(), vec![Stage::once("embedding", 3)]);
    assert!(error.contains("has template 3; there are 3"), "{error}");
    let mut twice = stages(2);
    twice[2].name = "embedding".to_owned();
    assert!(refusal(all(), twice).contains("the name of two stages"));
    let mut unnumbered = stages(2);
    unnumbered[1].numbering = Numbering::Plain;
    assert!(refusal(all(), unnumbered).contains("must be numbered"));
    let parts = |second: Range<usize>| {
        let mut parts = stages(2);
        parts[1] = Stage::part_of("layers", 1, 0..3);
        parts.insert(2, Stage::part_of("layers", 1, second));
        parts
    };
    let error = refusal(all(), parts(2..4));
    assert!(error.contains("has numbers 2..4 of `layers`, as another"), "{error}");
}

/// Stages of other templates in between do not change the names of a series.
#[test]
fn a_series_goes_through_several_stages() {
    let mut other = layer();
    other.name = "other".to_owned();
    let templates = vec![embedding(), layer(), head("table"), other];
    let stages = vec![
        Stage::once("embedding", 0),
        Stage::part_of("layers", 1, 0..2),
        Stage::part_of("layers", 3, 2..3),
        Stage::part_of("layers", 1, 3..5),
        Stage::once("head", 2),
    ];
    let split = Program::new(templates, stages).expect("fits");
    let names = |program: &Program| -> Vec<String> {
        program.parameter_instances().into_iter().map(|instance| instance.name).collect()
    };
    let whole = program(5, "table");
    let sorted = |mut names: Vec<String>| {
        names.sort();
        names
    };
    assert_eq!(sorted(names(&split)), sorted(names(&whole)));
    let stages: Vec<&str> = split.stages().iter().map(|stage| stage.name.as_str()).collect();
    assert_eq!(stages, ["embedding", "layers 0 to 1", "layers 2", "layers 3 to 4", "head"]);
    // Each stage has random streams of its own.
    let streams: BTreeSet<(u16, u16)> = split
        .parameter_instances()
        .iter()
        .map(|instance| (instance.parameter.number, instance.index))
        .collect();
    assert_eq!(streams.len(), split.parameter_instances().len());
}

#[test]
fn shared_parameters_must_be_alike() {
    let mut frozen = head("table");
    let mut graph = Graph::new();
    let hidden = graph.source("hidden", SHAPE, DType::F32, TensorClass::Activation);
    let weight = graph.parameter("table", [4, 4], DType::F32, Training::Frozen);
    let logits = linear(&mut graph, "logits", hidden, weight);
    frozen.results[0].1 = graph.apply_one("loss", Op::Sum { x: logits }).expect("fits");
    frozen.graph = graph;
    frozen.carried_in[0].tensor = hidden;
    let error = refusal(vec![embedding(), layer(), frozen], stages(2));
    assert!(
        error.contains("`table` differs from the one that it shares with `embedding`"),
        "{error}"
    );
}

#[test]
fn each_use_of_a_tied_parameter_has_a_gradient_of_its_own() {
    let program = program(2, "table");
    assert_eq!(program.parameters().len(), 2);
    let tied = program.tied_uses();
    let names: Vec<String> = tied.iter().map(|tied| tied.gradient_name(&program)).collect();
    assert_eq!(names, ["table.grad@head"]);
    let blocks: Vec<Block> = program.blocks().collect();
    let own = |block: usize, name: &str| program.gradient_name(blocks[block], name);
    assert_eq!(own(0, "table"), "table.grad");
    assert_eq!(own(2, "weight"), "layers.1.weight.grad");
    assert_eq!(own(3, "table"), "table.grad@head");
    for (accumulation, adds) in [(Accumulation::Start, false), (Accumulation::Continue, true)] {
        let program = program.differentiate(accumulation, DType::F32).expect("differentiable");
        for section in program.templates() {
            assert_eq!(accumulators(section), [adds], "{}", section.name);
        }
    }
}

/// A layer's parameter is another than the head's of the same name.
#[test]
fn a_layer_has_names_of_its_own() {
    let program = program(2, "weight");
    assert_eq!(program.parameters().len(), 3);
    assert!(program.tied_uses().is_empty());
    let names: Vec<String> = program.parameter_instances().into_iter().map(|p| p.name).collect();
    assert_eq!(names, ["table", "layers.0.weight", "layers.1.weight", "weight"]);
}

#[test]
fn an_export_that_learns_is_refused() {
    let mut embedding = embedding();
    embedding.exports.push(("hidden".to_owned(), embedding.carried_out[0].tensor));
    let program = Program::new(vec![embedding, layer(), head("head")], stages(2)).expect("fits");
    let error = program.differentiate(Accumulation::Start, DType::F32).unwrap_err().to_string();
    assert!(error.contains("exports have no gradient"), "{error}");
}

/// An encoder whose first tensor goes around the middle, as in a U-net: the gradient of both ways is
/// asked for, and none where nothing before learns.
#[test]
fn a_skip_connection_goes_around_a_stage() {
    let source = |graph: &mut Graph, name: &str| {
        graph.source(name, SHAPE, DType::F32, TensorClass::Activation)
    };
    let mut first = embedding();
    let skip =
        first.graph.apply_one("skip", Op::Scale { x: first.carried_out[0].tensor, factor: 2.0 });
    first.carried_out.push(Carried::new("skip", skip.expect("fits")));
    let mut graph = Graph::new();
    let (hidden, skip) = (source(&mut graph, "hidden"), source(&mut graph, "skip"));
    let sum = graph.apply_one("sum", Op::Add { a: hidden, b: skip }).expect("fits");
    let loss = graph.apply_one("loss", Op::Sum { x: sum }).expect("fits");
    let last = Section {
        name: "last".to_owned(),
        graph,
        carried_in: vec![Carried::new("hidden", hidden), Carried::new("skip", skip)],
        results: vec![("loss".to_owned(), loss)],
        ..Section::default()
    };
    let program = Program::new(vec![first, layer(), last], stages(2)).expect("fits");
    let from = |block: usize, output: usize| Origin { block, output };
    let origins = program.origins().expect("checked");
    assert_eq!(origins[3], [from(2, 0), from(0, 1)]);
    let program = program.differentiate(Accumulation::Start, DType::F32).expect("differentiable");
    let backward = program.section(2).backward.as_ref().expect("reached");
    assert!(backward.carried_in_gradients.iter().all(Option::is_some));
    assert!((0..3).all(|stage| program.is_reached(stage)));
}

#[test]
fn nothing_is_differentiated_below_the_first_stage_that_learns() {
    let mut frozen = embedding();
    let mut graph = Graph::new();
    let ids = graph.input("ids", [3], DType::I32);
    let table = graph.parameter("table", [4, 4], DType::F32, Training::Frozen);
    frozen.carried_out[0].tensor =
        graph.apply_one("hidden", Op::Embedding { ids, table }).expect("fits");
    frozen.graph = graph;
    let templates = vec![frozen, layer(), head("head")];
    let program = Program::new(templates, stages(1)).expect("fits");
    let program = program.differentiate(Accumulation::Start, DType::F32).expect("differentiable");
    assert!(!program.is_reached(0) && program.section(0).backward.is_none());
    let layer = program.section(1).backward.as_ref().expect("it learns");
    assert_eq!(layer.carried_in_gradients, [None]);
}

#[test]
fn gradients_are_floats() {
    let error = program(1, "head").differentiate(Accumulation::Start, DType::I8).unwrap_err();
    assert!(error.to_string().contains("gradients are f32 or bf16, not i8"), "{error}");
}

#[test]
#[should_panic(expected = "has too many elements")]
fn a_shape_that_overflows_is_not_made() {
    Graph::new().input("x", [(1 << 62) + 1, 4], DType::F32);
}
