//! The files that a model directory may refer to: its own, and the blobs of its Hugging Face cache.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::ModelError;
use crate::error::clip;

/// A model directory with links resolved, so that the targets of its entries can be compared with
/// it.
#[derive(Debug)]
pub(super) struct Root {
    directory: PathBuf,
    /// `blobs` of a Hugging Face cache: `snapshots/REVISION/file` links to `../../blobs/HASH`.
    blobs: Option<PathBuf>,
}

impl Root {
    pub(super) fn new(path: &Path) -> Result<Self, ModelError> {
        let directory =
            fs::canonicalize(path).map_err(ModelError::io("open the directory", path))?;
        let snapshots =
            directory.parent().filter(|parent| parent.file_name() == Some("snapshots".as_ref()));
        let blobs = snapshots
            .and_then(Path::parent)
            .map(|repository| repository.join("blobs"))
            // If `blobs` could be a link, any directory could become part of the repository.
            .filter(|blobs| fs::symlink_metadata(blobs).is_ok_and(|metadata| metadata.is_dir()));
        Ok(Self { directory, blobs })
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The regular file with this name, or `None` if it does not exist. A name that is a path, a
    /// link that leaves the directory, and anything that would block when opened are errors.
    pub(super) fn file(&self, name: &str) -> Result<Option<PathBuf>, ModelError> {
        if !is_plain(name) {
            return Err(self.refuse(name, "is not a plain file name"));
        }
        let path = self.directory.join(name);
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            return Ok(None);
        };
        if metadata.is_file() {
            return Ok(Some(path));
        }
        if !metadata.is_symlink() {
            return Err(self.refuse(name, "is not a regular file"));
        }
        let target = match fs::canonicalize(&path) {
            Ok(target) => target,
            Err(error) => return Err(ModelError::io("follow the link", &path)(error)),
        };
        let is_inside = |place: &Path| target.starts_with(place);
        if !is_inside(&self.directory) && !self.blobs.as_deref().is_some_and(is_inside) {
            return Err(self.refuse(name, "is a link that leaves the directory"));
        }
        if !target.is_file() {
            return Err(self.refuse(name, "is a link to something that is not a regular file"));
        }
        Ok(Some(target))
    }

    fn refuse(&self, name: &str, problem: &'static str) -> ModelError {
        ModelError::UnsafePath {
            directory: self.directory.clone(),
            entry: format!("\"{}\"", clip(name)),
            problem,
        }
    }
}

/// Whether a name denotes a file directly in a directory, on any operating system.
fn is_plain(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let is_one_step = matches!(components.next(), Some(Component::Normal(step)) if step == name);
    is_one_step
        && components.next().is_none()
        && name.len() <= 255
        && !name.contains(['/', '\\', ':', '\0'])
}
