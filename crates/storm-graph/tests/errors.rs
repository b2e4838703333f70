//! What a person reads who builds a graph that does not fit: the op, what is wrong, and every
//! operand with its dtype and shape.

use storm_graph::*;

/// A graph with one tensor for each description, `name dtype (shape)`.
fn graph_of(tensors: &[(&str, DType, &[usize])]) -> (Graph, Vec<TensorId>) {
    let mut graph = Graph::new();
    let ids = tensors
        .iter()
        .map(|&(name, dtype, shape)| graph.parameter(name, shape, dtype, Training::Trainable))
        .collect();
    (graph, ids)
}

/// Applying what `op` makes of the tensors fails with `message`.
fn check(
    tensors: &[(&str, DType, &[usize])],
    op: impl Fn(&[TensorId]) -> Op<TensorId>,
    message: &str,
) {
    let (mut graph, ids) = graph_of(tensors);
    let before = graph.clone();
    let error = graph.apply("y", op(&ids)).expect_err(message);
    assert_eq!(error.to_string(), message);
    assert_eq!(graph, before, "a refused op leaves the graph as it was");
}

use DType::{BF16, F32, I32};

const HEADS: HeadLayout = HeadLayout { query_heads: 3, key_value_heads: 2, head_dim: 4 };

#[test]
fn projections() {
    let linear = |t: &[TensorId]| Op::Linear { x: t[0], weight: t[1], bias: None, addend: None };
    check(
        &[("x", F32, &[4, 8]), ("w", F32, &[3, 7])],
        linear,
        "Linear `y`: `x` is 8 wide, but `weight` takes 7\n  \
           given: x = x f32 (4, 8)\n         \
                  weight = w f32 (3, 7)",
    );
    check(
        &[("x", F32, &[4, 8]), ("w", BF16, &[3, 8])],
        linear,
        "Linear `y`: `weight` must be f32, not bf16\n  \
           given: x = x f32 (4, 8)\n         \
                  weight = w bf16 (3, 8)",
    );
    check(
        &[("x", F32, &[4, 8]), ("w", F32, &[3, 8]), ("b", F32, &[8])],
        |t| Op::Linear { x: t[0], weight: t[1], bias: Some(t[2]), addend: None },
        "Linear `y`: `bias` must have shape (3), not (8)\n  \
           given: x = x f32 (4, 8)\n         \
                  weight = w f32 (3, 8)\n         \
                  bias = b f32 (8)",
    );
    check(
        &[("ids", F32, &[4]), ("table", F32, &[10, 8])],
        |t| Op::Embedding { ids: t[0], table: t[1] },
        "Embedding `y`: `ids` must be i32, not f32\n  \
           given: ids = ids f32 (4)\n         \
                  table = table f32 (10, 8)",
    );
}

#[test]
fn elementwise() {
    check(
        &[("a", F32, &[4, 8]), ("b", F32, &[8, 4])],
        |t| Op::Add { a: t[0], b: t[1] },
        "Add `y`: `b` must be like `a`: f32 (4, 8)\n  \
           given: a = a f32 (4, 8)\n         \
                  b = b f32 (8, 4)",
    );
    check(
        &[("x", I32, &[4])],
        |t| Op::Activation { x: t[0], function: ActivationFunction::Silu },
        "Activation `y`: `x` must be f32 or bf16, not i32\n  given: x = x i32 (4)",
    );
    check(
        &[("x", F32, &[4, 7])],
        |t| Op::SwiGlu { gate_up: t[0], function: ActivationFunction::Silu },
        "SwiGlu `y`: `gate_up` must have an even width, not 7\n  given: gate_up = x f32 (4, 7)",
    );
}

#[test]
fn norms() {
    let norm = |kind| {
        move |t: &[TensorId]| Op::Norm {
            x: t[0],
            delta: None,
            weight: t[1],
            bias: t.get(2).copied(),
            kind,
            epsilon: 1e-5,
        }
    };
    check(
        &[("x", F32, &[4, 8]), ("w", F32, &[4])],
        norm(NormKind::Rms),
        "Norm `y`: `weight` must have shape (8), not (4)\n  \
           given: x = x f32 (4, 8)\n         \
                  weight = w f32 (4)",
    );
    check(
        &[("x", F32, &[4, 8]), ("w", F32, &[8]), ("b", F32, &[8])],
        norm(NormKind::Rms),
        "Norm `y`: an RMS norm has no bias\n  \
           given: x = x f32 (4, 8)\n         \
                  weight = w f32 (8)\n         \
                  bias = b f32 (8)",
    );
}

