//! Training from disk beside training from memory: a set that is much larger than what is held of it, cold, against the
//! same set held whole.
//!
//! Both draw their batches from the same loader with the same threads. They differ in where a block comes from: from disk,
//! or from memory, into which all blocks were read before the clock starts. They take turns with one trainer, so what a
//! card loses to heat is lost by both.

mod causes;
mod rate;
mod scale;
mod stock;

use super::sheet::Sheet;
use crate::bench::Benched;
use crate::data::CodecArg;
use crate::disk_tier::DiskArgs;
use crate::model::grouped;
use crate::train::{Asked, CpuUse, DeviceArg, DeviceKind, Machine, Style, Trains};
use crate::{UsageError, memory_limits, progress, size, tuning};
use anyhow::{Context, Result};
use causes::Causes;
use clap::Args;
use rate::{Rates, Sources, measure_global};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use stock::{BatchSize, Stock};
use storm_data::records::{Codec, RecordLoaderOptions, RecordSet, RecordStage};
use storm_data::{Dataset, Order};
use storm_device::cpu::{Bf16Products, CpuPlanDevice};
use storm_device::cuda::CudaPlanDevice;
use storm_model::{AnyModel, ModelConfig, image_preset, preset};
use storm_plan::{Budget, Forced, Link, RankPlace, Tier};
use storm_train::{
    AnyBatch, Initialized, Launch, LaunchRequest, LaunchSite, Launched, Notice, Precision,
    RunError, StepPlan, StepSize, TrainOptions, Trainer,
};

/// Training from disk may be so much slower than from memory.
const SLOWDOWN_MAX: f64 = 0.01;
/// The measured rate may be so far from the estimate where loading is the slowest stage.
const ESTIMATE_OFF_MAX: f64 = 0.10;
/// A card takes so many seconds at most to find its fastest algorithms.
const TUNE_SECONDS: f64 = 5.0;

#[derive(Args)]
pub(super) struct DataArgs {
    /// Check that training from a dataset on disk is as fast as from the same dataset in memory, in the same device
    /// memory. Test datasets are created and removed: one of random pictures, or of repeated pictures of DATASET, which
    /// `storm data pack` wrote; and one of synthetic text of twice --data-ram.
    #[arg(long, value_name = "DATASET", num_args = 0..=1)]
    data: Option<Option<PathBuf>>,
    /// Bytes of pixels in the picture dataset. All of it must also fit in host memory. Default: 15.4GB on a GPU, 100MB
    /// on the CPU.
    #[arg(long, value_parser = size::parse, requires = "data")]
    data_size: Option<u64>,
    /// Where to create the datasets, on the disk to check.
    #[arg(long, default_value = ".", value_name = "DIR", requires = "data")]
    data_at: PathBuf,
    /// Host memory for data while it is read from disk. Default: 1GiB on a GPU, 16MiB on the CPU.
    #[arg(long, value_parser = size::parse, requires = "data")]
    data_ram: Option<u64>,
    /// Image classifiers and language models to train. Default: small-cnn and gpt2 on a GPU, small-cnn and a tiny gpt2
    /// on the CPU.
    #[arg(long, value_delimiter = ',', value_name = "MODEL", requires = "data")]
    data_models: Vec<String>,
    /// Codecs of the datasets.
    #[arg(long, value_delimiter = ',', value_name = "CODEC", default_values = ["none", "zstd"], requires = "data")]
    data_codecs: Vec<CodecArg>,
    /// Pictures per batch.
    #[arg(long, default_value_t = 512, value_parser = size::positive, requires = "data")]
    data_batch: usize,
    /// Seconds of each measurement; there are three from disk and three from memory.
    #[arg(long, default_value_t = 3.0, value_parser = seconds, requires = "data")]
    data_seconds: f64,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.01..=600.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be a number of seconds from 0.01 to 600".to_owned()),
    }
}

/// How much data there is, and how much of it is in memory.
#[derive(Clone, Copy)]
struct Sizes {
    set_bytes: u64,
    data_ram: u64,
}

