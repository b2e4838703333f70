/// `1.23 s`, `45.6 ms`, `789 ns`: three digits, and the unit that needs no more.
pub(super) fn show_ns(ns: u64) -> String {
    let units = [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs")];
    match units.into_iter().find(|&(size, _)| ns >= size) {
        None => format!("{ns} ns"),
        Some((size, unit)) => format!("{} {unit}", three_digits(ns as f64 / size as f64)),
    }
}

/// `1.50 GiB`, `640 B`.
pub(super) fn show_bytes(bytes: u64) -> String {
    let units = [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|&(size, _)| bytes >= size) {
        None => format!("{bytes} B"),
        Some((size, unit)) => format!("{} {unit}", three_digits(bytes as f64 / size as f64)),
    }
}

/// `97.3 %`.
pub(super) fn show_share(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn three_digits(value: f64) -> String {
    let decimals = match value {
        ..10.0 => 2,
        10.0..100.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_leave_three_digits() {
        let times = [0, 789, 1_500, 45_600_000, 1_234_000_000, 120_000_000_000].map(show_ns);
        assert_eq!(times, ["0 ns", "789 ns", "1.50 µs", "45.6 ms", "1.23 s", "120 s"]);
        let sizes = [640, 1536, 300 << 20, 3 << 29].map(show_bytes);
        assert_eq!(sizes, ["640 B", "1.50 KiB", "300 MiB", "1.50 GiB"]);
        assert_eq!(show_share(0.9731), "97.3 %");
    }
}
