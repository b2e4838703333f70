//! Library directories to search in addition to the dynamic loader's.

use crate::launch::Variables;
use std::path::{Path, PathBuf};

/// How many ancestors to check: a daemon and perhaps a script run between a launcher and its ranks.
const ANCESTORS_MAX: usize = 4;

/// The directory named by a variable. A relative path is ignored: it would depend on the working
/// directory, where any user may have put a library.
pub(crate) fn named(variables: &Variables, variable: &str) -> Option<PathBuf> {
    variables.get(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// The `lib` directories next to the `PATH` directories that contain a program.
pub(crate) fn beside_program(variables: &Variables, program: &str) -> Vec<PathBuf> {
    let Some(path) = variables.get("PATH") else { return Vec::new() };
    let folders = std::env::split_paths(path).filter(|folder| folder.is_absolute());
    let found = folders.filter(|folder| folder.join(program).is_file());
    found.filter_map(|folder| Some(folder.parent()?.join("lib"))).collect()
}

/// The `lib` directories next to the executables of this process's ancestors. These include the
/// launcher, even if it was started by its path.
pub(crate) fn beside_ancestors() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let mut process = Some("self".to_owned());
    for _ in 0..ANCESTORS_MAX {
        process = process.and_then(|process| parent(&process));
        let Some(process) = &process else { break };
        // The link of another user's process is not readable.
        let Ok(program) = std::fs::read_link(format!("/proc/{process}/exe")) else { continue };
        folders.extend(program.parent().and_then(Path::parent).map(|prefix| prefix.join("lib")));
    }
    folders
}

/// The parent's process ID.
fn parent(process: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    Some(line.trim().to_owned()).filter(|parent| parent != "0")
}

/// The active Python environments.
pub(crate) fn python_environments(variables: &Variables) -> Vec<PathBuf> {
    ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| named(variables, name)).collect()
}

/// The `site-packages` directories of a Python environment, one per Python version.
pub(crate) fn site_packages(environment: &Path) -> Vec<PathBuf> {
    let Ok(pythons) = std::fs::read_dir(environment.join("lib")) else { return Vec::new() };
    let mut folders: Vec<PathBuf> =
        pythons.flatten().map(|python| python.path().join("site-packages")).collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_is_an_ancestor() {
        let parent = format!("/proc/{}/exe", std::os::unix::process::parent_id());
        let program = std::fs::read_link(parent).unwrap();
        let beside = program.parent().and_then(Path::parent).unwrap().join("lib");
        let found = beside_ancestors();
        assert_eq!(found.first(), Some(&beside));
        assert!(found.len() <= ANCESTORS_MAX);
    }

    #[test]
    fn relative_folders_do_not_count() {
        let variables: Variables = [("A", ""), ("B", "lib"), ("C", "/opt/mpi"), ("PATH", "src:.:")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
        assert_eq!(named(&variables, "A"), None);
        assert_eq!(named(&variables, "B"), None);
        assert_eq!(named(&variables, "C"), Some("/opt/mpi".into()));
        // Tests run in this crate's directory, which contains `src/lib.rs`.
        assert_eq!(beside_program(&variables, "lib.rs"), Vec::<PathBuf>::new());
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
        let variables = [("PATH".to_owned(), source.to_owned())].into();
        let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("lib");
        assert_eq!(beside_program(&variables, "lib.rs"), [beside]);
        assert_eq!(beside_program(&variables, "mpirun"), Vec::<PathBuf>::new());
    }
}
