//! Builds a program from a config: embedding, layers, head.

use crate::{
    AdaptedLinear, Augmentation, Family, LayerAdapters, ModelConfig, ModelError, ParameterLayout,
    ParameterSpec, is_adapter,
};
use std::ops::Range;
use storm_graph::random::DROPOUT_WORDS;
use storm_graph::{
    Accuracy, ActivationFunction, BlockPlace, Carried, DType, Fp8Form, Graph, GraphError,
    HeadLayout, Mask, NormKind, Op, Program, QuantizedRow, RotaryDirection, Section, Shape, Stage,
    TensorClass, TensorId, Training, fp8_suits,
};

/// The input that selects what is dropped from a micro-batch, as
/// [`DropoutWords`](storm_graph::random::DropoutWords).
pub const DROPOUT_INPUT: &str = "dropout.random";

/// The input that distinguishes a training step from an evaluation, as
/// [`PhaseWords`](storm_graph::random::PhaseWords). The trainer fills it.
pub const PHASE_INPUT: &str = "phase";

/// Default number of rows of logits in memory at a time.
pub const DEFAULT_CHUNK_ROWS: usize = 1024;

/// How to compute a model. None of these options may depend on a memory budget, because they
/// determine the exact bits of the results.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// B: sequences per micro-batch.
    pub batch: usize,
    /// T: tokens per sequence.
    pub sequence: usize,
    /// Storage of parameters and activations.
    pub dtype: DType,
    /// Operands of the projections of layers.
    pub products: Products,
    /// Whether a row contains one sample or several.
    pub packing: Packing,
    /// The output of the program.
    pub output: ModelOutput,
    /// Which parameters are trained.
    pub trainable: Trainable,
    /// Label smoothing: the share of a target that is spread evenly over all tokens or classes in
    /// the loss.
    pub label_smoothing: f32,
    /// Augmentation of training images. Not used by language models.
    pub augmentation: Augmentation,
}

/// Operands of the projections of layers. Heads, embeddings, adapters and attention use operands as
/// stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Products {
    /// Operands as stored.
    #[default]
    AsStored,
    /// bf16 operands converted to 8-bit floats, in the forward pass and in both gradients. Applies
    /// only to [suitable](storm_graph::fp8_suits) shapes: the tokens of a micro-batch and both
    /// widths must be multiples of 16.
    Fp8,
}

/// The projections of a model's layers, and whether each one uses 8-bit floats under
/// [`Products::Fp8`] with this many tokens in a micro-batch.
pub fn fp8_projections(config: &ModelConfig, tokens: usize) -> Vec<(String, bool)> {
    let layout = ParameterLayout::new(config);
    let matrices =
        layout.layer.iter().filter(|spec| spec.shape.len() == 2 && !is_adapter(&spec.name));
    let projections = matrices.filter_map(|spec| {
        let name = spec.name.strip_suffix(".weight")?.to_owned();
        Some((name, fp8_suits(tokens, spec.shape[0], spec.shape[1])))
    });
    projections.collect()
}

/// How samples are placed in a row of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// One sample per row.
    Single,
    /// Several, distinguished by an input `segments` (B, T).
    Segments,
}

/// The output of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelOutput {
    /// The result `loss`, a scalar: cross-entropy against the input `targets` (B, T), divided by
    /// the input `denominator`.
    Loss {
        /// Rows of logits in memory at a time.
        chunk_rows: usize,
    },
    /// The result `logits` (B, T, V).
    Logits,
}

/// Which parameters are trained, by their name in the layout (`attention.qkv.weight`).
#[derive(Clone, Copy, Debug)]
pub enum Trainable {
    /// All.
    All,
    /// Those for which the function returns true.
    Where(fn(&str) -> bool),
}

impl BuildOptions {
    /// Options for training in `dtype`, with defaults for everything else.
    pub fn training(batch: usize, sequence: usize, dtype: DType) -> BuildOptions {
        BuildOptions {
            batch,
            sequence,
            dtype,
            products: Products::AsStored,
            packing: Packing::Single,
            output: ModelOutput::Loss { chunk_rows: DEFAULT_CHUNK_ROWS },
            trainable: Trainable::All,
            label_smoothing: 0.0,
            augmentation: Augmentation::default(),
        }
    }
}

