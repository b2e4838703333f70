//! Mapped files that change while they are mapped.

use std::fs::{self, OpenOptions};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use storm_host::{Access, MapError, MappedFile};

const PAGE: usize = 4096;

/// A separate file for each test, removed at the end.
struct Fixture(PathBuf);

impl Fixture {
    fn new(name: &str, bytes: &[u8]) -> Fixture {
        let path = std::env::temp_dir().join(format!("storm-mapped-{}-{name}", std::process::id()));
        fs::write(&path, bytes).expect("a file");
        Fixture(path)
    }

    fn cut(&self, length: u64) {
        let file = OpenOptions::new().write(true).open(&self.0).expect("the file");
        file.set_len(length).expect("shorter");
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        fs::remove_file(&self.0).ok();
    }
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|i| (i * 31 % 251) as u8).collect()
}

#[test]
fn reads_what_is_there() {
    let content = bytes(3 * PAGE + 17);
    let fixture = Fixture::new("whole", &content);
    let map = MappedFile::open(&fixture.0).unwrap();
    assert_eq!((map.length(), map.path()), (content.len() as u64, fixture.0.as_path()));
    map.advise(Access::Random);
    map.advise(Access::Sequential);
    map.will_need(PAGE as u64, u64::MAX);
    for (offset, count) in [(0, content.len()), (1, 1), (PAGE - 1, 2), (content.len(), 0)] {
        let mut read = vec![0; count];
        map.read(offset as u64, &mut read).unwrap();
        assert_eq!(read, content[offset..offset + count]);
    }
    for (offset, count) in [(content.len() as u64, 1), (u64::MAX, 1), (0, content.len() + 1)] {
        let error = map.read(offset, &mut vec![0; count]).unwrap_err();
        assert!(matches!(error, MapError::OutOfRange { .. }), "{error}");
    }
}

#[test]
fn a_file_cut_short_is_an_error() {
    let content = bytes(8 * PAGE);
    for (name, length) in [("page", 2 * PAGE), ("inside", 2 * PAGE + 100), ("all", 0)] {
        let fixture = Fixture::new(name, &content);
        let map = MappedFile::open(&fixture.0).unwrap();
        let mut read = vec![0; content.len()];
        map.read(0, &mut read).unwrap();
        fixture.cut(length as u64);
        // Whole lost pages, and the lost rest of a partial page.
        for offset in [5 * PAGE, 2 * PAGE + 200] {
            let error = map.read(offset as u64, &mut read[..8]).unwrap_err();
            assert!(matches!(error, MapError::Lost { .. }), "{error}");
        }
        // A loss is permanent: the zeros must never be taken for data.
        fs::write(&fixture.0, &content).unwrap();
        assert!(map.read(5 * PAGE as u64, &mut read[..8]).is_err());
    }
}

#[test]
fn many_threads_lose_a_file_at_once() {
    let content = bytes(64 * PAGE);
    let fixture = Fixture::new("threads", &content);
    let map = MappedFile::open(&fixture.0).unwrap();
    fixture.cut(0);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let map = &map;
            scope.spawn(move || {
                for page in 0..64 {
                    let offset = ((page * 7 + thread) % 64 * PAGE) as u64;
                    assert!(map.read(offset, &mut [0; 64]).is_err());
                }
            });
        }
    });
}

/// Set in a child process that is expected to die by the signal.
const VICTIM: &str = "STORM_TEST_MAPPED_VICTIM";

#[test]
fn other_faults_still_end_the_process() {
    if std::env::var_os(VICTIM).is_some() {
        let fixture = Fixture::new("victim", &bytes(2 * PAGE));
        let _guarded = MappedFile::open(&fixture.0).unwrap();
        let file = fs::File::open(&fixture.0).unwrap();
        let stranger = memmap2::MmapOptions::new().map_raw_read_only(&file).unwrap();
        fixture.cut(0);
        drop(fixture);
        // SAFETY: the page is mapped but lost: reading it raises the signal, as intended.
        unsafe { std::ptr::read_volatile(stranger.as_ptr()) };
        return;
    }
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "other_faults_still_end_the_process"])
        .env(VICTIM, "1")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

#[test]
fn places_are_given_back() {
    let fixture = Fixture::new("places", &bytes(10));
    // More maps than the table has entries, one after another.
    for _ in 0..20_000 {
        MappedFile::open(&fixture.0).unwrap();
    }
}

#[test]
fn only_files_are_mapped() {
    let error = MappedFile::open(&std::env::temp_dir()).unwrap_err();
    assert!(error.to_string().ends_with("is a directory, not a plain file"), "{error}");
    let error = MappedFile::open("/nonexistent/file".as_ref()).unwrap_err();
    assert!(matches!(error, MapError::Io { .. }), "{error}");
    let empty = Fixture::new("empty", &[]);
    let map = MappedFile::open(&empty.0).unwrap();
    map.read(0, &mut []).unwrap();
    map.will_need(0, 10);
    assert!(map.read(0, &mut [0]).is_err());
}
