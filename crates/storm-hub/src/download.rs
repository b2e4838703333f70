//! Downloads from a hub into the cache.

use crate::files::{CONFIG, INDEX, SINGLE, check, shards, small_files};
use crate::name::is_hash;
use crate::{Hub, HubError, HubName, Snapshot, Wanted};
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo, Metadata};
use hf_hub::{Cache, Repo, RepoType};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use storm_files::open_plain;

/// Number of retries after a broken connection. Each one resumes where the last one stopped.
const RETRIES: usize = 3;

/// Hex digits of a SHA-256 hash, which identifies weights.
const SHA256_DIGITS: usize = 64;

/// The progress of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The file's name.
    pub file: &'a str,
    /// Bytes downloaded.
    pub done: u64,
    /// Bytes in total.
    pub total: u64,
}

impl Hub {
    pub(crate) fn download(
        &self,
        name: &HubName,
        wanted: Wanted,
        is_carried: fn(&str) -> bool,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Snapshot, HubError> {
        let builder = ApiBuilder::from_cache(Cache::new(self.cache.clone()));
        let builder = builder.with_endpoint(self.endpoint.clone()).with_token(self.token.clone());
        let api = builder.with_progress(false).build();
        let failed = |error| self.words(name, "", error);
        let api = api.map_err(failed)?;
        let repo = |revision: &str| {
            Repo::with_revision(name.repository.clone(), RepoType::Model, revision.to_owned())
        };
        let info = api.repo(repo(name.revision())).info().map_err(failed)?;
        if !is_hash(&info.sha) {
            return Err(self.nonsense("a commit that is no hash".to_owned()));
        }
        let all: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
        // Use the commit, because the branch may move during the download.
        let from = From { hub: self, api: &api, name, repo: repo(&info.sha), commit: &info.sha };
        match wanted {
            Wanted::Config if all.iter().any(|file| file == CONFIG) => {
                from.get(CONFIG, progress)?
            }
            Wanted::Config => {
                let name = name.to_string();
                return Err(HubError::NotAModel { name, missing: CONFIG });
            }
            Wanted::All => {
                check(&name.to_string(), &all)?;
                for file in small_files(&all, is_carried) {
                    from.get(&file, progress)?;
                }
                for file in from.weights(&all)? {
                    from.get(&file, progress)?;
                }
            }
        }
        // Last, because a ref in the cache must point to a complete snapshot.
        let cache = Cache::new(self.cache.clone());
        cache.repo(repo(name.revision())).create_ref(&info.sha).map_err(|error| self.io(error))?;
        let directory = from.directory();
        Ok(Snapshot { directory, revision: info.sha, is_new: true })
    }

    fn nonsense(&self, problem: String) -> HubError {
        HubError::Nonsense { endpoint: self.endpoint.clone(), problem }
    }

    fn io(&self, source: io::Error) -> HubError {
        let path = self.cache.clone();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                HubError::DiskFull { path }
            }
            _ => HubError::Io { path, source },
        }
    }

    /// Converts an error of the library into one that tells the user what to do.
    fn words(&self, name: &HubName, file: &str, error: ApiError) -> HubError {
        let (model, endpoint) = (name.to_string(), self.endpoint.clone());
        let file = if file.is_empty() { model.clone() } else { format!("{file} of {model}") };
        let network = |problem: String| HubError::Network {
            file: file.clone(),
            endpoint: endpoint.clone(),
            problem,
        };
        match error {
            ApiError::LockAcquisition(_) => HubError::Busy { file },
            ApiError::IoError(error) if is_of_network(&error) => network(error.to_string()),
            ApiError::IoError(error) => self.io(error),
            ApiError::RequestError(error) => match *error {
                ureq::Error::StatusCode(404) => HubError::NotFound { name: model, endpoint },
                // Without a token, hubs do not distinguish a missing model from a hidden one.
                ureq::Error::StatusCode(401) if self.token.is_none() => {
                    HubError::NotFound { name: model, endpoint }
                }
                ureq::Error::StatusCode(401 | 403) => {
                    let page = name.repository.clone();
                    HubError::Gated { name: model, page, endpoint }
                }
                other => network(other.to_string()),
            },
            other => network(other.to_string()),
        }
    }
}

/// Whether an error comes from the network rather than the disk.
fn is_of_network(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::UnexpectedEof
            | Kind::ConnectionReset
            | Kind::ConnectionAborted
            | Kind::ConnectionRefused
            | Kind::BrokenPipe
            | Kind::TimedOut
            | Kind::NotConnected
            | Kind::Other
    )
}

/// A model at a commit.
struct From<'a> {
    hub: &'a Hub,
    api: &'a Api,
    name: &'a HubName,
    repo: Repo,
    commit: &'a str,
}

