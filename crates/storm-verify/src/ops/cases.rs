//! Random graphs, one family per kind of op, with data and memory offsets.

mod images;
mod recurrent;

use half::bf16;
use std::collections::BTreeMap;
use storm_device::{Device, DeviceError};
use storm_exec::ExecError;
use storm_graph::random::{DROPOUT_WORDS, DropoutWords, Random, SEED_WORDS, Seed};
use storm_graph::*;
use storm_plan::ALIGNMENT;

/// Every activation.
const FUNCTIONS: [ActivationFunction; 4] = [
    ActivationFunction::Gelu,
    ActivationFunction::GeluTanh,
    ActivationFunction::Relu,
    ActivationFunction::Silu,
];

/// Names of the families.
pub(super) fn families() -> &'static [&'static str] {
    &[
        "embedding",
        "linear",
        "convolution",
        "pool",
        "elementwise",
        "swiglu",
        "swiglu_and_output",
        "swiglu_coded",
        "norm",
        "qk_norm",
        "rotary",
        "attention",
        "attention64",
        "attention96",
        "attention128",
        "attention192",
        "attention256",
        "attention_sums64",
        "attention_sums128",
        "cached_attention",
        "few_rows",
        "fp8",
        "loss",
        "reduce",
        "shape",
        "constant",
        "optimizer",
        "accumulate",
        "moving_average",
        "dropout",
        "sgd",
        "accuracy",
        "batch_norm",
        "group_norm",
        "augment",
        "recurrent",
        "categorical",
        "row_loss",
    ]
}

/// A graph, the data of its sources, and the offset of each tensor.
pub(super) struct Case {
    pub(super) family: &'static str,
    pub(super) dtype: DType,
    pub(super) seed: u64,
    pub(super) layer: u16,
    pub(super) graph: Graph,
    data: Vec<(TensorId, Data)>,
    offsets: Vec<usize>,
    size_bytes: usize,
}

pub(super) enum Data {
    Floats(Vec<f32>),
    Integers(Vec<i32>),
    Bytes(Vec<u8>),
}

/// Random values of cases.
pub(super) trait Draw {
    /// Roughly normal.
    fn value(&mut self) -> f32;

    /// Rows and widths, including 1 and non-multiples of any tile.
    fn extent(&mut self) -> usize;
}

impl Draw for Random {
    fn value(&mut self) -> f32 {
        let sum: f64 = (0..4).map(|_| self.bits() as f64 / u64::MAX as f64 - 0.5).sum();
        (sum * 1.7) as f32
    }

    fn extent(&mut self) -> usize {
        self.pick(&[1, 2, 3, 7, 8, 16, 33, 64, 100, 128, 129, 200])
    }
}

pub(super) struct Builder {
    pub(super) graph: Graph,
    pub(super) random: Random,
    pub(super) dtype: DType,
    pub(super) data: Vec<(TensorId, Data)>,
    /// Results that receive a random gradient.
    results: Vec<TensorId>,
    /// Inputs whose gradient is wanted.
    wanted: Vec<TensorId>,
}

impl Builder {
    pub(super) fn floats(&mut self, id: TensorId) -> TensorId {
        let count = self.graph.tensor(id).shape.elements();
        let values = (0..count).map(|_| self.random.value()).collect();
        self.data.push((id, Data::Floats(values)));
        id
    }

    /// An activation from outside.
    pub(super) fn input(&mut self, name: &str, shape: &[usize]) -> TensorId {
        let id = self.graph.source(name, shape, self.dtype, TensorClass::Activation);
        self.wanted.push(id);
        self.floats(id)
    }

    pub(super) fn parameter(&mut self, name: &str, shape: &[usize]) -> TensorId {
        let training =
            if self.random.below(6) == 0 { Training::Frozen } else { Training::Trainable };
        let id = self.graph.parameter(name, shape, self.dtype, training);
        self.floats(id)
    }

    fn maybe_parameter(&mut self, name: &str, shape: &[usize]) -> Option<TensorId> {
        self.random.coin().then(|| self.parameter(name, shape))
    }

    pub(super) fn scalar(&mut self, name: &str, value: f32) -> TensorId {
        let id = self.graph.input(name, Shape::scalar(), DType::F32);
        self.data.push((id, Data::Floats(vec![value])));
        id
    }

    pub(super) fn integers(
        &mut self,
        name: &str,
        shape: &[usize],
        mut value: impl FnMut(&mut Random, usize) -> i32,
    ) -> TensorId {
        let id = self.graph.input(name, shape, DType::I32);
        let count = self.graph.tensor(id).shape.elements();
        let values = (0..count).map(|i| value(&mut self.random, i)).collect();
        self.data.push((id, Data::Integers(values)));
        id
    }

