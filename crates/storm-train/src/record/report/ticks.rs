//! Ticks at round numbers along an axis.

use super::unit::PLAIN_MAX;

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    /// Plain numbers.
    Numbers,
    /// Whole numbers.
    Counts,
    /// Fractions, shown as percent.
    Shares,
    /// Bytes, with ticks at powers of two.
    Bytes,
}

/// Most intervals between ticks.
const STEPS_MAX: f64 = 5.0;

/// Labels use an exponent if ticks are closer than this.
const SMALL: f64 = 0.5e-4;

/// Names of byte units, each 1024 times the one before.
pub(super) const BYTE_UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];

/// The ticks of an axis from `low` to `high`, with their labels: multiples of 1, 2 or 5 times a power of ten, or of a
/// power of two for bytes.
pub(super) fn ticks(low: f64, high: f64, scale: Scale) -> Vec<(f64, String)> {
    let range = high - low;
    if !(range.is_finite() && range > 0.0) {
        return Vec::new();
    }
    let step = match scale {
        Scale::Bytes => (range / STEPS_MAX).max(1.0).log2().ceil().exp2(),
        Scale::Counts => decimal_step(range / STEPS_MAX).max(1.0),
        Scale::Numbers | Scale::Shares => decimal_step(range / STEPS_MAX),
    };
    // Include an end that misses a tick only by rounding error.
    let tolerance = 1e-9;
    let first = (low / step - tolerance).ceil();
    let count = (high / step + tolerance).floor() - first;
    (0..=count.max(-1.0) as i64)
        .map(|place| (first + place as f64) * step)
        .map(|value| (value, label(value, step, high.abs().max(low.abs()), scale)))
        .collect()
}

/// The smallest of 1, 2 and 5 times a power of ten that is at least `least`.
fn decimal_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= least * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

/// A label with enough decimals to tell ticks apart. All labels of an axis use one unit.
fn label(value: f64, step: f64, largest: f64, scale: Scale) -> String {
    match scale {
        Scale::Numbers if step < SMALL || largest >= PLAIN_MAX => {
            with_exponent(value, largest, step)
        }
        Scale::Numbers => plain(value, step),
        Scale::Counts => count(value, step, largest),
        Scale::Shares => format!("{} %", plain(100.0 * value, 100.0 * step)),
        Scale::Bytes => {
            let unit = (0..BYTE_UNITS.len() - 1)
                .find(|&unit| largest < 1024f64.powi(unit as i32 + 1))
                .unwrap_or(BYTE_UNITS.len() - 1);
            let size = 1024f64.powi(unit as i32);
            match value {
                0.0 => "0".to_owned(),
                // A power of two has a finite decimal fraction, so the default format is exact.
                value => format!("{} {}", value / size, BYTE_UNITS[unit]),
            }
        }
    }
}

