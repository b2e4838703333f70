//! NCCL's functions, loaded at run time.

use super::NcclError;
use crate::folders::{named, python_environments, site_packages};
use crate::launch::Variables;
use libloading::os::unix as loading;
use std::ffi::{c_char, c_int, c_void};
use std::path::PathBuf;

const NAME: &str = "libnccl.so.2";

/// `ncclResult_t`.
pub(super) type Code = c_int;
pub(super) const SUCCESS: Code = 0;
pub(super) const IN_PROGRESS: Code = 7;

/// `ncclUint8` of `ncclDataType_t`.
pub(super) const BYTES: c_int = 1;

/// `ncclComm_t`.
pub(super) type Handle = *mut c_void;

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

type Stream = *mut c_void;
type Data = *mut c_void;

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $name:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions in use.
        #[derive(Clone, Copy)]
        pub(super) struct Functions {
            $($(#[$doc])* pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// Looks up all functions. Returns the name of the first missing one as an error.
            fn find(library: &loading::Library) -> Result<Functions, &'static str> {
                // SAFETY: the types are those of `nccl.h`, which have not changed since version
                // 2.7, and for `ncclCommFinalize` and `ncclGetLastError` since 2.14.
                Ok(Functions { $($field: *unsafe { library.get($name.as_bytes()) }.map_err(|_| $name)?,)* })
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion": fn(*mut c_int) -> Code;
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> Code;
    get_error_string = "ncclGetErrorString": fn(Code) -> *const c_char;
    get_last_error = "ncclGetLastError": fn(Handle) -> *const c_char;
    /// Communicator, ranks, id, rank.
    comm_init_rank = "ncclCommInitRank": fn(*mut Handle, c_int, UniqueId, c_int) -> Code;
    comm_finalize = "ncclCommFinalize": fn(Handle) -> Code;
    comm_destroy = "ncclCommDestroy": fn(Handle) -> Code;
    comm_abort = "ncclCommAbort": fn(Handle) -> Code;
    comm_get_async_error = "ncclCommGetAsyncError": fn(Handle, *mut Code) -> Code;
    group_start = "ncclGroupStart": fn() -> Code;
    group_end = "ncclGroupEnd": fn() -> Code;
    /// From, count, type, rank.
    send = "ncclSend": fn(Data, usize, c_int, c_int, Handle, Stream) -> Code;
    /// To, count, type, rank.
    receive = "ncclRecv": fn(Data, usize, c_int, c_int, Handle, Stream) -> Code;
}

/// Loads the first library found.
pub(super) fn load(variables: &Variables) -> Result<(PathBuf, Functions), NcclError> {
    let mut tried = Vec::new();
    for path in candidates(variables) {
        // SAFETY: NCCL has no preconditions for being loaded.
        match unsafe {
            loading::Library::open(Some(&path), loading::RTLD_NOW | loading::RTLD_LOCAL)
        } {
            Ok(library) => {
                let functions = Functions::find(&library);
                // Never unloaded: function pointers into it are kept.
                std::mem::forget(library);
                return match functions {
                    Ok(functions) => Ok((path, functions)),
                    Err(symbol) => Err(NcclError::Symbol { path, symbol }),
                };
            }
            Err(_) => tried.push(path.display().to_string()),
        }
    }
    Err(NcclError::NotFound { tried: tried.join(", ") })
}

/// In order: a directory named by the user, the loader's path, the CUDA toolkit, and the wheels of
/// Python environments.
pub(super) fn candidates(variables: &Variables) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    paths.extend(named(variables, "STORM_CUDA_LIBRARIES").map(|folder| folder.join(NAME)));
    paths.push(PathBuf::from(NAME));
    for toolkit in ["CUDA_HOME", "CUDA_PATH"] {
        paths.extend(named(variables, toolkit).map(|folder| folder.join("lib64").join(NAME)));
    }
    for environment in python_environments(variables) {
        let packages = site_packages(&environment).into_iter();
        paths.extend(packages.map(|packages| packages.join("nvidia/nccl/lib").join(NAME)));
    }
    paths
}
