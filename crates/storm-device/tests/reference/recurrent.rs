//! The gates of a GRU.

use super::Value;
use storm_graph::Op;

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    let value = match *op {
        Op::GruReset { gate, hidden } => gate.zip(hidden, |gate, hidden| sigmoid(gate) * hidden),
        Op::GruState { gate, candidate, hidden } => {
            let kept = gate.zip(hidden, |gate, hidden| sigmoid(gate) * hidden);
            let new = gate.zip(candidate, |gate, new| (1.0 - sigmoid(gate)) * new.tanh());
            kept.zip(&new, |kept, new| kept + new)
        }
        _ => unreachable!("not a recurrent op"),
    };
    vec![value]
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
