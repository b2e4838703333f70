//! How long a GPU may look for the fastest algorithms of matrix products.

use storm_device::cuda::Preparing;

/// The share of a run that may go to it, for a gain of 1 to 2 % of the rest.
const SHARE: f64 = 0.01;

/// More does not find better ones.
pub(crate) const SECONDS_MAX: f64 = 20.0;

/// For what takes less time than tuning. Algorithms that were found before are used all the same.
pub(crate) const NO_TUNING: f64 = 0.0;

/// For a run of so many seconds.
pub(crate) fn seconds(run_seconds: f64) -> f64 {
    (run_seconds * SHARE).min(SECONDS_MAX)
}

/// What a device does before it can run, in words.
pub(crate) fn describe(preparing: Preparing) -> String {
    match preparing {
        Preparing::HostMemory { bytes, of } => {
            let [done, all] = [bytes, of].map(|bytes| crate::size::show(bytes as u64));
            format!("host memory: {done} of {all}")
        }
        Preparing::Products { shapes, of } if shapes < of => {
            format!("finding fast algorithms: product {} of {of}", shapes + 1)
        }
        // Done: nothing is left on the line.
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
