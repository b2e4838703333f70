//! The cases that are timed: one op each, on data like that of training.

use crate::DeviceError;
use storm_graph::random::{SEED_WORDS, Seed};
use storm_graph::{
    ActivationCodec, ActivationFunction, AdamWParameters, DType, FP8_MULTIPLE, Fp8Form, Graph,
    GraphError, HeadLayout, Mask, MomentFormat, NormKind, Op, ParameterGradients, RotaryDirection,
    RotaryFrequencies, Rounding, Shape, StepScalars, TensorClass, TensorId, UnitOutput,
};
use storm_plan::GemmKind;

/// An op to time: the last node of a graph whose other nodes make its operands.
pub(super) struct Case {
    pub(super) subject: Subject,
    pub(super) graph: Graph,
    /// Data that comes from the host.
    pub(super) integers: Vec<(TensorId, Vec<i32>)>,
    /// The offset of each tensor.
    pub(super) offsets: Vec<usize>,
    pub(super) size_bytes: usize,
}

/// What a case measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// A matrix product.
    Gemm { kind: GemmKind, rows: usize, columns: usize, inner: usize, dtype: DType },
    /// A product of 8-bit floats.
    Fp8,
    /// Causal attention or its gradient.
    Attention { sequence: usize, head_dim: usize, pass: Pass },
    /// An op that moves bytes, listed under its name.
    Moving,
    /// Plain reading and writing.
    Memory,
    /// An op so small that only starting it takes time.
    Tiny,
}

/// A direction through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    Backward,
}

/// The sizes of the cases.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Tokens of the matrix products.
    pub(super) rows: &'static [usize],
    /// Tokens of everything else.
    pub(super) tokens: usize,
    /// Widths are divided by this. 1 except in tests.
    pub(super) shrink: usize,
}

/// Linear layers as (outputs, inputs): qkv, output, gate and up, down. First those of Qwen2.5 1.5B,
/// then of 7B.
const LINEARS: [(usize, usize); 8] = [
    (2048, 1536),
    (1536, 1536),
    (17920, 1536),
    (1536, 8960),
    (4608, 3584),
    (3584, 3584),
    (37888, 3584),
    (3584, 18944),
];

/// Heads over the vocabulary of the same models.
const HEADS: [(usize, usize); 2] = [(151_936, 1536), (152_064, 3584)];

/// Tokens of a product with the head, and tokens of a loss's chunk of logits.
const HEAD_ROWS: usize = 8192;
const CHUNK_ROWS: usize = 2048;

/// More elements than fit in any cache.
const MANY: usize = 128 << 20;

/// Every case. Products come first, those of the most tokens first of all.
pub(super) fn all(sizes: Sizes) -> Result<Vec<Case>, DeviceError> {
    build(sizes).map_err(|error| DeviceError::Unsupported {
        op: "probe",
        node: "a case".to_owned(),
        reason: error.to_string(),
    })
}

