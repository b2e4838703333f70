//! Finds gated units that can be computed with the product that they take: its kernel has the values in registers, so
//! they need not be read again.

use super::super::gemm::UnitKind;
use super::joined::Touched;
use std::ops::Range;
use storm_graph::{ActivationCodec, ActivationFunction, Op, TensorId};
use storm_plan::{Compute, InstructionId, Plan, Queue, Work};

/// A product, and the gated unit that takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) product: InstructionId,
    pub(super) unit: InstructionId,
    pub(super) kind: UnitKind,
    /// The offset of what the product makes.
    pub(super) made: usize,
    /// The offset of what the unit makes, or of gates and ups.
    pub(super) unit_at: usize,
}

/// The pairs of a plan that follow each other in the queue of kernels, so that the unit may as well be computed with the
/// product: it waits for nothing else, and writes nothing that the product touches, except in place.
pub(super) fn pairs(plan: &Plan) -> Vec<Pair> {
    let of_segment = |range: Range<usize>| {
        let ids = range.map(|index| InstructionId(index as u32));
        let kernels: Vec<_> = ids.filter(|&id| plan.queue(id) == Queue::COMPUTE).collect();
        let pairs = kernels.windows(2).filter_map(|ids| pair(plan, ids[0], ids[1]));
        pairs.collect::<Vec<_>>()
    };
    plan.segments.iter().flat_map(|segment| of_segment(segment.instructions.clone())).collect()
}

fn pair(plan: &Plan, product: InstructionId, unit: InstructionId) -> Option<Pair> {
    let (making, taking) = (compute(plan, product)?, compute(plan, unit)?);
    let kind = kind(op(plan, making), op(plan, taking))?;
    let made = *making.places.get(op(plan, making).operands().len())?;
    // First what the product makes; the unit's result, or gates and ups, come next.
    let (&taken, &unit_at) = (taking.places.first()?, taking.places.get(1)?);
    let waits = |id| &plan.instruction(id).waits;
    let follows = waits(unit).iter().all(|id| waits(product).contains(id));
    let (of_product, of_unit) = (Touched::new(plan, product)?, Touched::new(plan, unit)?);
    let fits = of_unit.writes.iter().all(|write| {
        let in_place = |other: &Range<usize>| kind != UnitKind::Forward && write == other;
        of_product.reads.iter().all(|read| are_apart(write, read))
            && of_product.writes.iter().all(|other| are_apart(write, other) || in_place(other))
    });
    (taken == made && unit_at != made && follows && fits).then_some(Pair {
        product,
        unit,
        kind,
        made,
        unit_at,
    })
}

fn compute(plan: &Plan, id: InstructionId) -> Option<&Compute> {
    match &plan.instruction(id).work {
        Work::Compute(compute) => Some(compute),
        _ => None,
    }
}

fn op<'a>(plan: &'a Plan, compute: &Compute) -> &'a Op<TensorId> {
    &plan.graphs[compute.graph.0 as usize].nodes()[compute.node as usize].op
}

fn kind(product: &Op<TensorId>, unit: &Op<TensorId>) -> Option<UnitKind> {
    const SILU: ActivationFunction = ActivationFunction::Silu;
    const PLAIN: ActivationCodec = ActivationCodec::None;
    match (product, unit) {
        (Op::Linear { .. }, Op::SwiGlu { function: SILU, .. }) => Some(UnitKind::Forward),
        (Op::LinearInputGrad { .. }, Op::SwiGluGrad { function: SILU, codec: PLAIN, .. }) => {
            Some(UnitKind::Gradient)
        }
        (
            Op::LinearInputGrad { .. },
            Op::SwiGluGradAndOutput { function: SILU, codec: PLAIN, .. },
        ) => Some(UnitKind::GradientAndOutput),
        _ => None,
    }
}

