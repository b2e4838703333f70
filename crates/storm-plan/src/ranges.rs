//! Sets of bytes as lists of ranges.

use std::ops::Range;

/// Sorts ranges and merges those that overlap or touch.
pub fn merged_ranges(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_overlap_or_touch_are_one() {
        let ranges = vec![8..12, 0..4, 4..6, 9..10, 20..30, 11..14];
        assert_eq!(merged_ranges(ranges), [0..6, 8..14, 20..30]);
        assert_eq!(merged_ranges(Vec::new()), []);
    }
}