fn build(sizes: Sizes) -> Result<Vec<Case>, GraphError> {
    let mut cases = Vec::new();
    let narrow = |width: usize| (width / sizes.shrink).max(8);
    for &rows in sizes.rows.iter().rev() {
        for (outputs, inputs) in LINEARS.into_iter().rev() {
            let (outputs, inputs) = (narrow(outputs), narrow(inputs));
            for kind in [GemmKind::Forward, GemmKind::InputGradient, GemmKind::WeightGradient] {
                cases.push(gemm(kind, rows, outputs, inputs, DType::BF16)?);
            }
        }
    }
    let (outputs, inputs) = LINEARS[6];
    let rows = sizes.rows.iter().max().copied().unwrap_or(0);
    cases.push(fp8([rows, narrow(outputs), narrow(inputs)])?);
    let head_rows = (HEAD_ROWS / sizes.shrink).max(8);
    for (outputs, inputs) in HEADS {
        let (outputs, inputs) = (narrow(outputs), narrow(inputs));
        cases.push(gemm(GemmKind::Forward, head_rows, outputs, inputs, DType::BF16)?);
    }
    let (outputs, inputs) = (narrow(3584), narrow(3584));
    cases.push(gemm(GemmKind::Forward, head_rows, outputs, inputs, DType::F32)?);

    for (head_dim, query_heads, key_value_heads) in [(64, 14, 2), (128, 28, 4)] {
        let heads = HeadLayout { query_heads, key_value_heads, head_dim };
        for sequence in [1024, 4096].map(|time| (time / sizes.shrink).max(8)) {
            for pass in [Pass::Forward, Pass::Backward] {
                cases.push(attention(sizes.tokens, sequence, heads, pass)?);
            }
        }
    }
    cases.extend(moving(sizes, narrow)?);
    let many = Shape::from([MANY / sizes.shrink / sizes.shrink]);
    cases.push(add(Subject::Memory, many)?);
    cases.push(add(Subject::Tiny, Shape::from([8]))?);
    Ok(cases)
}

fn gemm(
    kind: GemmKind,
    tokens: usize,
    outputs: usize,
    inputs: usize,
    dtype: DType,
) -> Result<Case, GraphError> {
    let mut b = Builder::new(dtype);
    let (rows, columns, inner, op) = match kind {
        GemmKind::Forward => {
            let (x, weight) = (b.normal(&[tokens, inputs])?, b.normal(&[outputs, inputs])?);
            (tokens, outputs, inputs, Op::Linear { x, weight, bias: None, addend: None })
        }
        GemmKind::InputGradient => {
            let (dy, weight) = (b.normal(&[tokens, outputs])?, b.normal(&[outputs, inputs])?);
            (tokens, inputs, outputs, Op::LinearInputGrad { dy, weight, addend: None })
        }
        GemmKind::WeightGradient => {
            let (dy, x) = (b.normal(&[tokens, outputs])?, b.normal(&[tokens, inputs])?);
            // As in all micro-batches of a step except the first.
            let accumulator = Some(b.fill(&[outputs, inputs], dtype)?);
            (outputs, inputs, tokens, Op::LinearWeightGrad { dy, x, accumulator, dtype })
        }
    };
    b.timed(Subject::Gemm { kind, rows, columns, inner, dtype }, op)
}

/// A projection in 8-bit floats, of a shape that is also timed in bf16.
fn fp8(sizes: [usize; 3]) -> Result<Case, GraphError> {
    let mut b = Builder::new(DType::BF16);
    let [rows, outputs, inputs] = sizes.map(|extent| extent.next_multiple_of(FP8_MULTIPLE));
    let form = Fp8Form::Rows;
    let [x, weight] = [b.normal(&[rows, inputs])?, b.normal(&[outputs, inputs])?];
    let x = b.graph.apply_one("x", Op::ToFp8 { x, form })?;
    let weight = b.graph.apply_one("weight", Op::ToFp8 { x: weight, form })?;
    let output = Shape::from([rows, outputs]);
    b.timed(Subject::Fp8, Op::Fp8Linear { x, weight, bias: None, addend: None, output })
}

fn attention(
    tokens: usize,
    sequence: usize,
    heads: HeadLayout,
    pass: Pass,
) -> Result<Case, GraphError> {
    let mut b = Builder::new(DType::BF16);
    let batch = (tokens / sequence).max(1);
    let qkv = b.normal(&[batch, sequence, heads.qkv_width()])?;
    let (mask, segments) = (Mask::Causal, None);
    let scale = 1.0 / (heads.head_dim as f32).sqrt();
    let forward = Op::Attention { qkv, segments, heads, mask, scale };
    let subject = Subject::Attention { sequence, head_dim: heads.head_dim, pass };
    if pass == Pass::Forward {
        return b.timed(subject, forward);
    }
    let outputs = b.graph.apply("forward", forward)?;
    let dy = b.normal(&[batch, sequence, heads.query_width()])?;
    let (y, log_sum_exp) = (outputs[0], outputs[1]);
    b.timed(subject, Op::AttentionGrad { dy, qkv, y, log_sum_exp, segments, heads, mask, scale })
}

