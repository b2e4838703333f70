//! Imagined rollouts: every member of the ensemble rolls out every candidate, a jump of some length
//! or none, over the following steps. Each candidate is a task for a core, with its members side by
//! side; nothing is allocated.

use super::lanes::{Columns, Lanes, Onto, product};
use super::network::{ACTED, HEAD, HIDDEN, MEMBERS, Member, Network, OUTPUTS, Tick};
use rayon::prelude::*;
use storm_device::cpu::kernels::elementwise::hyperbolic_tangent;
use storm_device::cpu::kernels::math::{exp, sigmoid};
use storm_device::cpu::kernels::warm_up;

/// Number of jump lengths to choose from.
pub(super) const LENGTHS: usize = 5;

/// The lengths, and last the candidate without a jump.
pub(super) const CANDIDATES: usize = LENGTHS + 1;

/// What a member expects of a jump.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Expected {
    /// Scaled change of the log loss.
    pub(super) change: f32,
    pub(super) deviation: f32,
    /// Probability that it is accepted.
    pub(super) acceptance: f32,
}

impl Expected {
    fn of_heads([change, log_variance, logit]: [f32; OUTPUTS]) -> Expected {
        Expected { change, deviation: exp(0.5 * log_variance), acceptance: sigmoid(logit) }
    }
}

/// The parameters of a rollout.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    /// Lengths of the jumps, as features.
    pub(super) lengths: [f32; LENGTHS],
    /// Steps of the correction after a jump.
    pub(super) correct: usize,
    /// Steps to roll out.
    pub(super) horizon: usize,
    /// Seed of the run, and the step.
    pub(super) bits: (u64, u32),
}

impl Question {
    /// The action before a step of the rollout.
    pub(super) fn action(&self, candidate: usize, step: usize) -> [f32; ACTED] {
        let Some(&length) = self.lengths.get(candidate) else { return [0.0; ACTED] };
        let is_correcting = if step < self.correct { 1.0 } else { 0.0 };
        match step {
            0 => [1.0, length, is_correcting],
            _ => [0.0, 0.0, is_correcting],
        }
    }
}

/// The result of a rollout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Imagined {
    pub(super) jumps: [[Expected; MEMBERS]; LENGTHS],
    /// Per candidate, if its jump is accepted: the scaled change of the log loss beyond its trend,
    /// summed over all steps.
    pub(super) excess: [[f32; MEMBERS]; CANDIDATES],
}

/// The buffers of the kernel.
pub(super) struct Rollouts {
    columns: Columns,
    /// Until the choice, all candidates of a member share one state.
    members: Box<Lanes>,
    candidates: Vec<Lanes>,
}

impl Rollouts {
    pub(super) fn new() -> Rollouts {
        warm_up();
        Rollouts {
            columns: Columns::new(),
            members: Box::new(Lanes::new()),
            candidates: (0..CANDIDATES).map(|_| Lanes::new()).collect(),
        }
    }

    /// Observes ticks and rolls out what follows. All candidates of a member use the same random
    /// draws, so they differ only by the action.
    pub(super) fn imagine<'t>(
        &mut self,
        network: &Network,
        parameters: &[f32],
        ticks: impl Iterator<Item = &'t Tick> + Send,
        question: &Question,
    ) -> Imagined {
        // In the pool, where kernels need not wait for a thread to take them.
        rayon::scope(|_| self.imagine_here(network, parameters, ticks, question))
    }

    fn imagine_here<'t>(
        &mut self,
        network: &Network,
        parameters: &[f32],
        ticks: impl Iterator<Item = &'t Tick>,
        question: &Question,
    ) -> Imagined {
        let Rollouts { columns, members, candidates } = self;
        columns.fill(network, parameters);
        members.clear();
        let mut place = 0;
        for tick in ticks {
            members.step(network, parameters, columns, &tick.action);
            members.observe(network, parameters, &tick.observation, question.bits, place);
            place += 1;
        }
        members.look(network, parameters, columns);
        let mut jumps = [[Expected::default(); MEMBERS]; LENGTHS];
        for (number, (member, trunk)) in network.members.iter().zip(&members.trunk).enumerate() {
            let found = of_jumps(member, parameters, trunk, &question.lengths);
            jumps.iter_mut().zip(found).for_each(|(jumps, found)| jumps[number] = found);
        }
        let (columns, members) = (&*columns, &*members);
        let mut excess = [[0.0; MEMBERS]; CANDIDATES];
        let tasks = excess.par_iter_mut().zip(candidates).enumerate();
        tasks.for_each(|(candidate, (sums, lanes))| {
            lanes.hidden = members.hidden;
            lanes.classes.clone_from(&members.classes);
            for step in 0..question.horizon {
                let action = question.action(candidate, step);
                lanes.step(network, parameters, columns, &action);
                for ((sum, member), hidden) in
                    sums.iter_mut().zip(&network.members).zip(&lanes.hidden)
                {
                    *sum += of_step(member, parameters, hidden, &action);
                }
                if step + 1 < question.horizon {
                    lanes.imagine(network, parameters, question.bits, place + step);
                }
            }
        });
        Imagined { jumps, excess }
    }
}

