//! A random graph with values for its sources, and its backward pass.

use super::{Machine, Rng};
use crate::reference::Value;
use half::bf16;
use std::collections::BTreeMap;
use storm_graph::{
    DType, GradientRequest, Graph, NormKind, Op, Shape, TensorClass, TensorId, Training,
    differentiate, order_name,
};

/// How finely random values of floats are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Precision {
    /// As f32 can hold them.
    Full,
    /// As bf16 can hold them, so that graphs in f32 and in bf16 see the same numbers.
    Rounded,
}

/// A forward graph to test.
pub(crate) struct Case {
    pub(crate) graph: Graph,
    /// Values of the sources.
    pub(crate) values: BTreeMap<TensorId, Value>,
    /// Tensors that the loss of the test depends on, each with its random weight in it.
    pub(crate) seeds: Vec<(TensorId, Value)>,
    /// Float inputs whose gradients are wanted.
    pub(crate) wanted: Vec<TensorId>,
    /// How much more than usual rounding costs here.
    pub(crate) slack: f64,
}

/// Builds a [`Case`].
pub(crate) struct Builder {
    pub(crate) rng: Rng,
    /// Of the floats.
    pub(crate) dtype: DType,
    precision: Precision,
    case: Case,
}

impl Builder {
    /// A float input that gets a gradient.
    pub(crate) fn input(&mut self, name: &str, shape: &[usize]) -> TensorId {
        self.scaled_input(name, shape, 1.0)
    }

    pub(crate) fn scaled_input(&mut self, name: &str, shape: &[usize], scale: f64) -> TensorId {
        let id = self.case.graph.input(name, shape, self.dtype);
        self.case.wanted.push(id);
        self.draw(id, scale);
        id
    }

    /// A trainable parameter.
    pub(crate) fn parameter(&mut self, name: &str, shape: &[usize]) -> TensorId {
        self.trained(name, shape, Training::Trainable)
    }

    pub(crate) fn trained(&mut self, name: &str, shape: &[usize], training: Training) -> TensorId {
        let id = self.case.graph.parameter(name, shape, self.dtype, training);
        self.draw(id, 1.0);
        id
    }

    /// Integers, `value` of each position.
    pub(crate) fn integers(
        &mut self,
        name: &str,
        shape: &[usize],
        mut value: impl FnMut(&mut Rng, usize) -> i32,
    ) -> TensorId {
        let id = self.case.graph.input(name, shape, DType::I32);
        let shape = Shape::from(shape);
        let data = (0..shape.elements()).map(|i| f64::from(value(&mut self.rng, i))).collect();
        self.case.values.insert(id, Value::new(shape, data));
        id
    }

    /// An f32 input of any graph, without a gradient.
    pub(crate) fn constant(&mut self, name: &str, shape: &[usize], data: Vec<f64>) -> TensorId {
        let id = self.case.graph.input(name, shape, DType::F32);
        let data = data.into_iter().map(|x| f64::from(x as f32)).collect();
        self.case.values.insert(id, Value::new(Shape::from(shape), data));
        id
    }

    /// An operand that is there half of the time.
    pub(crate) fn maybe(
        &mut self,
        make: impl FnOnce(&mut Builder) -> TensorId,
    ) -> Option<TensorId> {
        if self.rng.coin() { Some(make(self)) } else { None }
    }

    pub(crate) fn apply(&mut self, name: &str, op: Op<TensorId>) -> Vec<TensorId> {
        match self.case.graph.apply(name, op) {
            Ok(outputs) => outputs,
            Err(error) => panic!("{error}"),
        }
    }

    /// Applies an op and makes the test's loss depend on what it yields; for a norm with `delta` on
    /// its result, on the sum, or on both.
    pub(crate) fn result(&mut self, name: &str, op: Op<TensorId>) -> Vec<TensorId> {
        let has_sum = matches!(op, Op::Norm { delta: Some(_), .. });
        let outputs = self.apply(name, op);
        let (first, last) = (outputs[0], outputs[outputs.len() - 1]);
        match if has_sum { self.rng.below(3) } else { 0 } {
            0 => self.seed(first),
            1 => self.seed(last),
            _ => {
                self.seed(first);
                self.seed(last);
            }
        }
        outputs
    }

    /// Makes the test's loss depend on `id`.
    pub(crate) fn seed(&mut self, id: TensorId) {
        let value = self.random_value(id, 1.0);
        self.case.seeds.push((id, value));
    }

    /// Rounding costs `factor` times as much as usual.
    pub(crate) fn loosen(&mut self, factor: f64) {
        self.case.slack *= factor;
    }

