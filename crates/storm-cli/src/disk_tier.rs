//! The disk that a run may use for optimizer state: checked, measured, and what it does to the drive.

use crate::disk::medium;
use crate::{OverBudget, UsageError, progress, size};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use storm_device::DiskOptions;
use storm_host::{ScratchError, ScratchFolder, ScratchPath, ScratchRates};
use storm_plan::{Budget, HardwareProfile, Link, LinkProfile, PerQueue, Plan, Tier};

/// If no space is given, this share of what is free stays free.
const LEFT_FREE: u64 = 10;

/// What is written and read to measure a disk.
const TRIAL_BYTES: u64 = 512 << 20;

/// Time that is lost between two copies: a thread of the host begins each.
const LATENCY_SECONDS: f64 = 1e-4;

/// What a drive is taken to do where `storm plan` is given space without a folder, in bytes per second.
const ASSUMED: Rates = Rates { read: 3.4e9, write: 2.0e9, both: 3.4e9, path: None };

/// More than this a day is not written without knowing what the drive can take.
const DAY_BYTES_MAX: f64 = 50e12;

/// A drive whose rating is used up faster is worth a warning: this share in 30 days.
const MONTH_SHARE: f64 = 0.1;

/// The flags.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DiskArgs<'a> {
    pub(crate) folder: Option<&'a Path>,
    pub(crate) space_bytes: Option<u64>,
    pub(crate) endurance_bytes: Option<u64>,
}

/// A disk that plans may use.
#[derive(Clone, Debug)]
pub(crate) struct DiskTier {
    /// None on paper.
    folder: Option<Arc<ScratchFolder>>,
    pub(crate) space_bytes: u64,
    /// What the drive is rated for, in bytes written; none if that was not said.
    endurance_bytes: Option<u64>,
    rates: Rates,
    /// Why there is this much space, if it was not said.
    origin: Option<String>,
}

/// Bytes per second: read alone, written alone, and both at once.
#[derive(Clone, Copy, Debug)]
struct Rates {
    read: f64,
    write: f64,
    both: f64,
    /// None if they were assumed.
    path: Option<ScratchPath>,
}

/// Refuses what makes no sense, without touching the disk.
pub(crate) fn check(args: DiskArgs<'_>) -> Result<(), UsageError> {
    match args.folder {
        None if args.space_bytes.or(args.endurance_bytes).is_some() => {
            Err(UsageError("give --disk, too: a folder on the disk to use".to_owned()))
        }
        Some(path) if !path.is_dir() => {
            let folder = path.to_owned();
            let error = ScratchError::NoFolder { folder };
            Err(UsageError(format!("--disk cannot be used: {error}")))
        }
        _ => Ok(()),
    }
}

/// Takes and measures a folder; none if none is given.
pub(crate) fn open(args: DiskArgs<'_>) -> Result<Option<DiskTier>> {
    check(args)?;
    let Some(path) = args.folder else { return Ok(None) };
    let folder = ScratchFolder::open(path)
        .map_err(|error| UsageError(format!("--disk cannot be used: {error}")))?;
    if let Some(bytes) = folder.removed_bytes() {
        eprintln!("removed {} of scratch space that a killed run left", size::show(bytes));
    }
    let free = folder.available_bytes()?;
    let (space_bytes, origin) = match args.space_bytes {
        Some(bytes) if bytes > free => {
            return Err(OverBudget(format!(
                "--disk-space is {}, and {} has {} free; free some, or give less",
                size::show(bytes),
                path.display(),
                size::show(free)
            ))
            .into());
        }
        Some(bytes) => (bytes, None),
        None => {
            let bytes = free - free / LEFT_FREE;
            (bytes, Some(format!("{} are free, and a tenth stays so", size::show(free))))
        }
    };
    progress::show(&format!("measuring the disk of {} …", path.display()));
    let measured = ScratchRates::measure(&folder, TRIAL_BYTES.min(space_bytes));
    progress::show("");
    let ScratchRates { read, write, both, path: by } =
        measured.with_context(|| format!("cannot measure the disk of {}", path.display()))?;
    let rates = Rates { read, write, both, path: Some(by) };
    let tier = DiskTier {
        folder: Some(Arc::new(folder)),
        space_bytes,
        endurance_bytes: args.endurance_bytes,
        rates,
        origin,
    };
    let medium = medium(path);
    if medium.is_slow() {
        eprintln!(
            "warning: {} is on {}: it reads {} and writes {}",
            path.display(),
            medium.words(),
            per_second(rates.read),
            per_second(rates.write)
        );
    }
    Ok(Some(tier))
}

/// What a disk does for optimizer state, for a profile; says why if it cannot be used for that.
pub(crate) fn probe(folder: &Path) -> Option<LinkProfile> {
    let measured = ScratchFolder::open(folder).and_then(|folder| {
        let space_bytes = folder.available_bytes()? / 2;
        ScratchRates::measure(&folder, TRIAL_BYTES.min(space_bytes))
    });
    match measured {
        Ok(ScratchRates { read, write, both, path }) => {
            Some(Rates { read, write, both, path: Some(path) }.link())
        }
        Err(error) => {
            eprintln!("the disk cannot hold optimizer state: {error}");
            None
        }
    }
}

