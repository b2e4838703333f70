//! Updates of parameters, in place.

mod observed;
mod warp_sum;

use super::element::Element;
use super::shared::SharedMut;
use crate::simd_dispatch;
use half::bf16;
use observed::{Seen, observed_update};
use rayon::prelude::*;
use std::ops::Range;
use storm_graph::random::{Purpose, Seed, Stream, round_to_bf16, words, words_of_blocks};
use storm_graph::{
    AdamWParameters, MOMENT_GROUP, MOMENT_GROUP_BYTES, MomentumDirection, OBSERVED_BLOCK,
    OBSERVED_RUN, OBSERVED_SHARE, OBSERVED_SUMS, Rounding, SgdParameters, StepScalars,
    decode_first_moment, decode_second_moment, encode_first_moment, encode_second_moment,
    is_observed, moment_scale,
};

/// Elements per task. Even, so that a task starts on a block of random words.
const CHUNK: usize = 1 << 14;

/// Elements whose random bits are computed together. Even.
const TOGETHER: usize = 64;

/// The source of the random bits for stochastic rounding.
#[derive(Clone, Copy)]
pub struct RandomBits {
    /// Seed of the run and the update.
    pub seed: Seed,
    /// Stream of the parameter.
    pub stream: Stream,
    /// First element of the updated piece in the parameter. Even.
    pub first_element: usize,
}

/// Random bits of one element: for the parameter and its two moments.
#[derive(Clone, Copy, Default)]
struct Bits {
    parameter: u16,
    first: u16,
    second: u16,
}

impl RandomBits {
    /// Bits of the [`TOGETHER`] elements that start at `2·pair`: for the parameter, the first
    /// moment and the second moment.
    #[inline(always)]
    fn together(&self, pair: usize) -> [[u16; TOGETHER]; 3] {
        let block = (self.first_element / 2 + pair) as u64;
        let words =
            words_of_blocks::<{ TOGETHER / 2 }>(self.seed, Purpose::Rounding, self.stream, block);
        let mut bits = [[0; TOGETHER]; 3];
        for at in 0..TOGETHER / 2 {
            for odd in 0..2 {
                let (low, high) = (words[2 * odd][at], words[2 * odd + 1][at]);
                bits[0][2 * at + odd] = low as u16;
                bits[1][2 * at + odd] = (low >> 16) as u16;
                bits[2][2 * at + odd] = high as u16;
            }
        }
        bits
    }

    /// Bits of the piece's elements `2·pair` and `2·pair + 1`, which take two words each.
    fn pair(&self, pair: usize) -> [Bits; 2] {
        let block = (self.first_element / 2 + pair) as u64;
        let words = words(self.seed, Purpose::Rounding, self.stream, block);
        [[words[0], words[1]], [words[2], words[3]]].map(|[low, high]| Bits {
            parameter: low as u16,
            first: (low >> 16) as u16,
            second: high as u16,
        })
    }
}

/// How updated values are stored.
#[derive(Clone, Copy)]
pub struct Storage {
    /// Rounding of the parameter.
    pub parameter: Rounding,
    /// Rounding of both moments.
    pub moments: Rounding,
    /// Required if either is stochastic.
    pub random: Option<RandomBits>,
}

/// A storage type that supports stochastic rounding.
pub trait Stored: Element {
    /// Adds `bits` below the last kept bit and truncates. Exact types ignore `bits`.
    fn round_stochastic(value: f32, bits: u16) -> Self;
}

impl Stored for f32 {
    #[inline(always)]
    fn round_stochastic(value: f32, _bits: u16) -> f32 {
        value
    }
}

impl Stored for bf16 {
    #[inline(always)]
    fn round_stochastic(value: f32, bits: u16) -> bf16 {
        round_to_bf16(value, bits)
    }
}

#[inline(always)]
fn store<E: Stored>(rounding: Rounding, value: f32, bits: u16) -> E {
    match rounding {
        Rounding::Nearest => E::from_f32(value),
        Rounding::Stochastic => E::round_stochastic(value, bits),
    }
}

/// The factors of one AdamW update, computed once.
#[derive(Clone, Copy)]
struct Factors {
    beta1: f32,
    beta2: f32,
    epsilon: f32,
    /// `1 - lr · weight_decay`.
    keep: f32,
    /// `lr / (1 - beta1^t)`.
    step: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    second_scale: f32,
    clip: f32,
}

