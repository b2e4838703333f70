//! Sums, repetition and rearrangement, and their gradients.

use crate::reference::Value;
use crate::support::*;
use half::bf16;
use storm_graph::{BlockPlace, DType, Graph, Op, QuantizedFormat, QuantizedRow, SUM_BLOCK, Shape};

#[test]
fn sums_and_broadcasts() {
    check("sum and broadcast", 60, |b| {
        let width = b.rng.extent(129);
        let shape = b.rng.row_shape(129, width);
        let x = b.input("x", &shape);
        // A sum of many terms that cancel.
        b.loosen(20.0);
        let sum = b.result("sum", Op::Sum { x })[0];
        let (rows, width, dtype) = (b.rng.extent(33), b.rng.extent(33), b.dtype);
        let shape = Shape::from([rows, width]);
        b.result("repeated", Op::Broadcast { x: sum, shape, dtype });
    });
}

#[test]
fn rearrangements() {
    check("rearrangement", 100, |b| {
        let rank = b.rng.below(5);
        let mut shape: Vec<usize> = (0..rank).map(|_| b.rng.extent(7)).collect();
        if rank > 0 {
            shape[b.rng.below(rank)] = b.rng.extent(129);
        }
        let x = b.input("x", &shape);
        let op = match b.rng.below(4) {
            0 => {
                let elements: usize = shape.iter().product();
                let axes = b.rng.pick(&[[1, elements], [elements, 1]]);
                Op::Reshape { x, shape: Shape::from(axes) }
            }
            1 => Op::Convert { x, dtype: b.rng.pick(&[DType::F32, DType::BF16]) },
            _ => {
                let mut axes: Vec<usize> = (0..rank).collect();
                for i in (1..rank).rev() {
                    axes.swap(i, b.rng.below(i + 1));
                }
                Op::Transpose { x, axes }
            }
        };
        b.result("y", op);
    });
}

/// Blocks below each other, with gaps, alone and as the weight of a product.
#[test]
fn block_matrices() {
    check("blocks", 60, |b| {
        let (mut rows, mut width) = (b.rng.below(3), 0);
        let (mut parts, mut places) = (Vec::new(), Vec::new());
        for index in 0..1 + b.rng.below(3) {
            let shape = [b.rng.extent(33), b.rng.extent(9)];
            parts.push(b.parameter(&format!("part {index}"), &shape));
            places.push(BlockPlace {
                row: rows,
                column: width,
                factor: b.rng.pick(&[1.0, 0.5, 2.0]),
            });
            rows += shape[0] + b.rng.below(3);
            width += shape[1];
        }
        width += b.rng.below(3);
        let shape = Shape::from([rows, width]);
        let dtype = b.dtype;
        let weight = b.apply("blocks", Op::BlockMatrix { parts, places, shape, dtype })[0];
        if b.rng.coin() {
            b.seed(weight);
        } else {
            let batch = b.rng.extent(9);
            let x = b.input("x", &[batch, width]);
            b.result("y", Op::Linear { x, weight, bias: None, addend: None });
        }
    });
}

/// A matrix in 8 bits and back: each value is the multiple of its group's scale that is nearest, and the scale is the
/// smallest bf16 that covers the group.
#[test]
fn eight_bits() {
    let mut rng = Rng::new(8);
    for (columns, dtype) in [(1, DType::F32), (300, DType::BF16), (128, DType::F32)] {
        let (mut graph, rows) = (Graph::new(), 5);
        let x = graph.input("x", [rows, columns], dtype);
        let format = QuantizedFormat::Int8;
        let packed = graph.apply_one("packed", Op::Quantize { x, format }).expect("fits");
        let form = QuantizedRow::new(format, columns);
        let op = Op::Dequantize { rows: packed, form, dtype: DType::F32 };
        let back = graph.apply_one("back", op).expect("fits");
        let value = |x: f64| f64::from(bf16::from_f64(x).to_f32());
        let data: Vec<f64> = (0..rows * columns).map(|_| value(rng.normal())).collect();
        let values = Value::new(Shape::from([rows, columns]), data.clone());
        let mut machine = Machine::new(&graph, &[(x, values)].into());
        machine.run();
        let back = machine.get(back);
        for (row, back) in data.chunks(columns).zip(back.data.chunks(columns)) {
            for (group, back) in row.chunks(128).zip(back.chunks(128)) {
                let largest = group.iter().fold(0f64, |largest, x| largest.max(x.abs()));
                let exact = (largest as f32 / 127.0).to_bits();
                let scale = f32::from_bits((exact + 0xffff) & 0xffff_0000);
                for (x, back) in group.iter().zip(back) {
                    let code = (*x as f32 / scale).round_ties_even();
                    assert!(code.abs() <= 127.0);
                    assert_eq!(*back, f64::from(code) * f64::from(scale), "{x} by {scale}");
                }
            }
        }
    }
}

