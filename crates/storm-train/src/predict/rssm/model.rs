//! The network as a graph. Its parameters are those of [`Network`]; the heads of all members are
//! stacked.

use super::network::{
    CLASSES, HEAD, HIDDEN, LATENT, MEMBERS, Matrix, Member, Network, OBSERVED, OUTPUTS, UNIFORM,
};
use std::ops::Range;
use storm_device::cpu::CpuDevice;
use storm_exec::{ExecError, Resident, Schedule, ScheduleId, SlotId, Slots};
use storm_graph::random::{SEED_WORDS, Seed};
use storm_graph::{BlockPlace, DType, Graph, Op, Shape, Tensor, TensorId, Training};

/// A graph under construction.
pub(super) struct Model {
    pub(super) graph: Graph,
    pub(super) placed: Vec<Placed>,
    /// Seed and step of the samples.
    random: TensorId,
    latent_in: TensorId,
    action_in: (TensorId, TensorId),
    /// Weights of the state, weights of the input, and bias, of reset, update and candidate.
    gates: [(TensorId, TensorId, TensorId); 3],
    prior: (TensorId, TensorId),
    /// Weights of the observation, weights of the state, and bias.
    posterior: (TensorId, TensorId, TensorId),
    /// Weights of the latents, weights of the state, and bias.
    trunk: (TensorId, TensorId, TensorId),
    decoder: (TensorId, TensorId),
    /// Weights of the length, weights of the trunk, and bias.
    jump: (TensorId, TensorId, TensorId),
    outputs: (TensorId, TensorId),
    /// Weights of the action, weights of the state, and bias.
    step: (TensorId, TensorId, TensorId),
}

/// A part of a parameter: its first element in the tensor, and its range in the network.
type Part = (usize, Range<usize>);

/// A parameter of the graph, and where its elements are among those of the network.
pub(super) struct Placed {
    pub(super) tensor: TensorId,
    parts: Vec<Part>,
}

/// State after a tick: (rows, HIDDEN) and (rows, LATENT).
#[derive(Clone, Copy)]
pub(super) struct State {
    pub(super) hidden: TensorId,
    pub(super) latent: TensorId,
}

/// Adds parameters to a graph.
struct Parameters<'g> {
    graph: &'g mut Graph,
    placed: Vec<Placed>,
}

impl Parameters<'_> {
    fn add(&mut self, name: &str, shape: impl Into<Shape>, parts: Vec<Part>) -> TensorId {
        let tensor = self.graph.parameter(name, shape, DType::F32, Training::Trainable);
        self.placed.push(Placed { tensor, parts });
        tensor
    }

    /// Matrices of the same shape, one below the other.
    fn stacked(&mut self, name: &str, matrices: &[Matrix]) -> TensorId {
        let Matrix { rows, columns, .. } = matrices[0];
        let part = |(number, matrix): (usize, &Matrix)| {
            (number * rows * columns, matrix.at..matrix.at + rows * columns)
        };
        let parts = matrices.iter().enumerate().map(part).collect();
        self.add(name, [matrices.len() * rows, columns], parts)
    }

    /// Matrices of the same shape along the diagonal. Elsewhere it is zero.
    fn diagonal(&mut self, name: &str, matrices: &[Matrix]) -> TensorId {
        let Matrix { rows, columns, .. } = matrices[0];
        let width = matrices.len() * columns;
        let part = |row: usize| {
            let (number, of_matrix) = (row / rows, row % rows);
            let at = matrices[number].at + of_matrix * columns;
            (row * width + number * columns, at..at + columns)
        };
        let height = matrices.len() * rows;
        self.add(name, [height, width], (0..height).map(part).collect())
    }

    /// Vectors of the same length, one after the other.
    fn biases(&mut self, name: &str, starts: &[usize], len: usize) -> TensorId {
        let part = |(number, &at): (usize, &usize)| (number * len, at..at + len);
        let parts = starts.iter().enumerate().map(part).collect();
        self.add(name, [starts.len() * len], parts)
    }
}

