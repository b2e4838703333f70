//! Embedding, Linear and their gradients.

use crate::reference::{Value, evaluate};
use crate::support::*;
use storm_graph::{DType, Op, Shape};

#[test]
fn linear() {
    check("linear", 150, |b| {
        let (rows, width_in, width_out) = loop {
            let extents = (b.rng.extent(257), b.rng.extent(600), b.rng.extent(600));
            if extents.0 * extents.1 * extents.2 <= 40_000 {
                break extents;
            }
        };
        let shape = b.rng.row_shape(rows, width_in);
        let output = Shape::from(&shape[..]).with_width(width_out);
        let x = b.input("x", &shape);
        let weight = match b.rng.below(4) {
            0 => b.input("weight", &[width_out, width_in]),
            _ => b.parameter("weight", &[width_out, width_in]),
        };
        let bias = b.maybe(|b| b.parameter("bias", &[width_out]));
        let addend = b.maybe(|b| b.input("addend", output.axes()));
        b.result("y", Op::Linear { x, weight, bias, addend });
    });
}

#[test]
fn embedding() {
    check("embedding", 80, |b| {
        let (table_rows, width) = (b.rng.extent(600), b.rng.extent(129));
        let mut shape = b.rng.row_shape(257, 1);
        shape.pop();
        // Often few ids, so that rows of the table repeat and others go unused.
        let used = 1 + b.rng.below(table_rows);
        let ids = b.integers("ids", &shape, |rng, _| rng.below(used) as i32);
        let table = match b.rng.below(4) {
            0 => b.input("table", &[table_rows, width]),
            _ => b.parameter("table", &[table_rows, width]),
        };
        b.result("y", Op::Embedding { ids, table });
    });
}

/// `x` is read three times, the weight and the bias twice, once each through the other.
#[test]
fn shared_operands() {
    check("shared operands", 25, |b| {
        let width = b.rng.extent(17);
        let shape = b.rng.row_shape(33, width);
        let x = b.input("x", &shape);
        let weight = b.parameter("weight", &[width, width]);
        let bias = b.parameter("bias", &[width]);
        let addend = Some(x);
        b.loosen(8.0);
        let y = b.result("y", Op::Linear { x, weight, bias: Some(bias), addend: None })[0];
        let z = b.apply("z", Op::Linear { x: y, weight, bias: Some(bias), addend })[0];
        let shifted = b.apply("shifted", Op::Add { a: z, b: x })[0];
        b.result("product", Op::Mul { a: shifted, b: x });
        b.result("twice", Op::Add { a: x, b: x });
    });
}

/// One embedding table read with two sets of ids, and as a projection.
#[test]
fn shared_table() {
    check("shared table", 15, |b| {
        let (table_rows, width, rows) = (b.rng.extent(33), b.rng.extent(17), b.rng.extent(33));
        let table = b.parameter("table", &[table_rows, width]);
        let mut ids = |name| b.integers(name, &[rows], |rng, _| rng.below(table_rows) as i32);
        let (first, second) = (ids("first"), ids("second"));
        let x = b.result("x", Op::Embedding { ids: first, table })[0];
        let y = b.result("y", Op::Embedding { ids: second, table })[0];
        let z = b.apply("z", Op::Mul { a: x, b: y })[0];
        b.loosen(2.0);
        b.result("logits", Op::Linear { x: z, weight: table, bias: None, addend: None });
    });
}

/// The products, the bias and the addend are summed before the one rounding to bf16; so are the
/// products of a weight gradient and what it is added to.
#[test]
fn sums_are_rounded_once() {
    for seed in 0..10 {
        let case = Case::build(seed, DType::BF16, Precision::Rounded, |b| {
            let (rows, width_in, width_out) = (b.rng.extent(65), b.rng.extent(65), 65);
            let x = b.input("x", &[rows, width_in]);
            let weight = b.parameter("weight", &[width_out, width_in]);
            let bias = b.maybe(|b| b.parameter("bias", &[width_out]));
            let addend = b.maybe(|b| b.input("addend", &[rows, width_out]));
            b.result("y", Op::Linear { x, weight, bias, addend });
        });
        let node = &case.graph.nodes()[0];
        let context = format!("seed {seed}");
        let want = evaluate(&node.op.clone().map(|_, id| &case.values[&id]));
        assert_rounded_once(&context, &case.run().get(node.outputs[0]), &want[0]);

        let Op::Linear { x, weight, .. } = node.op else { unreachable!() };
        let (x, dy) = (&case.values[&x], &case.seeds[0].1);
        let mut rng = Rng::new(seed);
        let mut start = case.values[&weight].clone();
        start.data.iter_mut().for_each(|w| *w = f64::from(rng.below(9) as u8) - 4.0);
        let sum = weight_gradient(dy, x, &start);
        let start = Start::From([(weight, start)].into());
        let gradients = case.differentiate(&start, DType::BF16).run();
        assert_rounded_once(&context, &gradients[&weight], &sum);
    }
}

/// `dyᵀ · x + start`.
fn weight_gradient(dy: &Value, x: &Value, start: &Value) -> Value {
    let mut sum = start.clone();
    let (outputs, inputs) = (dy.shape.width(), x.shape.width());
    for (dy, x) in dy.data.chunks_exact(outputs).zip(x.data.chunks_exact(inputs)) {
        for (row, dy) in sum.data.chunks_exact_mut(inputs).zip(dy) {
            row.iter_mut().zip(x).for_each(|(sum, x)| *sum += dy * x);
        }
    }
    sum
}
