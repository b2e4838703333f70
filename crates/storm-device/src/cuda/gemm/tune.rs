//! Finds, by measurement, the fastest algorithm of a product among those that give the same bits.
//!
//! The library ranks algorithms for a product that runs alone. In a training step, the card is at
//! its power limit, and the algorithm that needs the least energy is the fastest. So each candidate
//! runs for a while on a card that is kept busy.

use super::choices::{Algorithm, Candidates};
use super::fastest::fastest;
use super::hopper::Hopper;
use super::{Gemm, GemmCall, GemmPlan, GemmShape};
use crate::DeviceError;
use crate::cuda::CudaError;
use crate::cuda::compile::KernelSource;
use crate::cuda::context::{Argument, Launch, Start, Stream};
use crate::cuda::event::Event;
use crate::cuda::modules::Kernels;
use crate::cuda::plan::KernelChoice;
use cudarc::driver::result as driver;
use std::collections::BTreeMap;
use std::sync::Arc;
use storm_graph::DType;

/// The source of the trial's kernels; it needs no definitions.
pub(in crate::cuda) const SOURCE: KernelSource =
    KernelSource { name: "trial.cu", text: include_str!("../kernels/trial.cu"), only_for: None };

/// The share of the time spent on reaching the card's power limit, and its maximum in seconds.
const HEATING_SHARE: f64 = 0.1;
const HEATING_SECONDS_MAX: f64 = 1.0;

/// Seconds from which STORM's own kernels are tried, too: they gain about 2 %, and must be compiled once on each machine.
const OWN_SECONDS_MIN: f64 = 10.0;

const BLOCKS: u32 = 1024;
const THREADS: u32 = 256;

/// A shape that has not been measured yet, and a call with that shape.
struct Untuned {
    shape: GemmShape,
    call: GemmCall,
    /// Sum over all calls with this shape.
    flops: f64,
}

impl Gemm {
    /// For each shape among `calls` that has not been measured yet, measures which algorithm is
    /// fastest and uses it in calls prepared from now on. Takes about `seconds` if no shape has
    /// been measured, and less if some have. With at least [`OWN_SECONDS_MIN`], STORM's own kernels
    /// are tried, too, and shapes for which they were not are measured again. `progress` gets the
    /// number of shapes that are done, and of all shapes.
    ///
    /// # Safety
    /// The calls are prepared. Their addresses are valid, their memory may be overwritten, and
    /// nothing else uses that memory or the workspace.
    pub(in crate::cuda) unsafe fn tune<'a>(
        &self,
        calls: impl Iterator<Item = &'a GemmCall>,
        stream: &Stream,
        kernels: &Kernels,
        seconds: f64,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<(), DeviceError> {
        let candidates =
            if seconds < OWN_SECONDS_MIN { Candidates::Library } else { Candidates::All };
        let (mut untuned, all_flops) = untuned(calls, candidates);
        if untuned.is_empty() || seconds <= 0.0 {
            return Ok(());
        }
        let shapes = untuned.len();
        progress(0, shapes);
        if candidates == Candidates::All {
            Hopper::compile(untuned.iter().map(|untuned| &untuned.shape), kernels)?;
        }
        untuned.sort_by(|a, b| b.flops.total_cmp(&a.flops));
        let bench = Bench { gemm: self, stream, kernels, candidates, marks: marks(self)? };
        let untuned_flops: f64 = untuned.iter().map(|shape| shape.flops).sum();
        let seconds = seconds * untuned_flops / all_flops;
        let heating = (seconds * HEATING_SHARE).min(HEATING_SECONDS_MAX);
        // SAFETY: as the caller guarantees.
        unsafe { bench.heat(&untuned[0], heating)? };
        for (index, untuned) in untuned.iter().enumerate() {
            progress(index, shapes);
            let share = (seconds - heating) * untuned.flops / untuned_flops;
            // SAFETY: as the caller guarantees.
            if let Some(algorithm) = unsafe { bench.fastest(untuned, share)? } {
                self.keep(&untuned.shape, algorithm, candidates)?;
            }
        }
        progress(shapes, shapes);
        Ok(())
    }

    /// The fastest algorithm that an earlier run measured, if it is still there, and among which it is the fastest.
    pub(super) fn measured(
        &self,
        shape: &GemmShape,
        plan: &GemmPlan,
        kernels: &Kernels,
    ) -> Option<(Algorithm, Candidates)> {
        let found = |among| {
            let bytes = self.measured.read(&self.key(shape, among))?;
            if bytes == Hopper::VERSION {
                return Hopper::for_shape(shape, kernels).ok()?.map(Algorithm::Hopper);
            }
            let choices = plan.all_choices(self.handle, shape).ok()?;
            choices.into_iter().find(|choice| choice.bytes() == bytes)
        };
        let all = [Candidates::All, Candidates::Library];
        all.into_iter().find_map(|among| Some((found(among)?, among)))
    }

