//! Loading stays within `data_ram`, in the process and in the page cache.

use super::options;
use crate::helpers::{Folder, rerun, rerun_folder};
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use storm_data::Split;
use storm_data::records::{
    Codec, Order, Reading, RecordBatch, RecordInput, RecordLoader, RecordLoaderOptions, RecordSet,
    Synthetic, pack_records,
};
use storm_host::cached_bytes;

/// What a process has besides: the test program and its threads.
const REST_BYTES: u64 = 16 << 20;

/// Bytes of pixels in the set, and how many of them may be in memory.
const SET_BYTES: u64 = 3 << 30;
const DATA_RAM: u64 = 256 << 20;

/// Batches of an epoch that are loaded: all of it in windows by the fastest path; by the others a part, which has several
/// windows; of single reads few, since each of them is alike. All of them with `STORM_LONG_TESTS=1`.
fn batches_to_load(order: Order, reading: Reading, all: u64) -> u64 {
    match (order, reading) {
        (Order::Global, _) => 100,
        _ if std::env::var_os("STORM_LONG_TESTS").is_some() => all,
        (_, Reading::Ring) => all,
        (_, Reading::Direct | Reading::Advised) => all / 8,
    }
}

/// What `statfs` says of a file system in memory, whose files are nowhere else.
const TMPFS: i64 = 0x0102_1994;

fn cached(dir: &Path) -> u64 {
    if rustix::fs::statfs(dir).unwrap().f_type == TMPFS {
        return 0;
    }
    let shards = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    shards.map(|path| cached_bytes(&File::open(path).unwrap()).unwrap()).sum()
}

fn memory_of_this_process(line: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|text| text.strip_prefix(line)).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Which records came, a bit for each.
struct Seen(Vec<u64>);

impl Seen {
    /// Notes a record; panics if it came before.
    fn add(&mut self, record: u64) {
        let (word, bit) = ((record / 64) as usize, 1 << (record % 64));
        assert_eq!(self.0[word] & bit, 0, "record {record} came again");
        self.0[word] |= bit;
    }

    fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

/// The other process: an epoch or a part of it in each order, in four parts, each by a loader that resumes where the last was dropped in
/// the midst of its reads.
fn load(folder: &Folder) {
    let data_ram = DATA_RAM;
    let dir = folder.path("none");
    let orders = [Order::Window, Order::Global];
    for (order, reading) in
        orders.into_iter().flat_map(|order| Reading::ALL.map(|reading| (order, reading)))
    {
        let set = Arc::new(RecordSet::open_with(&dir, reading).unwrap());
        let options =
            RecordLoaderOptions { order, ..RecordLoaderOptions::training(32, 1, data_ram) };
        let records = set.records(Split::Train);
        let mut seen = Seen(vec![0; set.manifest().counts.records.div_ceil(64) as usize]);
        let (mut batches, mut cached_max) = (0, 0);
        let mut position = None;
        let all = batches_to_load(order, reading, records.div_ceil(32));
        let mut batch = RecordBatch::default();
        for part in 1..=4 {
            let mut loader = RecordLoader::new(Arc::clone(&set), options).unwrap();
            position.iter().for_each(|position| loader.resume(position).unwrap());
            while batches < all * part / 4 {
                loader.next_batch(&mut batch).unwrap();
                batches += 1;
                for [low, high, epoch] in &batch.samples {
                    if *epoch == 0 {
                        seen.add(u64::from(*low as u32) | u64::from(*high as u32) << 32);
                    }
                }
                if batches % 64 == 0 {
                    cached_max = cached_max.max(cached(&dir));
                }
            }
            position = Some(loader.position());
        }
        assert_eq!(seen.count(), records.min(32 * all), "{order:?} {reading:?}");
        assert!(cached_max <= data_ram, "{order:?} {reading:?}: {cached_max} bytes are cached");
        let path = set.reading_path();
        println!("{order:?} by {path}: {cached_max} bytes cached");
    }
    println!("peak: {}", memory_of_this_process("VmHWM:"));
}

#[test]
fn memory_and_page_cache_stay_within_data_ram() {
    if let Some(folder) = rerun_folder() {
        return load(&folder);
    }
    let data_ram = DATA_RAM;
    let folder = Folder::new();
    let shape = vec![64, 64, 3];
    let count = SET_BYTES / (64 * 64 * 3);
    let input = RecordInput::Synthetic(Synthetic { count, shape, classes: 10 });
    pack_records(&options(input, &folder.path("none"), Codec::None), &|_| {}).unwrap();
    assert!(cached(&folder.path("none")) <= data_ram, "packing leaves nothing in the cache");
    let output = rerun("records::memory::memory_and_page_cache_stay_within_data_ram", &folder);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let peak = text.lines().find_map(|line| line.strip_prefix("peak: ")).unwrap();
    let peak: u64 = peak.parse().unwrap();
    assert!(peak <= data_ram + REST_BYTES, "{peak} bytes\n{text}");
    if std::env::var_os("STORM_LONG_TESTS").is_some() {
        println!("{text}");
    }
}
