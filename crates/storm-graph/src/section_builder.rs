//! Sections of one's own models, layer by layer.

use crate::{
    ActivationFunction, DType, Graph, GraphError, HeadLayout, Mask, NormKind, Op, Section, Shape,
    TensorClass, TensorId, Training,
};

/// Builds the sections of a language model: makes parameters as it goes and knows the sizes of a batch.
///
/// What it has no method for is an [`Op`] away, by [`SectionBuilder::apply`]. Parameters are named by the
/// caller, each name once in a section; one that has the same name in prologue and epilogue is the same.
///
/// ```
/// use storm_graph::{ActivationFunction, DType, Program, SectionBuilder};
///
/// let mut prologue = SectionBuilder::prologue(4, 32, DType::F32); // B, T
/// let hidden = prologue.embedding("tokens", 100, 16)?; // (B, T, 16)
/// let prologue = prologue.hand_on(hidden);
///
/// let (mut layer, hidden) = SectionBuilder::layer(&prologue)?;
/// let normed = layer.rms_norm("norm", hidden, 1e-5)?; // (B, T, 16)
/// let up = layer.linear("up", normed, 64)?; // (B, T, 64)
/// let active = layer.activation("silu", up, ActivationFunction::Silu)?;
/// let hidden = layer.linear_onto("down", active, hidden)?; // (B, T, 16)
/// let layer = layer.hand_on(hidden);
///
/// let (epilogue, hidden) = SectionBuilder::epilogue(&layer)?;
/// let epilogue = epilogue.loss(hidden, 100, 1024)?;
/// let program = Program::new(prologue, layer, 3, epilogue)?;
/// assert_eq!(program.parameters().len(), 5);
/// # Ok::<(), storm_graph::GraphError>(())
/// ```
#[derive(Clone, Debug)]
pub struct SectionBuilder {
    name: &'static str,
    graph: Graph,
    carried_in: Vec<TensorId>,
    batch: usize,
    sequence: usize,
    dtype: DType,
}

impl SectionBuilder {
    /// What comes before the layers, for batches of `batch` sequences of `sequence` tokens. Parameters
    /// and activations of the model are stored as `dtype`.
    pub fn prologue(batch: usize, sequence: usize, dtype: DType) -> SectionBuilder {
        let (graph, carried_in) = (Graph::new(), Vec::new());
        SectionBuilder { name: "prologue", graph, carried_in, batch, sequence, dtype }
    }

    /// The layer that is repeated, and what it gets: the residual stream (B, T, C).
    ///
    /// # Errors
    /// The prologue does not hand on one tensor of that form.
    pub fn layer(prologue: &Section) -> Result<(SectionBuilder, TensorId), GraphError> {
        SectionBuilder::after(prologue, "layer")
    }

    /// What comes after the last layer, and what it gets: the residual stream (B, T, C).
    ///
    /// # Errors
    /// The layer does not hand on one tensor of that form.
    pub fn epilogue(layer: &Section) -> Result<(SectionBuilder, TensorId), GraphError> {
        SectionBuilder::after(layer, "epilogue")
    }

    fn after(
        before: &Section,
        name: &'static str,
    ) -> Result<(SectionBuilder, TensorId), GraphError> {
        let refuse =
            |problem: String| Err(GraphError::Section { section: before.name.to_owned(), problem });
        let &[handed_on] = &before.carried_out[..] else {
            let count = before.carried_out.len();
            return refuse(format!("hands on {count} tensors, not one; build sections by hand"));
        };
        let tensor = before.graph.tensor(handed_on);
        let &[batch, sequence, _] = tensor.shape.axes() else {
            return refuse(format!("hands on {}, not (B, T, C)", tensor.shape));
        };
        let dtype = tensor.dtype;
        let mut graph = Graph::new();
        let class = TensorClass::Activation;
        let hidden = graph.source("hidden", tensor.shape.clone(), dtype, class); // (B, T, C)
        let carried_in = vec![hidden];
        Ok((SectionBuilder { name, graph, carried_in, batch, sequence, dtype }, hidden))
    }

    /// A column of a batch, (B, T) i32: `tokens`, `targets`, `positions` or `segments`.
    pub fn input(&mut self, name: &str) -> TensorId {
        self.graph.input(name, [self.batch, self.sequence], DType::I32)
    }

    /// A parameter that learns.
    pub fn parameter(&mut self, name: &str, shape: impl Into<Shape>) -> TensorId {
        self.graph.parameter(name, shape, self.dtype, Training::Trainable)
    }

    /// The first output of any op.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn apply(&mut self, name: &str, op: Op<TensorId>) -> Result<TensorId, GraphError> {
        Ok(self.graph.apply(name, op)?[0])
    }

    /// Rows of the parameter `INPUT.weight` (rows, width) picked by a column of the batch: (B, T, width).
    ///
    /// # Errors
    /// Sizes that are none.
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

    /// `x` (.., K) times the parameter `NAME.weight` (width, K): (.., width).
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        width: usize,
    ) -> Result<TensorId, GraphError> {
        self.project(name, x, width, None)
    }

    /// [`SectionBuilder::linear`] to the width of `addend`, which is added: how a branch goes back into
    /// the residual stream.
    ///
    /// # Errors
    /// Operands that do not fit.
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

    /// `x` divided by its root mean square over the width, times the parameter `NAME.weight`.
    ///
    /// # Errors
    /// Operands that do not fit.
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

    /// A function of every element.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn activation(
        &mut self,
        name: &str,
        x: TensorId,
        function: ActivationFunction,
    ) -> Result<TensorId, GraphError> {
        self.apply(name, Op::Activation { x, function })
    }

    /// Every token attends to itself and those before it. `qkv` (B, T, (Q+2K)·D) holds the heads of
    /// queries, keys and values: yields (B, T, Q·D).
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn causal_attention(
        &mut self,
        name: &str,
        qkv: TensorId,
        heads: HeadLayout,
    ) -> Result<TensorId, GraphError> {
        let scale = 1.0 / (heads.head_dim as f32).sqrt();
        self.apply(name, Op::Attention { qkv, segments: None, heads, mask: Mask::Causal, scale })
    }

    /// The section, which hands on `hidden`.
    pub fn hand_on(self, hidden: TensorId) -> Section {
        let SectionBuilder { name, graph, carried_in, .. } = self;
        Section { name, graph, carried_in, carried_out: vec![hidden], ..Section::default() }
    }

    /// The section, whose result is the cross-entropy of `hidden` times the parameter `head.weight`
    /// (vocabulary, C) against the targets. Of the logits `chunk_rows` rows exist at a time.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn loss(
        mut self,
        hidden: TensorId,
        vocabulary: usize,
        chunk_rows: usize,
    ) -> Result<Section, GraphError> {
        let width = self.graph.tensor(hidden).shape.width();
        let weight = self.parameter("head.weight", [vocabulary, width]);
        let targets = self.input("targets"); // (B, T)
        let denominator = self.graph.input("denominator", Shape::scalar(), DType::F32);
        let op = Op::HeadLoss { hidden, weight, targets, denominator, chunk_rows };
        let row_loss = self.apply("row_loss", op)?; // (B, T)
        let loss = self.apply("loss", Op::Sum { x: row_loss })?;
        let SectionBuilder { name, graph, carried_in, .. } = self;
        let results = vec![("loss".to_owned(), loss)];
        Ok(Section { name, graph, carried_in, results, ..Section::default() })
    }
}