    /// All algorithms for a shape. STORM's own comes first: where there is time to measure only a few, the library's
    /// first choice is compared with it.
    fn candidates(
        &self,
        candidates: Candidates,
        shape: &GemmShape,
        plan: &GemmPlan,
        kernels: &Kernels,
    ) -> Result<Vec<Algorithm>, CudaError> {
        let own = match candidates {
            Candidates::Library => None,
            Candidates::All => Hopper::for_shape(shape, kernels)?.map(Algorithm::Hopper),
        };
        let choices = plan.all_choices(self.handle, shape);
        let choices = choices.map_err(CudaError::blas("algorithms of a product"))?;
        Ok(own.into_iter().chain(choices).collect())
    }

    fn keep(
        &self,
        shape: &GemmShape,
        algorithm: Algorithm,
        among: Candidates,
    ) -> Result<(), DeviceError> {
        let what = || format!("no descriptors for {shape:?}");
        let mut plan = GemmPlan::describe_shape(shape).map_err(CudaError::blas(what()))?;
        (plan.algorithm, plan.measured) = (algorithm, Some(among));
        self.measured.write(&self.key(shape, among), &algorithm.bytes());
        let mut plans = self.plans.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        plans.insert(*shape, Arc::new(plan));
        Ok(())
    }

    fn key(&self, shape: &GemmShape, among: Candidates) -> String {
        let card = &self.context.card;
        let (library, architecture) = (self.library(), card.architecture());
        format!("{library}\n{} {architecture}\n{shape:?}\n{among:?}", card.name)
    }
}

/// The shapes for which these candidates have not been measured yet, and the work of all calls.
fn untuned<'a>(
    calls: impl Iterator<Item = &'a GemmCall>,
    candidates: Candidates,
) -> (Vec<Untuned>, f64) {
    let mut shapes: BTreeMap<GemmShape, Untuned> = BTreeMap::new();
    let mut all_flops = 0.0;
    for call in calls {
        let flops = 2.0 * call.m as f64 * call.n as f64 * call.k as f64;
        all_flops += flops;
        if call.plan.as_ref().expect("prepared").measured < Some(candidates) {
            let shape = call.shape();
            let new = || Untuned { shape, call: call.clone(), flops: 0.0 };
            shapes.entry(shape).or_insert_with(new).flops += flops;
        }
    }
    (shapes.into_values().collect(), all_flops)
}

fn marks(gemm: &Gemm) -> Result<[Event; 2], CudaError> {
    Ok([Event::new(&gemm.context)?, Event::new(&gemm.context)?])
}

/// Runs and times products.
struct Bench<'a> {
    gemm: &'a Gemm,
    stream: &'a Stream,
    kernels: &'a Kernels,
    candidates: Candidates,
    marks: [Event; 2],
}

/// Operands of a product in memory: address, dtype and number of elements.
type Filled = (u64, DType, usize);

