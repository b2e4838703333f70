//! Datasets of records: what `storm data pack` and `storm data inspect` print about them.

use super::progress::{ByteProgress, Show};
use crate::model::grouped;
use crate::size;
use anyhow::Result;
use serde_json::json;
use std::path::Path;
use std::sync::Mutex;
use storm_data::DataError;
use storm_data::records::{
    Codec, Column, ColumnKind, RecordManifest, RecordPackOptions, RecordPackSummary, RecordSet,
    pack_records,
};

/// Maximum number of class names to show.
const SHOWN_CLASSES: usize = 12;

pub(super) fn pack(
    options: &RecordPackOptions,
    show: Show,
    as_json: bool,
    quiet: bool,
) -> Result<()> {
    if show == Show::Progress {
        eprintln!("packing {}", options.input.words());
    }
    let summary = pack_records_showing(options, show)?;
    if as_json {
        println!("{:#}", object(&summary, options));
    } else if !quiet {
        report(&summary, &options.out);
    }
    Ok(())
}

/// Packs records, and shows progress.
pub(crate) fn pack_records_showing(
    options: &RecordPackOptions,
    show: Show,
) -> Result<RecordPackSummary, DataError> {
    let progress = ByteProgress::new("packing", show);
    let summary = pack_records(options, &|at| {
        progress.set(at.bytes_done, at.bytes_total, || format!("{} records", grouped(at.records)));
    });
    progress.finish();
    summary
}

fn object(summary: &RecordPackSummary, options: &RecordPackOptions) -> serde_json::Value {
    let manifest = &summary.manifest;
    json!({
        "kind": "records",
        "out": options.out.display().to_string(),
        "id": summary.id,
        "source": manifest.source,
        "columns": manifest.columns,
        "class_names": manifest.class_names,
        "codec": manifest.codec,
        "ratio": manifest.ratio(),
        "counts": manifest.counts,
        "shards": manifest.shards.len(),
        "bytes": bytes(manifest),
    })
}

fn report(summary: &RecordPackSummary, out: &Path) {
    let manifest = &summary.manifest;
    let counts = &manifest.counts;
    println!(
        "packed {} records into {}: {} in {} shards, {}",
        grouped(counts.records),
        out.display(),
        size::show(bytes(manifest)),
        manifest.shards.len(),
        ratio_words(manifest)
    );
    if counts.held_out > 0 {
        println!("  {} records are held out for evaluation", grouped(counts.held_out));
    }
    if let Some(first) = &summary.first_skipped {
        println!("  skipped {} that cannot be packed; the first: {first}", grouped(counts.skipped));
    }
}

fn bytes(manifest: &RecordManifest) -> u64 {
    manifest.shards.iter().map(|shard| shard.bytes).sum()
}

fn ratio_words(manifest: &RecordManifest) -> String {
    codec_words(manifest.codec, manifest.ratio(), "records")
}

/// The effect of a codec, in words.
pub(super) fn codec_words(codec: Codec, ratio: f64, things: &str) -> String {
    match codec {
        Codec::None => "not compressed".to_owned(),
        codec => format!("{} makes the {things} {ratio:.2} × smaller", codec.name()),
    }
}

pub(super) fn inspect(dir: &Path, verify: bool, as_json: bool) -> Result<()> {
    let set = RecordSet::open(dir)?;
    if verify {
        let show = if as_json { Show::Nothing } else { Show::Progress };
        // Blocks are checked on many threads.
        let progress = Mutex::new(ByteProgress::new("verifying", show));
        let result = set.verify(&|at| {
            if let Ok(progress) = progress.lock() {
                progress.set(at.bytes_done, at.bytes_total, String::new);
            }
        });
        if let Ok(progress) = progress.lock() {
            progress.finish();
        }
        result?;
    }
    if as_json {
        let value = json!({
            "kind": "records",
            "dir": set.dir(),
            "id": set.id(),
            "manifest": set.manifest(),
            "ratio": set.manifest().ratio(),
            "reading_path": set.reading_path().to_string(),
            "verified": verify,
        });
        println!("{}", serde_json::to_string_pretty(&value)?);
    } else {
        print(&set, verify);
    }
    Ok(())
}

fn print(set: &RecordSet, verified: bool) {
    let manifest = set.manifest();
    let counts = &manifest.counts;
    let line = |name: &str, value: String| println!("  {name:<12}{value}");
    println!("{} ({})", set.dir().display(), &set.id()[..16]);
    line("kind", format!("records: {}", manifest.source));
    let training = counts.records - counts.held_out;
    let split = format!("{} to train on, {} held out", grouped(training), grouped(counts.held_out));
    line("records", format!("{} ({split})", grouped(counts.records)));
    for column in &manifest.columns {
        line("column", column_words(column));
    }
    if !manifest.class_names.is_empty() {
        let names = &manifest.class_names;
        let shown: Vec<String> =
            names.iter().take(SHOWN_CLASSES).map(|name| name.escape_debug().to_string()).collect();
        let more = if names.len() > SHOWN_CLASSES { ", …" } else { "" };
        line("classes", format!("{}: {}{more}", names.len(), shown.join(", ")));
    }
    let blocks = manifest.shards.iter().map(|shard| shard.blocks).sum();
    let shards = format!("{}, {}", manifest.shards.len(), size::show(bytes(manifest)));
    line("shards", format!("{shards} in {} blocks", grouped(blocks)));
    line("codec", ratio_words(manifest));
    line(
        "made of",
        format!("{} files, {}", grouped(counts.input_files), size::show(counts.input_bytes)),
    );
    if let Some(statistics) = &manifest.statistics {
        let shown = |values: Vec<f64>| {
            values.iter().map(|value| format!("{value:.4}")).collect::<Vec<_>>().join(", ")
        };
        let (mean, deviation) = (shown(statistics.mean()), shown(statistics.standard_deviation()));
        line("statistics", format!("mean {mean}; standard deviation {deviation} (training part)"));
    }
    if counts.skipped > 0 {
        line("skipped", format!("{} that could not be packed", grouped(counts.skipped)));
    }
    line("reading", set.reading_path().to_string());
    let checked = match verified {
        true => "all match",
        false => "not checked, see --verify",
    };
    line("checksums", checked.to_owned());
}

fn column_words(column: &Column) -> String {
    let dtype = column.dtype.dtype();
    let elements = match column.kind {
        ColumnKind::Bytes => "any number of bytes".to_owned(),
        ColumnKind::Fixed if column.shape.is_empty() => dtype.to_string(),
        ColumnKind::Fixed => {
            let shape: Vec<String> = column.shape.iter().map(ToString::to_string).collect();
            format!("{dtype}, {}", shape.join(" × "))
        }
    };
    match column.below {
        Some(classes) => format!("{}: {elements}, {classes} classes", column.name),
        None => format!("{}: {elements}", column.name),
    }
}
