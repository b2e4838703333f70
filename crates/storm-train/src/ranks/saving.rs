//! Checkpoints that all ranks write, each what it owns, into one folder that they share.
//!
//! Whether they share it is seen by a file that the first rank writes and the others look for. The first rank makes a temporary folder
//! and the files in it. Every rank writes its blocks of them and waits until they are on the disk. The first
//! one hears that from all, writes the rest and the manifest, and gives the folder its name.

use super::orders::Order;
use super::{Ranks, SENT_BYTES, out_of_step};
use crate::checkpoint::{CheckpointError, FileEntry, OwnPart, SharedFile, StatePart};
use crate::{TrainError, Trainer};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use storm_device::PlanDevice;
use storm_files::open_plain;
use storm_model::HEADER_BYTES_MAX;
use storm_ranks::RankError;

/// A file that the first rank has written to see which ranks find it.
#[derive(Serialize, Deserialize)]
struct Token {
    path: PathBuf,
    text: String,
}

impl Token {
    /// Writes it into a new folder.
    fn write(folder: &Path) -> std::io::Result<Token> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        let words = format!("{} {} {now}", storm_ranks::host_name(), std::process::id());
        let text = blake3::hash(words.as_bytes()).to_hex().to_string();
        std::fs::create_dir_all(folder)?;
        let path = std::path::absolute(folder)?.join(&text);
        std::fs::write(&path, &text)?;
        Ok(Token { path, text })
    }

    fn is_there(&self) -> bool {
        let mut found = Vec::new();
        let read = open_plain(&self.path)
            .and_then(|file| file.take(self.text.len() as u64 + 1).read_to_end(&mut found));
        read.is_ok() && found == self.text.as_bytes()
    }
}

impl Ranks {
    /// Any other rank: says whether it finds a file that the first one has written.
    pub(super) fn look(&self, bytes: u64) -> Result<(), RankError> {
        let message = self.message(bytes)?;
        let token: Token = serde_json::from_slice(&message).map_err(|_| out_of_step())?;
        self.hear_all::<bool, bool>(&Ok(token.is_there())).map(drop)
    }

    fn message(&self, bytes: u64) -> Result<Vec<u8>, RankError> {
        let mut message = vec![0; bytes as usize];
        self.lock().engine.broadcast(0, &mut message)?;
        Ok(message)
    }
}

impl<D: PlanDevice> Trainer<D> {
    /// From now on, all ranks write checkpoints, each what it owns, if they find what is written into `folder`, which is made for that
    /// and removed. Says whether they do. Without ranks, nothing changes.
    pub(crate) fn let_ranks_write(&mut self, folder: &Path) -> Result<bool, TrainError> {
        let Some(state) = &mut self.ranks else { return Ok(false) };
        let token = Token::write(folder).map_err(CheckpointError::io("write to", folder))?;
        // A path that is not Unicode cannot be told.
        if let Ok(mut message) = serde_json::to_vec(&token) {
            state.ranks.order(Order::Look(message.len() as u64))?;
            state.ranks.lock().engine.broadcast(0, &mut message)?;
            let found: Vec<bool> = state.ranks.hear_all(&Ok(true))?;
            state.writes_checkpoints = found.iter().all(|&found| found);
        }
        std::fs::remove_dir_all(folder).map_err(CheckpointError::io("delete", folder))?;
        Ok(state.writes_checkpoints)
    }

    /// The first rank: writes the files of a checkpoint with all ranks. None if they do not share its folder.
    pub(crate) fn write_by_ranks(
        &mut self,
        folder: &Path,
    ) -> Result<Option<Vec<FileEntry>>, TrainError> {
        let Some(state) = self.ranks.as_ref().filter(|state| state.writes_checkpoints) else {
            return Ok(None);
        };
        let ranks = state.ranks.clone();
        self.flush()?;
        let folder = std::path::absolute(folder).map_err(CheckpointError::io("find", folder))?;
        let layouts = self.shared_files(ranks.place.ranks);
        let mut files = Vec::new();
        for layout in &layouts {
            files.push(create(layout, &folder.join(layout.name))?);
        }
        let mut message = serde_json::to_vec(&folder).map_err(|_| out_of_step())?;
        ranks.order(Order::Save(message.len() as u64))?;
        ranks.lock().engine.broadcast(0, &mut message)?;
        let written = self.write_own_parts(0, &folder, &layouts, &files);
        let said = ranks.hear_all::<(), ()>(&said_of(&written));
        let mut parts = vec![written?];
        said?;
        parts.extend(receive(&ranks, &layouts)?);
        let mut entries = Vec::new();
        for (number, (layout, file)) in layouts.iter().zip(&files).enumerate() {
            let path = folder.join(layout.name);
            let of_file: Vec<OwnPart> =
                parts.iter_mut().map(|of_rank| std::mem::take(&mut of_rank[number])).collect();
            entries.push(layout.complete(file, &path, &of_file)?);
            file.sync_all().map_err(CheckpointError::io("flush to disk", &path))?;
        }
        Ok(Some(entries))
    }

