//! Scratch files by every way: each byte comes back as it was written, or the caller gets an error that says why not.

use std::ops::Range;
use std::path::PathBuf;
use storm_host::{
    PageBuffer, ReadRing, ScratchAccess, ScratchError, ScratchFault, ScratchFaultKind,
    ScratchFolder, ScratchOptions, ScratchPath, ScratchRates, ScratchStore, ScratchWay,
};

const BLOCK: usize = 4096;
const MIB: usize = 1 << 20;

/// A folder on a disk, for one test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let name = format!("scratch-{name}-{}", std::process::id());
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }

    fn open(&self) -> ScratchFolder {
        ScratchFolder::open(&self.0).expect("a folder on a disk")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

fn byte(seed: u32, index: usize) -> u8 {
    ((index as u32 ^ seed.wrapping_mul(0x9e37_79b9)).wrapping_mul(2_654_435_761) >> 24) as u8
}

fn fill(memory: &mut [u8], seed: u32) {
    for (index, to) in memory.iter_mut().enumerate() {
        *to = byte(seed, index);
    }
}

/// Whether all of it is what `fill` writes.
fn is_filled(memory: &[u8], seed: u32) -> bool {
    memory.iter().enumerate().all(|(index, &found)| found == byte(seed, index))
}

/// A store with memory for its largest extent.
struct Bench {
    store: ScratchStore,
    memory: PageBuffer,
    extents: Vec<Range<u64>>,
}

/// More pieces than are in flight at once, a single block, one piece, and some.
const MANY: [usize; 4] = [32 * MIB + 3 * BLOCK, BLOCK, 4 * MIB, 5 * MIB + BLOCK];

/// Four pieces, of which the last has an odd number of blocks, and a block.
const FOUR: [usize; 2] = [12 * MIB + 5 * BLOCK, BLOCK];

/// Extents with gaps between them.
fn extents(sizes: &[usize]) -> Vec<Range<u64>> {
    let mut next = 0;
    let place = |bytes: usize| {
        let start = next + 2 * BLOCK as u64;
        next = start + bytes as u64;
        start..next
    };
    sizes.iter().copied().map(place).collect()
}

impl Bench {
    fn new(
        folder: &ScratchFolder,
        sizes: &[usize],
        options: ScratchOptions,
        is_registered: bool,
    ) -> Bench {
        let extents = extents(sizes);
        let bytes = extents.last().expect("some").end;
        let mut store = ScratchStore::new(folder, bytes, extents.clone(), options).expect("room");
        assert_eq!(store.bytes(), bytes);
        let longest = extents.iter().map(|extent| extent.end - extent.start).max();
        let memory = PageBuffer::new(longest.expect("some") as usize);
        if is_registered {
            // Not the last pieces: these are transferred without it.
            let start = memory.as_slice().as_ptr() as usize;
            // SAFETY: the memory stays until the store is gone.
            unsafe {
                store.register(&[(start, 9 * MIB), (start + 9 * MIB, memory.len() - 10 * MIB)])
            };
        }
        Bench { store, memory, extents }
    }

    fn write(&mut self, extent: usize, seed: u32) -> Result<(), ScratchError> {
        let Range { start, end } = self.extents[extent];
        let bytes = (end - start) as usize;
        fill(&mut self.memory.as_mut_slice()[..bytes], seed);
        // SAFETY: one of the extents; the memory is aligned and long enough, and only this thread uses it.
        unsafe { self.store.write(start, self.memory.as_slice().as_ptr(), bytes) }
    }

    /// Reads into memory that is something else before.
    fn read(&mut self, extent: usize) -> Result<&[u8], ScratchError> {
        let Range { start, end } = self.extents[extent];
        let bytes = (end - start) as usize;
        self.memory.as_mut_slice().fill(0xa5);
        // SAFETY: as above.
        unsafe { self.store.read(start, self.memory.as_mut_slice().as_mut_ptr(), bytes) }?;
        let (read, rest) = self.memory.as_slice().split_at(bytes);
        assert!(rest.iter().all(|&byte| byte == 0xa5), "nothing is written behind an extent");
        Ok(read)
    }
}

#[test]
fn every_way_returns_what_was_written() {
    let folder = Folder::new("ways");
    let folder = folder.open();
    for way in ScratchWay::ALL {
        for is_registered in [false, true] {
            let options = ScratchOptions { way, fault: None };
            let mut bench = Bench::new(&folder, &MANY, options, is_registered);
            let count = bench.extents.len();
            for extent in 0..count {
                assert!(bench.read(extent).expect("zeros").iter().all(|&byte| byte == 0));
            }
            for (extent, seed) in [(3, 9), (0, 0), (1, 1), (2, 2), (3, 3)] {
                bench.write(extent, seed).expect("written");
            }
            for extent in (0..count).rev() {
                let read = bench.read(extent).expect("read");
                assert!(is_filled(read, extent as u32), "{way:?} {extent}");
            }
        }
    }
}

#[test]
fn the_path_is_the_one_that_was_asked_for_if_the_system_has_it() {
    let folder = Folder::new("path");
    let folder = folder.open();
    let path = |way| {
        let options = ScratchOptions { way, fault: None };
        Bench::new(&folder, &FOUR, options, false).store.path()
    };
    assert_eq!(path(ScratchWay::PageCache), ScratchPath::PageCache);
    let direct = path(ScratchWay::Direct);
    assert_ne!(direct, ScratchPath::Ring { is_registered: false });
    let has_ring = ReadRing::new(1).is_ok() && direct == ScratchPath::Direct;
    let expected = if has_ring { ScratchPath::Ring { is_registered: false } } else { direct };
    assert_eq!(path(ScratchWay::Ring), expected);
    if has_ring {
        let registered = Bench::new(&folder, &FOUR, ScratchOptions::default(), true).store.path();
        // Unless locked memory is limited to next to nothing.
        assert!(matches!(registered, ScratchPath::Ring { .. }), "{registered}");
    }
    assert_eq!(
        ScratchPath::Ring { is_registered: true }.to_string(),
        "io_uring and O_DIRECT with registered memory"
    );
}

/// Errors are those of the fault; what may go wrong at any time changes nothing.
#[test]
fn faults_end_in_errors_or_change_nothing() {
    use ScratchAccess::{Read, Write};
    use ScratchFaultKind::{Damage, Error, Full, Short};
    let folder = Folder::new("faults");
    let folder = folder.open();
    for way in [ScratchWay::Ring, ScratchWay::Direct] {
        for access in [Read, Write] {
            for kind in [Error, Full, Short, Damage] {
                for every in [1, 3] {
                    let case = format!("{way:?} {access:?} {kind:?} {every}");
                    let fault = Some(ScratchFault { access, every, kind });
                    let options = ScratchOptions { way, fault };
                    let mut bench = Bench::new(&folder, &FOUR, options, every == 3);
                    let written = bench.write(0, 3);
                    let outcome =
                        written.and_then(|()| bench.read(0)).map(|read| is_filled(read, 3));
                    // A piece that arrives damaged is read again. The third of four reads is the fifth then.
                    let is_harmless =
                        kind == Short || (kind == Damage && access == Read && every > 1);
                    if is_harmless {
                        assert!(
                            outcome.unwrap_or_else(|error| panic!("{case}: {error}")),
                            "{case}"
                        );
                        continue;
                    }
                    let error = outcome.expect_err(&case);
                    let is_right = match (kind, access) {
                        (Full, Write) => matches!(error, ScratchError::Filled { .. }),
                        (Error | Full, Read) => {
                            matches!(error, ScratchError::Io { access: "reading", .. })
                        }
                        (Error, Write) => {
                            matches!(error, ScratchError::Io { access: "writing", .. })
                        }
                        _ => matches!(error, ScratchError::Damaged { .. }),
                    };
                    assert!(is_right, "{case}: {error}");
                    // The store can still be used, and knows what it has.
                    match bench.read(1) {
                        Ok(read) => assert!(read.iter().all(|&byte| byte == 0), "{case}"),
                        Err(error) => panic!("{case}: never written, {error}"),
                    }
                }
            }
        }
    }
}

/// Whether or not pieces are in flight then, all of them arrive; so do those of later copies.
#[test]
fn io_uring_may_be_refused_at_any_time() {
    let folder = Folder::new("no-ring");
    let folder = folder.open();
    for access in [ScratchAccess::Read, ScratchAccess::Write] {
        // The ninth begins when the first of eight is there.
        for every in [1, 3, 9] {
            let fault = Some(ScratchFault { access, every, kind: ScratchFaultKind::NoRing });
            let options = ScratchOptions { way: ScratchWay::Ring, fault };
            let mut bench = Bench::new(&folder, &MANY, options, every == 3);
            for round in 0..2 {
                for extent in [0, 3] {
                    bench.write(extent, round + extent as u32).expect("written");
                }
                for extent in [0, 3] {
                    let read = bench.read(extent).expect("read");
                    assert!(is_filled(read, round + extent as u32), "{access:?} {every} {round}");
                }
            }
            assert!(bench.read(2).expect("zeros").iter().all(|&byte| byte == 0));
        }
    }
}

/// The host reads and writes any bytes of what copies have written, and the other way round.
#[test]
fn the_host_reads_and_writes_parts() {
    let folder = Folder::new("parts");
    let folder = folder.open();
    for way in ScratchWay::ALL {
        let mut bench = Bench::new(&folder, &MANY, ScratchOptions { way, fault: None }, false);
        bench.write(3, 5).expect("written");
        let Range { start, .. } = bench.extents[3];
        let at = 4 * MIB - 100;
        let mut part = vec![0; 300];
        bench.store.read_bytes(start + at as u64, &mut part).expect("read");
        assert!((0..300).all(|index| part[index] == byte(5, at + index)));
        bench.store.write_bytes(start + at as u64, &[7; 300]).expect("written");
        let read = bench.read(3).expect("read");
        for (index, &found) in read.iter().enumerate() {
            let is_changed = (at..at + 300).contains(&index);
            assert_eq!(found, if is_changed { 7 } else { byte(5, index) }, "{way:?} {index}");
        }
    }
}

/// A thread reads while another writes: neither gets the other's bytes.
#[test]
fn both_directions_at_once() {
    let folder = Folder::new("both");
    let folder = folder.open();
    for way in ScratchWay::ALL {
        let mut bench = Bench::new(&folder, &MANY, ScratchOptions { way, fault: None }, true);
        bench.write(0, 1).expect("written");
        let (store, extents) = (&bench.store, &bench.extents);
        let copy = |extent: usize, seed: Option<u32>| {
            let Range { start, end } = extents[extent];
            let bytes = (end - start) as usize;
            let mut memory = PageBuffer::new(bytes);
            match seed {
                Some(seed) => {
                    fill(&mut memory.as_mut_slice()[..bytes], seed);
                    // SAFETY: an extent; the memory is of this closure; one thread writes.
                    unsafe { store.write(start, memory.as_slice().as_ptr(), bytes) }
                }
                // SAFETY: likewise; one thread reads.
                None => unsafe { store.read(start, memory.as_mut_slice().as_mut_ptr(), bytes) },
            }
            .expect("a disk that works");
            memory
        };
        std::thread::scope(|scope| {
            scope.spawn(|| (0..4).for_each(|seed| drop(copy(3, Some(seed)))));
            for _ in 0..2 {
                let read = copy(0, None);
                assert!(is_filled(&read.as_slice()[..32 * MIB], 1), "{way:?}");
            }
        });
        assert!(is_filled(&copy(3, None).as_slice()[..5 * MIB], 3), "{way:?}");
    }
}

#[test]
fn rates_are_measured_by_the_way_that_is_asked_for() {
    let folder = Folder::new("rates");
    let folder = folder.open();
    for way in ScratchWay::ALL {
        let rates = ScratchRates::measure(&folder, 16 << 20, way).expect("a disk that works");
        assert!(rates.read > 0.0 && rates.write > 0.0 && rates.both > 0.0, "{rates:?}");
        assert!(way != ScratchWay::PageCache || rates.path == ScratchPath::PageCache);
    }
}
