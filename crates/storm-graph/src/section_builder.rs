//! Builds the sections of custom models, layer by layer.

use crate::{
    Accuracy, ActivationFunction, Carried, DType, Graph, GraphError, HeadLayout, Mask,
    NormActivation, NormKind, Op, Section, Shape, TensorClass, TensorId, Training,
};

/// Options of [`SectionBuilder::batch_norm`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNormOptions {
    /// Added to the variance.
    pub epsilon: f32,
    /// Fraction by which running statistics move toward those of a micro-batch.
    pub momentum: f32,
    /// The activation after the norm.
    pub activation: NormActivation,
}

/// The name of the residual stream between sections.
const HIDDEN: &str = "hidden";

/// Builds the sections of a language model: creates parameters on the fly and knows the batch size.
///
/// For anything without a method, use an [`Op`] with [`SectionBuilder::apply`]. The caller names
/// the parameters. A name must be unique within a section. Stages that run once and use the same
/// name share the parameter.
///
/// ```
/// use storm_graph::{ActivationFunction, DType, Program, SectionBuilder, Stage};
///
/// let mut embedding = SectionBuilder::new("embedding", 4, 32, DType::F32); // B, T
/// let hidden = embedding.embedding("tokens", 100, 16)?; // (B, T, 16)
/// let embedding = embedding.hand_on(hidden);
///
/// let (mut layer, hidden) = SectionBuilder::after(&embedding, "layer")?;
/// let normed = layer.rms_norm("norm", hidden, 1e-5)?; // (B, T, 16)
/// let up = layer.linear("up", normed, 64)?; // (B, T, 64)
/// let active = layer.activation("silu", up, ActivationFunction::Silu)?;
/// let hidden = layer.linear_onto("down", active, hidden)?; // (B, T, 16)
/// let layer = layer.hand_on(hidden);
///
/// let (head, hidden) = SectionBuilder::after(&layer, "head")?;
/// let head = head.loss(hidden, 100, 1024)?;
/// let stages = vec![Stage::once("embedding", 0), Stage::repeated("layers", 1, 3), Stage::once("head", 2)];
/// let program = Program::new(vec![embedding, layer, head], stages)?;
/// assert_eq!(program.parameters().len(), 5);
/// # Ok::<(), storm_graph::GraphError>(())
/// ```
#[derive(Clone, Debug)]
pub struct SectionBuilder {
    name: String,
    graph: Graph,
    carried_in: Vec<Carried>,
    batch: usize,
    sequence: usize,
    dtype: DType,
    training: Training,
}

impl SectionBuilder {
    /// A section that takes no carried tensors, for batches of `batch` sequences of `sequence`
    /// tokens. Its parameters and activations are stored as `dtype`.
    pub fn new(
        name: impl Into<String>,
        batch: usize,
        sequence: usize,
        dtype: DType,
    ) -> SectionBuilder {
        let (name, graph, carried_in) = (name.into(), Graph::new(), Vec::new());
        let training = Training::Trainable;
        SectionBuilder { name, graph, carried_in, batch, sequence, dtype, training }
    }

    /// A section that takes the tensor `hidden` of `before`: the residual stream (B, T, C).
    ///
    /// # Errors
    /// The section before does not pass on a tensor with that name and rank.
    pub fn after(
        before: &Section,
        name: impl Into<String>,
    ) -> Result<(SectionBuilder, TensorId), GraphError> {
        let Some(output) = before.handed_on(HIDDEN) else {
            return before.error(format!("does not pass on `{HIDDEN}`"));
        };
        let tensor = before.graph.tensor(before.carried_out[output].tensor);
        let &[batch, sequence, _] = tensor.shape.axes() else {
            return before.error(format!("passes on {}, not (B, T, C)", tensor.shape));
        };
        let mut builder = SectionBuilder::new(name, batch, sequence, tensor.dtype);
        let hidden = builder.take(HIDDEN, tensor.shape.clone()); // (B, T, C)
        Ok((builder, hidden))
    }

    /// Takes a tensor that an earlier block passes on under this name.
    pub fn take(&mut self, name: &str, shape: impl Into<Shape>) -> TensorId {
        let tensor = self.graph.source(name, shape, self.dtype, TensorClass::Activation);
        self.carried_in.push(Carried::new(name, tensor));
        tensor
    }

    /// A batch input, (B, T) i32: `tokens`, `targets`, `positions` or `segments`.
    pub fn input(&mut self, name: &str) -> TensorId {
        self.graph.input(name, [self.batch, self.sequence], DType::I32)
    }

    /// An input of any shape and dtype. Micro-batches must contain it under this name.
    pub fn input_of(&mut self, name: &str, shape: impl Into<Shape>, dtype: DType) -> TensorId {
        self.graph.input(name, shape, dtype)
    }

