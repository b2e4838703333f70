//! Packs data that is not a dataset yet when a run begins: text, or a folder of images.

use super::options::{Given, Settings};
use super::output::Style;
use crate::UsageError;
use crate::data::{Show, pack_records_showing, pack_showing};
use crate::model::grouped;
use anyhow::Result;
use std::path::{Path, PathBuf};
use storm_data::records::{Codec, RecordInput, RecordOutline, RecordPackOptions};
use storm_data::{
    ChatTemplate, DataError, IfExists, InputFormat, PackOptions, SHARD_TOKENS_DEFAULT,
    SpecialTokens, TokenizerSource, files_to_pack,
};

/// A folder of images that is not packed yet.
pub(super) struct Pictures {
    folder: PathBuf,
    input: RecordInput,
    /// The columns and parts that packing will produce.
    pub(super) outline: RecordOutline,
}

impl Pictures {
    /// Recognizes a folder of images; `None` if it holds none.
    ///
    /// # Errors
    /// The images cannot be packed, judging by the first one.
    pub(super) fn find(data: &Path) -> Result<Option<Pictures>, DataError> {
        let Some(input) = RecordInput::recognize(&[data.to_owned()])? else { return Ok(None) };
        let outline = options(input.clone(), data, 0.0).outline();
        let outline = outline.map_err(|error| advised(error, data))?;
        Ok(Some(Pictures { folder: data.to_owned(), input, outline }))
    }

    /// Refuses `held-out` if the data already has a part for evaluation.
    pub(super) fn check(&self, given: &Given) -> Result<(), UsageError> {
        match given.held_out.is_some_and(|share| share > 0.0) && self.outline.has_held_out_part {
            true => Err(UsageError(format!(
                "held-out is for data without a part for evaluation, and {} have one; leave it out",
                self.input.words()
            ))),
            false => Ok(()),
        }
    }

    /// Packs the images, and prints what is held out.
    pub(super) fn pack(&self, settings: &Settings, out: &Path, style: Style) -> Result<()> {
        let (held_out, why) = match self.outline.has_held_out_part {
            true => (0.0, "the test part".to_owned()),
            false => (settings.held_out, format!("held-out = {}", settings.held_out)),
        };
        style.say(&format!("packing {} …", self.input.words()));
        let options = options(self.input.clone(), out, held_out);
        let summary = pack_records_showing(&options, shown(style));
        let counts = summary.map_err(|error| advised(error, &self.folder))?.manifest.counts;
        style.say(&format!(
            "packed {} pictures into {}, {} of them held out: {why}",
            grouped(counts.records),
            out.display(),
            grouped(counts.held_out)
        ));
        Ok(())
    }
}

/// Adds the command that can resize or skip images, which `storm train` does not.
fn advised(error: DataError, folder: &Path) -> DataError {
    match error {
        DataError::Input { path, problem } => {
            let problem = format!(
                "{problem}. Runs take pictures as they are. To resize them or to leave out bad ones, pack them first: \
                 storm data pack {} --out DATASET, with --size or --skip-bad, then --data DATASET",
                folder.display()
            );
            DataError::Input { path, problem }
        }
        other => other,
    }
}

fn options(input: RecordInput, out: &Path, held_out: f64) -> RecordPackOptions {
    RecordPackOptions {
        input,
        out: out.to_owned(),
        if_exists: IfExists::Replace,
        codec: Codec::None,
        held_out,
        skip_bad: false,
        size: None,
    }
}

pub(super) fn pack_text(
    settings: &Settings,
    data: &Path,
    tokenizer: TokenizerSource,
    out: &Path,
    style: Style,
) -> Result<()> {
    style.say(&format!("packing {} …", data.display()));
    let options = PackOptions {
        inputs: files_to_pack(data)?,
        format: InputFormat::ByName,
        tokenizer,
        end_of_text: None,
        chat_template: ChatTemplate::parse(settings.chat_template.as_deref().unwrap_or("model")),
        special_tokens: SpecialTokens::Parsed,
        codec: Codec::None,
        skip_bad: false,
        worker: crate::data::worker()?,
        out: out.to_owned(),
        if_exists: IfExists::Replace,
        held_out: settings.held_out,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        shard_tokens: SHARD_TOKENS_DEFAULT,
    };
    let summary = pack_showing(&options, shown(style))?;
    style.say(&format!(
        "packed {} tokens of {} files into {}",
        grouped(summary.counts.tokens),
        summary.counts.input_files,
        out.display()
    ));
    Ok(())
}

/// Progress is for people.
fn shown(style: Style) -> Show {
    match style {
        Style::People => Show::Progress,
        Style::Json | Style::Quiet => Show::Nothing,
    }
}
