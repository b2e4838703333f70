//! Assigns a GPU to each rank of a run and connects the GPUs with NCCL.

use super::device::Machine;
use super::options::Settings;
use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use storm_device::cuda::{CudaRanks, OpenCard, find_card, visible_cards};
use storm_plan::HardwareProfile;
use storm_ranks::nccl::{Id, Nccl};
use storm_ranks::{Launch, host_name, process_variables};
use storm_train::Ranks;

/// This rank's GPU, connected to those of the others.
#[derive(Debug)]
pub(crate) struct Cards {
    pub(crate) ranks: Arc<CudaRanks>,
    /// CUDA device ordinal, from 0.
    pub(crate) ordinal: usize,
    /// Number of ranks that compute on this GPU.
    pub(crate) sharing: u64,
    /// Device memory NCCL uses, the maximum over all ranks.
    nccl_bytes: u64,
    /// NCCL version.
    pub(crate) nccl: String,
}

/// Facts about a rank's GPU that the ranks exchange and compare.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Own {
    card: String,
    nccl: String,
    host: String,
    /// PCI bus ID, which identifies a GPU within its machine.
    bus: String,
    ordinal: usize,
}

impl Own {
    fn find(launch: &Launch, nccl: &Nccl) -> Result<Own> {
        let ordinal = ordinal(launch, visible_cards()?)?;
        let (card, bus) = find_card(ordinal)?;
        let version = nccl.version();
        let nccl = format!("{}.{}.{}", version.major, version.minor, version.patch);
        Ok(Own { card: card.name, nccl, host: host_name(), bus, ordinal })
    }
}

/// The local part of setup, which needs no other rank: loads NCCL and opens the GPU.
fn find(launch: &Launch) -> Result<(Own, OpenCard, Arc<Nccl>)> {
    let nccl = Nccl::load(&process_variables())?;
    let own = Own::find(launch, &nccl)?;
    let card = OpenCard::new(own.ordinal)?;
    Ok((own, card, nccl))
}

/// Picks the GPU of a rank: the only visible one (a launcher may show each rank just its own), else the one whose
/// ordinal is the local rank.
fn ordinal(launch: &Launch, visible: usize) -> Result<usize> {
    let (rank, ranks) = (launch.local_rank as usize, launch.local_ranks);
    match visible {
        1 => Ok(0),
        _ if rank < visible => Ok(rank),
        _ => bail!(
            "{ranks} ranks on this machine, and {visible} GPUs: start at most one rank for each"
        ),
    }
}

/// Refuses GPUs or NCCL libraries that differ between ranks.
fn compare(all: &[Own]) -> Result<()> {
    for (rank, own) in all.iter().enumerate() {
        let first = &all[0];
        if own.card != first.card {
            bail!(
                "rank 0 has a {} and rank {rank} a {}: all cards must be alike",
                first.card,
                own.card
            );
        }
        if own.nccl != first.nccl {
            bail!(
                "rank 0 has NCCL {} and rank {rank} NCCL {}: install the same",
                first.nccl,
                own.nccl
            );
        }
    }
    Ok(())
}

impl Cards {
    /// Creates the NCCL id that connects all ranks. Only rank 0 calls this.
    pub(crate) fn new_id() -> Result<Id> {
        Ok(Nccl::load(&process_variables())?.new_id()?)
    }

    /// Connects this rank's GPU to the others. All ranks must call this together. If it fails on one rank, it fails on
    /// all.
    pub(crate) fn connect(ranks: &Ranks, launch: &Launch, id: Id) -> Result<Cards> {
        let found = find(launch);
        let own = found.as_ref().map(|(own, ..)| own).map_err(|error| format!("{error:#}"));
        let all: Vec<Own> = ranks.hear_all(&own)?;
        compare(&all)?;
        let (own, card, nccl) = found?;
        let connected = CudaRanks::connect(card, &nccl, id, ranks.place());
        let taken = connected.as_ref().map(|connected| connected.nccl_bytes());
        let taken: Vec<u64> = ranks.hear_all(&taken.map_err(ToString::to_string))?;
        let is_same = |other: &&Own| (&other.host, &other.bus) == (&own.host, &own.bus);
        let sharing = all.iter().filter(is_same).count() as u64;
        let nccl_bytes = taken.into_iter().max().unwrap_or(0);
        let Own { nccl, ordinal, .. } = own;
        Ok(Cards { ranks: Arc::new(connected?), ordinal, sharing, nccl_bytes, nccl })
    }

    /// Divides the default VRAM budget by the number of ranks on this GPU. A budget set by the user stays as it is.
    pub(super) fn share(&self, machine: &mut Machine, settings: &Settings) {
        if settings.vram.is_none() && self.sharing > 1 {
            machine.vram.bytes /= self.sharing;
            let shared = format!(", shared by {} ranks", self.sharing);
            if let Some(origin) = &mut machine.vram.origin {
                origin.push_str(&shared);
            }
        }
    }

    /// Subtracts NCCL's memory from an overhead that was measured while NCCL was connected.
    pub(crate) fn leave_out_memory(&self, profile: &mut HardwareProfile) {
        profile.overhead_bytes = profile.overhead_bytes.saturating_sub(self.nccl_bytes);
    }

    /// Adds NCCL's memory to the overhead that a plan cannot use.
    pub(super) fn count_memory(&self, machine: &mut Machine) {
        machine.profile.overhead_bytes += self.nccl_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(local_rank: u32, local_ranks: u32) -> Launch {
        Launch { local_rank, local_ranks, ..Launch::ALONE }
    }

    #[test]
    fn every_rank_takes_its_own_card() {
        let taken: Vec<usize> =
            (0..4).map(|rank| ordinal(&launch(rank, 4), 8).expect("a card")).collect();
        assert_eq!(taken, [0, 1, 2, 3]);
        // Each sees only its own, or all share one.
        assert_eq!(ordinal(&launch(3, 4), 1).expect("a card"), 0);
        let error = ordinal(&launch(2, 3), 2).expect_err("a third rank on two cards");
        assert!(error.to_string().contains("3 ranks on this machine, and 2 GPUs"), "{error}");
        assert!(ordinal(&launch(0, 1), 0).is_err());
    }

    #[test]
    fn cards_and_libraries_must_be_alike() {
        let own = |card: &str, nccl: &str| Own {
            card: card.to_owned(),
            nccl: nccl.to_owned(),
            host: "node".to_owned(),
            bus: "0000:01:00.0".to_owned(),
            ordinal: 0,
        };
        compare(&[own("H200", "2.28.9"), own("H200", "2.28.9")]).expect("alike");
        let error = compare(&[own("H200", "2.28.9"), own("H100", "2.28.9")]).expect_err("cards");
        assert!(error.to_string().contains("rank 0 has a H200 and rank 1 a H100"), "{error}");
        let error = compare(&[own("H200", "2.28.9"), own("H200", "2.19.3")]).expect_err("NCCL");
        assert!(error.to_string().contains("NCCL 2.28.9 and rank 1 NCCL 2.19.3"), "{error}");
    }
}
