//! Memory and disk space that checkpoints take, and whether training continues while one is
//! written.

use super::request::{Answer, Request};
use crate::save_mode::SaveModeArg;
use crate::size::show;
use storm_plan::{Prediction, Tier};

/// Where device memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceMemory {
    /// On a card.
    Own,
    /// A part of host memory.
    OfHost,
}

/// How checkpoints are saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Saving {
    /// From a snapshot in host memory, while training continues.
    Background,
    /// Steps wait, because the plan leaves too little memory for a snapshot.
    NoRoom { left_bytes: u64 },
    /// Steps wait, because the machine refused the memory for a snapshot.
    Refused,
    /// Steps wait, as asked.
    Asked,
    /// Steps wait, because steps of a run that predicts change the state that jumps are undone to.
    Predicting,
    /// Steps wait while every rank writes what it owns.
    ByRanks,
}

impl Request {
    /// Maximum size of a checkpoint on disk. For a run that predicts, it includes the copies of weights that its phase
    /// needs.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.checkpoint_bytes.saturating_add(self.predict_saved_bytes)
    }

    /// How checkpoints are saved under a plan with this prediction.
    pub(crate) fn saving(&self, prediction: &Prediction) -> Saving {
        if self.predict_bytes > 0 {
            return Saving::Predicting;
        }
        match self.save_mode {
            SaveModeArg::Background => return Saving::Background,
            SaveModeArg::Pause => return Saving::Asked,
            SaveModeArg::Auto => {}
        }
        // A limit from the user covers the host's part alone. A detected one covers everything.
        let beside = match (self.device_memory, &self.ram.origin) {
            (DeviceMemory::OfHost, Some(_)) => prediction.peak_bytes[Tier::DEVICE],
            _ => 0,
        };
        let taken = prediction.peak_bytes[Tier::HOST]
            .saturating_add(beside)
            .saturating_add(self.beside_bytes);
        let left_bytes = self.ram.bytes.saturating_sub(taken);
        match left_bytes >= self.checkpoint_bytes {
            true => Saving::Background,
            false => Saving::NoRoom { left_bytes },
        }
    }

    /// Host memory that the planner may not use: for threads and tokens, and for the snapshot if
    /// `--save-mode background` is given.
    pub(crate) fn reserved_bytes(&self) -> u64 {
        let snapshot = match self.save_mode {
            SaveModeArg::Background => self.checkpoint_bytes,
            SaveModeArg::Auto | SaveModeArg::Pause => 0,
        };
        snapshot.saturating_add(self.beside_bytes)
    }
}

impl Saving {
    /// Host memory for the snapshot.
    pub(crate) fn snapshot_bytes(self, request: &Request) -> u64 {
        match self {
            Saving::Background => request.checkpoint_bytes,
            Saving::NoRoom { .. }
            | Saving::Refused
            | Saving::Asked
            | Saving::Predicting
            | Saving::ByRanks => 0,
        }
    }

    /// The mode in JSON.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Saving::Background => "background",
            Saving::NoRoom { .. }
            | Saving::Refused
            | Saving::Asked
            | Saving::Predicting
            | Saving::ByRanks => "pause",
        }
    }
}

/// What checkpoints take, in words.
pub(super) fn words(request: &Request, answer: &Answer) -> String {
    let bytes = show(request.checkpoint_bytes);
    let how = match request.saving(&answer.planned.prediction) {
        Saving::Background => {
            format!(
                "training continues while it is written, from a snapshot of {bytes} in host memory"
            )
        }
        Saving::NoRoom { left_bytes } => format!(
            "steps pause while it is written, because {} of host memory are left and a snapshot takes \
             {bytes}",
            show(left_bytes)
        ),
        Saving::Refused | Saving::Asked | Saving::ByRanks => {
            "steps pause while it is written".to_owned()
        }
        Saving::Predicting => {
            return format!(
                "Predictions take {} of host memory. A checkpoint takes {bytes} of disk, and up to {} with the copies that \
                 its phase needs; steps pause while it is written.",
                show(request.predict_bytes),
                show(request.disk_bytes())
            );
        }
    };
    let by_ranks = match request.rank.is_shared() && request.save_mode != SaveModeArg::Background {
        true => "if ranks share its folder, each writes what it owns while steps pause; if not, ",
        false => "",
    };
    format!("A checkpoint takes {bytes} of disk; {by_ranks}{how}.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_limits::Limit;
    use storm_model::preset;
    use storm_plan::{Budget, Forced, HardwareProfile, PerQueue};
    use storm_train::{Precision, StepSize, TrainOptions};

    fn request(save_mode: SaveModeArg, ram: Limit, device_memory: DeviceMemory) -> Request {
        Request {
            model: "gpt2".to_owned(),
            config: preset("gpt2").expect("a preset").into(),
            options: TrainOptions::new(1, 64, Precision::F32),
            step: StepSize::MicroBatches(1),
            rank: storm_plan::RankPlace::default(),
            profile: HardwareProfile::builtin("reference").expect("built in"),
            vram: Limit { bytes: 1000, origin: None },
            ram,
            disk: None,
            device_memory,
            forced: Forced::default(),
            forced_words: String::new(),
            save_mode,
            checkpoint_bytes: 100,
            beside_bytes: 0,
            predict_bytes: 0,
            predict_saved_bytes: 0,
        }
    }

    /// Host memory of predictions is no part of a checkpoint, only what is saved of it.
    #[test]
    fn a_checkpoint_has_copies_and_no_buffers() {
        let limit = Limit { bytes: 900, origin: None };
        let plain = request(SaveModeArg::Auto, limit, DeviceMemory::Own);
        let request = Request { predict_bytes: 700, predict_saved_bytes: 30, ..plain };
        assert_eq!(request.disk_bytes(), 130);
    }

    #[test]
    fn a_snapshot_takes_what_the_plan_leaves() {
        let prediction = |ram_peak_bytes| Prediction {
            peak_bytes: Budget::new(500, ram_peak_bytes),
            step_seconds: 1.0,
            busy: PerQueue::default(),
            recompute_fraction: 0.0,
            recompute_flops: 0.0,
            copied_bytes: PerQueue::default(),
        };
        let given = |bytes| Limit { bytes, origin: None };
        let found = |bytes| Limit { bytes, origin: Some("found".to_owned()) };
        let check = |request: Request, peak, expected| {
            assert_eq!(request.saving(&prediction(peak)), expected);
        };
        let auto = |ram, device| request(SaveModeArg::Auto, ram, device);
        check(auto(given(300), DeviceMemory::Own), 200, Saving::Background);
        check(auto(given(300), DeviceMemory::Own), 201, Saving::NoRoom { left_bytes: 99 });
        check(auto(given(300), DeviceMemory::OfHost), 200, Saving::Background);
        check(auto(found(300), DeviceMemory::OfHost), 200, Saving::NoRoom { left_bytes: 0 });
        check(auto(found(800), DeviceMemory::OfHost), 200, Saving::Background);
        let pause = request(SaveModeArg::Pause, given(900), DeviceMemory::Own);
        check(pause, 0, Saving::Asked);
        let forced = request(SaveModeArg::Background, given(50), DeviceMemory::Own);
        assert_eq!((forced.reserved_bytes(), forced.budget()[Tier::HOST]), (100, 0));
        let busy = Request { beside_bytes: 120, ..auto(given(300), DeviceMemory::OfHost) };
        assert_eq!((busy.reserved_bytes(), busy.budget()[Tier::HOST]), (120, 180));
        check(busy, 100, Saving::NoRoom { left_bytes: 80 });
        check(forced, 50, Saving::Background);
    }
}