/// `reads 3.40 GB/s, writes 2.00 GB/s, 3.60 GB/s at once`.
pub(crate) fn link_words(link: &LinkProfile) -> String {
    format!(
        "reads {}, writes {}, {} at once",
        per_second(link.to_near_bandwidth),
        per_second(link.to_far_bandwidth),
        per_second(link.duplex_bandwidth)
    )
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

/// [`open`], but space without a folder is a disk on paper.
pub(crate) fn open_or_assume(
    args: DiskArgs<'_>,
    profile: &HardwareProfile,
) -> Result<Option<DiskTier>> {
    let (None, Some(space_bytes)) = (args.folder, args.space_bytes) else { return open(args) };
    let known = profile.find_link(Link::DISK_TO_HOST).zip(profile.find_link(Link::HOST_TO_DISK));
    let rates = known.map_or(ASSUMED, |(read, write)| Rates {
        read: read.bandwidth,
        write: write.bandwidth,
        both: read.duplex_bandwidth,
        path: None,
    });
    let endurance_bytes = args.endurance_bytes;
    Ok(Some(DiskTier { folder: None, space_bytes, endurance_bytes, rates, origin: None }))
}

impl DiskTier {
    /// What is said of a disk that a plan does not use.
    pub(crate) const UNUSED: &str = "host memory holds all optimizer state, so nothing is on disk";

    /// The budget with this disk.
    pub(crate) fn in_budget(disk: Option<&DiskTier>, budget: Budget) -> Budget {
        disk.map_or(budget, |disk| budget.with(Tier::DISK, disk.space_bytes))
    }

    /// The profile with this disk.
    pub(crate) fn in_profile(disk: Option<&DiskTier>, profile: &mut HardwareProfile) {
        let Some(DiskTier { rates, .. }) = disk else { return };
        let link = rates.link();
        profile.links.retain(|known| (known.near, known.far) != (link.near, link.far));
        profile.links.push(link);
    }

    /// For a device.
    pub(crate) fn options(disk: Option<&DiskTier>) -> Option<DiskOptions> {
        let folder = Arc::clone(disk?.folder.as_ref()?);
        Some(DiskOptions { folder, fault: None })
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

    fn path(&self) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.path().to_owned())
    }

    /// What a plan does to the drive, in a sentence; none if it does not use it.
    pub(crate) fn use_words(
        &self,
        plan: &Plan,
        copied: &PerQueue<u64>,
        seconds: f64,
    ) -> Option<String> {
        let DiskUse { bytes, read, written } = DiskUse::of(plan, copied)?;
        let day = per_day(written, seconds);
        let rating = match self.endurance_bytes {
            Some(rating) => format!(
                ", {:.0} days until the {} that the drive is rated for",
                rating as f64 / day,
                terabytes(rating as f64)
            ),
            None => String::new(),
        };
        Some(format!(
            "{} of optimizer state on disk: a step reads {} and writes {}, which is {} written a day{rating}",
            size::show(bytes),
            size::show(read),
            size::show(written),
            terabytes(day)
        ))
    }

    /// Refuses to wear out a drive that nothing is known of; warns where its rating is soon used up.
    pub(crate) fn check_wear(
        &self,
        plan: &Plan,
        copied: &PerQueue<u64>,
        seconds: f64,
    ) -> Result<()> {
        let Some(used) = DiskUse::of(plan, copied) else { return Ok(()) };
        let day = per_day(used.written, seconds);
        match self.endurance_bytes {
            None if day > DAY_BYTES_MAX => Err(UsageError(format!(
                "the run would write {} a day to the disk; say what the drive is rated for, such as --disk-endurance 1200TB \
                 (its data sheet says: TBW)",
                terabytes(day)
            ))
            .into()),
            Some(rating) if 30.0 * day > MONTH_SHARE * rating as f64 => {
                eprintln!(
                    "warning: the run writes {} a day to the disk, which is {:.0} % of what the drive is rated for in 30 days",
                    terabytes(day),
                    100.0 * 30.0 * day / rating as f64
                );
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// For JSON.
    pub(crate) fn json(&self, plan: Option<(&Plan, &PerQueue<u64>, f64)>) -> Value {
        let used =
            plan.and_then(|(plan, copied, seconds)| Some((DiskUse::of(plan, copied)?, seconds)));
        json!({
            "directory": self.path(),
            "space_bytes": self.space_bytes,
            "read_bytes_per_second": self.rates.read,
            "write_bytes_per_second": self.rates.write,
            "path": self.rates.path.map(|path| path.to_string()),
            "endurance_bytes": self.endurance_bytes,
            "peak_bytes": used.map_or(0, |(used, _)| used.bytes),
            "read_bytes_per_step": used.map_or(0, |(used, _)| used.read),
            "written_bytes_per_step": used.map_or(0, |(used, _)| used.written),
            "written_bytes_per_day": used.map_or(0.0, |(used, seconds)| per_day(used.written, seconds)),
        })
    }
}

/// What a plan has on disk, and what a step moves.
#[derive(Clone, Copy)]
struct DiskUse {
    bytes: u64,
    read: u64,
    written: u64,
}

impl DiskUse {
    fn of(plan: &Plan, copied: &PerQueue<u64>) -> Option<DiskUse> {
        let moved = |link| plan.links.queue(link).map(|queue| copied[queue]);
        let (read, written) = (moved(Link::DISK_TO_HOST)?, moved(Link::HOST_TO_DISK)?);
        Some(DiskUse { bytes: plan.bytes[Tier::DISK] as u64, read, written })
    }
}

fn per_day(written: u64, step_seconds: f64) -> f64 {
    written as f64 * 86_400.0 / step_seconds.max(1e-9)
}

fn terabytes(bytes: f64) -> String {
    format!("{:.2} TB", bytes / 1e12)
}

fn per_second(bytes: f64) -> String {
    format!("{:.2} GB/s", bytes / 1e9)
}
