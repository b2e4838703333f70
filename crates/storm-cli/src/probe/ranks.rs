//! `mpirun -n 4 storm probe`: the CPU as several ranks share it, and the link between them.

use super::{DeviceArg, ProbeArgs, finish_cpu, staged};
use crate::joined::Joined;
use crate::plan::link_words;
use crate::{UsageError, host_memory, memory_limits};
use anyhow::Result;
use std::time::Instant;
use storm_device::cpu::{Bf16Products, probe_cpu};
use storm_files::StagedFile;
use storm_plan::{HardwareProfile, MachineLink, RankLink};
use storm_ranks::{Collective, Engine, LinkMeasurement, machines_of_ranks, measure_link};

const NOT_ON_GPUS: &str = "the link between ranks is measured for the CPU device; give --device cpu, or start storm probe by \
                           itself to measure a GPU";

/// Measures on all ranks. The first one writes the profile, and says what is wrong on any. Returns on the first rank only.
pub(super) fn run(args: &ProbeArgs, mut joined: Joined) -> Result<()> {
    let rank = joined.engine.place().rank;
    let measured = on_rank(args, &mut joined);
    let code = i64::from(measured.as_ref().map_or_else(crate::code_of, |()| 0));
    let mut agreed = [code];
    joined.engine.agree(&mut agreed)?;
    joined.leave()?;
    match rank {
        0 => measured,
        _ => std::process::exit(agreed[0] as i32),
    }
}

/// What one rank does. Where one fails, all do, so that none waits for another.
fn on_rank(args: &ProbeArgs, joined: &mut Joined) -> Result<()> {
    let place = joined.engine.place();
    let own = match args.device {
        DeviceArg::Cpu => Ok(format!("{args:?}")),
        DeviceArg::Cuda => Err(NOT_ON_GPUS.to_owned()),
    };
    let compared = joined.compare(&own);
    // The same on all, without the number of a rank.
    own.map_err(UsageError)?;
    compared?;
    let begun = match place.rank {
        0 => staged(args).map(Some),
        _ => Ok(None),
    };
    let out: Option<StagedFile> = joined.together(begun)?;
    if out.is_some() {
        eprintln!("measuring the CPU with {} ranks …", place.ranks);
    }
    let ram =
        memory_limits::host(None).map(|limit| limit.bytes / u64::from(joined.launch.local_ranks));
    let ram = joined.together(ram)?;
    let threads = joined.together(host_memory::threads(None, ram))?;
    let threads = (threads / joined.launch.local_ranks as usize).max(1);
    // All at once, as in a run: ranks on a machine share its memory.
    let profile = joined
        .together(probe_cpu(ram / 2, Some(threads), Bf16Products::Fma).map_err(Into::into))?;
    if out.is_some() {
        eprintln!("measuring the link …");
    }
    let machines = machines_of_ranks(&mut joined.engine)?;
    let begun = Instant::now();
    let link = measure_link(&mut joined.engine, &machines, &mut || begun.elapsed())?;
    let Some(out) = out else { return Ok(()) };
    let version = joined.engine.version();
    let profile = HardwareProfile {
        ranks: Some(link_of(&link)),
        source: format!("{}, by each of {} ranks over {version}", profile.source, place.ranks),
        ..profile
    };
    finish_cpu(args, out, profile, threads, &lines(&link, &version))
}

/// As plans take it.
fn link_of(measured: &LinkMeasurement) -> RankLink {
    RankLink {
        ranks: measured.ranks,
        bandwidth: measured.bandwidth,
        latency_seconds: measured.latency_seconds,
        share: 0.0,
        machines: measured
            .machines
            .map(|machines| MachineLink { ranks: machines.ranks, bandwidth: machines.bandwidth }),
    }
}

fn lines(measured: &LinkMeasurement, version: &str) -> Vec<String> {
    let mut lines = vec![format!(
        "ranks       {} over {version}: each sends {}",
        measured.ranks,
        link_words(&link_of(measured))
    )];
    lines.push(format!("\n{:<14} {:>12} {:>12}", "each sends", "exchange", "gather"));
    let sizes = measured.points.iter().filter(|p| p.collective == Collective::Exchange);
    for exchange in sizes {
        let gather = measured
            .points
            .iter()
            .find(|p| p.collective == Collective::Gather && p.bytes == exchange.bytes);
        let gather = gather.map_or(0.0, |point| point.seconds);
        lines.push(format!(
            "{:>9} KiB  {:>9.3} ms {:>9.3} ms",
            exchange.bytes >> 10,
            exchange.seconds * 1e3,
            gather * 1e3
        ));
    }
    lines
}
