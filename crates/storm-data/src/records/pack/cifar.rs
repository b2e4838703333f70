//! The binary files of CIFAR-10: a label byte, then 1024 bytes each of red, green and blue.

use super::{Sink, Source};
use crate::manifest::read_file;
use crate::records::column::{Column, ColumnType};
use crate::{DataError, Split};
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use storm_files::open_plain;

/// The source in the manifest.
pub(in crate::records) const WORDS: &str = "CIFAR-10, binary files";

const SIDE: usize = 32;
const CHANNELS: usize = 3;
const PLANE_BYTES: usize = SIDE * SIDE;
const IMAGE_BYTES: usize = CHANNELS * PLANE_BYTES;
const RECORD_BYTES: usize = 1 + IMAGE_BYTES;
const CLASSES: usize = 10;
const NAMES: &str = "batches.meta.txt";
const NAMES_BYTES_MAX: u64 = 64 << 10;

/// The files, in order, and the part of each.
fn files(dir: &Path) -> Vec<(PathBuf, Split)> {
    let training = (1..=5).map(|number| (format!("data_batch_{number}.bin"), Split::Train));
    let all = training.chain([("test_batch.bin".to_owned(), Split::Held)]);
    all.map(|(name, part)| (dir.join(name), part)).filter(|(path, _)| path.exists()).collect()
}

/// Whether a folder has at least one of them.
pub(super) fn is_folder(dir: &Path) -> bool {
    !files(dir).is_empty()
}

pub(super) struct Cifar10 {
    /// Path, part, and bytes.
    files: Vec<(PathBuf, Split, u64)>,
    class_names: Vec<String>,
}

impl Cifar10 {
    pub(super) fn open(dir: &Path) -> Result<Cifar10, DataError> {
        let mut sized = Vec::new();
        for (path, part) in files(dir) {
            let metadata = open_plain(&path).and_then(|file| file.metadata());
            let bytes = metadata.map_err(DataError::io(&path))?.len();
            if bytes == 0 || !bytes.is_multiple_of(RECORD_BYTES as u64) {
                let problem = format!("{bytes} bytes are not a number of images of {RECORD_BYTES}");
                return Err(DataError::input(&path, problem));
            }
            sized.push((path, part, bytes));
        }
        Ok(Cifar10 { files: sized, class_names: class_names(&dir.join(NAMES))? })
    }
}

fn class_names(path: &Path) -> Result<Vec<String>, DataError> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let bytes = read_file(path, NAMES_BYTES_MAX)?;
    let text = String::from_utf8(bytes).map_err(|_| DataError::input(path, "it is not text"))?;
    let names: Vec<String> =
        text.lines().map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect();
    match names.len() == CLASSES {
        true => Ok(names),
        false => Err(DataError::input(path, format!("{} names of {CLASSES} classes", names.len()))),
    }
}

impl Source for Cifar10 {
    fn columns(&self) -> Vec<Column> {
        vec![
            Column::fixed("images", ColumnType::U8, &[SIDE, SIDE, CHANNELS]),
            Column::label("targets", CLASSES as u32),
        ]
    }

    fn class_names(&self) -> Vec<String> {
        self.class_names.clone()
    }

    fn has_parts(&self) -> bool {
        self.files.iter().any(|(_, part, _)| *part == Split::Held)
    }

    fn size(&self) -> (u64, u64) {
        (self.files.len() as u64, self.files.iter().map(|(_, _, bytes)| bytes).sum())
    }

    fn read(&mut self, sink: &mut Sink<'_>) -> Result<(), DataError> {
        let mut record = [0; RECORD_BYTES];
        let mut image = [0; IMAGE_BYTES];
        for (path, part, bytes) in &self.files {
            let io = DataError::io(path);
            let mut file = BufReader::with_capacity(1 << 20, open_plain(path).map_err(&io)?);
            for number in 0..bytes / RECORD_BYTES as u64 {
                file.read_exact(&mut record).map_err(&io)?;
                let [label, planes @ ..] = &record;
                for (pixel, values) in image.chunks_exact_mut(CHANNELS).enumerate() {
                    for (channel, value) in values.iter_mut().enumerate() {
                        *value = planes[channel * PLANE_BYTES + pixel];
                    }
                }
                let label = i32::from(*label).to_le_bytes();
                sink.push(*part, &[&image, &label], RECORD_BYTES as u64, || {
                    (path.clone(), format!("image {number}: "))
                })?;
            }
        }
        Ok(())
    }
}