    pub(super) fn apply(
        &mut self,
        name: &str,
        op: Op<TensorId>,
    ) -> Result<Vec<TensorId>, GraphError> {
        self.graph.apply(name, op)
    }

    pub(super) fn result(
        &mut self,
        name: &str,
        op: Op<TensorId>,
    ) -> Result<Vec<TensorId>, GraphError> {
        let outputs = self.apply(name, op)?;
        self.results.push(outputs[0]);
        Ok(outputs)
    }

    fn row_shape(&mut self, width: usize) -> Vec<usize> {
        let rows = self.random.extent();
        if self.random.coin() { vec![rows, width] } else { vec![2, rows.div_ceil(2), width] }
    }

    fn build(&mut self, family: &str) -> Result<(), GraphError> {
        match family {
            "embedding" => self.embedding(),
            "linear" => self.linear(),
            "convolution" => self.convolution(),
            "pool" => self.pool(),
            "elementwise" => self.elementwise(),
            "swiglu" => {
                let width = 2 * self.random.extent();
                let shape = self.row_shape(width);
                let gate_up = self.input("gate_up", &shape);
                let function = self.random.pick(&FUNCTIONS);
                self.result("y", Op::SwiGlu { gate_up, function }).map(drop)
            }
            "swiglu_and_output" => self.swiglu_and_output(),
            "swiglu_coded" => self.swiglu_coded(),
            "norm" => self.norm(),
            "qk_norm" | "rotary" | "attention" | "attention64" | "attention96" | "attention128"
            | "attention192" | "attention256" => self.heads(family),
            "attention_sums64" => self.attention_sums(64),
            "attention_sums128" => self.attention_sums(128),
            "cached_attention" => self.cached_attention(),
            "few_rows" => self.few_rows(),
            "fp8" => self.fp8(),
            "loss" => self.loss(),
            "reduce" => {
                let width = self.random.pick(&[1, 100, 300, 1000]);
                let shape = self.row_shape(width);
                let x = self.input("x", &shape);
                let sum = self.result("sum", Op::Sum { x })?[0];
                let (shape, dtype) = (Shape::from([3, 5]), self.dtype);
                self.result("broadcast", Op::Broadcast { x: sum, shape, dtype }).map(drop)
            }
            "shape" => self.shape(),
            "constant" => self.constant(),
            "optimizer" => self.optimizer(),
            "accumulate" => self.accumulate(),
            "moving_average" => self.moving_average(),
            "dropout" => self.dropout(),
            "accuracy" => self.accuracy(),
            "batch_norm" => self.batch_norm(),
            "group_norm" => self.group_norm(),
            "augment" => self.augment(),
            "recurrent" => self.recurrent(),
            "categorical" => self.categorical(),
            "row_loss" => self.row_loss(),
            _ => self.sgd(),
        }
    }

    fn embedding(&mut self) -> Result<(), GraphError> {
        let (rows, width) = (self.random.extent(), self.random.extent());
        let count = self.random.pick(&[1, 5, 64, 300]);
        let ids = self.integers("ids", &[count], |random, _| random.below(rows) as i32);
        let table = self.parameter("table", &[rows, width]);
        self.result("y", Op::Embedding { ids, table }).map(drop)
    }

    fn linear(&mut self) -> Result<(), GraphError> {
        let (inputs, outputs) = (self.random.extent(), self.random.extent());
        let shape = self.row_shape(inputs);
        let x = self.input("x", &shape);
        let weight = self.parameter("weight", &[outputs, inputs]);
        let bias = self.maybe_parameter("bias", &[outputs]);
        let addend = self.random.coin().then(|| {
            let mut shape = shape.clone();
            *shape.last_mut().expect("a width") = outputs;
            self.input("addend", &shape)
        });
        self.result("y", Op::Linear { x, weight, bias, addend })?;
        // A second use, so gradients of x and of the weight are summed.
        self.result("z", Op::Linear { x, weight, bias: None, addend: None }).map(drop)
    }

    /// As many rows as a decoding step has, in widths like those of models.
    fn few_rows(&mut self) -> Result<(), GraphError> {
        let rows = self.random.pick(&[1, 1, 2, 5, 8, 9, 16, 17, 31, 32]);
        let inputs = self.random.pick(&[8, 24, 32, 256, 264, 1000, 1024, 2056]);
        let outputs = self.random.pick(&[1, 15, 16, 17, 100, 129]);
        let x = self.input("x", &[1, rows, inputs]);
        let weight = self.parameter("weight", &[outputs, inputs]);
        let bias = self.maybe_parameter("bias", &[outputs]);
        let addend = self.random.coin().then(|| self.input("addend", &[1, rows, outputs]));
        self.result("y", Op::Linear { x, weight, bias, addend }).map(drop)
    }

