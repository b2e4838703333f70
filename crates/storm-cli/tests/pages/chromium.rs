//! Finds Chromium, for tests and for `cargo xtask test`, which says so if there is none.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Names of the program. The first one found wins.
const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/// What to do if there is none.
pub(crate) const INSTALL: &str = "no Chromium was found, so pages of reports are not tested in a browser. Install it \
    (Debian: apt install chromium; Fedora: dnf install chromium), or set STORM_CHROMIUM=/path/to/chromium";

/// The Chromium of `STORM_CHROMIUM`, or else one in the `PATH`.
pub(crate) fn find() -> Option<PathBuf> {
    let chosen = std::env::var_os("STORM_CHROMIUM").filter(|chosen| !chosen.is_empty());
    chosen.map(PathBuf::from).or_else(|| in_folders(std::env::var_os("PATH")?))
}

fn in_folders(path: OsString) -> Option<PathBuf> {
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let places = NAMES.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    places.into_iter().find(|place| Path::is_file(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_name_wins_over_the_first_folder() {
        let folder = std::env::temp_dir().join(format!("storm-chromium-{}", std::process::id()));
        let [a, b] = ["a", "b"].map(|name| folder.join(name));
        for place in [&a, &b] {
            std::fs::create_dir_all(place).unwrap();
        }
        std::fs::write(a.join("google-chrome"), "").unwrap();
        std::fs::write(b.join("chromium"), "").unwrap();
        let path = |folders: &[&PathBuf]| std::env::join_paths(folders).unwrap();
        let found = [in_folders(path(&[&a, &b])), in_folders(path(&[&a])), in_folders(path(&[]))];
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, [Some(b.join("chromium")), Some(a.join("google-chrome")), None]);
    }
}
