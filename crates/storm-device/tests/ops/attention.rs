//! Rotary embeddings, attention and their gradients.

use crate::reference::{Value, evaluate};
use crate::support::*;
use storm_graph::{DType, Graph, HeadLayout, Mask, Op, RotaryDirection, RotaryFrequencies, Shape};

#[test]
fn rotary() {
    check("rotary", 60, |b| {
        let heads = random_heads(b, &[2, 3, 4, 6, 10, 16, 34, 64]);
        let (batch, time) = (b.rng.extent(3), b.rng.extent(65));
        let qkv = b.input("qkv", &[batch, time, heads.qkv_width()]);
        let positions = b.integers("positions", &[batch, time], |rng, _| rng.below(50) as i32);
        let theta = b.rng.pick(&[10.0, 10_000.0, 500_000.0]);
        // Whole heads, or a part of each.
        let turned = b.rng.pick(&[heads.head_dim, heads.head_dim, 2 * heads.head_dim.div_ceil(4)]);
        let factor = b.rng.pick(&[1.0, 1.0, 1.21]);
        let frequencies = RotaryFrequencies { factor, ..RotaryFrequencies::plain(theta, turned) };
        let table = b.apply("table", Op::RotaryTable { positions, frequencies })[0];
        let direction = b.rng.pick(&[RotaryDirection::Forward, RotaryDirection::Inverse]);
        b.loosen(2.0);
        b.result("y", Op::Rotary { qkv, table, heads, direction });
    });
}

/// Angles of late positions are only as good as f32 holds them.
#[test]
fn rotary_table_of_long_contexts() {
    for factor in [1.0, 1.3] {
        let mut graph = Graph::new();
        let late = [0.0, 1.0, 4_095.0, 8_191.0, 100_003.0, 131_071.0];
        let positions = graph.input("positions", [1, late.len()], DType::I32);
        let frequencies = RotaryFrequencies { factor, ..RotaryFrequencies::plain(500_000.0, 128) };
        let op = Op::RotaryTable { positions, frequencies };
        let table = graph.apply_one("table", op.clone()).expect("fits");
        let value = Value::new(Shape::from([1, late.len()]), late.to_vec());
        let want = &evaluate(&op.map(|_, _| &value))[0];
        let mut machine = Machine::new(&graph, &[(positions, value.clone())].into());
        machine.run();
        let rows = machine.get(table).data;
        for (i, (got, want)) in rows.iter().zip(&want.data).enumerate() {
            let position = late[i / 128];
            let allowed = 1e-6 + 2.0 * position * f64::from(f32::EPSILON);
            assert!((got - want).abs() <= allowed, "{factor} {i}: {got}, not {want}");
        }
    }
}

#[test]
fn attention() {
    check("attention", 100, |b| {
        let heads = random_heads(b, &[1, 2, 3, 8, 16, 33, 64]);
        let (batch, time) = loop {
            let (batch, time) = (b.rng.extent(3), b.rng.extent(129));
            if batch * time * time * heads.query_width() <= 150_000 {
                break (batch, time);
            }
        };
        let qkv = b.input("qkv", &[batch, time, heads.qkv_width()]);
        let segments = random_segments(b, batch, time);
        let mask = random_mask(b);
        let scale = (heads.head_dim as f32).powf(-0.5);
        b.loosen(4.0);
        b.result("y", Op::Attention { qkv, segments, heads, mask, scale });
    });
}

/// Blocks of queries and keys that see each other in full, in part, and not at all.
#[test]
fn attention_over_several_blocks() {
    check("attention over several blocks", 8, |b| {
        let heads = HeadLayout {
            query_heads: b.rng.pick(&[1, 2]),
            key_value_heads: 1,
            head_dim: b.rng.pick(&[4, 13]),
        };
        let time = b.rng.pick(&[127, 128, 129, 193, 257]);
        let qkv = b.input("qkv", &[1, time, heads.qkv_width()]);
        let segments = random_segments(b, 1, time);
        let mask = random_mask(b);
        b.loosen(4.0);
        b.result("y", Op::Attention { qkv, segments, heads, mask, scale: 0.4 });
    });
}

/// Logits in the hundreds: exponentials must not overflow, and one key takes all.
#[test]
fn attention_of_large_logits() {
    check("attention of large logits", 10, |b| {
        let heads = random_heads(b, &[2, 8]);
        let (batch, time) = (b.rng.extent(2), b.rng.extent(33));
        let qkv = b.scaled_input("qkv", &[batch, time, heads.qkv_width()], 8.0);
        b.loosen(200.0);
        let mask = random_mask(b);
        b.result("y", Op::Attention { qkv, segments: None, heads, mask, scale: 1.0 });
    });
}

fn random_mask(b: &mut Builder) -> Mask {
    // Within a block, across one, of whole blocks, and longer than any sequence here.
    let window = b.rng.pick(&[1, 2, 7, 63, 64, 65, 100, 128, 1000]);
    b.rng.pick(&[Mask::Causal, Mask::Full, Mask::Sliding { window }, Mask::Sliding { window }])
}

fn random_heads(b: &mut Builder, dims: &[usize]) -> HeadLayout {
    let key_value_heads = b.rng.pick(&[1, 1, 2, 3]);
    let query_heads = key_value_heads * b.rng.pick(&[1, 1, 2, 4]);
    HeadLayout { query_heads, key_value_heads, head_dim: b.rng.pick(dims) }
}

/// None, packed samples of random lengths, or ids in no order at all.
fn random_segments(b: &mut Builder, batch: usize, time: usize) -> Option<storm_graph::TensorId> {
    match b.rng.below(4) {
        0 | 1 => None,
        2 => {
            let mut segment = -1;
            Some(b.integers("segments", &[batch, time], |rng, i| {
                if i % time == 0 || rng.below(6) == 0 {
                    segment += 1;
                }
                segment
            }))
        }
        _ => Some(b.integers("segments", &[batch, time], |rng, _| rng.below(3) as i32 - 1)),
    }
}
