//! Datasets of records.

mod damage;
mod estimate;
mod faults;
mod images;
mod loading;
mod memory;

use std::path::{Path, PathBuf};
use storm_data::IfExists;
use storm_data::records::{Codec, RecordInput, RecordPackOptions, Synthetic, pack_records};

/// Packs without progress, and panics on a failure.
fn packed(options: &RecordPackOptions) -> PathBuf {
    pack_records(options, &|_| {}).unwrap();
    options.out.clone()
}

/// Made-up records: of 1000 bytes, so that a block has 258 of them.
fn synthetic(folder: &Path, count: u64, codec: Codec) -> PathBuf {
    let input = RecordInput::Synthetic(Synthetic { count, shape: vec![10, 100], classes: 10 });
    packed(&options(input, &folder.join(codec.name()), codec))
}

fn options(input: RecordInput, out: &Path, codec: Codec) -> RecordPackOptions {
    RecordPackOptions {
        input,
        out: out.to_owned(),
        if_exists: IfExists::Refuse,
        codec,
        held_out: 0.1,
        skip_bad: false,
        size: None,
    }
}
