//! The end-of-text tokens of a model.

use super::config_json::HfConfig;
use super::paths::Root;
use super::strict_json::{parse, read_capped};
use crate::ModelError;
use serde_json::{Map, Value};
use std::path::Path;

const FILE_NAME: &str = "generation_config.json";
const BYTES_MAX: u64 = 1 << 20;
const KEY: &str = "eos_token_id";

/// The tokens that end a text, for the model in a directory: from its generation_config.json, or
/// from its config.json if that names none, as in `transformers.generate`. IDs that are not tokens
/// of the model are ignored.
///
/// # Errors
/// The file exists but cannot be used.
pub fn end_of_text(directory: &Path, config: &HfConfig) -> Result<Vec<u32>, ModelError> {
    let fields: Option<Map<String, Value>> = match Root::new(directory)?.file(FILE_NAME)? {
        Some(path) => Some(parse(&path, &read_capped(&path, FILE_NAME, BYTES_MAX)?)?),
        None => None,
    };
    let named = fields.as_ref().and_then(|fields| fields.get(KEY)).filter(|id| !id.is_null());
    let ids = match named.or_else(|| config.original.get(KEY)) {
        Some(Value::Array(ids)) => ids.as_slice(),
        Some(id) => std::slice::from_ref(id),
        None => &[],
    };
    let ids = ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok());
    Ok(ids.filter(|&id| (id as usize) < config.model.vocab_size).collect())
}
