//! Rules for replacing an existing directory.

use crate::manifest::{CHECKSUMS, MANIFEST, TOKENIZER};
use crate::shard::is_shard_name;
use std::path::Path;

/// What to do when the output directory exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IfExists {
    /// Refuse, unless it is empty.
    #[default]
    Refuse,
    /// Replace it if it is empty, or a dataset with nothing else in it.
    Replace,
}

impl IfExists {
    /// Whether a nonempty directory may be replaced, and if not, why.
    pub(crate) fn may_replace(self, dir: &Path) -> Result<(), String> {
        if self == IfExists::Refuse {
            return Err("exists already; choose another name, or --overwrite it".to_owned());
        }
        if !dir.join(MANIFEST).is_file() {
            return Err("is not a dataset, so it is not replaced; choose another name".to_owned());
        }
        let entries = std::fs::read_dir(dir).map_err(|error| format!("cannot be read: {error}"))?;
        for entry in entries {
            let entry = entry.map_err(|error| format!("cannot be read: {error}"))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
            let is_known = [MANIFEST, CHECKSUMS, TOKENIZER].contains(&name.as_str());
            if !is_file || !(is_known || is_shard_name(&name)) {
                return Err(format!(
                    "holds {name}, which is not part of a dataset, so it is not replaced; move {name} away \
                     or choose another name"
                ));
            }
        }
        Ok(())
    }
}
