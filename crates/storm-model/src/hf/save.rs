//! Saves STORM parameters as a Hugging Face directory, streamed and then renamed into place.

use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value, json};
use storm_files::StagedDirectory;

use super::carry::carry;
use super::config_json::HfConfig;
use super::config_write::config_json;
use super::directory::SHARDS_MAX;
use super::dtype::{Element, WeightDtype};
use super::names::{HfPiece, ParameterLayout, ParameterSpec, StoredOrder};
use super::paths::Root;
use super::safetensors_writer::SafetensorsWriter;
use super::strict_json::ENTRIES_MAX;
use crate::{ModelConfig, ModelError};

/// Maximum number of elements requested from the provider at a time.
const CHUNK_ELEMENTS: usize = 1 << 20;
/// Elements of a transposed matrix gathered at a time. Every pass reads the whole matrix, so this
/// is large: all of GPT-2's matrices take one pass, the largest of GPT-3 takes nine.
const BAND_ELEMENTS: usize = 1 << 26;

/// What to do if the output directory exists and is not empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IfExists {
    /// Refuse.
    #[default]
    Refuse,
    /// Replace it if it is a model directory: it has a config.json and no subdirectories.
    Replace,
}

impl IfExists {
    /// Checks whether a directory that is not empty may be replaced. The error says why not.
    fn may_replace(self, path: &Path) -> Result<(), String> {
        let refusal = match self {
            Self::Refuse => {
                "exists and is not empty; name another directory, or ask for it to be replaced"
            }
            Self::Replace if is_model_directory(path) => return Ok(()),
            Self::Replace => {
                "is not a plain model directory (config.json, no folders), so it is not replaced; name another"
            }
        };
        Err(refusal.to_owned())
    }
}

/// Options for saving.
#[derive(Debug, Clone)]
pub struct SaveOptions<'a> {
    /// The type of the weights in the file.
    pub dtype: WeightDtype,
    /// Maximum bytes of weights per file. A larger tensor gets its own file.
    pub shard_bytes: u64,
    /// The directory that the model came from. Its config.json is kept except for changes, and the
    /// tokenizer and similar files (see [`crate::is_carried`]) are copied.
    pub source: Option<&'a Path>,
    /// What to do if the output directory exists.
    pub if_exists: IfExists,
}

impl Default for SaveOptions<'_> {
    fn default() -> Self {
        Self {
            dtype: WeightDtype::Bf16,
            shard_bytes: 5_000_000_000,
            source: None,
            if_exists: IfExists::Refuse,
        }
    }
}

/// Saves a model for `transformers`. `provider(spec, elements, dest)` fills `dest` with this range
/// of a parameter's elements. Ranges are whole rows of at most a few megabytes, requested in order
/// (several times for large transposed matrices).
///
/// Everything is written next to `output`, flushed to disk, and renamed. `output` is never a
/// partial model, and only a directory that existed when saving began is replaced. Leftovers of a
/// killed process are removed by the next one that saves to the same path.
pub fn save<E, P>(
    output: &Path,
    config: &ModelConfig,
    options: &SaveOptions<'_>,
    provider: P,
) -> Result<(), ModelError>
where
    E: Element,
    P: FnMut(&ParameterSpec, Range<usize>, &mut [E]) -> Result<(), Box<dyn Error + Send + Sync>>,
{
    config.validate()?;
    let original = match options.source {
        Some(source) => {
            let path = Root::new(source)?.file("config.json")?;
            path.map(|path| HfConfig::read(&path)).transpose()?.map(|config| config.original)
        }
        None => None,
    };
    let config_map = config_json(config, original.as_ref(), options.dtype);
    let specs: Vec<ParameterSpec> = ParameterLayout::new(config).iter().collect();
    save_parts(output, config_map, &specs, options, provider)
}

/// Saves a model of any kind: its config.json, its parameters and the files to copy.
pub(crate) fn save_parts<E, P>(
    output: &Path,
    config: Map<String, Value>,
    specs: &[ParameterSpec],
    options: &SaveOptions<'_>,
    mut provider: P,
) -> Result<(), ModelError>
where
    E: Element,
    P: FnMut(&ParameterSpec, Range<usize>, &mut [E]) -> Result<(), Box<dyn Error + Send + Sync>>,
{
    let if_exists = options.if_exists;
    let staged = StagedDirectory::create(output, "saving", move |path| if_exists.may_replace(path))
        .map_err(ModelError::stage(output))?;
    write_json(&staged.path().join("config.json"), config)?;
    if let Some(source) = options.source {
        carry(source, staged.path())?;
    }
    write_weights(staged.path(), specs, options, &mut provider)?;
    staged.finish().map_err(ModelError::stage(output))
}