impl Factors {
    fn new(hyper: &AdamWParameters, scalars: &StepScalars, clip: f32) -> Factors {
        Factors {
            beta1: hyper.beta1,
            beta2: hyper.beta2,
            epsilon: hyper.epsilon,
            keep: 1.0 - scalars.learning_rate * hyper.weight_decay,
            step: scalars.learning_rate / scalars.first_correction,
            second_scale: 1.0 / scalars.second_correction.sqrt(),
            clip,
        }
    }

    /// The new value and moments of one element.
    #[inline(always)]
    fn update(&self, value: f32, gradient: f32, first: f32, second: f32) -> (f32, f32, f32) {
        let (first, second) = self.moments(gradient, first, second);
        (self.value(value, first, second.sqrt()), first, second)
    }

    /// The new moments.
    #[inline(always)]
    fn moments(&self, gradient: f32, first: f32, second: f32) -> (f32, f32) {
        let gradient = gradient * self.clip;
        let first = self.beta1 * first + (1.0 - self.beta1) * gradient;
        let second = self.beta2 * second + (1.0 - self.beta2) * gradient * gradient;
        (first, second)
    }

    /// The new value, from the new first moment and the root of the new second one.
    #[inline(always)]
    fn value(&self, value: f32, first: f32, root: f32) -> f32 {
        value * self.keep - self.change(first, root)
    }

    /// The change that is subtracted, without weight decay.
    #[inline(always)]
    fn change(&self, first: f32, root: f32) -> f32 {
        self.step * first / (root * self.second_scale + self.epsilon)
    }
}

simd_dispatch! {
    fn adamw_nearest[P: Stored, G: Element, M: Stored](
        factors: Factors, p: &mut [P], g: &[G], m: &mut [M], v: &mut [M],
    ) {
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let (value, first, second) =
                factors.update(p.to_f32(), g.to_f32(), m.to_f32(), v.to_f32());
            *p = P::from_f32(value);
            *m = M::from_f32(first);
            *v = M::from_f32(second);
        }
    }

    fn adamw_master[P: Stored, G: Element, M: Stored](
        factors: Factors, p: &mut [P], master: &mut [f32], g: &[G], m: &mut [M], v: &mut [M],
    ) {
        let state = master.iter_mut().zip(m).zip(v);
        for ((p, g), ((master, m), v)) in p.iter_mut().zip(g).zip(state) {
            let (value, first, second) =
                factors.update(*master, g.to_f32(), m.to_f32(), v.to_f32());
            *master = value;
            *p = P::from_f32(value);
            *m = M::from_f32(first);
            *v = M::from_f32(second);
        }
    }
}

/// Updates a chunk, rounding to nearest, and writes the sums over its blocks, see
/// [`OBSERVED_SUMS`]. One pass: they share half of the roots and divisions.
fn update_and_observe<P: Stored, G: Element, M: Stored>(
    factors: Factors,
    p: &mut [P],
    g: &[G],
    m: &mut [M],
    v: &mut [M],
    observed: &mut [i32],
) {
    let moments = m.chunks_mut(OBSERVED_BLOCK).zip(v.chunks_mut(OBSERVED_BLOCK));
    let blocks = p.chunks_mut(OBSERVED_BLOCK).zip(g.chunks(OBSERVED_BLOCK)).zip(moments);
    let of_blocks = observed.chunks_exact_mut(OBSERVED_SUMS);
    for (number, (((p, g), (m, v)), sums)) in blocks.zip(of_blocks).enumerate() {
        let (seen, block) = (Seen::Shared(number), (p, g, m, v));
        write_sums(observed_update::<P, G, M, false>(factors, 0.0, seen, block), sums);
    }
}

/// Writes the sums over the blocks of a chunk before it is updated with other rounding. They do not
/// depend on the rounding of the results.
fn observe<P: Stored, G: Element, M: Stored>(
    factors: Factors,
    (p, g, m, v): (&[P], &[G], &[M], &[M]),
    observed: &mut [i32],
) {
    for (number, sums) in observed.chunks_exact_mut(OBSERVED_SUMS).enumerate() {
        let mut copies = SeenCopies::new();
        for run in seen_runs(number, p.len()) {
            let [value, gradient, first, second] = copies.next(run.len());
            widen(&p[run.clone()], value);
            widen(&g[run.clone()], gradient);
            widen(&m[run.clone()], first);
            widen(&v[run], second);
        }
        write_sums(copies.sums::<false>(factors, 0.0), sums);
    }
}

