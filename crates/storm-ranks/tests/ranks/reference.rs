//! Random collectives, and what threads of one process get from them.

use std::ops::Range;
use storm_graph::random::Random;
use storm_ranks::{Engine, Place, RankError, in_process};

/// Where a run of collectives begins, and of how many bytes parts are at most.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    pub(crate) seed: u64,
    pub(crate) ranks: u32,
    pub(crate) count: u32,
    pub(crate) bytes_max: usize,
}

/// Runs random collectives as one rank, and returns all that it received. What a rank sends depends on the seed, the
/// collective and both ranks alone, so each rank knows how much to expect.
pub(crate) fn run(engine: &mut dyn Engine, case: Case) -> Result<Vec<Vec<u8>>, RankError> {
    let Place { rank, ranks } = engine.place();
    let mut received = Vec::new();
    for step in 0..case.count {
        let mut shared = Random(case.seed * 1000 + u64::from(step));
        let kind = shared.below(5);
        let is_sparse = shared.chance(30);
        let sizes: Vec<Vec<usize>> = (0..ranks)
            .map(|_| (0..ranks).map(|_| size(&mut shared, case.bytes_max, is_sparse)).collect())
            .collect();
        let mut own = Random(case.seed * 1_000_003 + u64::from(step * ranks + rank) + 7);
        match kind {
            0 => {
                let (send, sends) = lay_out(sizes[rank as usize].iter().copied(), &mut own);
                let (mut receive, receives) =
                    lay_out(sizes.iter().map(|to| to[rank as usize]), &mut own);
                receive.fill(0xee);
                engine.exchange(&send, &sends, &mut receive, &receives)?;
                received.extend(receives.into_iter().map(|range| receive[range].to_vec()));
            }
            1 => {
                let mut layout = Random(case.seed + u64::from(step));
                let (mut all, ranges) = lay_out(sizes.iter().map(|to| to[0]), &mut layout);
                all.fill(0xee);
                let piece = bytes(sizes[rank as usize][0], &mut own);
                engine.gather(&piece, &mut all, &ranges)?;
                // What lies between the pieces is left alone.
                received.push(all);
            }
            2 => {
                let from = shared.below(ranks as usize) as u32;
                let mut message = bytes(sizes[0][0], &mut own);
                engine.broadcast(from, &mut message)?;
                received.push(message);
            }
            3 => {
                let mut numbers: Vec<i64> =
                    (0..sizes[0][0] % 20).map(|_| own.bits() as i64).collect();
                engine.agree(&mut numbers)?;
                received.push(numbers.iter().flat_map(|number| number.to_le_bytes()).collect());
            }
            _ => engine.barrier()?,
        }
    }
    Ok(received)
}

/// What every rank receives, by threads of this process.
pub(crate) fn expected(case: Case) -> Vec<Vec<Vec<u8>>> {
    let engines = in_process::connect(case.ranks).into_iter();
    let threads: Vec<_> = engines
        .map(|mut engine| std::thread::spawn(move || run(&mut engine, case).expect("no failure")))
        .collect();
    threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
}

fn size(random: &mut Random, max: usize, is_sparse: bool) -> usize {
    match is_sparse && random.coin() {
        true => 0,
        false => random.below(max + 1),
    }
}

fn bytes(count: usize, random: &mut Random) -> Vec<u8> {
    (0..count).map(|_| random.bits() as u8).collect()
}

/// Random bytes with ranges of these sizes at random places, in random order.
fn lay_out(
    sizes: impl Iterator<Item = usize>,
    random: &mut Random,
) -> (Vec<u8>, Vec<Range<usize>>) {
    let sizes: Vec<usize> = sizes.collect();
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at + 1));
    }
    let mut ranges = vec![0..0; sizes.len()];
    let mut end = random.below(10);
    for index in order {
        ranges[index] = end..end + sizes[index];
        end += sizes[index] + random.below(10);
    }
    (bytes(end, random), ranges)
}

