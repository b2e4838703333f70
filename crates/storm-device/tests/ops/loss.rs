//! The head's loss and its gradients.

use crate::reference::evaluate_graph;
use crate::support::*;
use storm_graph::{Accuracy, DType, IGNORE_INDEX, Op};

#[test]
fn head_loss() {
    check("HeadLoss", 120, |b| random_loss(b, 1.0, 0.0));
}

#[test]
fn head_loss_with_label_smoothing() {
    check("HeadLoss with label smoothing", 40, |b| {
        let label_smoothing = b.rng.pick(&[0.1, 0.5]);
        random_loss(b, 1.0, label_smoothing);
    });
}

/// Logits in the hundreds: exponentials must not overflow.
#[test]
fn head_loss_of_large_logits() {
    check("HeadLoss of large logits", 10, |b| {
        b.loosen(100.0);
        random_loss(b, 30.0, 0.0);
    });
}

/// The gradient's kernel yields the loss of the forward kernel.
#[test]
fn loss_of_the_gradient_is_that_of_the_forward_op() {
    for seed in 0..30 {
        for dtype in [DType::F32, DType::BF16] {
            let smoothing = if seed % 2 == 0 { 0.0 } else { 0.1 };
            let case =
                Case::build(seed, dtype, Precision::Rounded, |b| random_loss(b, 1.0, smoothing));
            let row_loss = case.graph.nodes()[0].outputs[0];
            let forward = case.run().bytes(row_loss);
            let backward = case.differentiate(&Start::Fresh, DType::F32);
            let [node] = &backward.graph.nodes() else { panic!("only HeadLossGrad is left") };
            assert!(matches!(node.op, Op::HeadLossGrad { .. }));
            let mut machine = Machine::new(&backward.graph, &backward.values);
            machine.run();
            assert_eq!(machine.bytes(node.outputs[0]), forward, "seed {seed}, {dtype}");
            let want = &evaluate_graph(&case.graph, &case.values)[&row_loss];
            let context = format!("seed {seed}, {dtype}");
            let got = machine.get(node.outputs[0]);
            assert_close(&context, &got, want, BF16_TOLERANCE, 0.1);
        }
    }
}

/// No rows at all: the weight's gradient is zero, not whatever memory held.
#[test]
fn head_loss_of_nothing() {
    check("HeadLoss of no rows", 1, |b| {
        let hidden = b.input("hidden", &[0, 8]);
        let weight = b.parameter("weight", &[5, 8]);
        let denominator = b.constant("denominator", &[], vec![4.0]);
        let targets = b.integers("targets", &[0], |_, _| 0);
        let op = Op::HeadLoss {
            hidden,
            weight,
            targets,
            denominator,
            chunk_rows: 2,
            label_smoothing: 0.0,
            accuracy: Accuracy::Skip,
        };
        b.result("loss", op);
    });
}

/// Two losses of one head: both share their logits with their gradients.
#[test]
fn two_head_losses() {
    check("two losses", 3, |b| {
        let hidden = b.input("hidden", &[4, 8]);
        let weight = b.parameter("weight", &[5, 8]);
        let denominator = b.constant("denominator", &[], vec![4.0]);
        for name in ["first", "second"] {
            let targets = b.integers(name, &[4], |rng, _| rng.below(5) as i32);
            let op = Op::HeadLoss {
                hidden,
                weight,
                targets,
                denominator,
                chunk_rows: 2,
                label_smoothing: 0.0,
                accuracy: Accuracy::Skip,
            };
            b.result(&format!("{name} loss"), op);
        }
    });
}

fn random_loss(b: &mut Builder, scale: f64, label_smoothing: f32) {
    let (vocabulary, width) = loop {
        let extents = (b.rng.extent(600), b.rng.extent(65));
        if extents.0 * extents.1 <= 4_000 {
            break extents;
        }
    };
    let shape = b.rng.row_shape(33, width);
    let hidden = b.scaled_input("hidden", &shape, scale);
    let weight = match b.rng.below(5) {
        0 => b.input("weight", &[vocabulary, width]),
        1 => b.trained("weight", &[vocabulary, width], storm_graph::Training::Frozen),
        _ => b.parameter("weight", &[vocabulary, width]),
    };
    let ignored = b.rng.pick(&[0, 3, 10]);
    let targets = b.integers("targets", &shape[..shape.len() - 1], |rng, _| {
        if rng.below(10) < ignored { IGNORE_INDEX } else { rng.below(vocabulary) as i32 }
    });
    let count = b.rng.pick(&[1.0, 3.0, 20.0]);
    let denominator = b.constant("denominator", &[], vec![count]);
    let chunk_rows = b.rng.pick(&[1, 2, 7, 16, 1000]);
    // A logit of 10 in bf16 is off by up to 0.03.
    b.loosen(4.0);
    b.result(
        "loss",
        Op::HeadLoss {
            hidden,
            weight,
            targets,
            denominator,
            chunk_rows,
            label_smoothing,
            accuracy: Accuracy::Skip,
        },
    );
}

/// Small whole numbers, which bf16 sums exactly, so that many logits are equal: the first of the largest counts. Both ops say
/// so, and what they say moves behind the gradient with the loss.
#[test]
fn rows_are_right_where_the_first_of_the_largest_logits_is_the_target() {
    let mut right = 0.0;
    for seed in 0..20 {
        for dtype in [DType::F32, DType::BF16] {
            let case = Case::build(seed, dtype, Precision::Rounded, |b| {
                let (classes, width) = (b.rng.pick(&[2, 3, 10, 33]), 9);
                let hidden = b.input("hidden", &[33, width]);
                let weight = b.parameter("weight", &[classes, width]);
                let targets = b.integers("targets", &[33], |rng, _| match rng.below(8) {
                    0 => IGNORE_INDEX,
                    _ => rng.below(classes) as i32,
                });
                let denominator = b.constant("denominator", &[], vec![4.0]);
                b.loosen(4.0);
                let op = Op::HeadLoss {
                    hidden,
                    weight,
                    targets,
                    denominator,
                    chunk_rows: 7,
                    label_smoothing: 0.1,
                    accuracy: Accuracy::Compute,
                };
                b.result("loss", op);
            });
            let mut case = case;
            for (&id, value) in case.values.iter_mut() {
                if ["hidden", "weight"].contains(&case.graph.tensor(id).name.as_str()) {
                    value.data.iter_mut().for_each(|x| *x = x.round().clamp(-1.0, 1.0));
                }
            }
            let correct = case.graph.nodes()[0].outputs[1];
            let want = evaluate_graph(&case.graph, &case.values)[&correct].clone();
            assert_eq!(case.run().get(correct), want, "seed {seed}, {dtype}");
            right += want.data.iter().sum::<f64>();
            let backward = case.differentiate(&Start::Fresh, DType::F32);
            let [node] = &backward.graph.nodes() else { panic!("only HeadLossGrad is left") };
            assert_eq!(node.outputs.last(), Some(&correct));
            let mut machine = Machine::new(&backward.graph, &backward.values);
            machine.run();
            assert_eq!(machine.get(correct), want, "seed {seed}, {dtype}");
        }
    }
    assert!(right > 100.0, "only {right} rows are right");
}