fn add(subject: Subject, shape: Shape) -> Result<Case, GraphError> {
    let mut b = Builder::new(DType::BF16);
    let (x, y) = (b.normal(shape.axes())?, b.normal(shape.axes())?);
    b.timed(subject, Op::Add { a: x, b: y })
}

/// Ops that move bytes, at the widths of Qwen2.5 7B.
fn moving(sizes: Sizes, narrow: impl Fn(usize) -> usize) -> Result<Vec<Case>, GraphError> {
    let tokens = sizes.tokens;
    let (width, inner) = (narrow(3584), narrow(18944));
    let heads = HeadLayout { query_heads: 28, key_value_heads: 4, head_dim: 128 };
    let mut cases = Vec::new();
    let mut case = |make: &dyn Fn(&mut Builder) -> Result<Op<TensorId>, GraphError>| {
        let mut b = Builder::new(DType::BF16);
        let op = make(&mut b)?;
        cases.push(b.timed(Subject::Moving, op)?);
        Ok(())
    };

    let norm = |b: &mut Builder| {
        let (x, delta) = (b.normal(&[tokens, width])?, Some(b.normal(&[tokens, width])?));
        let weight = b.normal(&[width])?;
        Ok(Op::Norm { x, delta, weight, bias: None, kind: NormKind::Rms, epsilon: 1e-6 })
    };
    case(&norm)?;
    case(&|b| {
        let Op::Norm { weight, kind, .. } = norm(b)? else { unreachable!("made above") };
        let x = b.normal(&[tokens, width])?;
        let plain = Op::Norm { x, delta: None, weight, bias: None, kind, epsilon: 1e-6 };
        let rstd = b.graph.apply("norm", plain)?[1];
        let dtype = b.dtype;
        Ok(Op::NormGrad {
            dy: b.normal(&[tokens, width])?,
            x,
            weight,
            bias: None,
            rstd,
            mean: None,
            addend: Some(b.normal(&[tokens, width])?),
            weight_accumulator: Some(b.fill(&[width], dtype)?),
            bias_accumulator: None,
            kind,
            parameters: ParameterGradients::Compute,
            dtype,
        })
    })?;
    let (silu, codec) = (ActivationFunction::Silu, ActivationCodec::None);
    case(&|b| Ok(Op::SwiGlu { gate_up: b.normal(&[tokens, 2 * inner])?, function: silu }))?;
    case(&|b| {
        let (dy, gate_up) = (b.normal(&[tokens, inner])?, b.normal(&[tokens, 2 * inner])?);
        Ok(Op::SwiGluGrad { dy, gate_up, function: silu, codec })
    })?;
    case(&|b| {
        let (dy, gate_up) = (b.normal(&[tokens, inner])?, b.normal(&[tokens, 2 * inner])?);
        Ok(Op::SwiGluGradAndOutput { dy, gate_up, function: silu, codec })
    })?;
    case(&|b| Ok(Op::SwiGluCoded { gate_up: b.normal(&[tokens, 2 * inner])?, function: silu }))?;
    case(&|b| {
        let (dy, gate_up) = (b.normal(&[tokens, inner])?, b.normal(&[tokens, 2 * inner])?);
        let unit = Op::SwiGluCoded { gate_up, function: silu };
        let code = b.graph.apply("unit", unit)?[1];
        Ok(Op::SwiGluCodedGrad { dy, code, function: silu, output: UnitOutput::Compute })
    })?;
    case(&|b| {
        let x = b.normal(&[tokens, inner.next_multiple_of(FP8_MULTIPLE)])?;
        Ok(Op::ToFp8 { x, form: Fp8Form::Both })
    })?;
    let function = ActivationFunction::GeluTanh;
    case(&|b| Ok(Op::Activation { x: b.normal(&[tokens, inner])?, function }))?;
    case(&|b| {
        let (dy, x) = (b.normal(&[tokens, inner])?, b.normal(&[tokens, inner])?);
        Ok(Op::ActivationGrad { dy, x, function })
    })?;
    case(&|b| {
        let sequence = tokens.min(1024);
        let positions: Vec<i32> = (0..tokens).map(|token| (token % sequence) as i32).collect();
        let shape = [tokens / sequence, sequence];
        let positions = b.integers("positions", &shape, positions);
        let frequencies = RotaryFrequencies::plain(1e6, heads.head_dim);
        let table = Op::RotaryTable { positions, frequencies };
        let table = b.graph.apply_one("table", table)?;
        let qkv = b.normal(&[shape[0], shape[1], heads.qkv_width()])?;
        Ok(Op::Rotary { qkv, table, heads, direction: RotaryDirection::Forward })
    })?;
    let head_norm = |b: &mut Builder| {
        let qkv = b.normal(&[1, tokens, heads.qkv_width()])?;
        let (query_weight, key_weight) =
            (b.normal(&[heads.head_dim])?, b.normal(&[heads.head_dim])?);
        Ok(Op::QkNorm { qkv, query_weight, key_weight, table: None, heads, epsilon: 1e-6 })
    };
    case(&head_norm)?;
    case(&|b| {
        let forward = head_norm(b)?;
        let Op::QkNorm { qkv, query_weight, key_weight, .. } = forward else {
            unreachable!("made above")
        };
        let rstd = b.graph.apply("norm", forward)?[1];
        let dtype = b.dtype;
        Ok(Op::QkNormGrad {
            dy: b.normal(&[1, tokens, heads.qkv_width()])?,
            qkv,
            query_weight,
            key_weight,
            table: None,
            rstd,
            query_accumulator: Some(b.fill(&[heads.head_dim], dtype)?),
            key_accumulator: Some(b.fill(&[heads.head_dim], dtype)?),
            heads,
            parameters: ParameterGradients::Compute,
            dtype,
        })
    })?;
    case(&|b| {
        let (x, dtype) = (b.normal(&[tokens, heads.qkv_width()])?, b.dtype);
        let accumulator = Some(b.fill(&[heads.qkv_width()], dtype)?);
        Ok(Op::ColumnSum { x, accumulator, dtype })
    })?;
    let vocabulary = narrow(HEADS[1].0);
    let ids = move |b: &mut Builder| {
        let mut state = 1u64;
        let ids: Vec<i32> = (0..tokens).map(|_| below(&mut state, vocabulary)).collect();
        (b.integers("ids", &[tokens], ids.clone()), ids)
    };
    case(&|b| Ok(Op::Embedding { ids: ids(b).0, table: b.normal(&[vocabulary, width])? }))?;
    case(&|b| {
        let (ids, values) = ids(b);
        let mut order: Vec<i32> = (0..tokens as i32).collect();
        order.sort_by_key(|&row| (values[row as usize], row));
        let order = b.integers("order", &[tokens], order);
        let dtype = b.dtype;
        let (dy, accumulator) =
            (b.normal(&[tokens, width])?, Some(b.fill(&[vocabulary, width], dtype)?));
        Ok(Op::EmbeddingGrad { dy, ids, order, accumulator, table_rows: vocabulary, dtype })
    })?;
    let updated = [2 * inner, width];
    case(&|b| Ok(Op::SumOfSquares { x: b.normal(&updated)? }))?;
    case(&|b| adamw(b, &updated))?;
    case(&|b| adamw_int8(b, &updated))?;
    let (vocabulary, width) = (narrow(HEADS[0].0), narrow(HEADS[0].1));
    let rows = (HEAD_ROWS / sizes.shrink).max(8);
    case(&|b| {
        let mut state = 2u64;
        let targets: Vec<i32> = (0..rows).map(|_| below(&mut state, vocabulary)).collect();
        let (dtype, targets) = (b.dtype, b.integers("targets", &[rows], targets));
        Ok(Op::HeadLossGrad {
            hidden: b.normal(&[rows, width])?,
            weight: b.normal(&[vocabulary, width])?,
            targets,
            denominator: b.fill(&[], DType::F32)?,
            d_row_loss: b.fill(&[rows], DType::F32)?,
            accumulator: Some(b.fill(&[vocabulary, width], dtype)?),
            chunk_rows: CHUNK_ROWS,
            label_smoothing: 0.0,
            accuracy: storm_graph::Accuracy::Skip,
            weight_gradient: ParameterGradients::Compute,
            dtype,
        })
    })?;
    Ok(cases)
}

