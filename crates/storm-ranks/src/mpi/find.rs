//! Finds the MPI library that belongs to the launcher.
//!
//! A process can load only one MPI library, because two would interfere. So the launcher determines
//! which one is loaded, and the caller checks that the library sees the ranks that the launcher
//! started.

use super::MpiError;
use super::abi::{Abi, Library, bind, has_symbol};
use crate::folders::{beside_ancestors, beside_program, named, python_environments};
use crate::launch::{Launcher, Variables};
use libloading::os::unix as loading;
use std::path::{Path, PathBuf};

/// Names the library, if the launcher's is not found or is the wrong one.
pub(super) const VARIABLE: &str = "STORM_MPI_LIBRARY";

const STANDARD: (&str, Abi) = ("libmpi_abi.so.1", Abi::Standard);
const MPICH: (&str, Abi) = ("libmpi.so.12", Abi::Mpich);
const OPEN_MPI: (&str, Abi) = ("libmpi.so.40", Abi::OpenMpi);

/// A library to try to load.
#[derive(Debug, PartialEq, Eq)]
struct Candidate {
    path: PathBuf,
    abi: Abi,
}

/// Loads the library for ranks that this launcher started.
pub(super) fn load(
    launcher: Launcher,
    variables: &Variables,
) -> Result<Box<dyn Library>, MpiError> {
    if let Some(path) = variables.get(VARIABLE) {
        return load_named(Path::new(path));
    }
    let names = match launcher {
        Launcher::OpenMpi => [OPEN_MPI].as_slice(),
        Launcher::Mpich => &[STANDARD, MPICH],
        Launcher::Alone | Launcher::Torchrun | Launcher::Slurm => {
            return Err(MpiError::NotByMpi { launcher });
        }
    };
    let mut tried = Vec::new();
    for candidate in candidates(names, variables, beside_ancestors()) {
        match open(&candidate.path) {
            Ok(library) => {
                let bound = bind(&library, candidate.abi);
                std::mem::forget(library);
                return bound.map_err(|symbol| MpiError::Symbol { path: candidate.path, symbol });
            }
            Err(_) => tried.push(candidate.path.display().to_string()),
        }
    }
    Err(MpiError::NotFound { launcher, tried: tried.join(", ") })
}

/// In order: the directory named by the launcher, next to the launcher, the loader's path, next to
/// any `mpirun`, and Python environments.
fn candidates(
    names: &[(&str, Abi)],
    variables: &Variables,
    beside_launcher: Vec<PathBuf>,
) -> Vec<Candidate> {
    let mut folders = Vec::new();
    folders.extend(named(variables, "OMPI_LIBDIR_LOC"));
    folders.extend(named(variables, "OPAL_PREFIX").map(|prefix| prefix.join("lib")));
    folders.extend(beside_launcher);
    let after_loader = folders.len();
    folders.extend(beside_program(variables, "mpirun"));
    folders.extend(named(variables, "MPI_HOME").map(|prefix| prefix.join("lib")));
    folders.extend(python_environments(variables).iter().map(|prefix| prefix.join("lib")));
    let in_folder = |folder: &PathBuf| {
        let folder = folder.clone();
        names.iter().map(move |&(name, abi)| Candidate { path: folder.join(name), abi })
    };
    let by_loader = names.iter().map(|&(name, abi)| Candidate { path: name.into(), abi });
    let (first, last) = folders.split_at(after_loader);
    first
        .iter()
        .flat_map(in_folder)
        .chain(by_loader)
        .chain(last.iter().flat_map(in_folder))
        .collect()
}

/// Loads a library named by the user, with any ABI.
fn load_named(path: &Path) -> Result<Box<dyn Library>, MpiError> {
    let fail = |reason: String| MpiError::Named { path: path.to_owned(), reason };
    if !path.is_absolute() {
        return Err(fail("it is not an absolute path".to_owned()));
    }
    let library = open(path).map_err(|error| {
        // The loader's message is in the error's source.
        let source = std::error::Error::source(&error).map(ToString::to_string);
        fail(source.unwrap_or_else(|| error.to_string()))
    })?;
    let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let is_standard = [path, &real].iter().any(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libmpi_abi."))
    });
    let abi = if is_standard {
        Abi::Standard
    } else if has_symbol(&library, "ompi_mpi_comm_world") {
        Abi::OpenMpi
    } else if has_symbol(&library, "MPIR_Dup_fn") {
        Abi::Mpich
    } else {
        return Err(fail("it is no MPI library that STORM knows".to_owned()));
    };
    let bound =
        bind(&library, abi).map_err(|symbol| MpiError::Symbol { path: path.to_owned(), symbol });
    // Never unloaded: function pointers into it are kept, and MPI installs its own handlers.
    std::mem::forget(library);
    bound
}

fn open(path: &Path) -> Result<loading::Library, libloading::Error> {
    // RTLD_GLOBAL because Open MPI's plugins look up its symbols in the whole process.
    // SAFETY: MPI libraries have no preconditions for being loaded.
    unsafe { loading::Library::open(Some(path), loading::RTLD_NOW | loading::RTLD_GLOBAL) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(pairs: &[(&str, &str)]) -> Variables {
        pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    #[test]
    fn the_launchers_own_library_comes_first() {
        let variables = variables(&[("OPAL_PREFIX", "/opt/ompi"), ("VIRTUAL_ENV", "/opt/env")]);
        let found = candidates(&[OPEN_MPI], &variables, vec!["/opt/launcher/lib".into()]);
        let expected = [
            "/opt/ompi/lib/libmpi.so.40",
            "/opt/launcher/lib/libmpi.so.40",
            "libmpi.so.40",
            "/opt/env/lib/libmpi.so.40",
        ];
        assert_eq!(
            found.iter().map(|candidate| candidate.path.to_str().unwrap()).collect::<Vec<_>>(),
            expected
        );
    }

    #[test]
    fn the_standard_interface_comes_before_mpichs_own() {
        let found =
            candidates(&[STANDARD, MPICH], &variables(&[("CONDA_PREFIX", "/opt/env")]), Vec::new());
        let abis: Vec<Abi> = found.iter().map(|candidate| candidate.abi).collect();
        assert_eq!(abis, [Abi::Standard, Abi::Mpich, Abi::Standard, Abi::Mpich]);
    }

    #[test]
    fn a_named_library_must_be_mpi() {
        let reason = |path: &str| match load(Launcher::Mpich, &variables(&[(VARIABLE, path)])) {
            Err(MpiError::Named { reason, .. }) => reason,
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("{path} was accepted"),
        };
        assert!(reason("libmpi.so.40").contains("absolute"));
        assert!(reason("/no/such/libmpi.so.40").contains("/no/such"));
        // The C library is not an MPI library.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps.split_whitespace().find(|word| word.contains("libc.so")).unwrap();
        assert!(reason(libc).contains("no MPI library"));
    }

    #[test]
    fn launchers_without_mpi_are_refused() {
        for launcher in [Launcher::Alone, Launcher::Torchrun, Launcher::Slurm] {
            let error = load(launcher, &Variables::new()).err().expect("refused").to_string();
            assert!(error.contains("mpirun -n"), "{error}");
        }
    }
}
