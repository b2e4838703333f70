//! Tests of the loader and the calls, against a fake library. Testing NCCL itself needs a GPU.

use super::*;
use libloading::os::unix as loading;
use std::path::Path;
use std::process::Command;
use std::sync::{MutexGuard, OnceLock};

const STREAM: Stream = Stream(ptr::without_provenance_mut(0x77));

/// Compiles the fake into its own directory.
fn compile(name: &str, options: &[&str]) -> PathBuf {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tmp").join(format!("nccl-{name}"));
    std::fs::create_dir_all(&folder).unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/nccl/fake.c");
    let path = folder.join("libnccl.so.2");
    let made = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&path)
        .arg(source)
        .args(options)
        .status();
    assert!(made.expect("a C compiler").success());
    folder
}

fn load(folder: &Path) -> Result<Arc<Nccl>, NcclError> {
    let variable = (
        "STORM_CUDA_LIBRARIES".to_owned(),
        folder.canonicalize().unwrap().to_str().unwrap().to_owned(),
    );
    Nccl::load(&[variable].into())
}

/// The fake library. Only one test uses it at a time, because it has a single list of calls.
struct Fake {
    nccl: Arc<Nccl>,
    library: loading::Library,
    _alone: MutexGuard<'static, ()>,
}

impl Fake {
    fn new() -> Fake {
        static ALONE: Mutex<()> = Mutex::new(());
        static FOLDER: OnceLock<PathBuf> = OnceLock::new();
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = FOLDER.get_or_init(|| compile("good", &["-DFAKE_VERSION=22809"]));
        let nccl = load(folder).unwrap();
        let path = folder.canonicalize().unwrap().join("libnccl.so.2");
        // SAFETY: the fake has no initializers.
        let library = unsafe { loading::Library::open(Some(path), loading::RTLD_NOW) }.unwrap();
        let fake = Fake { nccl, library, _alone: alone };
        fake.call("fake_clear");
        fake
    }

    fn call(&self, name: &str) {
        // SAFETY: these functions in `fake.c` have no arguments and no result.
        unsafe { (*self.library.get::<unsafe extern "C" fn()>(name.as_bytes()).unwrap())() }
    }

    fn calls(&self) -> String {
        // SAFETY: this function in `fake.c` returns a null-terminated string.
        unsafe {
            let calls = *self
                .library
                .get::<unsafe extern "C" fn() -> *const std::ffi::c_char>(b"fake_calls")
                .unwrap();
            CStr::from_ptr(calls()).to_str().unwrap().to_owned()
        }
    }

    fn communicator(&self) -> Communicator {
        let id = Id::from_bytes(&self.nccl.new_id().unwrap().to_bytes()).unwrap();
        // SAFETY: the fake needs no context.
        unsafe { Communicator::connect(&self.nccl, id, Place { rank: 1, ranks: 3 }) }.unwrap()
    }
}

/// Messages with a rank, an address and a length each.
fn messages<const N: usize>(numbers: [(u32, u64, usize); N]) -> [Message; N] {
    numbers.map(|(rank, address, bytes)| Message { rank, piece: Piece { address, bytes } })
}

#[test]
fn versions_and_ids() {
    let fake = Fake::new();
    assert_eq!(fake.nccl.version(), Version { major: 2, minor: 28, patch: 9 });
    let id = fake.nccl.new_id().unwrap();
    assert_eq!(id.to_bytes(), (0..128).map(|i| (i * 3 + 1) as u8).collect::<Vec<_>>());
    assert_eq!(Id::from_bytes(&id.to_bytes()[1..]), None);
    fake.call("fake_fail_next");
    let failed =
        NcclError::Failed { function: "ncclGetUniqueId", message: "invalid usage".to_owned() };
    assert_eq!(fake.nccl.new_id().unwrap_err(), failed);
}

