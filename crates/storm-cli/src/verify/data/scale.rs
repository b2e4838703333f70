//! The dataset on disk that training reads.

use super::DataArgs;
use super::stock::Stock;
use crate::data::{ByteProgress, Show};
use crate::model::grouped;
use crate::size;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::time::Instant;
use storm_data::records::{
    Codec, RecordInput, RecordPackOptions, RecordSet, Repeated, Synthetic, pack_records,
};
use storm_data::{IfExists, SyntheticText, pack_synthetic_text};
use tempfile::TempDir;

/// The shape and classes of CIFAR-10.
const SHAPE: [usize; 3] = [32, 32, 3];
const CLASSES: u32 = 10;

/// A dataset that is deleted on drop.
pub(super) struct Made {
    pub(super) dir: PathBuf,
    _folder: TempDir,
    seconds: f64,
}

/// Creates a folder for a dataset.
fn folder(args: &DataArgs) -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix(".storm-verify-")
        .tempdir_in(&args.data_at)
        .with_context(|| format!("cannot write to {}", args.data_at.display()))
}

/// Makes text of this many tokens.
pub(super) fn text(args: &DataArgs, tokens: u64, codec: Codec) -> Result<Made> {
    let folder = folder(args)?;
    let dir = folder.path().join("set");
    let start = Instant::now();
    let progress = ByteProgress::new("writing", Show::Progress);
    let options = SyntheticText { tokens, out: dir.clone(), codec };
    let packed = pack_synthetic_text(&options, &|at| {
        progress.set(at.bytes_done, tokens, || format!("{} tokens", grouped(at.tokens)));
    });
    progress.finish();
    packed?;
    Ok(Made { dir, _folder: folder, seconds: start.elapsed().as_secs_f64() })
}

/// Makes pictures of `set_bytes` bytes in total.
pub(super) fn pictures(args: &DataArgs, set_bytes: u64, codec: Codec) -> Result<Made> {
    let folder = folder(args)?;
    let dir = folder.path().join("set");
    let start = Instant::now();
    let options = RecordPackOptions {
        input: input(args, set_bytes)?,
        out: dir.clone(),
        if_exists: IfExists::Refuse,
        codec,
        held_out: 0.0,
        skip_bad: false,
        size: None,
    };
    let progress = ByteProgress::new("writing", Show::Progress);
    let packed = pack_records(&options, &|at| {
        progress.set(at.bytes_done, at.bytes_total, || format!("{} records", grouped(at.records)));
    });
    progress.finish();
    packed?;
    Ok(Made { dir, _folder: folder, seconds: start.elapsed().as_secs_f64() })
}

fn input(args: &DataArgs, set_bytes: u64) -> Result<RecordInput> {
    let pixels = |shape: &[usize]| shape.iter().product::<usize>().max(1) as u64;
    let Some(Some(dir)) = &args.data else {
        let count = (set_bytes / pixels(&SHAPE)).max(1);
        return Ok(RecordInput::Synthetic(Synthetic {
            count,
            shape: SHAPE.to_vec(),
            classes: CLASSES,
        }));
    };
    let set = RecordSet::open(dir)?;
    let bytes = set.column("images").map_or(1, |images| pixels(&images.shape));
    let count = (set_bytes / bytes).max(1);
    Ok(RecordInput::Repeated(Repeated { dir: dir.clone(), count }))
}

impl Made {
    /// Drops its pages from the page cache, and describes the dataset.
    pub(super) fn words(&self, stock: &Stock, codec: Codec) -> Result<String> {
        let blocks = stock.blocks()?;
        let left = blocks.drop_page_cache()?;
        let (count, things) = stock.count();
        let length = match stock.ratio() {
            ratio if ratio > 1.0 => format!("{ratio:.2} times shorter"),
            ratio => format!("{:.2} times longer", 1.0 / ratio),
        };
        Ok(format!(
            "{}: {} {things}, {} on disk, {length}, made in {:.1} s; dropped from the page cache but {}",
            codec.name(),
            grouped(count),
            size::show(blocks.manifest().counts.stored_bytes),
            self.seconds,
            size::show(left)
        ))
    }
}
