//! Every forward op in plain f64 loops.
//!
//! Written from the documentation of the ops alone and sharing no code with the kernels, so that a
//! mistake would have to be made twice to go unnoticed. Gradients have no reference of their own:
//! they are checked against finite differences of these functions.

mod attention;
mod augment;
mod batch_norm;
mod categorical;
mod elementwise;
mod images;
mod linear;
mod loss;
mod norm;
mod optimizer;
mod recurrent;
mod row_loss;
mod shape;

use std::collections::BTreeMap;
use storm_graph::{Graph, Op, Shape, TensorId};

/// A tensor with its data; integers are f64 as well.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Value {
    pub(crate) shape: Shape,
    pub(crate) data: Vec<f64>,
}

impl Value {
    pub(crate) fn new(shape: Shape, data: Vec<f64>) -> Value {
        assert_eq!(shape.elements(), data.len());
        Value { shape, data }
    }

    pub(crate) fn scalar(value: f64) -> Value {
        Value::new(Shape::scalar(), vec![value])
    }

    /// Elements as rows of the shape's width.
    fn rows(&self) -> impl Iterator<Item = &[f64]> {
        self.data.chunks_exact(self.shape.width())
    }

    /// A tensor of the same shape.
    fn map(&self, f: impl Fn(f64) -> f64) -> Value {
        Value::new(self.shape.clone(), self.data.iter().map(|&x| f(x)).collect())
    }

    /// The same for two.
    fn zip(&self, other: &Value, f: impl Fn(f64, f64) -> f64) -> Value {
        assert_eq!(self.shape, other.shape);
        let data = self.data.iter().zip(&other.data).map(|(&a, &b)| f(a, b)).collect();
        Value::new(self.shape.clone(), data)
    }

    /// The largest magnitude.
    pub(crate) fn scale(&self) -> f64 {
        self.data.iter().fold(0.0, |scale, x| x.abs().max(scale))
    }
}

/// What a forward op yields, scratch left out.
pub(crate) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    match op {
        Op::Embedding { .. } | Op::Linear { .. } | Op::ColumnSum { .. } => linear::evaluate(op),
        Op::Conv2d { .. } | Op::MaxPool { .. } | Op::AveragePool { .. } => images::evaluate(op),
        Op::Add { .. }
        | Op::Accumulate { .. }
        | Op::MovingAverage { .. }
        | Op::Mul { .. }
        | Op::Scale { .. }
        | Op::Dropout { .. }
        | Op::Activation { .. }
        | Op::Tanh { .. }
        | Op::SwiGlu { .. } => elementwise::evaluate(op),
        Op::Norm { .. } | Op::QkNorm { .. } => norm::evaluate(op),
        Op::Augment { .. } => augment::evaluate(op),
        Op::BatchStatistics { .. } | Op::BatchNorm { .. } | Op::GroupNorm { .. } => {
            batch_norm::evaluate(op)
        }
        Op::RotaryTable { .. } | Op::Rotary { .. } | Op::Attention { .. } => {
            attention::evaluate(op)
        }
        Op::GruReset { .. } | Op::GruState { .. } => recurrent::evaluate(op),
        Op::Categorical { .. } | Op::SampleClass { .. } | Op::Divergence { .. } => {
            categorical::evaluate(op)
        }
        Op::SquaredError { .. } | Op::OutcomeLoss { .. } => row_loss::evaluate(op),
        Op::HeadLoss { .. } => loss::evaluate(op),
        Op::Sum { .. }
        | Op::Broadcast { .. }
        | Op::Reshape { .. }
        | Op::Transpose { .. }
        | Op::Convert { .. }
        | Op::BlockMatrix { .. }
        | Op::Fill { .. } => shape::evaluate(op),
        Op::SumOfSquares { .. }
        | Op::SumOfPartials { .. }
        | Op::GlobalNorm { .. }
        | Op::ClipScale { .. }
        | Op::AdamW { .. }
        | Op::Sgd { .. } => optimizer::evaluate(op),
        other => panic!("{} has no reference", other.name()),
    }
}

/// The values of all tensors of a graph of forward ops, given those from outside.
pub(crate) fn evaluate_graph(
    graph: &Graph,
    sources: &BTreeMap<TensorId, Value>,
) -> BTreeMap<TensorId, Value> {
    let mut values = sources.clone();
    for node in graph.nodes() {
        let made = evaluate(&node.op.clone().map(|_, id| &values[&id]));
        for (&output, value) in node.outputs.iter().zip(made) {
            assert_eq!(graph.tensor(output).shape, value.shape, "{}", node.name);
            values.insert(output, value);
        }
    }
    values
}
