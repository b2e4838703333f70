//! Packs images and other records into a dataset.

mod cifar;
mod folder;
mod idx;
mod image;
mod repeated;
mod resize;
mod synthetic;

pub(super) use cifar::WORDS as CIFAR10;
pub use repeated::Repeated;
pub use resize::resize_image;
pub use synthetic::Synthetic;

use super::codec::Codec;
use super::column::Column;
use super::manifest::{RecordCounts, RecordManifest};
use super::write::RecordWriter;
use crate::pack::holds_images;
use crate::{DataError, IfExists, Split};
use cifar::Cifar10;
use folder::ImageFolder;
use idx::Idx;
use std::path::{Path, PathBuf};
use storm_files::StagedDirectory;

/// Limit on the height and width that images are resized to.
const SIZE_MAX: usize = 4096;

/// The source of records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordInput {
    /// A folder with the binary files of CIFAR-10.
    Cifar10(PathBuf),
    /// A folder with the files of MNIST or Fashion-MNIST.
    Idx(PathBuf),
    /// A folder of PNG and JPEG files, with a subfolder per class.
    ImageFolder(PathBuf),
    /// Synthetic records.
    Synthetic(Synthetic),
    /// An existing dataset of records, repeated.
    Repeated(Repeated),
}

impl RecordInput {
    /// Determines the type of the inputs. `None` if they are not records.
    ///
    /// # Errors
    /// If a folder of images is one of several inputs.
    pub fn recognize(inputs: &[PathBuf]) -> Result<Option<RecordInput>, DataError> {
        for path in inputs.iter().filter(|path| path.is_dir()) {
            let Some(input) = RecordInput::of_folder(path)? else { continue };
            if inputs.len() > 1 {
                return Err(DataError::input(path, "a folder of images is packed alone"));
            }
            return Ok(Some(input));
        }
        Ok(None)
    }

    fn of_folder(path: &Path) -> Result<Option<RecordInput>, DataError> {
        if cifar::is_folder(path) {
            return Ok(Some(RecordInput::Cifar10(path.to_owned())));
        }
        if idx::is_folder(path) {
            return Ok(Some(RecordInput::Idx(path.to_owned())));
        }
        Ok(holds_images(path)?.then(|| RecordInput::ImageFolder(path.to_owned())))
    }

    /// A description for the manifest.
    pub fn words(&self) -> String {
        match self {
            RecordInput::Cifar10(_) => cifar::WORDS.to_owned(),
            RecordInput::Idx(_) => "MNIST's kind of images, IDX files".to_owned(),
            RecordInput::ImageFolder(_) => "images, a folder for each class".to_owned(),
            RecordInput::Synthetic(synthetic) => synthetic.words(),
            RecordInput::Repeated(repeated) => repeated.words(),
        }
    }

    fn open(&self, options: &RecordPackOptions) -> Result<Box<dyn Source>, DataError> {
        if options.size.is_some() && !matches!(self, RecordInput::ImageFolder(_)) {
            let problem = format!(
                "this is for folders of PNG and JPEG files, and the input is {}",
                self.words()
            );
            return Err(DataError::Option { option: "--size", problem });
        }
        Ok(match self {
            RecordInput::Cifar10(path) => Box::new(Cifar10::open(path)?),
            RecordInput::Idx(path) => Box::new(Idx::open(path)?),
            RecordInput::ImageFolder(path) => {
                Box::new(ImageFolder::open(path, options.size, options.skip_bad)?)
            }
            RecordInput::Synthetic(synthetic) => Box::new(synthetic.clone().checked()?),
            RecordInput::Repeated(repeated) => Box::new(repeated.open()?),
        })
    }
}

/// Options of [`pack_records`].
#[derive(Clone, Debug)]
pub struct RecordPackOptions {
    /// The source of records.
    pub input: RecordInput,
    /// The directory to create.
    pub out: PathBuf,
    /// What to do if it exists.
    pub if_exists: IfExists,
    /// How blocks are compressed.
    pub codec: Codec,
    /// Fraction of records to hold out for evaluation if the input has no such part: at least 0 and
    /// less than 1. They are taken evenly from the whole input.
    pub held_out: f64,
    /// Skip and count inputs that cannot be packed, instead of failing.
    pub skip_bad: bool,
    /// Height and width to resize the images of a folder to. `None` if all must have the size of
    /// the first.
    pub size: Option<[usize; 2]>,
}

impl RecordPackOptions {
    /// Opens the input and describes its records, without packing it.
    ///
    /// # Errors
    /// Names the file that cannot be packed.
    pub fn outline(&self) -> Result<RecordOutline, DataError> {
        let source = self.input.open(self)?;
        Ok(RecordOutline { columns: source.columns(), has_held_out_part: source.has_parts() })
    }
}

/// A description of an input before it is packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordOutline {
    /// The columns of its records.
    pub columns: Vec<Column>,
    /// Whether it comes with an evaluation part, such as CIFAR-10's test file.
    pub has_held_out_part: bool,
}

/// Progress of [`pack_records`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordPackProgress {
    /// Bytes of input packed.
    pub bytes_done: u64,
    /// Bytes of input in total.
    pub bytes_total: u64,
    /// Records so far.
    pub records: u64,
}

/// The result of [`pack_records`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordPackSummary {
    /// A hash of the contents.
    pub id: String,
    /// Its metadata.
    pub manifest: RecordManifest,
    /// The first skipped input, with the reason.
    pub first_skipped: Option<String>,
}

/// A source of records.
trait Source {
    fn columns(&self) -> Vec<Column>;

