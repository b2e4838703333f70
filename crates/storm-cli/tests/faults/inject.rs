//! Every system call of saving, resuming, packing and exporting fails once. The command ends with
//! an error message or succeeds anyway. When it is called again, all is as if nothing had failed.

use crate::campaign::{self, Case, attack};
use crate::made::Made;
use crate::outcome::{Call, Verdict};
use crate::random::Random;
use crate::shim::{
    EACCES, EAGAIN, EINTR, EIO, EMFILE, ENOLCK, ENOMEM, ENOSPC, EOPNOTSUPP, Fault, Injection, Kind,
    Shim,
};
use crate::stock::Stock;
use std::path::Path;

/// Cases of each scenario in the short campaign.
const SHORT_CASES: usize = 14;

/// A command, and how to call it again.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// Inputs that it needs from the stock.
    needs: &'static [&'static str],
    line: &'static str,
    again: &'static str,
    /// The folder that it writes, and another where it could leave files.
    makes: &'static str,
    beside: &'static str,
}

pub(crate) const SCENARIOS: [Scenario; 8] = [
    Scenario {
        name: "save",
        needs: &["tiny.toml", "data"],
        line: "train tiny.toml --json --name new --steps 3",
        again: "train tiny.toml --json --name new --steps 3 --resume",
        makes: "runs/new",
        beside: "runs",
    },
    Scenario {
        name: "resume",
        needs: &["tiny.toml", "data", "runs"],
        line: "train tiny.toml --json --name run --steps 4 --resume",
        again: "train tiny.toml --json --name run --steps 4 --resume",
        makes: "runs/run",
        beside: "runs",
    },
    Scenario {
        name: "save-with-scratch",
        needs: &["tiny.toml", "data", "scratch/mine.txt"],
        line: "train tiny.toml --json --name new --steps 3 --optimizer-state streamed --on-disk moments --disk scratch --disk-space 2MiB",
        again: "train tiny.toml --json --name new --steps 3 --optimizer-state streamed --on-disk moments --disk scratch --disk-space 2MiB --resume",
        makes: "runs/new",
        beside: "scratch",
    },
    Scenario {
        name: "pack",
        needs: &["text.txt"],
        line: "data pack text.txt --tokenizer bytes --threads 2 --shard-tokens 1024 --out out/new",
        again: "data pack text.txt --tokenizer bytes --threads 2 --shard-tokens 1024 --out out/new --overwrite",
        makes: "out/new",
        beside: "out",
    },
    Scenario {
        name: "pack-by-worker",
        needs: &["chat.jsonl", "text.txt", "tokenizer.json"],
        line: "data pack text.txt --tokenizer tokenizer.json --threads 2 --quiet --out out/new",
        again: "data pack text.txt --tokenizer tokenizer.json --threads 2 --quiet --out out/new --overwrite",
        makes: "out/new",
        beside: "out",
    },
    Scenario {
        name: "pack-images",
        needs: &["images"],
        line: "data pack images --codec lz4 --out out/new",
        again: "data pack images --codec lz4 --out out/new --overwrite",
        makes: "out/new",
        beside: "out",
    },
    Scenario {
        name: "export",
        needs: &["model"],
        line: "export model out/new --shard-size 8KiB",
        again: "export model out/new --shard-size 8KiB --replace",
        makes: "out/new",
        beside: "out",
    },
    Scenario {
        name: "export-replace",
        needs: &["model", "sharded"],
        line: "export model sharded --replace",
        again: "export model sharded --replace",
        makes: "sharded",
        beside: ".",
    },
];

impl Scenario {
    /// Without io_uring, whose reads and writes the shim does not see.
    fn call(&self) -> Call {
        Call::of(self.line).env("STORM_SCRATCH", "direct")
    }
}

/// How calls of a kind fail.
fn faults(kind: Kind) -> &'static [Fault] {
    match kind {
        Kind::Open => &[EACCES, EMFILE, EINTR],
        Kind::Read => &[EIO, EINTR, Fault::Short],
        Kind::Write | Kind::Positioned => &[EIO, ENOSPC, EINTR, Fault::Short],
        Kind::Sync | Kind::Truncate => &[EIO, ENOSPC],
        Kind::Rename | Kind::Mkdir => &[EACCES, ENOSPC],
        Kind::Unlink => &[EACCES, EIO],
        Kind::Map => &[ENOMEM],
        Kind::Thread | Kind::Spawn => &[EAGAIN],
        Kind::Stat => &[EACCES, EIO],
        Kind::Lock => &[ENOLCK, EINTR],
        Kind::Allocate => &[EIO, ENOSPC, EINTR, EOPNOTSUPP],
    }
}

/// A scenario, with its result when nothing fails.
pub(crate) struct Prepared<'a> {
    stock: &'a Stock,
    shim: &'a Shim,
    scenario: &'a Scenario,
    undisturbed: Made,
    calls: Vec<(Kind, u64)>,
}