    /// Freezes parameters created from now on.
    pub fn freeze(&mut self) {
        self.training = Training::Frozen;
    }

    /// A parameter, which is trainable unless the section is frozen.
    pub fn parameter(&mut self, name: &str, shape: impl Into<Shape>) -> TensorId {
        self.graph.parameter(name, shape, self.dtype, self.training)
    }

    /// Keeps a moving average of `x` as the running statistic `name`, in f32: each micro-batch of a
    /// training step moves it toward `x` by the fraction `momentum`. It is saved in checkpoints and
    /// passes no gradient.
    ///
    /// # Errors
    /// The momentum is not in the range 0 to 1.
    pub fn moving_average(
        &mut self,
        name: &str,
        x: TensorId,
        momentum: f32,
    ) -> Result<(), GraphError> {
        let shape = self.graph.tensor(x).shape.clone();
        let average = self.graph.parameter(name, shape, DType::F32, Training::Running);
        let x = match self.graph.tensor(x).dtype {
            DType::F32 => x,
            _ => self.apply(&format!("{name}.x"), Op::Convert { x, dtype: DType::F32 })?,
        };
        self.apply(&format!("{name}.moved"), Op::MovingAverage { average, x, momentum })?;
        Ok(())
    }

    /// Batch norm of the channels of `x` (.., C), the residual sum with `addend` and an activation,
    /// in one pass. The parameters are `NAME.weight` and `NAME.bias`, the running statistics
    /// `NAME.running_mean` and `NAME.running_var`. `phase` is the input with
    /// [`PhaseWords`](crate::random::PhaseWords).
    ///
    /// # Errors
    /// Operands that do not match.
    pub fn batch_norm(
        &mut self,
        name: &str,
        x: TensorId,
        phase: TensorId,
        addend: Option<TensorId>,
        options: BatchNormOptions,
    ) -> Result<TensorId, GraphError> {
        let channels = Shape::from([self.graph.tensor(x).shape.width()]);
        let weight = self.parameter(&format!("{name}.weight"), channels.clone());
        let bias = self.parameter(&format!("{name}.bias"), channels.clone());
        let mut running = |what: &str| {
            let (name, class) =
                (format!("{name}.{what}"), TensorClass::Parameter(Training::Running));
            self.graph.source(name, channels.clone(), DType::F32, class)
        };
        let (running_mean, running_variance) = (running("running_mean"), running("running_var"));
        let statistics = Op::BatchStatistics { x, running_mean, running_variance, phase };
        let statistics = self.graph.apply(&format!("{name}.statistics"), statistics)?;
        let (mean, variance, unbiased) = (statistics[0], statistics[1], statistics[2]);
        let BatchNormOptions { epsilon, momentum, activation } = options;
        let y = Op::BatchNorm { x, mean, variance, weight, bias, addend, epsilon, activation };
        let y = self.apply(name, y)?;
        for (average, x) in [(running_mean, mean), (running_variance, unbiased)] {
            let moved = format!("{}.moved", self.graph.tensor(average).name);
            self.apply(&moved, Op::MovingAverage { average, x, momentum })?;
        }
        Ok(y)
    }

    /// The shape of a tensor of the section.
    pub fn shape_of(&self, tensor: TensorId) -> &Shape {
        &self.graph.tensor(tensor).shape
    }

    /// Applies any op and returns its first output.
    ///
    /// # Errors
    /// Operands that do not match.
    pub fn apply(&mut self, name: &str, op: Op<TensorId>) -> Result<TensorId, GraphError> {
        Ok(self.graph.apply(name, op)?[0])
    }

    /// Applies any op and returns all outputs.
    ///
    /// # Errors
    /// Operands that do not match.
    pub fn apply_all(&mut self, name: &str, op: Op<TensorId>) -> Result<Vec<TensorId>, GraphError> {
        self.graph.apply(name, op)
    }

    /// Rows of the parameter `INPUT.weight` (rows, width) selected by a batch input: (B, T, width).
    ///
    /// # Errors
    /// Sizes of zero.
    pub fn embedding(
        &mut self,
        input: &str,
        rows: usize,
        width: usize,
    ) -> Result<TensorId, GraphError> {
        let ids = self.input(input);
        let table = self.parameter(&format!("{input}.weight"), [rows, width]);
        self.apply(&format!("{input}.embedding"), Op::Embedding { ids, table })
    }

