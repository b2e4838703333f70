//! Sessions stay within their budget: a program that counts its memory, as a framework's allocator does, never
//! uses more than allowed once a step is recorded.

use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use storm_device::DeviceError;
use storm_device::foreign::{ComputeStream, Copies, CopyOptions, HostMemory};
use storm_graph::random::{Purpose, Seed, Stream, words};
use storm_saved::plan::Allowance;
use storm_saved::{Framework, MemoryUse, Peak, SavedOptions, SavedReport, Session, Source, Use};

const HERE: ComputeStream = ComputeStream::CALLING_THREAD;

/// What is in use, and its peak.
#[derive(Default)]
struct Allocator {
    in_use: u64,
    taken: u64,
    peak: u64,
}

/// Memory that the allocator counts while this is held.
struct Block {
    bytes: u64,
    allocator: Rc<RefCell<Allocator>>,
}

impl Drop for Block {
    fn drop(&mut self) {
        self.allocator.borrow_mut().in_use -= self.bytes;
    }
}

#[derive(Clone, Default)]
struct Program {
    allocator: Rc<RefCell<Allocator>>,
}

impl Program {
    fn take(&self, bytes: usize) -> Rc<Block> {
        let mut allocator = self.allocator.borrow_mut();
        allocator.in_use += bytes as u64;
        allocator.taken += bytes as u64;
        allocator.peak = allocator.peak.max(allocator.in_use);
        Rc::new(Block { bytes: bytes as u64, allocator: Rc::clone(&self.allocator) })
    }

    fn memory(block: Rc<Block>) -> HostMemory {
        HostMemory::new(&vec![0; block.bytes as usize]).with_companion(block)
    }
}

impl Framework for Program {
    type Memory = HostMemory;
    type Origin = Weak<Block>;
    type Error = DeviceError;

    fn allocate(&self, bytes: usize, _: ComputeStream) -> Result<HostMemory, DeviceError> {
        Ok(Program::memory(self.take(bytes)))
    }

    fn is_alive(&self, origin: &Weak<Block>) -> bool {
        origin.strong_count() > 0
    }

    fn upgrade(&self, origin: &Weak<Block>) -> Option<HostMemory> {
        origin.upgrade().map(Program::memory)
    }

    fn memory_use(&self, peak: Peak) -> Option<MemoryUse> {
        let mut allocator = self.allocator.borrow_mut();
        let (in_use_bytes, taken_bytes) = (allocator.in_use, allocator.taken);
        let now = MemoryUse { in_use_bytes, taken_bytes, peak_bytes: allocator.peak };
        if peak == Peak::Forget {
            allocator.peak = allocator.in_use;
        }
        Some(now)
    }
}

/// A network: the bytes that each layer saves, uses temporarily and returns from its backward pass, and how many
/// layers its input stays alive for.
struct Layer {
    saved: usize,
    passing: usize,
    result: usize,
    lives_on: usize,
}

fn layers(seed: u64) -> Vec<Layer> {
    let stream = Stream { tensor: 0, layer: 0 };
    let draw = |index| words(Seed { seed, step: 0 }, Purpose::Rounding, stream, index);
    let layer = |index| {
        let [saved, passing, lives_on, _] = draw(index);
        Layer {
            saved: 500 + saved as usize % 4000,
            passing: passing as usize % 6000,
            result: 0,
            lives_on: lives_on as usize % 3,
        }
    };
    // As for logits: memory peaks where the loss is differentiated, and saved pieces are released in between.
    let loss = Layer { saved: 10_000, passing: 40_000, result: 5_000, lives_on: 0 };
    (0..20).map(layer).chain([loss]).collect()
}

