use super::ticks::{BYTE_UNITS, Scale};

/// The quantity of a chart, which decides how values are formatted. The script uses the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Loss,
    PerSecond,
    LearningRate,
    GradientNorm,
    Bytes,
    Share,
}

/// Larger numbers are formatted with an exponent.
pub(super) const PLAIN_MAX: f64 = 1e7;

impl Unit {
    /// The name in the script.
    pub(super) fn key(self) -> &'static str {
        match self {
            Unit::Loss => "loss",
            Unit::PerSecond => "speed",
            Unit::LearningRate => "rate",
            Unit::GradientNorm => "norm",
            Unit::Bytes => "bytes",
            Unit::Share => "share",
        }
    }

    /// The scale of the axis.
    pub(super) fn scale(self) -> Scale {
        match self {
            Unit::Bytes => Scale::Bytes,
            Unit::Share => Scale::Shares,
            _ => Scale::Numbers,
        }
    }

    pub(super) fn show(self, value: f64) -> String {
        match self {
            Unit::LearningRate => format!("{value:.2e}"),
            Unit::Bytes => show_bytes(value),
            Unit::Share => format!("{:.0} %", 100.0 * value),
            _ if value.abs() >= PLAIN_MAX => format!("{value:.2e}"),
            Unit::PerSecond => format!("{value:.0}"),
            Unit::GradientNorm => format!("{value:.3}"),
            Unit::Loss => format!("{value:.4}"),
        }
    }
}

/// `1.5 GiB`.
pub(super) fn show_bytes(bytes: f64) -> String {
    let (mut value, mut unit) = (bytes, 0);
    while value.abs() >= 1024.0 && unit + 1 < BYTE_UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = if unit == 0 || value >= 100.0 { 0 } else { 1 };
    format!("{value:.decimals$} {}", BYTE_UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_value_is_long() {
        assert_eq!(Unit::Loss.show(2.345_678), "2.3457");
        assert_eq!(Unit::Loss.show(1e30), "1.00e30");
        assert_eq!(Unit::LearningRate.show(3e-4), "3.00e-4");
        assert_eq!(Unit::Bytes.show(1.5 * 1024.0 * 1024.0), "1.5 MiB");
        for unit in [Unit::Loss, Unit::PerSecond, Unit::LearningRate, Unit::GradientNorm] {
            for value in [0.0, -1.0, 1e-30, 9_999_999.4, f64::MAX, f64::NAN] {
                let shown = unit.show(value);
                assert!(shown.len() <= 12, "{unit:?} {shown}");
            }
        }
    }
}
