//! Numbers known from elsewhere, so that the reference itself is not taken on trust.

use crate::reference::{Value, evaluate};
use storm_graph::{
    ActivationFunction, DType, HeadLayout, Mask, NormKind, Op, RotaryDirection, RotaryFrequencies,
    Shape, Window,
};

fn value<const N: usize>(shape: [usize; N], data: &[f64]) -> Value {
    Value::new(Shape::from(shape), data.to_vec())
}

fn check(op: Op<&Value>, expected: &[&[f64]]) {
    let made = evaluate(&op);
    assert_eq!(made.len(), expected.len(), "{op:?}");
    for (made, expected) in made.iter().zip(expected) {
        assert_eq!(made.data.len(), expected.len(), "{op:?}");
        for (made, expected) in made.data.iter().zip(*expected) {
            assert!((made - expected).abs() < 1e-6, "{op:?}: {made}, not {expected}");
        }
    }
}

#[test]
fn activations() {
    let x = value([3], &[-1.0, 0.5, 2.0]);
    let gelu = Op::Activation { x: &x, function: ActivationFunction::GeluTanh };
    check(gelu, &[&[-0.158_808_01, 0.345_714_01, 1.954_597_69]]);
    let gelu = Op::Activation { x: &x, function: ActivationFunction::Gelu };
    check(gelu, &[&[-0.158_655_25, 0.345_731_23, 1.954_499_74]]);
    let relu = Op::Activation { x: &x, function: ActivationFunction::Relu };
    check(relu, &[&[0.0, 0.5, 2.0]]);
    let silu = Op::Activation { x: &x, function: ActivationFunction::Silu };
    check(silu, &[&[-0.268_941_42, 0.311_229_66, 1.761_594_16]]);
    let gate_up = value([1, 4], &[2.0, -1.0, 3.0, 10.0]);
    let gated = |function| Op::SwiGlu { gate_up: &gate_up, function };
    check(gated(ActivationFunction::Silu), &[&[5.284_782_48, -2.689_414_21]]);
    check(gated(ActivationFunction::Gelu), &[&[5.863_499_21, -1.586_552_54]]);
    check(gated(ActivationFunction::GeluTanh), &[&[5.863_793_082, -1.588_080_094]]);
    check(gated(ActivationFunction::Relu), &[&[6.0, 0.0]]);
}

