//! What connects the ranks of a step.

use super::HardwareProfile;
use crate::collective::{Collective, CollectiveKind};
use crate::plan::Plan;

/// The connection of a rank to the others. Sending and receiving happen at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankLink {
    /// Bytes per second that a rank sends, and as many that it receives, while all do.
    pub bandwidth: f64,
    /// Of each collective.
    pub latency_seconds: f64,
    /// The share of the multiprocessors that collectives take from kernels while they run, 0 to less than 1.
    pub share: f64,
    /// How ranks are spread over machines; none if one machine has all of them.
    pub machines: Option<MachineLink>,
}

/// The network between machines, each of which has as many ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineLink {
    /// How many ranks a machine has.
    pub ranks: u32,
    /// Bytes per second that a machine sends, and as many that it receives.
    pub bandwidth: f64,
}

impl HardwareProfile {
    /// How long a collective takes: as long as on the slowest rank.
    pub(crate) fn collective_seconds(&self, plan: &Plan, collective: &Collective) -> f64 {
        let Some(link) = &self.ranks else { return 0.0 };
        let inside = collective.busiest_bytes(plan) as f64 / link.bandwidth;
        let between = link.machines.filter(|machine| machine.ranks < plan.rank.ranks);
        let between = between.map_or(0.0, |machine| {
            let (of_machine, ranks) = (f64::from(machine.ranks), f64::from(plan.rank.ranks));
            let total = collective.total_bytes(plan) as f64;
            let share = of_machine / ranks;
            let bytes = match collective.kind {
                // Each rank of a machine sends what ranks of others own: their owners add it up in order, so nothing is added before.
                CollectiveKind::Exchange => of_machine * total * (1.0 - share),
                // What others own enters a machine once.
                CollectiveKind::Gather => total * (1.0 - share),
            };
            bytes / machine.bandwidth
        });
        link.latency_seconds + inside.max(between)
    }
}
