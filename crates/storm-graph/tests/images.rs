//! Convolutions and pools: what fits, what is refused, what the backward pass is made of, and what it costs.

use std::collections::BTreeMap;
use storm_graph::{
    COLUMN_CHUNK_BYTES, DType, GradientParts, GradientRequest, Graph, Op, Planes, Shape, Tensor,
    TensorClass, TensorId, Training, Window, differentiate,
};

fn planes(images: usize, plane: usize, channels: usize) -> Planes {
    let shape = Shape::from([images, plane, plane, channels]);
    Planes::new(&shape, Window::square(3, 1, 1)).expect("it fits")
}

#[test]
fn windows_have_the_positions_that_fit() {
    let positions = |kernel, stride, padding, plane: usize| {
        Window::square(kernel, stride, padding).positions([plane; 2]).map(|[high, _]| high)
    };
    assert_eq!(positions(3, 1, 1, 32), Ok(32));
    assert_eq!(positions(3, 2, 1, 32), Ok(16));
    assert_eq!(positions(2, 2, 0, 7), Ok(3));
    assert_eq!(positions(1, 2, 0, 5), Ok(3));
    assert_eq!(positions(5, 3, 2, 1), Ok(1));
    let refused = [(3, 1, 0, 2), (0, 1, 0, 2), (1, 0, 0, 2), (1, 1, 0, 0), (2, 1, 2, 9)];
    for (kernel, stride, padding, plane) in refused {
        assert!(positions(kernel, stride, padding, plane).is_err(), "{kernel} {stride}");
    }
    assert!(positions(usize::MAX, 1, usize::MAX - 1, 4).is_err());
}

#[test]
fn positions_cover_what_lies_inside() {
    for (kernel, stride, padding) in [(3, 1, 1), (3, 2, 1), (2, 2, 0), (2, 3, 1), (5, 2, 0)] {
        for extent in 5..12 {
            let window = Window::square(kernel, stride, padding);
            let [positions, _] = window.positions([extent; 2]).expect("it fits");
            let covers = |position: usize, at: usize| {
                let at = (at + padding).wrapping_sub(position * stride);
                (at < kernel).then_some(at)
            };
            for position in 0..positions {
                let taps: Vec<usize> = (0..extent).filter_map(|at| covers(position, at)).collect();
                assert!(window.inside(0, position, extent).eq(taps), "{window:?} {position}");
            }
            for at in 0..extent {
                let over = (0..positions).filter(|&position| covers(position, at).is_some());
                assert!(window.covering(1, at, positions).eq(over), "{window:?} {at}");
            }
        }
    }
}

#[test]
fn chunks_are_even_and_within_their_bytes() {
    for images in [0, 1, 7, 8, 9, 63, 64, 65, 128, 1000] {
        for (plane, channels) in [(32, 3), (16, 32), (8, 64), (64, 64), (224, 128)] {
            for bytes in [2, 4] {
                let planes = planes(images, plane, channels);
                let chunk = planes.images_per_chunk(bytes, COLUMN_CHUNK_BYTES);
                let image = planes.positions() * planes.column_stride() * bytes;
                assert!(chunk <= 1 || chunk * image <= COLUMN_CHUNK_BYTES, "{planes:?}");
                assert!(
                    chunk <= images && (chunk < 8 || chunk.is_multiple_of(8) || chunk == images)
                );
                // Fewer bytes never take more images: a device may work with less than the scratch has room for.
                assert!(planes.images_per_chunk(bytes, 1 << 20) <= chunk.max(1), "{planes:?}");
            }
        }
    }
    // 128 images of which 113 would fit are two chunks of 64.
    assert_eq!(planes(128, 16, 32).images_per_chunk(2, COLUMN_CHUNK_BYTES), 64);
}

#[test]
fn columns_are_whole_packs() {
    let planes = planes(1, 4, 3);
    assert_eq!((planes.covered(), planes.column_stride()), (27, 32));
}

