//! The link between the ranks of a step.

use super::{HardwareProfile, ProfileError};
use crate::collective::{CollectiveKind, RankPlace, busiest_bytes};
use serde::{Deserialize, Serialize};

/// The connection of a rank to the others. Sending and receiving happen at once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankLink {
    /// The number of ranks that the figures were measured with, or are meant for.
    pub ranks: u32,
    /// Bytes per second that a rank sends while it receives as much, with all ranks active.
    pub bandwidth: f64,
    /// Latency of each collective.
    pub latency_seconds: f64,
    /// Share of the multiprocessors that collectives take from kernels while they run, below 1.
    #[serde(default)]
    pub share: f64,
    /// How ranks are spread over machines. `None` if one machine has all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machines: Option<MachineLink>,
}

/// The network between machines, which all have the same number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineLink {
    /// How many ranks a machine has.
    pub ranks: u32,
    /// Bytes per second that a machine sends while it receives as much.
    pub bandwidth: f64,
}

impl RankLink {
    /// Factor by which kernels slow down because collectives take some of the multiprocessors. Both
    /// times are those without the other. The overlap is unknown before a simulation, so this
    /// assumes the maximum.
    pub(crate) fn slowdown(&self, computing_seconds: f64, moving_seconds: f64) -> f64 {
        let beside = moving_seconds.min(computing_seconds);
        match self.share > 0.0 && beside > 0.0 {
            true => 1.0 + self.share / (1.0 - self.share) * beside / computing_seconds,
            false => 1.0,
        }
    }

    /// Time of a gather through relays: owners send to one rank of every other machine, then ranks
    /// of a machine send each other what they have.
    fn relayed_gather_seconds(&self, place: RankPlace, owned: &[usize]) -> f64 {
        let relay = place.relay.max(1) as usize;
        let total: usize = owned.iter().sum();
        // By local rank: the bytes that ranks with this number own, and the most that one of them
        // lacks.
        let of_number = |number: usize| owned.iter().skip(number).step_by(relay).copied();
        let sums: Vec<usize> = (0..relay).map(|number| of_number(number).sum()).collect();
        let lacks = |number: usize| sums[number] - of_number(number).min().unwrap_or(0);
        let most_lacked = (0..relay).map(lacks).max().unwrap_or(0) as f64;
        let least_had = sums.iter().copied().min().unwrap_or(0);
        let network = self.machines.map_or(0.0, |machine| {
            let elsewhere = |own: &[usize]| total - own.iter().sum::<usize>();
            let received = owned.chunks(relay).map(elsewhere).max().unwrap_or(0);
            received as f64 / machine.bandwidth
        });
        let between = (most_lacked / self.bandwidth).max(network);
        let inside = (total - least_had) as f64 / self.bandwidth;
        2.0 * self.latency_seconds + between + inside
    }

    /// Refuses impossible figures.
    pub(super) fn check(&self) -> Result<(), ProfileError> {
        let refuse = |field, value| Err(ProfileError::Number { field, value });
        let is_rate = |value: f64| value > 0.0 && value.is_finite();
        if !is_rate(self.bandwidth) {
            return refuse("ranks.bandwidth", self.bandwidth);
        }
        if !(self.latency_seconds >= 0.0 && self.latency_seconds.is_finite()) {
            return refuse("ranks.latency_seconds", self.latency_seconds);
        }
        if !(0.0..1.0).contains(&self.share) {
            return refuse("ranks.share", self.share);
        }
        if self.ranks < 2 {
            return refuse("ranks.ranks", f64::from(self.ranks));
        }
        let Some(machines) = &self.machines else { return Ok(()) };
        if machines.ranks == 0 {
            return refuse("ranks.machines.ranks", 0.0);
        }
        match is_rate(machines.bandwidth) {
            true => Ok(()),
            false => refuse("ranks.machines.bandwidth", machines.bandwidth),
        }
    }
}