/// bf16 with stochastic rounding, as in a training step.
fn adamw(b: &mut Builder, shape: &[usize]) -> Result<Op<TensorId>, GraphError> {
    let first_moment = b.normal(shape)?;
    let squares = Op::Mul { a: first_moment, b: first_moment };
    let second_moment = b.graph.apply_one("squares", squares)?;
    adamw_of(b, shape, [first_moment, second_moment])
}

/// The same with moments in 8 bits.
fn adamw_int8(b: &mut Builder, shape: &[usize]) -> Result<Op<TensorId>, GraphError> {
    let shape_of_moment = MomentFormat::Int8.shape(&Shape::from(shape));
    let moments = ["first", "second"].map(|name| {
        let class = TensorClass::OptimizerState;
        let id = b.graph.source(name, shape_of_moment.clone(), DType::U8, class);
        // A word has four codes, and one word of 33 is a scale.
        let word = |at: usize| match at % 33 {
            32 => 0.01f32.to_bits().cast_signed(),
            _ => (at as u32).wrapping_mul(0x9e37_79b9).cast_signed(),
        };
        b.integers.push((id, (0..shape_of_moment.elements() / 4).map(word).collect()));
        id
    });
    adamw_of(b, shape, moments)
}

fn adamw_of(
    b: &mut Builder,
    shape: &[usize],
    [first_moment, second_moment]: [TensorId; 2],
) -> Result<Op<TensorId>, GraphError> {
    Ok(Op::AdamW {
        parameter: b.normal(shape)?,
        gradient: b.normal(shape)?,
        first_moment,
        second_moment,
        master: None,
        scalars: b.fill(&[StepScalars::LEN], DType::F32)?,
        clip: Some(b.fill(&[], DType::F32)?),
        random: Some(b.seed),
        observed: None,
        hyper: AdamWParameters { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 },
        rounding: Rounding::Stochastic,
        moment_rounding: Rounding::Stochastic,
        stream: 0,
        first_element: 0,
    })
}

