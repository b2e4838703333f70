//! `storm probe`: measures a GPU or the CPU, and a disk, and writes a profile for the planner.
//! Under a launcher, it also measures the link between ranks.

mod ranks;

use crate::data::disk_rates;
use crate::disk_tier::{self, Probed};
use crate::joined::Devices;
use crate::{UsageError, hardware, host_memory, joined, memory_limits, size};
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use std::io::Write;
use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use storm_device::cpu::{Bf16Products, probe_cpu};
use storm_device::cuda::{Probe, ProbeEffort, probe};
use storm_files::{IfPresent, StagedFile};
use storm_plan::{GemmKind, HardwareProfile, Link};

#[derive(Args, Debug)]
pub(crate) struct ProbeArgs {
    /// File to write the profile to.
    #[arg(long, default_value = "storm-profile.json")]
    out: PathBuf,
    /// On a GPU, measure fewer shapes, each for a shorter time.
    #[arg(long)]
    quick: bool,
    /// Device to measure.
    #[arg(long, value_enum, default_value_t = DeviceArg::Cuda)]
    device: DeviceArg,
    /// Number of the GPU, from 0. Default: 0.
    #[arg(long)]
    gpu: Option<usize>,
    /// Directory on the disk that holds datasets. Some records are written there, read, and removed.
    #[arg(long, default_value = ".", value_name = "DIR")]
    at: PathBuf,
    /// Print the profile as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DeviceArg {
    /// An NVIDIA GPU.
    Cuda,
    /// The CPU.
    Cpu,
}

pub(crate) fn run(args: &ProbeArgs) -> Result<()> {
    if let DeviceArg::Cpu = args.device {
        let given = [("--quick", args.quick), ("--gpu", args.gpu.is_some())];
        if let Some((option, _)) = given.iter().find(|(_, is_given)| *is_given) {
            return Err(UsageError(format!("{option} is for GPUs; leave it out")).into());
        }
    }
    let devices = match args.device {
        DeviceArg::Cpu => Devices::Cpu,
        DeviceArg::Cuda => Devices::Any,
    };
    if let Some(joined) = joined::join(devices)? {
        return ranks::run(args, joined);
    }
    let out = staged(args)?;
    if let DeviceArg::Cpu = args.device {
        let ram = memory_limits::host(None)?.bytes;
        let threads = host_memory::threads(None, ram)?;
        eprintln!("measuring the CPU …");
        // The default of a run.
        let profile = probe_cpu(ram / 2, Some(threads), Bf16Products::Fma)?;
        return finish_cpu(args, out, profile, threads, &[]);
    }
    let start = Instant::now();
    let gpu = args.gpu.unwrap_or(0);
    let found = probe(gpu, effort(args), |what| {
        eprintln!("{:>5.1} s  {what} …", start.elapsed().as_secs_f64());
    })?;
    finish_card(args, out, found, gpu == 0, &[])
}

fn effort(args: &ProbeArgs) -> ProbeEffort {
    if args.quick { ProbeEffort::Quick } else { ProbeEffort::Full }
}

/// Measures the disk, then writes and prints the profile of a card, with `more` lines. Keeps it for
/// later runs if `is_kept`.
fn finish_card(
    args: &ProbeArgs,
    mut out: StagedFile,
    mut found: Probe,
    is_kept: bool,
    more: &[String],
) -> Result<()> {
    let failed = || format!("cannot write {}", args.out.display());
    eprintln!("measuring the disk …");
    found.profile.disk = Some(disk_rates::measure(&args.at)?);
    let state = disk_tier::probe(&args.at)?;
    found.profile.links.extend(state.map(|probed| probed.link()));
    found.profile.source = source(&found, args.quick);
    let text = found.profile.to_json();
    // The profile must be readable. If a card is too small for a measurement, a figure is missing.
    HardwareProfile::from_json(&text).context("the measurement is incomplete")?;
    out.write_all(text.as_bytes()).with_context(failed)?;
    out.finish().with_context(failed)?;
    match args.json {
        // On standard error: standard output has the profile alone.
        true => {
            println!("{}", text.trim_end());
            eprintln!("written to {}", args.out.display());
        }
        false => {
            print(&found, state);
            more.iter().for_each(|line| println!("{line}"));
            println!("\nwritten to {}", args.out.display());
        }
    }
    if is_kept {
        match hardware::keep(&found.card, &found.profile) {
            Ok(None) => {}
            Ok(Some(kept)) => eprintln!(
                "and to {}: plans for this card use it from now on, unless --hardware names another",
                kept.display()
            ),
            // No measurements are lost: they are in the file.
            Err(error) => eprintln!("warning: {error:#}; name the file with --hardware"),
        }
    }
    Ok(())
}

/// Opens the profile's file before measuring, which takes a minute, so that errors show early.
fn staged(args: &ProbeArgs) -> Result<StagedFile> {
    StagedFile::create(&args.out, IfPresent::Replace)
        .with_context(|| format!("cannot write {}", args.out.display()))
}