/// The reference against what the trait says, by plain indexing.
#[test]
fn threads_receive_what_was_sent() {
    let mut engines = in_process::connect(3);
    let ranges = [0..1, 3..5, 2..3];
    let threads: Vec<_> = engines
        .drain(..)
        .map(|mut engine| {
            let ranges = ranges.clone();
            std::thread::spawn(move || {
                let rank = engine.place().rank as u8;
                // To rank 0 one byte, to rank 1 two, to rank 2 three: rank, receiver, position.
                let send = [
                    rank * 16,
                    rank * 16 + 1,
                    rank * 16 + 1,
                    rank * 16 + 2,
                    rank * 16 + 2,
                    rank * 16 + 2,
                ];
                let count = rank as usize + 1;
                let receives: Vec<_> =
                    (0..3).map(|from| from * count..(from + 1) * count).collect();
                let mut receive = vec![0; 3 * count];
                engine.exchange(&send, &[0..1, 1..3, 3..6], &mut receive, &receives).unwrap();
                let from =
                    [[rank], [16 + rank], [32 + rank]].map(|byte| byte.repeat(count)).concat();
                assert_eq!(receive, from);
                let mut all = [9; 6];
                engine.gather(&vec![rank; ranges[rank as usize].len()], &mut all, &ranges).unwrap();
                assert_eq!(all, [0, 9, 2, 1, 1, 9]);
                let mut numbers = [i64::from(rank), -i64::from(rank), i64::from(rank == 1)];
                engine.agree(&mut numbers).unwrap();
                assert_eq!(numbers, [2, 0, 1]);
                let mut message = [rank; 2];
                engine.broadcast(2, &mut message).unwrap();
                assert_eq!(message, [2, 2]);
                engine.barrier().unwrap();
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Runs one collective per rank in threads, and what each got.
fn outcomes(
    run: impl Fn(&mut dyn Engine) -> Result<(), RankError> + Send + Sync,
) -> Vec<Result<(), RankError>> {
    std::thread::scope(|scope| {
        let run = &run;
        let engines = in_process::connect(3).into_iter();
        let threads: Vec<_> =
            engines.map(|mut engine| scope.spawn(move || run(&mut engine))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_hears_of_a_failure() {
    let aborted = outcomes(|engine| {
        if engine.place().rank == 1 {
            engine.abort("no reason");
        }
        engine.barrier()
    });
    let error = RankError::Aborted { rank: 1, reason: "no reason".to_owned() };
    assert_eq!(aborted, vec![Err(error); 3]);
    let left = outcomes(|engine| match engine.place().rank {
        2 => Ok(()),
        _ => engine.barrier(),
    });
    assert_eq!(left, [Err(RankError::Gone { rank: 2 }), Err(RankError::Gone { rank: 2 }), Ok(())]);
    let other = outcomes(|engine| match engine.place().rank {
        0 => engine.barrier(),
        _ => engine.agree(&mut [1]),
    });
    assert!(
        other.iter().all(|result| matches!(result, Err(RankError::OutOfStep { .. }))),
        "{other:?}"
    );
    let length =
        outcomes(|engine| engine.broadcast(0, &mut vec![0; 4 + engine.place().rank as usize / 2]));
    assert!(
        matches!(length[2], Err(RankError::Length { from: 0, sent: 4, expected: 5, .. })),
        "{length:?}"
    );
}

#[test]
fn wrong_arguments_are_refused_before_anything_is_sent() {
    let mut engine = in_process::connect(1).remove(0);
    let (send, mut receive) = ([0; 4], [0; 4]);
    let mut exchange = |sends: &[Range<usize>], receives: &[Range<usize>]| {
        engine.exchange(&send, sends, &mut receive, receives).unwrap_err()
    };
    #[expect(clippy::single_range_in_vec_init)]
    let (good, long) = ([0..4], [0..5]);
    assert!(matches!(exchange(&[], &good), RankError::Ranges { given: 0, ranks: 1 }));
    assert!(matches!(exchange(&good, &long), RankError::Outside { rank: 0, length: 4, .. }));
    assert!(matches!(exchange(&long, &good), RankError::Outside { .. }));
    assert!(matches!(
        engine.broadcast(1, &mut []),
        Err(RankError::NoSuchRank { rank: 1, ranks: 1 })
    ));
    let overlap = outcomes(|engine| engine.gather(&[0; 2], &mut [0; 6], &[0..2, 4..6, 3..5]));
    assert_eq!(overlap, vec![Err(RankError::Overlap { first: 2, second: 1 }); 3]);
}
