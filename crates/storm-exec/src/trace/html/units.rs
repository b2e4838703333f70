/// `1.23 s`, `45.6 ms`, `789 ns`: three digits.
pub(super) fn show_ns(ns: u64) -> String {
    in_units(ns, &["ns", "µs", "ms", "s"], 1e3)
}

/// `1.50 GiB`, `640 B`.
pub(super) fn show_bytes(bytes: u64) -> String {
    in_units(bytes, &["B", "KiB", "MiB", "GiB", "TiB"], 1024.0)
}

/// In the first unit with at most three digits before the point.
fn in_units(value: u64, units: &[&str], step: f64) -> String {
    let (mut scaled, mut unit) = (value as f64, 0);
    // A value that would round to four digits also goes to the next unit.
    while scaled >= 999.5 && unit + 1 < units.len() {
        scaled /= step;
        unit += 1;
    }
    let decimals = match scaled {
        _ if unit == 0 => 0,
        ..9.995 => 2,
        9.995..99.95 => 1,
        _ => 0,
    };
    format!("{scaled:.decimals$} {}", units[unit])
}

/// `97.3 %`.
pub(super) fn show_share(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_leave_three_digits() {
        let times = [0, 789, 1_500, 45_600_000, 999_700_000, 120_000_000_000].map(show_ns);
        assert_eq!(times, ["0 ns", "789 ns", "1.50 µs", "45.6 ms", "1.00 s", "120 s"]);
        let sizes = [640, 1536, 300 << 20, 1023 << 20, 10_736_000_000].map(show_bytes);
        assert_eq!(sizes, ["640 B", "1.50 KiB", "300 MiB", "1.00 GiB", "10.0 GiB"]);
        assert_eq!(show_share(0.9731), "97.3 %");
    }
}
