//! Norms over rows and over heads, and their gradients.

use crate::support::*;
use storm_graph::{HeadLayout, NormKind, Op, RotaryFrequencies, Training};

#[test]
fn norms() {
    check("norm", 150, |b| {
        let width = b.rng.extent(600);
        let shape = b.rng.row_shape(if width > 100 { 33 } else { 257 }, width);
        let kind = b.norm_kind();
        let x = b.input("x", &shape);
        let delta = b.maybe(|b| b.input("delta", &shape));
        let weight = trained_at_times(b, "weight", width);
        let bias = match kind {
            NormKind::Layer => b.maybe(|b| trained_at_times(b, "bias", width)),
            NormKind::Rms => None,
        };
        let epsilon = b.rng.pick(&[1e-5, 1e-2]);
        // One or two numbers less their mean are 0 or ±1 whatever they are: the gradient is what
        // is left of terms that cancel.
        b.loosen(if width <= 3 { 50.0 } else { 4.0 });
        b.result("y", Op::Norm { x, delta, weight, bias, kind, epsilon });
        if b.rng.coin() {
            // Something else that flows into `x`.
            b.result("x.other", Op::Scale { x, factor: 0.5 });
        }
    });
}

#[test]
fn shared_weight_and_residual_stream() {
    check("shared norm weight", 20, |b| {
        let width = b.rng.pick(&[5, 17, 33]);
        let shape = b.rng.row_shape(17, width);
        let kind = b.norm_kind();
        let weight = b.parameter("weight", &[width]);
        let epsilon = 1e-5;
        let x = b.input("x", &shape);
        let norm = |x, delta| Op::Norm { x, delta, weight, bias: None, kind, epsilon };
        let y = b.apply("first", norm(x, None))[0];
        let outputs = b.apply("second", norm(x, Some(y)));
        let sum = outputs[outputs.len() - 1];
        b.seed(outputs[0]);
        b.loosen(10.0);
        b.result("third", norm(sum, Some(outputs[0])));
    });
}

#[test]
fn head_norms() {
    check("QkNorm", 80, |b| {
        let key_value_heads = b.rng.pick(&[1, 2, 3]);
        let query_heads = key_value_heads * b.rng.pick(&[1, 2, 4]);
        let head_dim = b.rng.pick(&[2, 3, 5, 8, 16, 33, 64]);
        let heads = HeadLayout { query_heads, key_value_heads, head_dim };
        let (batch, time) = (b.rng.extent(3), b.rng.extent(65));
        let qkv = b.input("qkv", &[batch, time, heads.qkv_width()]);
        let query_weight = trained_at_times(b, "query_weight", head_dim);
        let key_weight = trained_at_times(b, "key_weight", head_dim);
        b.loosen(if head_dim <= 3 { 20.0 } else { 4.0 });
        let epsilon = b.rng.pick(&[1e-6, 1e-2]);
        // All of each head is rotated, or a part of it, or nothing.
        let table = b.maybe(|b| {
            let positions = b.integers("positions", &[batch, time], |_, i| (i % time) as i32);
            let turned = b.rng.pick(&[2, head_dim / 4 * 2, head_dim / 2 * 2]).max(2);
            let frequencies = RotaryFrequencies::plain(100.0, turned);
            b.apply("table", Op::RotaryTable { positions, frequencies })[0]
        });
        b.result("y", Op::QkNorm { qkv, query_weight, key_weight, table, heads, epsilon });
    });
}

/// Now and then frozen.
fn trained_at_times(b: &mut Builder, name: &str, width: usize) -> storm_graph::TensorId {
    let training = b.rng.pick(&[Training::Trainable, Training::Trainable, Training::Frozen]);
    b.trained(name, &[width], training)
}
