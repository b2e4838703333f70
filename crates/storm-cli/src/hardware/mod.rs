//! Hardware profiles: by name, by path, or of the card that is there.

mod card;

use crate::size;
use anyhow::{Context, Result};
pub(crate) use card::keep;
use serde_json::json;
use std::io::Read;
use std::path::Path;
use storm_files::open_plain;
use storm_plan::{HardwareProfile, Link, ProfileError};

/// A profile with thousands of measured points is far smaller.
const PROFILE_BYTES_MAX: u64 = 4 << 20;

/// Why the file of a profile cannot be used.
#[derive(Debug)]
pub(crate) struct BadProfile(String);

impl std::fmt::Display for BadProfile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadProfile {}

/// Planned for where there is no card and none is named: the one that most figures are of.
const WITHOUT_CARD: &str = "h200";

/// The profile that is named; else that of the card in this machine.
pub(crate) fn named_or_found(hardware: Option<&str>) -> Result<HardwareProfile> {
    if let Some(hardware) = hardware {
        return resolve(hardware);
    }
    match card::profile()? {
        Some(found) => Ok(found),
        None => Ok(HardwareProfile::builtin(WITHOUT_CARD)?),
    }
}

/// A built-in profile, or the file of one. A measurement of the card named, kept on this machine, wins over its
/// data sheet.
fn resolve(hardware: &str) -> Result<HardwareProfile> {
    let unknown = match HardwareProfile::builtin(hardware) {
        Err(unknown @ ProfileError::Unknown { .. }) => unknown,
        known => {
            let known = known?;
            return Ok(card::kept(hardware).unwrap_or(known));
        }
    };
    let path = Path::new(hardware);
    // A name that is neither built in nor a file is taken for a name.
    if !path.exists() {
        return Err(unknown.into());
    }
    read(path).with_context(|| format!("cannot use {hardware}"))
}

fn read(path: &Path) -> Result<HardwareProfile> {
    let bad = |problem: String| BadProfile(problem);
    let file = open_plain(path).map_err(|error| bad(error.to_string()))?;
    let metadata = file.metadata().map_err(|error| bad(error.to_string()))?;
    let too_long = || bad(format!("a profile has at most {}", size::show(PROFILE_BYTES_MAX)));
    if metadata.len() > PROFILE_BYTES_MAX {
        return Err(too_long().into());
    }
    let mut bytes = Vec::new();
    // It may grow while it is read.
    file.take(PROFILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| bad(error.to_string()))?;
    if bytes.len() as u64 > PROFILE_BYTES_MAX {
        return Err(too_long().into());
    }
    let text = String::from_utf8(bytes).map_err(|_| bad("it is not UTF-8 text".to_owned()))?;
    Ok(HardwareProfile::from_json(&text)?)
}

/// `storm plan --hardware list`.
pub(crate) fn list(as_json: bool) -> Result<()> {
    if as_json {
        let one = |name| -> Result<serde_json::Value> {
            let profile = resolve(name)?;
            Ok(json!({
                "name": name,
                "memory_bytes": profile.memory_bytes,
                "gemm_flops": profile.gemm_flops,
                "memory_bandwidth": profile.memory_bandwidth,
                "h2d_bandwidth": profile.link(Link::HOST_TO_DEVICE).bandwidth,
                "d2h_bandwidth": profile.link(Link::DEVICE_TO_HOST).bandwidth,
                "source": profile.source,
                "uncertainty": profile.uncertainty,
            }))
        };
        let profiles: Result<Vec<_>> = HardwareProfile::builtin_names().map(one).collect();
        println!("{:#}", json!({"profiles": profiles?}));
        return Ok(());
    }
    println!(
        "{:<18} {:>11} {:>13} {:>6} {:>11}  figures",
        "hardware", "memory", "bf16 TFLOP/s", "TB/s", "PCIe GB/s"
    );
    for name in HardwareProfile::builtin_names() {
        let profile = resolve(name)?;
        println!(
            "{name:<18} {:>11} {:>13.0} {:>6.2} {:>11}  {}",
            size::show(profile.memory_bytes),
            profile.gemm_flops / 1e12,
            profile.memory_bandwidth / 1e12,
            bus(&profile),
            origin(name, &profile),
        );
    }
    println!(
        "\nRates are what training is expected to reach, not the peak. `storm plan --json` prints the source of a \
         profile.\n--hardware also takes a file that `storm probe` wrote. A measurement that this machine keeps of a \
         card replaces\nits data sheet. If no hardware is named: the card in this machine, measured on first use; \
         without a card,\n{WITHOUT_CARD}."
    );
    Ok(())
}

/// In one or two words.
fn origin(name: &str, profile: &HardwareProfile) -> String {
    match profile.uncertainty {
        Some(share) => format!("data sheet, ±{:.0} %", share * 100.0),
        None if name == "reference" => "for tests".to_owned(),
        None => "measured".to_owned(),
    }
}

/// What to expect of a profile that is not measured.
pub(crate) fn caution(profile: &HardwareProfile) -> Option<String> {
    let share = profile.uncertainty?;
    Some(format!(
        "from data sheet, not measured: expect step times within ±{:.0} %; `storm probe` measures the card",
        share * 100.0
    ))
}

/// Help of `--hardware`, with every name.
pub(crate) fn help() -> String {
    let names: Vec<&str> = HardwareProfile::builtin_names().collect();
    format!(
        "Hardware profile: a built-in card, a file that `storm probe` wrote, or `list` to list the built-in ones. \
         Default: the card in this machine, measured on first use; without a card, {WITHOUT_CARD}. Built in: {}",
        names.join(", ")
    )
}

/// `50 + 50`: into the card and out of it.
pub(crate) fn bus(profile: &HardwareProfile) -> String {
    let [into, out] = [
        profile.link(Link::HOST_TO_DEVICE).bandwidth,
        profile.link(Link::DEVICE_TO_HOST).bandwidth,
    ];
    format!("{:.0} + {:.0}", into / 1e9, out / 1e9)
}
