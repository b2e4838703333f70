//! Kernel sources to machine code, by NVRTC, cached on disk.

use super::{CudaError, environment, libraries};
use cudarc::nvrtc::sys as nvrtc;
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use storm_files::{read_private, write_private};

/// A kernel source that is part of the program.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// File name.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// The one architecture that it is written for; none if it is for all.
    pub only_for: Option<&'static str>,
}

const fn header(name: &'static str, text: &'static str) -> KernelSource {
    KernelSource { name, text, only_for: None }
}

/// Headers that sources may include by name.
const HEADERS: &[KernelSource] = &[
    header("common.cuh", include_str!("kernels/common.cuh")),
    header("attention_common.cuh", include_str!("kernels/attention_common.cuh")),
];

/// Compiles for one architecture (`sm_90`), with `-D` definitions, and returns a cubin.
///
/// # Errors
/// NVRTC is missing, or the source does not compile.
pub fn compile(
    source: KernelSource,
    architecture: &str,
    definitions: &[(&str, String)],
) -> Result<Vec<u8>, CudaError> {
    libraries::require_nvrtc()?;
    let mut options = vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
        "--fmad=true".to_owned(),
    ];
    options.extend(definitions.iter().map(|(name, value)| format!("-D{name}={value}")));
    // SAFETY: all strings outlive the calls; the program is destroyed once.
    unsafe { compile_with(source, architecture, &options) }
}

/// # Safety
/// NVRTC is loaded.
unsafe fn compile_with(
    source: KernelSource,
    architecture: &str,
    options: &[String],
) -> Result<Vec<u8>, CudaError> {
    let text = |value: &str| CString::new(value).expect("sources and options have no NUL");
    let (name, body) = (text(source.name), text(source.text));
    let header_texts: Vec<CString> = HEADERS.iter().map(|header| text(header.text)).collect();
    let header_names: Vec<CString> = HEADERS.iter().map(|header| text(header.name)).collect();
    let pointers = |strings: &[CString]| -> Vec<*const std::ffi::c_char> {
        strings.iter().map(|string| string.as_ptr()).collect()
    };
    let (text_pointers, name_pointers) = (pointers(&header_texts), pointers(&header_names));
    let failed = |log: String| CudaError::Compile {
        source_name: source.name,
        architecture: architecture.to_owned(),
        log,
    };
    let mut program = std::ptr::null_mut();
    // SAFETY: the pointers are to live strings.
    let status = unsafe {
        nvrtc::nvrtcCreateProgram(
            &mut program,
            body.as_ptr(),
            name.as_ptr(),
            HEADERS.len() as i32,
            text_pointers.as_ptr(),
            name_pointers.as_ptr(),
        )
    };
    status.result().map_err(|error| failed(format!("{error:?}")))?;
    let options: Vec<CString> = options.iter().map(|option| text(option)).collect();
    let option_pointers = pointers(&options);
    // SAFETY: the program was created above; the buffers have the sizes that NVRTC gave.
    unsafe {
        let status =
            nvrtc::nvrtcCompileProgram(program, options.len() as i32, option_pointers.as_ptr());
        let result = if status == nvrtc::nvrtcResult::NVRTC_SUCCESS {
            let mut size = 0;
            nvrtc::nvrtcGetCUBINSize(program, &mut size);
            let mut cubin = vec![0u8; size];
            nvrtc::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast())
                .result()
                .map(|()| cubin)
                .map_err(|error| failed(format!("{error:?}")))
        } else {
            let mut size = 0;
            nvrtc::nvrtcGetProgramLogSize(program, &mut size);
            let mut log = vec![0u8; size.max(1)];
            nvrtc::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
            let log =
                CStr::from_bytes_until_nul(&log).map(|log| log.to_string_lossy().into_owned());
            Err(failed(log.unwrap_or_default()))
        };
        nvrtc::nvrtcDestroyProgram(&mut program);
        result
    }
}

/// Where a user's caches are: `STORM_CACHE`, or `storm` in the system's cache folder; none without either.
pub fn cache_folder() -> Option<PathBuf> {
    cache_folder_by(environment::folder)
}