/// [`observe`] with moments in 8 bits.
fn observe_int8<P: Stored, G: Element>(
    factors: Factors,
    bound: f32,
    (p, g, m, v): (&[P], &[G], &[u8], &[u8]),
    observed: &mut [i32],
) {
    for (number, sums) in observed.chunks_exact_mut(OBSERVED_SUMS).enumerate() {
        let mut copies = SeenCopies::new();
        for run in seen_runs(number, p.len()) {
            let [value, gradient, first, second] = copies.next(run.len());
            widen(&p[run.clone()], value);
            widen(&g[run.clone()], gradient);
            decode(&m[groups(&run)], decode_first_moment, first);
            decode(&v[groups(&run)], decode_second_moment, second);
        }
        write_sums(copies.sums::<true>(factors, bound), sums);
    }
}

/// The bytes of the groups of a run.
fn groups(run: &Range<usize>) -> Range<usize> {
    let bytes = |groups: usize| groups * MOMENT_GROUP_BYTES;
    bytes(run.start / MOMENT_GROUP)..bytes(run.end.div_ceil(MOMENT_GROUP))
}

/// The runs of a block that are observed, in a chunk of this many elements.
fn seen_runs(block: usize, elements: usize) -> impl Iterator<Item = Range<usize>> {
    let first = block * OBSERVED_BLOCK;
    let starts = (0..OBSERVED_BLOCK / OBSERVED_RUN).filter(move |&run| is_observed(block, run));
    let starts = starts.map(move |run| first + run * OBSERVED_RUN).filter(move |&at| at < elements);
    starts.map(move |start| start..(start + OBSERVED_RUN).min(elements))
}

/// Values, gradients and moments of the observed elements of a block, in a row.
struct SeenCopies {
    copies: [[f32; SEEN]; 4],
    elements: usize,
}

/// Elements of a block that are observed.
const SEEN: usize = OBSERVED_BLOCK / OBSERVED_SHARE;

impl SeenCopies {
    fn new() -> SeenCopies {
        SeenCopies { copies: [[0.0; SEEN]; 4], elements: 0 }
    }

    fn next(&mut self, elements: usize) -> [&mut [f32]; 4] {
        let range = self.elements..self.elements + elements;
        self.elements = range.end;
        self.copies.each_mut().map(|copy| &mut copy[range.clone()])
    }

    fn sums<const LIMITED: bool>(&mut self, factors: Factors, bound: f32) -> [f32; OBSERVED_SUMS] {
        let [value, gradient, first, second] = &mut self.copies;
        let seen = ..self.elements;
        let block = (&mut value[seen], &gradient[seen], &mut first[seen], &mut second[seen]);
        observed_update::<f32, f32, f32, LIMITED>(factors, bound, Seen::All, block)
    }
}

fn write_sums(found: [f32; OBSERVED_SUMS], sums: &mut [i32]) {
    for (sum, found) in sums.iter_mut().zip(found) {
        *sum = found.to_bits().cast_signed();
    }
}

fn widen<E: Element>(values: &[E], wide: &mut [f32]) {
    for (wide, value) in wide.iter_mut().zip(values) {
        *wide = value.to_f32();
    }
}

fn decode(moments: &[u8], value_of: fn(u8, f32) -> f32, values: &mut [f32]) {
    let groups = moments.chunks_exact(MOMENT_GROUP_BYTES);
    for (group, values) in groups.zip(values.chunks_mut(MOMENT_GROUP)) {
        let scale = moment_scale(group);
        for (value, &code) in values.iter_mut().zip(group) {
            *value = value_of(code, scale);
        }
    }
}

/// The part of the sums for chunk number `task`, which has `elements` elements.
#[allow(clippy::mut_from_ref)]
fn observed_chunk<'a>(
    observed: Option<&'a SharedMut<'_, i32>>,
    task: usize,
    elements: usize,
) -> Option<&'a mut [i32]> {
    const CHUNK_SUMS: usize = CHUNK / OBSERVED_BLOCK * OBSERVED_SUMS;
    let first = task * CHUNK_SUMS;
    let range = first..first + elements.div_ceil(OBSERVED_BLOCK) * OBSERVED_SUMS;
    // SAFETY: each task has a separate chunk.
    observed.map(|observed| unsafe { observed.piece(range) })
}

