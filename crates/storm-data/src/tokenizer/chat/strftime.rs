//! Implements `strftime_now` for templates.

use minijinja::{Error, ErrorKind};
use std::fmt::Write;

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats a time, in seconds since 1970 local time, like Python's `strftime` in the C locale.
pub(super) fn strftime(seconds: i64, format: &str) -> Result<String, Error> {
    let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let weekday = (days + 4).rem_euclid(7) as usize;
    let month_name = MONTHS[(month - 1) as usize];
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        // A minus sign omits leading zeros.
        let (bare, directive) = match characters.next() {
            Some('-') => (true, characters.next()),
            other => (false, other),
        };
        let mut number = |value: i64, width: usize| {
            let width = if bare { 0 } else { width };
            let _ = write!(text, "{value:0width$}");
        };
        match directive {
            Some('Y') => number(year, 4),
            Some('y') => number(year.rem_euclid(100), 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('H') => number(hour, 2),
            Some('I') => number((hour + 11) % 12 + 1, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('j') => number(days - days_before(year) + 1, 3),
            Some('A') => text.push_str(DAYS[weekday]),
            Some('a') => text.push_str(&DAYS[weekday][..3]),
            Some('B') => text.push_str(month_name),
            Some('b') => text.push_str(&month_name[..3]),
            Some('p') => text.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('%') => text.push('%'),
            other => {
                let other = other.map_or_else(String::new, String::from);
                let problem = format!("strftime_now does not know %{other}");
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
        }
    }
    Ok(text)
}

/// Days from 1970 to the first day of a year.
fn days_before(year: i64) -> i64 {
    let before = year - 1;
    365 * (year - 1970) + (before.div_euclid(4) - before.div_euclid(100) + before.div_euclid(400))
        - 477
}

/// Year, month and day from a number of days since 1970.
fn civil(days: i64) -> (i64, i64, i64) {
    let mut year = 1970 + days.div_euclid(366);
    while days_before(year + 1) <= days {
        year += 1;
    }
    let is_leap = days_before(year + 1) - days_before(year) == 366;
    let february = if is_leap { 29 } else { 28 };
    let mut left = days - days_before(year);
    for (month, length) in (1..).zip([31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]) {
        if left < length {
            return (year, month, left + 1);
        }
        left -= length;
    }
    (year, 12, 31)
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn dates_are_those_of_python() {
        let all = "%Y-%m-%d %H:%M:%S %j %A %a %B %b %y %I %p %-d%%";
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 001 Thursday Thu January Jan 70 12 AM 1%"),
            (951_782_399, "2000-02-28 23:59:59 059 Monday Mon February Feb 00 11 PM 28%"),
            (951_868_800, "2000-03-01 00:00:00 061 Wednesday Wed March Mar 00 12 AM 1%"),
            (1_735_689_599, "2024-12-31 23:59:59 366 Tuesday Tue December Dec 24 11 PM 31%"),
            (4_102_444_800, "2100-01-01 00:00:00 001 Friday Fri January Jan 00 12 AM 1%"),
        ] {
            assert_eq!(strftime(seconds, all).unwrap(), expected);
        }
        strftime(0, "%Q").unwrap_err();
    }
}
