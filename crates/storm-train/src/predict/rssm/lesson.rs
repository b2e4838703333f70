//! Lessons: one graph has the losses of a sequence of ticks and their gradients. Weights of the
//! losses are inputs, so that it serves shorter sequences, ticks without a jump, and members that do
//! not learn from a tick.

use super::SEQUENCE;
use super::model::{CommittedModel, Model, State};
use super::network::{ACTED, BALANCE, FREE, MEMBERS, Network, OBSERVED, Tick, words_of};
use std::collections::BTreeMap;
use storm_exec::{ExecError, SlotId};
use storm_graph::{
    DType, GradientRequest, Op, Shape, Tensor, TensorClass, TensorId, differentiate,
};

/// The heads of all members, in all ticks.
const HEADS: usize = SEQUENCE * MEMBERS;

/// The graph on the CPU device.
pub(super) struct Lessons {
    model: CommittedModel,
    slots: LessonSlots,
    /// The gradient of each parameter of the graph.
    gradient_slots: Vec<SlotId>,
    zeros: Vec<f32>,
    gradients: Vec<f32>,
}

/// What a lesson writes and reads.
struct LessonSlots {
    actions: Vec<SlotId>,
    observations: Vec<SlotId>,
    lengths: SlotId,
    excess: SlotId,
    change: SlotId,
    accepted: SlotId,
    tick_weights: SlotId,
    excess_weights: SlotId,
    jump_weights: SlotId,
    loss: SlotId,
}

impl Lessons {
    /// # Errors
    /// There is not enough memory.
    pub(super) fn new(network: &Network) -> Result<Lessons, ExecError> {
        let mut model = Model::new(network);
        let loss = loss(&mut model);
        let parameters: Vec<TensorId> = model.placed.iter().map(|placed| placed.tensor).collect();
        let mut accumulators = BTreeMap::new();
        for &id in &parameters {
            let Tensor { name, shape, dtype, .. } = model.graph.tensor(id).clone();
            let name = gradient_name(&name);
            let sum = model.graph.source(name, shape, dtype, TensorClass::Gradient);
            accumulators.insert(id, sum);
        }
        let one = Op::Fill { shape: Shape::scalar(), dtype: DType::F32, value: 1.0 };
        let seeds = vec![(loss, model.apply("one", one))];
        let request =
            GradientRequest { seeds, wanted: Vec::new(), accumulators, gradient_dtype: DType::F32 };
        differentiate(&mut model.graph, &request).expect("every op of the network has a gradient");
        let elements = |id: &TensorId| model.graph.tensor(*id).shape.elements();
        let zeros = vec![0.0; parameters.iter().map(elements).max().unwrap_or(0)];
        let names: Vec<String> =
            parameters.iter().map(|&id| gradient_name(&model.graph.tensor(id).name)).collect();
        let model = model.commit(words_of::LESSON, &[loss])?;
        let of_tick = |name: &str| {
            (0..SEQUENCE).map(|place| model.slot(&tick_name(name, place))).collect::<Vec<SlotId>>()
        };
        let slots = LessonSlots {
            actions: of_tick("action"),
            observations: of_tick("observation"),
            lengths: model.slot("lengths"),
            excess: model.slot("excess"),
            change: model.slot("change"),
            accepted: model.slot("accepted"),
            tick_weights: model.slot("tick weights"),
            excess_weights: model.slot("excess weights"),
            jump_weights: model.slot("jump weights"),
            loss: model.slot("loss"),
        };
        let gradient_slots = names.iter().map(|name| model.slot(name)).collect();
        let gradients = vec![0.0; network.parameters];
        Ok(Lessons { model, slots, gradient_slots, zeros, gradients })
    }

    /// Mean loss per tick, and its gradients. The initial state is zero. Latents are sampled with
    /// random words of (seed, draw).
    pub(super) fn learn(
        &mut self,
        parameters: &[f32],
        ticks: &[Tick],
        bits: (u64, u32),
    ) -> (f32, &[f32]) {
        let Lessons { model, slots, gradient_slots, zeros, gradients } = self;
        model.write_parameters(parameters);
        model.clear_gradients(gradient_slots, zeros);
        write_ticks(model, slots, ticks);
        model.run(bits);
        model.read_gradients(gradient_slots, gradients);
        let mut loss = [0.0];
        model.read(slots.loss, &mut loss);
        (loss[0], gradients)
    }
}

