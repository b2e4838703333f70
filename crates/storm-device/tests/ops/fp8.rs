//! Products of 8-bit floats, against definitions in f64.

use crate::reference::Value;
use crate::support::*;
use half::bf16;
use std::collections::BTreeMap;
use storm_graph::{
    DType, Fp8Form, GradientRequest, Graph, Op, Shape, TensorClass, TensorId, Training,
    differentiate,
};

/// All values of E4M3 that are not negative, by code.
fn levels() -> Vec<f64> {
    let level = |code: i32| match code / 8 {
        0 => f64::from(code) * 2f64.powi(-9),
        exponent => (1.0 + f64::from(code % 8) / 8.0) * 2f64.powi(exponent - 7),
    };
    (0..0x7f).map(level).collect()
}

/// The code of a value, by search: the nearest level, of two the even one.
fn code(value: f64) -> u8 {
    let levels = levels();
    let distance = |code: usize| (levels[code] - value.abs()).abs();
    let nearest = (0..levels.len())
        .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2))));
    let nearest = nearest.expect("there are codes") as u8;
    if value.is_sign_negative() { nearest | 0x80 } else { nearest }
}

/// The codes of a tensor, what they stand for, and the scale: the smallest power of two that leaves no value above 448.
fn coded(values: &Value) -> (Vec<u8>, Vec<f64>, f64) {
    let largest = values.scale();
    let mut scale = 1.0;
    if largest > 0.0 {
        scale = 2f64.powi(130);
        while scale / 2.0 * 448.0 >= largest && scale > 2f64.powi(-63) {
            scale /= 2.0;
        }
    }
    let codes: Vec<u8> = values.data.iter().map(|x| code(x / scale)).collect();
    let levels = levels();
    let stand_for = codes.iter().map(|&code| {
        let magnitude = scale * levels[usize::from(code & 0x7f)];
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    });
    let values = stand_for.collect();
    (codes, values, scale)
}

fn with_scale(codes: impl Iterator<Item = u8>, width: usize, scale: f64) -> Vec<u8> {
    let mut bytes: Vec<u8> = codes.collect();
    let end = bytes.len() + width;
    bytes.extend((scale as f32).to_le_bytes());
    bytes.resize(end, 0);
    bytes
}

fn draw(rng: &mut Rng, shape: &[usize], size: f64) -> Value {
    let shape = Shape::from(shape);
    let data = (0..shape.elements()).map(|_| {
        f64::from(bf16::from_f64(size * rng.normal() * 2f64.powi(-(rng.below(12) as i32))))
    });
    Value::new(shape.clone(), data.collect())
}

/// `a · bᵀ` of rows.
fn product(a: &[f64], b: &[f64], inner: usize) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let rows = a.chunks(inner).flat_map(|a| b.chunks(inner).map(move |b| dot(a, b)));
    rows.collect()
}

fn turned(values: &[f64], width: usize) -> Vec<f64> {
    (0..width).flat_map(|column| values.iter().skip(column).step_by(width).copied()).collect()
}

fn assert_close(what: &str, found: &Value, wanted: &[f64], dtype: DType) {
    let size = wanted.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let step = if dtype == DType::BF16 { 2f64.powi(-8) } else { 2f64.powi(-20) };
    for (index, (found, wanted)) in found.data.iter().zip(wanted).enumerate() {
        let allowed = step * wanted.abs() + 1e-5 * size;
        assert!((found - wanted).abs() <= allowed, "{what} at {index}: {found:e}, not {wanted:e}");
    }
}

/// Codes in every form, to the bit: for tensors of any size, of zeros, and with one value far above all others.
#[test]
fn codes_are_those_of_the_definition() {
    let mut rng = Rng::new(1);
    for size in [1.0, 0.0, 447.0, 1e-6, 3e4, 1e-25, 1e30] {
        for [rows, width] in [[16, 16], [32, 48], [144, 80]] {
            let mut graph = Graph::new();
            let x = graph.source("x", [2, rows / 2, width], DType::BF16, TensorClass::Activation);
            let mut apply = |form| graph.apply("codes", Op::ToFp8 { x, form }).expect("it fits");
            let both = apply(Fp8Form::Both);
            let [only_rows, only_columns] = [Fp8Form::Rows, Fp8Form::Columns].map(apply);
            let mut values = draw(&mut rng, &[2, rows / 2, width], size);
            values.data[5] = f64::from(bf16::from_f64(3.0 * size));
            let (codes, _, scale) = coded(&values);
            let mut machine = Machine::new(&graph, &BTreeMap::from([(x, values)]));
            machine.run();
            let in_rows = with_scale(codes.iter().copied(), width, scale);
            let columns = (0..width).flat_map(|c| codes.iter().skip(c).step_by(width).copied());
            let in_columns = with_scale(columns, rows, scale);
            for id in [both[0], only_rows[0]] {
                assert_eq!(machine.bytes(id), in_rows, "{size} {rows} {width}");
            }
            for id in [both[1], only_columns[0]] {
                assert_eq!(machine.bytes(id), in_columns, "{size} {rows} {width}");
            }
        }
    }
}

