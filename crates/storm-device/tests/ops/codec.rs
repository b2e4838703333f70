//! Gated units whose operand waits for the backward pass in 8 bits, against definitions in f64.

use crate::reference::{Value, evaluate};
use crate::support::*;
use half::bf16;
use std::collections::BTreeMap;
use storm_graph::{
    ActivationCodec, ActivationFunction, DType, Graph, Op, Shape, TensorClass, TensorId, UnitOutput,
};

const FUNCTIONS: [ActivationFunction; 4] = [
    ActivationFunction::GeluTanh,
    ActivationFunction::Silu,
    ActivationFunction::Gelu,
    ActivationFunction::Relu,
];

/// Values that share a scale, and what the largest of them is coded as.
const GROUP: usize = 128;
const CODE_MAX: f64 = 127.0;

/// A unit, the same with its code, and all ways to its gradient. Operands that are overwritten are there once for each.
struct Unit {
    graph: Graph,
    gate_ups: Vec<TensorId>,
    dys: Vec<TensorId>,
    /// What the unit makes, and the same with a code.
    made: [TensorId; 2],
    code: TensorId,
    /// From the code, and from the operand itself.
    gradients: Vec<TensorId>,
    outputs: Vec<TensorId>,
}

impl Unit {
    fn new(rows: usize, width: usize, dtype: DType, function: ActivationFunction) -> Unit {
        let mut graph = Graph::new();
        let mut source = |name: &str, width: usize| {
            graph.source(name, [rows, width], dtype, TensorClass::Activation)
        };
        let gate_ups: Vec<TensorId> = (0..3).map(|_| source("gate_up", 2 * width)).collect();
        let dys: Vec<TensorId> = (0..4).map(|_| source("dy", width)).collect();
        let mut apply = |op: Op<TensorId>| graph.apply(op.name(), op).expect("it fits");
        let gate_up = gate_ups[0];
        let plain = apply(Op::SwiGlu { gate_up, function })[0];
        let coded = apply(Op::SwiGluCoded { gate_up, function });
        let (code, codec) = (coded[1], ActivationCodec::Int8);
        let [skip, compute] = [UnitOutput::Skip, UnitOutput::Compute];
        let made = [
            Op::SwiGluCodedGrad { dy: dys[0], code, function, output: skip },
            Op::SwiGluCodedGrad { dy: dys[1], code, function, output: compute },
            Op::SwiGluGrad { dy: dys[2], gate_up: gate_ups[1], function, codec },
            Op::SwiGluGradAndOutput { dy: dys[3], gate_up: gate_ups[2], function, codec },
        ]
        .map(&mut apply);
        Unit {
            gradients: made.iter().map(|made| made[0]).collect(),
            outputs: made.iter().filter_map(|made| made.get(1).copied()).collect(),
            made: [plain, coded[0]],
            code,
            graph,
            gate_ups,
            dys,
        }
    }

    fn run(&self, gate_up: &Value, dy: &Value) -> Machine<'_> {
        let gate_ups = self.gate_ups.iter().map(|&id| (id, gate_up.clone()));
        let dys = self.dys.iter().map(|&id| (id, dy.clone()));
        let values: BTreeMap<TensorId, Value> = gate_ups.chain(dys).collect();
        let mut machine = Machine::new(&self.graph, &values);
        machine.run();
        machine
    }
}

/// Values of one dtype, in groups of very different sizes.
fn draw(rng: &mut Rng, rows: usize, width: usize, dtype: DType) -> Value {
    let data = (0..rows * width).map(|place| {
        let scale = [1.0, 1.0, 0.01, 20.0, 0.0, 1e-20, 1e-38][place / 64 % 7];
        let x = (scale * rng.normal()) as f32;
        f64::from(if dtype == DType::BF16 { bf16::from_f32(x).to_f32() } else { x })
    });
    Value::new(Shape::from([rows, width]), data.collect())
}

