//! Converts a step into the controller's observation.

use super::network::{ACTED, OBSERVED};
use super::{CHANGE_SCALE, StepSeen};
use crate::predict::phases::Phase;
use crate::predict::updates::UpdateSeen;

/// Numbers in its serialized form.
pub(super) const NUMBERS: usize = 15;

/// Numbers of an observation besides the update statistics.
const OWN: usize = 12;

/// Decay of the moving averages of slope and variance.
const KEEP: f32 = 0.9;

/// Decay of the trend. Slower, because losses of single steps are noisy.
const TREND_KEEP: f32 = 0.98;

/// Scale of the excess, which is small.
pub(super) const EXCESS_SCALE: f64 = 10.0;

/// The running statistics that observations depend on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Seen {
    /// 1 once a step was observed.
    any: f32,
    first_log_loss: f32,
    log_loss: f32,
    /// Mean and variance of the change of the log loss.
    slope: f32,
    variance: f32,
    first_log_norm: f32,
    log_norm: f32,
    rate_max: f32,
    /// The last jump: length, change and outcome, and whether its correction kept it.
    length: f32,
    change: f32,
    accepted: f32,
    kept: f32,
    /// Whether there was a jump since the last step, and its length.
    jumped: f32,
    jumped_length: f32,
    /// Like `slope`, over more steps.
    trend: f32,
}

/// The logarithm, or zero for arguments that are not positive and finite.
fn logarithm(value: f32) -> f32 {
    if value > 0.0 && value.is_finite() { value.ln() } else { 0.0 }
}

impl Seen {
    pub(super) fn new() -> Seen {
        Seen::from_numbers(&[0.0; NUMBERS])
    }

    /// The action before a step, its observation, and the scaled change of the log loss beyond its
    /// trend and the previous jump.
    pub(super) fn step(&mut self, step: &StepSeen) -> ([f32; ACTED], [f32; OBSERVED], f32) {
        let (log_loss, log_norm) = (logarithm(step.loss), logarithm(step.gradient_norm));
        if self.any == 0.0 {
            (self.first_log_loss, self.log_loss) = (log_loss, log_loss);
            (self.first_log_norm, self.log_norm) = (log_norm, log_norm);
            self.any = 1.0;
        }
        let (change, norm_change) = (log_loss - self.log_loss, log_norm - self.log_norm);
        let of_jump = self.jumped * self.change / CHANGE_SCALE as f32;
        let excess = EXCESS_SCALE as f32 * (change - of_jump - self.trend);
        let off = change - self.slope;
        self.slope = KEEP * self.slope + (1.0 - KEEP) * change;
        self.trend = TREND_KEEP * self.trend + (1.0 - TREND_KEEP) * change;
        self.variance = KEEP * self.variance + (1.0 - KEEP) * off * off;
        self.rate_max = self.rate_max.max(step.learning_rate);
        (self.log_loss, self.log_norm) = (log_loss, log_norm);
        let correcting = if step.phase == Phase::Correct { 1.0 } else { 0.0 };
        let action = [self.jumped, self.jumped_length, correcting];
        (self.jumped, self.jumped_length) = (0.0, 0.0);
        let rate = step.learning_rate / self.rate_max.max(f32::MIN_POSITIVE);
        let mut observation = [0.0; OBSERVED];
        let (own, updates) = observation.split_at_mut(OWN);
        own.copy_from_slice(&[
            log_loss - self.first_log_loss,
            20.0 * self.slope,
            0.2 * logarithm(self.variance + 1e-8) + 1.0,
            log_norm - self.first_log_norm,
            norm_change,
            10.0 * change,
            rate,
            step.progress,
            self.length,
            self.change,
            self.accepted,
            self.kept,
        ]);
        for (pair, seen) in updates.chunks_exact_mut(2).zip(&step.updates.0) {
            let Some(UpdateSeen { cosine, ratio }) = seen else { continue };
            // A typical update is about a thousandth of the weights.
            let size = if *ratio > 0.0 { 0.25 * (logarithm(*ratio) + 7.0) } else { 0.0 };
            pair.copy_from_slice(&[*cosine, size]);
        }
        let within = |value: f32| value.clamp(-5.0, 5.0);
        (action, observation.map(within), within(excess))
    }

    /// Fall of the log loss per step, from its trend.
    pub(super) fn fall_per_step(&self) -> f64 {
        f64::from(-self.trend)
    }

    pub(super) fn jump(&mut self, length: f32, change: f32, accepted: bool) {
        (self.length, self.change) = (length, change);
        self.accepted = if accepted { 1.0 } else { -1.0 };
        if accepted {
            (self.jumped, self.jumped_length) = (1.0, length);
        }
    }

    pub(super) fn judged(&mut self, kept: bool) {
        self.kept = if kept { 1.0 } else { -1.0 };
    }

    pub(super) fn to_numbers(self) -> [f32; NUMBERS] {
        [
            self.any,
            self.first_log_loss,
            self.log_loss,
            self.slope,
            self.variance,
            self.first_log_norm,
            self.log_norm,
            self.rate_max,
            self.length,
            self.change,
            self.accepted,
            self.kept,
            self.jumped,
            self.jumped_length,
            self.trend,
        ]
    }

    pub(super) fn from_numbers(numbers: &[f32]) -> Seen {
        Seen {
            any: numbers[0],
            first_log_loss: numbers[1],
            log_loss: numbers[2],
            slope: numbers[3],
            variance: numbers[4],
            first_log_norm: numbers[5],
            log_norm: numbers[6],
            rate_max: numbers[7],
            length: numbers[8],
            change: numbers[9],
            accepted: numbers[10],
            kept: numbers[11],
            jumped: numbers[12],
            jumped_length: numbers[13],
            trend: numbers[14],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::updates::UpdatesSeen;

    fn of(seen: &mut Seen, log_loss: f32) -> f32 {
        let step = StepSeen {
            loss: log_loss.exp(),
            gradient_norm: 1.0,
            learning_rate: 1e-3,
            progress: 0.5,
            phase: Phase::Full,
            updates: UpdatesSeen::default(),
        };
        seen.step(&step).2
    }

    #[test]
    fn what_a_step_adds_is_beyond_the_trend_and_the_jump() {
        let mut seen = Seen::new();
        assert_eq!(of(&mut seen, 1.0), 0.0, "the first step has none before it");
        assert!((of(&mut seen, 0.9) + 1.0).abs() < 1e-4, "there is no trend yet");
        for number in 2..400 {
            of(&mut seen, 1.0 - 0.1 * number as f32);
        }
        assert!((seen.fall_per_step() - 0.1).abs() < 1e-3);
        assert!(of(&mut seen, 1.0 - 40.0).abs() < 0.02, "as the trend has it");
        // A jump lowers the loss by 0.04, and a step by 0.1 again.
        let jump =
            |seen: &mut Seen, accepted| seen.jump(0.0, -0.04 * CHANGE_SCALE as f32, accepted);
        jump(&mut seen, true);
        assert!(of(&mut seen, 1.0 - 40.14).abs() < 0.02);
        jump(&mut seen, false);
        assert!(of(&mut seen, 1.0 - 40.24).abs() < 0.02, "it was taken back");
        assert!((of(&mut seen, 1.0 - 40.39) + 0.5).abs() < 0.03, "more than the trend");
        assert_eq!(of(&mut seen, 3.0), 5.0, "within limits");
    }
}