/// Builds the forward program of a model.
///
/// Inputs: `tokens` and `positions` (B, T) i32. With [`Packing::Segments`] also `segments`. For the
/// loss, `targets` and `denominator`. With dropout in trained adapters, [`DROPOUT_INPUT`].
///
/// # Errors
/// The config is not valid, or the sequence is longer than the model allows.
pub fn build(config: &ModelConfig, options: &BuildOptions) -> Result<Program, ModelError> {
    config.validate()?;
    check_size(config, options)?;
    let builder = Builder::new(config, options, Reach::Sequence);
    Ok(builder.program(builder.head()?)?)
}

pub(crate) fn check_size(config: &ModelConfig, options: &BuildOptions) -> Result<(), ModelError> {
    let BuildOptions { batch, sequence, .. } = *options;
    let refuse = |field: &'static str, value: usize, rule: String| {
        Err(ModelError::InvalidConfig { field, value: value.to_string(), rule })
    };
    // Rows are counted in i32 on every device.
    let rows_max = i32::MAX as usize;
    if batch == 0 || sequence == 0 || batch.saturating_mul(sequence) > rows_max {
        let tokens = batch.saturating_mul(sequence);
        return refuse("batch × sequence", tokens, format!("from 1 to {rows_max} tokens"));
    }
    if config.family == Family::Gpt2 && sequence > config.max_positions {
        let rule = format!("at most {}, the positions that the model has", config.max_positions);
        return refuse("sequence", sequence, rule);
    }
    check_lengths(config, sequence, options.packing)
}

/// If rotary frequencies depend on the length of a sequence, samples of different lengths cannot
/// share a row.
fn check_lengths(
    config: &ModelConfig,
    sequence: usize,
    packing: Packing,
) -> Result<(), ModelError> {
    let rotary = config.rotary.as_ref();
    match rotary.and_then(|rotary| rotary.steady_positions(config.max_positions)) {
        Some(limit) if sequence > limit && packing == Packing::Segments => {
            Err(ModelError::InvalidConfig {
                field: "sequence",
                value: sequence.to_string(),
                rule: format!(
                    "at most {limit} for rows of several samples: beyond it, the model's rotary scaling follows the \
                     length of each sample"
                ),
            })
        }
        _ => Ok(()),
    }
}

/// The tokens that a query can attend to.
#[derive(Clone, Copy)]
pub(crate) enum Reach {
    /// Those of its own sequence, which is complete.
    Sequence,
    /// Also those in the cache, from earlier runs.
    Cache {
        /// Number of positions in the cache.
        window: usize,
        /// Prefix of input names. Programs that share caches must not share inputs.
        input_prefix: &'static str,
    },
}

pub(crate) struct Builder<'a> {
    config: &'a ModelConfig,
    options: &'a BuildOptions,
    layout: ParameterLayout,
    reach: Reach,
}

/// The properties in which layers differ.
#[derive(Clone, Copy, PartialEq)]
struct LayerKind<'a> {
    /// Maximum number of tokens that a token attends to.
    window: Option<usize>,
    adapters: Option<&'a LayerAdapters>,
}

/// A section under construction: a graph and the parameters that it may use.
struct Draft<'a> {
    graph: Graph,
    specs: &'a [ParameterSpec],
    options: &'a BuildOptions,
    config: &'a ModelConfig,
    reach: Reach,
    /// The adapters of the layer, if this is a layer.
    adapters: Option<&'a LayerAdapters>,
    /// [`DROPOUT_INPUT`], if anything is dropped.
    dropout: Option<TensorId>,
}

