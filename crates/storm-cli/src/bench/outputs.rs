//! Files that show the last step of a run.

use anyhow::{Context, Result};
use std::io;
use std::path::{Path, PathBuf};
use storm_files::{IfPresent, StagedFile};

/// A file to write. It is created before the run, so that a bad path fails before any work is done.
pub(super) struct Output {
    what: &'static str,
    path: PathBuf,
    file: StagedFile,
}

impl Output {
    pub(super) fn create(path: Option<&Path>, what: &'static str) -> Result<Option<Output>> {
        let Some(path) = path else { return Ok(None) };
        let file = StagedFile::create(path, IfPresent::Replace)
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Some(Output { what, path: path.to_owned(), file }))
    }

    pub(super) fn write(
        mut self,
        write: impl FnOnce(&mut StagedFile) -> io::Result<()>,
    ) -> Result<()> {
        let failed = || format!("cannot write {}", self.path.display());
        write(&mut self.file).with_context(failed)?;
        self.file.finish().with_context(failed)?;
        eprintln!("{}: {}", self.what, self.path.display());
        Ok(())
    }
}
