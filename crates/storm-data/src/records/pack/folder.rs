//! Folders of images with a subfolder per class.

use super::image::Image;
use super::{Sink, Source};
use crate::records::column::{Column, ColumnType};
use crate::records::parallel;
use crate::{DataError, Split};
use std::path::{Path, PathBuf};

/// Names of folders that hold the held-out part.
const HELD_OUT: [&str; 4] = ["test", "val", "valid", "validation"];
const TRAINING: &str = "train";
/// Bytes of decoded images in flight.
const IN_FLIGHT_BYTES: usize = 64 << 20;
const IN_FLIGHT_MAX: usize = 256;
const CLASSES_MAX: usize = 1 << 20;

pub(super) struct ImageFolder {
    /// Path, part and class of each image.
    images: Vec<(PathBuf, Split, usize)>,
    class_names: Vec<String>,
    bytes: u64,
    has_parts: bool,
    /// The form of all images: that of the first usable one, in the requested size if there is one.
    /// It has no pixels.
    form: Image,
    size: Option<[usize; 2]>,
    /// Unusable inputs before the first usable image.
    bad: Vec<DataError>,
}

/// The entries of a folder without hidden ones, sorted by name.
fn entries(dir: &Path) -> Result<Vec<(String, PathBuf)>, DataError> {
    let io = DataError::io(dir);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(&io)? {
        let path = entry.map_err(&io)?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        match name {
            Some(name) if !name.starts_with('.') => found.push((name, path)),
            _ => {}
        }
    }
    found.sort();
    Ok(found)
}

/// Folders that contain class folders, and their part: the folder itself, or its subfolders `train`
/// and `test`.
fn parts(dir: &Path) -> Result<Vec<(PathBuf, Split)>, DataError> {
    let mut found = Vec::new();
    for (name, path) in entries(dir)? {
        let name = name.to_lowercase();
        if path.is_dir() && name == TRAINING {
            found.push((path, Split::Train));
        } else if path.is_dir() && HELD_OUT.contains(&name.as_str()) {
            found.push((path, Split::Held));
        }
    }
    let both = [Split::Train, Split::Held].iter().all(|part| found.iter().any(|(_, p)| p == part));
    Ok(if both { found } else { vec![(dir.to_owned(), Split::Train)] })
}

impl ImageFolder {
    /// Finds the images. With `skip_bad`, unusable ones before the first usable one are skipped.
    pub(super) fn open(
        dir: &Path,
        size: Option<[usize; 2]>,
        skip_bad: bool,
    ) -> Result<ImageFolder, DataError> {
        let parts = parts(dir)?;
        let has_parts = parts.len() > 1;
        let mut class_names: Vec<String> = Vec::new();
        let mut folders = Vec::new();
        for (dir, part) in &parts {
            for (name, path) in entries(dir)? {
                if path.is_dir() {
                    class_names.push(name.clone());
                    folders.push((name, path, *part));
                }
            }
        }
        class_names.sort();
        class_names.dedup();
        if class_names.is_empty() || class_names.len() > CLASSES_MAX {
            return Err(DataError::input(
                dir,
                "this folder holds nothing that can be packed: images are in a subfolder for each class",
            ));
        }
        let (mut images, mut bytes) = (Vec::new(), 0);
        for (name, folder, part) in folders {
            let class = class_names.binary_search(&name).unwrap_or(0);
            for (_, path) in entries(&folder)? {
                bytes += path.metadata().map_err(DataError::io(&path))?.len();
                images.push((path, part, class));
            }
        }
        let mut bad = Vec::new();
        for (path, ..) in &images {
            match Image::read(path) {
                Ok(first) => {
                    images.drain(..bad.len());
                    let [height, width] = size.unwrap_or([first.height, first.width]);
                    let form = Image { height, width, pixels: Vec::new(), ..first };
                    return Ok(ImageFolder {
                        images,
                        class_names,
                        bytes,
                        has_parts,
                        form,
                        size,
                        bad,
                    });
                }
                Err(error) if !skip_bad => return Err(error),
                Err(error) => bad.push(error),
            }
        }
        let problem = match bad.first() {
            Some(first) => format!("none of its images can be packed; the first: {first}"),
            None => "its folders hold no images".to_owned(),
        };
        Err(DataError::input(dir, problem))
    }

    /// Reads an image and converts it to the common form.
    fn load(&self, path: &Path) -> Result<Vec<u8>, DataError> {
        let image = Image::read(path)?;
        let form = &self.form;
        let image = if form.channels == 3 { image.into_rgb() } else { image };
        let (this, others) = (image.words(), form.words());
        if image.channels != form.channels {
            let problem = format!("it is {this}, and the first image is {others}");
            return Err(DataError::input(path, problem));
        }
        if [image.height, image.width] == [form.height, form.width] {
            return Ok(image.pixels);
        }
        match self.size {
            Some(size) => Ok(image.resized(size).pixels),
            None => {
                let problem = format!(
                    "it is {this}, and the first image is {others}; give --size {}x{} to resize all that differ",
                    form.height, form.width
                );
                Err(DataError::input(path, problem))
            }
        }
    }
}

impl Source for ImageFolder {
    fn columns(&self) -> Vec<Column> {
        let Image { height, width, channels, .. } = self.form;
        vec![
            Column::fixed("images", ColumnType::U8, &[height, width, channels]),
            Column::label("targets", self.class_names.len() as u32),
        ]
    }

    fn class_names(&self) -> Vec<String> {
        self.class_names.clone()
    }

    fn has_parts(&self) -> bool {
        self.has_parts
    }

    fn size(&self) -> (u64, u64) {
        ((self.images.len() + self.bad.len()) as u64, self.bytes)
    }

    fn read(&mut self, sink: &mut Sink<'_>) -> Result<(), DataError> {
        for error in self.bad.drain(..) {
            sink.bad(error)?;
        }
        let bytes = self.form.height * self.form.width * self.form.channels;
        let at_once = (IN_FLIGHT_BYTES / bytes.max(1)).clamp(1, IN_FLIGHT_MAX);
        for images in self.images.chunks(at_once) {
            let decoded = parallel::map(images, || (), |(), (path, ..)| self.load(path));
            for ((path, part, class), pixels) in images.iter().zip(decoded) {
                match pixels {
                    Ok(pixels) => {
                        let label = (*class as i32).to_le_bytes();
                        let bytes = path.metadata().map_or(0, |metadata| metadata.len());
                        let values: [&[u8]; 2] = [&pixels, &label];
                        sink.push(*part, &values, bytes, || (path.clone(), String::new()))?;
                    }
                    Err(error) => sink.bad(error)?,
                }
            }
        }
        Ok(())
    }
}
