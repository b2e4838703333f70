//! `cargo xtask data text`: makes tens of megabytes of English text for long runs from Debian's
//! documentation packages.

use crate::args::Args;
use crate::data::{apt_download, html};
use crate::process::{output, run as run_command};
use crate::workspace::{entries, name, target_dir};
use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A package with text, and which of its files contain text.
struct Source {
    package: &'static str,
    /// For an empty package that depends on a versioned one: how the name of that one begins and
    /// ends.
    version: Option<(&'static str, &'static str)>,
    ending: &'static str,
    /// Part of the path of every wanted file.
    below: &'static str,
}

const fn source(package: &'static str, ending: &'static str, below: &'static str) -> Source {
    Source { package, version: None, ending, below }
}

const SOURCES: [Source; 10] = [
    Source { version: Some(("linux-doc-", "")), ..source("linux-doc", ".rst.txt", "/_sources/") },
    Source { version: Some(("python3.", "-doc")), ..source("python3-doc", ".txt", "/_sources/") },
    Source {
        version: Some(("postgresql-doc-", "")),
        ..source("postgresql-doc", ".html", "/html/")
    },
    source("perl-doc", ".pod", "/"),
    source("git-doc", ".txt", "/"),
    source("debian-handbook", ".html", "/en-US/"),
    source("developers-reference", ".html", "/"),
    source("debian-policy", ".html", "/"),
    source("libreoffice-help-en-us", ".html", "/"),
    source("rust-doc", ".html", "/html/std/"),
];

/// Parts of the paths of files that are in other languages or repeat other files.
const LEFT_OUT: [&str; 3] = ["/translations/", "/genindex", "/src/"];

/// The minimum length of a document. Shorter ones are mostly headings and links.
const DOCUMENT_MIN_BYTES: usize = 1_000;

/// The minimum percentage of ASCII in a document's bytes, which leaves out other languages.
const ASCII_MIN_PERCENT: usize = 97;

/// Enough text for long runs to read less than twice.
const ENOUGH_BYTES: usize = 50_000_000;

/// Documents by the hash of their text. This removes duplicates and gives a fixed order that mixes
/// the packages.
type Documents = BTreeMap<[u8; 32], String>;

pub(crate) fn run(args: Args) -> Result<()> {
    args.finish()?;
    let folder = target_dir().join("data/text");
    let packages = folder.join("packages");
    fs::create_dir_all(&packages).with_context(|| format!("making {}", packages.display()))?;
    let mut documents = Documents::new();
    for source in &SOURCES {
        let before = (documents.len(), bytes(&documents));
        let package = downloaded(source, &packages)?;
        read_package(source, &package, &folder.join("unpacked"), &mut documents)?;
        let (count, size) = (documents.len() - before.0, bytes(&documents) - before.1);
        eprintln!("{}: {count} documents, {:.1} MB", name(&package), size as f64 / 1e6);
    }
    let size = bytes(&documents);
    ensure!(
        size >= ENOUGH_BYTES,
        "these packages hold {:.1} MB of text, which is less than {:.0} MB",
        size as f64 / 1e6,
        ENOUGH_BYTES as f64 / 1e6
    );
    let path = folder.join("text.jsonl");
    write(&path, &documents).with_context(|| format!("writing {}", path.display()))?;
    println!("{}: {} documents, {:.1} MB", path.display(), documents.len(), size as f64 / 1e6);
    Ok(())
}

fn bytes(documents: &Documents) -> usize {
    documents.values().map(String::len).sum()
}

/// The package file, from an earlier call or from Debian's archive.
fn downloaded(source: &Source, packages: &Path) -> Result<PathBuf> {
    let package = match source.version {
        None => source.package.to_owned(),
        Some((start, end)) => {
            let depends = output(Command::new("apt-cache").args(["depends", source.package]))
                .context("this command needs Debian's apt")?;
            let names = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
            let mut fitting = names.filter(|name| name.starts_with(start) && name.ends_with(end));
            let Some(found) = fitting.next() else {
                bail!(
                    "{} depends on no package of a version; run `apt-get update`",
                    source.package
                );
            };
            found.to_owned()
        }
    };
    let find = || -> Result<Option<PathBuf>> {
        let is_it = |path: &PathBuf| name(path).starts_with(&format!("{package}_"));
        Ok(entries(packages)?.into_iter().find(is_it))
    };
    if let Some(path) = find()? {
        return Ok(path);
    }
    apt_download(packages, &package)?;
    find()?.with_context(|| format!("apt-get did not leave {package} in {}", packages.display()))
}