simd_dispatch! {
    /// Any rounding, with or without a master copy.
    fn adamw_general[P: Stored, G: Element, M: Stored](
        factors: Factors, storage: Storage, start: usize, p: &mut [P], master: Option<&mut [f32]>,
        g: &[G], moments: [&mut [M]; 2],
    ) {
        let mut master = master.map(|master| master.chunks_mut(TOGETHER));
        let [m, v] = moments;
        let state = m.chunks_mut(TOGETHER).zip(v.chunks_mut(TOGETHER));
        let all = p.chunks_mut(TOGETHER).zip(g.chunks(TOGETHER)).zip(state);
        for (number, ((p, g), (m, v))) in all.enumerate() {
            let bits = match storage.random {
                Some(random) => random.together((start + number * TOGETHER) / 2),
                None => [[0; TOGETHER]; 3],
            };
            let mut master = master.as_mut().and_then(|chunks| chunks.next());
            let mut before = [0.0; TOGETHER];
            match &master {
                Some(master) => before[..p.len()].copy_from_slice(master),
                None => before.iter_mut().zip(&*p).for_each(|(before, p)| *before = p.to_f32()),
            }
            let [of_parameter, of_first, of_second] = bits;
            let mut after = [0.0; TOGETHER];
            for i in 0..p.len() {
                let (value, first, second) =
                    factors.update(before[i], g[i].to_f32(), m[i].to_f32(), v[i].to_f32());
                after[i] = value;
                p[i] = store(storage.parameter, value, of_parameter[i]);
                m[i] = store(storage.moments, first, of_first[i]);
                v[i] = store(storage.moments, second, of_second[i]);
            }
            if let Some(master) = &mut master {
                master.copy_from_slice(&after[..p.len()]);
            }
        }
    }
}

/// The tensors that one AdamW update reads and overwrites.
pub struct AdamWTensors<'a, P, G, M> {
    /// The parameter.
    pub parameter: &'a mut [P],
    /// Its f32 copy, if it has one.
    pub master: Option<&'a mut [f32]>,
    /// Its gradient.
    pub gradient: &'a [G],
    /// First moment.
    pub first_moment: &'a mut [M],
    /// Second moment.
    pub second_moment: &'a mut [M],
    /// Sums over the update, if it is observed.
    pub observed: Option<&'a mut [i32]>,
}

/// One AdamW update: decoupled weight decay, bias-corrected moments, gradients scaled by `clip`.
pub fn adamw<P: Stored, G: Element, M: Stored>(
    hyper: &AdamWParameters,
    scalars: &StepScalars,
    clip: f32,
    storage: Storage,
    tensors: AdamWTensors<'_, P, G, M>,
) {
    let AdamWTensors { parameter, master, gradient, first_moment, second_moment, observed } =
        tensors;
    let observed = observed.map(SharedMut::new);
    let factors = Factors::new(hyper, scalars, clip);
    let nearest = storage.parameter == Rounding::Nearest && storage.moments == Rounding::Nearest;
    let chunks = parameter
        .par_chunks_mut(CHUNK)
        .zip(gradient.par_chunks(CHUNK))
        .zip(first_moment.par_chunks_mut(CHUNK))
        .zip(second_moment.par_chunks_mut(CHUNK))
        .enumerate();
    match master {
        None => chunks.for_each(|(task, (((p, g), m), v))| {
            let sums = observed_chunk(observed.as_ref(), task, p.len());
            match (sums, nearest) {
                (Some(sums), true) => update_and_observe(factors, p, g, m, v, sums),
                (None, true) => adamw_nearest(factors, p, g, m, v),
                (sums, false) => {
                    if let Some(sums) = sums {
                        observe(factors, (&*p, g, &*m, &*v), sums);
                    }
                    adamw_general(factors, storage, task * CHUNK, p, None, g, [m, v]);
                }
            }
        }),
        Some(master) => chunks.zip(master.par_chunks_mut(CHUNK)).for_each(
            |((task, (((p, g), m), v)), master)| {
                let sums = observed_chunk(observed.as_ref(), task, p.len());
                match (sums, nearest) {
                    (Some(sums), true) => {
                        update_and_observe(factors, master, g, m, v, sums);
                        p.iter_mut().zip(&*master).for_each(|(p, &value)| *p = P::from_f32(value));
                    }
                    (None, true) => adamw_master(factors, p, master, g, m, v),
                    (sums, false) => {
                        if let Some(sums) = sums {
                            observe(factors, (&*master, g, &*m, &*v), sums);
                        }
                        let start = task * CHUNK;
                        adamw_general(factors, storage, start, p, Some(master), g, [m, v]);
                    }
                }
            },
        ),
    }
}

