//! Kernel sources to machine code, by NVRTC, cached on disk.

use super::{CudaError, libraries};
use cudarc::nvrtc::sys as nvrtc;
use std::ffi::{CStr, CString};
use std::fs;
use std::path::{Path, PathBuf};

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
    let folder = |variable| std::env::var_os(variable).map(PathBuf::from);
    folder("STORM_CACHE").or_else(|| {
        let of_home = || folder("HOME").map(|home| home.join(".cache"));
        Some(folder("XDG_CACHE_HOME").or_else(of_home)?.join("storm"))
    })
}

/// Cubins on disk. An entry holds the whole key (compiler, architecture, definitions, sources), so
/// a stale or foreign entry is never taken for the right one.
#[derive(Clone, Debug)]
pub struct KernelCache {
    folder: Option<PathBuf>,
    compiler: String,
}

const MAGIC: &[u8; 8] = b"STORMK01";

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
        let path = folder.join(format!("{:016x}.cubin", fingerprint(key.as_bytes())));
        if let Some(cubin) = read_entry(&path, key.as_bytes()) {
            return Ok(cubin);
        }
        let cubin = compile(source, architecture, definitions)?;
        // Best effort: the next start compiles again if this fails.
        let _ = write_entry(folder, &path, key.as_bytes(), &cubin);
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

/// FNV-1a: only names the file; the key inside decides.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Layout: magic, key length, key, cubin fingerprint, cubin.
fn read_entry(path: &Path, key: &[u8]) -> Option<Vec<u8>> {
    let bytes = fs::read(path).ok()?;
    let rest = bytes.strip_prefix(MAGIC)?;
    let (length, rest) = rest.split_at_checked(8)?;
    let length = usize::try_from(u64::from_le_bytes(length.try_into().ok()?)).ok()?;
    let (stored_key, rest) = rest.split_at_checked(length)?;
    let (sum, cubin) = rest.split_at_checked(8)?;
    let intact = u64::from_le_bytes(sum.try_into().ok()?) == fingerprint(cubin);
    (stored_key == key && intact).then(|| cubin.to_vec())
}

fn write_entry(folder: &Path, path: &Path, key: &[u8], cubin: &[u8]) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend((key.len() as u64).to_le_bytes());
    bytes.extend(key);
    bytes.extend(fingerprint(cubin).to_le_bytes());
    bytes.extend(cubin);
    // Another process may be writing the same entry: each writes its own file, renames are atomic.
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    fs::write(&temporary, bytes)?;
    fs::rename(&temporary, path)
}