#[test]
fn heads() {
    let attention = |heads| {
        move |t: &[TensorId]| Op::Attention {
            qkv: t[0],
            segments: None,
            heads,
            mask: Mask::Causal,
            scale: 1.0,
        }
    };
    check(
        &[("qkv", F32, &[2, 5, 28])],
        attention(HEADS),
        "Attention `y`: 3 query heads cannot share 2 key/value heads evenly\n  \
         given: qkv = qkv f32 (2, 5, 28)",
    );
    check(
        &[("qkv", F32, &[2, 5, 28])],
        attention(HeadLayout { query_heads: 4, ..HEADS }),
        "Attention `y`: `qkv` must be 32 wide for 4 query and 2 key/value heads of 4, not 28\n  \
         given: qkv = qkv f32 (2, 5, 28)",
    );
    check(
        &[("qkv", F32, &[5, 28])],
        attention(HEADS),
        "Attention `y`: `qkv` must have 3 axes, not (5, 28)\n  given: qkv = qkv f32 (5, 28)",
    );
    let cached = |t: &[TensorId]| Op::CachedAttention {
        qkv: t[0],
        cache: t[1],
        positions: t[2],
        heads: HeadLayout { query_heads: 2, ..HEADS },
        mask: Mask::Causal,
        scale: 1.0,
    };
    check(
        &[("qkv", F32, &[2, 5, 24]), ("cache", F32, &[2, 9, 8]), ("positions", I32, &[2, 5])],
        cached,
        "CachedAttention `y`: `cache` must have shape (2, 9, 16), not (2, 9, 8)\n  \
         given: qkv = qkv f32 (2, 5, 24)\n         \
                cache = cache f32 (2, 9, 8)\n         \
                positions = positions i32 (2, 5)",
    );
    check(
        &[("qkv", F32, &[2, 5, 24]), ("cache", F32, &[2, 4, 16]), ("positions", I32, &[2, 5])],
        cached,
        "CachedAttention `y`: 5 new tokens do not fit a cache of 4\n  \
         given: qkv = qkv f32 (2, 5, 24)\n         \
                cache = cache f32 (2, 4, 16)\n         \
                positions = positions i32 (2, 5)",
    );
    let heads = HeadLayout { query_heads: 2, ..HEADS };
    let infinite = RotaryFrequencies { factor: f32::INFINITY, ..RotaryFrequencies::plain(1e4, 8) };
    for (frequencies, problem) in [
        (RotaryFrequencies::plain(1e4, 1), "there must be at least one frequency"),
        (RotaryFrequencies::plain(f64::NAN, 8), "frequencies and their factor must not be NaN"),
        (infinite, "frequencies and their factor must not be inf"),
    ] {
        check(
            &[("positions", I32, &[2, 5])],
            |t| Op::RotaryTable { positions: t[0], frequencies: frequencies.clone() },
            &format!("RotaryTable `y`: {problem}\n  given: positions = positions i32 (2, 5)"),
        );
    }
    check(
        &[("qkv", F32, &[2, 5, 24]), ("table", F32, &[2, 5, 3, 2])],
        |t| Op::Rotary { qkv: t[0], table: t[1], heads, direction: RotaryDirection::Forward },
        "Rotary `y`: `table` turns 3 pairs of heads that are 4 wide\n  \
         given: qkv = qkv f32 (2, 5, 24)\n         \
                table = table f32 (2, 5, 3, 2)",
    );
    let (segments, scale) = (None, 1.0);
    check(
        &[("qkv", F32, &[2, 5, 24])],
        |t| Op::Attention { qkv: t[0], segments, heads, mask: Mask::Sliding { window: 0 }, scale },
        "Attention `y`: a window must be of one key at least, not 0\n  \
         given: qkv = qkv f32 (2, 5, 24)",
    );
    check(
        &[("qkv", F32, &[2, 5, 24]), ("cache", F32, &[2, 9, 16]), ("positions", I32, &[2, 5])],
        |t| Op::CachedAttention {
            qkv: t[0],
            cache: t[1],
            positions: t[2],
            heads,
            mask: Mask::Full,
            scale,
        },
        "CachedAttention `y`: over a cache, a query cannot see what comes after it\n  \
         given: qkv = qkv f32 (2, 5, 24)\n         \
                cache = cache f32 (2, 9, 16)\n         \
                positions = positions i32 (2, 5)",
    );
}

#[test]
fn losses() {
    check(
        &[("x", F32, &[4, 8]), ("w", F32, &[9, 8]), ("t", I32, &[5]), ("n", F32, &[])],
        |t| Op::HeadLoss {
            hidden: t[0],
            weight: t[1],
            targets: t[2],
            denominator: t[3],
            chunk_rows: 2,
            label_smoothing: 0.0,
            accuracy: storm_graph::Accuracy::Skip,
        },
        "HeadLoss `y`: `targets` must have shape (4), not (5)\n  \
           given: hidden = x f32 (4, 8)\n         \
                  weight = w f32 (9, 8)\n         \
                  targets = t i32 (5)\n         \
                  denominator = n f32 ()",
    );
}