/// How a member expects a step to change the loss.
fn of_step(
    member: &Member,
    parameters: &[f32],
    hidden: &[f32; HIDDEN],
    action: &[f32; ACTED],
) -> f32 {
    let (of_hidden, of_action, bias) = member.step;
    let mut sum = [0.0];
    product(of_action, parameters, action, Onto::Zero, &mut sum);
    let onto = Onto::Output { bias: &parameters[bias..=bias] };
    product(of_hidden, parameters, hidden, onto, &mut sum);
    sum[0]
}

/// What a member expects of a jump of each length.
fn of_jumps(
    member: &Member,
    parameters: &[f32],
    trunk: &[f32; HIDDEN],
    lengths: &[f32; LENGTHS],
) -> [Expected; LENGTHS] {
    let (of_trunk, of_length, bias) = member.jump;
    let lengths = lengths.map(|length| [length, length * length]);
    let mut sums = [[0.0; HEAD]; LENGTHS];
    let out = sums.as_flattened_mut();
    product(of_length, parameters, lengths.as_flattened(), Onto::Zero, out);
    let onto = Onto::Output { bias: &parameters[bias..bias + HEAD] };
    product(of_trunk, parameters, [*trunk; LENGTHS].as_flattened(), onto, out);
    let mut hidden = [[0.0; HEAD]; LENGTHS];
    hyperbolic_tangent(sums.as_flattened(), hidden.as_flattened_mut());
    let (weights, bias) = member.outputs;
    let mut outputs = [[0.0; OUTPUTS]; LENGTHS];
    let onto = Onto::Bias(&parameters[bias..bias + OUTPUTS]);
    product(weights, parameters, hidden.as_flattened(), onto, outputs.as_flattened_mut());
    outputs.map(Expected::of_heads)
}

#[cfg(test)]
mod tests {
    use super::super::lesson::Lessons;
    use super::super::model::{Model, State};
    use super::super::network::{OBSERVED, Outcome, learners, uniform, words_of};
    use super::*;
    use storm_graph::TensorId;
    use storm_host::allocation::{AllocationMeter, count};

    #[global_allocator]
    static METER: AllocationMeter = AllocationMeter;

    /// The reference: candidate by candidate, op by op, as a graph on the CPU device. A member is a
    /// row, and only its own heads count.
    fn reference(
        network: &Network,
        parameters: &[f32],
        ticks: &[Tick],
        question: &Question,
    ) -> Imagined {
        let mut found = Imagined {
            jumps: [[Expected::default(); MEMBERS]; LENGTHS],
            excess: [[0.0; MEMBERS]; CANDIDATES],
        };
        for candidate in 0..CANDIDATES {
            let mut model = Model::new(network);
            let mut inputs: Vec<(String, Vec<f32>)> = Vec::new();
            let mut shared = |model: &mut Model, name: String, values: &[f32]| {
                let input = model.input(&name, [MEMBERS, values.len()]);
                inputs.push((name, values.repeat(MEMBERS)));
                input
            };
            let mut state = model.zeros(MEMBERS);
            for (place, tick) in ticks.iter().enumerate() {
                let at = format!("tick {place}");
                let action = shared(&mut model, format!("{at} action"), &tick.action);
                let observation =
                    shared(&mut model, format!("{at} observation"), &tick.observation);
                let hidden = model.step(&at, state, action);
                let posterior = model.posterior(&at, hidden, observation);
                state = State { hidden, latent: model.sample(&at, posterior, place) };
            }
            let mut kept: Vec<TensorId> = Vec::new();
            if let Some(&length) = question.lengths.get(candidate) {
                let trunk = model.trunk(state);
                let features = [length, length * length];
                let lengths = shared(&mut model, "lengths".to_owned(), &features);
                kept.push(model.jump(trunk, lengths));
            }
            for step in 0..question.horizon {
                let at = format!("step {step}");
                let action = question.action(candidate, step);
                let action = shared(&mut model, format!("{at} action"), &action);
                let hidden = model.step(&at, state, action);
                kept.push(model.excess(&at, hidden, action));
                let prior = model.prior(&at, hidden);
                let latent = model.sample(&at, prior, ticks.len() + step);
                state = State { hidden, latent };
            }
            let names: Vec<String> =
                kept.iter().map(|&id| model.graph.tensor(id).name.clone()).collect();
            let mut model = model.commit(words_of::ROLLOUT, &kept).expect("memory");
            model.write_parameters(parameters);
            for (name, values) in &inputs {
                model.write(model.slot(name), values);
            }
            model.run(question.bits);
            // (member of the row, member of the heads, heads)
            let own = |name: &String, width: usize, member: usize| {
                let mut values = vec![0.0; MEMBERS * MEMBERS * width];
                model.read(model.slot(name), &mut values);
                values[(member * MEMBERS + member) * width..][..width].to_vec()
            };
            let (of_jump, of_steps) = names.split_at(names.len() - question.horizon);
            for member in 0..MEMBERS {
                for name in of_jump {
                    let heads = own(name, OUTPUTS, member).try_into().expect("three");
                    found.jumps[candidate][member] = Expected::of_heads(heads);
                }
                for name in of_steps {
                    found.excess[candidate][member] += own(name, 1, member)[0];
                }
            }
        }
        found
    }

