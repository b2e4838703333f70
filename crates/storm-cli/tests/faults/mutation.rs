//! Seeded damage to the bytes of a file, as by disks, truncated transfers, editors, and attackers.

use crate::random::Random;
use std::ops::Range;

/// Numbers at the limits of types, and values that are not numbers.
const NUMBERS: [&str; 22] = [
    "0",
    "-1",
    "1",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "340282366920938463463374607431768211456",
    "-9223372036854775809",
    "1e308",
    "1e309",
    "-1e400",
    "1e-320",
    "0.1",
    "NaN",
    "inf",
    "null",
];

/// Text that is not a plain name.
const TEXTS: [&str; 9] = [
    "",
    "../../../etc/passwd",
    "/dev/zero",
    "\u{1b}[31m",
    "\\u0000",
    "\\ud800",
    "\u{202e}\u{feff}",
    "F64",
    "a\\\"b",
];

/// Lengths for binary headers.
const LENGTHS: [u64; 8] = [0, 1, 7, 1 << 31, (1 << 32) - 1, 1 << 40, i64::MAX as u64, u64::MAX];

/// Deeper than any recursive parser should follow.
const DEPTH: usize = 50_000;

/// Maximum length of blocks that are moved, copied, and cleared.
const BLOCK_MAX: usize = 512;

/// Damages bytes. Adds some to an empty file.
pub(crate) fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    // Sometimes several times.
    let times = if random.below(4) == 0 { 2 + random.below(3) } else { 1 };
    for _ in 0..times {
        mutate_once(bytes, random);
    }
}

fn mutate_once(bytes: &mut Vec<u8>, random: &mut Random) {
    let insert_at = random.index(bytes.len() + 1);
    if bytes.is_empty() {
        return bytes.extend(noise(random));
    }
    let at = random.index(bytes.len());
    match random.below(16) {
        0..3 => bytes[at] ^= 1 << random.below(8),
        3 => bytes[at] = random.next() as u8,
        4 => bytes.truncate(at),
        5 => drop(bytes.splice(insert_at..insert_at, noise(random))),
        6 => {
            let copy = bytes[block(at, bytes.len(), random)].to_vec();
            drop(bytes.splice(insert_at..insert_at, copy));
        }
        7 => drop(bytes.drain(block(at, bytes.len(), random))),
        8 => {
            let range = block(at, bytes.len(), random);
            bytes[range].fill(0);
        }
        9 => {
            let range = block(at, bytes.len(), random);
            bytes[range].reverse();
        }
        10 | 11 => replace(bytes, random, u8::is_ascii_digit, &NUMBERS),
        12 | 13 => replace(bytes, random, u8::is_ascii_alphabetic, &TEXTS),
        14 => {
            let open = random.pick(&["[", "{\"a\":", "[[", "a=[", "("]).repeat(DEPTH);
            drop(bytes.splice(insert_at..insert_at, open.into_bytes()));
        }
        _ => {
            // Often at the front, where headers store their length.
            let at = if random.below(2) == 0 { 0 } else { at };
            let end = bytes.len().min(at + 8);
            let length = random.pick(&LENGTHS).to_le_bytes();
            bytes[at..end].copy_from_slice(&length[..end - at]);
        }
    }
}

/// A block that begins here.
fn block(at: usize, len: usize, random: &mut Random) -> Range<usize> {
    at..len.min(at + 1 + random.index(BLOCK_MAX))
}

fn noise(random: &mut Random) -> Vec<u8> {
    (0..1 + random.below(32)).map(|_| random.next() as u8).collect()
}

/// Replaces a run of bytes of one kind.
fn replace(
    bytes: &mut Vec<u8>,
    random: &mut Random,
    is_of_kind: impl Fn(&u8) -> bool,
    by: &[&str],
) {
    let from = random.index(bytes.len());
    let starts = (from..bytes.len()).chain(0..from);
    let Some(start) = starts.into_iter().find(|&at| is_of_kind(&bytes[at])) else { return };
    let before = bytes[..start].iter().rev().take_while(|&byte| is_of_kind(byte)).count();
    let after = bytes[start..].iter().take_while(|&byte| is_of_kind(byte)).count();
    let text = random.pick(by).bytes();
    drop(bytes.splice(start - before..start + after, text));
}
