//! Largest values and means of windows, and their gradients.

use crate::reference::Value;
use crate::support::*;
use storm_graph::{DType, Graph, Op, Planes, Shape, Window};

fn random_pool(
    b: &mut Builder,
    op: impl Fn(storm_graph::TensorId, Window) -> Op<storm_graph::TensorId>,
) {
    let (shape, window) = loop {
        let mut pick = |choices: &[usize]| [b.rng.pick(choices), b.rng.pick(choices)];
        let (plane, kernel) = (pick(&[1, 2, 3, 5, 6, 7]), pick(&[1, 2, 2, 3, 4]));
        let stride = pick(&[1, 2, 2, 3]);
        let padding = [b.rng.below(kernel[0] / 2 + 1), b.rng.below(kernel[1] / 2 + 1)];
        let window = match b.rng.below(5) {
            0 => Window::whole(plane[0], plane[1]),
            _ => Window { kernel, stride, padding },
        };
        let channels = b.rng.pick(&[1, 3, 8, 65, 72]);
        let shape = [b.rng.below(3), plane[0], plane[1], channels];
        if Planes::new(&Shape::from(shape), window).is_ok() {
            break (shape, window);
        }
    };
    let x = b.input("x", &shape);
    b.result("y", op(x, window));
}

#[test]
fn largest_values() {
    check("max pool", 80, |b| random_pool(b, |x, window| Op::MaxPool { x, window }));
}

#[test]
fn means() {
    check("average pool", 80, |b| random_pool(b, |x, window| Op::AveragePool { x, window }));
}

/// Equal elements: the first has the gradient. NaN is the largest, and the last of several has the gradient, as in PyTorch.
#[test]
fn ties_and_nan() {
    let nan = f64::NAN;
    let row = [1.0, 1.0, 2.0, 2.0, nan, 5.0, nan, nan, -0.0, 0.0];
    for dtype in [DType::F32, DType::BF16] {
        let mut graph = Graph::new();
        let x = graph.input("x", [1, 1, 10, 1], dtype);
        let dy = graph.input("dy", [1, 1, 5, 1], dtype);
        let window = Window { kernel: [1, 2], stride: [1, 2], padding: [0, 0] };
        let y = graph.apply_one("y", Op::MaxPool { x, window }).expect("fits");
        let dx = graph.apply_one("dx", Op::MaxPoolGrad { dy, x, window }).expect("fits");
        let values = [
            (x, Value::new(Shape::from([1, 1, 10, 1]), row.to_vec())),
            (dy, Value::new(Shape::from([1, 1, 5, 1]), vec![1.0, 2.0, 3.0, 4.0, 5.0])),
        ];
        let mut machine = Machine::new(&graph, &values.into());
        machine.run();
        let y = machine.get(y).data;
        assert_eq!(y[..2], [1.0, 2.0]);
        assert!(y[2].is_nan() && y[3].is_nan() && y[4].is_sign_negative());
        let want = [1.0, 0.0, 2.0, 0.0, 3.0, 0.0, 0.0, 4.0, 5.0, 0.0];
        assert_eq!(machine.get(dx).data, want, "{dtype}");
    }
}