    /// A projection in FP8 with both gradients, with sizes around tile boundaries. Magnitudes
    /// differ between tensors, and some tensors are zero.
    fn fp8(&mut self) -> Result<(), GraphError> {
        let dtype = std::mem::replace(&mut self.dtype, DType::BF16);
        const EXTENTS: [usize; 8] = [16, 48, 64, 80, 128, 144, 256, 1040];
        let [rows, inputs, outputs] = [(); 3].map(|()| self.random.pick(&EXTENTS));
        let x = self.input("x", &[2, rows / 2, inputs]);
        let weight = self.parameter("weight", &[outputs, inputs]);
        for id in [x, weight] {
            let factor = self.random.pick(&[0.0, 1e-12, 0.03, 1.0, 1.0, 1.0, 700.0, 1e12]);
            let data = self.data.iter_mut().find(|(known, _)| *known == id);
            let Some((_, Data::Floats(values))) = data else { unreachable!("just added") };
            values.iter_mut().for_each(|value| *value *= factor);
        }
        let bias = self.maybe_parameter("bias", &[outputs]);
        let addend = self.random.coin().then(|| self.input("addend", &[2, rows / 2, outputs]));
        let both = Op::ToFp8 { x, form: Fp8Form::Both };
        let codes = self.apply("x.codes", both)?[0];
        let op = Op::ToFp8 { x: weight, form: Fp8Form::Rows };
        let weight = self.apply("weight.codes", op)?[0];
        let output = Shape::from([2, rows / 2, outputs]);
        let op = Op::Fp8Linear { x: codes, weight, bias, addend, output };
        self.result("y", op)?;
        self.dtype = dtype;
        Ok(())
    }

    /// New tokens after cached ones, with lengths around the boundaries of key blocks and
    /// partitions, and one to eight queries per key.
    fn cached_attention(&mut self) -> Result<(), GraphError> {
        let key_value_heads = self.random.pick(&[1, 2]);
        let group = 1 + self.random.below(8);
        let head_dim = self.random.pick(&[6, 16, 64, 64, 80, 128, 128, 256]);
        let heads = HeadLayout { query_heads: group * key_value_heads, key_value_heads, head_dim };
        let batch = self.random.pick(&[1, 1, 2]);
        let tokens = self.random.pick(&[1, 1, 2, 5, 31, 32, 33]);
        let past = self.random.pick(&[0, 1, 31, 62, 63, 64, 65, 127, 128, 200]);
        let end = past + tokens;
        // With a window longer than 4096, a partition has more than one block of keys.
        let long = if batch * head_dim <= 128 { 4500 } else { end + 1 };
        let window = self.random.pick(&[end, end + 64, long]);
        let qkv = self.input("qkv", &[batch, tokens, heads.qkv_width()]);
        let shape = [batch, window, heads.key_value_width()];
        let cache = self.graph.source("cache", shape, self.dtype, TensorClass::Cache);
        self.floats(cache);
        // The second sequence has its tokens in reverse order.
        let place = move |index: usize| match index / tokens {
            0 => past + index,
            _ => past + tokens - 1 - index % tokens,
        };
        let positions =
            self.integers("positions", &[batch, tokens], |_, index| place(index) as i32);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let mask = match self.random.pick(&[0, 0, 1, 7, 64, 100, 5000]) {
            0 => Mask::Causal,
            window => Mask::Sliding { window },
        };
        self.apply("y", Op::CachedAttention { qkv, cache, positions, heads, mask, scale }).map(drop)
    }

    fn elementwise(&mut self) -> Result<(), GraphError> {
        let width = self.random.extent();
        let shape = self.row_shape(width);
        let (a, b) = (self.input("a", &shape), self.input("b", &shape));
        let sum = self.apply("sum", Op::Add { a, b })?[0];
        let product = self.apply("product", Op::Mul { a: sum, b })?[0];
        let scaled = self.apply("scaled", Op::Scale { x: product, factor: 1.7 })?[0];
        for (name, x, function) in [
            ("gelu tanh", scaled, ActivationFunction::GeluTanh),
            ("gelu", scaled, ActivationFunction::Gelu),
            ("silu", a, ActivationFunction::Silu),
            ("relu", a, ActivationFunction::Relu),
        ] {
            self.result(name, Op::Activation { x, function })?;
        }
        Ok(())
    }

    fn norm(&mut self) -> Result<(), GraphError> {
        // Not one or two, because there the gradient of a norm is all cancellation.
        let width = self.random.pick(&[7, 33, 64, 100, 384, 1024, 1536, 3584]);
        let shape = self.row_shape(width);
        let x = self.input("x", &shape);
        let delta = self.random.coin().then(|| self.input("delta", &shape));
        let weight = self.parameter("weight", &[width]);
        let kind = self.random.pick(&[NormKind::Layer, NormKind::Rms]);
        let bias = match kind {
            NormKind::Layer => self.maybe_parameter("bias", &[width]),
            NormKind::Rms => None,
        };
        let op = Op::Norm { x, delta, weight, bias, kind, epsilon: 1e-5 };
        let outputs = self.result("y", op)?;
        if delta.is_some() {
            self.results.push(outputs[outputs.len() - 1]);
        }
        Ok(())
    }