impl Sizes {
    /// Tokens of two bytes that are twice as long as what is held of them.
    fn text_tokens(self) -> u64 {
        self.data_ram
    }
}

impl DataArgs {
    fn sizes(&self, kind: DeviceKind) -> Sizes {
        let (set_bytes, data_ram) = match kind {
            DeviceKind::Cuda => (15_400_000_000, 1 << 30),
            DeviceKind::Cpu => (100_000_000, 16 << 20),
        };
        Sizes {
            set_bytes: self.data_size.unwrap_or(set_bytes),
            data_ram: self.data_ram.unwrap_or(data_ram),
        }
    }

    pub(super) fn is_asked_for(&self) -> bool {
        self.data.is_some()
    }
}

/// Checks a device.
pub(super) fn check(
    args: &DataArgs,
    device: DeviceArg,
    hardware: Option<&str>,
    sheet: &mut Sheet,
) -> Result<()> {
    let asked = Asked {
        device,
        vram_bytes: None,
        ram_bytes: None,
        disk: DiskArgs::default(),
        hardware,
        threads: None,
        products: Bf16Products::Fma,
    };
    let named = models(&args.data_models)?;
    let largest = named.iter().map(|(_, model)| model.parameter_count()).max().unwrap_or(0);
    let machine = Machine::new(&asked, largest, Style::Quiet)?;
    let models = match named.is_empty() {
        true => usual_models(machine.kind)?,
        false => named,
    };
    let sizes = args.sizes(machine.kind);
    check_memory(sizes)?;
    sheet.head(&format!(
        "\n{:<10} {:<6} {:<7} {:>12} {:>12}  {:<26} verdict",
        "model", "codec", "order", "per second", "of", "bar"
    ));
    let of_images = |(_, model): &&(String, AnyModel)| model.image().is_some();
    let (images, text): (Vec<_>, Vec<_>) = models.iter().partition(of_images);
    for (models, is_text) in [(images, false), (text, true)] {
        for codec in args.data_codecs.iter().map(|&codec| Codec::from(codec)) {
            if models.is_empty() {
                continue;
            }
            let made = match is_text {
                false => scale::pictures(args, sizes.set_bytes, codec)?,
                true => scale::text(args, sizes.text_tokens(), codec)?,
            };
            let stock = match is_text {
                false => Stock::Pictures(Arc::new(RecordSet::open(&made.dir)?)),
                true => Stock::Text(Arc::new(Dataset::open(&made.dir)?)),
            };
            sheet.head(&made.words(&stock, codec)?);
            for (name, model) in &models {
                let check =
                    Check { args, sizes, machine: &machine, stock: &stock, codec, name, model };
                match machine.kind {
                    DeviceKind::Cpu => check.run::<CpuPlanDevice>(sheet)?,
                    DeviceKind::Cuda => check.run::<CudaPlanDevice>(sheet)?,
                }
            }
        }
    }
    Ok(())
}

fn models(names: &[String]) -> Result<Vec<(String, AnyModel)>> {
    let model = |name: &String| match image_preset(name) {
        Some(config) => Ok((name.clone(), config.into())),
        None => Ok((name.clone(), preset(name)?.into())),
    };
    names.iter().map(model).collect()
}

/// A classifier and a language model that a device trains quickly.
fn usual_models(kind: DeviceKind) -> Result<Vec<(String, AnyModel)>> {
    let names = ["small-cnn", "gpt2"].map(str::to_owned);
    let mut models = models(&names)?;
    if kind == DeviceKind::Cpu {
        let tiny = ModelConfig {
            vocab_size: 512,
            hidden_size: 64,
            layer_count: 2,
            query_heads: 2,
            kv_heads: 2,
            head_dim: 32,
            intermediate_size: 256,
            ..preset("gpt2")?
        };
        models[1] = ("tiny-gpt2".to_owned(), tiny.into());
    }
    Ok(models)
}