/// `folder` is what a variable names.
fn cache_folder_by(folder: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    folder("STORM_CACHE").or_else(|| {
        let of_home = || folder("HOME").map(|home| home.join(".cache"));
        Some(folder("XDG_CACHE_HOME").or_else(of_home)?.join("storm"))
    })
}

/// Cubins on disk, in a folder of the user's own. An entry holds the whole key (compiler, architecture,
/// definitions, sources) and a hash of its code, so a stale or damaged entry is never taken for the right one.
#[derive(Clone, Debug)]
pub struct KernelCache {
    folder: Option<PathBuf>,
    compiler: String,
}

/// A cubin of one source has some hundred kilobytes.
const ENTRY_BYTES_MAX: u64 = 64 << 20;

const HASH_BYTES: usize = blake3::OUT_LEN;

const MAGIC: &[u8; 8] = b"STORMK02";

impl KernelCache {
    /// The user's, in [`cache_folder`]. Without that nothing is cached.
    ///
    /// # Errors
    /// NVRTC is missing.
    pub fn of_user() -> Result<KernelCache, CudaError> {
        libraries::require_nvrtc()?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: NVRTC is loaded and writes two integers.
        unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) };
        let folder = cache_folder().map(|folder| folder.join("kernels"));
        Ok(KernelCache { folder, compiler: format!("nvrtc {major}.{minor}") })
    }

    /// The cubin, from disk if it is there. A cache that cannot be written costs only time.
    ///
    /// # Errors
    /// The source does not compile.
    pub fn get(
        &self,
        source: KernelSource,
        architecture: &str,
        definitions: &[(&str, String)],
    ) -> Result<Vec<u8>, CudaError> {
        let Some(folder) = &self.folder else {
            return compile(source, architecture, definitions);
        };
        let key = self.key(source, architecture, definitions);
        let path = folder.join(format!("{}.cubin", blake3::hash(key.as_bytes()).to_hex()));
        if let Some(cubin) = read_entry(&path, key.as_bytes()) {
            return Ok(cubin);
        }
        let cubin = compile(source, architecture, definitions)?;
        // Best effort: the next start compiles again if this fails.
        let _ = write_private(&path, &entry(key.as_bytes(), &cubin));
        Ok(cubin)
    }

    fn key(
        &self,
        source: KernelSource,
        architecture: &str,
        definitions: &[(&str, String)],
    ) -> String {
        let mut key = format!("{}\n{architecture}\n", self.compiler);
        for (name, value) in definitions {
            key.push_str(&format!("{name}={value}\n"));
        }
        for part in std::iter::once(&source).chain(HEADERS) {
            key.push_str(&format!("== {}\n{}\n", part.name, part.text));
        }
        key
    }
}

/// Layout: magic, key length, key, hash of the cubin, cubin.
fn entry(key: &[u8], cubin: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend((key.len() as u64).to_le_bytes());
    bytes.extend(key);
    bytes.extend(blake3::hash(cubin).as_bytes());
    bytes.extend(cubin);
    bytes
}

fn read_entry(path: &Path, key: &[u8]) -> Option<Vec<u8>> {
    let bytes = read_private(path, ENTRY_BYTES_MAX).ok()?;
    let rest = bytes.strip_prefix(MAGIC)?;
    let (length, rest) = rest.split_at_checked(8)?;
    let length = usize::try_from(u64::from_le_bytes(length.try_into().ok()?)).ok()?;
    let (stored_key, rest) = rest.split_at_checked(length)?;
    let (hash, cubin) = rest.split_at_checked(HASH_BYTES)?;
    let intact = blake3::hash(cubin).as_bytes() == hash;
    (stored_key == key && intact).then(|| cubin.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// Where caches are with these variables set.
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
        let folder = std::env::temp_dir().join(format!("storm-cubins-{}", std::process::id()));
        let path = folder.join("entry.cubin");
        let (key, cubin) = (b"compiler and source".as_slice(), b"machine code".as_slice());
        let whole = entry(key, cubin);
        write_private(&path, &whole).expect("written");
        assert_eq!(read_entry(&path, key).as_deref(), Some(cubin));
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
