//! Ranks that sockets connect, as threads of this process and as processes that `torchrun` starts.

use super::launchers::{find, run_worker};
use super::reference::{Case, expected, run};
use std::process::Command;
use std::thread;
use std::time::Duration;
use storm_ranks::rendezvous::Rendezvous;
use storm_ranks::{Engine, Launch, RankError, Sockets, in_process};

const LONG: Duration = Duration::from_secs(300);

/// Runs `body` on ranks that are connected, and returns what each of them makes of it.
fn on_ranks<T: Send>(ranks: u32, body: impl Fn(Sockets) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..)
            .zip(in_process::connect(ranks))
            .map(|(rank, mut meeting)| {
                scope.spawn(move || {
                    let launch = Launch { rank, ranks, ..Launch::ALONE };
                    let mut rendezvous = Rendezvous::Engine(&mut meeting);
                    let sockets = Sockets::connect(&launch, &mut rendezvous, LONG);
                    body(sockets.expect("connected"))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

#[test]
fn collectives_are_those_of_threads() {
    for ranks in 1..=5 {
        for seed in 0..4 {
            let case = Case { seed, ranks, count: 60, bytes_max: 3000 };
            let received = on_ranks(ranks, |mut sockets| {
                let received = run(&mut sockets, case).expect("no failure");
                sockets.finish().expect("all are there");
                received
            });
            assert!(received == expected(case), "{ranks} ranks, seed {seed}");
        }
    }
}

/// Larger than what a system keeps of a connection that is not read.
#[test]
fn long_messages_do_not_block_each_other() {
    let case = Case { seed: 7, ranks: 3, count: 6, bytes_max: 8 << 20 };
    let received = on_ranks(3, |mut sockets| run(&mut sockets, case).expect("no failure"));
    assert!(received == expected(case));
}

/// Whatever goes wrong on one rank, no other one waits forever or takes what it received for good.
#[test]
fn a_failure_reaches_all_ranks() {
    for lost in 0..3 {
        let left = on_ranks(3, |mut sockets| match sockets.place().rank == lost {
            true => Ok(()),
            false => sockets.barrier().and_then(|()| sockets.barrier()),
        });
        for (rank, left) in (0..3).zip(left) {
            let is_expected = match rank == lost {
                true => left == Ok(()),
                // Only the first rank has a connection to all.
                false => matches!(left, Err(RankError::Gone { rank }) if rank == lost || rank == 0),
            };
            assert!(is_expected, "rank {rank} without rank {lost}: {left:?}");
        }
    }
    let order = on_ranks(3, |mut sockets| {
        let result = match sockets.place().rank {
            0 => sockets.barrier(),
            _ => sockets.agree(&mut [1]),
        };
        // It stays failed.
        assert_eq!(result.is_err(), sockets.barrier().is_err());
        result
    });
    assert!(matches!(order[0], Err(RankError::OutOfStep { other: 1, .. })), "{order:?}");
    assert!(order[1..].iter().all(Result::is_err), "{order:?}");
    let length = on_ranks(3, |mut sockets| {
        let mut bytes = vec![0; 4 + sockets.place().rank as usize / 2];
        sockets.broadcast(0, &mut bytes).and_then(|()| sockets.barrier())
    });
    assert!(
        matches!(length[2], Err(RankError::Length { from: 0, sent: 4, expected: 5, .. })),
        "{length:?}"
    );
    assert!(
        matches!(&length[1], Err(RankError::Aborted { rank: 2, reason }) if reason.contains("4 bytes where 5")),
        "{length:?}"
    );
}

/// The first rank's count of collectives is part of every message: one that is left out is noticed.
#[test]
fn a_rank_that_is_behind_is_noticed() {
    let results = on_ranks(2, |mut sockets| match sockets.place().rank {
        0 => sockets.broadcast(0, &mut [1; 8]).and_then(|()| sockets.agree(&mut [1])),
        _ => sockets.agree(&mut [2]),
    });
    assert!(results.iter().all(Result::is_err), "{results:?}");
}

#[test]
fn torchruns_ranks_are_connected_and_an_abort_ends_them() {
    let Some(torchrun) = find("bin/torchrun") else { return };
    let start = |task| {
        let mut command = Command::new(&torchrun);
        command.args(["--standalone", "--nproc-per-node=3", "--no-python"]);
        command.env("OMP_NUM_THREADS", "1");
        run_worker(command, task)
    };
    let outcome = start("sockets");
    outcome.assert_success();
    assert_eq!(outcome.count("agrees"), 3, "{}", outcome.text);
    let outcome = start("abort");
    outcome.assert_failure("rank 1: it has had enough. All ranks end");
    assert_eq!(outcome.count("a rank continued"), 0, "{}", outcome.text);
}