    /// `x` (.., K) times the transposed parameter `NAME.weight` (width, K): (.., width).
    ///
    /// # Errors
    /// Operands that do not match.
    pub fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        width: usize,
    ) -> Result<TensorId, GraphError> {
        self.project(name, x, width, None)
    }

    /// [`SectionBuilder::linear`] to the width of `addend`, which is added, so that a branch joins
    /// the residual stream.
    ///
    /// # Errors
    /// Operands that do not match.
    pub fn linear_onto(
        &mut self,
        name: &str,
        x: TensorId,
        addend: TensorId,
    ) -> Result<TensorId, GraphError> {
        let width = self.graph.tensor(addend).shape.width();
        self.project(name, x, width, Some(addend))
    }

    fn project(
        &mut self,
        name: &str,
        x: TensorId,
        width: usize,
        addend: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        let inner = self.graph.tensor(x).shape.width();
        let weight = self.parameter(&format!("{name}.weight"), [width, inner]);
        self.apply(name, Op::Linear { x, weight, bias: None, addend })
    }

    /// RMS norm of `x` over the width, with the parameter `NAME.weight`.
    ///
    /// # Errors
    /// Operands that do not match.
    pub fn rms_norm(
        &mut self,
        name: &str,
        x: TensorId,
        epsilon: f32,
    ) -> Result<TensorId, GraphError> {
        let width = self.graph.tensor(x).shape.width();
        let weight = self.parameter(&format!("{name}.weight"), [width]);
        let (delta, bias, kind) = (None, None, NormKind::Rms);
        self.apply(name, Op::Norm { x, delta, weight, bias, kind, epsilon })
    }

    /// An elementwise activation.
    ///
    /// # Errors
    /// Operands that do not match.
    pub fn activation(
        &mut self,
        name: &str,
        x: TensorId,
        function: ActivationFunction,
    ) -> Result<TensorId, GraphError> {
        self.apply(name, Op::Activation { x, function })
    }

    /// Causal attention: every token attends to itself and earlier tokens. `qkv` (B, T, (Q+2K)·D)
    /// contains the heads of queries, keys and values. Returns (B, T, Q·D).
    ///
    /// # Errors
    /// Operands that do not match.
    pub fn causal_attention(
        &mut self,
        name: &str,
        qkv: TensorId,
        heads: HeadLayout,
    ) -> Result<TensorId, GraphError> {
        let scale = 1.0 / (heads.head_dim as f32).sqrt();
        self.apply(name, Op::Attention { qkv, segments: None, heads, mask: Mask::Causal, scale })
    }

    /// Finishes the section, which passes on `hidden` under that name.
    pub fn hand_on(self, hidden: TensorId) -> Section {
        self.hand_on_all(vec![Carried::new(HIDDEN, hidden)])
    }

    /// Finishes the section, which passes on several tensors.
    pub fn hand_on_all(self, carried_out: Vec<Carried>) -> Section {
        let SectionBuilder { name, graph, carried_in, .. } = self;
        Section { name, graph, carried_in, carried_out, ..Section::default() }
    }

    /// Finishes the section with the result `loss`, the cross-entropy of `hidden` times the
    /// parameter `head.weight` (vocabulary, C) against the targets. Logits are computed
    /// `chunk_rows` rows at a time.
    ///
    /// # Errors
    /// Operands that do not match.
    pub fn loss(
        self,
        hidden: TensorId,
        vocabulary: usize,
        chunk_rows: usize,
    ) -> Result<Section, GraphError> {
        self.loss_of("head.weight", hidden, vocabulary, chunk_rows)
    }

    /// [`SectionBuilder::loss`] with the parameter `weight` (vocabulary, C). It is tied if a stage
    /// that runs once has a parameter of the same name.
    ///
    /// # Errors
    /// Operands that do not match.
    pub fn loss_of(
        mut self,
        weight: &str,
        hidden: TensorId,
        vocabulary: usize,
        chunk_rows: usize,
    ) -> Result<Section, GraphError> {
        let width = self.graph.tensor(hidden).shape.width();
        let weight = self.parameter(weight, [vocabulary, width]);
        let targets = self.input("targets"); // (B, T)
        let denominator = self.graph.input("denominator", Shape::scalar(), DType::F32);
        let (label_smoothing, accuracy) = (0.0, Accuracy::Skip);
        let op = Op::HeadLoss {
            hidden,
            weight,
            targets,
            denominator,
            chunk_rows,
            label_smoothing,
            accuracy,
        };
        let row_loss = self.apply("row_loss", op)?; // (B, T)
        let loss = self.apply("loss", Op::Sum { x: row_loss })?;
        let SectionBuilder { name, graph, carried_in, .. } = self;
        let results = vec![("loss".to_owned(), loss)];
        Ok(Section { name, graph, carried_in, results, ..Section::default() })
    }
}