    fn class_names(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether the input itself has an evaluation part.
    fn has_parts(&self) -> bool;

    /// The number of files, and their total bytes.
    fn size(&self) -> (u64, u64);

    /// Passes each record to `sink`, in a deterministic order.
    fn read(&mut self, sink: &mut Sink<'_>) -> Result<(), DataError>;
}

/// Receives records.
struct Sink<'a> {
    writer: RecordWriter,
    skip_bad: bool,
    held_out: Option<f64>,
    first_skipped: Option<String>,
    skipped: u64,
    /// Records so far, without bad ones.
    seen: u64,
    bytes_done: u64,
    bytes_total: u64,
    progress: &'a dyn Fn(RecordPackProgress),
}

impl Sink<'_> {
    /// Adds a record. `part` is the part in the input. `name` returns the path and a prefix for the
    /// error message of a bad record.
    fn push(
        &mut self,
        part: Split,
        values: &[&[u8]],
        input_bytes: u64,
        name: impl FnOnce() -> (PathBuf, String),
    ) -> Result<(), DataError> {
        let part = match self.held_out {
            None => part,
            Some(share) => {
                let before = |records: u64| (records as f64 * share).floor();
                match before(self.seen + 1) > before(self.seen) {
                    true => Split::Held,
                    false => Split::Train,
                }
            }
        };
        match self.writer.push(part, values)? {
            Ok(()) => self.seen += 1,
            Err(problem) => {
                let (path, place) = name();
                self.bad(DataError::input(&path, format!("{place}{problem}")))?;
            }
        }
        self.bytes_done += input_bytes;
        (self.progress)(RecordPackProgress {
            bytes_done: self.bytes_done,
            bytes_total: self.bytes_total,
            records: self.writer.counts().records,
        });
        Ok(())
    }

    /// Handles an input that cannot be packed: an error, or counted as skipped.
    fn bad(&mut self, error: DataError) -> Result<(), DataError> {
        if !self.skip_bad {
            return Err(error);
        }
        self.skipped += 1;
        self.first_skipped.get_or_insert_with(|| error.to_string());
        Ok(())
    }
}

/// Packs records into a dataset. It is written to a temporary directory next to `out` and renamed
/// when complete, so `out` is never a partial dataset. The same input and options give the same
/// bytes.
///
/// # Errors
/// Names the file that cannot be packed.
pub fn pack_records(
    options: &RecordPackOptions,
    progress: &dyn Fn(RecordPackProgress),
) -> Result<RecordPackSummary, DataError> {
    let refuse =
        |option, problem: &str| Err(DataError::Option { option, problem: problem.to_owned() });
    if options.size.is_some_and(|size| size.iter().any(|side| !(1..=SIZE_MAX).contains(side))) {
        return refuse("--size", "sides are from 1 to 4096");
    }
    if !(0.0..1.0).contains(&options.held_out) {
        return refuse("held out", "a share from 0 to less than 1");
    }
    let mut source = options.input.open(options)?;
    if source.has_parts() && options.held_out > 0.0 {
        return refuse("held out", "the input has a test part, which is held out");
    }
    let (input_files, input_bytes) = source.size();
    if let RecordInput::Synthetic(_) | RecordInput::Repeated(_) = &options.input {
        check_room(&options.out, input_bytes)?;
    }
    let columns = source.columns();
    let if_exists = options.if_exists;
    let staged =
        StagedDirectory::create(&options.out, "packing", move |dir| if_exists.may_replace(dir))
            .map_err(DataError::stage(&options.out))?;
    let mut sink = Sink {
        writer: RecordWriter::new(staged.path(), &columns, options.codec)?,
        skip_bad: options.skip_bad,
        held_out: (!source.has_parts()).then_some(options.held_out),
        first_skipped: None,
        skipped: 0,
        seen: 0,
        bytes_done: 0,
        bytes_total: input_bytes,
        progress,
    };
    source.read(&mut sink)?;
    let Sink { writer, first_skipped, skipped, .. } = sink;
    let (counts, statistics, shards) = writer.finish()?;
    if counts.records == 0 {
        let problem = match &first_skipped {
            Some(first) => format!("all of it was skipped; the first: {first}"),
            None => "there is nothing in it to pack".to_owned(),
        };
        return Err(DataError::input(options.input.path(), problem));
    }
    let counts = RecordCounts { input_files, input_bytes, skipped, ..counts };
    let manifest = RecordManifest::new(
        options.input.words(),
        columns,
        source.class_names(),
        options.codec,
        counts,
        statistics,
        shards,
    );
    let id = manifest.write(staged.path())?;
    staged.finish().map_err(DataError::stage(&options.out))?;
    Ok(RecordPackSummary { id, manifest, first_skipped })
}

/// Fails if the disk does not have enough space.
fn check_room(out: &Path, bytes: u64) -> Result<(), DataError> {
    let parent = out.ancestors().skip(1).find(|parent| parent.is_dir()).unwrap_or(Path::new("."));
    let Ok(disk) = rustix::fs::statvfs(parent) else { return Ok(()) };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    match bytes <= free {
        true => Ok(()),
        false => {
            let problem = format!("needs {bytes} bytes, and {free} are free there");
            Err(DataError::Output { path: out.to_owned(), problem })
        }
    }
}

impl RecordInput {
    /// Its path, for errors.
    fn path(&self) -> &Path {
        match self {
            RecordInput::Cifar10(path)
            | RecordInput::Idx(path)
            | RecordInput::ImageFolder(path) => path,
            RecordInput::Synthetic(_) => Path::new("synthetic records"),
            RecordInput::Repeated(repeated) => &repeated.dir,
        }
    }
}
