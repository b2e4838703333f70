//! How much of a file is in the page cache.

use memmap2::Mmap;
use std::fs::File;
use std::io;

/// Bytes of a file that are in the page cache.
///
/// # Errors
/// The file cannot be mapped.
pub fn cached_bytes(file: &File) -> io::Result<u64> {
    if file.metadata()?.len() == 0 {
        return Ok(0);
    }
    // SAFETY: the map is never read. Only its page states are queried.
    let map = unsafe { Mmap::map(file)? };
    // SAFETY: has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(1) as usize;
    let mut states = vec![0u8; map.len().div_ceil(page)];
    // SAFETY: the map has this length, and `states` has one byte per page.
    let result =
        unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), map.len(), states.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let cached = states.iter().filter(|&&state| state & 1 == 1).count();
    Ok((cached * page).min(map.len()) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_was_just_written_is_in_the_cache() {
        let path = std::env::temp_dir().join(format!("storm-cached-{}", std::process::id()));
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .expect("a file");
        assert_eq!(cached_bytes(&file).expect("empty"), 0);
        file.write_all(&[7; 100_000]).expect("written");
        assert_eq!(cached_bytes(&file).expect("mapped"), 100_000);
        std::fs::remove_file(&path).expect("ours");
    }
}