    /// Any other rank: writes what it owns of a checkpoint. What fails, the first rank says.
    pub(super) fn save_own_part(&mut self, ranks: &Ranks, bytes: u64) -> Result<(), TrainError> {
        let message = ranks.message(bytes)?;
        let folder: PathBuf = serde_json::from_slice(&message).map_err(|_| out_of_step())?;
        let layouts = self.shared_files(ranks.place.ranks);
        let written = open(&layouts, &folder)
            .map_err(TrainError::from)
            .and_then(|files| self.write_own_parts(ranks.place.rank, &folder, &layouts, &files));
        let said = ranks.hear_all::<(), ()>(&said_of(&written));
        if let (Ok(parts), Ok(_)) = (&written, said) {
            send(ranks, parts)?;
        }
        Ok(())
    }

    /// A rank's part of all files, on the disk.
    fn write_own_parts(
        &mut self,
        rank: u32,
        folder: &Path,
        layouts: &[SharedFile],
        files: &[File],
    ) -> Result<Vec<OwnPart>, TrainError> {
        let planned = &mut self.planned;
        let mut read = |name: &str, first: usize, bytes: &mut [u8]| {
            planned.read_bytes(name, first, bytes).map_err(TrainError::from)
        };
        let mut parts = Vec::new();
        for (layout, file) in layouts.iter().zip(files) {
            let path = folder.join(layout.name);
            parts.push(layout.write_own(rank, file, &path, &mut read)?);
            file.sync_all().map_err(CheckpointError::io("flush to disk", &path))?;
        }
        Ok(parts)
    }

    /// The files of a checkpoint, as all ranks know them.
    fn shared_files(&self, ranks: u32) -> Vec<SharedFile> {
        let tensors = self.state_tensors();
        let always = StatePart::ALL.into_iter().filter(|part| part.is_always_saved());
        always
            .map(|part| {
                let of_part: Vec<_> =
                    tensors.iter().filter(|tensor| tensor.part == part).cloned().collect();
                SharedFile::new(part, &of_part, |tensor| match self.planned.sharded(&tensor.name) {
                    Some(sharded) => sharded.parts.clone(),
                    None => in_turn(tensor.size_bytes(), ranks),
                })
            })
            .collect()
    }
}

/// Who writes a tensor that all ranks have: each a piece in turn.
fn in_turn(bytes: usize, ranks: u32) -> Vec<(u32, usize)> {
    let pieces = (0..bytes).step_by(SENT_BYTES).zip((0..ranks).cycle());
    pieces.map(|(first, rank)| (rank, SENT_BYTES.min(bytes - first))).collect()
}

fn create(layout: &SharedFile, path: &Path) -> Result<File, CheckpointError> {
    if layout.header_bytes() > HEADER_BYTES_MAX {
        // Nothing could read it back.
        let source = std::io::Error::other("the model has too many tensors for one file");
        return Err(CheckpointError::Io { action: "write", path: path.to_owned(), source });
    }
    let file = File::create_new(path).map_err(CheckpointError::io("create", path))?;
    file.set_len(layout.bytes()).map_err(CheckpointError::io("write", path))?;
    Ok(file)
}

fn open(layouts: &[SharedFile], folder: &Path) -> Result<Vec<File>, CheckpointError> {
    let open = |layout: &SharedFile| {
        let path = folder.join(layout.name);
        OpenOptions::new().write(true).open(&path).map_err(CheckpointError::io("open", &path))
    };
    layouts.iter().map(open).collect()
}

fn said_of<T>(written: &Result<T, TrainError>) -> Result<(), String> {
    written.as_ref().map(|_| ()).map_err(ToString::to_string)
}

/// The first rank: what the others found out of all files.
fn receive(ranks: &Ranks, layouts: &[SharedFile]) -> Result<Vec<Vec<OwnPart>>, RankError> {
    let count = ranks.place.ranks;
    let sizes = |rank: u32| layouts.iter().map(move |layout| layout.message_bytes(rank));
    let mut end = 0;
    let receives: Vec<Range<usize>> = (0..count)
        .map(|rank| {
            let start = end;
            end += if rank == 0 { 0 } else { sizes(rank).sum() };
            start..end
        })
        .collect();
    let mut received = vec![0; end];
    let sends = vec![0..0; count as usize];
    ranks.lock().engine.exchange(&[], &sends, &mut received, &receives)?;
    let parts = (1..count).map(|rank| {
        let mut rest = &received[receives[rank as usize].clone()];
        let of_file = |layout: &SharedFile| {
            let (own, after) = rest.split_at(layout.message_bytes(rank));
            rest = after;
            OwnPart::of_bytes(layout, rank, own)
        };
        layouts.iter().map(of_file).collect()
    });
    Ok(parts.collect())
}

/// Any other rank: sends the first what it found out.
fn send(ranks: &Ranks, parts: &[OwnPart]) -> Result<(), RankError> {
    let sent = parts.iter().map(OwnPart::to_bytes).collect::<Vec<_>>().concat();
    let mut sends = vec![0..0; ranks.place.ranks as usize];
    sends[0] = 0..sent.len();
    let receives = vec![0..0; ranks.place.ranks as usize];
    ranks.lock().engine.exchange(&sent, &sends, &mut [], &receives)
}