fn are_apart(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.end <= other.start || other.end <= one.start
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_graph::{DType, Graph, TensorClass};
    use storm_plan::{GraphId, Instruction, Operand, Operands, Segment, Value, ValueId};

    const BYTES: usize = 256;

    /// Instructions for the nodes of a graph, each with the places of its operands and outputs.
    fn plan(graph: Graph, places: &[&[usize]]) -> Plan {
        let class = TensorClass::Scratch;
        let value = Value { name: String::new(), size_bytes: BYTES, class };
        let at = |offsets: &[usize]| {
            let operand = |&offset: &usize| Operand { value: ValueId(0), offset };
            offsets.iter().map(operand).collect::<Operands>()
        };
        let instruction = |(node, places): (usize, &&[usize])| {
            let (reads, writes) = places.split_at(graph.nodes()[node].op.operands().len());
            let (reads, writes) = (at(reads), at(writes));
            let places = places.iter().copied().collect();
            let (graph, node) = (GraphId(0), node as u32);
            let compute = Compute { graph, node, layer: 0, places, reads, writes };
            Instruction { work: Work::Compute(compute), waits: Vec::new() }
        };
        let instructions: Vec<_> = places.iter().enumerate().map(instruction).collect();
        let segments = vec![Segment { name: "step", instructions: 0..instructions.len() }];
        let (values, graphs) = (vec![value], vec![graph.into()]);
        Plan { values, graphs, instructions, segments, ..Plan::default() }
    }

    /// A projection, a unit that takes it, and places for x, the weight, gates and ups, and the unit.
    fn forward(function: ActivationFunction, [x, weight, gate_up, unit]: [usize; 4]) -> Plan {
        let mut graph = Graph::new();
        let source = |graph: &mut Graph, name, shape: [usize; 2]| {
            graph.source(name, shape, DType::BF16, TensorClass::Activation)
        };
        let (rows, matrix) = (source(&mut graph, "x", [4, 8]), source(&mut graph, "w", [16, 8]));
        let product = Op::Linear { x: rows, weight: matrix, bias: None, addend: None };
        let made = graph.apply_one("gate_up", product).unwrap();
        graph.apply_one("unit", Op::SwiGlu { gate_up: made, function }).unwrap();
        plan(graph, &[&[x, weight, gate_up], &[gate_up, unit]])
    }

    /// The gradient of a projection's input, and that of the unit that made it; places for the gradient of the result,
    /// the weight, the input's gradient, and gates and ups.
    fn backward(codec: ActivationCodec, and_output: bool, places: [usize; 4]) -> Plan {
        let [dy, weight, dx, gate_up] = places;
        let mut graph = Graph::new();
        let source = |graph: &mut Graph, name, shape: [usize; 2]| {
            graph.source(name, shape, DType::BF16, TensorClass::Activation)
        };
        let (rows, matrix) = (source(&mut graph, "dy", [4, 16]), source(&mut graph, "w", [16, 8]));
        let halves = source(&mut graph, "gate_up", [4, 16]);
        let product = Op::LinearInputGrad { dy: rows, weight: matrix, addend: None };
        let made = graph.apply_one("dx", product).unwrap();
        let function = SILU;
        let unit = match and_output {
            true => Op::SwiGluGradAndOutput { dy: made, gate_up: halves, function, codec },
            false => Op::SwiGluGrad { dy: made, gate_up: halves, function, codec },
        };
        graph.apply("unit", unit).unwrap();
        let outputs: &[usize] = if and_output { &[gate_up, dx] } else { &[gate_up] };
        plan(graph, &[&[dy, weight, dx], &[&[dx, gate_up], outputs].concat()])
    }

    const SILU: ActivationFunction = ActivationFunction::Silu;
    const APART: [usize; 4] = [0, 256, 512, 768];

    #[test]
    fn a_unit_right_behind_its_product_is_found() {
        let (product, unit) = (InstructionId(0), InstructionId(1));
        let pair = Pair { product, unit, kind: UnitKind::Forward, made: 512, unit_at: 768 };
        assert_eq!(pairs(&forward(SILU, APART)), [pair]);
        assert_eq!(pairs(&forward(ActivationFunction::GeluTanh, APART)), []);
    }

    #[test]
    fn gradients_of_a_unit_are_found_behind_the_gradient_of_what_it_made() {
        let (product, unit) = (InstructionId(0), InstructionId(1));
        let pair = |kind| Pair { product, unit, kind, made: 512, unit_at: 768 };
        let found = |and_output| pairs(&backward(ActivationCodec::None, and_output, APART));
        assert_eq!(found(false), [pair(UnitKind::Gradient)]);
        assert_eq!(found(true), [pair(UnitKind::GradientAndOutput)]);
        // Gates and ups that are stored in another form.
        assert_eq!(pairs(&backward(ActivationCodec::Int8, true, APART)), []);
        // Gates and ups must not lie where the product reads or writes.
        for place in [0, 256, 512, 700] {
            let plan = backward(ActivationCodec::None, true, [0, 256, 512, place]);
            assert_eq!(pairs(&plan), [], "{place}");
        }
    }

    #[test]
    fn a_unit_that_overwrites_what_the_product_touches_is_not() {
        // It may be written only once the product has read everything.
        for place in [0, 128, 256, 511, 600] {
            assert_eq!(pairs(&forward(SILU, [0, 256, 512, place])), [], "{place}");
        }
        assert_eq!(pairs(&forward(SILU, [0, 1024, 512, 256])).len(), 1);
    }

    #[test]
    fn nothing_may_be_between_them() {
        let mut between = forward(SILU, APART);
        let same = between.instructions[0].clone();
        between.instructions.insert(1, same);
        between.segments[0].instructions = 0..3;
        assert_eq!(pairs(&between)[0].product, InstructionId(1), "of two products, the last");
        // The unit takes another tensor.
        let mut other = forward(SILU, APART);
        let Work::Compute(unit) = &mut other.instructions[1].work else { unreachable!() };
        unit.places[0] = 1024;
        assert_eq!(pairs(&other), []);
        // They are in different segments.
        let mut apart = forward(SILU, APART);
        let segment = |instructions| Segment { name: "step", instructions };
        apart.segments = vec![segment(0..1), segment(1..2)];
        assert_eq!(pairs(&apart), []);
    }

    #[test]
    fn the_unit_may_wait_only_for_what_the_product_waits_for() {
        let mut plan = forward(SILU, APART);
        plan.instructions[1].waits = vec![InstructionId(7)];
        assert_eq!(pairs(&plan), []);
        plan.instructions[0].waits = vec![InstructionId(5), InstructionId(7)];
        assert_eq!(pairs(&plan).len(), 1);
    }
}
