//! A disk that others fill while a run has its state there: the run ends with the commands that resume it, its checkpoints are
//! whole, and what is resumed without a disk is what it would have been.

use crate::made::Made;
use crate::outcome::{Call, Verdict};
use crate::shim::{ENOSPC, Injection, Kind, Shim};
use crate::stock::Stock;
use std::path::Path;

const LINE: &str = "train tiny.toml --json --name new --steps 4 --optimizer-state streamed --on-disk moments --disk scratch \
                    --disk-space 2MiB";
const NEEDS: [&str; 3] = ["tiny.toml", "data", "scratch/mine.txt"];

/// Runs with the scratch file written as the shim sees it, and says how.
fn run(shim: &Shim, folder: &Path, injection: Option<Injection>) -> (Verdict, String, u64) {
    let counts = folder.join("counts");
    let call = Call::of(LINE).env("STORM_SCRATCH", "direct");
    let outcome = shim.load(call, &counts, injection).run(folder);
    let written = Shim::counts(&counts).of(Kind::Positioned);
    std::fs::remove_file(&counts).expect("counts");
    (outcome.verdict, outcome.stderr, written)
}

#[test]
fn a_disk_that_is_full_during_a_run_ends_it_cleanly() {
    let (stock, shim) = (Stock::new(), Shim::new());
    let undisturbed = stock.copy(&NEEDS);
    let (verdict, stderr, writes) = run(&shim, undisturbed.path(), None);
    assert_eq!(verdict, Verdict::Success, "{stderr}");
    let expected = Made::at(&undisturbed.path().join("runs/new"));
    // In the middle of the run and at its last write.
    for at in [writes * 3 / 4, writes] {
        let folder = stock.copy(&NEEDS);
        let injection = Injection { kind: Kind::Positioned, at, fault: ENOSPC };
        let (verdict, stderr, _) = run(&shim, folder.path(), Some(injection));
        assert_eq!(verdict, Verdict::ErrorInWords(1), "{at} of {writes}: {stderr}");
        for words in [
            "the disk is full, although the space was allocated",
            "The last checkpoint is that of step ",
            "To resume from it:",
            "once there is room in scratch",
            "without a disk: ",
        ] {
            assert!(stderr.contains(words), "{at} of {writes}, {words}: {stderr}");
        }
        let command = stderr.lines().find(|line| line.contains("--no-disk")).expect("a command");
        let command = command.trim().strip_prefix("storm ").expect("a command of storm");
        let command = command.split("   ").next().expect("the command");
        let resumed = Call::of(command).succeed(folder.path());
        resumed.unwrap_or_else(|problem| panic!("{problem}"));
        let made = Made::at(&folder.path().join("runs/new"));
        assert_eq!(made.difference(&expected), None);
        let left = std::fs::read_dir(folder.path().join("scratch")).expect("a folder").count();
        assert_eq!(left, 1, "only what was there before");
    }
}
