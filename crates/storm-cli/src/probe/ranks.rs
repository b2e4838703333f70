//! `storm probe` under a launcher: the CPU that ranks share, or their GPUs, and the link between
//! ranks.

use super::{DeviceArg, ProbeArgs, effort, finish_card, finish_cpu, staged};
use crate::joined::Joined;
use crate::plan::link_words;
use crate::train::Cards;
use crate::{UsageError, host_memory, machines, memory_limits};
use anyhow::{Context, Result};
use std::ops::Range;
use std::time::{Duration, Instant};
use storm_device::cpu::{Bf16Products, probe_cpu};
use storm_device::cuda::{CudaLink, probe};
use storm_files::StagedFile;
use storm_plan::{HardwareProfile, MachineLink, RankLink};
use storm_ranks::nccl::Id;
use storm_ranks::{Carrier, Collective, Engine, LinkMeasurement, measure_cards, measure_link};
use storm_train::Ranks;

/// Measures on all ranks. Rank 0 writes the profile and reports the errors of all ranks.
pub(super) fn run(args: &ProbeArgs, mut joined: Joined) -> Result<()> {
    let code = match (on_rank(args, &mut joined), joined.engine.place().rank) {
        (Ok(()), _) => 0,
        // Printed before any other rank ends: launchers kill this one when another fails.
        (Err(error), 0) => crate::print_error(&error),
        (Err(error), _) => crate::code_of(&error),
    };
    let mut agreed = [i64::from(code)];
    joined.engine.agree(&mut agreed)?;
    joined.leave()?;
    std::process::exit(agreed[0] as i32)
}

/// The work of one rank. If one fails, all fail, so that none waits for another.
fn on_rank(args: &ProbeArgs, joined: &mut Joined) -> Result<()> {
    let own = check(args).map(|()| format!("{args:?}"));
    let compared = joined.compare(&own);
    // This error is the same on all ranks, so it needs no rank number.
    own.map_err(UsageError)?;
    compared?;
    let begun = match joined.engine.place().rank {
        0 => staged(args).map(Some),
        _ => Ok(None),
    };
    let out = joined.together(begun)?;
    match args.device {
        DeviceArg::Cpu => on_cpu(args, joined, out),
        DeviceArg::Cuda => on_card(args, joined, out),
    }
}

fn check(args: &ProbeArgs) -> Result<(), String> {
    match args.device {
        DeviceArg::Cuda if args.gpu.is_some() => {
            Err("--gpu is for one rank; of several, each takes the GPU with its number".to_owned())
        }
        _ => Ok(()),
    }
}

/// Only rank 0 has a file to write to.
fn on_cpu(args: &ProbeArgs, joined: &mut Joined, out: Option<StagedFile>) -> Result<()> {
    let place = joined.engine.place();
    if out.is_some() {
        eprintln!("measuring the CPU with {} ranks …", place.ranks);
    }
    let ram =
        memory_limits::host(None).map(|limit| limit.bytes / u64::from(joined.launch.local_ranks));
    let ram = joined.together(ram)?;
    let threads = joined.together(host_memory::threads(None, ram))?;
    let threads = (threads / joined.launch.local_ranks as usize).max(1);
    // All at once, as in a run, because ranks on a machine share its memory.
    let profile = joined
        .together(probe_cpu(ram / 2, Some(threads), Bf16Products::Fma).map_err(Into::into))?;
    if out.is_some() {
        eprintln!("measuring the link …");
    }
    let given =
        joined.together(machines::given(joined.engine.place().ranks).map_err(Into::into))?;
    let machines = machines::of_ranks(&mut joined.engine, given)?;
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

/// Every rank measures its own GPU, all at once, because they share the memory of their machine. If
/// several ranks share a GPU, only the first measures it. Then the link is measured over NCCL, as a
/// run uses it.
fn on_card(args: &ProbeArgs, joined: &mut Joined, out: Option<StagedFile>) -> Result<()> {
    let ranks = Ranks::new(Box::new(joined.engine.clone()));
    let id = match joined.engine.place().rank {
        0 => Cards::new_id().map(|id| id.to_bytes()).map_err(|error| format!("{error:#}")),
        _ => Ok(Vec::new()),
    };
    let ids: Vec<Vec<u8>> = ranks.hear_all(&id)?;
    let id = Id::from_bytes(&ids[0]).context("rank 0 says something else")?;
    let cards = Cards::connect(&ranks, &joined.launch, id)?;
    let start = Instant::now();
    let say = |what: &str| {
        if out.is_some() {
            eprintln!("{:>5.1} s  {what} …", start.elapsed().as_secs_f64());
        }
    };
    let measures = out.is_some() || cards.sharing == 1;
    let found = measures.then(|| probe(cards.ordinal, effort(args), say)).transpose();
    let found = joined.together(found.map_err(Into::into))?;
    say("the link between ranks");
    let mut link = joined.together(CudaLink::new(&cards.ranks).map_err(Into::into))?;
    let given =
        joined.together(machines::given(joined.engine.place().ranks).map_err(Into::into))?;
    let machines = machines::of_ranks(&mut joined.engine, given)?;
    let measured = measure_cards(&mut joined.engine, &machines, &mut CardCarrier(&mut link));
    drop(link);
    let link = match measured {
        Ok(link) => link,
        Err(error) => {
            // Other ranks may be waiting for this one on their GPUs, where no message reaches them.
            joined.engine.abort(&format!("{error:#}"));
            return Err(error);
        }
    };
    let (is_alone, nccl) = (cards.sharing == 1, format!("NCCL {}", cards.nccl));
    let (Some(out), Some(mut found)) = (out, found) else {
        return joined.together(cards.ranks.finish().map_err(Into::into));
    };
    cards.leave_out_memory(&mut found.profile);
    found.profile.ranks = Some(link_of(&link));
    let is_kept = is_alone && cards.ordinal == 0;
    joined.together(cards.ranks.finish().map_err(Into::into))?;
    finish_card(args, out, found, is_kept, &lines(&link, &nccl))
}

/// Collectives over NCCL.
struct CardCarrier<'a>(&'a mut CudaLink);

impl Carrier<anyhow::Error> for CardCarrier<'_> {
    fn carry(
        &mut self,
        _: &mut dyn Engine,
        sends: &[Range<usize>],
        receives: &[Range<usize>],
    ) -> Result<Duration> {
        Ok(self.0.time(sends, receives)?)
    }
}

/// The link as the planner takes it.
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
