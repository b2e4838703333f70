use std::path::PathBuf;

/// Why a model is not available.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// No variable determines the cache directory.
    #[error("there is no folder to keep models of a hub in; set HF_HOME to one")]
    NoCache,
    /// The model is not in the cache, and downloads are disabled.
    #[error(
        "{name} is not in the local Hugging Face cache, and HF_HUB_OFFLINE forbids to download it; unset that, or give \
         the path of a folder (there is none of that name here)"
    )]
    Offline {
        /// The model.
        name: String,
    },
    /// The hub does not have the model, or hides it.
    #[error(
        "{endpoint} has no model {name} that may be seen, and there is no folder of that name here; check the name, and for \
         a private model set HF_TOKEN"
    )]
    NotFound {
        /// The model.
        name: String,
        /// The hub.
        endpoint: String,
    },
    /// The model is gated or private.
    #[error(
        "{endpoint} does not hand out {name}: it is gated or private. Accept its conditions on {endpoint}/{page}, and set \
         HF_TOKEN to a token of your account that may read it"
    )]
    Gated {
        /// The model.
        name: String,
        /// The path of its page.
        page: String,
        /// The hub.
        endpoint: String,
    },
    /// The weights are in a format that can run code when loaded.
    #[error(
        "{name} has its weights only as {file}, a format that can run code when it is loaded; name a model with \
         safetensors, or convert it where you trust it (`save_pretrained` writes safetensors) and give the folder"
    )]
    Pickle {
        /// The model.
        name: String,
        /// The first such file.
        file: String,
    },
    /// A required file is missing.
    #[error("{name} has no {missing}: it is no model that can be used here")]
    NotAModel {
        /// The repository.
        name: String,
        /// The file.
        missing: &'static str,
    },
    /// The disk is full.
    #[error(
        "{}: the disk is full; free some space, or set HF_HOME to a folder on a larger disk. What is there is gone on with",
        path.display()
    )]
    DiskFull {
        /// The cache.
        path: PathBuf,
    },
    /// Another process is downloading the file.
    #[error("another process downloads {file}; wait until it is done")]
    Busy {
        /// The file.
        file: String,
    },
    /// The download does not match the hub's metadata.
    #[error("{file}: {problem}; try again")]
    Damaged {
        /// The file.
        file: String,
        /// The problem.
        problem: String,
    },
    /// The hub sent an invalid answer.
    #[error("{endpoint} answers what no hub does: {problem}")]
    Nonsense {
        /// The hub.
        endpoint: String,
        /// The problem.
        problem: String,
    },
    /// The network or the hub failed.
    #[error(
        "cannot download {file} from {endpoint}: {problem}; the same command goes on where this one stopped"
    )]
    Network {
        /// The requested file.
        file: String,
        /// The hub.
        endpoint: String,
        /// The problem.
        problem: String,
    },
    /// A file system operation failed.
    #[error("cannot use the cache {}: {source}", path.display())]
    Io {
        /// The cache.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}