fn gradient_name(parameter: &str) -> String {
    format!("{parameter}.grad")
}

fn tick_name(name: &str, place: usize) -> String {
    format!("{name} {place}")
}

/// Builds the forward pass. Yields the loss.
fn loss(model: &mut Model) -> TensorId {
    let mut state = model.zeros(1);
    let [mut actions, mut observations, mut posteriors, mut hiddens, mut latents] =
        [const { Vec::new() }; 5];
    for place in 0..SEQUENCE {
        let at = format!("tick {place}");
        let action = model.input(&tick_name("action", place), [1, ACTED]);
        let observation = model.input(&tick_name("observation", place), [1, OBSERVED]);
        let hidden = model.step(&at, state, action);
        let posterior = model.posterior(&at, hidden, observation);
        let latent = model.sample(&at, posterior, place);
        state = State { hidden, latent };
        actions.push(action);
        observations.push(observation);
        posteriors.push(posterior);
        hiddens.push(hidden);
        latents.push(latent);
    }
    // What no later tick depends on is computed for all ticks at once.
    let actions = model.stack("actions", &actions); // (SEQUENCE, ACTED)
    let observations = model.stack("observations", &observations); // (SEQUENCE, OBSERVED)
    let posterior = model.stack("posteriors", &posteriors); // (SEQUENCE, LATENT)
    let hidden = model.stack("hiddens", &hiddens); // (SEQUENCE, HIDDEN)
    let latent = model.stack("latents", &latents); // (SEQUENCE, LATENT)
    let prior = model.prior("all", hidden);
    let divergence = Op::Divergence { posterior, prior, free: FREE, balance: BALANCE };
    let divergence = model.apply("divergence", divergence);
    let trunk = model.trunk(State { hidden, latent });
    let decoded = model.decoded(trunk);
    let squares = Op::SquaredError { x: decoded, target: observations };
    let squares = model.apply("reconstruction", squares);
    let of_ticks = model.apply("tick losses", Op::Add { a: divergence, b: squares });

    let excess = model.excess("all", hidden, actions);
    let target = model.input("excess", [HEADS, 1]);
    let of_steps = model.apply("excess losses", Op::SquaredError { x: excess, target });

    let lengths = model.input("lengths", [SEQUENCE, 2]);
    let heads = model.jump(trunk, lengths);
    let [change, accepted] = ["change", "accepted"].map(|name| model.input(name, [HEADS]));
    let of_jumps = model.apply("jump losses", Op::OutcomeLoss { heads, change, accepted });

    let parts =
        [("tick", of_ticks, SEQUENCE), ("excess", of_steps, HEADS), ("jump", of_jumps, HEADS)];
    let [of_ticks, of_steps, of_jumps] = parts.map(|(name, rows, count)| {
        let weights = model.input(&format!("{name} weights"), [count]);
        let weighted = model.apply(&format!("{name} weighted"), Op::Mul { a: rows, b: weights });
        model.apply(&format!("{name} sum"), Op::Sum { x: weighted })
    });
    let of_heads = model.apply("heads loss", Op::Add { a: of_steps, b: of_jumps });
    model.apply("loss", Op::Add { a: of_ticks, b: of_heads })
}

