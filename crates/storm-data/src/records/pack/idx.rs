//! MNIST and Fashion-MNIST: images and labels in the IDX format, plain or gzipped.

use super::{Sink, Source};
use crate::records::column::{Column, ColumnType, RECORD_BYTES_MAX};
use crate::{DataError, Split};
use flate2::read::MultiGzDecoder;
use std::io::{BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};
use storm_files::open_plain;

const CLASSES: u32 = 10;
/// The first four bytes: two zeros, the element type (8 is u8), and the number of dimensions.
const IMAGES: [u8; 4] = [0, 0, 8, 3];
const LABELS: [u8; 4] = [0, 0, 8, 1];
/// The maximum compression ratio of Deflate.
const DEFLATE_RATIO_MAX: u64 = 1032;

/// Images and labels of a part.
struct Pair {
    part: Split,
    images: PathBuf,
    labels: PathBuf,
}

/// The file of this name, in any of the spellings in use.
fn find(dir: &Path, start: &str, kind: &str) -> Option<PathBuf> {
    let names = ["-", "."].map(|dash| format!("{start}{dash}{kind}-ubyte"));
    let names = names.iter().flat_map(|name| [name.clone(), format!("{name}.gz")]);
    names.map(|name| dir.join(name)).find(|path| path.exists())
}

fn pairs(dir: &Path) -> Vec<Pair> {
    let parts = [("train", Split::Train), ("t10k", Split::Held)];
    let pair = |(start, part)| {
        let images = find(dir, &format!("{start}-images"), "idx3")?;
        let labels = find(dir, &format!("{start}-labels"), "idx1")?;
        Some(Pair { part, images, labels })
    };
    parts.into_iter().filter_map(pair).collect()
}

/// Whether a folder has images and labels of at least one part.
pub(super) fn is_folder(dir: &Path) -> bool {
    !pairs(dir).is_empty()
}

pub(super) struct Idx {
    pairs: Vec<Pair>,
    shape: [usize; 2],
    bytes: u64,
}

/// An open file whose header has been read.
struct IdxFile {
    path: PathBuf,
    reader: Box<dyn Read>,
    /// Number of images or labels.
    count: u64,
    /// Height and width, for images.
    shape: [usize; 2],
}

impl IdxFile {
    fn open(path: &Path, magic: [u8; 4]) -> Result<IdxFile, DataError> {
        let bad = |problem: String| DataError::input(path, problem);
        let io = DataError::io(path);
        let file = open_plain(path).map_err(&io)?;
        let file_bytes = file.metadata().map_err(&io)?.len();
        let is_gzip = path.extension().is_some_and(|ending| ending == "gz");
        let file = BufReader::with_capacity(1 << 20, file);
        let mut reader: Box<dyn Read> = match is_gzip {
            true => Box::new(MultiGzDecoder::new(file)),
            false => Box::new(file),
        };
        let mut header = [0; 16];
        let dimensions = usize::from(magic[3]);
        let header = &mut header[..4 + 4 * dimensions];
        reader.read_exact(header).map_err(|error| ended(path, error))?;
        if header[..4] != magic {
            return Err(bad(
                "it is not in the IDX format, or has other elements than u8".to_owned()
            ));
        }
        let number = |at: usize| {
            u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let count = u64::from(number(4));
        let shape = match dimensions {
            3 => [number(8) as usize, number(12) as usize],
            _ => [1, 1],
        };
        let element = shape[0] as u64 * shape[1] as u64;
        if element == 0 || element > RECORD_BYTES_MAX / 2 {
            return Err(bad(format!("images of {} × {} cannot be packed", shape[1], shape[0])));
        }
        let declared = u128::from(count) * u128::from(element);
        let room = match is_gzip {
            true => u128::from(file_bytes) * u128::from(DEFLATE_RATIO_MAX),
            false => u128::from(file_bytes - header.len() as u64),
        };
        if declared > room || (!is_gzip && declared < room) {
            return Err(bad(format!("its header says {count} elements, which is not its length")));
        }
        Ok(IdxFile { path: path.to_owned(), reader, count, shape })
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), DataError> {
        self.reader.read_exact(bytes).map_err(|error| ended(&self.path, error))
    }

    /// Checks that no data follows.
    fn finish(mut self) -> Result<(), DataError> {
        match self.reader.read(&mut [0]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(DataError::input(&self.path, "it goes on after its last element")),
            Err(error) => Err(ended(&self.path, error)),
        }
    }
}

/// A file that ends early or has damaged gzip data is bad input, not a system error.
fn ended(path: &Path, error: std::io::Error) -> DataError {
    match error.kind() {
        ErrorKind::UnexpectedEof => DataError::input(path, "it ends before its last element"),
        ErrorKind::InvalidData | ErrorKind::InvalidInput => {
            DataError::input(path, format!("its gzip is damaged: {error}"))
        }
        _ => DataError::io(path)(error),
    }
}

impl Idx {
    pub(super) fn open(dir: &Path) -> Result<Idx, DataError> {
        let pairs = pairs(dir);
        let (mut shape, mut bytes) = (None, 0);
        for pair in &pairs {
            let images = IdxFile::open(&pair.images, IMAGES)?;
            let labels = IdxFile::open(&pair.labels, LABELS)?;
            if images.count != labels.count {
                let (images, labels) = (images.count, labels.count);
                let problem = format!("{labels} labels of {images} images");
                return Err(DataError::input(&pair.labels, problem));
            }
            if *shape.get_or_insert(images.shape) != images.shape {
                return Err(DataError::input(&pair.images, "its images have another size"));
            }
            bytes += images.count * (images.shape[0] * images.shape[1] + 1) as u64;
        }
        let Some(shape) = shape else {
            return Err(DataError::input(dir, "this folder holds nothing that can be packed"));
        };
        Ok(Idx { pairs, shape, bytes })
    }
}

impl Source for Idx {
    fn columns(&self) -> Vec<Column> {
        let [height, width] = self.shape;
        vec![
            Column::fixed("images", ColumnType::U8, &[height, width, 1]),
            Column::label("targets", CLASSES),
        ]
    }

    fn has_parts(&self) -> bool {
        self.pairs.iter().any(|pair| pair.part == Split::Held)
    }

    fn size(&self) -> (u64, u64) {
        (2 * self.pairs.len() as u64, self.bytes)
    }

    fn read(&mut self, sink: &mut Sink<'_>) -> Result<(), DataError> {
        let mut image = vec![0; self.shape[0] * self.shape[1]];
        for pair in &self.pairs {
            let mut images = IdxFile::open(&pair.images, IMAGES)?;
            let mut labels = IdxFile::open(&pair.labels, LABELS)?;
            for number in 0..images.count {
                let mut label = [0];
                images.read(&mut image)?;
                labels.read(&mut label)?;
                let label = i32::from(label[0]).to_le_bytes();
                let bytes = image.len() as u64 + 1;
                sink.push(pair.part, &[&image, &label], bytes, || {
                    (pair.labels.clone(), format!("image {number}: "))
                })?;
            }
            images.finish()?;
            labels.finish()?;
        }
        Ok(())
    }
}
