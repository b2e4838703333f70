//! Seeded choices.

pub(crate) use storm_graph::random::Random;

/// Strictly between the two.
pub(crate) fn between(random: &mut Random, low: f64, high: f64) -> f64 {
    low + (high - low) * (1 + random.below(998)) as f64 / 1000.0
}
