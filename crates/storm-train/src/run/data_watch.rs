/// Judge at least this many steps and this many seconds together: a single slow read means nothing.
const STEPS: u32 = 20;
const SECONDS: f64 = 10.0;

/// Waits below this fraction of the time are not reported.
const SHARE: f64 = 0.05;

/// Detects, once, that steps wait for data.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DataWatch {
    steps: u32,
    seconds: f64,
    waited: f64,
    is_first_past: bool,
    is_told: bool,
}

impl DataWatch {
    /// Adds a step that took `seconds`, of which it waited `waited` for data. Returns the fraction of time spent
    /// waiting, once, if it is worth reporting. Ignores the first step, which always waits for its data.
    pub(super) fn add(&mut self, seconds: f64, waited: f64) -> Option<f64> {
        if self.is_told || !std::mem::replace(&mut self.is_first_past, true) {
            return None;
        }
        self.steps += 1;
        self.seconds += seconds;
        self.waited += waited;
        if self.steps < STEPS || self.seconds < SECONDS {
            return None;
        }
        let share = self.waited / self.seconds.max(f64::MIN_POSITIVE);
        *self = DataWatch { is_first_past: true, is_told: share >= SHARE, ..DataWatch::default() };
        self.is_told.then_some(share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After how many steps of a second it says something.
    fn told(waited: impl Fn(u32) -> f64) -> Vec<(u32, f64)> {
        told_of_steps(1.0, waited)
    }

    fn told_of_steps(seconds: f64, waited: impl Fn(u32) -> f64) -> Vec<(u32, f64)> {
        let mut watch = DataWatch::default();
        (0..100).filter_map(|step| Some((step, watch.add(seconds, waited(step))?))).collect()
    }

    #[test]
    fn waiting_is_told_once() {
        assert_eq!(told(|_| 0.25), [(20, 0.25)]);
        assert_eq!(told_of_steps(0.25, |_| 0.125), [(40, 0.5)]);
        assert_eq!(told(|step| if step < 41 { 0.0 } else { 0.5 }), [(60, 0.5)]);
    }

    #[test]
    fn what_is_rare_or_little_is_not_told() {
        assert_eq!(told(|_| 0.04), []);
        assert_eq!(told_of_steps(0.01, |_| 0.005), [], "a run of a second");
        assert_eq!(told(|step| f64::from(u8::from(step == 0))), []);
        assert_eq!(told(|step| f64::from(u8::from(step == 30)) * 0.9), []);
    }
}