    /// Angles for all of each head, or for a part of it.
    fn rotary_table(&mut self, shape: &[usize], head_dim: usize) -> Result<TensorId, GraphError> {
        let positions = self.integers("positions", shape, |random, _| random.below(5000) as i32);
        let turned = match self.random.coin() {
            true => head_dim,
            false => 2 * (head_dim / 3).max(1),
        };
        let factor = self.random.pick(&[1.0, 1.19]);
        let frequencies =
            RotaryFrequencies { factor, ..RotaryFrequencies::plain(10_000.0, turned) };
        Ok(self.apply("table", Op::RotaryTable { positions, frequencies })?[0])
    }

    fn heads(&mut self, family: &str) -> Result<(), GraphError> {
        let key_value_heads = self.random.pick(&[1, 2, 3]);
        let query_heads = key_value_heads * self.random.pick(&[1, 2, 6]);
        let head_dim = match family.strip_prefix("attention").map(str::parse) {
            Some(Ok(head_dim)) => head_dim,
            _ => self.random.pick(&[2, 6, 16, 24, 80]),
        };
        let heads = HeadLayout { query_heads, key_value_heads, head_dim };
        let (batch, time) =
            (self.random.pick(&[1, 2]), self.random.pick(&[1, 7, 64, 65, 127, 200]));
        let qkv = self.input("qkv", &[batch, time, heads.qkv_width()]);
        match family {
            "qk_norm" => {
                let query_weight = self.parameter("query_weight", &[head_dim]);
                let key_weight = self.parameter("key_weight", &[head_dim]);
                let table = match self.random.below(4) {
                    0 => None,
                    _ => Some(self.rotary_table(&[batch, time], head_dim)?),
                };
                let op = Op::QkNorm { qkv, query_weight, key_weight, table, heads, epsilon: 1e-6 };
                self.result("y", op).map(drop)
            }
            "rotary" => {
                let table = self.rotary_table(&[batch, time], head_dim)?;
                let direction = RotaryDirection::Forward;
                self.result("y", Op::Rotary { qkv, table, heads, direction }).map(drop)
            }
            _ => {
                let segments = self.random.coin().then(|| {
                    self.integers("segments", &[batch, time], |_, i| (i % time / 23) as i32)
                });
                let window = self.random.pick(&[1, 5, 17, 64, 65, 100, 1000]);
                let mask = self.random.pick(&[Mask::Causal, Mask::Full, Mask::Sliding { window }]);
                let scale = 1.0 / (head_dim as f32).sqrt();
                self.result("y", Op::Attention { qkv, segments, heads, mask, scale }).map(drop)
            }
        }
    }

    /// Sequences that are long enough for [`AttentionSums`](storm_graph::AttentionSums). In the last
    /// shape, key heads take turns at the memory of the sums.
    fn attention_sums(&mut self, head_dim: usize) -> Result<(), GraphError> {
        let shapes = [(1, 1, 2, 1024), (1, 2, 3, 1100), (2, 1, 4, 897), (1, 66, 2, 1024)];
        let (batch, key_value_heads, shared_by, time) = self.random.pick(&shapes);
        let query_heads = key_value_heads * shared_by;
        let heads = HeadLayout { query_heads, key_value_heads, head_dim };
        let qkv = self.input("qkv", &[batch, time, heads.qkv_width()]);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let op = Op::Attention { qkv, segments: None, heads, mask: Mask::Causal, scale };
        self.result("y", op).map(drop)
    }

    fn loss(&mut self) -> Result<(), GraphError> {
        let vocabulary = self.random.pick(&[2, 53, 256, 1000, 5003]);
        let width = self.random.pick(&[8, 33, 64]);
        let rows = self.random.pick(&[1, 7, 64, 100]);
        let hidden = self.input("hidden", &[rows, width]);
        let weight = self.parameter("weight", &[vocabulary, width]);
        let targets = self.integers("targets", &[rows], |random, _| match random.below(4) {
            0 => IGNORE_INDEX,
            _ => random.below(vocabulary) as i32,
        });
        let denominator = self.scalar("denominator", 17.0);
        let chunk_rows = self.random.pick(&[3, 32, 1000]);
        let op = Op::HeadLoss {
            hidden,
            weight,
            targets,
            denominator,
            chunk_rows,
            label_smoothing: self.random.pick(&[0.0, 0.0, 0.1]),
            accuracy: Accuracy::Skip,
        };
        // Once with its gradient, which overwrites it, and once forward only.
        self.result("loss", op.clone())?;
        self.apply("forward only", op).map(drop)
    }