impl Model {
    pub(super) fn new(network: &Network) -> Model {
        let mut graph = Graph::new();
        let random = graph.input("random", [SEED_WORDS], DType::I32);
        let mut of = Parameters { graph: &mut graph, placed: Vec::new() };
        let heads = |matrix: fn(&Member) -> Matrix| network.members.map(|m| matrix(&m));
        let starts = |bias: fn(&Member) -> usize| network.members.map(|m| bias(&m));
        let gate = |of: &mut Parameters<'_>, number: usize| {
            let (of_input, of_hidden, bias) = network.gates[number];
            let name = ["reset", "update", "candidate"][number];
            (
                of.stacked(&format!("{name}.hidden"), &[of_hidden]),
                of.stacked(&format!("{name}.input"), &[of_input]),
                of.biases(&format!("{name}.bias"), &[bias], HIDDEN),
            )
        };
        let (posterior, trunk) = (network.posterior, network.trunk);
        let model = Model {
            random,
            latent_in: of.stacked("latent_in", &[network.latent_in]),
            action_in: (
                of.stacked("action_in", &[network.action_in]),
                of.biases("bias_in", &[network.bias_in], HIDDEN),
            ),
            gates: [0, 1, 2].map(|number| gate(&mut of, number)),
            prior: (
                of.stacked("prior.hidden", &[network.prior.0]),
                of.biases("prior.bias", &[network.prior.1], LATENT),
            ),
            posterior: (
                of.stacked("posterior.observation", &[posterior.1]),
                of.stacked("posterior.hidden", &[posterior.0]),
                of.biases("posterior.bias", &[posterior.2], LATENT),
            ),
            trunk: (
                of.stacked("trunk.latent", &[trunk.1]),
                of.stacked("trunk.hidden", &[trunk.0]),
                of.biases("trunk.bias", &[trunk.2], HIDDEN),
            ),
            decoder: (
                of.stacked("decoder.trunk", &[network.decoder.0]),
                of.biases("decoder.bias", &[network.decoder.1], OBSERVED),
            ),
            jump: (
                of.stacked("jump.length", &heads(|member| member.jump.1)),
                of.stacked("jump.trunk", &heads(|member| member.jump.0)),
                of.biases("jump.bias", &starts(|member| member.jump.2), HEAD),
            ),
            outputs: (
                of.diagonal("outputs.jump", &heads(|member| member.outputs.0)),
                of.biases("outputs.bias", &starts(|member| member.outputs.1), OUTPUTS),
            ),
            step: (
                of.stacked("step.action", &heads(|member| member.step.1)),
                of.stacked("step.hidden", &heads(|member| member.step.0)),
                of.biases("step.bias", &starts(|member| member.step.2), 1),
            ),
            placed: of.placed,
            graph: Graph::new(),
        };
        Model { graph, ..model }
    }

    pub(super) fn apply(&mut self, name: &str, op: Op<TensorId>) -> TensorId {
        self.graph.apply_one(name, op).expect("the shapes of the network fit")
    }

    pub(super) fn input(&mut self, name: &str, shape: impl Into<Shape>) -> TensorId {
        self.graph.input(name, shape, DType::F32)
    }

    /// The state before the first tick.
    pub(super) fn zeros(&mut self, rows: usize) -> State {
        let mut zeros = |name: &str, width: usize| {
            let (shape, dtype, value) = (Shape::from([rows, width]), DType::F32, 0.0);
            self.apply(name, Op::Fill { shape, dtype, value })
        };
        State { hidden: zeros("no hidden", HIDDEN), latent: zeros("no latent", LATENT) }
    }

    /// x · weightᵀ + bias, and the product of other operands, which is rounded before.
    fn sum(
        &mut self,
        name: &str,
        (other, other_weight): (TensorId, TensorId),
        (x, weight, bias): (TensorId, TensorId, TensorId),
    ) -> TensorId {
        let part = Op::Linear { x: other, weight: other_weight, bias: None, addend: None };
        let addend = Some(self.apply(&format!("{name} part"), part));
        self.apply(name, Op::Linear { x, weight, bias: Some(bias), addend })
    }

    /// Advances the GRU. Yields the hidden state.
    pub(super) fn step(&mut self, at: &str, state: State, action: TensorId) -> TensorId {
        let State { hidden, latent } = state;
        let (of_action, bias) = self.action_in;
        let sum = self.sum(
            &format!("{at} input sum"),
            (latent, self.latent_in),
            (action, of_action, bias),
        );
        let input = self.apply(&format!("{at} input"), Op::Tanh { x: sum });
        let gate = |model: &mut Model, number: usize, hidden: TensorId| {
            let (of_hidden, of_input, bias) = model.gates[number];
            let name = format!("{at} gate {number}");
            model.sum(&name, (hidden, of_hidden), (input, of_input, bias))
        };
        let reset = gate(self, 0, hidden);
        let kept = self.apply(&format!("{at} kept"), Op::GruReset { gate: reset, hidden });
        let update = gate(self, 1, hidden);
        let candidate = gate(self, 2, kept);
        self.apply(&format!("{at} hidden"), Op::GruState { gate: update, candidate, hidden })
    }

    fn categorical(&mut self, name: &str, logits: TensorId) -> TensorId {
        self.apply(name, Op::Categorical { logits, classes: CLASSES, uniform: UNIFORM })
    }

    /// Probabilities of latents before an observation.
    pub(super) fn prior(&mut self, at: &str, hidden: TensorId) -> TensorId {
        let (weight, bias) = self.prior;
        let op = Op::Linear { x: hidden, weight, bias: Some(bias), addend: None };
        let logits = self.apply(&format!("{at} prior logits"), op);
        self.categorical(&format!("{at} prior"), logits)
    }

    /// Probabilities of latents after an observation.
    pub(super) fn posterior(
        &mut self,
        at: &str,
        hidden: TensorId,
        observation: TensorId,
    ) -> TensorId {
        let (of_observation, of_hidden, bias) = self.posterior;
        let name = format!("{at} posterior logits");
        let logits = self.sum(&name, (observation, of_observation), (hidden, of_hidden, bias));
        self.categorical(&format!("{at} posterior"), logits)
    }

    /// Latents. Each place in a sequence has its own random bits.
    pub(super) fn sample(&mut self, at: &str, probabilities: TensorId, place: usize) -> TensorId {
        let (random, classes, stream) = (self.random, CLASSES, place as u16);
        let op = Op::SampleClass { probabilities, random, classes, stream };
        self.apply(&format!("{at} latent"), op)
    }

    /// The input of the heads.
    pub(super) fn trunk(&mut self, state: State) -> TensorId {
        let (of_latent, of_hidden, bias) = self.trunk;
        let State { hidden, latent } = state;
        let sum = self.sum("trunk sum", (latent, of_latent), (hidden, of_hidden, bias));
        self.apply("trunk", Op::Tanh { x: sum })
    }

    /// The reconstructed observation.
    pub(super) fn decoded(&mut self, trunk: TensorId) -> TensorId {
        let (weight, bias) = self.decoder;
        let op = Op::Linear { x: trunk, weight, bias: Some(bias), addend: None };
        self.apply("decoded", op)
    }

    /// What each member expects of a jump, given features of its length (rows, 2): mean, log
    /// variance and logit of acceptance of each. Yields (rows · MEMBERS, OUTPUTS).
    pub(super) fn jump(&mut self, trunk: TensorId, lengths: TensorId) -> TensorId {
        let (of_length, of_trunk, bias) = self.jump;
        let sum = self.sum("jump sum", (lengths, of_length), (trunk, of_trunk, bias));
        let x = self.apply("jump", Op::Tanh { x: sum });
        let (weight, bias) = self.outputs;
        let op = Op::Linear { x, weight, bias: Some(bias), addend: None };
        let outputs = self.apply("outputs", op);
        self.by_member("heads", outputs, OUTPUTS)
    }

    /// How each member expects a step to change the loss. Yields (rows · MEMBERS, 1).
    pub(super) fn excess(&mut self, at: &str, hidden: TensorId, action: TensorId) -> TensorId {
        let (of_action, of_hidden, bias) = self.step;
        let name = format!("{at} excess");
        let sum = self.sum(&name, (action, of_action), (hidden, of_hidden, bias));
        self.by_member(&format!("{at} excess by member"), sum, 1)
    }

    fn by_member(&mut self, name: &str, x: TensorId, width: usize) -> TensorId {
        let rows = self.graph.tensor(x).shape.rows();
        self.apply(name, Op::Reshape { x, shape: Shape::from([rows * MEMBERS, width]) })
    }

    /// Rows, one below the other.
    pub(super) fn stack(&mut self, name: &str, parts: &[TensorId]) -> TensorId {
        let place = |row: usize| BlockPlace { row, column: 0, factor: 1.0 };
        let shape = Shape::from([parts.len(), self.graph.tensor(parts[0]).shape.width()]);
        let (parts, places) = (parts.to_vec(), (0..parts.len()).map(place).collect());
        self.apply(name, Op::BlockMatrix { parts, places, shape, dtype: DType::F32 })
    }

    /// Places the graph on the CPU device. Inputs and parameters can be written, and the tensors in
    /// `kept` can be read after a run. `words_of` selects the random bits of samples.
    ///
    /// # Errors
    /// There is not enough memory.
    pub(super) fn commit(
        self,
        words_of: u16,
        kept: &[TensorId],
    ) -> Result<CommittedModel, ExecError> {
        let Model { graph, placed, random, .. } = self;
        let mut slots = Slots::new();
        let is_kept = |id: TensorId| graph.producer(id).is_none() || kept.contains(&id);
        for id in graph.ids().filter(|&id| is_kept(id)) {
            slots.declare(graph.tensor(id).clone())?;
        }
        let slot = |id: TensorId| slots.get(&graph.tensor(id).name);
        let random = slot(random)?;
        let placed = placed.into_iter().map(|Placed { tensor, parts }| Ok((slot(tensor)?, parts)));
        let placed = placed.collect::<Result<_, ExecError>>()?;
        let mut schedule = Schedule::default();
        schedule.add_graph(graph, words_of, |tensor: &Tensor| slots.find(&tensor.name))?;
        let resident = Resident::new(slots, vec![schedule], CpuDevice::new)?;
        Ok(CommittedModel { schedule: resident.schedule(0), resident, random, placed })
    }
}

