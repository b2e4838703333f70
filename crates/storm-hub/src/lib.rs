//! Models by their names on a Hugging Face hub: from the local cache, else downloaded into it.
//!
//! The cache is that of `huggingface_hub`, so that what Python has downloaded is found here, and the other way round.
//! What comes from a network is hostile: only files of known kinds with plain names are taken, nothing that can run code,
//! and weights are compared with the hash that the hub names.

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

/// A hub, and where its models are kept.
#[derive(Clone, Debug)]
pub struct Hub {
    /// Folder of the cache, `models--…` of all models.
    pub cache: PathBuf,
    /// `https://huggingface.co`.
    pub endpoint: String,
    /// For models that are private or gated.
    pub token: Option<String>,
    /// Nothing is asked of the network.
    pub is_offline: bool,
    /// Before a connection that broke is tried again.
    pub retry_pause: Duration,
}

/// What of a model is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// config.json alone.
    Config,
    /// Weights, tokenizer and what else belongs to them.
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
    /// A model, from the cache if all of it is there. Otherwise it is downloaded; what an interrupted download left
    /// is gone on with. `is_carried` says which small files beside config and weights are wanted, by name.
    ///
    /// # Errors
    /// The model is not there, may not be had, has no weights that can be used, or the network or the disk fails.
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
