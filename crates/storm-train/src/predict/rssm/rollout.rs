//! Imagined rollouts: every member of the ensemble rolls out every candidate, a jump of some length
//! or none, over the following steps. Each candidate is a task for a core, with its members side by
//! side; nothing is allocated.

use super::lanes::{Columns, Lanes};
use super::network::{
    ACTED, GROUPS, HEAD, HIDDEN, MEMBERS, Member, Network, Tick, uniforms, words_of,
};
use super::tape::{Matrix, dot, sigmoid};
use rayon::prelude::*;

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
    members: Box<Lanes<MEMBERS>>,
    candidates: Vec<Lanes<MEMBERS>>,
}

impl Rollouts {
    pub(super) fn new() -> Rollouts {
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
        ticks: impl Iterator<Item = &'t Tick>,
        question: &Question,
    ) -> Imagined {
        let Rollouts { columns, members, candidates } = self;
        columns.fill(network, parameters);
        members.clear();
        let mut place = 0;
        for tick in ticks {
            let action = tick.action.map(|value| [value; MEMBERS]);
            members.step(network, parameters, columns, &action);
            let draws = draws(question.bits, place);
            members.observe(network, parameters, &tick.observation, &draws);
            place += 1;
        }
        members.look(network, parameters, columns);
        let jumps = question.lengths.map(|length| {
            let trunks =
                std::array::from_fn::<_, MEMBERS, _>(|member| of_lane(&members.trunk, member));
            let mut found = [Expected::default(); MEMBERS];
            for ((found, member), trunk) in found.iter_mut().zip(&network.members).zip(&trunks) {
                *found = of_jump(member, parameters, trunk, length);
            }
            found
        });
        let (columns, members) = (&*columns, &*members);
        let mut excess = [[0.0; MEMBERS]; CANDIDATES];
        let tasks = excess.par_iter_mut().zip(candidates).enumerate();
        tasks.for_each(|(candidate, (sums, lanes))| {
            lanes.hidden = members.hidden;
            lanes.classes.clone_from(&members.classes);
            for step in 0..question.horizon {
                let action = question.action(candidate, step);
                lanes.step(network, parameters, columns, &action.map(|value| [value; MEMBERS]));
                for (lane, sum) in sums.iter_mut().enumerate() {
                    let (of_hidden, of_action, bias) = network.members[lane].step;
                    let of_hidden =
                        dot(row(of_hidden, 0, parameters), &of_lane(&lanes.hidden, lane));
                    let of_action = dot(row(of_action, 0, parameters), &action);
                    *sum += of_hidden + of_action + parameters[bias];
                }
                if step + 1 < question.horizon {
                    lanes.imagine(network, parameters, &draws(question.bits, place + step));
                }
            }
        });
        Imagined { jumps, excess }
    }
}

fn of_lane<const N: usize>(values: &[[f32; N]; HIDDEN], lane: usize) -> [f32; HIDDEN] {
    values.each_ref().map(|lanes| lanes[lane])
}

/// The uniform numbers that sample the latents of a tick, by group and member.
fn draws((seed, step): (u64, u32), place: usize) -> [[f32; MEMBERS]; GROUPS] {
    let mut found = [[0.0; MEMBERS]; GROUPS];
    for member in 0..MEMBERS {
        for (block, groups) in found.chunks_exact_mut(4).enumerate() {
            let block = (place * MEMBERS + member) * (GROUPS / 4) + block;
            let four = uniforms(seed, step, words_of::ROLLOUT, block);
            groups.iter_mut().zip(four).for_each(|(group, uniform)| group[member] = uniform);
        }
    }
    found
}

fn row(matrix: Matrix, number: usize, parameters: &[f32]) -> &[f32] {
    let Matrix { at, columns, .. } = matrix;
    &parameters[at + number * columns..at + (number + 1) * columns]
}

fn of_jump(member: &Member, parameters: &[f32], trunk: &[f32; HIDDEN], length: f32) -> Expected {
    let (of_trunk, of_length, bias) = member.jump;
    let lengths = [length, length * length];
    let hidden: [f32; HEAD] = std::array::from_fn(|at| {
        let of_trunk = dot(row(of_trunk, at, parameters), trunk);
        let of_length = dot(row(of_length, at, parameters), &lengths);
        (of_trunk + of_length + parameters[bias + at]).tanh()
    });
    let (outputs, bias) = member.outputs;
    let [change, log_variance, logit] =
        [0, 1, 2].map(|at| dot(row(outputs, at, parameters), &hidden) + parameters[bias + at]);
    Expected { change, deviation: (0.5 * log_variance).exp(), acceptance: sigmoid(logit) }
}

#[cfg(test)]
mod tests {
    use super::super::network::{OBSERVED, State, drawn, learners, uniform};
    use super::super::tape::{Outcome, Tape};
    use super::*;
    use storm_host::allocation::{AllocationMeter, count};

    #[global_allocator]
    static METER: AllocationMeter = AllocationMeter;

    /// The reference: lane by lane, op by op, on a tape.
    fn reference(
        network: &Network,
        parameters: &[f32],
        ticks: &[Tick],
        question: &Question,
    ) -> Imagined {
        let (seed, step) = question.bits;
        let mut found = Imagined {
            jumps: [[Expected::default(); MEMBERS]; LENGTHS],
            excess: [[0.0; MEMBERS]; CANDIDATES],
        };
        for (number, member) in network.members.iter().enumerate() {
            let draw = |place: usize| {
                move |group| {
                    let index = (place * MEMBERS + number) * GROUPS + group;
                    uniform(seed, step, words_of::ROLLOUT, index)
                }
            };
            for candidate in 0..CANDIDATES {
                let mut tape = Tape::new(parameters);
                let mut state = State::zeros(&mut tape);
                for (place, tick) in ticks.iter().enumerate() {
                    let hidden = network.step(&mut tape, &state, &tick.action);
                    let posterior = network.posterior(&mut tape, hidden, &tick.observation);
                    let latent = drawn(tape.value(posterior), draw(place));
                    state = State { hidden, latent: tape.input(&latent) };
                }
                if let Some(&length) = question.lengths.get(candidate) {
                    let trunk = network.trunk(&mut tape, &state);
                    let heads = Network::jump(&mut tape, member, trunk, length);
                    let [change, log_variance, logit] = [0, 1, 2].map(|at| tape.value(heads)[at]);
                    let deviation = (0.5 * log_variance).exp();
                    found.jumps[candidate][number] =
                        Expected { change, deviation, acceptance: sigmoid(logit) };
                }
                for step in 0..question.horizon {
                    let action = question.action(candidate, step);
                    let hidden = network.step(&mut tape, &state, &action);
                    let excess = Network::excess(&mut tape, member, hidden, &action);
                    found.excess[candidate][number] += tape.value(excess)[0];
                    let prior = network.prior(&mut tape, hidden);
                    let latent = drawn(tape.value(prior), draw(ticks.len() + step));
                    state = State { hidden, latent: tape.input(&latent) };
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
        for draw in 0..3 {
            let (_, gradients) = network.learn(&parameters, &ticks(12, seed), (seed, draw));
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