    pub(crate) fn norm_kind(&mut self) -> NormKind {
        self.rng.pick(&[NormKind::Layer, NormKind::Rms])
    }

    fn draw(&mut self, id: TensorId, scale: f64) {
        let value = self.random_value(id, scale);
        self.case.values.insert(id, value);
    }

    fn random_value(&mut self, id: TensorId, scale: f64) -> Value {
        let tensor = self.case.graph.tensor(id);
        let coarse = tensor.dtype == self.dtype && self.precision == Precision::Rounded
            || tensor.dtype == DType::BF16;
        let draw = |_| {
            let x = (scale * self.rng.normal()) as f32;
            f64::from(if coarse { bf16::from_f32(x).to_f32() } else { x })
        };
        Value::new(tensor.shape.clone(), (0..tensor.shape.elements()).map(draw).collect())
    }
}

/// What gradients of parameters are added to.
pub(crate) enum Start {
    /// Nothing.
    Fresh,
    /// These values.
    From(BTreeMap<TensorId, Value>),
}

/// A case with its backward pass.
pub(crate) struct Backward {
    pub(crate) graph: Graph,
    pub(crate) values: BTreeMap<TensorId, Value>,
    /// The gradient of each wanted tensor and trainable parameter.
    pub(crate) gradients: BTreeMap<TensorId, TensorId>,
}

impl Case {
    /// The case that `seed` gives: the same graph for any dtype and precision.
    pub(crate) fn build(
        seed: u64,
        dtype: DType,
        precision: Precision,
        build: impl Fn(&mut Builder),
    ) -> Case {
        let case = Case {
            graph: Graph::new(),
            values: BTreeMap::new(),
            seeds: Vec::new(),
            wanted: Vec::new(),
            slack: 1.0,
        };
        let mut builder = Builder { rng: Rng::new(seed), dtype, precision, case };
        build(&mut builder);
        builder.case
    }

    pub(crate) fn trainable(&self) -> Vec<TensorId> {
        let trainable = TensorClass::Parameter(Training::Trainable);
        self.graph.ids().filter(|&id| self.graph.tensor(id).class == trainable).collect()
    }

    /// The machine after the forward pass.
    pub(crate) fn run(&self) -> Machine<'_> {
        let mut machine = Machine::new(&self.graph, &self.values);
        machine.run();
        machine
    }

    pub(crate) fn differentiate(&self, start: &Start, gradient_dtype: DType) -> Backward {
        let mut graph = self.graph.clone();
        let mut values = self.values.clone();
        let mut seeds = Vec::new();
        for (result, value) in &self.seeds {
            let dtype = graph.tensor(*result).dtype;
            let seed = graph.input("seed", value.shape.clone(), dtype);
            seeds.push((*result, seed));
            values.insert(seed, value.clone());
        }
        let mut accumulators = BTreeMap::new();
        if let Start::From(starts) = start {
            for (&parameter, value) in starts {
                let shape = value.shape.clone();
                let id = graph.source("so_far", shape, gradient_dtype, TensorClass::Gradient);
                accumulators.insert(parameter, id);
                values.insert(id, value.clone());
            }
        }
        let request =
            GradientRequest { seeds, wanted: self.wanted.clone(), accumulators, gradient_dtype };
        let gradients = match differentiate(&mut graph, &request) {
            Ok(gradients) => gradients,
            Err(error) => panic!("{error}\n{graph}"),
        };
        for id in graph.ids() {
            let name = order_name(&graph.tensor(id).name);
            let order = graph.ids().find(|&order| graph.tensor(order).name == name);
            if let Some(order) = order {
                values.insert(order, sorted_order(&values[&id]));
            }
        }
        Backward { graph, values, gradients }
    }
}

impl Backward {
    /// The gradients after both passes.
    pub(crate) fn run(&self) -> BTreeMap<TensorId, Value> {
        let mut machine = Machine::new(&self.graph, &self.values);
        machine.run();
        self.gradients.iter().map(|(&id, &gradient)| (id, machine.get(gradient))).collect()
    }
}

/// Rows sorted by (id, row), as the loader gives them.
fn sorted_order(ids: &Value) -> Value {
    let mut order: Vec<usize> = (0..ids.data.len()).collect();
    order.sort_by(|&a, &b| ids.data[a].total_cmp(&ids.data[b]).then(a.cmp(&b)));
    Value::new(ids.shape.clone(), order.into_iter().map(|row| row as f64).collect())
}