    fn bits(imagined: &Imagined) -> Vec<u32> {
        let of = |jump: &Expected| [jump.change, jump.deviation, jump.acceptance];
        let jumps = imagined.jumps.as_flattened().iter().flat_map(of);
        jumps.chain(imagined.excess.as_flattened().iter().copied()).map(f32::to_bits).collect()
    }

    fn ticks(count: usize, seed: u64) -> Vec<Tick> {
        let value = |tick: usize, at: usize| {
            2.0 * uniform(seed, 0, words_of::JUMP, tick * (ACTED + OBSERVED) + at) - 1.0
        };
        (0..count)
            .map(|tick| Tick {
                action: std::array::from_fn(|at| value(tick, at)),
                observation: std::array::from_fn(|at| value(tick, ACTED + at)),
                excess: value(tick, 1),
                learners: learners(seed, tick as u32),
                jump: Some((0.5, Outcome { change: value(tick, 2), accepted: tick % 2 == 0 })),
            })
            .collect()
    }

    /// Slightly trained parameters, so that no head is zero.
    fn learned(network: &Network, seed: u64) -> Vec<f32> {
        let mut parameters = network.initial(seed);
        let mut lessons = Lessons::new(network).expect("memory");
        for draw in 0..3 {
            let (_, gradients) = lessons.learn(&parameters, &ticks(12, seed), (seed, draw));
            for (parameter, gradient) in parameters.iter_mut().zip(gradients) {
                *parameter -= 0.3 * gradient;
            }
        }
        parameters
    }

    const QUESTION: Question =
        Question { lengths: [-1.4, -0.7, 0.0, 0.7, 1.4], correct: 2, horizon: 5, bits: (7, 41) };

    #[test]
    fn the_kernel_has_the_bits_of_the_ops_one_by_one() {
        let network = Network::new();
        let mut rollouts = Rollouts::new();
        for (seed, count, correct, horizon) in
            [(7, 1, 0, 1), (8, 12, 2, 6), (9, 5, 9, 4), (10, 0, 1, 3), (11, 3, 1, 0)]
        {
            let parameters = learned(&network, seed);
            let ticks = ticks(count, seed);
            let question = Question { correct, horizon, bits: (seed, 41), ..QUESTION };
            let found = rollouts.imagine(&network, &parameters, ticks.iter(), &question);
            let expected = reference(&network, &parameters, &ticks, &question);
            assert_eq!(bits(&found), bits(&expected), "{count} ticks, {horizon} steps");
        }
    }

    #[test]
    fn members_and_candidates_differ_and_draws_are_those_of_the_step() {
        let network = Network::new();
        let mut rollouts = Rollouts::new();
        let (parameters, ticks) = (learned(&network, 3), ticks(4, 3));
        let mut of =
            |question: &Question| rollouts.imagine(&network, &parameters, ticks.iter(), question);
        let found = of(&QUESTION);
        let mut all: Vec<u32> = found.excess.as_flattened().iter().map(|e| e.to_bits()).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), CANDIDATES * MEMBERS, "every lane has its own path");
        assert_eq!(bits(&of(&QUESTION)), bits(&found), "nothing is left of the last time");
        for other in [(8, 41), (7, 42)] {
            assert_ne!(bits(&of(&Question { bits: other, ..QUESTION })), bits(&found));
        }
        // Equal actions have equal draws.
        let same = of(&Question { lengths: [0.25; LENGTHS], ..QUESTION });
        assert!(same.excess[..LENGTHS].windows(2).all(|pair| pair[0] == pair[1]));
        assert_ne!(same.excess[0], same.excess[LENGTHS], "no jump is something else");
    }

    #[test]
    fn it_allocates_nothing() {
        let network = Network::new();
        let mut rollouts = Rollouts::new();
        let (parameters, ticks) = (network.initial(1), ticks(12, 1));
        // The first call starts the threads.
        rollouts.imagine(&network, &parameters, ticks.iter(), &QUESTION);
        let before = count();
        let found = rollouts.imagine(&network, &parameters, ticks.iter(), &QUESTION);
        assert_eq!(count(), before);
        assert!(found.jumps[0][0].deviation > 0.0);
    }
}