fn write_weights<E, P>(
    directory: &Path,
    specs: &[ParameterSpec],
    options: &SaveOptions<'_>,
    provider: &mut P,
) -> Result<(), ModelError>
where
    E: Element,
    P: FnMut(&ParameterSpec, Range<usize>, &mut [E]) -> Result<(), Box<dyn Error + Send + Sync>>,
{
    let shards = plan_shards(specs, options);
    if shards.len() > SHARDS_MAX {
        return Err(ModelError::WrongLength {
            what: "the number of shards (make them larger)",
            name: directory.display().to_string(),
            got: shards.len(),
            expected: SHARDS_MAX,
        });
    }
    let tensor_count = shards.iter().map(Vec::len).sum();
    if tensor_count > ENTRIES_MAX {
        return Err(ModelError::WrongLength {
            what: "the number of tensors",
            name: directory.display().to_string(),
            got: tensor_count,
            expected: ENTRIES_MAX,
        });
    }
    let is_single = shards.len() == 1;
    let name = |index: usize| match is_single {
        true => "model.safetensors".to_owned(),
        false => format!("model-{:05}-of-{:05}.safetensors", index + 1, shards.len()),
    };
    let mut pieces =
        specs.iter().flat_map(|spec| spec.pieces.iter().map(move |piece| (spec, piece)));
    for (index, tensors) in shards.iter().enumerate() {
        let mut writer =
            SafetensorsWriter::create(&directory.join(name(index)), options.dtype, tensors)?;
        for (spec, piece) in pieces.by_ref().take(tensors.len()) {
            let mut fill = |elements: Range<usize>, dest: &mut [E]| {
                provider(spec, elements, dest)
                    .map_err(|source| ModelError::Provider { name: spec.name.clone(), source })
            };
            match piece.order {
                StoredOrder::Transposed => {
                    write_transposed(&mut writer, piece, BAND_ELEMENTS, &mut fill)?;
                }
                StoredOrder::Rows | StoredOrder::ChannelsFirst { .. } => {
                    write_rows(&mut writer, spec, piece, &mut fill)?;
                }
            }
        }
        writer.finish()?;
    }
    if is_single {
        return Ok(());
    }
    let mut weight_map = Map::new();
    for (index, tensors) in shards.iter().enumerate() {
        weight_map
            .extend(tensors.iter().map(|(tensor, _)| (tensor.clone(), Value::from(name(index)))));
    }
    let count: u64 = specs.iter().map(|spec| spec.element_count() as u64).sum();
    let size = count * options.dtype.dtype().size_bytes() as u64;
    let mut index = Map::new();
    index.insert("metadata".into(), json!({"total_parameters": count, "total_size": size}));
    index.insert("weight_map".into(), weight_map.into());
    write_json(&directory.join("model.safetensors.index.json"), index)
}

/// The tensors of each file, in the order of the forward pass.
fn plan_shards(
    specs: &[ParameterSpec],
    options: &SaveOptions<'_>,
) -> Vec<Vec<(String, Vec<usize>)>> {
    let element_bytes = options.dtype.dtype().size_bytes() as u64;
    let mut shards = vec![Vec::new()];
    let mut shard_bytes = 0;
    for piece in specs.iter().flat_map(|spec| &spec.pieces) {
        let bytes = piece.shape.iter().map(|size| *size as u64).product::<u64>() * element_bytes;
        if shard_bytes > 0 && shard_bytes + bytes > options.shard_bytes {
            shards.push(Vec::new());
            shard_bytes = 0;
        }
        shard_bytes += bytes;
        let last = shards.len() - 1;
        shards[last].push((piece.hf_name.clone(), piece.shape.clone()));
    }
    shards
}

