//! Byte counts and other sizes: parsing and display.

use storm_device::cpu::THREADS_MAX;
pub(crate) use storm_host::show_bytes as show;

/// Parses `5GiB`, `500MB`, `1048576B`. A number alone is refused: `16` usually means gigabytes.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == ' ');
    let unit = text[digits.len()..].trim();
    let number: f64 = digits.trim().parse().map_err(|_| format!("`{text}` is not a size"))?;
    let scale: u64 = match unit {
        "" => return Err(without_unit(number, digits.trim())),
        "B" => 1,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => {
            return Err(format!(
                "unknown unit `{unit}`; use B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
            ));
        }
    };
    let bytes = number * scale as f64;
    if !(1.0..9e18).contains(&bytes) {
        return Err(format!("`{text}` is out of range"));
    }
    Ok(bytes as u64)
}

/// A size that [`parse`] reads as these bytes, in the largest binary unit that divides them.
pub(crate) fn exact(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.iter().find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift) {
        Some((shift, unit)) => format!("{}{unit}", bytes >> shift),
        None => format!("{bytes}B"),
    }
}

/// Numbers above this are more likely bytes than gigabytes.
const GIGABYTES_MAX: f64 = 10_000.0;

fn without_unit(number: f64, digits: &str) -> String {
    let meant = if number < GIGABYTES_MAX { "GB" } else { "B" };
    format!("`{digits}` has no unit; did you mean {digits}{meant}?")
}

/// Limit on counts, so that products of several do not overflow.
const COUNT_MAX: usize = 1 << 30;

pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=COUNT_MAX) => Ok(count),
        Ok(_) => Err(format!("must be between 1 and {COUNT_MAX}")),
        Err(_) => Err("must be a whole number".to_owned()),
    }
}

/// Parses a number of threads.
pub(crate) fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=THREADS_MAX) => Ok(count),
        Ok(_) => Err(format!("there can be 1 to {THREADS_MAX} threads")),
        Err(_) => Err("must be a whole number".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        assert_eq!(parse("5GiB"), Ok(5 << 30));
        assert_eq!(parse("1.5 MB"), Ok(1_500_000));
        assert_eq!(parse("4096B"), Ok(4096));
        assert_eq!(parse("16").unwrap_err(), "`16` has no unit; did you mean 16GB?");
        assert_eq!(parse("1048576").unwrap_err(), "`1048576` has no unit; did you mean 1048576B?");
        assert!(parse("5 parsecs").is_err());
        assert!(parse("").is_err());
        assert!(parse("-1GB").is_err());
        assert!(parse("nanGB").is_err());
        assert_eq!(show(1536), "1.50 KiB");
        assert_eq!(show(7), "7 B");
        assert_eq!((exact(256 << 20), exact(0)), ("256MiB".to_owned(), "0B".to_owned()));
        for bytes in [1, 1000, 1024, 1 << 30, (1 << 40) + 1024, 3 << 41] {
            assert_eq!(parse(&exact(bytes)), Ok(bytes), "{}", exact(bytes));
        }
    }
}