#[test]
fn projections() {
    let x = value([2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let weight = value([3, 2], &[1.0, 0.0, 0.0, 1.0, 1.0, -1.0]);
    let bias = value([3], &[10.0, 20.0, 30.0]);
    let addend = value([2, 3], &[0.0, 0.0, 0.5, 0.0, 0.0, 0.0]);
    check(
        Op::Linear { x: &x, weight: &weight, bias: Some(&bias), addend: Some(&addend) },
        &[&[11.0, 22.0, 29.5, 13.0, 24.0, 29.0]],
    );
    let ids = value([3], &[1.0, 0.0, 1.0]);
    check(Op::Embedding { ids: &ids, table: &x }, &[&[3.0, 4.0, 1.0, 2.0, 3.0, 4.0]]);
    let axes = vec![1, 0];
    check(Op::Transpose { x: &addend, axes }, &[&[0.0, 0.0, 0.0, 0.0, 0.5, 0.0]]);
    check(Op::ColumnSum { x: &x, accumulator: None, dtype: DType::F32 }, &[&[4.0, 6.0]]);
}

#[test]
fn norms() {
    let x = value([1, 4], &[1.0, 2.0, 3.0, 6.0]);
    let delta = value([1, 4], &[0.0, 0.0, 0.0, -2.0]);
    let weight = value([4], &[1.0, 1.0, 1.0, 2.0]);
    let bias = value([4], &[0.0, 0.0, 1.0, 0.0]);
    let layer = Op::Norm {
        x: &x,
        delta: Some(&delta),
        weight: &weight,
        bias: Some(&bias),
        kind: NormKind::Layer,
        epsilon: 0.0,
    };
    // 1, 2, 3, 4 has mean 2.5 and variance 1.25.
    let rstd = 0.894_427_19;
    let y = [-1.5 * rstd, -0.5 * rstd, 0.5 * rstd + 1.0, 3.0 * rstd];
    check(layer, &[&y, &[rstd], &[2.5], &[1.0, 2.0, 3.0, 4.0]]);

    let qkv = value([1, 1, 6], &[3.0, 4.0, 6.0, 8.0, 5.0, 5.0]);
    let (query, key) = (value([2], &[1.0, 2.0]), value([2], &[10.0, 1.0]));
    let heads = HeadLayout { query_heads: 1, key_value_heads: 1, head_dim: 2 };
    let root = 12.5f64.sqrt();
    check(
        Op::QkNorm {
            qkv: &qkv,
            query_weight: &query,
            key_weight: &key,
            table: None,
            heads,
            epsilon: 0.0,
        },
        &[&[3.0 / root, 8.0 / root, 30.0 / root, 4.0 / root, 5.0, 5.0], &[1.0 / root, 0.5 / root]],
    );
    let quarter = value([1, 1, 1, 2], &[0.0, 1.0]);
    check(
        Op::QkNorm {
            qkv: &qkv,
            query_weight: &query,
            key_weight: &key,
            table: Some(&quarter),
            heads,
            epsilon: 0.0,
        },
        &[
            &[-8.0 / root, 3.0 / root, -4.0 / root, 30.0 / root, 5.0, 5.0],
            &[1.0 / root, 0.5 / root],
        ],
    );
}

#[test]
fn rotation_by_a_quarter_turn() {
    let quarter = value([1, 1, 1, 2], &[0.0, 1.0]);
    let heads = HeadLayout { query_heads: 1, key_value_heads: 1, head_dim: 2 };
    let qkv = value([1, 1, 6], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let direction = RotaryDirection::Forward;
    let turned = Op::Rotary { qkv: &qkv, table: &quarter, heads, direction };
    check(turned, &[&[-2.0, 1.0, -4.0, 3.0, 5.0, 6.0]]);

    let positions = value([1, 2], &[0.0, 3.0]);
    let frequencies = RotaryFrequencies::plain(10_000.0, 4);
    let (slow, fast) = (0.03f64, 3.0f64);
    let table = [1.0, 0.0, 1.0, 0.0, fast.cos(), fast.sin(), slow.cos(), slow.sin()];
    check(Op::RotaryTable { positions: &positions, frequencies: frequencies.clone() }, &[&table]);
    let doubled = RotaryFrequencies { factor: 2.0, ..frequencies };
    check(
        Op::RotaryTable { positions: &positions, frequencies: doubled },
        &[&table.map(|x| 2.0 * x)],
    );
    // A part of each head: its first two elements turn, and the third stays.
    let heads = HeadLayout { head_dim: 3, ..heads };
    let qkv = value([1, 1, 9], &[1.0, 2.0, 7.0, 3.0, 4.0, 8.0, 5.0, 6.0, 9.0]);
    let turned = Op::Rotary { qkv: &qkv, table: &quarter, heads, direction };
    check(turned, &[&[-2.0, 1.0, 7.0, -4.0, 3.0, 8.0, 5.0, 6.0, 9.0]]);
}

#[test]
fn attention_averages_what_it_sees() {
    let heads = HeadLayout { query_heads: 1, key_value_heads: 1, head_dim: 1 };
    // Queries of 0 see all keys alike: values are averaged.
    let qkv = value([1, 3, 3], &[0.0, 7.0, 1.0, 0.0, 8.0, 3.0, 0.0, 9.0, 8.0]);
    let segments = value([1, 3], &[4.0, 4.0, 5.0]);
    let op = |mask, segments| Op::Attention { qkv: &qkv, segments, heads, mask, scale: 1.0 };
    let (two, three) = (2f64.ln(), 3f64.ln());
    check(op(Mask::Full, None), &[&[4.0, 4.0, 4.0], &[three, three, three]]);
    check(op(Mask::Causal, None), &[&[1.0, 2.0, 4.0], &[0.0, two, three]]);
    check(op(Mask::Full, Some(&segments)), &[&[2.0, 2.0, 8.0], &[two, two, 0.0]]);
    check(op(Mask::Causal, Some(&segments)), &[&[1.0, 2.0, 8.0], &[0.0, two, 0.0]]);
    let sliding = |window| Mask::Sliding { window };
    check(op(sliding(2), None), &[&[1.0, 2.0, 5.5], &[0.0, two, two]]);
    check(op(sliding(1), None), &[&[1.0, 3.0, 8.0], &[0.0, 0.0, 0.0]]);
    check(op(sliding(3), None), &[&[1.0, 2.0, 4.0], &[0.0, two, three]]);
}

#[test]
fn windows_over_a_small_plane() {
    // 1 2 3
    // 4 5 6
    let x = value([1, 2, 3, 1], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    // Left minus right neighbour, and the one above.
    let weight = value(
        [2, 9],
        &[
            0.0, 0.0, 0.0, 1.0, 0.0, -1.0, 0.0, 0.0, 0.0, //
            0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
        ],
    );
    let bias = value([2], &[0.0, 10.0]);
    let window = Window::square(3, 1, 1);
    check(
        Op::Conv2d { x: &x, weight: &weight, bias: Some(&bias), window },
        &[&[-2.0, 10.0, -2.0, 10.0, 2.0, 10.0, -5.0, 11.0, -2.0, 12.0, 5.0, 13.0]],
    );
    let window = Window { kernel: [2, 2], stride: [1, 2], padding: [0, 1] };
    check(Op::MaxPool { x: &x, window }, &[&[4.0, 6.0]]);
    check(Op::AveragePool { x: &x, window }, &[&[1.25, 4.0]]);
    check(Op::AveragePool { x: &x, window: Window::whole(2, 3) }, &[&[3.5]]);
}

#[test]
fn loss_of_even_odds_is_the_log_of_their_number() {
    let hidden = value([2, 1], &[0.0, 1.0]);
    let weight = value([4, 1], &[1.0, 2.0, 3.0, 4.0]);
    let targets = value([2], &[2.0, -100.0]);
    let denominator = Value::scalar(2.0);
    let op = Op::HeadLoss {
        hidden: &hidden,
        weight: &weight,
        targets: &targets,
        denominator: &denominator,
        chunk_rows: 1,
        label_smoothing: 0.0,
        accuracy: storm_graph::Accuracy::Skip,
    };
    check(op, &[&[4f64.ln() / 2.0, 0.0]]);
}

#[test]
fn gates_and_distributions() {
    let (gate, hidden) = (value([2], &[0.0, 2.0]), value([2], &[3.0, -1.0]));
    let candidate = value([2], &[0.5, 0.5]);
    check(Op::GruReset { gate: &gate, hidden: &hidden }, &[&[1.5, -0.880_797_08]]);
    let state = Op::GruState { gate: &gate, candidate: &candidate, hidden: &hidden };
    check(state, &[&[1.731_058_58, -0.825_711_36]]);
    let logits = value([1, 4], &[0.0, 0.0, 0.0, std::f64::consts::LN_2 * 2.0]);
    let of = |classes, uniform| Op::Categorical { logits: &logits, classes, uniform };
    check(of(2, 0.0), &[&[0.5, 0.5, 0.2, 0.8]]);
    check(of(4, 0.5), &[&[0.196_428_57, 0.196_428_57, 0.196_428_57, 0.410_714_29]]);
    let (q, p) = (value([1, 2], &[0.5, 0.5]), value([1, 2], &[0.25, 0.75]));
    let balance = storm_graph::KlBalance { posterior: 0.2, prior: 0.8 };
    let of = |free| Op::Divergence { posterior: &q, prior: &p, free, balance };
    check(of(0.0), &[&[0.143_841_04]]);
    check(of(0.5), &[&[0.5]]);
}

#[test]
fn losses_of_rows() {
    let (x, target) = (value([2, 2], &[1.0, 2.0, 0.0, 0.0]), value([2, 2], &[0.0, 4.0, 0.0, 0.0]));
    check(Op::SquaredError { x: &x, target: &target }, &[&[2.5, 0.0]]);
    let heads = value([2, 3], &[1.0, 0.0, 0.0, 0.0, 2.0, 3.0]);
    let (change, accepted) = (value([2], &[3.0, 1.0]), value([2], &[1.0, 0.0]));
    let outcome = Op::OutcomeLoss { heads: &heads, change: &change, accepted: &accepted };
    // ½ · 4 + ln 2, and ½ (2 + e⁻²) + ln(1 + e³).
    check(outcome, &[&[2.693_147_18, 4.116_254_99]]);
}
