//! A program so small that all of its plans can be tried. The planner's is close to the best.

use crate::models::{budget, planned, small_card};
use rayon::prelude::*;
use storm_graph::{
    ActivationFunction, Carried, DType, Graph, Op, Program, Section, Shape, Stage, TensorClass,
    TensorId, Training,
};
use storm_plan::{
    Decisions, Forced, HardwareProfile, Lowering, SavedStorage, Storage, Streaming, Task, Tier,
    UpdateTime, plan, simulate,
};
use storm_train::{Precision, TrainOptions, task_of_program};

const BATCH: usize = 4;
const SEQUENCE: usize = 128;
const WIDTH: usize = 256;
const VOCABULARY: usize = 512;
const LAYERS: usize = 2;

/// How much slower than the best plan the planner's choice may be.
const SLACK: f64 = 1.05;

fn parameter(graph: &mut Graph, name: &str, shape: [usize; 2]) -> TensorId {
    graph.parameter(name, shape, DType::BF16, Training::Trainable)
}

fn hidden(graph: &mut Graph) -> TensorId {
    graph.source("hidden", [BATCH, SEQUENCE, WIDTH], DType::BF16, TensorClass::Activation)
}

/// Layers of two products with a GELU between them. They save two tensors.
fn toy_program() -> Program {
    let mut graph = Graph::new();
    let ids = graph.input("tokens", [BATCH, SEQUENCE], DType::I32);
    let table = parameter(&mut graph, "embedding.weight", [VOCABULARY, WIDTH]);
    let out = graph.apply_one("embedding", Op::Embedding { ids, table }).expect("fits");
    let (name, carried_out) = ("embedding".to_owned(), vec![Carried::new("hidden", out)]);
    let embedding = Section { name, graph, carried_out, ..Section::default() };

    let mut graph = Graph::new();
    let x = hidden(&mut graph);
    let weight = parameter(&mut graph, "up.weight", [4 * WIDTH, WIDTH]);
    let op = Op::Linear { x, weight, bias: None, addend: None };
    let up = graph.apply_one("up", op).expect("fits");
    let op = Op::Activation { x: up, function: ActivationFunction::GeluTanh };
    let active = graph.apply_one("active", op).expect("fits");
    let weight = parameter(&mut graph, "down.weight", [WIDTH, 4 * WIDTH]);
    let op = Op::Linear { x: active, weight, bias: None, addend: Some(x) };
    let out = graph.apply_one("down", op).expect("fits");
    let (carried_in, carried_out) =
        (vec![Carried::new("hidden", x)], vec![Carried::new("hidden", out)]);
    let name = "layer".to_owned();
    let layer = Section { name, graph, carried_in, carried_out, ..Section::default() };

    let mut graph = Graph::new();
    let x = hidden(&mut graph);
    let weight = parameter(&mut graph, "head.weight", [VOCABULARY, WIDTH]);
    let targets = graph.input("targets", [BATCH, SEQUENCE], DType::I32);
    let denominator = graph.input("denominator", Shape::scalar(), DType::F32);
    let op = Op::HeadLoss {
        hidden: x,
        weight,
        targets,
        denominator,
        chunk_rows: 64,
        label_smoothing: 0.0,
        accuracy: storm_graph::Accuracy::Skip,
    };
    let row_loss = graph.apply_one("row_loss", op).expect("fits");
    let loss = graph.apply_one("loss", Op::Sum { x: row_loss }).expect("fits");
    let results = vec![("loss".to_owned(), loss)];
    let (name, carried_in) = ("head".to_owned(), vec![Carried::new("hidden", x)]);
    let head = Section { name, graph, carried_in, results, ..Section::default() };
    let stages = vec![
        Stage::once("embedding", 0),
        Stage::repeated("layers", 1, LAYERS),
        Stage::once("head", 2),
    ];
    Program::new(vec![embedding, layer, head], stages).expect("stages that meet")
}

fn toy_task(micro_batches: usize) -> Task {
    let options = TrainOptions::new(BATCH, SEQUENCE, Precision::Bf16Stochastic);
    task_of_program(&toy_program(), &options, micro_batches).expect("differentiable")
}

const STORAGES: [Storage; 3] = [Storage::Keep, Storage::Recompute, Storage::Offload];

