//! A model as three sections: prologue, one repeated layer, epilogue.
//!
//! The layer is a template: a model of any depth has one layer graph, so that planning does not
//! grow with the depth. Sections meet in *carried* tensors (the residual stream), in *exports* of
//! the prologue that every later section may read (rotary tables), and in parameters and inputs of
//! the same name (tied embeddings).

use crate::autodiff::{GradientRequest, differentiate};
use crate::graph::Phase;
use crate::overwrite::copy_what_is_still_needed;
use crate::{
    DType, Graph, GraphError, Op, Shape, Tensor, TensorClass, TensorId, Training, recompute,
};
use std::collections::{BTreeMap, BTreeSet};

/// One of the three parts of a [`Program`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// `prologue`, `layer` or `epilogue`.
    pub name: &'static str,
    /// Forward nodes and, once differentiated, backward nodes.
    pub graph: Graph,
    /// What the section before hands over.
    pub carried_in: Vec<TensorId>,
    /// What the section hands on; like `carried_in` of the next.
    pub carried_out: Vec<TensorId>,
    /// Tensors that later sections read by name.
    pub exports: Vec<(String, TensorId)>,
    /// Results for the host: `loss`, `logits`.
    pub results: Vec<(String, TensorId)>,
    /// What [`Program::differentiate`] added; none if neither it nor a section before it learns.
    pub backward: Option<SectionBackward>,
}

/// How the backward nodes of a section meet the rest of the program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SectionBackward {
    /// The gradients of `carried_out`, handed over by the section after.
    pub carried_out_gradients: Vec<TensorId>,
    /// The gradients of `carried_in`, handed to the section before; empty if none there learns.
    pub carried_in_gradients: Vec<TensorId>,
    /// One entry per trainable parameter of the section.
    pub parameters: Vec<ParameterGradient>,
}

/// The gradient of one parameter in one section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterGradient {
    /// The parameter.
    pub parameter: TensorId,
    /// The gradient so far, if the section adds to one. Shares memory with `gradient`.
    pub accumulator: Option<TensorId>,
    /// The gradient with this section's part.
    pub gradient: TensorId,
}

/// Whether a micro-batch starts the gradients of a step or adds to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// The first micro-batch of a step: gradients are written.
    Start,
    /// A later one: gradients are added to.
    Continue,
}

/// A whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Before the first layer: embeddings.
    pub prologue: Section,
    /// The repeated layer.
    pub layer: Section,
    /// How often it is repeated.
    pub layer_count: usize,
    /// After the last layer: final norm, head, loss.
    pub epilogue: Section,
}

/// A parameter of a program, once per layer for those of the layer template.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramParameter {
    /// Name within the section: `attention.qkv.weight`.
    pub name: String,
    /// Extents.
    pub shape: Shape,
    /// Storage.
    pub dtype: DType,
    /// Trainable or frozen.
    pub training: Training,
    /// Whether it belongs to the repeated layer.
    pub per_layer: bool,
    /// Its number among the program's parameters; identifies its random streams.
    pub number: u16,
}

impl Program {
    /// Checks that the sections fit together.
    ///
    /// # Errors
    /// Carried tensors that differ between sections, a repeated name, no layer.
    pub fn new(
        prologue: Section,
        layer: Section,
        layer_count: usize,
        epilogue: Section,
    ) -> Result<Program, GraphError> {
        let program = Program { prologue, layer, layer_count, epilogue };
        let error = |section: &str, problem: String| {
            Err(GraphError::Section { section: section.to_owned(), problem })
        };
        if layer_count == 0 || layer_count > usize::from(u16::MAX) {
            return error("layer", format!("must repeat 1 to 65535 times, not {layer_count}"));
        }
        let seams = [
            (&program.prologue, &program.layer),
            (&program.layer, &program.layer),
            (&program.layer, &program.epilogue),
        ];
        for (from, to) in seams {
            let describe = |section: &Section, ids: &[TensorId]| -> Vec<(Shape, DType)> {
                ids.iter()
                    .map(|&id| section.graph.tensor(id))
                    .map(|t| (t.shape.clone(), t.dtype))
                    .collect()
            };
            let (out, taken) = (describe(from, &from.carried_out), describe(to, &to.carried_in));
            if out != taken {
                return error(
                    to.name,
                    format!("takes {taken:?}, but `{}` hands over {out:?}", from.name),
                );
            }
        }
        for section in program.sections() {
            let mut names = BTreeSet::new();
            for id in section.outside_tensors() {
                let name = &section.graph.tensor(id).name;
                if !names.insert(name) {
                    return error(section.name, format!("two outside tensors are named `{name}`"));
                }
            }
        }
        if program.parameters().len() > usize::from(u16::MAX) {
            return error("layer", "has more than 65535 parameters".to_owned());
        }
        Ok(program)
    }