impl<'a> Prepared<'a> {
    pub(crate) fn new(stock: &'a Stock, shim: &'a Shim, scenario: &'a Scenario) -> Prepared<'a> {
        let folder = stock.copy(scenario.needs);
        let counts = folder.path().join("counts");
        let call = shim.load(scenario.call(), &counts, None);
        call.succeed(folder.path()).unwrap_or_else(|problem| panic!("{problem}"));
        let counted = Shim::counts(&counts);
        let calls = Kind::ALL.into_iter().map(|kind| (kind, counted.of(kind))).collect();
        for kind in [Kind::Open, Kind::Read, Kind::Write, Kind::Sync, Kind::Rename, Kind::Mkdir] {
            assert!(counted.of(kind) > 0, "{}: the shim sees no {kind:?}", scenario.name);
        }
        let undisturbed = Made::at(&folder.path().join(scenario.makes));
        Prepared { stock, shim, scenario, undisturbed, calls }
    }

    /// Every call with every fault in `faults`. In the short campaign, only some of them.
    pub(crate) fn cases(
        &self,
        faults: fn(Kind) -> &'static [Fault],
        short: usize,
    ) -> Vec<Case<(&Self, Injection)>> {
        let mut all = Vec::new();
        for &(kind, count) in &self.calls {
            for &fault in faults(kind) {
                all.extend((1..=count).map(|at| Injection { kind, at, fault }));
            }
        }
        let name = |Injection { kind, at, fault }: &Injection| {
            format!("{}/{kind:?}/{}/{at}", self.scenario.name, fault.name())
        };
        let case = |injection| Case { name: name(&injection), what: (self, injection) };
        if campaign::is_whole() {
            return all.into_iter().map(case).collect();
        }
        // Draw kinds with few calls as often as kinds with many.
        let mut random = Random::new(campaign::seed());
        let mut drawn = Vec::new();
        while drawn.len() < short && !all.is_empty() {
            let kinds: Vec<Kind> = Kind::ALL
                .into_iter()
                .filter(|kind| all.iter().any(|of| of.kind == *kind))
                .collect();
            let kind = *random.pick(&kinds);
            let of_kind = |(_, of): &(usize, &Injection)| of.kind == kind;
            let places: Vec<usize> =
                all.iter().enumerate().filter(of_kind).map(|(at, _)| at).collect();
            drawn.push(case(all.swap_remove(*random.pick(&places))));
        }
        drawn
    }

    /// Runs the command with the fault and again without. Returns how the first run ended.
    pub(crate) fn check(&self, injection: Injection) -> Result<Verdict, String> {
        let folder = self.stock.copy(self.scenario.needs);
        let (path, counts) = (folder.path(), folder.path().join("counts"));
        let outcome = self.shim.load(self.scenario.call(), &counts, Some(injection)).run(path);
        let was_injected = Shim::counts(&counts).was_injected();
        std::fs::remove_file(&counts).expect("counts");
        let was_killed = outcome.verdict == Verdict::Killed && injection.fault == Fault::Kill;
        if !outcome.verdict.is_fine() && !was_killed {
            return Err(outcome.to_string());
        }
        if !was_injected && outcome.verdict != Verdict::Success {
            return Err(format!("it fails although nothing was injected: {outcome}"));
        }
        let difference = || self.difference(path);
        if outcome.verdict == Verdict::Success {
            return match difference() {
                None => Ok(outcome.verdict),
                Some(difference) => Err(format!("it passes for success, but {difference}")),
            };
        }
        let again = Call::of(self.scenario.again).succeed(path);
        again.map_err(|problem| format!("after {outcome}\n    {problem}"))?;
        match difference() {
            None => Ok(outcome.verdict),
            Some(difference) => Err(format!("called again after {outcome}, {difference}")),
        }
    }

    /// What differs from the undisturbed command, or was left beside its result.
    fn difference(&self, path: &Path) -> Option<String> {
        let made = Made::at(&path.join(self.scenario.makes));
        made.difference(&self.undisturbed).or_else(|| {
            let known = |name: &str| {
                let is_of = |need: &&str| need.starts_with(name) || need.ends_with(name);
                let of_stock = self.scenario.needs.iter().any(is_of);
                of_stock || self.scenario.makes.ends_with(name)
            };
            let beside = std::fs::read_dir(path.join(self.scenario.beside)).into_iter().flatten();
            let mut names = beside.flatten().map(|entry| entry.file_name().display().to_string());
            names.find(|name| !known(name)).map(|name| format!("{name} is left over"))
        })
    }
}

#[test]
fn failing_calls_lose_nothing() {
    let (stock, shim) = (Stock::new(), Shim::new());
    let prepared = SCENARIOS.each_ref().map(|scenario| Prepared::new(&stock, &shim, scenario));
    let cases: Vec<_> = prepared.iter().flat_map(|of| of.cases(faults, SHORT_CASES)).collect();
    attack("failing_calls_lose_nothing", cases, |(of, injection)| of.check(*injection));
}
