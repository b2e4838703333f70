//! The disk a run may use for optimizer state and frozen weights: checks it, measures it, and describes a plan's use of
//! it.

use crate::disk::{Medium, medium};
use crate::drive_wear::{Drive, terabytes};
use crate::{OverBudget, UsageError, progress, size};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::env::{self, VarError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use storm_device::DiskOptions;
use storm_graph::TensorClass;
use storm_host::{DriveWear, ScratchFolder, ScratchOptions, ScratchPath, ScratchRates, ScratchWay};
use storm_plan::{
    Budget, Forced, HardwareProfile, Link, LinkProfile, Plan, Planned, Prediction, Tier,
};

/// Without an explicit size, leave one part in this many of the free space free.
const LEFT_FREE: u64 = 10;

/// Bytes written and read to measure a disk.
const TRIAL_BYTES: u64 = 512 << 20;

/// Latency of a disk copy: a host thread has to start each one.
const LATENCY_SECONDS: f64 = 1e-4;

/// Assumed speed of a drive, in bytes per second, when `storm plan` gets space without a folder.
const ASSUMED: Rates = Rates { read: 3.4e9, write: 2.0e9, both: 3.4e9, path: None };

/// Environment variable that limits the I/O path, for tests and for systems where a faster one misbehaves.
const VARIABLE: &str = "STORM_SCRATCH";

/// The disk options of a command.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DiskArgs<'a> {
    pub(crate) folder: Option<&'a Path>,
    pub(crate) space_bytes: Option<u64>,
    pub(crate) endurance_bytes: Option<u64>,
    /// If set, space without a folder means an assumed disk of this many drives.
    pub(crate) drives: Option<u8>,
}

/// A disk that plans may use.
#[derive(Clone, Debug)]
pub(crate) struct DiskTier {
    /// `None` for an assumed disk.
    folder: Option<Arc<ScratchFolder>>,
    pub(crate) space_bytes: u64,
    drive: Drive,
    rates: Rates,
    /// The fastest I/O path allowed.
    way: ScratchWay,
    /// How the space was chosen, if the user did not give it.
    origin: Option<String>,
}

/// Bytes per second: reading alone, writing alone, and both at once.
#[derive(Clone, Copy, Debug)]
struct Rates {
    read: f64,
    write: f64,
    both: f64,
    /// `None` if the rates are assumed.
    path: Option<ScratchPath>,
}

/// Refuses invalid options and unusable disks, without measuring.
pub(crate) fn check(args: DiskArgs<'_>) -> Result<()> {
    take(args).map(|_| ())
}

/// A scratch folder locked by this process.
struct Taken {
    folder: ScratchFolder,
    space_bytes: u64,
    /// How the space was chosen, if the user did not give it.
    origin: Option<String>,
    way: ScratchWay,
}

/// Locks the folder and removes what a dead run left in it; `None` without a folder.
fn take(args: DiskArgs<'_>) -> Result<Option<Taken>> {
    let Some(path) = args.folder else {
        let is_on_paper = args.drives.is_some() && args.space_bytes.is_some();
        if !is_on_paper && args.space_bytes.or(args.endurance_bytes).is_some() {
            let problem = "give --disk, too: a folder on the disk to use";
            return Err(UsageError(problem.to_owned()).into());
        }
        return Ok(None);
    };
    let way = way()?;
    let folder = ScratchFolder::open(path)
        .map_err(|error| UsageError(format!("--disk cannot be used: {error}")))?;
    if let Some(bytes) = folder.removed_bytes() {
        eprintln!("removed {} of scratch space that a killed run left", size::show(bytes));
    }
    let free = folder.available_bytes()?;
    match args.space_bytes {
        Some(bytes) if bytes > free => Err(OverBudget(format!(
            "--disk-space is {}, and {} has {} free; free some, or give less",
            size::show(bytes),
            path.display(),
            size::show(free)
        ))
        .into()),
        Some(space_bytes) => Ok(Some(Taken { folder, space_bytes, origin: None, way })),
        None => {
            let origin = Some(format!("{} free, less a tenth", size::show(free)));
            let space_bytes = free - free / LEFT_FREE;
            Ok(Some(Taken { folder, space_bytes, origin, way }))
        }
    }
}