impl HardwareProfile {
    /// Time of a collective on the slowest rank. `owned` has the bytes of each rank's pieces. For
    /// sums, it has only pieces that this rank takes part in.
    pub(crate) fn collective_seconds(
        &self,
        kind: CollectiveKind,
        place: RankPlace,
        owned: &[usize],
    ) -> f64 {
        let Some(link) = &self.ranks else { return 0.0 };
        if kind == CollectiveKind::Gather && place.has_relays() {
            return link.relayed_gather_seconds(place, owned);
        }
        let inside = busiest_bytes(kind, place, owned) as f64 / link.bandwidth;
        let ranks = owned.len() as f64;
        let between = link.machines.filter(|machine| f64::from(machine.ranks) < ranks);
        let between = between.map_or(0.0, |machine| {
            let of_machine = f64::from(machine.ranks);
            let total = owned.iter().sum::<usize>() as f64;
            let share = of_machine / ranks;
            let bytes = match kind {
                // A machine's own lanes stay on it.
                CollectiveKind::Exchange if place.has_levels() => 0.0,
                // Each rank of a machine sends what ranks on others own, or its share of sums, or
                // receives that in a gather.
                _ => of_machine * total * (1.0 - share),
            };
            bytes / machine.bandwidth
        });
        link.latency_seconds + inside.max(between)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Collective, Moved};
    use crate::plan::{Operand, Plan, Value, ValueId};
    use crate::{TensorKind, simulate};
    use storm_graph::TensorClass;

    /// Four ranks, and a collective with a piece of 100 bytes for each of these owners.
    fn of_owners(kind: CollectiveKind, owners: [u32; 4]) -> (Plan, Collective) {
        let mut plan = Plan { rank: RankPlace::flat(0, 4), ..Plan::default() };
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
        seconds_at(RankPlace::flat(0, 4), kind, owners, machines)
    }

    fn seconds_at(
        place: RankPlace,
        kind: CollectiveKind,
        owners: [u32; 4],
        machines: Option<MachineLink>,
    ) -> f64 {
        let (plan, collective) = of_owners(kind, owners);
        let link =
            RankLink { ranks: 4, bandwidth: 100.0, latency_seconds: 0.5, share: 0.0, machines };
        let reference = HardwareProfile::builtin("reference").unwrap();
        let profile = HardwareProfile { ranks: Some(link), ..reference };
        profile.collective_seconds(kind, place, &collective.owned_bytes(&plan))
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
        // Two ranks send half of 400 bytes each. Two ranks receive half of 400 bytes each.
        assert_eq!(seconds(CollectiveKind::Exchange, [0, 1, 2, 3], machines), 40.5);
        assert_eq!(seconds(CollectiveKind::Gather, [0, 1, 2, 3], machines), 40.5);
        let one = Some(MachineLink { ranks: 4, bandwidth: 10.0 });
        assert_eq!(seconds(CollectiveKind::Exchange, [0, 1, 2, 3], one), 3.5);
    }

    #[test]
    fn on_two_levels_only_sums_leave_a_machine() {
        let machines = Some(MachineLink { ranks: 2, bandwidth: 10.0 });
        let place = RankPlace::on_machines(0, 4, 2);
        let (lanes, sums) = (CollectiveKind::Exchange, CollectiveKind::ExchangeSums);
        // A rank sends half of its 400 bytes to the other rank of its machine.
        assert_eq!(seconds_at(place, lanes, [0, 1, 2, 3], machines), 2.5);
        // Each of the two ranks of a machine sends 200 bytes to its peer on the other.
        assert_eq!(seconds_at(place, sums, [0, 0, 2, 2], machines), 40.5);
        assert_eq!(seconds_at(place, sums, [0, 0, 2, 2], None), 2.5);
    }

    #[test]
    fn through_relays_a_piece_reaches_a_machine_once() {
        let machines = Some(MachineLink { ranks: 2, bandwidth: 10.0 });
        let place = RankPlace { relay: 2, ..RankPlace::flat(0, 4) };
        let gather = CollectiveKind::Gather;
        // A machine receives 200 bytes, then each of its ranks sends the other 200. Both rounds
        // have a latency.
        assert_eq!(seconds_at(place, gather, [0, 1, 2, 3], machines), 1.0 + 20.0 + 2.0);
        // The other machine receives all 400 bytes, and one rank of each machine sends the other 400.
        assert_eq!(seconds_at(place, gather, [0; 4], machines), 1.0 + 40.0 + 4.0);
        // Each rank sends 100 bytes to its peer, then 200 inside its machine.
        assert_eq!(seconds_at(place, gather, [0, 1, 2, 3], None), 1.0 + 1.0 + 2.0);
    }

    #[test]
    fn an_unknown_link_takes_no_time() {
        let (plan, collective) = of_owners(CollectiveKind::Gather, [0, 1, 2, 3]);
        let profile = HardwareProfile::builtin("reference").unwrap();
        let owned = collective.owned_bytes(&plan);
        assert_eq!(profile.collective_seconds(collective.kind, plan.rank, &owned), 0.0);
        assert_eq!(simulate(&plan, &profile).step_seconds, 0.0);
    }
}
