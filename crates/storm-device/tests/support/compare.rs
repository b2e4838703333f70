//! When two values are the same but for rounding.

use crate::reference::Value;
use half::bf16;

/// How far a value may be off.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerance {
    /// By the value's own magnitude.
    relative: f64,
    /// By the largest magnitude of the tensor: sums of terms that cancel.
    of_scale: f64,
}

impl Tolerance {
    pub(crate) fn times(self, factor: f64) -> Tolerance {
        Tolerance { relative: self.relative * factor, of_scale: self.of_scale * factor }
    }
}

pub(crate) const F32_TOLERANCE: Tolerance = Tolerance { relative: 5e-6, of_scale: 2e-6 };
pub(crate) const BF16_TOLERANCE: Tolerance = Tolerance { relative: 1.6e-2, of_scale: 8e-3 };

/// `scale` is the least magnitude of the terms that were added up, where the values do not show it.
pub(crate) fn assert_close(
    context: &str,
    got: &Value,
    want: &Value,
    tolerance: Tolerance,
    scale: f64,
) {
    assert_eq!(got.shape, want.shape, "{context}");
    let scale = want.scale().max(scale);
    for (i, (&got, &want)) in got.data.iter().zip(&want.data).enumerate() {
        let allowed = tolerance.relative * want.abs() + tolerance.of_scale * scale;
        let same = got == want || (got - want).abs() <= allowed;
        assert!(same, "{context}: element {i} is {got}, not {want} (± {allowed:.1e})");
    }
}

/// Each bf16 in `got` is the exact value in `want` after a single rounding. The sums behind are
/// f32, so a value within `1e-5` of the scale of a tie may go either way.
pub(crate) fn assert_rounded_once(context: &str, got: &Value, want: &Value) {
    assert_eq!(got.shape, want.shape, "{context}");
    let noise = 1e-5 * want.scale();
    for (i, (&got, &want)) in got.data.iter().zip(&want.data).enumerate() {
        let [low, high] = [want - noise, want + noise]
            .map(|bound| f64::from(bf16::from_f32(bound as f32).to_f32()));
        assert!(
            (low..=high).contains(&got),
            "{context}: element {i} is {got}, but {want} rounds to {low} or {high}"
        );
    }
}
