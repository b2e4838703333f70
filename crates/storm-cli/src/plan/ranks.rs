//! `storm plan --ranks`: several ranks that share a step, and the link between them.

use super::{Answer, Request};
use crate::UsageError;
use crate::size;
use clap::Args;
use serde_json::{Value, json};
use storm_plan::{Lanes, MachineLink, RankLink, RankPlace};
use storm_train::Exchange;

/// Default latency of a collective.
const LATENCY_MICROSECONDS: f64 = 20.0;

#[derive(Args)]
pub(super) struct RankArgs {
    /// How many ranks share a step. Each computes as many of its lanes, and owns as much of the optimizer state.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: Option<u32>,
    /// Lanes of a step: 16, or 2x8 for two groups of eight, which machines of eight ranks add up before they send them to others. One
    /// for each rank if not given.
    #[arg(long)]
    lanes: Option<Lanes>,
    /// What a rank sends to others in a second while it receives as much: 370GB. If not given, what `storm probe` measured under
    /// mpirun, if the hardware profile has that.
    #[arg(long, value_name = "SIZE", value_parser = size::parse, requires = "ranks")]
    rank_bandwidth: Option<u64>,
    /// Microseconds that each collective takes at least; 20 if not given.
    #[arg(long, value_name = "MICROSECONDS", requires = "rank_bandwidth")]
    rank_latency: Option<f64>,
    /// Percent of the multiprocessors that collectives take from kernels beside them; 0 if not given.
    #[arg(long, value_name = "PERCENT", requires = "rank_bandwidth")]
    rank_share: Option<f64>,
    /// How many of the ranks each machine has, if they are on several.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    #[arg(requires_all = ["machine_bandwidth", "rank_bandwidth"])]
    machine_ranks: Option<u32>,
    /// What a machine sends to others in a second while it receives as much: 12.5GB.
    #[arg(long, value_name = "SIZE", value_parser = size::parse, requires = "machine_ranks")]
    machine_bandwidth: Option<u64>,
}

impl RankArgs {
    fn count(&self) -> u32 {
        self.ranks.unwrap_or(1)
    }

    /// The plan is for rank 0. The link says how many ranks its machine has.
    pub(super) fn place(&self, lanes: Lanes, link: Option<&RankLink>) -> RankPlace {
        exchange(lanes, self.count(), link).place(0, self.count())
    }

    pub(super) fn lanes(&self) -> Result<Lanes, UsageError> {
        let ranks = self.count() as usize;
        let lanes = self.lanes.unwrap_or(ranks.into());
        match lanes.count().is_multiple_of(ranks) {
            true => Ok(lanes),
            false => Err(UsageError(format!(
                "{ranks} ranks cannot share {} lanes evenly: --ranks must divide --lanes",
                lanes.count()
            ))),
        }
    }

    /// The link between ranks from the flags. `None` if not given.
    pub(super) fn link(&self) -> Result<Option<RankLink>, UsageError> {
        let Some(bandwidth) = self.rank_bandwidth else { return Ok(None) };
        let latency = self.rank_latency.unwrap_or(LATENCY_MICROSECONDS);
        let percent = self.rank_share.unwrap_or(0.0);
        if !latency.is_finite() || latency < 0.0 {
            return Err(UsageError(format!("--rank-latency cannot be {latency}")));
        }
        if !(0.0..=90.0).contains(&percent) {
            return Err(UsageError(format!("--rank-share must be 0 to 90, not {percent}")));
        }
        if bandwidth == 0 || self.machine_bandwidth == Some(0) {
            return Err(UsageError("a bandwidth of 0 connects nothing".to_owned()));
        }
        let machines = self.machine_ranks.zip(self.machine_bandwidth);
        if let Some((on_one, _)) = machines
            && !self.count().is_multiple_of(on_one)
        {
            return Err(UsageError(format!(
                "{} ranks cannot be spread over machines of {on_one}: --machine-ranks must divide --ranks",
                self.count()
            )));
        }
        let machines =
            machines.map(|(ranks, bandwidth)| MachineLink { ranks, bandwidth: bandwidth as f64 });
        Ok(Some(RankLink {
            ranks: self.count(),
            bandwidth: bandwidth as f64,
            latency_seconds: latency / 1e6,
            share: percent / 100.0,
            machines,
        }))
    }