#[test]
fn calls_have_the_right_arguments() {
    let fake = Fake::new();
    let communicator = fake.communicator();
    let sum: u32 = (0..128u32).map(|i| (i * 3 + 1) % 256).sum();
    assert_eq!(fake.calls(), format!("init ranks 3 rank 1 id {sum}\n"));
    fake.call("fake_clear");
    let sends = messages([(0, 0xa0, 1), (2, 0xb0, 2), (0, 0xc0, 0)]);
    let receives = messages([(2, 0xd0, 4), (2, 0xe0, 2)]);
    // SAFETY: the fake accesses nothing.
    unsafe { communicator.exchange(&sends, &receives, STREAM) }.unwrap();
    let expected = "start\n\
        send a0 1 type 1 to 0 comm 1001 stream 77\nsend b0 2 type 1 to 2 comm 1001 stream 77\n\
        send c0 0 type 1 to 0 comm 1001 stream 77\n\
        receive d0 4 type 1 from 2 comm 1001 stream 77\nreceive e0 2 type 1 from 2 comm 1001 stream 77\n\
        end\n";
    assert_eq!(fake.calls(), expected);
    fake.call("fake_clear");
    communicator.finish().unwrap();
    assert_eq!(fake.calls(), "ncclCommFinalize 1001\nncclCommDestroy 1001\n");
}

#[test]
fn messages_to_no_other_rank_reach_no_library() {
    let fake = Fake::new();
    let communicator = fake.communicator();
    fake.call("fake_clear");
    let good = messages([(0, 0, 1)]);
    // The rank itself, and a rank that does not exist.
    for wrong in [1, 3] {
        let bad = messages([(0, 0, 1), (wrong, 0, 1)]);
        for (sends, receives) in [(&bad[..], &good[..]), (&good, &bad)] {
            // SAFETY: the fake accesses nothing.
            let refused = unsafe { communicator.exchange(sends, receives, STREAM) };
            assert_eq!(refused, Err(NcclError::NoSuchRank { rank: wrong, ranks: 3 }));
        }
    }
    assert_eq!(fake.calls(), "");
}

#[test]
fn a_group_that_fails_is_ended() {
    let fake = Fake::new();
    let communicator = fake.communicator();
    fake.call("fake_clear");
    fake.call("fake_fail_next");
    let both = messages([(0, 0, 1), (2, 0, 1)]);
    // SAFETY: the fake accesses nothing.
    let failed = unsafe { communicator.exchange(&both, &both, STREAM) };
    let message = "invalid usage (with a communicator)".to_owned();
    assert_eq!(failed, Err(NcclError::Failed { function: "ncclSend", message }));
    assert!(fake.calls().starts_with("start\n") && fake.calls().ends_with("end\n"));
}

/// A communicator is aborted or destroyed only once, and not used afterwards.
#[test]
fn an_abort_happens_once() {
    let fake = Fake::new();
    let communicator = fake.communicator();
    assert_eq!(communicator.failure(), None);
    fake.call("fake_fail_next");
    assert!(communicator.failure().unwrap().to_string().contains("remote error"));
    let aborter = communicator.aborter();
    fake.call("fake_clear");
    std::thread::spawn(move || (aborter.abort(), aborter.abort())).join().unwrap();
    assert_eq!(communicator.failure(), Some(NcclError::Aborted));
    // SAFETY: nothing is called.
    assert_eq!(unsafe { communicator.exchange(&[], &[], STREAM) }, Err(NcclError::Aborted));
    assert_eq!(communicator.finish(), Err(NcclError::Aborted));
    assert_eq!(fake.calls(), "ncclCommAbort 1001\n");
    fake.call("fake_clear");
    drop(fake.communicator());
    assert!(fake.calls().ends_with("ncclCommAbort 1001\n"));
}

#[test]
fn old_and_incomplete_libraries_are_refused() {
    let old = load(&compile("old", &["-DFAKE_VERSION=21805"])).err().unwrap();
    assert!(old.to_string().contains("NCCL 2.18.5: install 2.19"), "{old}");
    let incomplete =
        load(&compile("incomplete", &["-DFAKE_VERSION=22809", "-DFAKE_WITHOUT_FINALIZE"]));
    assert!(matches!(
        incomplete.err().unwrap(),
        NcclError::Symbol { symbol: "ncclCommFinalize", .. }
    ));
}

#[test]
fn wheels_are_looked_in() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tmp/nccl-wheels");
    std::fs::create_dir_all(root.join("lib/python3.12")).unwrap();
    let variables = [("VIRTUAL_ENV".to_owned(), root.to_str().unwrap().to_owned())].into();
    let wheel = root.join("lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2");
    assert_eq!(library::candidates(&variables), [PathBuf::from("libnccl.so.2"), wheel]);
}