/// The smallest bf16 that is not below a positive number, by search.
fn bf16_above(value: f64) -> f64 {
    let (mut low, mut high) = (0u16, bf16::INFINITY.to_bits());
    while low < high {
        let middle = low + (high - low) / 2;
        match f64::from(bf16::from_bits(middle).to_f32()) < value {
            true => low = middle + 1,
            false => high = middle,
        }
    }
    f64::from(bf16::from_bits(low).to_f32())
}

/// The codes and scales of half a row, by definition.
fn code(values: &[f64]) -> (Vec<i8>, Vec<f64>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for group in values.chunks(GROUP) {
        let largest = group.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
        // One division in f32 comes before the rounding.
        let scale = bf16_above(f64::from(largest as f32 / CODE_MAX as f32));
        scales.push(scale);
        codes.extend(group.iter().map(|x| match scale > 0.0 {
            true => f64::from(*x as f32 / scale as f32).round_ties_even() as i8,
            false => 0,
        }));
    }
    (codes, scales)
}

/// The values that the code of `gate_up` stands for, and the bytes of the code.
fn coded(gate_up: &Value, width: usize) -> (Value, Vec<u8>) {
    let (mut values, mut bytes) = (Vec::new(), Vec::new());
    for half in gate_up.data.chunks(width) {
        let (codes, scales) = code(half);
        values.extend(codes.iter().enumerate().map(|(i, &c)| f64::from(c) * scales[i / GROUP]));
        bytes.extend(codes.iter().map(|code| code.to_le_bytes()[0]));
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        bytes.extend(scales.iter().flat_map(|&scale| bf16::from_f64(scale).to_le_bytes()));
        bytes.resize(bytes.len().next_multiple_of(16), 0);
    }
    (Value::new(gate_up.shape.clone(), values), bytes)
}

fn close(found: f64, wanted: f64, size: f64, dtype: DType) -> bool {
    let share = if dtype == DType::BF16 { 1.0 / 128.0 } else { 1e-5 };
    (found - wanted).abs() <= share * wanted.abs().max(size) + 1e-30
}

#[test]
fn gradients_are_those_of_the_values_of_the_code() {
    let mut rng = Rng::new(7);
    for turn in 0..40 {
        let dtype = if turn % 2 == 0 { DType::F32 } else { DType::BF16 };
        let function = FUNCTIONS[turn / 2 % 4];
        let width = [1, 24, 127, 128, 129, 300, 515][rng.below(7)];
        let rows = 1 + rng.below(9);
        let context = format!("turn {turn}, {function:?}, {dtype}, {rows} × {width}");
        let gate_up = draw(&mut rng, rows, 2 * width, dtype);
        let dy = draw(&mut rng, rows, width, dtype);
        let unit = Unit::new(rows, width, dtype, function);
        let machine = unit.run(&gate_up, &dy);

        let (values, bytes) = coded(&gate_up, width);
        assert_eq!(machine.bytes(unit.made[1]), machine.bytes(unit.made[0]), "{context}");
        assert!(machine.bytes(unit.code) == bytes, "{context}: other codes");
        for same in [&unit.gradients, &unit.outputs] {
            for &other in same {
                let equal = machine.bytes(other) == machine.bytes(same[0]);
                assert!(equal, "{context}: the ways to a gradient differ");
            }
        }

        let output = evaluate(&Op::SwiGlu { gate_up: &values, function }).remove(0);
        for (place, found) in machine.get(unit.outputs[0]).data.iter().enumerate() {
            let (row, column, wanted) = (place / width, place % width, output.data[place]);
            let at = row * 2 * width + column;
            // Far out, the reference of GELU cancels.
            let size = 1e-6 * (values.data[at] * values.data[at + width]).abs();
            assert!(close(*found, wanted, size, dtype), "{context}: {found}, not {wanted}");
        }
        // d(f(gate) · up) by differences of f, which is known in f64.
        let f = |gate: f64| {
            let pair = Value::new(Shape::from([1, 2]), vec![gate, 1.0]);
            evaluate(&Op::SwiGlu { gate_up: &pair, function })[0].data[0]
        };
        let found = machine.get(unit.gradients[0]);
        for row in 0..rows {
            for column in 0..width {
                let at = row * 2 * width + column;
                let (gate, up) = (values.data[at], values.data[at + width]);
                let dy = dy.data[row * width + column];
                let step = 1e-5 * gate.abs().max(1e-3);
                let slope = match function {
                    ActivationFunction::Relu => f64::from(u8::from(gate > 0.0)),
                    _ => (f(gate + step) - f(gate - step)) / (2.0 * step),
                };
                let size = (dy * up).abs();
                assert!(
                    close(found.data[at], dy * up * slope, size * 0.1, dtype),
                    "{context}: {} at gate {gate}, not {}",
                    found.data[at],
                    dy * up * slope
                );
                let d_up = found.data[at + width];
                assert!(
                    close(d_up, dy * f(gate), (dy * gate).abs() * 1e-6, dtype),
                    "{context}: {d_up}"
                );
            }
        }
    }
}

