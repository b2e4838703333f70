//! Ops on single elements, and on pairs of gate and up.

use super::Value;
use storm_graph::random::{self, Purpose, Seed, Stream};
use storm_graph::{ActivationFunction, Op};

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    let value = match *op {
        Op::Add { a, b } => a.zip(b, |a, b| a + b),
        Op::Accumulate { sum, x } => sum.zip(x, |sum, x| sum + x),
        Op::MovingAverage { average, x, momentum } => {
            average.zip(x, |average, x| average + f64::from(momentum) * (x - average))
        }
        Op::Mul { a, b } => a.zip(b, |a, b| a * b),
        Op::Scale { x, factor } => x.map(|x| f64::from(factor) * x),
        Op::Dropout { x, random, addend, rate, stream } => {
            let words: Vec<i32> = random.data.iter().map(|&word| word as i32).collect();
            let dropped = dropped(&words, x.data.len(), rate, stream);
            let factor =
                |is_dropped: bool| if is_dropped { 0.0 } else { 1.0 / (1.0 - f64::from(rate)) };
            let mut data: Vec<f64> = match words[4] {
                0 => x.data.clone(),
                _ => x.data.iter().zip(dropped).map(|(x, dropped)| x * factor(dropped)).collect(),
            };
            for (x, addend) in data.iter_mut().zip(addend.iter().flat_map(|value| &value.data)) {
                *x += addend;
            }
            Value::new(x.shape.clone(), data)
        }
        Op::Tanh { x } => x.map(f64::tanh),
        Op::Activation { x, function } => x.map(active(function)),
        Op::SwiGlu { gate_up, function } => {
            let active = active(function);
            let half = gate_up.shape.width() / 2;
            let mut data = Vec::new();
            for row in gate_up.rows() {
                let (gate, up) = row.split_at(half);
                data.extend(gate.iter().zip(up).map(|(&gate, &up)| active(gate) * up));
            }
            Value::new(gate_up.shape.with_width(half), data)
        }
        _ => unreachable!("not an elementwise op"),
    };
    vec![value]
}

/// Which elements of a micro-batch are dropped, in block 0.
fn dropped(words: &[i32], elements: usize, rate: f32, stream: u16) -> Vec<bool> {
    let seed = Seed::from_words([words[0], words[1], words[2]]);
    let stream = Stream { tensor: stream, layer: 0 };
    (0..elements as u64)
        .map(|at| {
            let element = words[3] as u32 as u64 * elements as u64 + at;
            let block = random::words(seed, Purpose::Dropout, stream, element / 4);
            f64::from(block[element as usize % 4]) < (f64::from(rate) * 4_294_967_296.0).floor()
        })
        .collect()
}

fn active(function: ActivationFunction) -> fn(f64) -> f64 {
    match function {
        ActivationFunction::Gelu => exact_gelu,
        ActivationFunction::GeluTanh => gelu,
        ActivationFunction::Relu => |x: f64| x.max(0.0),
        ActivationFunction::Silu => silu,
    }
}

pub(crate) fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    x / 2.0 * (1.0 + inner.tanh())
}

/// By the series of the error function whose terms are all positive.
fn exact_gelu(x: f64) -> f64 {
    let z = x / std::f64::consts::SQRT_2;
    if z.abs() > 6.0 {
        return x.max(0.0);
    }
    let (mut term, mut sum, mut n) = (z, z, 0.0);
    while term.abs() > 1e-18 * sum.abs() {
        n += 1.0;
        term *= 2.0 * z * z / (2.0 * n + 1.0);
        sum += term;
    }
    let erf = std::f64::consts::FRAC_2_SQRT_PI * (-z * z).exp() * sum;
    x / 2.0 * (1.0 + erf)
}

pub(crate) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}
