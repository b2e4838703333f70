//! Finds the files of a folder that can be packed.

use super::InputFormat;
use super::format::Named;
use crate::DataError;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use storm_files::open_plain;

/// Limit on nesting depth.
const DEPTH_MAX: usize = 32;
/// Limit on files and folders in total.
const ENTRIES_MAX: usize = 1 << 20;
/// How many kinds of files an error message lists.
const TOLD: usize = 8;

/// Extensions of images, which are packed as records.
const IMAGES: [&str; 3] = ["png", "jpg", "jpeg"];

/// The files of a folder, by name.
pub(super) struct Found {
    pub(super) used: Vec<PathBuf>,
    /// Files of unknown format, or of another format than requested.
    pub(super) passed_over: Vec<PathBuf>,
}

/// Whether a folder holds images: any file has such an extension, or there is no text and the first
/// file has an image signature.
pub(crate) fn holds_images(dir: &Path) -> Result<bool, DataError> {
    let files = files(dir)?;
    if files.iter().any(|path| IMAGES.contains(&ending(path).as_str())) {
        return Ok(true);
    }
    let Some(first) = files.first() else { return Ok(false) };
    let is_text = files.iter().any(|path| Named::of(path).format.is_some());
    Ok(!is_text && is_image(first).unwrap_or(false))
}

fn is_image(path: &Path) -> io::Result<bool> {
    let mut beginning = [0; 4];
    open_plain(path)?.read_exact(&mut beginning)?;
    Ok(matches!(beginning, [0x89, b'P', b'N', b'G'] | [0xff, 0xd8, 0xff, _]))
}

/// The files of a folder and its subfolders that can be packed as text.
pub(super) fn find(dir: &Path, format: InputFormat) -> Result<Found, DataError> {
    let is_used = |path: &PathBuf| match (Named::of(path).format, format.format()) {
        (None, _) => false,
        (Some(_), None) => true,
        (Some(named), Some(asked)) => named == asked,
    };
    let (used, passed_over): (Vec<_>, Vec<_>) = files(dir)?.into_iter().partition(is_used);
    if used.is_empty() {
        return Err(DataError::input(dir, nothing_usable(&passed_over)));
    }
    Ok(Found { used, passed_over })
}

/// The error if nothing can be used.
fn nothing_usable(passed_over: &[PathBuf]) -> String {
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for path in passed_over {
        *counts.entry(ending(path)).or_default() += 1;
    }
    let words = |(ending, count): (&String, &u64)| match ending.is_empty() {
        true => format!("{count} without an ending"),
        false => format!("{count} .{ending}"),
    };
    let mut found: Vec<String> = counts.iter().take(TOLD).map(words).collect();
    if counts.len() > TOLD {
        found.push("others".to_owned());
    }
    let found = match found.is_empty() {
        true => "it has no files".to_owned(),
        false => format!("found {}", found.join(", ")),
    };
    format!(
        "this folder holds nothing that can be packed: {found}. It can hold images in a folder for each class, or files of \
         text: .txt, .md, .jsonl, .json, .csv, .tsv, .parquet, also with .gz or .zst"
    )
}

fn ending(path: &Path) -> String {
    path.extension().map_or(String::new(), |ending| ending.to_string_lossy().to_lowercase())
}

/// All files below a folder by name, without hidden ones. Symlinks to folders are not followed.
fn files(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let (mut found, mut entries) = (Vec::new(), 0);
    collect(dir, 0, &mut entries, &mut found)?;
    Ok(found)
}

fn collect(
    dir: &Path,
    depth: usize,
    entries: &mut usize,
    found: &mut Vec<PathBuf>,
) -> Result<(), DataError> {
    let io = DataError::io(dir);
    let mut here = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(&io)? {
        let entry = entry.map_err(&io)?;
        let name = entry.file_name();
        if !name.as_encoded_bytes().starts_with(b".") {
            here.push((name, entry.file_type().map_err(&io)?.is_dir(), entry.path()));
        }
        *entries += 1;
        if *entries > ENTRIES_MAX {
            return Err(DataError::input(dir, "a folder with more than a million files in it"));
        }
    }
    here.sort();
    for (_, is_folder, path) in here {
        match is_folder {
            true if depth == DEPTH_MAX => {
                return Err(DataError::input(&path, "more than 32 folders inside of each other"));
            }
            true => collect(&path, depth + 1, entries, found)?,
            false if path.is_file() => found.push(path),
            false => {}
        }
    }
    Ok(())
}
