use super::*;
use storm_graph::random::{Purpose, Seed, Stream, words};

const KIB: usize = 1024;

/// `count` pieces of `bytes` each, released one position after they are saved and needed in reverse
/// order. Nothing else is in use.
fn chain(count: usize, bytes: usize) -> Recording {
    let pieces = (0..count).map(|index| RecordedPiece {
        bytes,
        given_up: index + 1,
        needed: Some((2 * count - 1 - index, 2 * count - 1 - index)),
        saves: 1,
        uses: 1,
        fixed: false,
    });
    Recording { pieces: pieces.collect(), other_bytes: vec![0; 2 * count], baseline_bytes: 0 }
}

fn moved(plan: &SavedPlan) -> Vec<usize> {
    let moves = |(index, fate): (usize, &Fate)| (*fate != Fate::Stay).then_some(index);
    plan.fates.iter().enumerate().filter_map(moves).collect()
}

/// Memory in use at each position if every moved piece leaves immediately and is fetched as
/// planned.
fn in_use(recording: &Recording, plan: &SavedPlan) -> Vec<i64> {
    let mut bytes: Vec<i64> =
        recording.other_bytes.iter().map(|&other| other as i64 + plan.baseline_shift).collect();
    let last = bytes.len() - 1;
    for (index, piece) in recording.pieces.iter().enumerate() {
        if piece.fixed {
            continue;
        }
        let from = match plan.fates[index] {
            Fate::Stay => Some(piece.given_up),
            Fate::Move { .. } => {
                let fetch = plan.fetches.iter().find(|fetch| fetch.piece == index);
                fetch.map(|fetch| fetch.position)
            }
        };
        let Some(from) = from else { continue };
        let until = piece.needed.map_or(last, |(_, until)| until);
        if from <= until {
            bytes[from..=until].iter_mut().for_each(|sum| *sum += piece.bytes as i64);
        }
    }
    bytes
}

#[test]
fn everything_stays_where_it_fits() {
    let plan = plan_saved(&chain(8, KIB), Allowance::Budget { bytes: 8 * 1024 }, 0);
    assert!(moved(&plan).is_empty());
    assert_eq!((plan.slab_bytes, plan.fetches.len()), (0, 0));
    assert_eq!(plan.peak_bytes, 8 * 1024);
}

#[test]
fn what_is_needed_last_moves() {
    let plan = plan_saved(&chain(8, KIB), Allowance::Budget { bytes: 5 * 1024 }, 0);
    assert_eq!(moved(&plan), [0, 1, 2]);
    assert_eq!(plan.slab_bytes, 3 * KIB);
    assert!(plan.peak_bytes <= 5 * 1024);
    // Once three kept pieces are used, there is room to fetch the next.
    let first = plan.fetches[0];
    assert_eq!((first.piece, first.position), (2, 9));
}

#[test]
fn a_shifted_baseline_takes_from_the_budget() {
    let allowance = Allowance::Budget { bytes: 8 * 1024 };
    assert_eq!(moved(&plan_saved(&chain(8, KIB), allowance, 2048)), [0, 1]);
    assert!(moved(&plan_saved(&chain(8, KIB), allowance, -2048)).is_empty());
}

#[test]
fn least_memory_moves_all_but_what_moving_cannot_help() {
    let mut recording = chain(8, KIB);
    // The last piece is released only when it is first needed, with nothing in between.
    recording.pieces[7].given_up = 8;
    let plan = plan_saved(&recording, Allowance::Least { window_bytes: 0 }, 0);
    assert_eq!(moved(&plan), [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!((plan.least_bytes, plan.peak_bytes), (1024, 1024));
    let plan = plan_saved(&recording, Allowance::Least { window_bytes: 2048 }, 0);
    assert_eq!(moved(&plan), [0, 1, 2, 3, 4]);
    assert_eq!(plan.peak_bytes, 3 * 1024);
}

#[test]
fn what_others_hold_stays_and_costs_nothing() {
    let mut recording = chain(4, KIB);
    recording.pieces[0].fixed = true;
    let plan = plan_saved(&recording, Allowance::Least { window_bytes: 0 }, 0);
    assert_eq!(plan.fates[0], Fate::Stay);
    assert!(plan.fetches.iter().all(|fetch| fetch.piece != 0));
}

#[test]
fn what_is_never_needed_is_not_fetched() {
    let mut recording = chain(4, KIB);
    recording.pieces[1].needed = None;
    let plan = plan_saved(&recording, Allowance::Least { window_bytes: 0 }, 0);
    assert!(moved(&plan).contains(&1));
    assert!(plan.fetches.iter().all(|fetch| fetch.piece != 1));
    let plan = plan_saved(&recording, Allowance::Budget { bytes: 1 << 20 }, 0);
    assert!(moved(&plan).is_empty());
}

#[test]
fn nothing_saved_is_a_plan_too() {
    let plan = plan_saved(&Recording::default(), Allowance::Budget { bytes: 0 }, 0);
    assert_eq!((plan.fates.len(), plan.slab_bytes, plan.peak_bytes), (0, 0, 0));
}

/// Random recordings: budgets hold whenever possible, every needed piece arrives in time and in
/// order, and host addresses do not overlap.
#[test]
fn random_recordings_keep_to_their_budget() {
    for round in 0..300 {
        let mut draws = 0;
        let mut draw = |below: usize| {
            let stream = Stream { tensor: 0, layer: 0 };
            let [word, ..] = words(Seed { seed: round, step: 0 }, Purpose::Rounding, stream, draws);
            draws += 1;
            word as usize % below
        };
        let count = 1 + draw(30);
        let mut recording = chain(count, KIB);
        for (index, piece) in recording.pieces.iter_mut().enumerate() {
            piece.bytes = 1 + draw(5000);
            let (first, _) = piece.needed.expect("all are");
            piece.given_up = (index + draw(3)).min(first);
            piece.needed = Some((first, (first + draw(3)).min(2 * count - 1)));
            piece.fixed = draw(10) == 0;
        }
        recording.other_bytes.iter_mut().for_each(|bytes| *bytes = draw(20_000) as u64);
        let budget = draw(60_000) as u64;
        let shift = draw(4000) as i64 - 2000;
        let plan = plan_saved(&recording, Allowance::Budget { bytes: budget }, shift);

        let bytes = in_use(&recording, &plan);
        let peak = *bytes.iter().max().expect("positions");
        assert_eq!(peak.max(0) as u64, plan.peak_bytes);
        assert!(plan.peak_bytes <= budget.max(plan.least_bytes));
        for (position, &bytes) in bytes.iter().enumerate() {
            let headroom = plan.leaving_bytes_max[position] as i64;
            assert!(headroom == 0 || bytes + headroom <= budget as i64);
        }
        assert!(plan.fetches.is_sorted_by_key(|fetch| fetch.position));
        for fetch in &plan.fetches {
            let (first, _) = recording.pieces[fetch.piece].needed.expect("fetched");
            assert!(fetch.position <= first && fetch.position >= count.min(first));
        }
        let mut end = 0;
        for (fate, piece) in plan.fates.iter().zip(&recording.pieces) {
            if let Fate::Move { host_offset } = *fate {
                assert!(host_offset >= end && host_offset % HOST_ALIGNMENT == 0);
                end = host_offset + piece.bytes;
            }
        }
        assert!(end <= plan.slab_bytes);
    }
}