    /// The three sections in forward order.
    pub fn sections(&self) -> [&Section; 3] {
        [&self.prologue, &self.layer, &self.epilogue]
    }

    /// All parameters, each once, in forward order of first use.
    pub fn parameters(&self) -> Vec<ProgramParameter> {
        let mut parameters: Vec<ProgramParameter> = Vec::new();
        for section in self.sections() {
            let per_layer = section.name == self.layer.name;
            for id in section.outside_tensors() {
                let Tensor { name, shape, dtype, class } = section.graph.tensor(id);
                let TensorClass::Parameter(training) = *class else { continue };
                let tied = !per_layer && parameters.iter().any(|p| !p.per_layer && p.name == *name);
                if !tied {
                    parameters.push(ProgramParameter {
                        name: name.clone(),
                        shape: shape.clone(),
                        dtype: *dtype,
                        training,
                        per_layer,
                        number: u16::try_from(parameters.len()).unwrap_or(u16::MAX),
                    });
                }
            }
        }
        parameters
    }

    /// All batch inputs and scalars by name, each once. Exports of the prologue are not among them.
    pub fn inputs(&self) -> Vec<Tensor> {
        let exported: BTreeSet<&str> = self
            .sections()
            .iter()
            .flat_map(|s| &s.exports)
            .map(|(name, _)| name.as_str())
            .collect();
        let mut inputs: Vec<Tensor> = Vec::new();
        for section in self.sections() {
            for id in section.outside_tensors() {
                let tensor = section.graph.tensor(id);
                if tensor.class == TensorClass::Input
                    && !exported.contains(tensor.name.as_str())
                    && !inputs.iter().any(|known| known.name == tensor.name)
                {
                    inputs.push(tensor.clone());
                }
            }
        }
        inputs
    }

    /// What each layer keeps from one run to the next.
    pub fn caches(&self) -> Vec<Tensor> {
        let outside = self.layer.outside_tensors().into_iter();
        let tensors = outside.map(|id| self.layer.graph.tensor(id));
        tensors.filter(|tensor| tensor.class == TensorClass::Cache).cloned().collect()
    }

    /// The same program with its backward pass: the gradient of `loss`, a result of the epilogue,
    /// by every trainable parameter, stored as `gradient_dtype`.
    ///
    /// A parameter that several sections use (tied embeddings) is accumulated in backward order:
    /// the head's part first, the embedding's last.
    ///
    /// # Errors
    /// The epilogue has no result `loss`, or an op on the way has no gradient.
    pub fn differentiate(
        &self,
        accumulation: Accumulation,
        gradient_dtype: DType,
    ) -> Result<Program, GraphError> {
        let mut program = self.clone();
        let loss = program.epilogue.results.iter().find(|(name, _)| name == "loss");
        let Some(&(_, loss)) = loss else {
            return Err(GraphError::Section {
                section: self.epilogue.name.to_owned(),
                problem: "has no result named `loss` to differentiate".to_owned(),
            });
        };
        // The backward pass goes no further up than the first section that learns.
        let prologue_learns = self.prologue.learns();
        let layers_learn = self.layer.learns() || prologue_learns;
        let mut pass = BackwardPass { accumulation, gradient_dtype, started: BTreeSet::new() };
        program.epilogue.differentiate(&mut pass, Some(loss), layers_learn)?;
        if layers_learn {
            program.layer.differentiate(&mut pass, None, true)?;
        }
        if prologue_learns {
            program.prologue.differentiate(&mut pass, None, false)?;
        }
        Ok(program)
    }

    /// Makes the backward pass of every section recompute the saved tensors for which `is_kept`
    /// does not hold; it gets the section and the tensor's name.
    pub fn recompute(&mut self, is_kept: impl Fn(&Section, &Tensor) -> bool) {
        for section in [&mut self.prologue, &mut self.layer, &mut self.epilogue] {
            let before = section.clone();
            // Carried and exported tensors outlive the section: they are at hand in any case.
            let lasting: BTreeSet<TensorId> = before
                .carried_out
                .iter()
                .copied()
                .chain(before.exports.iter().map(|&(_, id)| id))
                .collect();
            recompute(&mut section.graph, |id| {
                lasting.contains(&id) || is_kept(&before, before.graph.tensor(id))
            });
        }
    }
}

