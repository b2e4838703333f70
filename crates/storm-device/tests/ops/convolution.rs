//! Convolutions and their gradients.

use crate::reference::{Value, evaluate};
use crate::support::*;
use rayon::ThreadPoolBuilder;
use storm_graph::{DType, Op, Planes, Shape, Window};

/// Windows of any form over small planes, and channels that fill packs or do not.
fn random_images(b: &mut Builder) -> (Vec<usize>, Window) {
    loop {
        let mut pick = |choices: &[usize]| [b.rng.pick(choices), b.rng.pick(choices)];
        let (plane, kernel) = (pick(&[1, 2, 3, 5, 6, 8]), pick(&[1, 2, 3, 3, 5]));
        let (stride, padding) = (pick(&[1, 1, 2, 3]), pick(&[0, 1, 1, 2]));
        let window = Window { kernel, stride, padding };
        let shape = vec![b.rng.below(4), plane[0], plane[1], b.rng.pick(&[1, 3, 4, 8, 16])];
        let Ok(planes) = Planes::new(&Shape::from(&shape[..]), window) else { continue };
        if planes.images * planes.positions() * planes.covered() <= 8_000 {
            return (shape, window);
        }
    }
}

#[test]
fn convolutions() {
    check("convolution", 150, |b| {
        let (shape, window) = random_images(b);
        let covered = window.taps() * shape[3];
        let outputs = b.rng.pick(&[1, 2, 5, 8]);
        let x = b.input("x", &shape);
        let weight = match b.rng.below(4) {
            0 => b.input("weight", &[outputs, covered]),
            _ => b.parameter("weight", &[outputs, covered]),
        };
        let bias = b.maybe(|b| b.parameter("bias", &[outputs]));
        b.loosen(2.0);
        b.result("y", Op::Conv2d { x, weight, bias, window });
    });
}

/// A pixel by itself: the product of its channels.
#[test]
fn pointwise_convolutions() {
    check("pointwise convolution", 20, |b| {
        let (images, inputs, outputs) = (b.rng.below(3), b.rng.extent(33), b.rng.extent(33));
        let x = b.input("x", &[images, 3, 5, inputs]);
        let weight = b.parameter("weight", &[outputs, inputs]);
        let bias = b.maybe(|b| b.parameter("bias", &[outputs]));
        b.result("y", Op::Conv2d { x, weight, bias, window: Window::square(1, 1, 0) });
    });
}

/// Convolutions with a residual sum: the gradient of `x` is added up from both, and the weight's from two uses.
#[test]
fn shared_images() {
    check("shared images", 15, |b| {
        let channels = b.rng.pick(&[3, 8]);
        let x = b.input("x", &[2, 4, 5, channels]);
        let weight = b.parameter("weight", &[channels, 9 * channels]);
        let bias = Some(b.parameter("bias", &[channels]));
        let window = Window::square(3, 1, 1);
        b.loosen(8.0);
        let y = b.apply("y", Op::Conv2d { x, weight, bias, window })[0];
        let z = b.apply("z", Op::Conv2d { x: y, weight, bias, window })[0];
        b.result("sum", Op::Add { a: z, b: x });
    });
}

/// Two convolutions of the same images. The gradient of the images by one overwrites that by the other.
#[test]
fn branches() {
    check("branches", 20, |b| {
        let channels = b.rng.pick(&[3, 8]);
        let x = b.input("x", &[2, 5, 4, channels]);
        b.loosen(4.0);
        for (name, window) in [
            ("wide", Window::square(3, 2, 1)),
            ("pointwise", Window::square(1, 1, 0)),
            ("projection", Window::square(1, 2, 0)),
        ] {
            let weight = b.parameter(&format!("{name} weight"), &[8, window.taps() * channels]);
            b.result(name, Op::Conv2d { x, weight, bias: None, window });
        }
    });
}

/// The products and the bias are summed before the one rounding to bf16; so are the products of a weight gradient, over
/// several pieces of columns, and what it is added to.
#[test]
fn sums_are_rounded_once() {
    let case = Case::build(1, DType::BF16, Precision::Rounded, |b| {
        let x = b.input("x", &[40, 16, 16, 8]);
        let weight = b.parameter("weight", &[3, 72]);
        let bias = Some(b.parameter("bias", &[3]));
        b.result("y", Op::Conv2d { x, weight, bias, window: Window::square(3, 1, 1) });
    });
    let node = &case.graph.nodes()[0];
    let want = evaluate(&node.op.clone().map(|_, id| &case.values[&id]));
    assert_rounded_once("forward", &case.run().get(node.outputs[0]), &want[0]);

    let Op::Conv2d { x, weight, window, .. } = node.op else { unreachable!() };
    let (x, dy) = (&case.values[&x], &case.seeds[0].1);
    let mut start = case.values[&weight].clone();
    start.data.iter_mut().enumerate().for_each(|(i, w)| *w = (i % 9) as f64 - 4.0);
    let want = weight_gradient(dy, x, window, &start);
    let gradients = case.differentiate(&Start::From([(weight, start)].into()), DType::BF16).run();
    assert_rounded_once("weight gradient", &gradients[&weight], &want);
}

/// A convolution is linear in its weight: the gradient of an element is what `y` becomes by it alone.
fn weight_gradient(dy: &Value, x: &Value, window: Window, start: &Value) -> Value {
    let mut sum = start.clone();
    let (covered, outputs) = (start.shape.width(), start.shape.axes()[0]);
    for tap in 0..covered {
        let mut unit = Value::new(Shape::from([1, covered]), vec![0.0; covered]);
        unit.data[tap] = 1.0;
        let y = &evaluate(&Op::Conv2d { x, weight: &unit, bias: None, window })[0];
        for (dy, y) in dy.data.chunks_exact(outputs).zip(&y.data) {
            for (output, dy) in dy.iter().enumerate() {
                sum.data[output * covered + tap] += dy * y;
            }
        }
    }
    sum
}

/// Several pieces of columns, and any number of threads.
#[test]
fn threads_change_no_bit() {
    for dtype in [DType::F32, DType::BF16] {
        let case = Case::build(3, dtype, Precision::Rounded, |b| {
            let x = b.input("x", &[37, 17, 15, 12]);
            let weight = b.parameter("weight", &[19, 108]);
            let bias = Some(b.parameter("bias", &[19]));
            let y =
                b.apply("y", Op::Conv2d { x, weight, bias, window: Window::square(3, 2, 1) })[0];
            let z = b.apply("z", Op::MaxPool { x: y, window: Window::square(3, 2, 1) })[0];
            b.result("mean", Op::AveragePool { x: z, window: Window::square(2, 1, 0) });
        });
        let backward = case.differentiate(&Start::Fresh, dtype);
        let run = |threads: usize| {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| backward.run())
        };
        let alone = run(1);
        for threads in [2, 5] {
            assert_eq!(run(threads), alone, "{dtype}, {threads} threads");
        }
    }
}
