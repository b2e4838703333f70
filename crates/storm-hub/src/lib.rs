//! Finds models by their names on a Hugging Face hub: in the local cache, or by downloading them into it.
//!
//! The cache is that of `huggingface_hub`, so STORM finds models that Python downloaded, and Python those that STORM
//! downloaded. Data from the network is untrusted: only files of known kinds with plain names are accepted, and nothing
//! that can run code. Weights must match the hash that the hub states.

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

/// A hub, and where its models are cached.
#[derive(Clone, Debug)]
pub struct Hub {
    /// Folder of the cache, with `models--…` for each model.
    pub cache: PathBuf,
    /// `https://huggingface.co`.
    pub endpoint: String,
    /// For private or gated models.
    pub token: Option<String>,
    /// Nothing is asked of the network.
    pub is_offline: bool,
    /// Pause before a broken connection is retried.
    pub retry_pause: Duration,
}

/// Which files of a model are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// config.json alone.
    Config,
    /// Weights, tokenizer and everything that belongs to them.
    All,
}

/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// A Hugging Face directory.
    pub directory: PathBuf,
    /// The commit that it is of.
    pub revision: String,
    /// Whether something had to be downloaded.
    pub is_new: bool,
}

impl Hub {
    /// A model, from the cache if complete. Otherwise it is downloaded, resuming an interrupted download. `is_carried`
    /// decides, by name, which small files to fetch besides config and weights.
    ///
    /// # Errors
    /// The model does not exist, access is denied, it has no usable weights, or the network or the disk fails.
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
