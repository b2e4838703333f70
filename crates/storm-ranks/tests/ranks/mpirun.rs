//! Both MPIs, by each of the three binary interfaces.

use super::launchers::all_mpis;

/// With any number of ranks, processes get what threads get.
#[test]
fn processes_receive_what_threads_do() {
    for mpi in all_mpis() {
        for ranks in [1, 2, 4] {
            let outcome = mpi.run(ranks, &format!("collectives {}", 100 * ranks));
            outcome.assert_success();
            for rank in 0..ranks {
                let line = format!("rank {rank} of {ranks} agrees, {}", mpi.version);
                assert_eq!(outcome.count(&line), 1, "{} {line}\n{}", mpi.name, outcome.text);
            }
        }
    }
}

/// A rank that is killed ends all, and somebody says so: the launcher, or the ranks themselves if they are faster.
#[test]
fn a_killed_rank_ends_all() {
    for mpi in all_mpis() {
        for (ranks, victim, step) in [(2, 1, 0), (4, 0, 5), (4, 2, 3)] {
            let outcome = mpi.run(ranks, &format!("kill {victim} {step}"));
            assert!(!outcome.status.success(), "{}\n{}", mpi.name, outcome.text);
            let said = ["signal 9", "signal: 9", "SIGNAL: 9", "has ended before the run did"];
            assert!(
                said.iter().any(|text| outcome.count(text) > 0),
                "{}\n{}",
                mpi.name,
                outcome.text
            );
        }
    }
}

/// A rank that returns early would leave the others waiting.
#[test]
fn a_rank_that_leaves_ends_all() {
    for mpi in all_mpis() {
        let outcome = mpi.run(2, "leave");
        outcome.assert_failure("rank 1: it stopped in the middle of a run");
        assert_eq!(outcome.count("a rank went on"), 0, "{}", outcome.text);
    }
}

/// Ranks that do not agree on what comes next end with the reason, and mix up no data.
#[test]
fn ranks_out_of_step_end() {
    for mpi in all_mpis() {
        mpi.run(2, "order").assert_failure("is at another collective than this rank's");
        mpi.run(3, "length").assert_failure("rank 0 sent 10 bytes where 20 were expected");
    }
}

/// A library of another MPI than the launcher's sees one rank only: such ranks would train alone, each by itself.
#[test]
fn a_library_that_sees_other_ranks_is_refused() {
    let all = all_mpis();
    let [standard, _, open_mpi] = all.as_slice() else { return };
    let wrong = standard.run_by(open_mpi, "libmpi.so.40", 2, "collectives 1");
    wrong.assert_failure("Launcher and library must belong together");
    assert_eq!(wrong.count("agrees"), 0, "{}", wrong.text);
    // MPICH notices it by itself, and ends the process.
    for library in ["libmpi_abi.so.1", "libmpi.so.12"] {
        let wrong = open_mpi.run_by(standard, library, 2, "collectives 1");
        wrong.assert_failure("PMI");
        assert_eq!(wrong.count("agrees"), 0, "{}", wrong.text);
    }
}

/// More than 2 GiB, in messages that MPI can count. Takes 9 GB of memory, so only with STORM_LONG_TESTS.
#[test]
fn large_messages_arrive() {
    if std::env::var_os("STORM_LONG_TESTS").is_none() {
        return;
    }
    for mpi in all_mpis() {
        let outcome = mpi.run(2, "large");
        outcome.assert_success();
        assert_eq!(outcome.count("received 2147495993 bytes"), 2, "{}", outcome.text);
    }
}