impl<'b> Builder<'b> {
    pub(crate) fn new(
        config: &'b ModelConfig,
        options: &'b BuildOptions,
        reach: Reach,
    ) -> Builder<'b> {
        Builder { config, options, layout: ParameterLayout::new(config), reach }
    }

    fn draft<'a>(&'a self, specs: &'a [ParameterSpec]) -> Draft<'a> {
        let Builder { config, options, reach, .. } = *self;
        Draft { graph: Graph::new(), specs, options, config, reach, adapters: None, dropout: None }
    }

    /// Embedding, layers and the last stage.
    pub(crate) fn program(&self, last: Section) -> Result<Program, GraphError> {
        let layer_count = self.config.layer_count;
        let runs = self.runs();
        // One template for each kind of layer, and one stage for each run of equal layers.
        let mut templates = vec![self.embedding()?];
        let mut template_of: Vec<(LayerKind<'_>, usize)> = Vec::new();
        let mut stages = vec![Stage::once("embedding", 0)];
        for (layers, kind) in &runs {
            let template = match template_of.iter().find(|(known, _)| known == kind) {
                Some(&(_, template)) => template,
                None => {
                    templates.push(self.layer(*kind)?);
                    template_of.push((*kind, templates.len() - 1));
                    templates.len() - 1
                }
            };
            stages.push(match runs.len() {
                1 => Stage::repeated("layers", template, layer_count),
                _ => Stage::part_of("layers", template, layers.clone()),
            });
        }
        stages.push(Stage::once("head", templates.len()));
        templates.push(last);
        Program::new(templates, stages)
    }

    /// Partitions the layers into runs of equal layers.
    fn runs(&self) -> Vec<(Range<usize>, LayerKind<'b>)> {
        let config = self.config;
        let window = config.sliding_window.as_ref().filter(|w| w.tokens < self.span());
        let windowed = window
            .map_or(vec![(0..config.layer_count, false)], |window| window.runs(config.layer_count));
        let mut runs: Vec<(Range<usize>, LayerKind<'b>)> = Vec::new();
        for (layers, is_windowed) in windowed {
            let window = window.filter(|_| is_windowed).map(|window| window.tokens);
            let Some(adapters) = &config.adapters else {
                runs.push((layers, LayerKind { window, adapters: None }));
                continue;
            };
            for layer in layers {
                let kind = LayerKind { window, adapters: Some(adapters.layer(layer)) };
                match runs.last_mut() {
                    Some((run, last)) if *last == kind => run.end += 1,
                    _ => runs.push((layer..layer + 1, kind)),
                }
            }
        }
        runs
    }

    /// The number of tokens that a query could attend to without a window.
    fn span(&self) -> usize {
        match self.reach {
            Reach::Sequence => self.options.sequence,
            Reach::Cache { window, .. } => window,
        }
    }

    /// Token embedding and positions: learned positions are added, rotary positions become a table.
    fn embedding(&self) -> Result<Section, GraphError> {
        let mut draft = self.draft(&self.layout.prologue);
        let tokens = draft.batch_input("tokens"); // (B, T)
        let positions = draft.batch_input("positions"); // (B, T)
        let table = draft.required("embedding.weight"); // (V, C)
        let graph = &mut draft.graph;
        let mut hidden = graph.apply_one("embedding", Op::Embedding { ids: tokens, table })?; // (B, T, C)
        let mut exports = Vec::new();
        let config = self.config;
        match &config.rotary {
            None => {
                let table = draft.required("position_embedding.weight"); // (P, C)
                let graph = &mut draft.graph;
                let op = Op::Embedding { ids: positions, table };
                let position = graph.apply_one("position_embedding", op)?; // (B, T, C)
                hidden = graph.apply_one("hidden", Op::Add { a: hidden, b: position })?;
            }
            Some(rotary) => {
                let frequencies =
                    rotary.frequencies(config.head_dim, config.max_positions, self.span());
                let op = Op::RotaryTable { positions, frequencies };
                let table = graph.apply_one("rotary_table", op)?; // (B, T, P, 2)
                exports.push(("rotary_table".to_owned(), table));
            }
        }
        Ok(Section {
            name: "embedding".to_owned(),
            graph: draft.graph,
            carried_out: vec![Carried::new("hidden", hidden)],
            exports,
            ..Section::default()
        })
    }

    fn layer(&self, kind: LayerKind<'_>) -> Result<Section, GraphError> {
        let LayerKind { window, adapters } = kind;
        let mut draft = Draft { adapters, ..self.draft(&self.layout.layer) };
        let hidden = draft.hidden();
        let (normed, _) = draft.norm("attention_norm", hidden, None)?; // (B, T, C)
        let attended = self.attention(&mut draft, normed, window)?; // (B, T, C)
        let (normed, sum) = draft.norm("mlp_norm", hidden, Some(attended))?;
        let out = match self.config.family {
            Family::Gpt2 => {
                let up = draft.linear("mlp.up", normed, None)?; // (B, T, F)
                let op = Op::Activation { x: up, function: self.config.activation };
                let name = match self.config.activation {
                    ActivationFunction::Gelu | ActivationFunction::GeluTanh => "mlp.gelu",
                    ActivationFunction::Relu => "mlp.relu",
                    ActivationFunction::Silu => "mlp.silu",
                };
                let active = draft.graph.apply_one(name, op)?;
                draft.linear("mlp.down", active, Some(sum))? // (B, T, C)
            }
            _ => {
                let gate_up = draft.linear("mlp.gate_up", normed, None)?; // (B, T, 2F)
                let op = Op::SwiGlu { gate_up, function: self.config.activation };
                let name = match self.config.activation {
                    ActivationFunction::Silu => "mlp.swiglu",
                    ActivationFunction::Gelu | ActivationFunction::GeluTanh => "mlp.geglu",
                    ActivationFunction::Relu => "mlp.reglu",
                };
                let active = draft.graph.apply_one(name, op)?;
                draft.linear("mlp.down", active, Some(sum))? // (B, T, C)
            }
        };
        Ok(Section {
            name: if window.is_some() { "windowed layer" } else { "layer" }.to_owned(),
            graph: draft.graph,
            carried_in: vec![Carried::new("hidden", hidden)],
            carried_out: vec![Carried::new("hidden", out)],
            ..Section::default()
        })
    }

    /// Projections, per-head norm, rotary positions and attention over the normalized residual.
    fn attention(
        &self,
        draft: &mut Draft<'_>,
        normed: TensorId,
        window: Option<usize>,
    ) -> Result<TensorId, GraphError> {
        let config = self.config;
        let heads = HeadLayout {
            query_heads: config.query_heads,
            key_value_heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        let mut qkv = draft.linear("attention.qkv", normed, None)?; // (B, T, (Q+2K)·D)
        let table = config.rotary.as_ref().map(|rotary| {
            let [batch, sequence] = [self.options.batch, self.options.sequence];
            let shape = [batch, sequence, rotary.pairs(config.head_dim), 2];
            draft.graph.input("rotary_table", shape, DType::F32)
        });
        if config.family.has_query_key_norm() {
            let query_weight = draft.required("attention.query_norm.weight"); // (D)
            let key_weight = draft.required("attention.key_norm.weight"); // (D)
            let epsilon = config.norm_eps as f32;
            // The norm rotates too: that saves a pass over queries and keys.
            let op = Op::QkNorm { qkv, query_weight, key_weight, table, heads, epsilon };
            qkv = draft.graph.apply_one("attention.qk_norm", op)?;
        } else if let Some(table) = table {
            let op = Op::Rotary { qkv, table, heads, direction: RotaryDirection::Forward };
            qkv = draft.graph.apply_one("attention.rotary", op)?;
        }
        let scale = 1.0 / (config.head_dim as f32).sqrt();
        let mask = window.map_or(Mask::Causal, |window| Mask::Sliding { window });
        let op = match self.reach {
            Reach::Sequence => {
                let segments = match self.options.packing {
                    Packing::Single => None,
                    Packing::Segments => Some(draft.batch_input("segments")), // (B, T)
                };
                Op::Attention { qkv, segments, heads, mask, scale }
            }
            Reach::Cache { window, .. } => {
                let BuildOptions { batch, dtype, .. } = *self.options;
                let shape = [batch, window, heads.key_value_width()];
                let class = TensorClass::Cache;
                let cache = draft.graph.source("attention.cache", shape, dtype, class);
                let positions = draft.batch_input("positions"); // (B, T)
                Op::CachedAttention { qkv, cache, positions, heads, mask, scale }
            }
        };
        let attended = draft.graph.apply_one("attention", op)?; // (B, T, Q·D)
        draft.linear("attention.output", attended, None)
    }

    pub(crate) fn head(&self) -> Result<Section, GraphError> {
        // A tied head uses the weight of the embedding.
        let specs: Vec<ParameterSpec> =
            self.layout.epilogue.iter().chain(&self.layout.prologue).cloned().collect();
        let mut draft = self.draft(&specs);
        let hidden = draft.hidden();
        let (normed, _) = draft.norm("final_norm", hidden, None)?; // (B, T, C)
        let head = if self.config.tied_embeddings { "embedding.weight" } else { "head.weight" };
        let weight = draft.required(head); // (V, C)
        let results = match self.options.output {
            ModelOutput::Logits => {
                let op = Op::Linear { x: normed, weight, bias: None, addend: None };
                vec![("logits".to_owned(), draft.graph.apply_one("logits", op)?)] // (B, T, V)
            }
            ModelOutput::Loss { chunk_rows } => {
                let targets = draft.batch_input("targets"); // (B, T)
                let graph = &mut draft.graph;
                let denominator = graph.input("denominator", Shape::scalar(), DType::F32);
                let op = Op::HeadLoss {
                    hidden: normed,
                    weight,
                    targets,
                    denominator,
                    chunk_rows,
                    label_smoothing: self.options.label_smoothing,
                    accuracy: Accuracy::Skip,
                };
                let row_loss = graph.apply_one("row_loss", op)?; // (B, T)
                vec![("loss".to_owned(), graph.apply_one("loss", Op::Sum { x: row_loss })?)]
            }
        };
        Ok(Section {
            name: "head".to_owned(),
            graph: draft.graph,
            carried_in: vec![Carried::new("hidden", hidden)],
            results,
            ..Section::default()
        })
    }

    /// A last stage that discards the output of the last layer.
    pub(crate) fn no_head(&self) -> Section {
        let mut draft = self.draft(&[]);
        let hidden = draft.hidden();
        Section {
            name: "head".to_owned(),
            graph: draft.graph,
            carried_in: vec![Carried::new("hidden", hidden)],
            ..Section::default()
        }
    }
}

impl Draft<'_> {
    fn batch_input(&mut self, name: &str) -> TensorId {
        let name = match self.reach {
            Reach::Sequence => name.to_owned(),
            Reach::Cache { input_prefix, .. } => format!("{input_prefix}.{name}"),
        };
        self.graph.input(&name, [self.options.batch, self.options.sequence], DType::I32)
    }

    /// The residual stream, (B, T, C), from the previous section.
    fn hidden(&mut self) -> TensorId {
        let BuildOptions { batch, sequence, dtype, .. } = *self.options;
        let shape = [batch, sequence, self.config.hidden_size];
        self.graph.source("hidden", shape, dtype, TensorClass::Activation)
    }

    /// A parameter, if the layout has it.
    fn optional(&mut self, name: &str) -> Option<TensorId> {
        let spec = self.specs.iter().find(|spec| spec.name == name)?;
        let training = self.training(name);
        Some(self.graph.parameter(name, &spec.shape[..], self.options.dtype, training))
    }

    fn training(&self, name: &str) -> Training {
        match self.options.trainable {
            Trainable::All if self.is_frozen_base(name) => Training::Frozen,
            Trainable::All => Training::Trainable,
            Trainable::Where(learns) if learns(name) => Training::Trainable,
            Trainable::Where(_) => Training::Frozen,
        }
    }

    /// The weight of a projection. A frozen weight may be stored in 8 or 4 bits. The product then
    /// reads dequantized values, which exist only for that product.
    fn weight(&mut self, name: &str) -> Result<TensorId, GraphError> {
        let is_frozen = self.training(name) == Training::Frozen;
        let Some(format) = self.config.base.quantized().filter(|_| is_frozen) else {
            return Ok(self.required(name));
        };
        let spec = self.specs.iter().find(|spec| spec.name == name);
        let spec = spec.unwrap_or_else(|| unreachable!("the layout has no `{name}`"));
        let form = QuantizedRow::new(format, spec.row_elements());
        let shape = [spec.element_count() / form.columns, form.bytes()];
        let rows = self.graph.parameter(name, shape, DType::U8, Training::Frozen);
        let op = Op::Dequantize { rows, form, dtype: self.options.dtype };
        self.graph.apply_one(&format!("{name}.values"), op)
    }

    /// Whether the model has adapters and this parameter is not trained with them.
    fn is_frozen_base(&self, name: &str) -> bool {
        let Some(adapters) = &self.config.adapters else { return false };
        match self.adapters {
            Some(layer) => !layer.saved.iter().any(|saved| saved == name),
            None => !adapters.saves(name),
        }
    }

    fn required(&mut self, name: &str) -> TensorId {
        self.optional(name).unwrap_or_else(|| unreachable!("the layout has no `{name}`"))
    }

    /// Applies `NAME.weight`, and `NAME.bias` if the layout has it.
    fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        addend: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        let weight = self.weight(&format!("{name}.weight"))?;
        let bias = self.optional(&format!("{name}.bias"));
        let adapted = self.adapters.and_then(|layer| layer.linears.iter().find(|l| l.name == name));
        let addend = match adapted {
            Some(linear) => Some(self.low_rank(linear, x, addend)?),
            None => addend,
        };
        match self.in_fp8(x, weight) {
            true => self.fp8_linear(name, x, weight, bias, addend),
            false => self.graph.apply_one(name, Op::Linear { x, weight, bias, addend }),
        }
    }

    /// Whether a projection uses 8-bit floats. Text generation uses the weights as stored.
    fn in_fp8(&self, x: TensorId, weight: TensorId) -> bool {
        let (x, weight) = (self.graph.tensor(x), self.graph.tensor(weight));
        self.options.products == Products::Fp8
            && matches!(self.reach, Reach::Sequence)
            && x.dtype == DType::BF16
            && fp8_suits(x.shape.rows(), weight.shape.rows(), weight.shape.width())
    }

    fn fp8_linear(
        &mut self,
        name: &str,
        x: TensorId,
        weight: TensorId,
        bias: Option<TensorId>,
        addend: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        let learns = self.training(&format!("{name}.weight")) == Training::Trainable;
        // The gradient of the weight reads the activation by columns.
        let form = if learns { Fp8Form::Both } else { Fp8Form::Rows };
        let outputs = self.graph.tensor(weight).shape.rows();
        let output = self.graph.tensor(x).shape.with_width(outputs);
        let x = self.graph.apply_one(&format!("{name}.x"), Op::ToFp8 { x, form })?;
        let op = Op::ToFp8 { x: weight, form: Fp8Form::Rows };
        let weight = self.graph.apply_one(&format!("{name}.weight.codes"), op)?;
        self.graph.apply_one(name, Op::Fp8Linear { x, weight, bias, addend, output })
    }

    /// The output of a projection's adapters, which becomes the addend of the projection: `scale ·
    /// (x · Aᵀ) · Bᵀ + addend`. All modules of a fused projection share two products: one with
    /// their stacked A, and one with a block matrix that has each module's B at its rows and at the
    /// columns of its rank.
    fn low_rank(
        &mut self,
        linear: &AdaptedLinear,
        x: TensorId,
        addend: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        let (rank, dtype) = (linear.rank_sum(), self.options.dtype);
        let shape = Shape::from([rank, linear.inputs]);
        let mut a = self.adapter(&linear.a_name(), shape.clone()); // (R, K)
        if dtype != DType::F32 {
            let places = vec![BlockPlace { row: 0, column: 0, factor: 1.0 }];
            let op = Op::BlockMatrix { parts: vec![a], places, shape, dtype };
            a = self.graph.apply_one(&format!("{}.rounded", linear.a_name()), op)?;
        }
        let (mut parts, mut places, mut column) = (Vec::new(), Vec::new(), 0);
        for slice in &linear.slices {
            let shape = Shape::from([slice.rows.len(), slice.rank]);
            parts.push(self.adapter(&linear.b_name(slice), shape));
            places.push(BlockPlace { row: slice.rows.start, column, factor: slice.scale });
            column += slice.rank;
        }
        let op =
            Op::BlockMatrix { parts, places, shape: Shape::from([linear.outputs, rank]), dtype };
        let b = self.graph.apply_one(&format!("{}.lora_B", linear.name), op)?; // (N, R)
        let x = self.dropped(linear, x)?;
        let op = Op::Linear { x, weight: a, bias: None, addend: None };
        let low = self.graph.apply_one(&format!("{}.low_rank", linear.name), op)?; // (B, T, R)
        let op = Op::Linear { x: low, weight: b, bias: None, addend };
        self.graph.apply_one(&format!("{}.adapted", linear.name), op) // (B, T, N)
    }

    /// The input of a projection's adapters in training. All modules of the projection share the
    /// same dropped elements.
    fn dropped(&mut self, linear: &AdaptedLinear, x: TensorId) -> Result<TensorId, GraphError> {
        let rate = self.config.adapters.as_ref().map_or(0.0, |adapters| adapters.options.dropout);
        let learns = self.adapter_training(&linear.a_name()) == Training::Trainable;
        if rate == 0.0 || !learns || !matches!(self.reach, Reach::Sequence) {
            return Ok(x);
        }
        let matrices = self.specs.iter().filter(|spec| spec.shape.len() == 2);
        let mut names = matrices.map(|spec| spec.name.strip_suffix(".weight"));
        let stream = names.position(|name| name == Some(linear.name.as_str()));
        let stream = stream.unwrap_or_else(|| unreachable!("the layout has `{}`", linear.name));
        let graph = &mut self.graph;
        let random = *self
            .dropout
            .get_or_insert_with(|| graph.input(DROPOUT_INPUT, [DROPOUT_WORDS], DType::I32));
        let (rate, stream) = (rate as f32, stream as u16);
        let op = Op::Dropout { x, random, addend: None, rate, stream };
        self.graph.apply_one(&format!("{}.dropped", linear.name), op)
    }

    /// An adapter's matrix, stored in f32.
    fn adapter(&mut self, name: &str, shape: Shape) -> TensorId {
        let training = self.adapter_training(name);
        self.graph.parameter(name, shape, DType::F32, training)
    }

    fn adapter_training(&self, name: &str) -> Training {
        match self.options.trainable {
            Trainable::Where(learns) if !learns(name) => Training::Frozen,
            _ => Training::Trainable,
        }
    }

    /// The norm of `x + delta`, and that sum (`x` itself without a delta).
    fn norm(
        &mut self,
        name: &str,
        x: TensorId,
        delta: Option<TensorId>,
    ) -> Result<(TensorId, TensorId), GraphError> {
        let weight = self.required(&format!("{name}.weight"));
        let bias = self.optional(&format!("{name}.bias"));
        let kind = match self.config.family {
            Family::Gpt2 => NormKind::Layer,
            _ => NormKind::Rms,
        };
        let epsilon = self.config.norm_eps as f32;
        let outputs = self.graph.apply(name, Op::Norm { x, delta, weight, bias, kind, epsilon })?;
        let sum = if delta.is_some() { outputs[outputs.len() - 1] } else { x };
        Ok((outputs[0], sum))
    }
}