/// Locks and measures the folder; `None` without a folder, also for an assumed disk.
pub(crate) fn open(args: DiskArgs<'_>) -> Result<Option<DiskTier>> {
    let Some(Taken { folder, space_bytes, origin, way }) = take(args)? else { return Ok(None) };
    let path = folder.path().to_owned();
    progress::show(&format!("measuring the disk of {} …", path.display()));
    let measured = ScratchRates::measure(&folder, TRIAL_BYTES.min(space_bytes), way);
    progress::show("");
    let ScratchRates { read, write, both, path: by } =
        measured.with_context(|| format!("cannot measure the disk of {}", path.display()))?;
    let rates = Rates { read, write, both, path: Some(by) };
    let tier = DiskTier {
        folder: Some(Arc::new(folder)),
        space_bytes,
        drive: Drive { given_bytes: args.endurance_bytes, wear: DriveWear::of_folder(&path) },
        rates,
        way,
        origin,
    };
    if let Some(warning) = slow_words(&path, medium(&path), &tier) {
        eprintln!("warning: {warning}");
    }
    Ok(Some(tier))
}

/// A warning about a disk that is likely too slow.
fn slow_words(path: &Path, medium: Medium, tier: &DiskTier) -> Option<String> {
    let words = || {
        let (path, medium, rates) = (path.display(), medium.words(), tier.rates_words());
        format!("{path} is on {medium}: it {rates}")
    };
    medium.is_slow().then(words)
}

/// Reads `STORM_SCRATCH`: `io_uring`, `direct` or `cached`.
fn way() -> Result<ScratchWay, UsageError> {
    let text = match env::var(VARIABLE) {
        Ok(text) => text,
        Err(VarError::NotPresent) => return Ok(ScratchWay::default()),
        Err(VarError::NotUnicode(text)) => text.to_string_lossy().into_owned(),
    };
    ScratchWay::ALL.into_iter().find(|way| way.name() == text).ok_or_else(|| {
        let names = ScratchWay::ALL.map(ScratchWay::name).join(", ");
        UsageError(format!("{VARIABLE}: `{}` is none of {names}", text.escape_debug()))
    })
}

/// Measured speed of a disk as scratch space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Probed(Rates);

/// Measures a disk as scratch space; prints the reason if it is not usable.
pub(crate) fn probe(folder: &Path) -> Result<Option<Probed>, UsageError> {
    let way = way()?;
    let measured = ScratchFolder::open(folder).and_then(|folder| {
        let space_bytes = folder.available_bytes()? / 2;
        ScratchRates::measure(&folder, TRIAL_BYTES.min(space_bytes), way)
    });
    match measured {
        Ok(ScratchRates { read, write, both, path }) => {
            Ok(Some(Probed(Rates { read, write, both, path: Some(path) })))
        }
        Err(error) => {
            eprintln!("the disk cannot be used as scratch space: {error}");
            Ok(None)
        }
    }
}

impl Probed {
    /// The disk's link for a hardware profile.
    pub(crate) fn link(&self) -> LinkProfile {
        self.0.link()
    }

    /// `reads 3.40 GB/s, writes 2.00 GB/s, 3.60 GB/s at once, by io_uring and O_DIRECT`.
    pub(crate) fn words(&self) -> String {
        let Rates { read, write, both, path } = self.0;
        let [read, write, both] = [read, write, both].map(per_second);
        let by = path.map_or(String::new(), |path| format!(", by {path}"));
        format!("reads {read}, writes {write}, {both} at once{by}")
    }
}

impl Rates {
    fn link(self) -> LinkProfile {
        LinkProfile {
            near: Tier::HOST,
            far: Tier::DISK,
            to_near_bandwidth: self.read,
            to_far_bandwidth: self.write,
            duplex_bandwidth: self.both,
            latency_seconds: LATENCY_SECONDS,
        }
    }
}

/// An assumed disk, if space is given without a folder and the command allows that.
pub(crate) fn assume(args: DiskArgs<'_>, profile: &HardwareProfile) -> Option<DiskTier> {
    let drives = args.drives.filter(|_| args.folder.is_none())?;
    let drive = Drive { given_bytes: args.endurance_bytes, wear: None };
    let mut disk = DiskTier { drive, ..DiskTier::assumed(args.space_bytes?, profile) };
    let Rates { read, write, both, .. } = &mut disk.rates;
    for rate in [read, write, both] {
        *rate *= f64::from(drives);
    }
    Some(disk)
}