/// Measures the disk, then writes and prints the profile of the CPU device, with `more` lines.
fn finish_cpu(
    args: &ProbeArgs,
    mut out: StagedFile,
    mut profile: HardwareProfile,
    threads: usize,
    more: &[String],
) -> Result<()> {
    eprintln!("measuring the disk …");
    let disk = disk_rates::measure(&args.at)?;
    let words = disk_rates::words(&disk);
    profile.disk = Some(disk);
    let state = disk_tier::probe(&args.at)?;
    profile.links.extend(state.map(|probed| probed.link()));
    let text = profile.to_json();
    HardwareProfile::from_json(&text).context("the measurement is incomplete")?;
    let failed = || format!("cannot write {}", args.out.display());
    out.write_all(text.as_bytes()).with_context(failed)?;
    out.finish().with_context(failed)?;
    if args.json {
        println!("{}", text.trim_end());
        eprintln!("written to {}", args.out.display());
        return Ok(());
    }
    println!("{}, {threads} threads", profile.name);
    println!("memory      {:.1} GB/s", profile.memory_bandwidth / 1e9);
    println!("products    {:.1} GFLOP/s f32", profile.gemm_f32_flops / 1e9);
    println!("disk        {words}");
    if let Some(probed) = state {
        println!("state       on disk: {}", probed.words());
    }
    more.iter().for_each(|line| println!("{line}"));
    println!("\nwritten to {}", args.out.display());
    Ok(())
}

fn source(found: &Probe, quick: bool) -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    format!(
        "storm {} probe{} on {}, {}; overhead: {}",
        env!("CARGO_PKG_VERSION"),
        if quick { " --quick" } else { "" },
        found.card.name,
        date(seconds),
        found.overhead_counted
    )
}

/// `2026-02-28` from seconds since 1970, UTC.
fn date(seconds: u64) -> String {
    let mut days = seconds / 86_400;
    let mut year = 1970;
    let is_leap = |year: u64| {
        (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400)
    };
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", days + 1)
}

fn print(found: &Probe, state: Option<Probed>) {
    let Probe { profile, card, .. } = found;
    let tera = 1e12;
    println!("{}, {}", card.name, size::show(profile.memory_bytes));
    println!("overhead    {} {}", size::show(profile.overhead_bytes), found.overhead_counted);
    println!("memory      {:.2} TB/s", profile.memory_bandwidth / tera);
    let fp8 = profile.gemm_fp8_flops;
    println!(
        "products    {:.0} TFLOP/s bf16, {:.1} f32{}",
        profile.gemm_flops / tera,
        profile.gemm_f32_flops / tera,
        fp8.map_or(String::new(), |flops| format!(", {:.0} fp8", flops / tera))
    );
    println!(
        "a kernel    {:.2} µs at least; {:.2} µs of the host to launch one",
        profile.kernel_seconds * 1e6,
        profile.launch_seconds * 1e6
    );
    let bus = profile.link(Link::HOST_TO_DEVICE);
    println!("pinning     {:.3} s/GiB", profile.pinned_seconds_per_gib);
    println!(
        "both ways   {:.1} GB/s together; {:.1} µs between copies",
        bus.duplex_bandwidth / 1e9,
        bus.latency_seconds * 1e6
    );

    if let Some(disk) = &profile.disk {
        println!("disk        {}", disk_rates::words(disk));
    }
    if let Some(probed) = state {
        println!("state       on disk: {}", probed.words());
    }

    println!("\n{:<10} {:>12} {:>12}", "copies", "to the card", "to the host");
    for point in &found.copies {
        let (to_device, to_host) = (point.to_device / 1e9, point.to_host / 1e9);
        let megabytes = point.bytes / 1_000_000;
        println!("{megabytes:>7} MB {to_device:>7.1} GB/s {to_host:>7.1} GB/s");
    }

    println!(
        "\n{:<16} {:>8} {:>8} {:>8} {:>5} {:>8}",
        "product", "rows", "columns", "inner", "dtype", "TFLOP/s"
    );
    for point in &profile.gemm {
        let kind = match point.kind {
            GemmKind::Forward => "forward",
            GemmKind::InputGradient => "input gradient",
            GemmKind::WeightGradient => "weight gradient",
        };
        let dtype = if point.bf16 { "bf16" } else { "f32" };
        println!(
            "{kind:<16} {:>8} {:>8} {:>8} {dtype:>5} {:>8.1}",
            point.rows,
            point.columns,
            point.inner,
            point.flops / tera
        );
    }

    println!("\n{:<16} {:>8} {:>10} {:>10}", "attention", "head", "forward", "backward");
    for point in &profile.attention {
        println!(
            "{:<16} {:>8} {:>10.1} {:>10.1} TFLOP/s",
            format!("{} tokens", point.sequence),
            point.head_dim,
            point.forward_flops / tera,
            point.backward_flops / tera
        );
    }

    println!("\n{:<16} {:>8}", "op", "GB/s");
    for point in &profile.elementwise {
        println!("{:<16} {:>8.0}", point.op, point.bandwidth / 1e9);
    }
    if found.left_out > 0 {
        println!("\n{} cases were left out: they do not fit in the free memory", found.left_out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(951_782_400), "2000-02-29");
        assert_eq!(date(951_782_400 + 86_400), "2000-03-01");
        assert_eq!(date(1_798_761_599), "2026-12-31");
        assert_eq!(date(4_107_542_400), "2100-03-01");
    }
}