    fn shape(&mut self) -> Result<(), GraphError> {
        let [a, b, c] = [5, 12, 33].map(|limit| 1 + self.random.below(limit));
        let x = self.input("x", &[a, b, c]);
        self.result("reshape", Op::Reshape { x, shape: Shape::from([b, a * c]) })?;
        let axes = self.random.pick(&[[0, 2, 1], [2, 1, 0], [1, 0, 2], [2, 0, 1]]).to_vec();
        self.result("transpose", Op::Transpose { x, axes })?;
        let dtype = self.random.pick(&[DType::F32, DType::BF16]);
        self.result("convert", Op::Convert { x, dtype })?;
        self.quantized()?;
        self.blocks()
    }

    /// Quantizes a matrix to 8 or 4 bits and back, with and without partial groups.
    fn quantized(&mut self) -> Result<(), GraphError> {
        let columns = self.random.pick(&[1, 8, 127, 128, 200, 256, 515]);
        let rows = 1 + self.random.below(9);
        let x = self.graph.parameter("matrix", [rows, columns], self.dtype, Training::Frozen);
        let x = self.floats(x);
        let format = self.random.pick(&QuantizedFormat::ALL);
        let rows = self.apply("quantized", Op::Quantize { x, format })?[0];
        let dtype = self.random.pick(&[DType::F32, DType::BF16]);
        let form = QuantizedRow::new(format, columns);
        self.apply("dequantized", Op::Dequantize { rows, form, dtype }).map(drop)
    }

    /// Two blocks with a gap between them.
    fn blocks(&mut self) -> Result<(), GraphError> {
        let [rows, more_rows, columns, more_columns] =
            [33, 12, 9, 7].map(|n| 1 + self.random.below(n));
        let part = self.graph.parameter("part", [rows, columns], DType::F32, Training::Trainable);
        let other = self.graph.parameter(
            "other",
            [more_rows, more_columns],
            DType::F32,
            Training::Trainable,
        );
        let parts = vec![self.floats(part), self.floats(other)];
        let places = vec![
            BlockPlace { row: 1, column: 0, factor: 0.5 },
            BlockPlace { row: rows + 3, column: columns, factor: 3.0 },
        ];
        let shape = Shape::from([rows + more_rows + 5, columns + more_columns]);
        let op = Op::BlockMatrix { parts, places, shape, dtype: self.dtype };
        self.result("blocks", op).map(drop)
    }

    fn constant(&mut self) -> Result<(), GraphError> {
        let shape = Shape::from([self.random.extent(), self.random.extent()]);
        let (random, dtype) = (self.seed(), self.dtype);
        self.apply("fill", Op::Fill { shape: shape.clone(), dtype, value: 0.3 })?;
        let op = Op::RandomNormal { random, shape, dtype, deviation: 0.5, stream: 3 };
        self.apply("normal", op).map(drop)
    }

    fn dropout(&mut self) -> Result<(), GraphError> {
        let shape = [self.random.extent(), self.random.extent()];
        let x = self.input("x", &shape);
        let addend = self.random.coin().then(|| self.input("addend", &shape));
        let seed = Seed { seed: self.random.bits(), step: 7 };
        let micro_batch = self.random.pick(&[0, 1, 3, 1 << 20]);
        let words = DropoutWords { seed, micro_batch, drops: self.random.chance(80) }.to_words();
        let random = self.integers("random", &[DROPOUT_WORDS], |_, i| words[i]);
        let rate = self.random.pick(&[0.05, 0.5]);
        self.result("y", Op::Dropout { x, random, addend, rate, stream: 3 }).map(drop)
    }

    fn seed(&mut self) -> TensorId {
        let words = Seed { seed: self.random.bits(), step: 7 }.to_words();
        self.integers("random", &[SEED_WORDS], |_, i| words[i])
    }

    fn step_scalars(&mut self) -> TensorId {
        let id = self.graph.input("scalars", [StepScalars::LEN], DType::F32);
        self.data.push((id, Data::Floats(vec![1e-2, 0.1, 0.05])));
        id
    }

    /// The index of a piece's first element in its parameter, including beyond 32 bits.
    fn first_element(&mut self) -> usize {
        PIECE_ALIGNMENT * self.random.pick(&[0, 1, 5, 1 << 19, (1 << 20) + 3])
    }

    /// Values of a moment: floats, or groups of random codes with a scale each, some of which are
    /// zero.
    fn moment(&mut self, id: TensorId) -> TensorId {
        let tensor = self.graph.tensor(id);
        if tensor.dtype != DType::U8 {
            return self.floats(id);
        }
        const GROUP_WORDS: usize = MOMENT_GROUP_BYTES / 4;
        let word = |word: usize, random: &mut Random| match word % GROUP_WORDS + 1 == GROUP_WORDS {
            true => (random.below(4) as f32 * 0.01).to_bits().cast_signed(),
            false => random.bits() as i32,
        };
        let count = tensor.size_bytes() / 4;
        let words = (0..count).map(|at| word(at, &mut self.random)).collect();
        self.data.push((id, Data::Integers(words)));
        id
    }

