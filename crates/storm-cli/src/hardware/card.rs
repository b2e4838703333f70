//! The profile of the card in this machine: measured once, and kept.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::time::Instant;
use storm_device::cuda::{Card, ProbeEffort, cache_folder, diagnose, probe};
use storm_files::{read_private, write_private};
use storm_plan::HardwareProfile;

/// Cards whose built-in profile was measured on such a card.
const MEASURED: [(&str, &str); 1] = [("NVIDIA H200", "h200")];

/// The profile of the first card; none if there is no card that can be used. A card without a profile is
/// measured, which takes some seconds.
pub(super) fn profile() -> Result<Option<HardwareProfile>> {
    let found = diagnose();
    if !found.is_ready() {
        return Ok(None);
    }
    let Some(card) = found.cards.first().filter(|card| card.problem.is_none()) else {
        return Ok(None);
    };
    profile_of(&card.card, cache_folder().as_deref(), || measure(&card.card)).map(Some)
}

/// Keeps a profile that was measured: it is used from now on if none is named.
pub(crate) fn keep(card: &Card, profile: &HardwareProfile) -> Result<Option<PathBuf>> {
    let Some(path) = cache_folder().map(|folder| kept_for(&folder, card)) else { return Ok(None) };
    write(&path, profile)?;
    Ok(Some(path))
}

/// A measurement that this machine keeps of the card that a built-in profile has the data sheet of.
pub(super) fn kept(builtin: &str) -> Option<HardwareProfile> {
    kept_in(&cache_folder()?, builtin)
}

fn kept_in(folder: &Path, builtin: &str) -> Option<HardwareProfile> {
    HardwareProfile::builtin_cards(builtin).find_map(|(name, memory_bytes)| {
        // The driver holds some of the memory back, up to a tenth.
        let gib = memory_bytes >> 30;
        (gib - gib / 10 - 1..=gib).rev().find_map(|gib| read(&kept_at(folder, name, gib)))
    })
}

fn profile_of(
    card: &Card,
    folder: Option<&Path>,
    measure: impl FnOnce() -> Result<HardwareProfile>,
) -> Result<HardwareProfile> {
    let path = folder.map(|folder| kept_for(folder, card));
    // What was kept on this machine is nearer than what is built in. One that cannot be read is of another
    // version, or damaged.
    if let Some(kept) = path.as_deref().and_then(read) {
        return Ok(kept);
    }
    if let Some((_, name)) = MEASURED.iter().find(|(measured, _)| *measured == card.name) {
        return Ok(HardwareProfile::builtin(name)?);
    }
    let measured = measure()?;
    if let Some(Err(error)) = path.map(|path| write(&path, &measured)) {
        eprintln!("warning: {error:#}; the card will be measured again next time");
    }
    Ok(measured)
}

fn measure(card: &Card) -> Result<HardwareProfile> {
    eprintln!("measuring {} once; `storm probe` does it more thoroughly", card.name);
    let start = Instant::now();
    let mut found = probe(0, ProbeEffort::Quick, |what| {
        eprintln!("{:>5.1} s  {what} …", start.elapsed().as_secs_f64());
    })
    .with_context(|| format!("cannot measure {}; name a profile with --hardware", card.name))?;
    found.profile.source = format!("measured on {} before its first use", card.name);
    Ok(found.profile)
}

fn kept_for(folder: &Path, card: &Card) -> PathBuf {
    kept_at(folder, &card.name, (card.memory_bytes >> 30) as u64)
}

/// One file for each kind of card.
fn kept_at(folder: &Path, name: &str, gib: u64) -> PathBuf {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let name: String = name.chars().map(plain).collect();
    folder.join("profiles").join(format!("{name}-{gib}gib.json"))
}

/// One that this user kept. What others could have written is not taken for that.
fn read(path: &Path) -> Option<HardwareProfile> {
    let bytes = read_private(path, super::PROFILE_BYTES_MAX).ok()?;
    HardwareProfile::from_json(str::from_utf8(&bytes).ok()?).ok()
}

fn write(path: &Path, profile: &HardwareProfile) -> Result<()> {
    write_private(path, profile.to_json().as_bytes())
        .with_context(|| format!("cannot keep the profile in {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(name: &str) -> Card {
        let memory_bytes = (12 << 30) - 1;
        Card { name: name.to_owned(), capability: (8, 6), multiprocessors: 28, memory_bytes }
    }

    #[test]
    fn a_card_is_measured_once() {
        let folder = tempfile::tempdir().unwrap();
        let card = card("NVIDIA GeForce RTX 3060");
        let mut measured = HardwareProfile::builtin("rtx-3060-12gb").unwrap();
        measured.gemm_flops = 1.5e13;
        let first = profile_of(&card, Some(folder.path()), || Ok(measured.clone())).unwrap();
        assert_eq!(first, measured);
        let again = profile_of(&card, Some(folder.path()), || unreachable!("it is known")).unwrap();
        assert_eq!(again, measured);
        let file = folder.path().join("profiles/nvidia-geforce-rtx-3060-11gib.json");
        assert!(file.is_file());
        // Damaged: measured again, and kept again.
        std::fs::write(&file, "{").unwrap();
        profile_of(&card, Some(folder.path()), || Ok(measured.clone())).unwrap();
        profile_of(&card, Some(folder.path()), || unreachable!("it is known")).unwrap();
    }

    #[test]
    fn what_comes_with_storm_is_used_until_something_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let known = card("NVIDIA H200");
        let builtin = profile_of(&known, Some(folder.path()), || unreachable!("built in")).unwrap();
        assert_eq!(builtin.name, "h200");
        let mut better = builtin;
        better.gemm_flops *= 1.1;
        write(&kept_for(folder.path(), &known), &better).unwrap();
        assert_eq!(profile_of(&known, Some(folder.path()), || unreachable!()).unwrap(), better);
    }

    /// The file of a 3060 with 12 GB is not taken for the one with 8, nor for another card.
    #[test]
    fn a_measurement_wins_over_the_data_sheet() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(kept_in(folder.path(), "rtx-3060-12gb"), None);
        let small = Card { memory_bytes: 8 << 30, ..card("NVIDIA GeForce RTX 3060") };
        let mut measured = HardwareProfile::builtin("rtx-3060-12gb").unwrap();
        measured.uncertainty = None;
        write(&kept_for(folder.path(), &small), &measured).unwrap();
        assert_eq!(kept_in(folder.path(), "rtx-3060-12gb"), None);
        write(&kept_for(folder.path(), &card("NVIDIA GeForce RTX 3060")), &measured).unwrap();
        assert_eq!(kept_in(folder.path(), "rtx-3060-12gb"), Some(measured));
        assert_eq!(kept_in(folder.path(), "rtx-4070"), None);
        assert_eq!(kept_in(folder.path(), "h200"), None);
    }

    #[test]
    fn without_a_folder_nothing_is_kept() {
        let measured = HardwareProfile::builtin("rtx-4090").unwrap();
        let found = profile_of(&card("another"), None, || Ok(measured.clone())).unwrap();
        assert_eq!(found, measured);
    }
}
