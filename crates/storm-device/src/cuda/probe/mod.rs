//! Measures what a card can do under sustained load.

mod cases;
mod copies;
mod figures;

use super::context::Context;
use super::dispatch::FP8_CAPABILITY;
use super::event::Event;
use super::memory::Counted;
use super::pinned::PinnedMemory;
use super::{Card, CudaDevice, CudaInstruction};
use crate::{Device, DeviceError};
use cases::{Case, Sizes, Subject};
pub use copies::CopyPoint;
use figures::Rates;
use std::time::Instant;
use storm_graph::TensorId;
use storm_plan::HardwareProfile;

/// How long to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeEffort {
    /// Few shapes, measured briefly, for a first impression.
    Quick,
    /// For a profile that is kept.
    Full,
}

impl ProbeEffort {
    /// Seconds spent on each figure.
    fn figure_seconds(self) -> f64 {
        match self {
            ProbeEffort::Quick => 0.1,
            ProbeEffort::Full => 0.3,
        }
    }

    /// Seconds of products before the first figure, so that clocks and power settle.
    fn warm_up_seconds(self) -> f64 {
        match self {
            ProbeEffort::Quick => 1.0,
            ProbeEffort::Full => 2.0,
        }
    }

    fn pinned_bytes(self) -> usize {
        match self {
            ProbeEffort::Quick => 1 << 29,
            ProbeEffort::Full => 2 << 30,
        }
    }

    fn sizes(self) -> Sizes {
        let rows: &[usize] = match self {
            ProbeEffort::Quick => &[1024, 16384],
            ProbeEffort::Full => &[1024, 4096, 8192, 16384, 32768],
        };
        Sizes { rows, tokens: 16384, shrink: 1 }
    }
}

/// The result of a measurement.
#[derive(Clone, Debug)]
pub struct Probe {
    /// The profile. The caller fills in its `source`.
    pub profile: HardwareProfile,
    /// The card.
    pub card: Card,
    /// Copies by size.
    pub copies: Vec<CopyPoint>,
    /// What the profile's overhead covers.
    pub overhead_counted: Counted,
    /// Cases that were left out because they do not fit in the free memory.
    pub left_out: usize,
}

/// Measures GPU number `ordinal`. `progress` gets a description of each stage before it begins.
///
/// # Errors
/// There is no such card, a library is missing, or there is too little memory.
pub fn probe(
    ordinal: usize,
    effort: ProbeEffort,
    mut progress: impl FnMut(&str),
) -> Result<Probe, DeviceError> {
    let context = Context::open(ordinal)?;
    let (free_bytes, _) = context.memory_info()?;
    let mut cases = cases::all(effort.sizes())?;
    let has_fp8 = context.card.capability >= FP8_CAPABILITY;
    cases.retain(|case| has_fp8 || case.subject != Subject::Fp8);
    let planned = cases.len();
    // Some memory is needed besides the block, and a display may need some.
    cases.retain(|case| case.size_bytes < free_bytes / 10 * 8);
    let left_out = planned - cases.len();
    let largest = cases.iter().map(|case| case.size_bytes).max().unwrap_or(0);
    let device = CudaDevice::in_context(context, largest.max(copies::AREA_BYTES))?;
    let mut bench = Bench { device, seconds: effort.figure_seconds() };

    progress("preparing kernels");
    let prepared: Vec<Prepared<'_>> =
        cases.iter().map(|case| bench.prepare(case)).collect::<Result<_, _>>()?;
    progress(&format!("warming up for {} s", effort.warm_up_seconds()));
    if let Some(first) = prepared.first() {
        bench.warm_up(first, effort.warm_up_seconds())?;
    }
    let (mut times, mut stage) = (Vec::new(), "");
    let mut starting = None;
    for case in &prepared {
        let next = stage_of(case.case.subject);
        if next != stage {
            let count = prepared.iter().filter(|c| stage_of(c.case.subject) == next).count();
            progress(&format!("{next}: {count} cases"));
            stage = next;
        }
        match case.case.subject {
            Subject::Tiny => starting = Some(bench.starting(case, &prepared[0])?),
            _ => times.push((case.case, bench.time_case(case)?)),
        }
    }
    let (kernel_seconds, launch_seconds) = starting.expect("the tiny case always fits");

    let pinned_bytes = effort.pinned_bytes();
    progress(&format!("pinning {} GiB of host memory", pinned_bytes as f64 / f64::from(1 << 30)));
    let start = Instant::now();
    let mut host = PinnedMemory::new(&bench.device.context, pinned_bytes, |_| {})?;
    let pinned_seconds = start.elapsed().as_secs_f64();
    progress("copies between host and card");
    let copies = copies::measure(&bench.device, &mut host, bench.seconds)?;
    drop(host);

    // By now, every kernel is loaded, and every library has allocated what it needs.
    let memory = bench.device.memory_in_use()?;
    let block = bench.device.capacity_bytes() as u64;
    let large = copies.points[copies.points.len() - 1];
    let rates = Rates {
        overhead_bytes: memory.bytes.saturating_sub(block),
        to_device: large.to_device,
        to_host: large.to_host,
        duplex: copies.duplex,
        copy_latency_seconds: copies.latency_seconds,
        kernel_seconds,
        launch_seconds,
        pinned_seconds_per_gib: pinned_seconds / (pinned_bytes as f64 / f64::from(1 << 30)),
    };
    let card = bench.device.card().clone();
    Ok(Probe {
        profile: figures::profile(&card, &times, rates),
        card,
        copies: copies.points,
        overhead_counted: memory.counted,
        left_out,
    })
}

