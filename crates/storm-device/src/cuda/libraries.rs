//! Finds the CUDA libraries at run time: the driver, NVRTC and cuBLASLt.
//!
//! `cudarc` loads a library by its plain name at first use and panics if that fails. So each
//! library is searched for first. One that is not on the loader's path is loaded here by its full
//! path; from then on its plain name refers to the loaded one.

use super::{CudaError, environment};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

const NVRTC: &str = "libnvrtc.so.13";
const BLAS: &str = "libcublasLt.so.13";

/// Checks that the driver can be loaded.
pub(super) fn require_driver() -> Result<(), CudaError> {
    static FOUND: OnceLock<bool> = OnceLock::new();
    // SAFETY: loads libcuda, whose initializers have no preconditions.
    let found = *FOUND.get_or_init(|| unsafe { cudarc::driver::sys::is_culib_present() });
    if found { Ok(()) } else { Err(CudaError::NoDriver) }
}

/// Loads NVRTC. Works without a driver or card.
pub fn require_nvrtc() -> Result<(), CudaError> {
    static FOUND: OnceLock<bool> = OnceLock::new();
    if *FOUND.get_or_init(|| preload(NVRTC)) {
        Ok(())
    } else {
        Err(CudaError::LibraryMissing { library: NVRTC })
    }
}

/// Loads cuBLASLt.
pub(super) fn require_blas() -> Result<(), CudaError> {
    require_driver()?;
    static FOUND: OnceLock<bool> = OnceLock::new();
    if *FOUND.get_or_init(|| preload(BLAS)) {
        Ok(())
    } else {
        Err(CudaError::LibraryMissing { library: BLAS })
    }
}

fn preload(name: &str) -> bool {
    let candidates = std::iter::once(PathBuf::from(name))
        .chain(folders(environment::folder).into_iter().map(|folder| folder.join(name)));
    for path in candidates {
        load_companions(&path);
        if load(&path) {
            return true;
        }
    }
    false
}

/// NVRTC opens its built-ins by their plain name. If NVRTC is not on the loader's path, they must be
/// loaded first.
fn load_companions(path: &Path) {
    let is_nvrtc = path.file_name().is_some_and(|name| name == NVRTC);
    let Some(folder) = path.parent().filter(|_| is_nvrtc) else { return };
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so") {
            load(&entry.path());
        }
    }
}

/// Loads a library for the whole process; it is never unloaded.
fn load(path: &Path) -> bool {
    // SAFETY: NVIDIA's libraries have no preconditions for being loaded.
    match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(library) => {
            // Never unloaded, because function pointers into it are kept.
            std::mem::forget(library);
            true
        }
        Err(_) => false,
    }
}

/// Folders to search besides the loader's path: the one that the user names, the CUDA toolkit, and
/// the `nvidia` wheels of the active Python environment. `folder` looks up the path in an
/// environment variable.
fn folders(folder: impl Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    folders.extend(folder("STORM_CUDA_LIBRARIES"));
    for toolkit in ["CUDA_HOME", "CUDA_PATH"] {
        folders.extend(folder(toolkit).map(|path| path.join("lib64")));
    }
    folders.push(PathBuf::from("/usr/local/cuda/lib64"));
    for prefix in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let Some(prefix) = folder(prefix) else { continue };
        let Ok(pythons) = std::fs::read_dir(prefix.join("lib")) else { continue };
        for python in pythons.flatten() {
            let wheels = python.path().join("site-packages/nvidia");
            for wheel in ["cu13", "cuda_nvrtc", "cublas"] {
                folders.push(wheels.join(wheel).join("lib"));
            }
        }
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The folders searched if every variable has this value.
    fn with_all(value: &str) -> Vec<PathBuf> {
        folders(|_| environment::absolute(value.into()))
    }

    #[test]
    fn no_folder_depends_on_where_the_process_was_started() {
        // Tests run in this crate's folder, which contains `src`.
        for value in ["", ".", "src", "../storm-device"] {
            assert_eq!(with_all(value), [PathBuf::from("/usr/local/cuda/lib64")], "{value}");
        }
    }

    #[test]
    fn folders_that_variables_name_are_looked_in() {
        let root = std::env::temp_dir().join(format!("storm-libraries-{}", std::process::id()));
        std::fs::create_dir_all(root.join("lib/python3")).expect("a folder");
        let found = with_all(root.to_str().expect("UTF-8"));
        std::fs::remove_dir_all(&root).expect("removed");
        assert_eq!(found[0], root);
        assert!(found.contains(&root.join("lib64")));
        assert!(found.contains(&root.join("lib/python3/site-packages/nvidia/cublas/lib")));
    }
}
