//! Processes with the variables that Slurm sets, on one machine. No launcher ends them.

use super::launchers::worker_arguments;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

const RANKS: u32 = 4;

fn start(rank: u32, port: u16, victim: u32) -> Child {
    let rank = rank.to_string();
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    worker_arguments(&mut command, &format!("watch {victim}"));
    command.env("SLURM_JOB_ID", "4711").env("SLURM_STEP_ID", "0").env("SLURM_NODEID", "0");
    command.env("SLURM_PROCID", &rank).env("SLURM_LOCALID", &rank);
    command.env("SLURM_STEP_NUM_TASKS", "4").env("SLURM_STEP_TASKS_PER_NODE", "4");
    command.env("SLURM_STEP_NODELIST", "localhost").env("SLURMD_NODENAME", "localhost");
    command.env("STORM_RENDEZVOUS_PORT", port.to_string());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started")
}

/// Every other rank says which one is gone, and ends.
#[test]
fn every_rank_notices_one_that_was_killed() {
    for victim in [0, 2] {
        let port = TcpListener::bind("0.0.0.0:0")
            .and_then(|listener| listener.local_addr())
            .expect("a port")
            .port();
        let ranks: Vec<Child> = (0..RANKS).map(|rank| start(rank, port, victim)).collect();
        for (rank, child) in (0..).zip(ranks) {
            let output = child.wait_with_output().expect("waited for");
            let text = String::from_utf8_lossy(&output.stderr);
            if rank == victim {
                assert_eq!(output.status.code(), None, "{text}");
                continue;
            }
            let line = format!(
                "storm: rank {rank}: rank {victim} has ended before the run did, so this rank ends too"
            );
            assert_eq!(output.status.code(), Some(1), "{text}");
            assert_eq!(text.lines().filter(|found| found.starts_with(&line)).count(), 1, "{text}");
        }
    }
}
