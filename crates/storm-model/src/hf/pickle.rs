//! Recognizes pickle files by their content, regardless of their name.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// The safetensors format's own limit on the header size.
const SAFETENSORS_HEADER_BYTES_MAX: u64 = 100_000_000;

/// Bytes at each end of a zip archive that are searched for the name of a pickle.
const WINDOW_BYTES: u64 = 64 << 10;

/// Whether a file is a pickle: a bare one, one in PyTorch's old format (which starts like one), or
/// a PyTorch zip archive that contains one. Unreadable files are not.
pub(super) fn is_pickle(file: &File) -> bool {
    let length = file.metadata().map_or(0, |metadata| metadata.len());
    let start = read_window(file, 0, length.min(WINDOW_BYTES));
    match start.as_slice() {
        // A safetensors header of 640 bytes starts with the same two bytes as a pickle.
        start if looks_like_safetensors(start) => false,
        [0x80, 0x02..=0x05, ..] => true,
        [b'P', b'K', 0x03, 0x04, ..] => {
            // The directory of a zip archive is at its end.
            let end =
                read_window(file, length.saturating_sub(WINDOW_BYTES), length.min(WINDOW_BYTES));
            names_pickle(&start) || names_pickle(&end)
        }
        _ => false,
    }
}

fn names_pickle(bytes: &[u8]) -> bool {
    [b"data.pkl".as_slice(), b".pickle"]
        .iter()
        .any(|name| bytes.windows(name.len()).any(|window| window == *name))
}

fn looks_like_safetensors(start: &[u8]) -> bool {
    match start.first_chunk::<9>() {
        Some([length @ .., b'{']) => u64::from_le_bytes(*length) <= SAFETENSORS_HEADER_BYTES_MAX,
        _ => false,
    }
}

fn read_window(file: &File, offset: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length.min(WINDOW_BYTES) as usize];
    match file.read_exact_at(&mut bytes, offset) {
        Ok(()) => bytes,
        Err(_) => Vec::new(),
    }
}