/// A graph on the CPU device.
pub(super) struct CommittedModel {
    resident: Resident<CpuDevice>,
    schedule: ScheduleId,
    random: SlotId,
    placed: Vec<(SlotId, Vec<Part>)>,
}

const FITS: &str = "the shapes of the network fit";

impl CommittedModel {
    pub(super) fn slot(&self, name: &str) -> SlotId {
        self.resident.slots().get(name).expect(FITS)
    }

    pub(super) fn write(&mut self, slot: SlotId, values: &[f32]) {
        self.resident.write(slot, values).expect(FITS);
    }

    pub(super) fn read(&self, slot: SlotId, values: &mut [f32]) {
        self.resident.read(slot, values).expect(FITS);
    }

    pub(super) fn write_parameters(&mut self, parameters: &[f32]) {
        for (slot, parts) in &self.placed {
            for (first, range) in parts {
                let values = &parameters[range.clone()];
                self.resident.write_part(*slot, *first, values).expect(FITS);
            }
        }
    }

    /// Sets the gradients of all parameters to zero. `slots` has them, in the order of parameters.
    pub(super) fn clear_gradients(&mut self, slots: &[SlotId], zeros: &[f32]) {
        for slot in slots {
            let elements = self.resident.slots().tensor(*slot).shape.elements();
            self.resident.write(*slot, &zeros[..elements]).expect(FITS);
        }
    }

    /// Reads the gradients of all parameters.
    pub(super) fn read_gradients(&self, slots: &[SlotId], gradients: &mut [f32]) {
        for (slot, (_, parts)) in slots.iter().zip(&self.placed) {
            for (first, range) in parts {
                let values = &mut gradients[range.clone()];
                self.resident.read_part(*slot, *first, values).expect(FITS);
            }
        }
    }

    /// Runs the graph, with the random bits of (seed, draw).
    pub(super) fn run(&mut self, (seed, draw): (u64, u32)) {
        let words = Seed { seed, step: draw }.to_words();
        self.resident.write(self.random, &words).expect(FITS);
        self.resident.run(self.schedule).expect("kernels of the CPU do not fail");
    }
}