/// Initialization of a new parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initialization {
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        deviation: f32,
    },
    /// Uniform in `-bound..bound`.
    Uniform {
        /// The bound.
        bound: f32,
    },
    /// Uniform around 0, bounded by one over the square root of a row's length: PyTorch's default
    /// for the weights of linear layers and convolutions.
    UniformByRow,
    /// The same value everywhere: 1 for norms, 0 for biases.
    Constant(f32),
}

/// Initialization of the parameter `name` (in the layout) when a model is trained from scratch:
/// normal weights, those that write into the residual stream scaled down by `√(2L)` as in GPT-2.
/// Adapters are initialized as in PEFT: A uniform and B zero, so that the model initially equals
/// its base.
pub fn initialization(config: &ModelConfig, name: &str) -> Initialization {
    if is_adapter(name) {
        return match name.strip_suffix(".lora_A") {
            Some(linear) => Initialization::Uniform { bound: adapter_bound(config, linear) },
            None => Initialization::Constant(0.0),
        };
    }
    if name.ends_with(".bias") {
        return Initialization::Constant(0.0);
    }
    if name.ends_with("norm.weight") {
        return Initialization::Constant(1.0);
    }
    let residual = name.ends_with("attention.output.weight") || name.ends_with("mlp.down.weight");
    let depth = if residual { (2.0 * config.layer_count as f64).sqrt() } else { 1.0 };
    Initialization::Normal { deviation: (config.initializer_range / depth) as f32 }
}

/// The bound of PEFT's `kaiming_uniform_(a=√5)`: one over the square root of A's input width.
fn adapter_bound(config: &ModelConfig, linear: &str) -> f32 {
    let weight = format!("{linear}.weight");
    let layout = ParameterLayout::new(config);
    let spec = layout.layer.iter().find(|spec| spec.name == weight);
    let inputs = spec.map_or(config.hidden_size, ParameterSpec::row_elements);
    (1.0 / (inputs as f64).sqrt()) as f32
}
