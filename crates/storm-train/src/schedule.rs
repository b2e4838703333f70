//! Learning-rate schedules.

use crate::TrainError;

/// How the learning rate decays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// Not at all.
    Constant,
    /// In a straight line.
    Linear,
    /// Along half a cosine wave.
    Cosine,
    /// As one minus the square root of the finished fraction: fast at first.
    OneMinusSqrt,
}

/// The learning rate of every step of a run: a linear warm-up, an optional plateau at the peak, and a decay to
/// `final_rate` at the last step. It has no state: the rate depends only on the step number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    peak_rate: f64,
    final_rate: f64,
    warmup_steps: u64,
    steps: u64,
    /// Number of final steps in which the rate decays.
    falling_steps: u64,
    decay: Decay,
}

impl Schedule {
    /// A schedule over `steps` steps that decays from the end of the warm-up.
    ///
    /// # Errors
    /// A rate is negative or not finite, the final rate is above the peak, or the warm-up is longer than the run.
    pub fn new(
        peak_rate: f64,
        final_rate: f64,
        warmup_steps: u64,
        steps: u64,
        decay: Decay,
    ) -> Result<Schedule, TrainError> {
        let refuse = |option, problem: String| Err(TrainError::Option { option, problem });
        // Kernels take rates as f32.
        if !(peak_rate >= 0.0 && (peak_rate as f32).is_finite()) {
            return refuse("learning-rate", format!("{peak_rate} must be finite and not negative"));
        }
        if !(0.0..=peak_rate).contains(&final_rate) {
            let problem = format!("{final_rate} must lie between 0 and the peak of {peak_rate}");
            return refuse("final-learning-rate", problem);
        }
        if warmup_steps > steps {
            let problem = format!("{warmup_steps} steps are more than the {steps} of the run");
            return refuse("warmup", problem);
        }
        // The first step after the warm-up is at the peak.
        let falling_steps = steps.saturating_sub(warmup_steps + 1);
        Ok(Schedule { peak_rate, final_rate, warmup_steps, steps, falling_steps, decay })
    }

    /// The same, but the rate stays at the peak until the last `cooldown_steps` steps.
    ///
    /// # Errors
    /// Warm-up and cooldown together are longer than the run.
    pub fn with_cooldown(self, cooldown_steps: u64) -> Result<Schedule, TrainError> {
        let Schedule { warmup_steps, steps, .. } = self;
        if cooldown_steps > steps - warmup_steps {
            let problem = format!(
                "{cooldown_steps} steps and a warm-up of {warmup_steps} are more than the {steps} of the run"
            );
            return Err(TrainError::Option { option: "cooldown", problem });
        }
        Ok(Schedule { falling_steps: cooldown_steps, ..self })
    }

    /// The rate of a step, counted from 0. After the last step it stays constant.
    pub fn rate(&self, step: u64) -> f32 {
        if step < self.warmup_steps {
            // The first step has a nonzero rate, and the last step of the warm-up is at the peak.
            return (self.peak_rate * (step + 1) as f64 / self.warmup_steps as f64) as f32;
        }
        // Decay steps done, including this one.
        let fallen = (step + 1).saturating_sub(self.steps - self.falling_steps);
        let done = match self.falling_steps {
            0 => 0.0,
            falling => (fallen as f64 / falling as f64).min(1.0),
        };
        let left = match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - done,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
            Decay::OneMinusSqrt => 1.0 - done.sqrt(),
        };
        (self.final_rate + (self.peak_rate - self.final_rate) * left) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(decay: Decay, warmup: u64, steps: u64) -> Vec<f32> {
        let schedule = Schedule::new(1.0, 0.2, warmup, steps, decay).expect("a schedule");
        (0..steps + 2).map(|step| schedule.rate(step)).collect()
    }

    #[test]
    fn a_warm_up_rises_to_the_peak() {
        assert_eq!(rates(Decay::Constant, 4, 6), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn a_line_ends_at_the_last_step() {
        assert_eq!(rates(Decay::Linear, 0, 5), [1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]);
        assert_eq!(rates(Decay::Linear, 1, 3), [1.0, 1.0, 0.2, 0.2, 0.2]);
    }

    #[test]
    fn a_cosine_falls_slowly_at_both_ends() {
        let rates = rates(Decay::Cosine, 2, 13);
        assert_eq!((rates[2], rates[12], rates[14]), (1.0, 0.2, 0.2));
        assert!((rates[7] - 0.6).abs() < 1e-6, "{}", rates[7]);
        assert!(rates[2..].windows(2).all(|pair| pair[0] >= pair[1]));
        let falls: Vec<f32> = rates[2..13].windows(2).map(|pair| pair[0] - pair[1]).collect();
        assert!(falls[0] < falls[5] && falls[9] < falls[5], "{falls:?}");
    }

    #[test]
    fn a_cooldown_comes_after_a_constant_part() {
        let rates = |decay, warmup, steps, cooldown| -> Vec<f32> {
            let schedule = Schedule::new(1.0, 0.2, warmup, steps, decay).expect("a schedule");
            let schedule = schedule.with_cooldown(cooldown).expect("it fits");
            (0..steps + 1).map(|step| schedule.rate(step)).collect()
        };
        assert_eq!(rates(Decay::Linear, 2, 8, 4), [0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]);
        // A quarter of the steps takes half of the fall.
        let left = |done: f64| (0.2 + 0.8 * (1.0 - done.sqrt())) as f32;
        let expected = [1.0, 0.6, left(0.5), left(0.75), 0.2, 0.2];
        assert_eq!(rates(Decay::OneMinusSqrt, 0, 5, 4), expected);
        // Without a constant part, without a cooldown, and as long as a schedule without one.
        assert_eq!(rates(Decay::Linear, 2, 4, 2), [0.5, 1.0, 0.6, 0.2, 0.2]);
        assert_eq!(rates(Decay::Cosine, 0, 3, 0), [1.0; 4]);
        for decay in [Decay::Constant, Decay::Linear, Decay::Cosine] {
            let whole = rates(decay, 3, 20, 16);
            assert_eq!(whole[..], self::rates(decay, 3, 20)[..21], "{decay:?}");
        }
    }

    #[test]
    fn runs_of_any_length_have_a_rate() {
        for (warmup, steps) in [(0, 0), (0, 1), (1, 1), (3, 3)] {
            let all = rates(Decay::Cosine, warmup, steps);
            assert!(all.iter().all(|rate| (0.0..=1.0).contains(rate)), "{warmup} {steps} {all:?}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let check = |peak, last, warmup, part: &str| {
            let error = Schedule::new(peak, last, warmup, 10, Decay::Linear).expect_err("no sense");
            assert!(error.to_string().starts_with(part), "{error}");
        };
        check(f64::NAN, 0.0, 0, "learning-rate:");
        check(-1.0, 0.0, 0, "learning-rate:");
        check(1e39, 0.0, 0, "learning-rate:");
        check(1.0, 2.0, 0, "final-learning-rate:");
        check(1.0, -0.1, 0, "final-learning-rate:");
        check(1.0, 0.0, 11, "warmup:");
        let schedule = Schedule::new(1.0, 0.0, 3, 10, Decay::Linear).expect("a schedule");
        schedule.with_cooldown(7).expect("it fits");
        let error = schedule.with_cooldown(8).expect_err("too long");
        assert!(error.to_string().starts_with("cooldown:"), "{error}");
    }
}