/// [`adamw`] with moments in 8 bits, see [`MomentFormat::Int8`](storm_graph::MomentFormat::Int8).
/// `bound` is [`AdamWParameters::first_moment_bound`].
pub fn adamw_int8<P: Stored, G: Element>(
    (hyper, bound): (&AdamWParameters, f32),
    scalars: &StepScalars,
    clip: f32,
    storage: Storage,
    tensors: AdamWTensors<'_, P, G, u8>,
) {
    const CHUNK_BYTES: usize = CHUNK / MOMENT_GROUP * MOMENT_GROUP_BYTES;
    let AdamWTensors { parameter, master, gradient, first_moment, second_moment, observed } =
        tensors;
    let observed = observed.map(SharedMut::new);
    let factors = Factors::new(hyper, scalars, clip);
    let chunks = parameter
        .par_chunks_mut(CHUNK)
        .zip(gradient.par_chunks(CHUNK))
        .zip(first_moment.par_chunks_mut(CHUNK_BYTES))
        .zip(second_moment.par_chunks_mut(CHUNK_BYTES))
        .enumerate();
    match master {
        None => chunks.for_each(|(task, (((p, g), m), v))| {
            if let Some(sums) = observed_chunk(observed.as_ref(), task, p.len()) {
                observe_int8(factors, bound, (&*p, g, &*m, &*v), sums);
            }
            int8_chunk(factors, bound, storage, task * CHUNK, chunk(p, None, g, m, v));
        }),
        Some(master) => chunks.zip(master.par_chunks_mut(CHUNK)).for_each(
            |((task, (((p, g), m), v)), master)| {
                if let Some(sums) = observed_chunk(observed.as_ref(), task, p.len()) {
                    observe_int8(factors, bound, (&*master, g, &*m, &*v), sums);
                }
                let tensors = chunk(p, Some(master), g, m, v);
                int8_chunk(factors, bound, storage, task * CHUNK, tensors);
            },
        ),
    }
}

/// The value, limited to magnitude `most`. NaN stays NaN.
#[inline(always)]
fn within(value: f32, most: f32) -> f32 {
    if value > most {
        most
    } else if value < -most {
        -most
    } else {
        value
    }
}

/// Updates group by group, because the code of an element depends on the largest of its group.
fn int8_chunk<P: Stored, G: Element>(
    factors: Factors,
    bound: f32,
    storage: Storage,
    start: usize,
    mut tensors: AdamWTensors<'_, P, G, u8>,
) {
    let (p, g) = (tensors.parameter, tensors.gradient);
    let firsts = tensors.first_moment.chunks_exact_mut(MOMENT_GROUP_BYTES);
    let seconds = tensors.second_moment.chunks_exact_mut(MOMENT_GROUP_BYTES);
    for (group, (m, v)) in firsts.zip(seconds).enumerate() {
        let begin = group * MOMENT_GROUP;
        let elements = begin..(begin + MOMENT_GROUP).min(p.len());
        let scales = [moment_scale(m), moment_scale(v)];
        let (mut first, mut second) = ([0.0; MOMENT_GROUP], [0.0; MOMENT_GROUP]);
        let mut bits = [Bits::default(); MOMENT_GROUP];
        for i in elements.clone() {
            let at = i - begin;
            if at.is_multiple_of(2) {
                let pair = storage.random.map(|random| random.pair((start + i) / 2));
                [bits[at], bits[at + 1]] = pair.unwrap_or_default();
            }
            let (old_first, old_second) =
                (decode_first_moment(m[at], scales[0]), decode_second_moment(v[at], scales[1]));
            (first[at], second[at]) = factors.moments(g[i].to_f32(), old_first, old_second);
            let root = second[at].sqrt();
            let most = bound * root;
            first[at] = within(first[at], most);
            let before = tensors.master.as_ref().map_or(p[i].to_f32(), |master| master[i]);
            let value = factors.value(before, first[at], root);
            if let Some(master) = &mut tensors.master {
                master[i] = value;
            }
            p[i] = store(storage.parameter, value, bits[at].parameter);
        }
        let largest = |values: &[f32]| values.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        let scales = [largest(&first), largest(&second)];
        for (at, bits) in bits.iter().enumerate() {
            m[at] = encode_first_moment(first[at], scales[0], bits.first);
            v[at] = encode_second_moment(second[at], scales[1], bits.second);
        }
        m[MOMENT_GROUP..].copy_from_slice(&scales[0].to_le_bytes());
        v[MOMENT_GROUP..].copy_from_slice(&scales[1].to_le_bytes());
    }
}