/// Refuses a set that cannot be held whole.
fn check_memory(sizes: Sizes) -> Result<()> {
    let Sizes { set_bytes, data_ram } = sizes;
    let available = memory_limits::host(None)?.bytes;
    // Blocks are a little longer than their pixels, and a loader holds some batches. Reading is measured beside one.
    let loaders = data_ram.saturating_mul(2);
    let needed = set_bytes.saturating_add(set_bytes / 4).saturating_add(loaders);
    match needed <= available {
        true => Ok(()),
        false => Err(UsageError(format!(
            "comparing with a dataset of {} in memory takes {} of host memory, and {} are available; give a smaller \
             --data-size",
            size::show(set_bytes),
            size::show(needed),
            size::show(available)
        ))
        .into()),
    }
}

/// One model on one set.
struct Check<'a> {
    args: &'a DataArgs,
    sizes: Sizes,
    machine: &'a Machine,
    stock: &'a Stock,
    codec: Codec,
    name: &'a str,
    model: &'a AnyModel,
}

impl Check<'_> {
    fn run<D: Benched + Trains>(&self, sheet: &mut Sheet) -> Result<()> {
        let mut trainer = self.launch::<D>()?;
        let seconds = self.args.data_seconds;
        let batch = self.batch();
        let rates = |order, trainer: &mut Trainer<D>| {
            Sources::new(self.stock, order, batch, self.sizes.data_ram)?.measure(trainer, seconds)
        };
        let window = rates(Order::Window, &mut trainer)?;
        self.compared(Order::Window, &window, sheet);
        match self.stock {
            Stock::Pictures(set) => {
                let bus = self.machine.profile.link(Link::HOST_TO_DEVICE).bandwidth;
                let options = RecordLoaderOptions::training(batch.rows, 0, self.sizes.data_ram);
                let global = measure_global(set, options, &mut trainer, &window, bus, seconds)?;
                self.estimated(&window, &global, sheet);
            }
            Stock::Text(_) => {
                let global = rates(Order::Global, &mut trainer)?;
                self.compared(Order::Global, &global, sheet);
            }
        }
        progress::show("");
        Ok(())
    }

    fn batch(&self) -> BatchSize {
        match (self.stock, self.machine.kind) {
            (Stock::Pictures(_), _) => BatchSize { rows: self.args.data_batch, sequence: 1 },
            (Stock::Text(_), DeviceKind::Cuda) => BatchSize { rows: 8, sequence: 1024 },
            (Stock::Text(_), DeviceKind::Cpu) => BatchSize { rows: 2, sequence: 64 },
        }
    }

    /// From disk against from memory, in one order.
    fn compared(&self, order: Order, rates: &Rates, sheet: &mut Sheet) {
        let slowdown = rates.slowdown();
        let same_memory = rates.disk_device_bytes == rates.memory_device_bytes;
        let figure = format!(
            "{:+.2} % slower, device memory {}, {}",
            100.0 * slowdown,
            match same_memory {
                true => format!("the same {} bytes", grouped(rates.disk_device_bytes)),
                false => format!(
                    "{} bytes instead of {}",
                    grouped(rates.disk_device_bytes),
                    grouped(rates.memory_device_bytes)
                ),
            },
            rates.reading_path
        );
        let passed = slowdown <= SLOWDOWN_MAX && same_memory;
        let object = json!({
            "model": self.name, "codec": self.codec.name(), "order": order.name(),
            self.stock.rate_key(): rates.disk, self.stock.memory_rate_key(): rates.memory,
            "slowdown": slowdown, "device_bytes": rates.disk_device_bytes,
            "memory_device_bytes": rates.memory_device_bytes,
            "reading_path": rates.reading_path.to_string(), "cached_bytes": rates.cached_bytes,
            "waits": rates.stalls, "batches": rates.batches,
        });
        let row = Row { order, rate: rates.disk, of: rates.memory, bar: "≤ 1 % slower" };
        self.row(&row, passed, &figure, object, sheet);
    }

    /// From disk against what the estimate says.
    fn estimated(&self, rates: &Rates, global: &rate::Global, sheet: &mut Sheet) {
        let off = global.measured / global.expected - 1.0;
        let slowest = global.estimate.stages.first();
        let (passed, bar) = match slowest.is_some_and(RecordStage::is_loading) {
            true => (off.abs() <= ESTIMATE_OFF_MAX, "within 10 % of estimate"),
            false => (1.0 - global.measured / rates.memory <= SLOWDOWN_MAX, "≤ 1 % slower"),
        };
        let slowest = slowest.map_or("", |stage| stage.name);
        let figure = format!(
            "{:+.1} % of {} as estimated, the slowest stage is {slowest}",
            100.0 * off,
            grouped(global.expected as u64),
        );
        let causes = Causes::new(global);
        let object = json!({
            "model": self.name, "codec": self.codec.name(), "order": "global",
            "images_per_second": global.measured, "memory_images_per_second": rates.memory,
            "expected_images_per_second": global.expected, "slowest": slowest,
            "reading_path": rates.reading_path.to_string(), "loading": causes.object(),
        });
        let row = Row { order: Order::Global, rate: global.measured, of: rates.memory, bar };
        self.row(&row, passed, &figure, object, sheet);
        causes.lines().iter().for_each(|line| sheet.head(line));
    }

    fn row(
        &self,
        row: &Row,
        passed: bool,
        figure: &str,
        object: serde_json::Value,
        sheet: &mut Sheet,
    ) {
        let Row { order, rate, of, bar } = row;
        let verdict = if passed { "PASS" } else { "FAIL" };
        let [rate, of] = [rate, of].map(|rate| grouped(*rate as u64));
        let (name, codec, order) = (self.name, self.codec.name(), order.name());
        let line = format!(
            "{name:<10} {codec:<6} {order:<7} {rate:>12} {of:>12}  {bar:<26} {verdict} {figure}"
        );
        sheet.row("data", passed, object, &line);
    }

    /// A trainer for the model: in f32 on the CPU, in bf16 on a card.
    fn launch<D: Trains>(&self) -> Result<Trainer<D>> {
        progress::show(&format!("planning {}", self.name));
        let model = self.stock.model(self.model)?;
        let BatchSize { rows, sequence } = self.batch();
        let precision = match self.machine.kind {
            DeviceKind::Cpu => Precision::F32,
            DeviceKind::Cuda => Precision::Bf16Stochastic,
        };
        let Machine { vram, ram, cpu, profile, .. } = self.machine;
        let request = LaunchRequest {
            rank: RankPlace::default(),
            decided: None,
            model,
            options: TrainOptions::new(rows, sequence, precision),
            step: StepSize::MicroBatches(1),
            profile: profile.clone(),
            budget: Budget::new(vram.bytes, ram.bytes),
            forced: Forced::default(),
            trial: None,
        };
        let mut launch = Launch::new(request)?;
        let mut site = Site { cpu: *cpu };
        let launched = launch.start::<D>(&mut site, None);
        let Launched { mut trainer, .. } =
            launched.with_context(|| format!("cannot train {}", self.name))?;
        trainer.set_recording(false);
        Ok(trainer)
    }
}

/// What the table shows of a check.
struct Row {
    order: Order,
    rate: f64,
    of: f64,
    bar: &'static str,
}

struct Site {
    cpu: CpuUse,
}

impl<D: Trains> LaunchSite<D> for Site {
    fn device(&mut self, budget: Budget, _: &StepPlan, before: Option<D>) -> D::Options {
        let tune_seconds = TUNE_SECONDS.min(tuning::SECONDS_MAX);
        D::options(self.cpu, budget, None, tune_seconds, before, None)
    }

    fn batches(&mut self, _: usize, _: usize) -> Result<Vec<AnyBatch>, RunError> {
        // There is no trial, for which alone they would be.
        Ok(Vec::new())
    }

    fn notice(&mut self, notice: Notice<'_>) {
        match notice {
            Notice::Initializing(Initialized { done_bytes, total_bytes }) => {
                progress::show(&format!("making weights, {done_bytes} of {total_bytes} bytes"));
            }
            Notice::Refused { reason, budget } => {
                let vram = size::show(budget[Tier::DEVICE]);
                eprintln!("warning: {reason}; planning with {vram} of device memory");
            }
            _ => {}
        }
    }
}