impl DiskTier {
    /// The message for a plan that does not use its disk.
    pub(crate) const UNUSED: &str = "nothing is on disk: device and host memory hold everything";

    /// An assumed disk with the rates of the profile, else typical ones.
    pub(crate) fn assumed(space_bytes: u64, profile: &HardwareProfile) -> DiskTier {
        let links = [Link::DISK_TO_HOST, Link::HOST_TO_DISK].map(|link| profile.find_link(link));
        let rates = match links {
            [Some(read), Some(write)] => Rates {
                read: read.bandwidth,
                write: write.bandwidth,
                both: read.duplex_bandwidth,
                path: None,
            },
            _ => ASSUMED,
        };
        let (drive, way) = (Drive::default(), ScratchWay::default());
        DiskTier { folder: None, space_bytes, drive, rates, way, origin: None }
    }

    /// Adds the disk's space to a budget.
    pub(crate) fn in_budget(disk: Option<&DiskTier>, budget: Budget) -> Budget {
        disk.map_or(budget, |disk| budget.with(Tier::DISK, disk.space_bytes))
    }

    /// Sets the disk's link in a profile.
    pub(crate) fn in_profile(disk: Option<&DiskTier>, profile: &mut HardwareProfile) {
        let Some(DiskTier { rates, .. }) = disk else { return };
        let link = rates.link();
        profile.links.retain(|known| (known.near, known.far) != (link.near, link.far));
        profile.links.push(link);
    }

    /// The disk options of a device.
    pub(crate) fn options(disk: Option<&DiskTier>) -> Option<DiskOptions> {
        let DiskTier { folder, way, .. } = disk?;
        let scratch = ScratchOptions { way: *way, fault: None };
        Some(DiskOptions { folder: Arc::clone(folder.as_ref()?), scratch })
    }

    /// `200.00 GiB of disk in /scratch: reads 3.40 GB/s, writes 2.00 GB/s, by O_DIRECT`.
    pub(crate) fn words(&self) -> String {
        let Rates { read, write, path, .. } = self.rates;
        let place = self.path().map_or(String::new(), |path| format!(" in {}", path.display()));
        let by = path.map_or("assumed".to_owned(), |path| format!("by {path}"));
        let origin = self.origin.as_ref().map_or(String::new(), |origin| format!("; {origin}"));
        format!(
            "{} of disk{place}: reads {}, writes {}, {by}{origin}",
            size::show(self.space_bytes),
            per_second(read),
            per_second(write)
        )
    }

    /// `reads 3.40 GB/s and writes 2.00 GB/s`.
    pub(crate) fn rates_words(&self) -> String {
        let Rates { read, write, .. } = self.rates;
        format!("reads {} and writes {}", per_second(read), per_second(write))
    }

    fn path(&self) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.path().to_owned())
    }

    /// Describes what a plan keeps on disk, why, and how much wear that causes; `None` if the plan does not use the
    /// disk.
    pub(crate) fn use_words(&self, planned: &Planned, forced: &Forced) -> Option<String> {
        let DiskUse { contents, read, written, written_a_day, .. } = DiskUse::of(planned)?;
        let contents: Vec<String> = contents
            .iter()
            .map(|&(name, bytes)| format!("{} of {name}", size::show(bytes)))
            .collect();
        let why = match forced.on_disk {
            Some(_) => "as --on-disk says",
            None => "because host memory is too small",
        };
        let writes = match written {
            0 => "writes nothing".to_owned(),
            _ => format!(
                "writes {}, which is {} a day",
                size::show(written),
                terabytes(written_a_day)
            ),
        };
        Some(format!(
            "on disk, {why}: {}; a step reads {} and {writes}{}",
            contents.join(", "),
            size::show(read),
            self.drive.words(written_a_day)
        ))
    }

    /// The part of a checkpoint that is read from this disk, and the time that takes; `None` if no saved state is here.
    pub(crate) fn saved(&self, planned: &Planned) -> Option<Share> {
        let is_saved = |(name, _): &(&str, u64)| *name != FROZEN;
        let bytes =
            DiskUse::of(planned)?.contents.into_iter().filter(is_saved).map(|(_, n)| n).sum();
        let seconds = bytes as f64 / self.rates.read.max(1.0);
        (bytes > 0).then_some(Share { bytes, seconds })
    }

    /// Refuses a plan that wears out the drive, unless the user accepts that.
    pub(crate) fn check_wear(&self, planned: &Planned, accepts: bool) -> Result<()> {
        DiskUse::of(planned).map_or(Ok(()), |used| self.drive.check(used.written_a_day, accepts))
    }

    /// The JSON description.
    pub(crate) fn json(&self, planned: Option<&Planned>) -> Value {
        let used = planned.and_then(DiskUse::of);
        json!({
            "directory": self.path(),
            "space_bytes": self.space_bytes,
            "read_bytes_per_second": self.rates.read,
            "write_bytes_per_second": self.rates.write,
            "path": self.rates.path.map(|path| path.to_string()),
            "endurance_bytes": self.drive.rated_bytes(),
            "drive_used_percent": self.drive.wear.map(|wear| wear.used_percent),
            "drive_written_bytes": self.drive.wear.map(|wear| wear.written_bytes),
            "peak_bytes": used.as_ref().map_or(0, |used| used.bytes),
            "contents": used.as_ref().map_or(&[][..], |used| &used.contents).iter()
                .map(|&(name, bytes)| json!({ "name": name, "bytes": bytes })).collect::<Vec<_>>(),
            "read_bytes_per_step": used.as_ref().map_or(0, |used| used.read),
            "written_bytes_per_step": used.as_ref().map_or(0, |used| used.written),
            "written_bytes_per_day": used.as_ref().map_or(0.0, |used| used.written_a_day),
        })
    }
}

