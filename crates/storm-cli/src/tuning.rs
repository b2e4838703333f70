//! Time limits for tuning matrix multiplications on a GPU.

use storm_device::cuda::Preparing;

/// Fraction of the run time that tuning may take; it speeds up the rest by 1 to 2 %.
const SHARE: f64 = 0.01;

/// Tuning for longer finds nothing better.
pub(crate) const SECONDS_MAX: f64 = 20.0;

/// For commands shorter than tuning. Algorithms found earlier are still used.
pub(crate) const NO_TUNING: f64 = 0.0;

/// The tuning time for a run of this length.
pub(crate) fn seconds(run_seconds: f64) -> f64 {
    (run_seconds * SHARE).min(SECONDS_MAX)
}

/// Describes what a device is preparing.
pub(crate) fn describe(preparing: Preparing) -> String {
    match preparing {
        Preparing::HostMemory { bytes, of } => {
            let [done, all] = [bytes, of].map(|bytes| crate::size::show(bytes as u64));
            format!("host memory: {done} of {all}")
        }
        Preparing::Products { shapes, of } if shapes < of => {
            format!("finding fast algorithms: product {} of {of}", shapes + 1)
        }
        // Finished: clear the line.
        Preparing::Products { .. } => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_run_is_not_held_up() {
        assert_eq!(seconds(60.0), 0.6);
        assert_eq!(seconds(7.0 * 86_400.0), SECONDS_MAX);
        let products = |shapes| describe(Preparing::Products { shapes, of: 18 });
        assert_eq!(products(0), "finding fast algorithms: product 1 of 18");
        assert_eq!(products(18), "");
    }
}