/// A matrix in 4 bits and back: each value is the code point nearest to it, times the smallest bf16 that covers its group.
#[test]
fn four_bits() {
    const POINTS: [f32; 8] = [
        0.0,
        0.079_580_3,
        0.160_930_2,
        0.246_112_3,
        0.337_915_24,
        0.440_709_83,
        0.562_617,
        0.722_956_84,
    ];
    const NEGATIVE: [f32; 7] = [
        -1.0,
        -0.696_192_8,
        -0.525_073_05,
        -0.394_917_5,
        -0.284_441_38,
        -0.184_773_43,
        -0.091_050_036,
    ];
    let points: Vec<f32> = NEGATIVE.into_iter().chain(POINTS).chain([1.0]).collect();
    let mut rng = Rng::new(9);
    for (columns, dtype) in
        [(1, DType::F32), (300, DType::BF16), (64, DType::F32), (127, DType::F32)]
    {
        let (mut graph, rows) = (Graph::new(), 5);
        let x = graph.input("x", [rows, columns], dtype);
        let format = QuantizedFormat::Nf4;
        let packed = graph.apply_one("packed", Op::Quantize { x, format }).expect("fits");
        let form = QuantizedRow::new(format, columns);
        let op = Op::Dequantize { rows: packed, form, dtype: DType::F32 };
        let back = graph.apply_one("back", op).expect("fits");
        let value = |x: f64| f64::from(bf16::from_f64(x).to_f32());
        let data: Vec<f64> = (0..rows * columns).map(|_| value(rng.normal())).collect();
        let values = Value::new(Shape::from([rows, columns]), data.clone());
        let mut machine = Machine::new(&graph, &[(x, values)].into());
        machine.run();
        let back = machine.get(back);
        for (row, back) in data.chunks(columns).zip(back.data.chunks(columns)) {
            for (group, back) in row.chunks(64).zip(back.chunks(64)) {
                let largest = group.iter().fold(0f64, |largest, x| largest.max(x.abs()));
                let scale = f32::from_bits(((largest as f32).to_bits() + 0xffff) & 0xffff_0000);
                for (x, back) in group.iter().zip(back) {
                    let distance = |point: &f32| (x / f64::from(scale) - f64::from(*point)).abs();
                    let nearest = points.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)));
                    let nearest = *nearest.expect("sixteen points");
                    assert_eq!(*back, f64::from(nearest * scale), "{x} by {scale}");
                }
            }
        }
    }
}

/// Every bf16 bit pattern survives to f32 and back; f32 rounds to nearest, ties to even.
#[test]
fn conversions_to_the_bit() {
    let mut graph = Graph::new();
    let elements = 3 << 16;
    let x = graph.input("x", [elements], DType::F32);
    let mut convert = |x, dtype| graph.apply_one("y", Op::Convert { x, dtype }).expect("fits");
    let narrow = convert(x, DType::BF16);
    let wide = convert(narrow, DType::F32);
    // All bf16 values, halfway to the next one, and just beyond halfway.
    let values: Vec<f32> = (0..elements as u32)
        .map(|i| f32::from_bits((i & 0xffff) << 16 | [0, 0x8000, 0x8001][(i >> 16) as usize]))
        .filter(|x| x.is_finite())
        .collect();
    let mut data: Vec<f64> = values.iter().copied().map(f64::from).collect();
    data.resize(elements, 0.0);
    let mut machine =
        Machine::new(&graph, &[(x, Value::new(Shape::from([elements]), data))].into());
    machine.run();
    let (narrow, wide) = (machine.get(narrow), machine.get(wide));
    assert_eq!(narrow, wide);
    for (got, x) in narrow.data.iter().zip(values) {
        assert_eq!(*got as f32, bf16::from_f32(x).to_f32(), "{x:e}");
    }
}

/// Sums of more than one block, and of a block's length and one.
#[test]
fn long_sums() {
    let mut rng = Rng::new(3);
    for elements in [SUM_BLOCK - 1, SUM_BLOCK, SUM_BLOCK + 1, 3 * SUM_BLOCK + 777] {
        let mut graph = Graph::new();
        let x = graph.input("x", [elements], DType::F32);
        let sum = graph.apply_one("sum", Op::Sum { x }).expect("fits");
        let squares = graph.apply_one("squares", Op::SumOfSquares { x }).expect("fits");
        let data: Vec<f64> = (0..elements).map(|_| f64::from(rng.normal() as f32)).collect();
        let want_sum = data.iter().sum::<f64>();
        let want_squares = data.iter().map(|x| x * x).sum::<f64>();
        let mut machine =
            Machine::new(&graph, &[(x, Value::new(Shape::from([elements]), data))].into());
        machine.run();
        let (sum, squares) = (machine.get(sum).data[0], machine.get(squares).data[0]);
        let noise = 1e-6 * want_squares.sqrt() * (elements as f64).sqrt().ln();
        assert!((sum - want_sum).abs() <= noise, "{elements}: {sum}, not {want_sum}");
        let noise = 1e-5 * want_squares;
        assert!((squares - want_squares).abs() <= noise, "{elements}: {squares}");
    }
}

/// A column sum over more rows than one partial covers, and added to what was there.
#[test]
fn column_sums_of_many_rows() {
    check("bias of many rows", 12, |b| {
        let rows = b.rng.pick(&[127, 128, 129, 300, 1000]);
        let (width_in, width_out) = (b.rng.extent(3), b.rng.pick(&[1, 7, 300]));
        let x = b.input("x", &[rows, width_in]);
        let weight = b.parameter("weight", &[width_out, width_in]);
        let bias = Some(b.parameter("bias", &[width_out]));
        b.loosen(10.0);
        b.result("y", Op::Linear { x, weight, bias, addend: None });
    });
}

#[test]
fn fills() {
    for dtype in [DType::F32, DType::BF16] {
        let mut graph = Graph::new();
        for shape in [Shape::scalar(), Shape::from([3, 65])] {
            let op = Op::Fill { shape, dtype, value: -0.625 };
            graph.apply_one("fill", op).expect("fits");
        }
        let mut machine = Machine::new(&graph, &[].into());
        machine.run();
        for id in graph.ids() {
            assert!(machine.get(id).data.iter().all(|&x| x == -0.625), "{dtype}");
        }
    }
}
