//! Datasets with arbitrary bytes: an error, never a crash, never much memory. Most of these are of version 1; what is wrong
//! with blocks is in `records/damage.rs`.

use crate::helpers::{Folder, batches, packed, training};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use storm_data::{DataError, Dataset, Loader, PackOptions, Samples};
use storm_host::allocation::peak_bytes;

const HEADER_BYTES: usize = 4096;
/// Memory limit for opening a small dataset.
const MEMORY_BYTES_MAX: isize = 4 << 20;

/// A small dataset of samples of version 1, so that shards have all sections.
fn small(folder: &Folder) -> PathBuf {
    folder.version_1("samples")
}

/// Opens, verifies and loads.
fn use_all(dir: &Path) -> Result<(), DataError> {
    let dataset = Arc::new(Dataset::open(dir)?);
    dataset.verify(&|_| {})?;
    let mut loader = Loader::new(dataset, training(2, 32, 0))?;
    let mut samples = Samples::default();
    (0..20).try_for_each(|_| loader.next_batch(&mut samples).map(|_| ()))
}

/// Runs with a file's bytes replaced, and puts them back.
fn with_bytes<T>(path: &Path, bytes: &[u8], run: impl FnOnce() -> T) -> T {
    let good = fs::read(path).unwrap();
    fs::write(path, bytes).unwrap();
    let result = run();
    fs::write(path, good).unwrap();
    result
}

#[track_caller]
fn check_refused(dir: &Path, path: &Path, bytes: &[u8], what: &str) {
    let (result, peak) = with_bytes(path, bytes, || peak_bytes(|| use_all(dir)));
    assert!(result.is_err(), "{}: {what} went unnoticed", path.display());
    assert!(peak < MEMORY_BYTES_MAX, "{}: {what} took {peak} bytes", path.display());
}

