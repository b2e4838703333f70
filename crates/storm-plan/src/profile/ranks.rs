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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Moved, RankPlace};
    use crate::plan::{Operand, Value, ValueId};
    use crate::{TensorKind, simulate};
    use storm_graph::TensorClass;

    /// Four ranks, and a collective of a piece of 100 bytes for each of these owners.
    fn of_owners(kind: CollectiveKind, owners: [u32; 4]) -> (Plan, Collective) {
        let mut plan = Plan { rank: RankPlace { rank: 0, ranks: 4 }, ..Plan::default() };
        plan.links = plan.links.and_ranks();
        let mut pieces = Vec::new();
        for (number, owner) in owners.into_iter().enumerate() {
            let (name, class) = (format!("w{number}"), TensorClass::Gradient);
            plan.values.push(Value { name, size_bytes: 100, class });
            let sent = Some(Operand { value: ValueId(number as u32), offset: 256 * number });
            pieces.push(Moved { owner, sent, received: Vec::new() });
        }
        (plan, Collective { kind, pieces, moves: TensorKind::Gradients })
    }

    fn seconds(kind: CollectiveKind, owners: [u32; 4], machines: Option<MachineLink>) -> f64 {
        let (plan, collective) = of_owners(kind, owners);
        let link = RankLink { bandwidth: 100.0, latency_seconds: 0.5, share: 0.0, machines };
        let reference = HardwareProfile::builtin("reference").unwrap();
        let profile = HardwareProfile { ranks: Some(link), ..reference };
        profile.collective_seconds(&plan, &collective)
    }

    #[test]
    fn the_busiest_rank_decides() {
        let (exchange, gather) = (CollectiveKind::Exchange, CollectiveKind::Gather);
        assert_eq!(seconds(exchange, [0, 1, 2, 3], None), 3.5);
        assert_eq!(seconds(gather, [0, 1, 2, 3], None), 3.5);
        // One rank receives everything from three others, or sends everything.
        assert_eq!(seconds(exchange, [2; 4], None), 12.5);
        assert_eq!(seconds(gather, [2; 4], None), 4.5);
    }

    #[test]
    fn a_machine_sends_what_others_own() {
        let machines = Some(MachineLink { ranks: 2, bandwidth: 10.0 });
        // Two ranks send half of 400 bytes each; half of 400 bytes arrives once.
        assert_eq!(seconds(CollectiveKind::Exchange, [0, 1, 2, 3], machines), 40.5);
        assert_eq!(seconds(CollectiveKind::Gather, [0, 1, 2, 3], machines), 20.5);
        let one = Some(MachineLink { ranks: 4, bandwidth: 10.0 });
        assert_eq!(seconds(CollectiveKind::Exchange, [0, 1, 2, 3], one), 3.5);
    }

    #[test]
    fn an_unknown_link_takes_no_time() {
        let (plan, collective) = of_owners(CollectiveKind::Gather, [0, 1, 2, 3]);
        let profile = HardwareProfile::builtin("reference").unwrap();
        assert_eq!(profile.collective_seconds(&plan, &collective), 0.0);
        assert_eq!(simulate(&plan, &profile).step_seconds, 0.0);
    }
}
