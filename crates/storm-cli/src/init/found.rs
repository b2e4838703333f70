//! What is in the current folder and in this machine.

use crate::memory_limits;
use std::fs;
use std::path::{Path, PathBuf};
use storm_device::cuda::diagnose;

/// The most entries of a folder that are read.
const ENTRIES_MAX: usize = 10_000;

/// Text files that are no data.
const NOT_DATA: [&str; 3] = ["requirements.txt", "LICENSE.txt", "README.txt"];

pub(super) struct Found {
    /// A Hugging Face directory.
    pub(super) model: Option<String>,
    pub(super) data: Option<PathBuf>,
    /// A GPU that can be used.
    pub(super) card: Option<CardFound>,
    /// Host memory that a run may take.
    pub(super) ram_bytes: Option<u64>,
}

pub(super) struct CardFound {
    pub(super) name: String,
    pub(super) memory_bytes: u64,
}

impl Found {
    pub(super) fn here() -> Found {
        let entries = entries(Path::new("."));
        let model = entries.iter().find(|path| is_model(path));
        Found {
            model: model.map(|path| path.to_string_lossy().into_owned()),
            data: data(&entries),
            card: card(),
            ram_bytes: memory_limits::host(None).ok().map(|limit| limit.bytes),
        }
    }
}

/// Names in a folder in order, without hidden ones.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let is_here = folder == Path::new(".");
    let listed = fs::read_dir(folder).into_iter().flatten().take(ENTRIES_MAX);
    let mut paths: Vec<PathBuf> = listed
        .filter_map(|entry| {
            let name = entry.ok()?.file_name();
            let is_hidden = name.to_str().is_none_or(|name| name.starts_with('.'));
            let path = if is_here { PathBuf::from(&name) } else { folder.join(&name) };
            (!is_hidden).then_some(path)
        })
        .collect();
    paths.sort();
    paths
}

fn is_model(path: &Path) -> bool {
    let is_weights =
        |path: &PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
    path.join("config.json").is_file() && entries(path).iter().any(is_weights)
}

/// A dataset; else chats; else text; else a folder with some. Of several, the largest.
fn data(entries: &[PathBuf]) -> Option<PathBuf> {
    let largest = |is_kind: &dyn Fn(&Path) -> bool| {
        let of_kind = entries.iter().filter(|path| is_kind(path));
        let bytes = |path: &&PathBuf| path.metadata().map_or(0, |metadata| metadata.len());
        of_kind.max_by_key(bytes).cloned()
    };
    let has_text = |folder: &Path| {
        folder.is_dir() && self::entries(folder).iter().any(|path| is_chats(path) || is_text(path))
    };
    largest(&|path| path.join("dataset.json").is_file())
        .or_else(|| largest(&is_chats))
        .or_else(|| largest(&is_text))
        .or_else(|| largest(&|path| has_text(path) && !is_model(path)))
}

fn is_chats(path: &Path) -> bool {
    path.is_file() && ["jsonl", "ndjson"].iter().any(|ending| has_ending(path, ending))
}

fn is_text(path: &Path) -> bool {
    let is_other = NOT_DATA.iter().any(|name| path.file_name().is_some_and(|of| of == *name));
    path.is_file() && has_ending(path, "txt") && !is_other
}

fn has_ending(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|extension| extension == ending)
}

fn card() -> Option<CardFound> {
    let found = diagnose();
    let usable = found.is_ready().then_some(found.cards).into_iter().flatten();
    let first = usable.into_iter().find(|card| card.problem.is_none())?;
    Some(CardFound { name: first.card.name, memory_bytes: first.card.memory_bytes as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_found_by_what_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: usize| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, vec![b'x'; bytes]).unwrap();
        };
        let found = || {
            data(&entries(folder.path()))
                .map(|path| path.strip_prefix(folder.path()).unwrap().to_owned())
        };
        file("requirements.txt", 99);
        file(".hidden.txt", 99);
        assert_eq!(found(), None);
        file("books/one.txt", 1);
        assert_eq!(found(), Some(PathBuf::from("books")));
        file("a.txt", 1);
        file("b.txt", 2);
        assert_eq!(found(), Some(PathBuf::from("b.txt")));
        file("chats.jsonl", 1);
        assert_eq!(found(), Some(PathBuf::from("chats.jsonl")));
        file("packed/dataset.json", 1);
        assert_eq!(found(), Some(PathBuf::from("packed")));
        file("model/config.json", 1);
        assert!(!is_model(&folder.path().join("model")));
        file("model/model.safetensors", 1);
        assert!(is_model(&folder.path().join("model")));
    }
}