/// What does not fit is refused with a reason.
#[test]
fn refusals() {
    let refusal = |op: &dyn Fn(&mut Graph, TensorId) -> Op<TensorId>, shape: &[usize]| {
        let mut graph = Graph::new();
        let x = graph.input("x", shape, DType::F32);
        let op = op(&mut graph, x);
        graph.apply("y", op).expect_err("refused").to_string()
    };
    let convolution = |weight: [usize; 2], window: Window| {
        move |graph: &mut Graph, x: TensorId| {
            let weight = graph.parameter("weight", weight, DType::F32, Training::Trainable);
            Op::Conv2d { x, weight, bias: None, window }
        }
    };
    let three = Window::square(3, 1, 1);
    for (error, reason) in [
        (refusal(&convolution([4, 27], three), &[2, 8, 3]), "(B, H, W, C)"),
        (refusal(&convolution([4, 26], three), &[2, 8, 8, 3]), "a window covers 27 elements"),
        (refusal(&convolution([4, 27], Window::square(3, 1, 0)), &[2, 2, 8, 3]), "is larger than"),
        (refusal(&convolution([4, 27], Window::square(3, 0, 0)), &[2, 8, 8, 3]), "extent of zero"),
        (refusal(&convolution([4, 27], Window::square(3, 1, 3)), &[2, 8, 8, 3]), "but padding"),
        (
            refusal(&|_, x| Op::MaxPool { x, window: Window::square(3, 1, 2) }, &[2, 8, 8, 3]),
            "more than half of its kernel",
        ),
        (
            refusal(
                &|_, x| Op::AveragePool { x, window: Window::square(1 << 29, 1, 0) },
                &[1, 8, 8, 3],
            ),
            "exceed",
        ),
    ] {
        assert!(error.contains(reason), "{error}");
    }
}

/// The first convolution makes no gradient of its input; the second adds to the gradient that is there.
#[test]
fn backward_of_a_residual_block() {
    let mut graph = Graph::new();
    let images = graph.input("images", [2, 8, 8, 3], DType::F32);
    let parameter = |graph: &mut Graph, name: &str, shape: [usize; 2]| {
        graph.parameter(name, shape, DType::F32, Training::Trainable)
    };
    let window = Window::square(3, 1, 1);
    let first = parameter(&mut graph, "first", [8, 27]);
    let op = Op::Conv2d { x: images, weight: first, bias: None, window };
    let x = graph.apply_one("x", op).expect("fits");
    let second = parameter(&mut graph, "second", [8, 72]);
    let op = Op::Conv2d { x, weight: second, bias: None, window };
    let branch = graph.apply_one("branch", op).expect("fits");
    let y = graph.apply_one("y", Op::Add { a: branch, b: x }).expect("fits");
    let seed = graph.input("seed", [2, 8, 8, 8], DType::F32);
    let request = GradientRequest {
        seeds: vec![(y, seed)],
        wanted: Vec::new(),
        accumulators: BTreeMap::new(),
        gradient_dtype: DType::F32,
    };
    let gradients = differentiate(&mut graph, &request).expect("differentiable");
    assert!(gradients.keys().eq(&[first, second]));
    let names: Vec<&str> = graph.nodes()[3..].iter().map(|node| node.op.name()).collect();
    assert_eq!(names, ["Conv2dWeightGrad", "Conv2dInputGrad", "Conv2dWeightGrad"]);
    assert!(
        matches!(graph.nodes()[4].op, Op::Conv2dInputGrad { addend: Some(of), .. } if of == seed)
    );
    // 27 is no multiple of 8: the weight is staged in rows of 32, as columns are.
    let scratch = |node: usize| -> Vec<String> {
        let outputs = graph.nodes()[node].outputs.iter().map(|&id| graph.tensor(id));
        outputs.filter(|t| t.class == TensorClass::Scratch).map(|t| t.shape.to_string()).collect()
    };
    assert_eq!(scratch(0), ["(128, 32)", "(8, 32)"]);
    assert_eq!(scratch(1), ["(128, 72)"]);
    // The gradient of an input may read the weight in another arrangement.
    assert_eq!(scratch(4), ["(128, 72)", "(8, 72)"]);
    assert_eq!(scratch(5), ["(128, 32)", "(8, 32)"]);
}

/// Gradients of one tensor by two convolutions: the second overwrites the first, unless something else reads that.
#[test]
fn the_second_gradient_overwrites_the_first() {
    let mut graph = Graph::new();
    let images = graph.source("images", [2, 8, 8, 8], DType::F32, TensorClass::Activation);
    let x = graph.apply_one("x", Op::Scale { x: images, factor: 2.0 }).expect("fits");
    let mut seeds = Vec::new();
    for name in ["first", "second", "third"] {
        let weight = graph.parameter(name, [8, 72], DType::F32, Training::Trainable);
        let window = Window::square(3, 1, 1);
        let y = graph.apply_one("y", Op::Conv2d { x, weight, bias: None, window }).expect("fits");
        seeds.push((y, graph.input("seed", [2, 8, 8, 8], DType::F32)));
    }
    let request = GradientRequest {
        seeds,
        wanted: vec![images],
        accumulators: BTreeMap::new(),
        gradient_dtype: DType::F32,
    };
    differentiate(&mut graph, &request).expect("differentiable");
    let added: Vec<(Option<TensorId>, Option<TensorId>, TensorId)> = graph
        .nodes()
        .iter()
        .filter_map(|node| match node.op {
            Op::Conv2dInputGrad { addend, accumulator, .. } => {
                Some((addend, accumulator, node.outputs[0]))
            }
            _ => None,
        })
        .collect();
    let [(None, None, third), (None, Some(a), second), (None, Some(b), _)] = added[..] else {
        panic!("{graph}")
    };
    assert_eq!([a, b], [third, second]);
}