    /// The gradient norm over several parameters, the clip scale, and the update of one parameter.
    fn optimizer(&mut self) -> Result<(), GraphError> {
        let shape = [self.random.extent(), self.random.extent()];
        let gradient_dtype = self.random.pick(&[DType::F32, self.dtype]);
        let gradient = self.graph.source("gradient", shape, gradient_dtype, TensorClass::Gradient);
        self.floats(gradient);
        let blocks = self.random.extent();
        let partials = self.graph.source("partials", [blocks], DType::F32, TensorClass::Activation);
        self.floats(partials);
        self.apply("sum", Op::SumOfPartials { partials })?;
        let mut parts = vec![self.apply("squares", Op::SumOfSquares { x: gradient })?[0]];
        for other in 0..self.random.pick(&[0, 1, 40]) {
            let value = self.random.value().abs();
            parts.push(self.scalar(&format!("part {other}"), value));
        }
        let norm = self.apply("norm", Op::GlobalNorm { parts })?[0];
        let clip = self.apply("clip", Op::ClipScale { norm, max_norm: 1.0 })?[0];
        let parameter = self.graph.parameter("p", shape, self.dtype, Training::Trainable);
        self.floats(parameter);
        let moment_dtype = self.random.pick(&[DType::F32, self.dtype, DType::U8]);
        let class = TensorClass::OptimizerState;
        let moment_shape = MomentFormat::of(moment_dtype).shape(&Shape::from(shape));
        let [first_moment, second_moment] = ["m", "v"].map(|name| {
            let id = self.graph.source(name, moment_shape.clone(), moment_dtype, class);
            self.moment(id)
        });
        if let Some((_, Data::Floats(values))) = self.data.last_mut() {
            values.iter_mut().for_each(|value| *value = value.abs());
        }
        let has_master = self.dtype == DType::BF16 && self.random.coin();
        let master = has_master.then(|| {
            let id = self.graph.source("master", shape, DType::F32, class);
            self.floats(id)
        });
        let stochastic = |dtype, allowed: bool| match dtype {
            DType::BF16 | DType::U8 if allowed => Rounding::Stochastic,
            _ => Rounding::Nearest,
        };
        let observed = self.random.coin().then(|| {
            let sums = MomentFormat::Observed;
            let shape = sums.shape(&Shape::from(shape));
            let count = shape.elements();
            let id = self.graph.source("sums", shape, sums.dtype(), class);
            self.data.push((id, Data::Integers(vec![0; count])));
            id
        });
        let (scalars, random) = (self.step_scalars(), self.seed());
        let op = Op::AdamW {
            parameter,
            gradient,
            first_moment,
            second_moment,
            master,
            scalars,
            clip: Some(clip),
            random: Some(random),
            observed,
            hyper: AdamWParameters { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 },
            rounding: stochastic(self.dtype, !has_master),
            moment_rounding: stochastic(moment_dtype, true),
            stream: 5,
            first_element: self.first_element(),
        };
        self.apply("update", op).map(drop)
    }

    /// A gradient fused with recomputation, which plans use instead of two ops.
    fn swiglu_and_output(&mut self) -> Result<(), GraphError> {
        let (rows, width) = (self.random.extent(), self.random.extent());
        let source = |case: &mut Self, name: &str, width: usize| {
            let class = TensorClass::Activation;
            let id = case.graph.source(name, [rows, width], case.dtype, class);
            case.floats(id);
            id
        };
        let (dy, gate_up) = (source(self, "dy", width), source(self, "gate_up", 2 * width));
        let function = self.random.pick(&FUNCTIONS);
        let codec = self.random.pick(&[ActivationCodec::None, ActivationCodec::Int8]);
        match self.random.coin() {
            true => self.apply("grad", Op::SwiGluGradAndOutput { dy, gate_up, function, codec }),
            false => self.apply("grad", Op::SwiGluGrad { dy, gate_up, function, codec }),
        }
        .map(drop)
    }