#[test]
fn shapes() {
    check(
        &[("x", F32, &[4, 8])],
        |t| Op::Reshape { x: t[0], shape: Shape::from([5, 7]) },
        "Reshape `y`: cannot reshape (4, 8) (32 elements) into (5, 7) (35 elements)\n  \
         given: x = x f32 (4, 8)",
    );
    check(
        &[("x", F32, &[4, 8])],
        |t| Op::Transpose { x: t[0], axes: vec![0, 0] },
        "Transpose `y`: [0, 0] does not reorder the axes of (4, 8)\n  given: x = x f32 (4, 8)",
    );
}

#[test]
fn updates() {
    check(
        &[("p", F32, &[4]), ("g", F32, &[4]), ("scalars", F32, &[3])],
        |t| Op::Sgd {
            parameter: t[0],
            gradient: t[1],
            momentum: None,
            master: None,
            scalars: t[2],
            clip: None,
            random: None,
            hyper: storm_graph::SgdParameters::plain(0.0),
            rounding: Rounding::Stochastic,
            moment_rounding: Rounding::Nearest,
            stream: 0,
            first_element: 0,
        },
        "Sgd `y`: stochastic rounding is for bf16: `parameter` must be bf16, not f32\n  \
           given: parameter = p f32 (4)\n         \
                  gradient = g f32 (4)\n         \
                  scalars = scalars f32 (3)",
    );
    check(
        &[("p", F32, &[4]), ("g", F32, &[4]), ("scalars", F32, &[3])],
        |t| Op::Sgd {
            parameter: t[0],
            gradient: t[1],
            momentum: None,
            master: None,
            scalars: t[2],
            clip: None,
            random: None,
            hyper: storm_graph::SgdParameters::plain(0.0),
            rounding: Rounding::Nearest,
            moment_rounding: Rounding::Nearest,
            stream: 0,
            first_element: 1000,
        },
        "Sgd `y`: first_element must be a multiple of 8192, not 1000: cut the parameter there\n  \
           given: parameter = p f32 (4)\n         \
                  gradient = g f32 (4)\n         \
                  scalars = scalars f32 (3)",
    );
    check(
        &[],
        |_| Op::GlobalNorm { parts: Vec::new() },
        "GlobalNorm `y`: `parts` is empty: there is no gradient to take the norm of",
    );
}

/// What an op has overwritten cannot be read any more.
#[test]
fn overwritten_operands() {
    let (mut graph, t) = graph_of(&[("dy", F32, &[4, 3]), ("gate_up", F32, &[4, 6])]);
    graph
        .apply(
            "grad",
            Op::SwiGluGrad {
                dy: t[0],
                gate_up: t[1],
                function: ActivationFunction::Silu,
                codec: ActivationCodec::None,
            },
        )
        .expect("fits");
    let error = graph
        .apply("again", Op::SwiGlu { gate_up: t[1], function: ActivationFunction::Silu })
        .expect_err("it is gone");
    assert_eq!(
        error.to_string(),
        "SwiGlu `again`: `gate_up` is gone: `grad` overwrote it; apply this node before that one, \
         or read what that one made\n  given: gate_up = gate_up f32 (4, 6)",
    );
}

/// Differentiating the last tensor of the graph, with a seed like `seed`, fails with `message`.
fn check_gradient(mut graph: Graph, result: TensorId, seed: &[usize], message: &str) {
    let seed = graph.input("seed", seed, F32);
    let request = GradientRequest {
        seeds: vec![(result, seed)],
        wanted: Vec::new(),
        accumulators: [].into(),
        gradient_dtype: F32,
    };
    let error = differentiate(&mut graph, &request).expect_err(message);
    assert_eq!(error.to_string(), message);
}

#[test]
fn gradients() {
    let (mut graph, t) = graph_of(&[("x", F32, &[4])]);
    let squares = graph.apply_one("norm_part", Op::SumOfSquares { x: t[0] }).expect("fits");
    check_gradient(
        graph,
        squares,
        &[],
        "SumOfSquares `norm_part` cannot be differentiated: gradients of `x` were asked for \
         through it; mark the parameters before it as frozen, or leave the op out of the \
         differentiated graph",
    );

    let (mut graph, t) = graph_of(&[("x", F32, &[4])]);
    let y = graph.apply_one("y", Op::Scale { x: t[0], factor: 2.0 }).expect("fits");
    check_gradient(
        graph,
        y,
        &[5],
        "section `y`: the gradient of `y f32 (4)` cannot be `seed f32 (5)`",
    );
}