fn stage_of(subject: Subject) -> &'static str {
    match subject {
        Subject::Gemm { .. } | Subject::Fp8 => "matrix products",
        Subject::Attention { .. } => "attention",
        Subject::Moving | Subject::Memory => "ops that move bytes",
        Subject::Tiny => "starting kernels",
    }
}

/// A case with its instructions. The last one is timed.
struct Prepared<'a> {
    case: &'a Case,
    instructions: Vec<CudaInstruction>,
}

impl Prepared<'_> {
    fn timed(&self) -> &CudaInstruction {
        self.instructions.last().expect("a case has a node")
    }
}

struct Bench {
    device: CudaDevice,
    /// Seconds spent on each figure.
    seconds: f64,
}

/// Instructions that are issued at once: fewer than a stream accepts before the host must wait.
const BURST: usize = 500;

impl Bench {
    fn prepare<'a>(&self, case: &'a Case) -> Result<Prepared<'a>, DeviceError> {
        let place = |id: TensorId| case.offsets[id.index()];
        let nodes = case.graph.nodes().iter();
        let instructions = nodes
            .map(|node| self.device.prepare(&case.graph, node, place, 0))
            .collect::<Result<_, _>>()?;
        Ok(Prepared { case, instructions })
    }

    /// Makes the operands of a case. All cases share the memory.
    fn fill(&mut self, prepared: &Prepared<'_>) -> Result<(), DeviceError> {
        for (id, values) in &prepared.case.integers {
            self.device.write(prepared.case.offsets[id.index()], values)?;
        }
        for instruction in &prepared.instructions {
            self.device.run(instruction)?;
        }
        Ok(())
    }

    fn warm_up(&mut self, prepared: &Prepared<'_>, seconds: f64) -> Result<(), DeviceError> {
        self.fill(prepared)?;
        let start = Instant::now();
        while start.elapsed().as_secs_f64() < seconds {
            self.time(prepared.timed(), 8)?;
        }
        Ok(())
    }

    fn time_case(&mut self, prepared: &Prepared<'_>) -> Result<f64, DeviceError> {
        self.fill(prepared)?;
        let trial = self.time(prepared.timed(), 3)?;
        let runs = (self.seconds / trial).ceil().clamp(3.0, 100_000.0) as usize;
        self.time(prepared.timed(), runs)
    }

    /// Seconds per run on the card, many issued at once.
    fn time(&mut self, instruction: &CudaInstruction, runs: usize) -> Result<f64, DeviceError> {
        let context = &self.device.context;
        let (start, end) = (Event::new(context)?, Event::new(context)?);
        start.record(&self.device.stream)?;
        for _ in 0..runs {
            self.device.run(instruction)?;
        }
        end.record(&self.device.stream)?;
        end.synchronize()?;
        Ok(end.seconds_since(&start)? / runs as f64)
    }

    /// Seconds that the card takes from one small kernel to the next, and that the host takes to
    /// issue one. Both are minimums of several tries, because any other work disturbs them.
    fn starting(
        &mut self,
        tiny: &Prepared<'_>,
        large: &Prepared<'_>,
    ) -> Result<(f64, f64), DeviceError> {
        let (mut kernel_seconds, mut launch_seconds) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..10 {
            self.fill(large)?;
            // While these run, the small ones queue up, so none of them waits for the host.
            for _ in 0..3 {
                self.device.run(large.timed())?;
            }
            let context = &self.device.context;
            let (start, end) = (Event::new(context)?, Event::new(context)?);
            start.record(&self.device.stream)?;
            let given_out = Instant::now();
            for _ in 0..BURST {
                self.device.run(tiny.timed())?;
            }
            launch_seconds = launch_seconds.min(given_out.elapsed().as_secs_f64() / BURST as f64);
            end.record(&self.device.stream)?;
            end.synchronize()?;
            kernel_seconds = kernel_seconds.min(end.seconds_since(&start)? / BURST as f64);
        }
        Ok((kernel_seconds, launch_seconds))
    }
}