/// A projection, with the gradients that differentiation makes of it.
struct Projection {
    graph: Graph,
    x: TensorId,
    weight: TensorId,
    bias: TensorId,
    addend: TensorId,
    accumulator: TensorId,
    y: TensorId,
    dy: TensorId,
    gradients: BTreeMap<TensorId, TensorId>,
}

impl Projection {
    fn new([rows, inputs, outputs]: [usize; 3], gradient: DType) -> Projection {
        let mut graph = Graph::new();
        let output = Shape::from([rows, outputs]);
        let float = DType::BF16;
        let x = graph.source("x", [rows, inputs], float, TensorClass::Activation);
        let addend = graph.source("addend", output.clone(), float, TensorClass::Activation);
        let dy = graph.source("dy", output.clone(), float, TensorClass::Activation);
        let weight = graph.parameter("weight", [outputs, inputs], float, Training::Trainable);
        let bias = graph.parameter("bias", [outputs], float, Training::Frozen);
        let accumulator =
            graph.source("accumulator", [outputs, inputs], gradient, TensorClass::Gradient);
        let mut codes = |x, form| graph.apply("codes", Op::ToFp8 { x, form }).expect("it fits")[0];
        let (in_rows, of_weight) = (codes(x, Fp8Form::Both), codes(weight, Fp8Form::Rows));
        let op = Op::Fp8Linear {
            x: in_rows,
            weight: of_weight,
            bias: Some(bias),
            addend: Some(addend),
            output,
        };
        let y = graph.apply("y", op).expect("it fits")[0];
        let request = GradientRequest {
            seeds: vec![(y, dy)],
            wanted: vec![x],
            accumulators: BTreeMap::from([(weight, accumulator)]),
            gradient_dtype: gradient,
        };
        let gradients = differentiate(&mut graph, &request).expect("it has gradients");
        Projection { graph, x, weight, bias, addend, accumulator, y, dy, gradients }
    }
}

/// The product and both gradients are products of what the codes stand for.
#[test]
fn products_are_those_of_the_definition() {
    let mut rng = Rng::new(2);
    for gradient in [DType::BF16, DType::F32] {
        for sizes @ [rows, inputs, outputs] in [[16, 32, 48], [64, 16, 80], [144, 48, 32]] {
            let p = Projection::new(sizes, gradient);
            let drawn: BTreeMap<TensorId, Value> = [
                (p.x, draw(&mut rng, &[rows, inputs], 20.0)),
                (p.weight, draw(&mut rng, &[outputs, inputs], 0.05)),
                (p.bias, draw(&mut rng, &[outputs], 1.0)),
                (p.addend, draw(&mut rng, &[rows, outputs], 3.0)),
                (p.dy, draw(&mut rng, &[rows, outputs], 1e-5)),
                (p.accumulator, draw(&mut rng, &[outputs, inputs], 1e-3)),
            ]
            .into();
            let mut machine = Machine::new(&p.graph, &drawn);
            machine.run();
            let stands_for = |id| coded(&drawn[&id]).1;
            let (x, weight, dy) = (stands_for(p.x), stands_for(p.weight), stands_for(p.dy));
            let mut y = product(&x, &weight, inputs);
            for (index, y) in y.iter_mut().enumerate() {
                *y += drawn[&p.bias].data[index % outputs] + drawn[&p.addend].data[index];
            }
            assert_close("y", &machine.get(p.y), &y, DType::BF16);
            let dx = product(&dy, &turned(&weight, inputs), outputs);
            assert_close("dx", &machine.get(p.gradients[&p.x]), &dx, DType::BF16);
            let mut d_weight = product(&turned(&dy, outputs), &turned(&x, inputs), rows);
            for (sum, start) in d_weight.iter_mut().zip(&drawn[&p.accumulator].data) {
                *sum += start;
            }
            assert_close("dw", &machine.get(p.gradients[&p.weight]), &d_weight, gradient);
        }
    }
}

/// A value that is not finite makes everything NaN that depends on its tensor, so that a step is cancelled.
#[test]
fn what_is_not_finite_shows() {
    let mut rng = Rng::new(3);
    let sizes = [16, 32, 48];
    for broken in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        for place in 0..3 {
            let p = Projection::new(sizes, DType::F32);
            let mut drawn: BTreeMap<TensorId, Value> = [
                (p.x, draw(&mut rng, &[16, 32], 1.0)),
                (p.weight, draw(&mut rng, &[48, 32], 1.0)),
                (p.bias, draw(&mut rng, &[48], 1.0)),
                (p.addend, draw(&mut rng, &[16, 48], 1.0)),
                (p.dy, draw(&mut rng, &[16, 48], 1.0)),
                (p.accumulator, draw(&mut rng, &[48, 32], 1.0)),
            ]
            .into();
            let id = [p.x, p.weight, p.dy][place];
            drawn.get_mut(&id).expect("drawn").data[7] = broken;
            let mut machine = Machine::new(&p.graph, &drawn);
            machine.run();
            let is_nan = |id| machine.get(id).data.iter().all(|x| x.is_nan());
            let found = [p.y, p.gradients[&p.x], p.gradients[&p.weight]].map(is_nan);
            let expected = [[true, false, true], [true, true, false], [false, true, true]];
            assert_eq!(found, expected[place], "{broken}");
        }
    }
}
