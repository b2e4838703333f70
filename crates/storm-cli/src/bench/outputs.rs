//! Files that show the last step of a run.

use anyhow::{Context, Result};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// A file that is to be written. It is created before the work: a path that cannot be written should
/// not cost a run.
pub(super) struct Output {
    what: &'static str,
    path: PathBuf,
    file: BufWriter<File>,
}

impl Output {
    pub(super) fn create(path: Option<&Path>, what: &'static str) -> Result<Option<Output>> {
        let Some(path) = path else { return Ok(None) };
        let file =
            File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Some(Output { what, path: path.to_owned(), file: BufWriter::new(file) }))
    }

    pub(super) fn write(
        mut self,
        write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> Result<()> {
        write(&mut self.file)
            .and_then(|()| self.file.flush())
            .with_context(|| format!("cannot write {}", self.path.display()))?;
        eprintln!("{}: {}", self.what, self.path.display());
        Ok(())
    }
}