    /// Under a config file, the ranks are those that `mpirun` starts.
    pub(super) fn refuse_with_config(&self) -> Result<(), UsageError> {
        match self.ranks.is_some() || self.lanes.is_some() {
            true => Err(UsageError(
                "--ranks and --lanes are for --model; a config file has lanes of its own"
                    .to_owned(),
            )),
            false => Ok(()),
        }
    }
}

/// How ranks exchange gradients over a link.
fn exchange(lanes: Lanes, ranks: u32, link: Option<&RankLink>) -> Exchange {
    let on_one = link.and_then(|link| link.machines).map_or(ranks, |machines| machines.ranks);
    let machines: Vec<u32> = (0..ranks).map(|rank| rank / on_one).collect();
    Exchange::new(lanes, &machines)
}

/// The ranks as a JSON object.
pub(super) fn object(request: &Request, answer: &Answer) -> Value {
    let simulation = &answer.planned.simulation;
    let busy = answer.planned.plan.links.rank_queue().map(|queue| simulation.busy_seconds[queue]);
    json!({
        "count": request.rank.ranks,
        "lanes": request.options.lanes,
        "exchange_levels": if request.rank.has_levels() { 2 } else { 1 },
        "collective_seconds": busy,
        "exposed_seconds": simulation.stalls.rank_seconds,
        "alone_seconds": answer.alone_seconds,
        "link": request.profile.ranks.filter(|_| request.rank.is_shared()),
    })
}

/// `1.3 GB/s after 25 µs, 4 on each machine, which sends 12.5 GB/s`.
pub(crate) fn link_words(link: &RankLink) -> String {
    let machines = link.machines.map_or_else(String::new, |machines| {
        let (ranks, bandwidth) = (machines.ranks, machines.bandwidth / 1e9);
        format!(", {ranks} on each machine, which sends {bandwidth:.1} GB/s")
    });
    let (bandwidth, latency) = (link.bandwidth / 1e9, link.latency_seconds * 1e6);
    let digits = if bandwidth < 10.0 { 2 } else { 0 };
    format!("{bandwidth:.digits$} GB/s after {latency:.0} µs{machines}")
}

/// What ranks do. Empty if there is only one.
pub(super) fn words(request: &Request, answer: &Answer) -> String {
    let RankPlace { ranks, .. } = request.rank;
    if ranks == 1 {
        return String::new();
    }
    let all_lanes = request.options.lanes;
    let lanes = all_lanes.count() / ranks as usize;
    let simulation = &answer.planned.simulation;
    let of_link = request.profile.ranks.map_or_else(String::new, |link| {
        let other = match link.ranks == ranks {
            true => String::new(),
            false => format!(" as measured between {}", link.ranks),
        };
        format!(", each sends {}{other}", link_words(&link))
    });
    let mut words = vec![format!(
        "{ranks}{of_link}; each computes {lanes} of {} lanes and owns 1/{ranks} of the optimizer state",
        all_lanes.count()
    )];
    let link = request.profile.ranks.as_ref();
    if all_lanes.groups() > 1 || link.is_some_and(|link| link.machines.is_some()) {
        words.push(format!("exchange on {}", exchange(all_lanes, ranks, link)));
    }
    if request.profile.ranks.is_none() {
        words.push(format!(
            "the link between them is not known, so times leave out what they send each other; `mpirun -n {ranks} storm probe` \
             measures it (with --device cpu for the CPU device), and --hardware takes the profile that it writes"
        ));
    } else if let Some(queue) = answer.planned.plan.links.rank_queue() {
        words.push(format!(
            "exchange and gather take {:.3} s of a step; kernels wait {:.3} s for them",
            simulation.busy_seconds[queue], simulation.stalls.rank_seconds
        ));
    }
    if let (Some(alone), Some(_)) = (answer.alone_seconds, request.profile.ranks) {
        words.push(format!(
            "a rank alone would take {alone:.3} s for its share: {:.1} % of linear",
            100.0 * alone / answer.planned.prediction.step_seconds
        ));
    }
    words.join("; ")
}
