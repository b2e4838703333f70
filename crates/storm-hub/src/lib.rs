//! Finds models by name on a Hugging Face hub: in the local cache, or by downloading them into it.
//!
//! The cache is shared with `huggingface_hub`: STORM finds models downloaded by Python, and vice
//! versa. Data from the network is untrusted: only files of known types with plain names are
//! accepted, and none that can run code. Weights must match the hash stated by the hub.

mod cache;
mod download;
mod environment;
mod error;
mod files;
mod name;

pub use download::Progress;
pub use error::HubError;
pub use name::HubName;

use std::path::PathBuf;
use std::time::Duration;

/// A hub and its local cache.
#[derive(Clone, Debug)]
pub struct Hub {
    /// Cache directory, with a `models--…` directory for each model.
    pub cache: PathBuf,
    /// Base URL, such as `https://huggingface.co`.
    pub endpoint: String,
    /// Token for private or gated models.
    pub token: Option<String>,
    /// Whether network access is disabled.
    pub is_offline: bool,
    /// Delay before retrying a broken connection.
    pub retry_pause: Duration,
}

/// Which files of a model are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Only config.json.
    Config,
    /// Weights, config, tokenizer and related files.
    All,
}

/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// A model directory in Hugging Face format.
    pub directory: PathBuf,
    /// The commit of the snapshot.
    pub revision: String,
    /// Whether it was downloaded rather than found in the cache.
    pub is_new: bool,
}

impl Hub {
    /// Returns a model, from the cache if complete. Otherwise downloads it, resuming an interrupted
    /// download. `is_carried` selects by name the small files to download in addition to config and
    /// weights.
    ///
    /// # Errors
    /// The model does not exist, access is denied, it has no usable weights, or the network or the
    /// disk fails.
    pub fn get(
        &self,
        name: &HubName,
        wanted: Wanted,
        is_carried: fn(&str) -> bool,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Snapshot, HubError> {
        if let Some(snapshot) = self.find(name, wanted) {
            return Ok(snapshot);
        }
        if self.is_offline {
            return Err(HubError::Offline { name: name.to_string() });
        }
        self.download(name, wanted, is_carried, progress)
    }
}
