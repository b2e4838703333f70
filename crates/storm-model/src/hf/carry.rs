//! Files that are copied when a model is saved: tokenizer, generation settings, license.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use storm_files::open_plain;

use super::paths::Root;
use crate::ModelError;

/// Larger than any tokenizer. A larger file is an error and is not truncated.
const FILE_BYTES_MAX: u64 = 256 << 20;
const FILES_MAX: usize = 10_000;

/// Whether a file with this name is copied: tokenizers, vocabularies, merges, special tokens,
/// generation settings, chat templates, and the license with its notices. The README is not copied,
/// because it describes the original model.
pub fn is_carried(name: &str) -> bool {
    const NAMES: &[&str] = &[
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tekken.json",
        "vocab.json",
        "vocab.txt",
    ];
    const STARTS: &[&str] = &["LICENSE", "LICENCE", "NOTICE", "USE_POLICY"];
    let is_tokenizer =
        name.starts_with("tokenizer") && [".json", ".model"].iter().any(|end| name.ends_with(end));
    is_tokenizer || NAMES.contains(&name) || STARTS.iter().any(|start| name.starts_with(start))
}

/// Copies these files. Links are followed only as far as allowed for a model's files.
pub(super) fn carry(source: &Path, output: &Path) -> Result<(), ModelError> {
    let root = Root::new(source)?;
    let entries =
        fs::read_dir(root.directory()).map_err(ModelError::io("list the directory", source))?;
    for entry in entries.take(FILES_MAX) {
        let entry = entry.map_err(ModelError::io("list the directory", source))?;
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| is_carried(name)) else {
            continue;
        };
        if fs::metadata(entry.path()).is_ok_and(|metadata| metadata.is_dir()) {
            continue;
        }
        if let Some(path) = root.file(name)? {
            copy(&path, &output.join(name))?;
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<(), ModelError> {
    let mut source =
        open_plain(from).map_err(ModelError::io("open the file", from))?.take(FILE_BYTES_MAX + 1);
    let mut target = File::create_new(to).map_err(ModelError::io("create the file", to))?;
    let bytes =
        io::copy(&mut source, &mut target).map_err(ModelError::io("copy the file", from))?;
    if bytes > FILE_BYTES_MAX {
        let what = "a file to carry along";
        return Err(ModelError::TooLarge {
            path: from.to_owned(),
            what,
            bytes,
            limit: FILE_BYTES_MAX,
        });
    }
    target.flush().and_then(|()| target.sync_all()).map_err(ModelError::io("write the file", to))
}