/// All three products of a convolution take the same arithmetic, and columns that are written and read once. A window of
/// a single position takes none, and neither do tensor cores, unless channels are not whole packs.
#[test]
fn costs() {
    let (wide, single) = (Window::square(3, 2, 1), Window::square(1, 1, 0));
    let cases = [
        (wide, DType::F32, [16, 24], 2),
        (wide, DType::BF16, [16, 24], 0),
        (wide, DType::BF16, [12, 20], 2),
        (Window::square(6, 1, 1), DType::BF16, [16, 24], 2),
        (single, DType::F32, [16, 24], 0),
        (single, DType::BF16, [12, 20], 0),
    ];
    for (window, dtype, [inputs, outputs], passes) in cases {
        let images = 4;
        let shape = |axes: &[usize]| Shape::from(axes);
        let tensor = |shape: Shape| Tensor {
            name: String::new(),
            shape,
            dtype,
            class: TensorClass::Activation,
        };
        let x = tensor(shape(&[images, 9, 7, inputs]));
        let [high, wide] = window.positions([9, 7]).expect("fits");
        let dy = tensor(shape(&[images, high, wide, outputs]));
        let weight = tensor(shape(&[outputs, window.taps() * inputs]));
        let (rows, covered) = (images * high * wide, window.taps() * inputs);
        let flops = 2 * (rows * covered * outputs) as u128;
        let (accumulator, input) = (None, x.shape.clone());
        let gradient = DType::F32;
        for op in [
            Op::Conv2d { x: &x, weight: &weight, bias: None, window },
            Op::Conv2dInputGrad {
                dy: &dy,
                weight: &weight,
                addend: None,
                accumulator: None,
                window,
                input,
            },
            Op::Conv2dWeightGrad { dy: &dy, x: &x, accumulator, window, dtype: gradient },
        ] {
            assert_eq!(op.matrix_flops(), flops, "{}", op.name());
            let bytes = passes * rows * covered * x.dtype.size_bytes();
            assert_eq!(op.moved_bytes(&[]), bytes, "{} {window:?} {:?}", op.name(), x.dtype);
        }
    }
}

/// Parts of a weight's gradient cover all positions once, fill a large card and take a bounded amount of memory.
#[test]
fn parts_of_gradients() {
    let shapes =
        [(512, 32, 64, 64), (512, 4, 512, 512), (1, 5, 8, 8), (3, 9, 1024, 2048), (64, 8, 256, 40)];
    for (images, side, channels, outputs) in shapes {
        let planes =
            Planes::new(&Shape::from([images, side, side, channels]), Window::square(3, 1, 1))
                .expect("fits");
        let GradientParts { count, positions } = GradientParts::new(&planes, outputs);
        let all = images * side * side;
        assert!(positions % GradientParts::SLAB == 0 && count >= 1, "{count} {positions}");
        assert!((count - 1) * positions < all && count * positions >= all, "{count} {positions}");
        let bytes = count * outputs * planes.covered() * 4;
        assert!(count == 1 || bytes <= 32 << 20, "{bytes}");
    }
    // 5 × 1 tiles of a large batch: nearly as many blocks as run at a time.
    let planes =
        Planes::new(&Shape::from([512, 32, 32, 64]), Window::square(3, 1, 1)).expect("fits");
    let GradientParts { count, .. } = GradientParts::new(&planes, 64);
    assert!((70..=79).contains(&count), "{count}");
}

/// Kernels on tensor cores count in 32 bits.
#[test]
fn tensor_cores_take_what_32_bits_count() {
    let suits = |images: usize, width: usize, channels: usize, kernel: usize| {
        let shape = Shape::from([images, 8, width, channels]);
        let planes = Planes::new(&shape, Window::square(kernel, 1, 1)).expect("fits");
        planes.suit_tensor_cores(DType::BF16, channels)
    };
    assert!(suits(1, 64, 8, 5) && suits(1 << 20, 64, 8, 3));
    assert!(!suits(1, 64, 12, 3), "not whole packs");
    assert!(!suits(1, 64, 8, 6), "36 taps");
    assert!(!suits(1 << 21, 64, 8, 3), "2³⁰ positions");
    assert!(!suits(1, 1 << 20, 1 << 10, 3), "a window spans 3 · 2³⁰ elements");
}