/// Formats a count compactly: `20k`, `1.5M`.
fn count(value: f64, step: f64, largest: f64) -> String {
    let units = [(1e15, ""), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    match units.into_iter().find(|(size, _)| largest >= 10.0 * size && step >= 0.1 * size) {
        None => plain(value, step),
        Some((_, "")) => with_exponent(value, largest, step),
        Some(_) if value == 0.0 => "0".to_owned(),
        Some((size, unit)) => format!("{}{unit}", plain(value / size, (step / size).min(1.0))),
    }
}

/// Formats like `1.5e-7`; all labels share the exponent of the largest.
fn with_exponent(value: f64, largest: f64, step: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    // The tolerance is for rounding: 1e-7 is not exact.
    let exponent = (largest.log10() + 1e-9).floor();
    let size = 10f64.powf(exponent);
    format!("{}e{exponent}", plain(value / size, (step / size).min(1.0)))
}

fn plain(value: f64, step: f64) -> String {
    // The tolerance is for rounding: 0.1 is not exact.
    let decimals = (-(step.log10() + 1e-9).floor()).max(0.0) as usize;
    let digits = format!("{:.decimals$}", value.abs());
    let whole = digits.split('.').next().unwrap_or_default();
    let grouped: Vec<&str> = whole
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|group| std::str::from_utf8(group).unwrap_or_default())
        .collect();
    let is_zero = !digits.contains(|digit: char| ('1'..='9').contains(&digit));
    let sign = if value < 0.0 && !is_zero { "−" } else { "" };
    format!("{sign}{}{}", grouped.join(","), &digits[whole.len()..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(low: f64, high: f64, scale: Scale, expected: &[&str]) {
        let labels: Vec<String> =
            ticks(low, high, scale).into_iter().map(|(_, label)| label).collect();
        assert_eq!(labels, expected, "{low} to {high}");
    }

    #[test]
    fn numbers_are_round() {
        check(1.31, 5.9, Scale::Numbers, &["2", "3", "4", "5"]);
        check(0.0, 1.05, Scale::Numbers, &["0.0", "0.5", "1.0"]);
        check(2.301, 2.317, Scale::Numbers, &["2.305", "2.310", "2.315"]);
        check(0.0, 0.5, Scale::Numbers, &["0.0", "0.1", "0.2", "0.3", "0.4", "0.5"]);
        check(0.0, 59_084.0, Scale::Numbers, &["0", "20,000", "40,000"]);
        check(-0.5, 0.5, Scale::Numbers, &["−0.4", "−0.2", "0.0", "0.2", "0.4"]);
        check(0.0, 4e-7, Scale::Numbers, &["0", "1e-7", "2e-7", "3e-7", "4e-7"]);
        check(0.0, 3.15e-5, Scale::Numbers, &["0", "1e-5", "2e-5", "3e-5"]);
        check(0.0, 1.1e-5, Scale::Numbers, &["0", "0.5e-5", "1.0e-5"]);
        check(0.0, 3.2e-4, Scale::Numbers, &["0.0000", "0.0001", "0.0002", "0.0003"]);
        check(
            0.0,
            2.5e30,
            Scale::Numbers,
            &["0", "0.5e30", "1.0e30", "1.5e30", "2.0e30", "2.5e30"],
        );
    }

    #[test]
    fn counts_are_whole() {
        check(1.0, 2.0, Scale::Counts, &["1", "2"]);
        check(1.0, 500.0, Scale::Counts, &["100", "200", "300", "400", "500"]);
        check(400.0, 1500.0, Scale::Counts, &["500", "1,000", "1,500"]);
        check(1.0, 52_000.0, Scale::Counts, &["20k", "40k"]);
        check(
            9_999.0,
            10_004.0,
            Scale::Counts,
            &["9,999", "10,000", "10,001", "10,002", "10,003", "10,004"],
        );
        check(0.0, 1e6, Scale::Counts, &["0", "200k", "400k", "600k", "800k", "1,000k"]);
        check(1.0, 1e9, Scale::Counts, &["200M", "400M", "600M", "800M", "1,000M"]);
        check(0.0, u64::MAX as f64, Scale::Counts, &["0", "0.5e19", "1.0e19", "1.5e19"]);
    }

    #[test]
    fn shares_are_percent() {
        check(0.0, 1.0, Scale::Shares, &["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]);
        check(0.0, 1.05, Scale::Shares, &["0 %", "50 %", "100 %"]);
    }

    #[test]
    fn bytes_are_powers_of_two_in_one_unit() {
        let mebi = (1u64 << 20) as f64;
        check(0.0, 21.0 * mebi, Scale::Bytes, &["0", "8 MiB", "16 MiB"]);
        check(0.0, 1.3 * mebi, Scale::Bytes, &["0", "0.5 MiB", "1 MiB"]);
        check(0.0, 15.5 * 1024.0 * mebi, Scale::Bytes, &["0", "4 GiB", "8 GiB", "12 GiB"]);
        check(0.0, 3.0, Scale::Bytes, &["0", "1 B", "2 B", "3 B"]);
    }

    #[test]
    fn nothing_has_no_ticks() {
        for (low, high) in [(1.0, 1.0), (2.0, 1.0), (f64::NAN, 1.0), (0.0, f64::INFINITY)] {
            check(low, high, Scale::Numbers, &[]);
        }
        assert!(ticks(f64::MIN_POSITIVE, 2.0 * f64::MIN_POSITIVE, Scale::Numbers).len() < 10);
        assert!(ticks(0.0, f64::MAX, Scale::Bytes).len() < 10);
    }
}