    /// A gated unit whose operand is stored in 8 bits, and its gradient. Some groups have very
    /// small or very large values.
    fn swiglu_coded(&mut self) -> Result<(), GraphError> {
        let (rows, width) = (self.random.extent(), self.random.extent());
        let class = TensorClass::Activation;
        let gate_up = self.graph.source("gate_up", [rows, 2 * width], self.dtype, class);
        self.floats(gate_up);
        if let Some((_, Data::Floats(values))) = self.data.last_mut() {
            for (place, value) in values.iter_mut().enumerate() {
                *value *= [1.0, 1.0, 1e-3, 30.0, 1e-25, 0.0, 1e-38][place / QUANTIZED_GROUP % 7];
            }
        }
        let dy = self.graph.source("dy", [rows, width], self.dtype, class);
        self.floats(dy);
        let function = self.random.pick(&FUNCTIONS);
        let code = self.apply("unit", Op::SwiGluCoded { gate_up, function })?[1];
        let output = self.random.pick(&[UnitOutput::Skip, UnitOutput::Compute]);
        self.apply("grad", Op::SwiGluCodedGrad { dy, code, function, output }).map(drop)
    }

    fn accumulate(&mut self) -> Result<(), GraphError> {
        let shape = [self.random.extent(), self.random.extent()];
        let gradient = |case: &mut Self, name: &str, dtype: DType| {
            let id = case.graph.source(name, shape, dtype, TensorClass::Gradient);
            case.floats(id);
            id
        };
        let dtype = self.random.pick(&[self.dtype, DType::F32]);
        let sum = gradient(self, "sum", dtype);
        let x = gradient(self, "x", self.dtype);
        self.apply("fold", Op::Accumulate { sum, x }).map(drop)
    }

    fn moving_average(&mut self) -> Result<(), GraphError> {
        let shape = [self.random.extent(), self.random.extent()];
        let average = self.graph.parameter("average", shape, DType::F32, Training::Running);
        self.floats(average);
        let x = self.graph.source("x", shape, DType::F32, TensorClass::Activation);
        self.floats(x);
        self.apply("moved", Op::MovingAverage { average, x, momentum: 0.1 }).map(drop)
    }

    fn sgd(&mut self) -> Result<(), GraphError> {
        let shape = [self.random.extent(), self.random.extent()];
        let gradient = self.graph.source("gradient", shape, DType::F32, TensorClass::Gradient);
        self.floats(gradient);
        let parameter = self.graph.parameter("p", shape, self.dtype, Training::Trainable);
        self.floats(parameter);
        let state = |case: &mut Self, name: &str, dtype| {
            let id = case.graph.source(name, shape, dtype, TensorClass::OptimizerState);
            case.floats(id)
        };
        let moment_dtype = self.random.pick(&[DType::F32, self.dtype]);
        let momentum = (self.random.below(3) > 0).then(|| state(self, "momentum", moment_dtype));
        let has_master = self.dtype == DType::BF16 && self.random.coin();
        let master = has_master.then(|| state(self, "master", DType::F32));
        let direction = match momentum {
            Some(_) if self.random.coin() => MomentumDirection::Nesterov,
            _ => MomentumDirection::Momentum,
        };
        let share = if momentum.is_some() { 0.9 } else { 0.0 };
        let (scalars, random) = (self.step_scalars(), Some(self.seed()));
        let stochastic = |dtype, allowed: bool| match dtype {
            DType::BF16 if allowed => Rounding::Stochastic,
            _ => Rounding::Nearest,
        };
        let op = Op::Sgd {
            parameter,
            gradient,
            momentum,
            master,
            scalars,
            clip: None,
            random,
            hyper: SgdParameters { momentum: share, direction, weight_decay: 0.1 },
            rounding: stochastic(self.dtype, !has_master),
            moment_rounding: stochastic(moment_dtype, momentum.is_some()),
            stream: 4,
            first_element: self.first_element(),
        };
        self.apply("update", op).map(drop)
    }

    /// Adds the backward pass: random gradients of the results, accumulating in half of the cases.
    fn differentiate(&mut self) -> Result<(), GraphError> {
        if self.results.is_empty() {
            return Ok(());
        }
        let gradient_dtype = self.random.pick(&[DType::F32, self.dtype]);
        let mut seeds = Vec::new();
        for result in self.results.clone() {
            let Tensor { name, shape, dtype, .. } = self.graph.tensor(result).clone();
            let name = format!("{name} seed");
            let seed = self.graph.source(name, shape, dtype, TensorClass::Activation);
            seeds.push((result, self.floats(seed)));
        }
        let mut accumulators = BTreeMap::new();
        if self.random.coin() {
            let trainable = TensorClass::Parameter(Training::Trainable);
            let parameters: Vec<TensorId> =
                self.graph.ids().filter(|&id| self.graph.tensor(id).class == trainable).collect();
            for parameter in parameters {
                let Tensor { name, shape, .. } = self.graph.tensor(parameter).clone();
                let name = format!("{name} so far");
                let dtype = parameter_gradient_dtype(self.graph.tensor(parameter), gradient_dtype);
                let so_far = self.graph.source(name, shape, dtype, TensorClass::Gradient);
                accumulators.insert(parameter, self.floats(so_far));
            }
        }
        let wanted = self.wanted.clone();
        let request = GradientRequest { seeds, wanted, accumulators, gradient_dtype };
        differentiate(&mut self.graph, &request)?;
        // The sorted order of ids, which the backward pass of an embedding needs.
        let orders: Vec<(TensorId, Vec<i32>)> = self
            .graph
            .ids()
            .filter(|&id| self.graph.tensor(id).name == order_name("ids"))
            .filter_map(|id| {
                let ids = self.data.iter().find_map(|(known, data)| match data {
                    Data::Integers(ids) if self.graph.tensor(*known).name == "ids" => Some(ids),
                    _ => None,
                })?;
                let mut order: Vec<i32> = (0..ids.len() as i32).collect();
                order.sort_by_key(|&row| (ids[row as usize], row));
                Some((id, order))
            })
            .collect();
        for (id, order) in orders {
            self.data.push((id, Data::Integers(order)));
        }
        Ok(())
    }
}