fn files(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn damage_is_noticed() {
    let folder = Folder::new();
    let dir = small(&folder);
    use_all(&dir).unwrap();
    for path in files(&dir) {
        let good = fs::read(&path).unwrap();
        let places = (0..good.len()).step_by(256).chain([good.len() - 1]);
        for at in places {
            for change in [|byte: u8| byte ^ 1, |byte: u8| byte ^ 0x80, |byte: u8| !byte] {
                let mut bytes = good.clone();
                bytes[at] = change(bytes[at]);
                check_refused(&dir, &path, &bytes, &format!("byte {at}"));
            }
            let mut bytes = good.clone();
            for (i, byte) in bytes[at..].iter_mut().take(256).enumerate() {
                *byte = (i * 37 + at / 256 + 11) as u8;
            }
            check_refused(&dir, &path, &bytes, &format!("garbage at {at}"));
        }
    }
}

#[test]
fn cut_files_are_noticed() {
    let folder = Folder::new();
    let dir = small(&folder);
    for path in files(&dir) {
        let good = fs::read(&path).unwrap();
        // The sections of a shard begin at multiples of eight.
        let sections = (HEADER_BYTES..good.len()).step_by(8);
        let places = [0, 1, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1].into_iter();
        let lengths = places.chain(sections.flat_map(|at| [at - 1, at, at + 1]));
        for length in lengths.chain([good.len() - 1]).filter(|&length| length < good.len()) {
            check_refused(&dir, &path, &good[..length], &format!("cut to {length}"));
        }
        let mut longer = good.clone();
        longer.push(0);
        check_refused(&dir, &path, &longer, "a byte more");
        // Gone altogether.
        let aside = folder.path("aside");
        fs::rename(&path, &aside).unwrap();
        assert!(use_all(&dir).is_err(), "{}", path.display());
        fs::rename(&aside, &path).unwrap();
    }
    use_all(&dir).unwrap();
}

#[test]
fn damage_in_every_block_is_noticed() {
    let folder = Folder::new();
    let input = folder.write("a.txt", "a line of text\n".repeat(200_000));
    let options = PackOptions { shard_tokens: 1 << 24, ..folder.options(&[&input]) };
    packed(&options).unwrap();
    let path = options.out.join("shard-00000.storm");
    let good = fs::read(&path).unwrap();
    for at in (HEADER_BYTES..good.len() - (1 << 16)).step_by(1 << 18) {
        let mut bytes = good.clone();
        bytes[at] ^= 0x10;
        let error = with_bytes(&path, &bytes, || use_all(&options.out)).unwrap_err().to_string();
        // Blocks of 256 KiB, less what does not hold another record of 2052 bytes, padded to pages.
        let block = (at - HEADER_BYTES) / (127 * 2052usize).next_multiple_of(4096);
        let expected = format!("shard-00000.storm, block {block}: it does not match its checksum");
        assert!(error.contains(&expected), "{at}: {error}");
    }
}

/// Tokens, index and mask: what training reads is checked without a request to verify.
#[test]
fn damage_is_noticed_while_loading() {
    let folder = Folder::new();
    let dir = small(&folder);
    let load = || -> Result<(), DataError> {
        let mut loader = Loader::new(Arc::new(Dataset::open(&dir)?), training(2, 32, 0))?;
        let mut samples = Samples::default();
        // Several epochs: every row of every shard.
        (0..200).try_for_each(|_| loader.next_batch(&mut samples).map(|_| ()))
    };
    load().unwrap();
    let shards =
        files(&dir).into_iter().filter(|path| path.extension().is_some_and(|end| end == "storm"));
    for path in shards {
        let good = fs::read(&path).unwrap();
        for at in (HEADER_BYTES..good.len()).step_by(37) {
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            let result = with_bytes(&path, &bytes, load);
            assert!(result.is_err(), "{}: byte {at} went unnoticed", path.display());
        }
    }
}

/// A shard with a matching manifest: what an attacker could make.
struct Forged {
    dir: PathBuf,
    shard: Vec<u8>,
    manifest: serde_json::Value,
}

impl Forged {
    fn new(dir: &Path) -> Forged {
        let shard = fs::read(dir.join("shard-00000.storm")).unwrap();
        let manifest =
            serde_json::from_slice(&fs::read(dir.join("dataset.json")).unwrap()).unwrap();
        Forged { dir: dir.to_owned(), shard, manifest }
    }

    fn put_u64(&mut self, at: usize, value: u64) {
        self.shard[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    fn index_at(&self) -> usize {
        let tokens = self.manifest["shards"][0]["tokens"].as_u64().unwrap() as usize;
        HEADER_BYTES + (2 * tokens).next_multiple_of(8)
    }

    /// Makes all checksums right, and returns the result of using it.
    fn try_it(mut self) -> String {
        let table_at = self.shard.len() - 8;
        let header = crc32fast::hash(&self.shard[..HEADER_BYTES - 4]);
        self.shard[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&header.to_le_bytes());
        let block = crc32fast::hash(&self.shard[HEADER_BYTES..table_at]);
        self.shard[table_at..table_at + 4].copy_from_slice(&block.to_le_bytes());
        let table = crc32fast::hash(&self.shard[table_at..table_at + 4]);
        self.shard[table_at + 4..].copy_from_slice(&table.to_le_bytes());
        self.manifest["shards"][0]["checksum"] = table.into();
        let json = serde_json::to_vec(&self.manifest).unwrap();
        let sum: String = Sha256::digest(&json).iter().map(|byte| format!("{byte:02x}")).collect();
        fs::write(self.dir.join("shard-00000.storm"), &self.shard).unwrap();
        fs::write(self.dir.join("dataset.json"), json).unwrap();
        fs::write(self.dir.join("dataset.sha256"), format!("{sum}  dataset.json\n")).unwrap();
        let (result, peak) = peak_bytes(|| use_all(&self.dir));
        assert!(peak < MEMORY_BYTES_MAX, "took {peak} bytes");
        result.err().map_or_else(String::new, |error| error.to_string())
    }
}

#[test]
fn forgeries_do_no_harm() {
    let check = |forge: fn(&mut Forged), expected: &str| {
        let folder = Folder::new();
        let mut forged = Forged::new(&small(&folder));
        forge(&mut forged);
        let error = forged.try_it();
        assert!(error.contains(expected), "{error}");
    };
    check(|_| {}, "");
    // Counts of tokens and samples are at 24 and 32.
    check(|forged| forged.put_u64(24, u64::MAX), "its length is not what its header says");
    check(|forged| forged.put_u64(24, 1 << 60), "its length is not what its header says");
    check(|forged| forged.put_u64(32, u64::MAX / 8), "its length is not what its header says");
    check(|forged| forged.shard[16] = 3, "unknown kind or width");
    check(|forged| forged.shard[12] = 7, "unknown kind or width");
    check(|forged| forged.shard[8] = 2, "version 2");
    check(|forged| forged.shard[HEADER_BYTES + 1] = 0xff, "the vocabulary ends at 257");
    check(|forged| forged.put_u64(forged.index_at() + 8, u64::MAX), "index is out of order");
    check(|forged| forged.put_u64(forged.index_at() + 8, 0), "index is out of order");
    check(|forged| forged.put_u64(forged.index_at(), 1), "does not begin at the first token");
    check(|forged| forged.manifest["counts"]["tokens"] = 5.into(), "do not add up");
    check(|forged| forged.manifest["counts"]["samples"] = u64::MAX.into(), "do not add up");
    check(|forged| forged.manifest["shards"][0]["bytes"] = u64::MAX.into(), "not the shard");
    check(|forged| forged.manifest["shards"][0]["tokens"] = u64::MAX.into(), "not the shard");
    check(|forged| forged.manifest["held_out"]["from_token"] = u64::MAX.into(), "held-out part");
    check(|forged| forged.manifest["held_out"]["from_sample"] = 1.into(), "held-out part");
    check(|forged| forged.manifest["tokenizer"]["vocabulary"] = 300.into(), "not the shard");
    check(|forged| forged.manifest["tokenizer"]["vocabulary"] = u32::MAX.into(), "special token");
    check(|forged| forged.manifest["tokenizer"]["end_of_text"] = u32::MAX.into(), "end of text");
    check(|forged| forged.manifest["version"] = 9.into(), "version 9");
    check(|forged| forged.manifest["format"] = "other".into(), "its format");
    check(|forged| forged.manifest["surprise"] = 1.into(), "unknown field");
    check(|forged| forged.manifest["kind"] = "text".into(), "not the shard");
    check(
        |forged| {
            let shard = forged.manifest["shards"][0].clone();
            forged.manifest["shards"] = vec![shard; 5_000].into();
        },
        "not the shard",
    );
}

#[test]
fn a_shard_cut_while_in_use_is_an_error() {
    let folder = Folder::new();
    let dir = folder.version_1("text");
    let dataset = Arc::new(Dataset::open(&dir).unwrap());
    let mut loader = Loader::new(Arc::clone(&dataset), training(4, 128, 0)).unwrap();
    batches(&mut loader, 3);
    let path = dir.join("shard-00000.storm");
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(5000).unwrap();
    let (mut samples, position) = (Samples::default(), loader.position());
    let results: Vec<_> = (0..20).map(|_| loader.next_batch(&mut samples)).collect();
    let error = results.into_iter().find_map(Result::err).expect("most of the file is gone");
    assert!(error.to_string().contains("cut short"), "{error}");
    // The loader stays where it was, and does not advance.
    assert_eq!(loader.position(), position);
    assert!(loader.next_batch(&mut samples).is_err());
    assert!(dataset.verify(&|_| {}).is_err());
}

#[test]
fn other_folders_are_no_datasets() {
    let folder = Folder::new();
    for dir in [folder.path(""), folder.path("missing")] {
        let error = Dataset::open(&dir).unwrap_err().to_string();
        assert!(error.contains("is not a dataset") && error.contains("storm data pack"), "{error}");
    }
    fs::create_dir(folder.path("dataset.json")).unwrap();
    Dataset::open(&folder.path("")).unwrap_err();
}