impl From<'_> {
    fn directory(&self) -> PathBuf {
        self.hub.repository(self.name).join("snapshots").join(self.commit)
    }

    /// The weight files. The index must already be downloaded.
    fn weights(&self, all: &[String]) -> Result<Vec<String>, HubError> {
        if all.iter().any(|file| file == SINGLE) {
            return Ok(vec![SINGLE.to_owned()]);
        }
        let damaged = |problem: String| HubError::Damaged {
            file: format!("{INDEX} of {}", self.name),
            problem,
        };
        let shards = shards(&self.directory())
            .ok_or_else(|| damaged("it does not name safetensors files".to_owned()))?;
        match shards.iter().find(|shard| !all.contains(shard)) {
            Some(shard) => Err(damaged(format!("it names {shard}, which is not there"))),
            None => Ok(shards.into_iter().collect()),
        }
    }

    /// Downloads a file unless it is in the cache.
    fn get(&self, file: &str, progress: &mut dyn FnMut(Progress<'_>)) -> Result<(), HubError> {
        let pointer = self.directory().join(file);
        if pointer.is_file() {
            return Ok(());
        }
        let repo: ApiRepo = self.api.repo(self.repo.clone());
        let failed = |error| self.hub.words(self.name, file, error);
        let metadata = self.api.metadata(&repo.url(file)).map_err(failed)?;
        // Both become parts of paths.
        let is_tag = |tag: &str| is_hash(tag.trim_start_matches("W/"));
        if !is_tag(metadata.etag()) || metadata.etag().contains('/') {
            return Err(self.hub.nonsense(format!("a tag of {file} that is no hash")));
        }
        if metadata.commit_hash() != self.commit {
            return Err(self.hub.nonsense(format!("another commit of {file}")));
        }
        let mut tries_left = RETRIES;
        loop {
            self.prepare_part(&metadata).map_err(|error| self.hub.io(error))?;
            let shown = Shown { file, done: 0, total: 0, progress };
            match repo.download_with_progress(file, shown).map_err(failed) {
                Ok(_) => return self.check(file, &pointer, &metadata),
                Err(HubError::Network { .. }) if tries_left > 0 => {
                    tries_left -= 1;
                    std::thread::sleep(self.hub.retry_pause);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn blob(&self, metadata: &Metadata) -> PathBuf {
        self.hub.repository(self.name).join("blobs").join(metadata.etag())
    }

    /// Prepares the partial file of an interrupted download to be resumed. A complete part leaves
    /// nothing to request, so its last byte is removed. A part that is too long belongs to another
    /// file and is deleted.
    fn prepare_part(&self, metadata: &Metadata) -> io::Result<()> {
        let part = self.blob(metadata).with_extension("part");
        let Ok(found) = fs::symlink_metadata(&part) else { return Ok(()) };
        let size = metadata.size() as u64;
        if !found.is_file() || found.len() > size {
            return fs::remove_file(&part);
        }
        if found.len() == size && size > 0 {
            fs::OpenOptions::new().write(true).open(&part)?.set_len(size - 1)?;
        }
        Ok(())
    }

    /// Compares a file with the hub's metadata, and removes it if it differs.
    fn check(&self, file: &str, pointer: &Path, metadata: &Metadata) -> Result<(), HubError> {
        let blob = self.blob(metadata);
        let problem = self.problem(&blob, metadata).map_err(|error| self.hub.io(error))?;
        let Some(problem) = problem else { return Ok(()) };
        // If removal fails, the next check finds the same difference.
        let _ = fs::remove_file(pointer);
        let _ = fs::remove_file(&blob);
        Err(HubError::Damaged { file: format!("{file} of {}", self.name), problem })
    }

    fn problem(&self, blob: &Path, metadata: &Metadata) -> io::Result<Option<String>> {
        let mut input = open_plain(blob)?;
        let bytes = input.metadata()?.len();
        if bytes != metadata.size() as u64 {
            return Ok(Some(format!("it has {bytes} bytes, not {}", metadata.size())));
        }
        if metadata.etag().len() != SHA256_DIGITS {
            return Ok(None);
        }
        let mut hasher = Sha256::new();
        let mut piece = vec![0; 1 << 20];
        loop {
            match input.read(&mut piece)? {
                0 => break,
                count => hasher.update(&piece[..count]),
            }
        }
        let hash = format!("{:x}", hasher.finalize());
        let is_same = hash.eq_ignore_ascii_case(metadata.etag());
        Ok((!is_same).then(|| "its hash is not the one that the hub names".to_owned()))
    }
}

/// Reports the progress of a download.
struct Shown<'a> {
    file: &'a str,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(Progress<'_>),
}

impl hf_hub::api::Progress for Shown<'_> {
    fn init(&mut self, size: usize, _: &str) {
        (self.done, self.total) = (0, size as u64);
    }

    fn update(&mut self, size: usize) {
        self.done += size as u64;
        let (file, done, total) = (self.file, self.done, self.total);
        (self.progress)(Progress { file, done, total });
    }

    fn finish(&mut self) {}
}
