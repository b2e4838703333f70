//! The store of a real `torchrun`.

use super::launchers::{find, run_worker};
use std::process::Command;

/// All ranks get the first one's messages, also after torchrun has started them again with the same store.
#[test]
fn ranks_meet_in_torchruns_store() {
    let Some(torchrun) = find("bin/torchrun") else { return };
    let mut command = Command::new(torchrun);
    command.args(["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--no-python"]);
    command.env("OMP_NUM_THREADS", "1");
    let outcome = run_worker(command, "rendezvous");
    outcome.assert_success();
    for rank in 0..2 {
        let line = format!("start 1 rank {rank} of 2 met");
        assert_eq!(outcome.count(&line), 1, "{}", outcome.text);
    }
}
