//! Small language models: ops in the company that they keep.

use crate::support::*;
use storm_graph::{
    ActivationFunction, HeadLayout, IGNORE_INDEX, Mask, NormKind, Op, RotaryDirection,
    RotaryFrequencies, Shape, TensorId, Training,
};

/// Extents of a model; all else is random.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) batch: usize,
    pub(crate) time: usize,
    pub(crate) width: usize,
    pub(crate) inner: usize,
    pub(crate) vocabulary: usize,
    pub(crate) layers: usize,
    /// Part of the parameters that do not learn, in tenths.
    pub(crate) frozen: usize,
}

const SMALL: Size =
    Size { batch: 2, time: 5, width: 6, inner: 7, vocabulary: 11, layers: 1, frozen: 0 };

/// Epsilon of all norms.
const EPSILON: f32 = 1e-3;

/// A model with a loss, which is what the test's loss is made of.
pub(crate) struct Model<'b> {
    b: &'b mut Builder,
    size: Size,
    kind: NormKind,
}

impl Model<'_> {
    pub(crate) fn build(b: &mut Builder, size: Size) {
        let kind = b.norm_kind();
        Model { b, size, kind }.forward();
    }

    fn parameter(&mut self, name: &str, shape: &[usize]) -> TensorId {
        let frozen = self.b.rng.below(10) < self.size.frozen;
        let training = if frozen { Training::Frozen } else { Training::Trainable };
        self.b.trained(name, shape, training)
    }

    fn maybe_bias(&mut self, width: usize) -> Option<TensorId> {
        if self.b.rng.coin() { Some(self.parameter("bias", &[width])) } else { None }
    }

    fn norm(&mut self, x: TensorId, delta: Option<TensorId>) -> (TensorId, TensorId) {
        let width = self.size.width;
        let weight = self.parameter("norm", &[width]);
        let kind = self.kind;
        let bias = if kind == NormKind::Layer { self.maybe_bias(width) } else { None };
        let outputs =
            self.b.apply("norm", Op::Norm { x, delta, weight, bias, kind, epsilon: EPSILON });
        let sum = if delta.is_some() { outputs[outputs.len() - 1] } else { x };
        (outputs[0], sum)
    }

    fn linear(
        &mut self,
        x: TensorId,
        [from, to]: [usize; 2],
        addend: Option<TensorId>,
    ) -> TensorId {
        let weight = self.parameter("weight", &[to, from]);
        let scale = (from as f32).powf(-0.5);
        let bias = self.maybe_bias(to);
        let x = self.b.apply("scaled", Op::Scale { x, factor: scale })[0];
        self.b.apply("linear", Op::Linear { x, weight, bias, addend })[0]
    }

    /// What the residual stream is after a branch: the sum now, or left to the next norm.
    fn join(
        &mut self,
        branch: TensorId,
        widths: [usize; 2],
        x: TensorId,
    ) -> (TensorId, Option<TensorId>) {
        if self.b.rng.coin() {
            (self.linear(branch, widths, Some(x)), None)
        } else {
            (x, Some(self.linear(branch, widths, None)))
        }
    }

    fn forward(mut self) {
        let Size { batch, time, width, inner, vocabulary, layers, .. } = self.size;
        let ids = self.b.integers("ids", &[batch, time], |rng, _| rng.below(vocabulary) as i32);
        let table = self.parameter("table", &[vocabulary, width]);
        let mut x = self.b.apply("embedding", Op::Embedding { ids, table })[0]; // (B, T, C)
        let mut delta = None;
        for _ in 0..layers {
            let (normed, sum) = self.norm(x, delta);
            let (attended, query_width) = self.attention(normed);
            (x, delta) = self.join(attended, [query_width, width], sum);
            let (normed, sum) = self.norm(x, delta);
            let hidden = if self.b.rng.coin() {
                let gate_up = self.linear(normed, [width, 2 * inner], None);
                self.b.apply("swiglu", Op::SwiGlu { gate_up, function: ActivationFunction::Silu })
                    [0]
            } else {
                let x = self.linear(normed, [width, inner], None);
                let function =
                    self.b.rng.pick(&[ActivationFunction::GeluTanh, ActivationFunction::Silu]);
                self.b.apply("activation", Op::Activation { x, function })[0]
            };
            (x, delta) = self.join(hidden, [inner, width], sum);
        }
        let (hidden, _) = self.norm(x, delta);
        let weight = match self.b.rng.coin() {
            true => table,
            false => self.parameter("head", &[vocabulary, width]),
        };
        let targets = self.b.integers("targets", &[batch, time], |rng, _| {
            if rng.below(5) == 0 { IGNORE_INDEX } else { rng.below(vocabulary) as i32 }
        });
        let denominator = self.b.constant("denominator", &[], vec![(batch * time) as f64]);
        let chunk_rows = self.b.rng.pick(&[3, 64, 1000]);
        let loss = Op::HeadLoss {
            hidden,
            weight,
            targets,
            denominator,
            chunk_rows,
            label_smoothing: 0.0,
            accuracy: storm_graph::Accuracy::Skip,
        };
        let row_loss = self.b.apply("row_loss", loss)[0];
        self.b.result("loss", Op::Sum { x: row_loss });
    }

    fn attention(&mut self, x: TensorId) -> (TensorId, usize) {
        let Size { batch, time, width, .. } = self.size;
        let (query_heads, key_value_heads) = self.b.rng.pick(&[(1, 1), (2, 1), (2, 2), (4, 2)]);
        let heads = HeadLayout { query_heads, key_value_heads, head_dim: 4 };
        let mut qkv = self.linear(x, [width, heads.qkv_width()], None); // (B, T, (Q+2K)·D)
        let table = self.b.maybe(|b| {
            let positions = b.integers("positions", &[batch, time], |_, i| (i % time) as i32);
            let frequencies = RotaryFrequencies::plain(100.0, 4);
            b.apply("rotary_table", Op::RotaryTable { positions, frequencies })[0]
        });
        if self.b.rng.coin() {
            let query_weight = self.parameter("query_norm", &[4]);
            let key_weight = self.parameter("key_norm", &[4]);
            let op = Op::QkNorm { qkv, query_weight, key_weight, table, heads, epsilon: EPSILON };
            qkv = self.b.apply("qk_norm", op)[0];
        } else if let Some(table) = table {
            let direction = RotaryDirection::Forward;
            qkv = self.b.apply("rotary", Op::Rotary { qkv, table, heads, direction })[0];
        }
        let segments = self.b.maybe(|b| {
            b.integers("segments", &[batch, time], |_, i| i32::from(i % time > time / 3))
        });
        let mask = self.b.rng.pick(&[Mask::Causal, Mask::Sliding { window: 3 }, Mask::Full]);
        let op = Op::Attention { qkv, segments, heads, mask, scale: 0.5 };
        (self.b.apply("attention", op)[0], heads.query_width())
    }
}