/// One step; returns the peak memory in use.
fn step(program: &Program, session: &mut Session<Program>, layers: &[Layer]) -> u64 {
    program.memory_use(Peak::Forget);
    let mut seen = 0;
    let mut look = |program: &Program| seen = seen.max(program.allocator.borrow().peak);
    let mut names = Vec::new();
    let mut alive = VecDeque::new();
    for (index, layer) in layers.iter().enumerate() {
        look(program);
        let passing = program.take(layer.passing / 2);
        let block = program.take(layer.saved);
        let source =
            Source { memory: Rc::as_ptr(&block) as usize, version: 0, range: 0..layer.saved };
        let origin = Rc::downgrade(&block);
        look(program);
        let memory = Program::memory(Rc::clone(&block));
        names.push(session.save(source, memory, || origin, HERE).expect("saved"));
        drop(passing);
        alive.push_back((index + layer.lives_on, block));
        alive.retain(|(until, _)| *until > index);
    }
    drop(alive);
    for (layer, name) in layers.iter().zip(&names).rev() {
        look(program);
        let hold = |memory: &HostMemory, _| -> Option<Rc<dyn Any>> { memory.companion() };
        let variable = session.need(*name, Use::First, HERE, hold).expect("handed out");
        let passing = program.take(layer.passing);
        session.release(*name, Some(Use::First));
        look(program);
        drop((variable, passing));
        drop(program.take(layer.result));
    }
    look(program);
    seen
}

fn run(seed: u64, allowance: Allowance, host_bytes_max: u64) -> (Vec<u64>, SavedReport) {
    let program = Program::default();
    let copies = Copies::cpu(CopyOptions { chaos_seed: Some(seed) }).expect("threads");
    let options = SavedOptions { allowance, host_bytes_max, window_bytes: 4000 };
    let mut session = Session::new(program.clone(), copies, options);
    let layers = layers(seed);
    let parameters = program.take(10_000);
    let mut peaks = vec![step(&program, &mut session, &layers)];
    // As an optimizer does after its first step.
    let state = program.take(20_000);
    peaks.extend((0..4).map(|_| step(&program, &mut session, &layers)));
    drop((parameters, state));
    (peaks, session.report().expect("a report"))
}

#[test]
fn budgets_hold_from_the_second_step_on() {
    for seed in 0..40 {
        let (resident, _) = run(seed, Allowance::Budget { bytes: u64::MAX / 4 }, 1 << 30);
        let (least, report) = run(seed, Allowance::Least { window_bytes: 0 }, 1 << 30);
        assert!(least[1..].iter().all(|&peak| peak <= report.least_peak_bytes));
        for share in 1..4 {
            let bytes = least[4] + (resident[4] - least[4]) * share / 4;
            let (peaks, report) = run(seed, Allowance::Budget { bytes }, 1 << 30);
            assert!(peaks[1..].iter().all(|&peak| peak <= bytes), "{seed}: {peaks:?} of {bytes}");
            assert!(report.kept.0 > 0 && report.moved.0 > 0);
            assert_eq!(report.planned_steps, 3);
        }
    }
}

#[test]
fn budgets_hold_where_host_memory_is_short() {
    for seed in 0..40 {
        let (resident, all) = run(seed, Allowance::Budget { bytes: u64::MAX / 4 }, 1 << 30);
        let total = all.kept.1 + all.moved.1;
        for share in 1..4 {
            // Enough host memory to reach the budget, and not enough for everything.
            let bytes = resident[4] - total * share / 8;
            let (peaks, report) = run(seed, Allowance::Budget { bytes }, total * (share + 3) / 8);
            let allowed = bytes.max(report.least_peak_bytes);
            assert!(
                peaks[1..].iter().all(|&peak| peak <= allowed),
                "{seed}: {peaks:?} of {allowed}"
            );
        }
    }
}

#[test]
fn what_a_recording_had_no_room_for_costs_nothing_later() {
    for seed in 0..40 {
        let (resident, all) = run(seed, Allowance::Budget { bytes: u64::MAX / 4 }, 1 << 30);
        let total = all.kept.1 + all.moved.1;
        let moved = |host_bytes_max| {
            let budget = Allowance::Budget { bytes: resident[4] - total / 8 };
            run(seed, budget, host_bytes_max).1.moved.1
        };
        // What comes last while everything is moved is what stays when some is.
        let (short, plenty) = (moved(total * 7 / 8), moved(1 << 30));
        assert!(short <= plenty, "{seed}: {short} instead of {plenty}");
    }
}