/// What the sections of one backward pass share.
struct BackwardPass {
    accumulation: Accumulation,
    gradient_dtype: DType,
    /// Parameters whose gradient a later section (earlier in backward order) has begun: whether they
    /// are a layer's, and their name.
    started: BTreeSet<(bool, String)>,
}

impl Section {
    /// Tensors that come from outside under their own name: inputs, exports, parameters, caches. Carried
    /// tensors and gradients are handed over by position and are not among them.
    pub fn outside_tensors(&self) -> Vec<TensorId> {
        self.graph
            .ids()
            .filter(|&id| self.graph.producer(id).is_none() && !self.carried_in.contains(&id))
            .filter(|&id| {
                matches!(
                    self.graph.tensor(id).class,
                    TensorClass::Input | TensorClass::Parameter(_) | TensorClass::Cache
                )
            })
            .collect()
    }

    /// Later sections read exports as inputs, through which no gradient comes back.
    fn check_exports(&self) -> Result<(), GraphError> {
        let wanted = crate::autodiff::find_wanted(&self.graph, &self.carried_in);
        match self.exports.iter().find(|(_, id)| wanted[id.index()]) {
            None => Ok(()),
            Some((name, _)) => Err(GraphError::Section {
                section: self.name.to_owned(),
                problem: format!(
                    "export `{name}` depends on what learns, and exports have no gradient: hand it \
                     on as a carried tensor"
                ),
            }),
        }
    }

    /// Whether it has a trainable parameter.
    fn learns(&self) -> bool {
        let trainable = TensorClass::Parameter(Training::Trainable);
        self.graph.tensors().iter().any(|tensor| tensor.class == trainable)
    }

    fn differentiate(
        &mut self,
        pass: &mut BackwardPass,
        loss: Option<TensorId>,
        wants_carried: bool,
    ) -> Result<(), GraphError> {
        let gradient_dtype = pass.gradient_dtype;
        let is_layer = self.name == "layer";
        self.check_exports()?;
        let graph = &mut self.graph;
        graph.set_phase(Phase::Backward);
        let mut seeds = Vec::new();
        for &carried in &self.carried_out {
            let Tensor { name, shape, dtype, .. } = graph.tensor(carried).clone();
            let name = format!("{name}.grad_in");
            seeds.push((carried, graph.source(name, shape, dtype, TensorClass::Activation)));
        }
        let carried_out_gradients = seeds.iter().map(|&(_, seed)| seed).collect();
        if let Some(loss) = loss {
            let one = Op::Fill { shape: Shape::scalar(), dtype: DType::F32, value: 1.0 };
            seeds.push((loss, graph.apply_one("loss.grad", one)?));
        }

        let mut accumulators = BTreeMap::new();
        let parameters: Vec<TensorId> = graph
            .ids()
            .filter(|&id| graph.tensor(id).class == TensorClass::Parameter(Training::Trainable))
            .collect();
        for &parameter in &parameters {
            let Tensor { name, shape, .. } = graph.tensor(parameter).clone();
            let first_use = pass.started.insert((is_layer, name.clone()));
            if pass.accumulation == Accumulation::Continue || !first_use {
                let name = format!("{name}.grad_so_far");
                let so_far = graph.source(name, shape, gradient_dtype, TensorClass::Gradient);
                accumulators.insert(parameter, so_far);
            }
        }

        let request = GradientRequest {
            seeds,
            wanted: if wants_carried { self.carried_in.clone() } else { Vec::new() },
            accumulators,
            gradient_dtype,
        };
        let gradients = differentiate(graph, &request)?;
        let results: Vec<TensorId> = self.results.iter().map(|&(_, id)| id).collect();
        copy_what_is_still_needed(graph, &results);
        let mut carried_in_gradients = Vec::new();
        for carried in &request.wanted {
            carried_in_gradients.push(match gradients.get(carried) {
                Some(&gradient) => gradient,
                None => {
                    return Err(GraphError::Section {
                        section: self.name.to_owned(),
                        problem: format!(
                            "nothing that is handed on depends on `{}`",
                            graph.tensor(*carried).name
                        ),
                    });
                }
            });
        }
        let parameters = parameters
            .into_iter()
            .filter_map(|parameter| {
                let accumulator = request.accumulators.get(&parameter).copied();
                let gradient = *gradients.get(&parameter)?;
                Some(ParameterGradient { parameter, accumulator, gradient })
            })
            .collect();
        self.backward =
            Some(SectionBackward { carried_out_gradients, carried_in_gradients, parameters });
        Ok(())
    }
}
