//! Sessions of saved memory, without a framework: random steps with random delays return what was saved.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use storm_device::DeviceError;
use storm_device::foreign::{ComputeStream, Copies, CopyOptions, HostMemory};
use storm_graph::random::{Purpose, Seed, Stream, words};
use storm_saved::plan::Allowance;
use storm_saved::{
    Framework, MemoryUse, Peak, PieceName, SavedOptions, SavedReport, Session, Source, Use,
};

const HERE: ComputeStream = ComputeStream::CALLING_THREAD;

/// Memory by number; the program itself holds those in `alive`.
#[derive(Clone, Default)]
struct Program {
    alive: Rc<RefCell<HashSet<usize>>>,
}

impl Framework for Program {
    type Memory = HostMemory;
    type Origin = usize;
    type Error = DeviceError;

    fn allocate(&self, bytes: usize, _: ComputeStream) -> Result<HostMemory, DeviceError> {
        Ok(HostMemory::new(&vec![0xAA; bytes]))
    }

    fn is_alive(&self, origin: &usize) -> bool {
        self.alive.borrow().contains(origin)
    }

    fn upgrade(&self, origin: &usize) -> Option<HostMemory> {
        self.is_alive(origin).then(|| HostMemory::new(&contents(*origin)))
    }

    fn memory_use(&self, _: Peak) -> Option<MemoryUse> {
        None
    }
}

fn random(seed: u64, index: u64) -> usize {
    let stream = Stream { tensor: 0, layer: 0 };
    words(Seed { seed, step: 0 }, Purpose::Rounding, stream, index)[0] as usize
}

/// What memory of this number holds.
fn contents(memory: usize) -> Vec<u8> {
    let size = 600 + random(memory as u64, 0) % 5000;
    (0..size as u64).map(|index| random(memory as u64, 1 + index) as u8).collect()
}

fn session(program: &Program, allowance: Allowance, seed: u64) -> Session<Program> {
    session_with_host(program, allowance, 1 << 30, seed)
}

fn session_with_host(
    program: &Program,
    allowance: Allowance,
    host_bytes_max: u64,
    seed: u64,
) -> Session<Program> {
    let copies = Copies::cpu(CopyOptions { chaos_seed: Some(seed) }).expect("threads");
    let options = SavedOptions { allowance, host_bytes_max, window_bytes: 4000 };
    Session::new(program.clone(), copies, options)
}

fn save(session: &mut Session<Program>, memory: usize) -> (usize, PieceName) {
    let bytes = contents(memory);
    let source = Source { memory, version: 0, range: 0..bytes.len() };
    let name = session.save(source, HostMemory::new(&bytes), || memory, HERE).expect("saved");
    (memory, name)
}

fn need(session: &mut Session<Program>, (memory, name): (usize, PieceName), usage: Use) {
    let read = |found: &HostMemory, start: usize| (found.contents(), start);
    let (found, start) = session.need(name, usage, HERE, read).expect("handed out");
    assert_eq!(found[..], contents(memory)[start..], "memory {memory}");
}

/// Saves these, needs them in reverse, and releases them.
fn step(session: &mut Session<Program>, memories: &[usize]) -> SavedReport {
    let names: Vec<_> = memories.iter().map(|&memory| save(session, memory)).collect();
    for &name in names.iter().rev() {
        need(session, name, Use::First);
        session.release(name.1, Some(Use::First));
    }
    session.report().expect("a report")
}

const ALLOWANCES: [Allowance; 4] = [
    Allowance::Budget { bytes: 0 },
    Allowance::Budget { bytes: 20_000 },
    Allowance::Budget { bytes: 1 << 30 },
    Allowance::Least { window_bytes: 3000 },
];

#[test]
fn steps_that_repeat_run_by_plan() {
    for (seed, allowance) in ALLOWANCES.into_iter().enumerate() {
        let mut session = session(&Program::default(), allowance, seed as u64);
        let memories: Vec<usize> = (0..12).collect();
        for _ in 0..5 {
            step(&mut session, &memories);
        }
        let report = session.report().expect("a report");
        assert_eq!((report.steps, report.recorded_steps, report.planned_steps), (5, 1, 3));
        let all: usize = memories.iter().map(|&memory| contents(memory).len()).sum();
        assert_eq!(report.kept.1 + report.moved.1, all as u64);
        match allowance {
            Allowance::Budget { bytes } if bytes > 20_000 => assert_eq!(report.moved.0, 0),
            _ => assert!(report.moved.0 > 0),
        }
        if let Allowance::Budget { bytes } = allowance {
            assert!(report.planned_peak_bytes <= bytes.max(report.least_peak_bytes));
        }
    }
}

#[test]
fn shared_pieces_move_once_and_stay_until_their_last_use() {
    let mut session = session(&Program::default(), Allowance::Budget { bytes: 0 }, 1);
    let memories = [1, 2, 1, 1, 3, 2, 1];
    for _ in 0..4 {
        let report = step(&mut session, &memories);
        assert_eq!(report.shared.0, 4);
    }
    let report = session.report().expect("a report");
    let once: usize = [1, 2, 3].into_iter().map(|memory| contents(memory).len()).sum();
    assert!(report.fetched_bytes <= 4 * once as u64, "no piece is fetched twice in a step");
}