/// Writes the inputs of a lesson. Ticks that the sequence does not have are zero, with weight zero.
fn write_ticks(model: &mut CommittedModel, slots: &LessonSlots, ticks: &[Tick]) {
    assert!(ticks.len() <= SEQUENCE, "{} ticks", ticks.len());
    let share = 1.0 / ticks.len().max(1) as f32;
    let mut lengths = [[0.0; 2]; SEQUENCE];
    let [mut excess, mut change, mut accepted, mut excess_weights, mut jump_weights] =
        [[[0.0; MEMBERS]; SEQUENCE]; 5];
    let mut tick_weights = [0.0; SEQUENCE];
    for place in 0..SEQUENCE {
        let tick = ticks.get(place);
        let action = tick.map_or([0.0; ACTED], |tick| tick.action);
        let observation = tick.map_or([0.0; OBSERVED], |tick| tick.observation);
        model.write(slots.actions[place], &action);
        model.write(slots.observations[place], &observation);
        let Some(tick) = tick else { continue };
        tick_weights[place] = share;
        excess[place] = [tick.excess; MEMBERS];
        excess_weights[place] = std::array::from_fn(|member| {
            if tick.learners >> member & 1 == 1 { share / MEMBERS as f32 } else { 0.0 }
        });
        if let Some((length, outcome)) = tick.jump {
            lengths[place] = [length, length * length];
            change[place] = [outcome.change; MEMBERS];
            accepted[place] = [if outcome.accepted { 1.0 } else { 0.0 }; MEMBERS];
            jump_weights[place] = excess_weights[place];
        }
    }
    model.write(slots.tick_weights, &tick_weights);
    model.write(slots.lengths, lengths.as_flattened());
    for (slot, values) in [
        (slots.excess, &excess),
        (slots.change, &change),
        (slots.accepted, &accepted),
        (slots.excess_weights, &excess_weights),
        (slots.jump_weights, &jump_weights),
    ] {
        model.write(slot, values.as_flattened());
    }
}

#[cfg(test)]
mod tests {
    use super::super::adam::Adam;
    use super::super::network::{Matrix, Outcome, learners};
    use super::super::rollout::{LENGTHS, Question, Rollouts};
    use super::*;

    fn lessons(network: &Network) -> Lessons {
        Lessons::new(network).expect("memory")
    }

    fn tick(number: usize, jump: Option<(f32, Outcome)>) -> Tick {
        let value = |at: usize| ((number * 7 + at * 3) % 11) as f32 / 11.0 - 0.5;
        Tick {
            action: std::array::from_fn(value),
            observation: std::array::from_fn(|at| value(at + 5)),
            excess: 0.5 * value(5),
            learners: learners(5, number as u32),
            jump,
        }
    }

    fn sequence(count: usize) -> Vec<Tick> {
        let jump = |number: usize| {
            let outcome = Outcome { change: 0.3 - 0.1 * number as f32, accepted: number % 2 == 1 };
            (number % 3 != 1).then_some((0.4 * number as f32 - 1.0, outcome))
        };
        (0..count).map(|number| tick(number, jump(number))).collect()
    }

    /// Of the parameters that samples do not depend on: there, straight-through gradients and the
    /// balance do not matter.
    #[test]
    fn gradients_of_heads_are_those_of_finite_differences() {
        let network = Network::new();
        let mut lessons = lessons(&network);
        // No head is zero.
        let start: Vec<f32> = (0..network.parameters)
            .map(|at| 0.3 * (2.0 * super::super::network::uniform(9, 1, 0, at) - 1.0))
            .collect();
        let ticks = sequence(7);
        let gradients = lessons.learn(&start, &ticks, (5, 3)).1.to_vec();
        let weights = |Matrix { at, rows, columns }: Matrix| at..at + rows * columns;
        let Network { trunk, decoder, members, .. } = network;
        let mut ranges = vec![weights(trunk.0), weights(trunk.1), weights(decoder.0)];
        for member in &members[2..4] {
            ranges.extend([member.jump.0, member.jump.1, member.outputs.0].map(weights));
            ranges.extend([member.step.0, member.step.1].map(weights));
            let outputs = member.outputs.1;
            ranges.extend([member.jump.2..member.jump.2 + 16, outputs..outputs + 3]);
        }
        for (number, range) in ranges.into_iter().enumerate() {
            let direction = |at: usize| ((at * 37 % 29) as f32 - 14.0) / 14.0;
            let mut loss_at = |by: f32| {
                let mut moved = start.clone();
                range.clone().for_each(|at| moved[at] += by * direction(at));
                f64::from(lessons.learn(&moved, &ticks, (5, 3)).0)
            };
            let step = if range.len() > 100 { 2e-3 } else { 2e-2 };
            let expected = (loss_at(step) - loss_at(-step)) / f64::from(2.0 * step);
            let terms = range.clone().map(|at| f64::from(gradients[at] * direction(at)));
            let (found, size) = (terms.clone().sum::<f64>(), terms.map(f64::abs).sum::<f64>());
            assert!(size > 1e-4, "{number}: {size}");
            assert!((found - expected).abs() < 0.02 * size, "{number}: {found} is not {expected}");
        }
    }

