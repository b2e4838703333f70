//! What must not change a bit: the number of threads, and recomputation.

use crate::support::*;
use crate::transformer::{Model, Size};
use rayon::ThreadPoolBuilder;
use std::collections::BTreeSet;
use storm_device::cpu::kernels::simd::{Isa, force_isa, isa};
use storm_graph::{
    DType, Op, Rounding, Shape, StepScalars, TensorClass, TensorId, Training, encode_units,
    recompute,
};

/// Enough rows and columns for several tiles and several threads.
const MEDIUM: Size =
    Size { batch: 3, time: 150, width: 72, inner: 130, vocabulary: 1003, layers: 2, frozen: 1 };

const SMALL: Size =
    Size { batch: 2, time: 7, width: 12, inner: 10, vocabulary: 33, layers: 2, frozen: 1 };

/// Memory after the whole step of a model, by tensor; scratch is left out.
fn memory_after(backward: &Backward) -> Vec<(TensorId, Vec<u8>)> {
    let mut machine = Machine::new(&backward.graph, &backward.values);
    machine.run();
    let graph = &backward.graph;
    let lasting = graph.ids().filter(|&id| graph.tensor(id).class != TensorClass::Scratch);
    lasting.map(|id| (id, machine.bytes(id))).collect()
}

fn backward_of(size: Size, seed: u64, dtype: DType) -> Backward {
    let case = Case::build(seed, dtype, Precision::Rounded, |b| {
        Model::build(b, size);
        add_other_ops(b);
    });
    let mut backward = case.differentiate(&Start::Fresh, dtype);
    if seed.is_multiple_of(2) {
        encode(&mut backward, &case);
    }
    backward
}

/// Lets operands of gated units wait in 8 bits.
fn encode(backward: &mut Backward, case: &Case) {
    let results = results_of(backward, case);
    encode_units(&mut backward.graph, &results);
}

/// What is read after both passes.
fn results_of(backward: &Backward, case: &Case) -> Vec<TensorId> {
    backward.gradients.values().copied().chain(loss_of(case)).collect()
}

fn assert_same(
    context: &str,
    backward: &Backward,
    want: &[(TensorId, Vec<u8>)],
    got: &[(TensorId, Vec<u8>)],
) {
    for ((id, want), (_, got)) in want.iter().zip(got) {
        assert!(want == got, "{context}: `{}` differs", backward.graph.tensor(*id));
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for (seed, dtype) in [(1, DType::F32), (2, DType::BF16), (3, DType::F32), (4, DType::BF16)] {
        let backward = backward_of(MEDIUM, seed, dtype);
        let run = |threads: usize| {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| memory_after(&backward))
        };
        let alone = run(1);
        for threads in [2, 3, 8] {
            let context = format!("seed {seed}, {dtype}, {threads} threads");
            assert_same(&context, &backward, &alone, &run(threads));
        }
    }
}

/// Instruction sets are a property of the process: tests that run meanwhile use them too, and are
/// promised the same results.
#[test]
fn any_instruction_set_gives_the_same_bits() {
    // Without hardware for fused multiply-adds a step takes a hundred times as long.
    let size = Size { time: 50, vocabulary: 203, ..MEDIUM };
    for (seed, dtype) in [(5, DType::F32), (6, DType::BF16)] {
        let backward = backward_of(size, seed, dtype);
        let widest = memory_after(&backward);
        let before = isa();
        for other in Isa::ALL {
            if other.is_available() {
                force_isa(other);
                let got = memory_after(&backward);
                assert_same(&format!("seed {seed}, {dtype}, {other:?}"), &backward, &widest, &got);
            }
        }
        force_isa(before);
    }
}