/// Tensors may share memory but not its version: a later save of the same version may find different bytes.
/// No need is answered with bytes older than its save, and a planned step copies them once.
#[test]
fn what_is_saved_again_is_not_older_than_its_last_save() {
    let older: Vec<u8> = vec![1; 3000];
    let newer: Vec<u8> = vec![2; 3000];
    for allowance in ALLOWANCES {
        let mut session = session(&Program::default(), allowance, 1);
        for step in 0..4 {
            let before = session.report().expect("a report").stored_bytes;
            let mut save_bytes = |bytes: &[u8], range| {
                let source = Source { memory: 7, version: 0, range };
                session.save(source, HostMemory::new(bytes), || 7, HERE).expect("saved")
            };
            let names = [(&older, 0..3000), (&older, 100..2000), (&newer, 0..3000)]
                .map(|(bytes, range)| save_bytes(bytes, range));
            let other = save(&mut session, 9);
            let report = session.report().expect("a report");
            assert_eq!(report.shared.0, 2);
            if step > 0 && report.moved.0 == 2 {
                assert_eq!(report.stored_bytes - before, 3000 + contents(9).len() as u64);
            }
            need(&mut session, other, Use::First);
            session.release(other.1, Some(Use::First));
            for name in names {
                let read = |found: &HostMemory, start: usize| (found.contents(), start);
                let (found, start) =
                    session.need(name, Use::First, HERE, read).expect("handed out");
                // Memory that stays is the program's own, and here the one that it saved first.
                let stays = report.moved.0 < 2;
                assert!(found[..] == newer[start..] || stays, "step {step}, {allowance:?}");
                session.release(name, Some(Use::First));
            }
        }
    }
}

/// If a step saves less often than the recorded one, some pieces wait for a save that never comes.
#[test]
fn saves_that_do_not_come_again_are_no_loss() {
    for (seed, allowance) in ALLOWANCES.into_iter().enumerate() {
        let mut session = session(&Program::default(), allowance, seed as u64);
        for memories in [&[1, 2, 1, 3, 1][..], &[1, 2, 3], &[1, 2, 1, 3, 1, 1, 2], &[1, 2, 3, 1]] {
            for _ in 0..3 {
                step(&mut session, memories);
            }
        }
        session.give_back_host_memory().expect("given back");
        assert_eq!(session.report().expect("a report").host_bytes, 0);
    }
}

#[test]
fn what_the_program_holds_is_not_fetched() {
    let program = Program::default();
    program.alive.borrow_mut().insert(5);
    let mut session = session(&program, Allowance::Budget { bytes: 0 }, 2);
    for _ in 0..4 {
        step(&mut session, &[5]);
    }
    let report = session.report().expect("a report");
    assert_eq!(report.fetched_bytes, 0);
    assert_eq!(report.stored_bytes, contents(5).len() as u64, "in the recorded step only");
}

#[test]
fn what_the_host_has_no_room_for_stays() {
    let program = Program::default();
    let mut session = session_with_host(&program, Allowance::Budget { bytes: 0 }, 12_000, 3);
    for _ in 0..5 {
        step(&mut session, &[0, 1, 2, 3, 4, 5, 6, 7]);
    }
    let report = session.report().expect("a report");
    assert_eq!(report.planned_steps, 3);
    assert!(report.kept.0 > 0 && report.moved.0 > 0);
    assert!(report.host_bytes <= 12_000);
}

#[test]
fn everything_can_be_had_again_until_it_is_given_up() {
    for (seed, allowance) in ALLOWANCES.into_iter().enumerate() {
        let mut session = session(&Program::default(), allowance, seed as u64);
        for _ in 0..4 {
            let names: Vec<_> = (0..8).map(|memory| save(&mut session, memory)).collect();
            for usage in [Use::First, Use::Again, Use::Again] {
                for &name in names.iter().rev() {
                    need(&mut session, name, usage);
                }
            }
            for (_, name) in names {
                session.release(name, Some(Use::First));
            }
        }
        session.give_back_host_memory().expect("given back");
        assert_eq!(session.report().expect("a report").host_bytes, 0);
    }
}

/// Steps with random pieces in random order, some never needed, and with overlapping steps.
#[test]
fn random_steps_hand_out_what_was_saved() {
    for seed in 0..32 {
        let mut draws = 0;
        let mut draw = |below: usize| {
            draws += 1;
            random(1000 + seed, draws) % below
        };
        let program = Program::default();
        let host_bytes_max = if seed % 5 == 0 { 9000 } else { 1 << 30 };
        let allowance = ALLOWANCES[seed as usize % 4];
        let mut session = session_with_host(&program, allowance, host_bytes_max, seed);
        let shapes: Vec<Vec<usize>> =
            (0..3).map(|_| (0..3 + draw(12)).map(|_| draw(20)).collect()).collect();
        let mut left: Vec<(usize, PieceName)> = Vec::new();
        for _ in 0..30 {
            program.alive.borrow_mut().clear();
            if draw(3) == 0 {
                program.alive.borrow_mut().insert(draw(20));
            }
            let mut shape = shapes[draw(3)].clone();
            if draw(5) == 0 {
                shape.truncate(1 + draw(shape.len()));
            }
            let mut names: Vec<_> =
                shape.iter().map(|&memory| save(&mut session, memory)).collect();
            if draw(4) == 0 {
                let index = draw(names.len());
                left.push(names.swap_remove(index));
            }
            while let Some(name) = names.pop() {
                match draw(12) {
                    0 => session.release(name.1, None),
                    _ => {
                        need(&mut session, name, Use::First);
                        session.release(name.1, Some(Use::First));
                    }
                }
            }
            if draw(3) == 0 {
                for name in left.drain(..) {
                    need(&mut session, name, Use::First);
                    session.release(name.1, Some(Use::First));
                }
            }
        }
        for (_, name) in left {
            session.release(name, None);
        }
        session.give_back_host_memory().expect("given back");
        assert_eq!(session.report().expect("a report").host_bytes, 0);
    }
}