impl Case {
    pub(super) fn build(family: &'static str, dtype: DType, seed: u64) -> Result<Case, ExecError> {
        let salt = family.bytes().fold(seed, |hash, byte| hash.wrapping_mul(131) + u64::from(byte));
        let mut builder = Builder {
            graph: Graph::new(),
            random: Random(salt),
            dtype,
            data: Vec::new(),
            results: Vec::new(),
            wanted: Vec::new(),
        };
        builder.build(family)?;
        builder.differentiate()?;
        let Builder { graph, data, .. } = builder;

        let (mut offsets, mut size_bytes) = (vec![0; graph.tensors().len()], 0);
        let under = |id| graph.producer(id).and_then(|node| overwritten(&graph.nodes()[node], id));
        for id in graph.ids().filter(|&id| under(id).is_none()) {
            offsets[id.index()] = size_bytes;
            size_bytes += graph.tensor(id).size_bytes().max(1).next_multiple_of(ALIGNMENT);
        }
        for id in graph.ids() {
            let mut root = id;
            while let Some(operand) = under(root) {
                root = operand;
            }
            offsets[id.index()] = offsets[root.index()];
        }
        let layer = (seed % 7) as u16;
        Ok(Case { family, dtype, seed, layer, graph, data, offsets, size_bytes })
    }

    pub(super) fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    pub(super) fn offset(&self, id: TensorId) -> usize {
        self.offsets[id.index()]
    }

    pub(super) fn is_in_place(&self, node: &Node, output: TensorId) -> bool {
        overwritten(node, output).is_some()
    }

    pub(super) fn write_sources(&self, device: &mut impl Device) -> Result<(), DeviceError> {
        for (id, data) in &self.data {
            match (data, self.graph.tensor(*id).dtype) {
                (Data::Integers(values), _) => device.write(self.offset(*id), values)?,
                (Data::Bytes(values), _) => device.write(self.offset(*id), values)?,
                (Data::Floats(values), DType::BF16) => {
                    let values: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
                    device.write(self.offset(*id), &values)?;
                }
                (Data::Floats(values), _) => device.write(self.offset(*id), values)?,
            }
        }
        Ok(())
    }

    /// Fills a tensor with NaN to detect elements that are never written.
    pub(super) fn poison(&self, device: &mut impl Device, id: TensorId) -> Result<(), DeviceError> {
        let bytes = vec![0xffu8; self.graph.tensor(id).size_bytes()];
        device.write(self.offset(id), &bytes)
    }

    pub(super) fn copy(
        &self,
        from: &impl Device,
        to: &mut impl Device,
        ids: &[TensorId],
    ) -> Result<(), DeviceError> {
        let bytes = self.snapshot(from, ids)?;
        self.restore(to, ids, &bytes)
    }

    /// Whether a tensor outlives its node, that is, is not scratch.
    pub(super) fn lasts(&self, id: TensorId) -> bool {
        self.graph.tensor(id).class != TensorClass::Scratch
    }

    pub(super) fn snapshot(
        &self,
        device: &impl Device,
        ids: &[TensorId],
    ) -> Result<Vec<Vec<u8>>, DeviceError> {
        ids.iter()
            .map(|&id| {
                let mut bytes = vec![0u8; self.graph.tensor(id).size_bytes()];
                device.read(self.offset(id), &mut bytes)?;
                Ok(bytes)
            })
            .collect()
    }

    pub(super) fn restore(
        &self,
        device: &mut impl Device,
        ids: &[TensorId],
        bytes: &[Vec<u8>],
    ) -> Result<(), DeviceError> {
        ids.iter().zip(bytes).try_for_each(|(&id, bytes)| device.write(self.offset(id), bytes))
    }
}

/// The operand whose memory an output reuses.
fn overwritten(node: &Node, output: TensorId) -> Option<TensorId> {
    let place = node.outputs.iter().position(|&id| id == output)?;
    node.op.in_place().into_iter().find(|&(_, index)| index == place).map(|(operand, _)| operand)
}
