//! What all ranks must have alike before a run starts: model, options, device and plan.

use super::{Heard, Ranks, out_of_step};
use crate::{TrainError, Trainer};
use serde::{Deserialize, Serialize};
use storm_device::PlanDevice;
use storm_plan::{shared_digest, sums_digest};
use storm_ranks::RankError;

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Alike {
    /// Digest of all that its model and its options say.
    model: String,
    /// As a checkpoint records it.
    device: String,
    /// Digest of what the plans of all ranks must have in common.
    plan: u64,
    /// How many ranks a machine has, and a digest of the sums that ranks of one number in their machines exchange.
    machine: u32,
    sums: u64,
}

impl Alike {
    fn of<D: PlanDevice>(trainer: &Trainer<D>) -> Alike {
        let words = format!("{:?} {:?}", trainer.model(), trainer.options());
        Alike {
            model: blake3::hash(words.as_bytes()).to_hex().to_string(),
            device: trainer.device().identity(),
            plan: shared_digest(trainer.plan()),
            machine: trainer.plan().rank.machine,
            sums: sums_digest(trainer.plan()),
        }
    }
}

/// The first difference to the first rank.
fn compare(all: &[Alike]) -> Result<(), TrainError> {
    let Some((first, others)) = all.split_first() else { return Ok(()) };
    let refuse = |option, problem| Err(TrainError::Option { option, problem });
    for (rank, other) in (1..).zip(others) {
        if other.device != first.device {
            let (own, other) = (&first.device, &other.device);
            let problem = format!(
                "rank 0 computes on {own} and rank {rank} on {other}; use the same card and libraries for all ranks"
            );
            return refuse("device", problem);
        }
        if other.model != first.model {
            let problem = format!(
                "rank {rank} has another config of it than rank 0; a model in a directory must be the same on every machine"
            );
            return refuse("model", problem);
        }
        let peer = rank % first.machine.max(1) as usize;
        let differs = [(0, other.plan != first.plan), (peer, other.sums != all[peer].sums)];
        if let Some((peer, _)) = differs.into_iter().find(|(_, differs)| *differs) {
            let problem = format!(
                "that of rank {rank} does not fit that of rank {peer}; use the same storm on every machine"
            );
            return refuse("plan", problem);
        }
    }
    Ok(())
}

impl<D: PlanDevice> Trainer<D> {
    /// Makes sure that all ranks have alike what they must. If not, the error is the same on all.
    pub(super) fn compare_ranks(&self, ranks: &Ranks) -> Result<(), TrainError> {
        compare(&ranks.hear_all::<_, Alike>(&Ok(Alike::of(self)))?)
    }
}

impl Ranks {
    /// Any other rank that cannot compute lanes, instead of [`Trainer::follow`]: tells the first rank why. Returns the exit code.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn refuse(&self, reason: &str) -> Result<u8, RankError> {
        self.tell_refusal(reason);
        self.wait_for_end()
    }

    /// Tells all ranks why this one has nothing to compare.
    pub(super) fn tell_refusal(&self, reason: &str) {
        // The reason is the error on all, this one included.
        let _ = self.hear_all::<Alike, Alike>(&Err(reason.to_owned()));
    }

    /// Any other rank, after an error that all have: the first one says what it is, and ends the run.
    pub(super) fn wait_for_end(&self) -> Result<u8, RankError> {
        match self.hear()? {
            Heard::End(code) => Ok(code),
            Heard::Message(_) => Err(out_of_step()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let alike = || Alike {
            model: "m".to_owned(),
            device: "NVIDIA H200".to_owned(),
            plan: 7,
            machine: 3,
            sums: 9,
        };
        compare(&[]).expect("no ranks");
        compare(&[alike(), alike(), alike()]).expect("they are alike");
        let device = Alike { device: "NVIDIA H100".to_owned(), ..alike() };
        let model = Alike { model: "n".to_owned(), ..alike() };
        let plan = Alike { plan: 8, ..alike() };
        for (other, parts) in [
            (device, ["device: rank 0", "on NVIDIA H200 and rank 2 on NVIDIA H100"]),
            (model, ["model: rank 2", "the same on every machine"]),
            (plan, ["plan: that of rank 2", "the same storm"]),
        ] {
            let error = compare(&[alike(), alike(), other]).expect_err("they differ").to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        // Ranks 0 and 2 of machines of two exchange sums, and so do 1 and 3.
        let of = |sums: [u64; 4]| sums.map(|sums| Alike { machine: 2, sums, ..alike() });
        compare(&of([1, 2, 1, 2])).expect("their sums fit");
        let error = compare(&of([1, 2, 1, 1])).expect_err("they differ").to_string();
        assert!(error.contains("that of rank 3 does not fit that of rank 1"), "{error}");
    }
}