/// The part of a checkpoint that is read from disk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Share {
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
}

/// What a plan keeps on disk, and the traffic of a step.
struct DiskUse {
    bytes: u64,
    /// Bytes by kind of tensor.
    contents: Vec<(&'static str, u64)>,
    read: u64,
    written: u64,
    written_a_day: f64,
}

impl DiskUse {
    fn of(planned: &Planned) -> Option<DiskUse> {
        let Planned { plan, prediction, .. } = planned;
        let Prediction { copied_bytes, step_seconds, .. } = prediction;
        let moved = |link| plan.links.queue(link).map(|queue| copied_bytes[queue]);
        let (read, written) = (moved(Link::DISK_TO_HOST)?, moved(Link::HOST_TO_DISK)?);
        let written_a_day = written as f64 * 86_400.0 / step_seconds.max(1e-9);
        let bytes = plan.bytes[Tier::DISK] as u64;
        Some(DiskUse { bytes, contents: contents(plan), read, written, written_a_day })
    }
}

/// The kind that checkpoints leave out: it comes from the base model.
const FROZEN: &str = "frozen weights";

/// What a plan keeps on disk, by kind.
fn contents(plan: &Plan) -> Vec<(&'static str, u64)> {
    let mut found: Vec<(&'static str, u64)> = Vec::new();
    for lasting in &plan.lasting {
        let kind = match lasting.tensor.name.rsplit('.').next() {
            _ if lasting.tensor.class != TensorClass::OptimizerState => FROZEN,
            Some("second_moment") => "second moments",
            Some("first_moment") => "first moments",
            _ => "other optimizer state",
        };
        let pieces = lasting.parts.iter().filter(|(_, place)| place.tier == Tier::DISK);
        let sizes = pieces.map(|&(piece, _)| plan.value(lasting.pieces[piece as usize]).size_bytes);
        let bytes: usize = sizes.sum();
        match found.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, sum)) => *sum += bytes as u64,
            None if bytes > 0 => found.push((kind, bytes as u64)),
            None => {}
        }
    }
    found
}

fn per_second(bytes: f64) -> String {
    format!("{:.2} GB/s", bytes / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tier() -> DiskTier {
        let rates = Rates { read: 0.12e9, write: 0.08e9, both: 0.1e9, path: None };
        let (drive, way) = (Drive::default(), ScratchWay::default());
        DiskTier { folder: None, space_bytes: 1 << 40, drive, rates, way, origin: None }
    }

    #[test]
    fn slow_disks_are_named_with_their_rates() {
        let words = |medium| slow_words(Path::new("/mnt/a"), medium, &tier());
        assert_eq!(
            words(Medium::Network).as_deref(),
            Some("/mnt/a is on a network file system: it reads 0.12 GB/s and writes 0.08 GB/s")
        );
        assert!(words(Medium::Rotating).is_some_and(|words| words.contains("a rotating disk")));
        for medium in [Medium::Nvme, Medium::SolidState, Medium::Unknown] {
            assert_eq!(words(medium), None);
        }
    }
}
