//! Compiles kernel sources to machine code with NVRTC and caches the result on disk.

use super::cache::Cache;
use super::{CudaError, libraries};
use cudarc::nvrtc::sys as nvrtc;
use std::ffi::{CStr, CString};

/// A kernel source that is built into the binary.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// File name.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// The only architecture that it is written for. `None` if it runs on all.
    pub only_for: Option<&'static str>,
}

const fn header(name: &'static str, text: &'static str) -> KernelSource {
    KernelSource { name, text, only_for: None }
}

/// Headers that sources may include by name.
const HEADERS: &[KernelSource] = &[
    header("common.cuh", include_str!("kernels/common.cuh")),
    header("activations.cuh", include_str!("kernels/activations.cuh")),
    header("attention_common.cuh", include_str!("kernels/attention_common.cuh")),
    header("attention_hopper.cuh", include_str!("kernels/attention_hopper.cuh")),
    header("channels.cuh", include_str!("kernels/channels.cuh")),
    header("convolution_tiles.cuh", include_str!("kernels/convolution_tiles.cuh")),
    header("optimizer_common.cuh", include_str!("kernels/optimizer_common.cuh")),
    header("planes.cuh", include_str!("kernels/planes.cuh")),
    header("tensor_cores.cuh", include_str!("kernels/tensor_cores.cuh")),
    header("warp_groups.cuh", include_str!("kernels/warp_groups.cuh")),
    header("wgmma.cuh", include_str!("kernels/wgmma.cuh")),
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
    // SAFETY: NVRTC is loaded, and all strings outlive the call.
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
    // SAFETY: the program was created above, and the buffers have the sizes that NVRTC reported.
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

/// Cubins on disk, keyed by compiler, architecture, definitions and sources.
#[derive(Clone, Debug)]
pub struct KernelCache {
    entries: Cache,
    compiler: String,
}

impl KernelCache {
    /// The user's cache, in [`cache_folder`](super::cache_folder). Without such a folder nothing
    /// is cached.
    ///
    /// # Errors
    /// NVRTC is missing.
    pub fn of_user() -> Result<KernelCache, CudaError> {
        libraries::require_nvrtc()?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: NVRTC is loaded and writes two integers.
        unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) };
        let entries = Cache::of_user("kernels", "cubin");
        Ok(KernelCache { entries, compiler: format!("nvrtc {major}.{minor}") })
    }

    /// The cubin, from disk if cached. Failing to write the cache costs only time.
    ///
    /// # Errors
    /// The source does not compile.
    pub fn get(
        &self,
        source: KernelSource,
        architecture: &str,
        definitions: &[(&str, String)],
    ) -> Result<Vec<u8>, CudaError> {
        let key = self.key(source, architecture, definitions);
        if let Some(cubin) = self.entries.read(&key) {
            return Ok(cubin);
        }
        let cubin = compile(source, architecture, definitions)?;
        self.entries.write(&key, &cubin);
        Ok(cubin)
    }

    /// Everything that a cubin depends on: compiler, architecture, definitions, source and headers.
    pub fn key(
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