/// Unpacks a package, reads its documents, and removes the unpacked files.
fn read_package(
    source: &Source,
    package: &Path,
    unpacked: &Path,
    documents: &mut Documents,
) -> Result<()> {
    let remove = || match fs::remove_dir_all(unpacked) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    remove().with_context(|| format!("removing {}", unpacked.display()))?;
    run_command(Command::new("dpkg-deb").arg("-x").args([package, unpacked]))?;
    let mut folders = vec![unpacked.to_owned()];
    while let Some(folder) = folders.pop() {
        for path in entries(&folder)? {
            // Skip links. They lead to files that are read anyway, or out of the package.
            let kind = fs::symlink_metadata(&path)?.file_type();
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() && is_wanted(source, &path) {
                add(source, &fs::read(&path)?, documents);
            }
        }
    }
    remove().with_context(|| format!("removing {}", unpacked.display()))
}

fn is_wanted(source: &Source, path: &Path) -> bool {
    let path = path.to_string_lossy();
    path.ends_with(source.ending)
        && path.contains(source.below)
        && !LEFT_OUT.iter().any(|part| path.contains(part))
}

fn add(source: &Source, raw: &[u8], documents: &mut Documents) {
    let Ok(raw) = std::str::from_utf8(raw) else { return };
    let text = match source.ending {
        ".html" => tidied(&html::text(raw)),
        _ => tidied(raw),
    };
    let ascii = text.bytes().filter(u8::is_ascii).count();
    if text.len() >= DOCUMENT_MIN_BYTES && 100 * ascii >= ASCII_MIN_PERCENT * text.len() {
        documents.insert(Sha256::digest(&text).into(), text);
    }
}

/// Removes spaces at the ends of lines, empty lines at the start, and all but one of several empty
/// lines in a row.
fn tidied(text: &str) -> String {
    let mut tidy = String::with_capacity(text.len());
    let mut empty = true;
    for line in text.lines().map(str::trim_end) {
        if !(line.is_empty() && empty) {
            tidy.push_str(line);
            tidy.push('\n');
        }
        empty = line.is_empty();
    }
    tidy
}

fn write(path: &Path, documents: &Documents) -> Result<()> {
    let part = path.with_extension("part");
    let mut file = BufWriter::new(fs::File::create(&part)?);
    for text in documents.values() {
        serde_json::to_writer(&mut file, &json!({ "text": text }))?;
        file.write_all(b"\n")?;
    }
    file.into_inner()?.sync_all()?;
    Ok(fs::rename(&part, path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_appear_once_and_only_in_english() {
        let mut documents = Documents::new();
        let plain = source("p", ".txt", "/");
        let english = "All work and no play makes a dull text.  \n\n\n".repeat(40);
        let russian = "Всё это написано на другом языке.\n".repeat(40);
        for text in [&english, &english, &russian, &"short".to_owned()] {
            add(&plain, text.as_bytes(), &mut documents);
        }
        add(&plain, &[0xff; 2000], &mut documents);
        assert_eq!(documents.len(), 1);
        let text = documents.values().next().expect("one document");
        assert!(!text.contains("  ") && !text.contains("\n\n\n"), "{text:?}");
    }

    #[test]
    fn paths_are_wanted_by_ending_and_place() {
        let linux = &SOURCES[0];
        let wanted = |path: &str| is_wanted(linux, Path::new(path));
        assert!(wanted("/x/html/_sources/PCI/pci.rst.txt"));
        assert!(!wanted("/x/html/_sources/translations/zh_CN/index.rst.txt"));
        assert!(!wanted("/x/html/PCI/pci.rst.txt"));
        assert!(!wanted("/x/html/_sources/PCI/pci.html"));
    }
}
