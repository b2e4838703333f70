//! The properties that every differentiable op has.

use super::*;
use crate::reference::{Value, evaluate_graph};
use half::bf16;
use std::collections::BTreeMap;
use storm_graph::{DType, TensorClass, TensorId};

/// For each seed, `build` makes a graph; then
/// - the device's forward pass is the f64 reference, in f32 and in bf16;
/// - its gradients in f32 are the differences of the reference;
/// - its gradients in bf16 are those in f32 but for rounding;
/// - gradients of parameters are added to what was there.
pub(crate) fn check(family: &str, seeds: u64, build: impl Fn(&mut Builder)) {
    for seed in 0..seeds {
        let full = Case::build(seed, DType::F32, Precision::Full, &build);
        let rounded = Case::build(seed, DType::F32, Precision::Rounded, &build);
        let narrow = Case::build(seed, DType::BF16, Precision::Rounded, &build);
        let context = format!("{family}, seed {seed}");

        check_forward(&format!("{context}, f32"), &full, F32_TOLERANCE);
        check_forward(&format!("{context}, bf16"), &narrow, BF16_TOLERANCE);

        let gradients = full.differentiate(&Start::Fresh, DType::F32).run();
        check_differences(&context, &full, &gradients);
        check_accumulation(&format!("{context}, f32"), &full, &gradients, DType::F32);

        let wide = rounded.differentiate(&Start::Fresh, DType::F32).run();
        for dtype in [DType::BF16, DType::F32] {
            let context = format!("{context}, bf16 with {dtype} gradients");
            let gradients = narrow.differentiate(&Start::Fresh, dtype).run();
            check_narrow(&context, &narrow, &gradients, &wide);
            check_accumulation(&context, &narrow, &gradients, dtype);
        }
    }
}

/// All that the nodes make, scratch left out.
fn check_forward(context: &str, case: &Case, tolerance: compare::Tolerance) {
    let want = evaluate_graph(&case.graph, &case.values);
    let machine = case.run();
    for id in case.graph.nodes().iter().flat_map(|node| &node.outputs) {
        let tensor = case.graph.tensor(*id);
        if tensor.class != TensorClass::Scratch {
            let context = format!("{context}: `{tensor}` of\n{}", case.graph);
            let coarser = if tensor.dtype == DType::BF16 { BF16_TOLERANCE } else { tolerance };
            let tolerance = coarser.times(case.slack);
            assert_close(&context, &machine.get(*id), &want[id], tolerance, 0.1);
        }
    }
}

fn check_narrow(
    context: &str,
    case: &Case,
    narrow: &BTreeMap<TensorId, Value>,
    wide: &BTreeMap<TensorId, Value>,
) {
    assert!(narrow.keys().eq(wide.keys()), "{context}");
    let seed_scale = case.seeds.iter().map(|(_, seed)| seed.scale()).fold(0.0, f64::max);
    for (id, gradient) in narrow {
        let context = format!("{context}: gradient of {}\n{}", case.graph.tensor(*id), case.graph);
        let tolerance = BF16_TOLERANCE.times(case.slack);
        assert_close(&context, gradient, &wide[id], tolerance, 0.3 * seed_scale);
    }
}

/// With start values, a gradient is its start and the fresh gradient.
fn check_accumulation(context: &str, case: &Case, fresh: &BTreeMap<TensorId, Value>, dtype: DType) {
    let parameters: Vec<TensorId> =
        case.trainable().into_iter().filter(|id| fresh.contains_key(id)).collect();
    if parameters.is_empty() {
        return;
    }
    let mut rng = Rng::new(11);
    let mut starts = BTreeMap::new();
    for &id in &parameters {
        let shape = case.graph.tensor(id).shape.clone();
        let data = (0..shape.elements())
            .map(|_| f64::from(bf16::from_f64(2.0 * rng.normal()).to_f32()))
            .collect();
        starts.insert(id, Value::new(shape, data));
    }
    let sums = case.differentiate(&Start::From(starts.clone()), dtype).run();
    assert!(sums.keys().eq(fresh.keys()), "{context}");
    let tolerance = match dtype {
        DType::F32 => F32_TOLERANCE,
        _ => BF16_TOLERANCE,
    };
    for (&id, sum) in &sums {
        let mut want = fresh[&id].clone();
        if let Some(start) = starts.get(&id) {
            want.data.iter_mut().zip(&start.data).for_each(|(sum, start)| *sum += start);
        }
        let context = format!("{context}: sum of gradients of {}", case.graph.tensor(id));
        assert_close(&context, sum, &want, tolerance, starts.get(&id).map_or(0.0, Value::scale));
    }
}