#[test]
fn small_models() {
    check("model", 30, |b| {
        b.loosen(12.0);
        Model::build(b, SMALL);
    });
}

#[test]
fn partly_frozen_models() {
    check("partly frozen model", 25, |b| {
        b.loosen(12.0);
        Model::build(b, Size { frozen: 6, layers: 2, ..SMALL });
    });
}

/// Reshapes, transposes and conversions between other ops.
#[test]
fn rearranged_models() {
    check("rearranged", 30, |b| {
        let (rows, width) = (b.rng.extent(7), b.rng.extent(13));
        let x = b.input("x", &[rows, width, 2]);
        let axes = b.rng.pick(&[[2, 1, 0], [1, 0, 2], [0, 2, 1]]);
        let turned = b.apply("turned", Op::Transpose { x, axes: axes.to_vec() })[0];
        let shape = Shape::from([2 * rows, width]);
        let flat = b.apply("flat", Op::Reshape { x: turned, shape })[0];
        let weight = b.parameter("weight", &[5, width]);
        let y = b.apply("y", Op::Linear { x: flat, weight, bias: None, addend: None })[0];
        let y = b.apply("wide", Op::Convert { x: y, dtype: storm_graph::DType::F32 })[0];
        b.loosen(4.0);
        b.result("z", Op::Mul { a: y, b: y });
    });
}