    #[test]
    fn a_shorter_sequence_is_a_lesson_of_its_own() {
        let network = Network::new();
        let parameters = network.initial(5);
        let mut one = lessons(&network);
        let mut of = |count: usize| {
            let (loss, gradients) = one.learn(&parameters, &sequence(count), (5, 3));
            (loss, gradients.to_vec())
        };
        let (first, whole) = (of(4), of(SEQUENCE));
        assert!(of(4) == first, "nothing is left of the lesson before");
        assert_ne!(first, whole);
        // A tick more is another loss, of which it has an equal share.
        let with = |ticks: &[Tick]| lessons(&network).learn(&parameters, ticks, (5, 3)).0;
        let mut ticks = sequence(2);
        ticks[1] = Tick { learners: 0, jump: None, ..ticks[1] };
        let before = with(&ticks);
        ticks[1].learners = 0xff;
        let off = ticks[1].excess;
        // The heads of steps are zero at first.
        let expected = before + 0.5 * off * off / 2.0;
        assert!((with(&ticks) - expected).abs() < 1e-5, "{before} {off}");
    }

    #[test]
    fn members_learn_from_their_ticks_only() {
        let network = Network::new();
        let parameters = network.initial(5);
        let outcome = Outcome { change: 0.5, accepted: true };
        let one = Tick { learners: 0b100, ..tick(1, Some((0.5, outcome))) };
        let mut lessons = lessons(&network);
        let mut check = |tick: Tick, learns_jump: bool| {
            let (_, gradients) = lessons.learn(&parameters, &[tick], (5, 0));
            for (number, member) in network.members.iter().enumerate() {
                let Matrix { at, rows, columns } = member.outputs.0;
                let of_jump = gradients[at..at + rows * columns].iter().any(|g| *g != 0.0);
                let of_step = gradients[member.step.2] != 0.0;
                let learns = number == 2;
                assert_eq!((of_jump, of_step), (learns && learns_jump, learns), "{number}");
            }
        };
        check(one, true);
        check(Tick { jump: None, ..one }, false);
    }

    /// Longer jumps are refused, and shorter ones lower the loss.
    #[test]
    fn what_becomes_of_jumps_is_learned() {
        let network = Network::new();
        let mut adam = Adam::new(network.initial(5));
        let mut lessons = lessons(&network);
        let mut losses = Vec::new();
        for draw in 0..400_u32 {
            let ticks: Vec<Tick> = (0..4)
                .map(|place| {
                    let length = if (draw as usize + place).is_multiple_of(2) { -1.0 } else { 1.0 };
                    let accepted = length < 0.0;
                    let change = if accepted { -0.5 } else { 0.8 };
                    tick(draw as usize + place, Some((length, Outcome { change, accepted })))
                })
                .collect();
            let (loss, gradients) = lessons.learn(adam.parameters(), &ticks, (5, draw));
            losses.push(loss);
            adam.step(gradients);
        }
        assert!(losses[399] < losses[0] - 1.0, "{} to {}", losses[0], losses[399]);
        let ticks = [tick(1, None), tick(2, None)];
        let mut lengths = [1.0; LENGTHS];
        lengths[0] = -1.0;
        let question = Question { lengths, correct: 0, horizon: 0, bits: (5, 999) };
        let found = Rollouts::new().imagine(&network, adam.parameters(), ticks.iter(), &question);
        for (short, long) in found.jumps[0].iter().zip(&found.jumps[1]) {
            assert!(short.acceptance > 0.8 && long.acceptance < 0.2, "{short:?} {long:?}");
            assert!(short.change < -0.2 && long.change > 0.4, "{short:?} {long:?}");
        }
    }
}