/// Rows by themselves give what they give together.
#[test]
fn chunks_of_rows_give_the_same_bits() {
    let (rows, width) = (70, 300);
    let mut rng = Rng::new(3);
    for dtype in [DType::F32, DType::BF16] {
        let gate_up = draw(&mut rng, rows, 2 * width, dtype);
        let dy = draw(&mut rng, rows, width, dtype);
        let whole = Unit::new(rows, width, dtype, ActivationFunction::Silu);
        let machine = whole.run(&gate_up, &dy);
        let read = |machine: &Machine<'_>, unit: &Unit| {
            let ids = [unit.code].into_iter().chain(unit.gradients.clone());
            ids.chain(unit.outputs.clone()).map(|id| machine.bytes(id)).collect::<Vec<_>>()
        };
        let wanted = read(&machine, &whole);
        for chunk in [1, 7, 64] {
            let mut found: Vec<Vec<u8>> = vec![Vec::new(); wanted.len()];
            for first in (0..rows).step_by(chunk) {
                let count = chunk.min(rows - first);
                let part = |value: &Value| {
                    let width = value.shape.width();
                    let data = value.data[first * width..(first + count) * width].to_vec();
                    Value::new(Shape::from([count, width]), data)
                };
                let unit = Unit::new(count, width, dtype, ActivationFunction::Silu);
                let machine = unit.run(&part(&gate_up), &part(&dy));
                for (found, more) in found.iter_mut().zip(read(&machine, &unit)) {
                    found.extend(more);
                }
            }
            assert!(found == wanted, "{dtype}, chunks of {chunk}");
        }
    }
}

/// A number that is lost in the forward pass is lost in the gradient, too.
#[test]
fn what_is_not_finite_stays_visible() {
    let (rows, width) = (2, 200);
    let mut rng = Rng::new(9);
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for place in [5, width - 1, width, 2 * width - 1] {
            for (dtype, function) in [DType::F32, DType::BF16].into_iter().zip(FUNCTIONS) {
                let mut gate_up = draw(&mut rng, rows, 2 * width, dtype);
                gate_up.data[2 * width + place] = bad;
                let dy = Value::new(Shape::from([rows, width]), vec![1.0; rows * width]);
                let unit = Unit::new(rows, width, dtype, function);
                let machine = unit.run(&gate_up, &dy);
                for &gradient in &unit.gradients {
                    let gradient = machine.get(gradient);
                    let (first, second) = gradient.data.split_at(2 * width);
                    assert!(first.iter().all(|x| x.is_finite()), "{bad} at {place}: other rows");
                    let is_lost = second.iter().any(|x| x.is_nan());
                    assert!(is_lost, "{bad} at {place}, {function:?}");
                }
            }
        }
    }
}