/// All combinations of storage for every unit of every layer.
fn all_saved(units: usize) -> Vec<Vec<SavedStorage>> {
    let count = STORAGES.len().pow((units * LAYERS) as u32);
    let saved = |index: usize| -> Vec<SavedStorage> {
        let digit = |position: usize| STORAGES[index / STORAGES.len().pow(position as u32) % 3];
        (0..LAYERS)
            .map(|layer| (0..units).map(|unit| digit(layer * units + unit)).collect())
            .collect()
    };
    (0..count).map(saved).collect()
}

/// All decisions, except that streaming applies to all layers and rings have one depth.
fn all_decisions(task: &Task, piece_elements: usize) -> Vec<Decisions> {
    let resident = Streaming::resident(LAYERS);
    let mut all = Vec::new();
    for saved in all_saved(task.saved_units(1).len()) {
        for first in [Storage::Keep, Storage::Offload] {
            for second in STORAGES {
                for bits in 0..16 {
                    for ring in [1, 2] {
                        for group in (1..=task.micro_batches)
                            .filter(|g| task.micro_batches.is_multiple_of(*g))
                        {
                            let streamed = Streaming { pinned: 0, ring };
                            let place =
                                |bit: usize| if bits >> bit & 1 == 1 { streamed } else { resident };
                            let mut decisions = Decisions {
                                update: match bits >> 3 {
                                    0 => UpdateTime::EndOfStep,
                                    _ => UpdateTime::NextStep,
                                },
                                state_ring: ring,
                                piece_elements,
                                ..Decisions::resident(task)
                            };
                            let groups = &mut decisions.groups[0];
                            groups.micro_batches = group;
                            groups.times = task.micro_batches / group;
                            (groups.activation_ring, groups.input_ring) = (ring, ring);
                            groups.stages[1].saved = saved.clone();
                            groups.stages[1].inputs = vec![first, second];
                            for (stage, decided) in decisions.stages.iter_mut().enumerate() {
                                if place(2) == streamed {
                                    decided.states_pinned = 0;
                                }
                                if stage == 1 {
                                    decided.weights = place(0);
                                    decided.gradients = place(1);
                                }
                            }
                            all.push(decisions);
                        }
                    }
                }
            }
        }
    }
    all
}

/// Device bytes and step time of every plan.
fn all_plans(task: &Task, profile: &HardwareProfile, piece_elements: usize) -> Vec<(usize, f64)> {
    let lowering = Lowering::new(task, profile).expect("a task that can be lowered");
    all_decisions(task, piece_elements)
        .par_iter()
        .map(|decisions| {
            let plan = lowering.lower(decisions).expect("decisions that work");
            (plan.bytes[Tier::DEVICE], simulate(&plan, profile).step_seconds)
        })
        .collect()
}

fn close_to_the_best(name: &str, profile: &HardwareProfile, micro_batches: usize) {
    let task = toy_task(micro_batches);
    assert_eq!(task.saved_units(1).len(), 2);
    // The planner's own, so that the plans differ only in their decisions.
    let piece_elements = planned(&task, profile, budget(1 << 30, 1 << 30)).decisions.piece_elements;
    let plans = all_plans(&task, profile, piece_elements);
    let smallest = plans.iter().map(|&(bytes, _)| bytes).min().expect("some plans");
    let roomiest = plans.iter().map(|&(bytes, _)| bytes).max().expect("some plans");
    for eighth in 0..=8 {
        let bytes = smallest + (roomiest - smallest) * eighth / 8;
        let fitting = plans.iter().filter(|&&(device, _)| device <= bytes);
        let best = fitting.map(|&(_, seconds)| seconds).fold(f64::MAX, f64::min);
        let found = plan(&task, profile, budget(bytes as u64, 1 << 30), &Forced::default())
            .unwrap_or_else(|e| panic!("{name}, {bytes} of {smallest} to {roomiest} bytes: {e}"));
        let seconds = found.prediction.step_seconds;
        assert!(
            seconds <= best * SLACK,
            "{name}, {micro_batches} micro-batches, {bytes} of {smallest} to {roomiest} bytes: \
             {seconds:.6} s instead of {best:.6} s by {:?}",
            found.decisions
        );
    }
}

/// Moving a byte costs 4,000 FLOP, and recomputing it a few hundred.
#[test]
fn where_recomputing_is_cheap() {
    close_to_the_best("slow bus", &small_card(1e12, 2.5e8), 2);
}

/// The other way around.
#[test]
fn where_moving_is_cheap() {
    close_to_the_best("fast bus", &small_card(1e12, 1e10), 1);
}

#[test]
fn where_the_two_are_balanced() {
    close_to_the_best("balanced", &small_card(1e12, 2e9), 1);
}