/// A random number below `limit`, by xorshift.
fn below(state: &mut u64, limit: usize) -> i32 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state % limit as u64) as i32
}

/// Builds a graph whose first nodes make the operands of the timed one.
struct Builder {
    graph: Graph,
    dtype: DType,
    seed: TensorId,
    integers: Vec<(TensorId, Vec<i32>)>,
    made: u16,
}

impl Builder {
    fn new(dtype: DType) -> Builder {
        let mut graph = Graph::new();
        let seed = graph.input("seed", [SEED_WORDS], DType::I32);
        let words = Seed { seed: 1, step: 0 }.to_words().to_vec();
        Builder { graph, dtype, seed, integers: vec![(seed, words)], made: 0 }
    }

    /// Random values, because products of zeros take less power, and so less time.
    fn normal(&mut self, shape: &[usize]) -> Result<TensorId, GraphError> {
        let (shape, dtype, stream) = (Shape::from(shape), self.dtype, self.made);
        self.made += 1;
        let op = Op::RandomNormal { random: self.seed, shape, dtype, deviation: 0.5, stream };
        self.graph.apply_one("normal", op)
    }

    /// A tensor with all elements 0.5.
    fn fill(&mut self, shape: &[usize], dtype: DType) -> Result<TensorId, GraphError> {
        let op = Op::Fill { shape: Shape::from(shape), dtype, value: 0.5 };
        self.graph.apply_one("fill", op)
    }

