//! Recurrent cells, categorical latents, and the losses of their heads.

use super::{Builder, Data, Draw};
use storm_graph::{DType, GraphError, KlBalance, Op, Shape, TensorClass, TensorId};

impl Builder {
    /// The gates of a GRU, and the activation of its input.
    pub(super) fn recurrent(&mut self) -> Result<(), GraphError> {
        let width = self.random.extent();
        let shape = self.row_shape(width);
        let [gate, candidate, hidden] =
            ["gate", "candidate", "hidden"].map(|name| self.input(name, &shape));
        let input = self.apply("input", Op::Tanh { x: candidate })?[0];
        let hidden = self.apply("reset", Op::GruReset { gate: input, hidden })?[0];
        self.result("state", Op::GruState { gate, candidate, hidden }).map(drop)
    }

    /// A posterior, a sample of it, and its divergence from a prior.
    pub(super) fn categorical(&mut self) -> Result<(), GraphError> {
        let classes = self.random.pick(&[1, 2, 7, 16, 33]);
        let width = classes * self.random.pick(&[1, 3, 32]);
        let shape = self.row_shape(width);
        let [posterior, prior] = ["posterior", "prior"].map(|name| self.input(name, &shape));
        let uniform = self.random.pick(&[0.01, 0.3]);
        let op = |logits| Op::Categorical { logits, classes, uniform };
        let posterior = self.apply("posterior.probabilities", op(posterior))?[0];
        let prior = self.apply("prior.probabilities", op(prior))?[0];
        let (random, stream) = (self.seed(), 5);
        let op = Op::SampleClass { probabilities: posterior, random, classes, stream };
        self.result("sample", op)?;
        let balance = KlBalance { posterior: 0.2, prior: 0.8 };
        let free = self.random.pick(&[0.0, 1.0]);
        self.result("divergence", Op::Divergence { posterior, prior, free, balance }).map(drop)
    }

    /// Squared errors, and outcomes.
    pub(super) fn row_loss(&mut self) -> Result<(), GraphError> {
        let width = self.random.extent();
        let shape = self.row_shape(width);
        let x = self.input("x", &shape);
        let target = self.graph.source("target", &shape[..], self.dtype, TensorClass::Activation);
        let target = self.floats(target);
        self.result("squares", Op::SquaredError { x, target })?;
        let shape = self.row_shape(3);
        let heads = self.input("heads", &shape);
        let rows = &shape[..shape.len() - 1];
        let change = self.numbers("change", rows, |value| value);
        let accepted = self.numbers("accepted", rows, |value| if value < 0.0 { 0.0 } else { 1.0 });
        self.result("outcome", Op::OutcomeLoss { heads, change, accepted }).map(drop)
    }

    /// Targets in f32, without a gradient.
    fn numbers(&mut self, name: &str, shape: &[usize], of: fn(f32) -> f32) -> TensorId {
        let id = self.graph.input(name, shape, DType::F32);
        let count = Shape::from(shape).elements();
        let values = (0..count).map(|_| of(self.random.value())).collect();
        self.data.push((id, Data::Floats(values)));
        id
    }
}