/// The ops that no model's forward or backward pass has.
fn add_other_ops(b: &mut Builder) {
    let shape = [190, 700]; // more than two blocks of a full sum
    let dtype = b.dtype;
    let parameter = b.trained("updated", &shape, Training::Frozen);
    let [gradient, first_moment] = ["gradient", "first"].map(|name| b.input(name, &shape));
    let second_moment = b.apply("second", Op::Mul { a: first_moment, b: first_moment })[0];
    let parts =
        [gradient, parameter].map(|x| b.apply("squares", Op::SumOfSquares { x })[0]).to_vec();
    let norm = b.apply("global_norm", Op::GlobalNorm { parts })[0];
    let clip = Some(b.apply("clip", Op::ClipScale { norm, max_norm: 1.0 })[0]);
    let scalars = b.constant("scalars", &[StepScalars::LEN], vec![1e-2, 0.1, 0.05]);
    let random = b.integers("random", &[3], |_, i| i as i32);
    b.apply("transposed", Op::Transpose { x: gradient, axes: vec![1, 0] });
    b.apply("sum", Op::Sum { x: gradient });
    let (deviation, shape, stream) = (1.0, Shape::from(shape), 1);
    b.apply("normal", Op::RandomNormal { random, shape, dtype, deviation, stream });
    let rounding = if dtype == DType::BF16 { Rounding::Stochastic } else { Rounding::Nearest };
    let hyper =
        storm_graph::AdamWParameters { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };
    let random = Some(random);
    let updated = b.apply(
        "adamw",
        Op::AdamW {
            parameter,
            gradient,
            first_moment,
            second_moment,
            master: None,
            scalars,
            clip,
            random,
            observed: None,
            hyper,
            rounding,
            moment_rounding: rounding,
            stream,
            first_element: 0,
        },
    )[0];
    let weight_decay = 0.1;
    b.apply(
        "sgd",
        Op::Sgd {
            parameter: updated,
            gradient,
            momentum: None,
            master: None,
            scalars,
            clip,
            random,
            hyper: storm_graph::SgdParameters::plain(weight_decay),
            rounding,
            moment_rounding: Rounding::Nearest,
            stream,
            first_element: 0,
        },
    );
}

/// Whatever is dropped between the passes (and overwritten, so that reading it shows), the
/// gradients stay the same.
#[test]
fn any_recomputation_gives_the_same_bits() {
    for seed in 0..40 {
        let dtype = if seed % 2 == 0 { DType::F32 } else { DType::BF16 };
        let case = Case::build(seed, dtype, Precision::Rounded, |b| Model::build(b, SMALL));
        let mut backward = case.differentiate(&Start::Fresh, DType::F32);
        if seed % 4 >= 2 {
            encode(&mut backward, &case);
        }
        let mut machine = Machine::new(&backward.graph, &backward.values);
        machine.run();
        let results = results_of(&backward, &case);
        let want: Vec<Vec<u8>> = results.iter().map(|&id| machine.bytes(id)).collect();
        for &id in &results {
            let finite = machine.get(id).data.iter().all(|x| x.is_finite());
            assert!(finite, "seed {seed}: `{}`", backward.graph.tensor(id));
        }

        let forward: Vec<TensorId> =
            backward.graph.ids().filter(|&id| backward.graph.is_made_forward(id)).collect();
        let mut rng = Rng::new(seed);
        for kept_tenths in [0, 10, 1, 2, 3, 5, 5, 7, 8, 9] {
            let kept: BTreeSet<TensorId> =
                forward.iter().copied().filter(|_| rng.below(10) < kept_tenths).collect();
            let mut graph = backward.graph.clone();
            recompute(&mut graph, &results, |id| kept.contains(&id));
            assert!(graph.saved().iter().all(|id| kept.contains(id)), "seed {seed}");
            let mut machine = Machine::new(&graph, &backward.values);
            machine.run_dropping(|id| kept.contains(&id));
            for (&id, want) in results.iter().zip(&want) {
                let same = machine.bytes(id) == *want;
                assert!(same, "seed {seed}, {kept_tenths}: `{}`\n{graph}", graph.tensor(id));
            }
        }
    }
}

/// The test above would notice: without recomputation, dropped tensors spoil the gradients.
#[test]
fn dropped_tensors_are_gone() {
    let case = Case::build(1, DType::F32, Precision::Rounded, |b| Model::build(b, SMALL));
    let backward = case.differentiate(&Start::Fresh, DType::F32);
    for dropped in backward.graph.saved() {
        let mut machine = Machine::new(&backward.graph, &backward.values);
        machine.run_dropping(|id| id != dropped);
        let spoilt = backward
            .gradients
            .values()
            .any(|&gradient| machine.get(gradient).data.iter().any(|x| x.is_nan()));
        assert!(spoilt, "nobody misses `{}`", backward.graph.tensor(dropped));
    }
}

/// The loss that a model ends in.
fn loss_of(case: &Case) -> Option<TensorId> {
    case.seeds.last().map(|&(id, _)| id)
}