    fn integers(&mut self, name: &str, shape: &[usize], values: Vec<i32>) -> TensorId {
        let id = self.graph.input(name, shape, DType::I32);
        self.integers.push((id, values));
        id
    }

    fn timed(self, subject: Subject, op: Op<TensorId>) -> Result<Case, GraphError> {
        let Builder { mut graph, integers, .. } = self;
        graph.apply("timed", op)?;
        let (offsets, size_bytes) = place(&graph);
        Ok(Case { subject, graph, integers, offsets, size_bytes })
    }
}

/// An offset for each tensor, and the end of the last one. Outputs are placed over what they
/// overwrite.
fn place(graph: &Graph) -> (Vec<usize>, usize) {
    /// An alignment that every device accepts.
    const ALIGNMENT: usize = 256;
    let (mut offsets, mut end) = (Vec::with_capacity(graph.tensors().len()), 0usize);
    for id in graph.ids() {
        let under = graph.producer(id).and_then(|node| {
            let node = &graph.nodes()[node];
            let place = node.outputs.iter().position(|&output| output == id)?;
            node.op.in_place().into_iter().find(|&(_, output)| output == place)
        });
        offsets.push(match under {
            Some((operand, _)) => offsets[operand.index()],
            None => end,
        });
        if under.is_none() {
            end += graph.tensor(id).size_bytes().max(1).next_multiple_of(ALIGNMENT);
        }
    }
    (offsets, end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::cpu::CpuDevice;
    use std::collections::BTreeSet;

    /// Small cases run on the CPU: every operand fits its op, and every node runs.
    #[test]
    fn every_case_runs() {
        let cases = all(Sizes { rows: &[8, 16], tokens: 32, shrink: 128 }).expect("they fit");
        let capacity = cases.iter().map(|case| case.size_bytes).max().expect("some");
        let mut device = CpuDevice::new(capacity).expect("small");
        for case in &cases {
            for (id, values) in &case.integers {
                device.write(case.offsets[id.index()], values).expect("inside");
            }
            for node in case.graph.nodes() {
                let place = |id: TensorId| case.offsets[id.index()];
                let instruction = device.prepare(&case.graph, node, place, 0);
                let ran = instruction.and_then(|instruction| device.run(&instruction));
                assert_eq!(ran, Ok(()), "{:?}: {}", case.subject, node.op.name());
            }
        }
    }

    /// The ops of a training step have cases, and every case fits a card of 8 GB.
    #[test]
    fn cases_cover_a_training_step() {
        let sizes = Sizes { rows: &[1024, 4096, 8192, 16384, 32768], tokens: 16384, shrink: 1 };
        let cases = all(sizes).expect("they fit");
        assert!(cases.iter().all(|case| case.size_bytes < 8 << 30));
        let timed: BTreeSet<&str> =
            cases.iter().map(|case| super::super::figures::timed_op(case).0.timed_as()).collect();
        for op in [
            "Linear",
            "LinearInputGrad",
            "LinearWeightGrad",
            "ToFp8",
            "Fp8Linear",
            "Attention",
            "AttentionGrad",
            "Norm",
            "NormGrad",
            "SwiGlu",
            "SwiGluGrad",
            "SwiGluGradAndOutput",
            "SwiGluCoded",
            "SwiGluCodedGrad",
            "Rotary",
            "Embedding",
            "EmbeddingGrad",
            "ColumnSum",
            "SumOfSquares",
            "AdamW",
            "AdamWInt8",
            "HeadLossGrad",
        ] {
            assert!(timed.contains(op), "{op} is not timed");
        }
    }
}
