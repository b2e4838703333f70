//! Gradients against central differences of the f64 reference.

use super::{Case, Rng};
use crate::reference::{Value, evaluate_graph};
use std::collections::BTreeMap;
use storm_graph::TensorId;

/// Inputs up to this size are moved element by element, larger ones in random directions.
const ELEMENTS_MAX: usize = 24;
/// Random directions and random elements of a large input. A direction sees every element: one
/// that is wrong by more than rounding shows in all of them.
const DIRECTIONS: usize = 5;
const STEP: f64 = 1e-5;
/// Relative to the gradient's scale; what f32 arithmetic costs.
const TOLERANCE: f64 = 2e-5;

/// Every wanted gradient of the case, or its absence, against the reference. What is absent must
/// not matter to the loss.
pub(crate) fn check_differences(context: &str, case: &Case, gradients: &BTreeMap<TensorId, Value>) {
    let mut rng = Rng::new(7);
    let mut values = case.values.clone();
    let seed_scale = case.seeds.iter().map(|(_, seed)| seed.scale()).fold(0.0, f64::max);
    for id in case.wanted.iter().copied().chain(case.trainable()) {
        let name = &case.graph.tensor(id).name;
        let start = values[&id].clone();
        let zero = Value::new(start.shape.clone(), vec![0.0; start.data.len()]);
        let gradient = gradients.get(&id).unwrap_or(&zero);
        assert_eq!(gradient.shape, start.shape, "{context}: {name}");
        assert!(gradient.data.iter().all(|g| g.is_finite()), "{context}: {name}\n{}", case.graph);
        let size = (gradient.scale() + 0.05 * seed_scale) * case.slack;
        for direction in directions(start.data.len(), &mut rng) {
            let mut loss_at = |step: f64| {
                let moved = values.get_mut(&id).expect("has a value");
                for ((x, from), by) in moved.data.iter_mut().zip(&start.data).zip(&direction) {
                    *x = from + step * by;
                }
                loss(case, &values)
            };
            let want = (loss_at(STEP) - loss_at(-STEP)) / (2.0 * STEP);
            let got: f64 = gradient.data.iter().zip(&direction).map(|(g, d)| g * d).sum();
            let length = direction.iter().map(|d| d * d).sum::<f64>().sqrt();
            let allowed = TOLERANCE * size * length;
            assert!(
                (got - want).abs() <= allowed,
                "{context}: gradient of {name} is {got}, but differences give {want} \
                 (± {allowed:.1e}) along {:?}\n{}",
                direction.iter().position(|&d| d != 0.0).filter(|_| length == 1.0),
                case.graph
            );
        }
        values.insert(id, start);
    }
}

/// Σ seed · result.
fn loss(case: &Case, values: &BTreeMap<TensorId, Value>) -> f64 {
    let made = evaluate_graph(&case.graph, values);
    case.seeds
        .iter()
        .map(|(id, seed)| made[id].data.iter().zip(&seed.data).map(|(y, s)| y * s).sum::<f64>())
        .sum()
}

fn directions(len: usize, rng: &mut Rng) -> Vec<Vec<f64>> {
    let unit = |at: usize| (0..len).map(|i| f64::from(u8::from(i == at))).collect();
    if len <= ELEMENTS_MAX {
        return (0..len).map(unit).collect();
    }
    let mut found: Vec<Vec<f64>> = vec![unit(0), unit(len - 1)];
    for _ in 0..DIRECTIONS {
        found.push(unit(rng.below(len)));
        found.push((0..len).map(|_| rng.normal()).collect());
    }
    found
}