/// Writes a piece whose rows are rows of the parameter.
fn write_rows<E: Element>(
    writer: &mut SafetensorsWriter,
    spec: &ParameterSpec,
    piece: &HfPiece,
    fill: &mut impl FnMut(Range<usize>, &mut [E]) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let row = spec.row_elements();
    let chunk_rows = (CHUNK_ELEMENTS / row).max(1);
    let mut buffer = vec![E::default(); chunk_rows.min(piece.rows.len()) * row];
    for start in piece.rows.clone().step_by(chunk_rows) {
        let end = piece.rows.end.min(start + chunk_rows);
        let chunk = &mut buffer[..(end - start) * row];
        fill(start * row..end * row, chunk)?;
        piece.order.store_rows(row, chunk);
        writer.write(chunk)?;
    }
    Ok(())
}

/// Writes a piece that is the whole parameter transposed: the file is (in, out), the parameter
/// (out, in). Each pass over the parameter gathers a band of the file's rows.
fn write_transposed<E: Element>(
    writer: &mut SafetensorsWriter,
    piece: &HfPiece,
    band_elements: usize,
    fill: &mut impl FnMut(Range<usize>, &mut [E]) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let (inputs, outputs) = (piece.shape[0], piece.shape[1]);
    let band_rows = (band_elements / outputs).clamp(1, inputs);
    let chunk_outputs = (CHUNK_ELEMENTS / inputs).clamp(1, outputs);
    let mut band = vec![E::default(); band_rows * outputs]; // (band_rows, outputs)
    let mut chunk = vec![E::default(); chunk_outputs * inputs]; // (chunk_outputs, inputs)
    for first in (0..inputs).step_by(band_rows) {
        let rows = band_rows.min(inputs - first);
        for start in (0..outputs).step_by(chunk_outputs) {
            let end = outputs.min(start + chunk_outputs);
            let chunk = &mut chunk[..(end - start) * inputs];
            fill(start * inputs..end * inputs, chunk)?;
            for (output, values) in (start..end).zip(chunk.chunks(inputs)) {
                for (row, value) in values[first..first + rows].iter().enumerate() {
                    band[row * outputs + output] = *value;
                }
            }
        }
        writer.write(&band[..rows * outputs])?;
    }
    Ok(())
}

pub(crate) fn write_json(path: &Path, map: Map<String, Value>) -> Result<(), ModelError> {
    // The alternate form is indented, like the files of transformers.
    let text = format!("{:#}\n", Value::Object(map));
    let mut file = File::create_new(path).map_err(ModelError::io("create the file", path))?;
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(ModelError::io("write the file", path))
}

/// Whether a directory looks like a saved model, so that it can safely be deleted.
fn is_model_directory(path: &Path) -> bool {
    let only_files = fs::read_dir(path).is_ok_and(|mut entries| {
        entries.all(|entry| {
            entry.is_ok_and(|entry| entry.file_type().is_ok_and(|kind| !kind.is_dir()))
        })
    });
    only_files && path.join("config.json").is_file()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hf::SafetensorsFile;

    #[test]
    fn a_matrix_is_transposed_in_any_number_of_bands() {
        let folder = tempfile::TempDir::new().unwrap();
        let (inputs, outputs) = (7, 5);
        let shape = vec![inputs, outputs];
        for band_elements in [1, 5, 9, 10, 34, 35, 1000] {
            let path = folder.path().join(band_elements.to_string());
            let piece = HfPiece {
                hf_name: "t".into(),
                shape: shape.clone(),
                rows: 0..outputs,
                order: StoredOrder::Transposed,
            };
            let tensors = [("t".to_owned(), shape.clone())];
            let mut writer = SafetensorsWriter::create(&path, WeightDtype::F32, &tensors).unwrap();
            write_transposed(&mut writer, &piece, band_elements, &mut |elements, dest| {
                for (element, dest) in elements.zip(dest) {
                    *dest = element as f32;
                }
                Ok(())
            })
            .unwrap();
            writer.finish().unwrap();
            let file = SafetensorsFile::open(&path).unwrap();
            let mut stored = [0f32; 35];
            file.read_elements("t", &file.tensors()["t"], 0, &mut stored).unwrap();
            for (place, value) in stored.iter().enumerate() {
                let (input, output) = (place / outputs, place % outputs);
                assert_eq!(*value, (output * inputs + input) as f32);
            }
        }
    }
}