impl Bench<'_> {
    /// Keeps the card busy for this long.
    ///
    /// # Safety
    /// As for [`Gemm::tune`].
    unsafe fn heat(&self, untuned: &Untuned, seconds: f64) -> Result<(), DeviceError> {
        let plan = untuned.plan();
        // SAFETY: as the caller guarantees.
        unsafe {
            self.fill(&untuned.operands())?;
            let once = self.time(untuned, &plan.algorithm, 1)?;
            self.time(untuned, &plan.algorithm, (seconds / once) as usize)?;
        }
        Ok(())
    }

    /// The fastest algorithm that gives the same bits as the call's own. `None` if there is no time
    /// to measure, or no other algorithm.
    ///
    /// # Safety
    /// As for [`Gemm::tune`].
    unsafe fn fastest(
        &self,
        untuned: &Untuned,
        seconds: f64,
    ) -> Result<Option<Algorithm>, DeviceError> {
        let plan = untuned.plan();
        let (gemm, shape) = (self.gemm, &untuned.shape);
        let choices = gemm.candidates(self.candidates, shape, plan, self.kernels)?;
        // SAFETY: as the caller guarantees.
        unsafe {
            self.fill(&untuned.operands())?;
            let bits = self.bits(untuned, &plan.algorithm)?;
            let mut same = vec![plan.algorithm];
            for choice in choices.into_iter().filter(|choice| *choice != plan.algorithm) {
                if bits.is_some() && self.bits(untuned, &choice)? == bits {
                    same.push(choice);
                }
            }
            let once = self.time(untuned, &plan.algorithm, 2)?;
            let measured = std::cell::Cell::new(false);
            let way = fastest(same.len(), seconds, once, |way, runs| {
                measured.set(true);
                self.time(untuned, &same[way], runs)
            })?;
            Ok(measured.get().then(|| same[way]))
        }
    }

    /// A digest of the product's bits. `None` if the algorithm does not run.
    ///
    /// # Safety
    /// As for [`Gemm::tune`].
    unsafe fn bits(
        &self,
        untuned: &Untuned,
        algorithm: &Algorithm,
    ) -> Result<Option<u64>, DeviceError> {
        let GemmCall { m, n, out, out_dtype, ref unit, .. } = untuned.call;
        let unit = unit.as_ref().map(|unit| (unit.address, out_dtype, unit.kind.elements(m, n)));
        let results: Vec<Filled> = [(out, out_dtype, m * n)].into_iter().chain(unit).collect();
        let sum = self.gemm.workspace.start();
        // SAFETY: as the caller guarantees. The workspace is free once the product is done.
        unsafe {
            self.fill(&results)?;
            if self.queue(untuned, algorithm).is_err() {
                return Ok(None);
            }
            driver::memset_d8_async(sum, 0, size_of::<u64>(), self.stream.handle())
                .map_err(CudaError::driver("clearing a digest"))?;
            for (address, dtype, elements) in results {
                let halves = Argument::I64((elements * dtype.size_bytes() / 2) as i64);
                let arguments = vec![Argument::Pointer(address), halves, Argument::Pointer(sum)];
                self.launch("digest", arguments)?;
            }
            let mut bytes = [0; size_of::<u64>()];
            driver::memcpy_dtoh_async(&mut bytes, sum, self.stream.handle())
                .map_err(CudaError::driver("reading a digest"))?;
            self.stream.synchronize("comparing products")?;
            Ok(Some(u64::from_le_bytes(bytes)))
        }
    }

    /// Seconds of one product, averaged over this many, after some untimed runs.
    ///
    /// # Safety
    /// As for [`Gemm::tune`].
    unsafe fn time(
        &self,
        untuned: &Untuned,
        algorithm: &Algorithm,
        runs: usize,
    ) -> Result<f64, DeviceError> {
        let runs = runs.max(1);
        let plan = untuned.with(algorithm)?;
        let [start, end] = &self.marks;
        for (count, is_timed) in [(runs / 4 + 1, false), (runs, true)] {
            if is_timed {
                start.record(self.stream)?;
            }
            for _ in 0..count {
                // SAFETY: as the caller guarantees.
                unsafe {
                    let what = || "timing a product".to_owned();
                    let addresses = untuned.call.addresses(self.gemm.workspace.start());
                    plan.queue(self.gemm.handle, &addresses, self.stream, what)?;
                }
            }
        }
        end.record(self.stream)?;
        self.stream.synchronize("timing products")?;
        Ok(end.seconds_since(start)? / runs as f64)
    }

    /// # Safety
    /// As for [`Gemm::tune`].
    unsafe fn queue(&self, untuned: &Untuned, algorithm: &Algorithm) -> Result<(), DeviceError> {
        let plan = untuned.with(algorithm)?;
        let what = || "comparing products".to_owned();
        let addresses = untuned.call.addresses(self.gemm.workspace.start());
        // SAFETY: as the caller guarantees.
        unsafe { plan.queue(self.gemm.handle, &addresses, self.stream, what)? };
        // The descriptors must outlive the call.
        Ok(self.stream.synchronize("comparing products")?)
    }

    /// # Safety
    /// As for [`Gemm::tune`].
    unsafe fn fill(&self, operands: &[Filled]) -> Result<(), DeviceError> {
        for (seed, &(address, dtype, elements)) in operands.iter().enumerate() {
            let name = match dtype {
                DType::BF16 => "fill_bf16",
                DType::U8 => "fill_e4m3",
                _ => "fill_f32",
            };
            let arguments = vec![
                Argument::Pointer(address),
                Argument::I64(elements as i64),
                Argument::I64(seed as i64),
            ];
            // SAFETY: as the caller guarantees.
            unsafe { self.launch(name, arguments)? };
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Gemm::tune`], and the arguments match the kernel.
    unsafe fn launch(&self, name: &str, arguments: Vec<Argument>) -> Result<(), DeviceError> {
        let choice =
            KernelChoice { source: SOURCE, name, definitions: Vec::new(), shared_bytes: 0 };
        let launch = Launch {
            kernel: self.kernels.get(&choice)?,
            grid: (BLOCKS, 1, 1),
            block: THREADS,
            shared_bytes: 0,
            arguments,
            begins_early: false,
            joint: None,
        };
        // SAFETY: as the caller guarantees.
        unsafe { launch.queue(self.stream, Start::InOrder, || "a trial of products".to_owned()) }
    }
}

impl Untuned {
    fn plan(&self) -> &GemmPlan {
        self.call.plan.as_ref().expect("prepared")
    }

    /// Descriptors of the shape with an algorithm.
    fn with(&self, algorithm: &Algorithm) -> Result<GemmPlan, CudaError> {
        let plan = GemmPlan::describe_shape(&self.shape);
        let mut plan = plan.map_err(CudaError::blas("descriptors of a product"))?;
        plan.algorithm = *algorithm;
        Ok(plan)
    }

    /// The operands that the product reads.
    fn operands(&self) -> Vec<Filled> {
        let GemmCall { m, n, k, ref a, ref b, out_dtype, bias, addend, .. } = self.call;
        let always = [(a.address, a.dtype, m * k), (b.address, b.dtype, k * n)];
        let bias = bias.map(|address| (address, out_dtype, n));
        let addend = addend.map(|address| (address, out_dtype, m * n));
        let scales = self.call.scales.iter().flat_map(|scales| [scales.a, scales.b]);
        let scales = scales.map(|address| (address, DType::F32, 1));
        always.into_iter().chain(bias).chain(addend).chain(scales).collect()
    }
}
