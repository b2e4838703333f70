//! Folders of the repository.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The repository's root folder.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root")
}

/// The folder in which cargo builds: `CARGO_TARGET_DIR`, or `target` in the root.
pub(crate) fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// The folder of release binaries.
pub(crate) fn release_dir() -> PathBuf {
    target_dir().join("release")
}

/// The folder of the binaries and examples that tests build.
pub(crate) fn debug_dir() -> PathBuf {
    target_dir().join("debug")
}

/// The folders in `crates/`, sorted by name.
pub(crate) fn crate_dirs() -> Result<Vec<PathBuf>> {
    let dirs = entries(&root().join("crates"))?;
    Ok(dirs.into_iter().filter(|dir| dir.join("Cargo.toml").is_file()).collect())
}

/// The entries of a folder, sorted by name. Empty if there is no such folder.
pub(crate) fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let read = std::fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))?;
    let mut paths = read.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// The last part of a path as text.
pub(crate) fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}