fn chunk<'a, P, G, M>(
    parameter: &'a mut [P],
    master: Option<&'a mut [f32]>,
    gradient: &'a [G],
    first_moment: &'a mut [M],
    second_moment: &'a mut [M],
) -> AdamWTensors<'a, P, G, M> {
    AdamWTensors { parameter, master, gradient, first_moment, second_moment, observed: None }
}

/// The tensors that one step of gradient descent reads and overwrites.
pub struct SgdTensors<'a, P, G, M> {
    /// The parameter.
    pub parameter: &'a mut [P],
    /// Its f32 copy, if it has one.
    pub master: Option<&'a mut [f32]>,
    /// Its gradient.
    pub gradient: &'a [G],
    /// Its momentum, if it has one.
    pub momentum: Option<&'a mut [M]>,
}

/// The factors of one step of gradient descent, computed once.
#[derive(Clone, Copy)]
struct Descent {
    hyper: SgdParameters,
    rate: f32,
    /// `1 - rate · weight_decay`.
    keep: f32,
    clip: f32,
}

impl Descent {
    /// The new value and momentum of one element.
    #[inline(always)]
    fn update(&self, value: f32, gradient: f32, momentum: Option<f32>) -> (f32, f32) {
        let SgdParameters { momentum: share, direction, weight_decay } = self.hyper;
        let gradient = gradient * self.clip;
        let Some(before) = momentum else {
            return (value * self.keep - self.rate * gradient, 0.0);
        };
        let gradient = gradient + weight_decay * value;
        let momentum = share * before + gradient;
        let along = match direction {
            MomentumDirection::Momentum => momentum,
            MomentumDirection::Nesterov => gradient + share * momentum,
        };
        (value - self.rate * along, momentum)
    }
}

/// One step of gradient descent.
pub fn sgd<P: Stored, G: Element, M: Stored>(
    hyper: &SgdParameters,
    scalars: &StepScalars,
    clip: f32,
    storage: Storage,
    tensors: SgdTensors<'_, P, G, M>,
) {
    let SgdTensors { parameter, master, gradient, momentum } = tensors;
    let rate = scalars.learning_rate;
    let descent = Descent { hyper: *hyper, rate, keep: 1.0 - rate * hyper.weight_decay, clip };
    let (master, momentum) = (master.map(SharedMut::new), momentum.map(SharedMut::new));
    parameter.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK)).enumerate().for_each(
        |(task, (p, g))| {
            let range = task * CHUNK..task * CHUNK + p.len();
            // SAFETY: each task has a separate chunk.
            let master = master.as_ref().map(|master| unsafe { master.piece(range.clone()) });
            // SAFETY: as above.
            let momentum = momentum.as_ref().map(|momentum| unsafe { momentum.piece(range) });
            sgd_chunk(
                descent,
                storage,
                task * CHUNK,
                SgdTensors { parameter: p, master, gradient: g, momentum },
            );
        },
    );
}

fn sgd_chunk<P: Stored, G: Element, M: Stored>(
    descent: Descent,
    storage: Storage,
    start: usize,
    tensors: SgdTensors<'_, P, G, M>,
) {
    let SgdTensors { parameter: p, mut master, gradient: g, mut momentum } = tensors;
    let mut bits = [Bits::default(); 2];
    for i in 0..p.len() {
        if i % 2 == 0 {
            bits = storage.random.map_or(bits, |random| random.pair((start + i) / 2));
        }
        let bits = bits[i % 2];
        let before = master.as_ref().map_or(p[i].to_f32(), |master| master[i]);
        let moved = momentum.as_ref().map(|momentum| momentum[i].to_f32());
        let (value, moved) = descent.update(before, g[i].to_f32(), moved);
        if let Some(momentum) = &mut momentum {
            momentum[i] = store(storage.moments, moved, bits.first);
        }
        if let Some(master) = &mut master {
            master[i] = value;
        }
        p[i] = store(storage.parameter, value, bits.parameter);
    }
}
