//! A cache on disk, in the user's cache folder, for results that are slow to compute and the same on the next
//! start.
//!
//! An entry stores its full key and a hash of its value, so a stale or damaged entry is never used.

use super::environment;
use std::path::{Path, PathBuf};
use storm_files::{read_private, write_private};

/// The root of the user's caches: `STORM_CACHE`, or `storm` in the system's cache folder. `None` if
/// neither is set.
pub fn cache_folder() -> Option<PathBuf> {
    cache_folder_by(environment::folder)
}

/// `folder` looks up the path in an environment variable.
fn cache_folder_by(folder: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    folder("STORM_CACHE").or_else(|| {
        let of_home = || folder("HOME").map(|home| home.join(".cache"));
        Some(folder("XDG_CACHE_HOME").or_else(of_home)?.join("storm"))
    })
}

/// Entries of one kind.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    /// Without a folder, nothing is cached.
    folder: Option<PathBuf>,
    extension: &'static str,
}

/// The largest entry, the cubin of one source, is a few hundred kilobytes.
const ENTRY_BYTES_MAX: u64 = 64 << 20;

const HASH_BYTES: usize = blake3::OUT_LEN;

const MAGIC: &[u8; 8] = b"STORMK02";

impl Cache {
    /// The user's cache, in a subfolder of [`cache_folder`].
    pub(super) fn of_user(folder: &str, extension: &'static str) -> Cache {
        Cache { folder: cache_folder().map(|all| all.join(folder)), extension }
    }

    pub(super) fn read(&self, key: &str) -> Option<Vec<u8>> {
        read_entry(&self.path(key)?, key.as_bytes())
    }

    /// Best effort: a failure to write costs only time.
    pub(super) fn write(&self, key: &str, value: &[u8]) {
        if let Some(path) = self.path(key) {
            let _ = write_private(&path, &entry(key.as_bytes(), value));
        }
    }

    fn path(&self, key: &str) -> Option<PathBuf> {
        let name = format!("{}.{}", blake3::hash(key.as_bytes()).to_hex(), self.extension);
        Some(self.folder.as_ref()?.join(name))
    }
}

/// Layout: magic, key length, key, hash of the value, value.
fn entry(key: &[u8], value: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend((key.len() as u64).to_le_bytes());
    bytes.extend(key);
    bytes.extend(blake3::hash(value).as_bytes());
    bytes.extend(value);
    bytes
}

fn read_entry(path: &Path, key: &[u8]) -> Option<Vec<u8>> {
    let bytes = read_private(path, ENTRY_BYTES_MAX).ok()?;
    let rest = bytes.strip_prefix(MAGIC)?;
    let (length, rest) = rest.split_at_checked(8)?;
    let length = usize::try_from(u64::from_le_bytes(length.try_into().ok()?)).ok()?;
    let (stored_key, rest) = rest.split_at_checked(length)?;
    let (hash, value) = rest.split_at_checked(HASH_BYTES)?;
    let intact = blake3::hash(value).as_bytes() == hash;
    (stored_key == key && intact).then(|| value.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// The cache folder when these variables are set.
    fn cache_with(variables: &[(&str, &str)]) -> Option<PathBuf> {
        cache_folder_by(|name| {
            let (_, value) = variables.iter().find(|(known, _)| *known == name)?;
            environment::absolute(value.into())
        })
    }

    #[test]
    fn no_cache_depends_on_where_the_process_was_started() {
        let home = ("HOME", "/home/user");
        let default = Some(PathBuf::from("/home/user/.cache/storm"));
        for value in ["", ".", "cache", "./cache", "../cache"] {
            assert_eq!(cache_with(&[("STORM_CACHE", value), home]), default, "{value}");
            assert_eq!(cache_with(&[("XDG_CACHE_HOME", value), home]), default, "{value}");
            assert_eq!(cache_with(&[("HOME", value)]), None, "{value}");
        }
        assert_eq!(cache_with(&[("STORM_CACHE", "/c"), home]), Some(PathBuf::from("/c")));
        assert_eq!(cache_with(&[("XDG_CACHE_HOME", "/x"), home]), Some(PathBuf::from("/x/storm")));
    }

    #[test]
    fn only_whole_entries_of_the_same_key_and_user_are_read() {
        let folder = std::env::temp_dir().join(format!("storm-cache-{}", std::process::id()));
        let path = folder.join("an-entry");
        let (key, value) = (b"compiler and source".as_slice(), b"machine code".as_slice());
        let whole = entry(key, value);
        write_private(&path, &whole).expect("written");
        assert_eq!(read_entry(&path, key).as_deref(), Some(value));
        assert_eq!(read_entry(&path, b"another compiler"), None);
        for place in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[place] ^= 1;
            write_private(&path, &damaged).expect("written");
            assert_eq!(read_entry(&path, key), None, "byte {place}");
            write_private(&path, &whole[..place]).expect("written");
            assert_eq!(read_entry(&path, key), None, "cut at {place}");
        }
        write_private(&path, &whole).expect("written");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).expect("ours");
        assert_eq!(read_entry(&path, key), None);
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
