//! Energy and clock rates of timed steps. Cards of one model differ, and steps run at the power
//! limit.

use storm_device::cuda::PowerReading;

/// Energy, power, and clock rate of a card during timed steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Energy {
    /// Mean energy of a step.
    pub(crate) step_joules: f64,
    /// Mean power while steps ran.
    pub(crate) watts: f64,
    pub(crate) limit_watts: Option<f64>,
    /// Mean of the readings after each step.
    pub(crate) clock_mhz: f64,
}

impl Energy {
    /// From a reading before the first step and one after each. `None` if the card does not report
    /// them.
    pub(crate) fn of(readings: &[Option<PowerReading>], seconds: f64) -> Option<Energy> {
        let readings: Vec<PowerReading> = readings.iter().copied().collect::<Option<_>>()?;
        let [first, after @ ..] = readings.as_slice() else { return None };
        let last = after.last()?;
        let (joules, steps) = (last.joules - first.joules, after.len() as f64);
        Some(Energy {
            step_joules: joules / steps,
            watts: joules / seconds,
            limit_watts: last.limit_watts,
            clock_mhz: after.iter().map(|reading| f64::from(reading.clock_mhz)).sum::<f64>()
                / steps,
        })
    }

    /// The figures in words.
    pub(crate) fn words(&self) -> String {
        let limit = self.limit_watts.map_or(String::new(), |watts| format!(" of {watts:.0}"));
        let Energy { step_joules, watts, clock_mhz, .. } = self;
        format!(
            "{step_joules:.1} J a step, {watts:.0}{limit} W, multiprocessors at {clock_mhz:.0} MHz"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(joules: f64, clock_mhz: u32) -> Option<PowerReading> {
        Some(PowerReading { joules, clock_mhz, limit_watts: Some(700.0) })
    }

    #[test]
    fn energy_is_that_between_the_readings() {
        let readings = [reading(1000.0, 100), reading(2200.0, 1500), reading(3400.0, 1700)];
        let energy = Energy::of(&readings, 4.0).expect("all were read");
        assert_eq!((energy.step_joules, energy.watts, energy.clock_mhz), (1200.0, 600.0, 1600.0));
        let words = "1200.0 J a step, 600 of 700 W, multiprocessors at 1600 MHz";
        assert_eq!(energy.words(), words);
        assert_eq!(Energy::of(&readings[..1], 4.0), None);
        assert_eq!(Energy::of(&[reading(1.0, 1), None], 4.0), None);
    }
}
