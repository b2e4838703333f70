//! `storm eval`: the loss of a model on a dataset.

use crate::disk_tier::DiskArgs;
use crate::image_source::ImageSource;
use crate::loading::Loading;
use crate::model_tokenizer::{OtherTokenizer, Weights};
use crate::precision::DtypeArg;
use crate::size::positive;
use crate::source::{AnySource, ModelSource, Which};
use crate::train::{Asked, DeviceArg, DeviceKind, Machine, OverlongArg, Recorded, Style, Trains};
use crate::tuning::NO_TUNING;
use crate::{UsageError, lengths, progress, size, train};
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use storm_data::records::RecordLoaderOptions;
use storm_data::{Dataset, Kind, LoaderOptions, Split};
use storm_device::cpu::{Bf16Products, CpuPlanDevice};
use storm_device::cuda::CudaPlanDevice;
use storm_graph::DType;
use storm_model::{BuildOptions, DEFAULT_CHUNK_ROWS, ModelOutput, Packing, Products, Unit};
use storm_plan::{Budget, Forced, plan};
use storm_train::{
    AnyBatch, BatchSource, Evaluation, LoaderSource, Precision, RecordSource, evaluation_task,
};

/// Images per batch, if neither a flag nor the run sets it.
const IMAGE_BATCH: usize = 256;

/// Host memory for buffering images read from disk.
const DATA_RAM: u64 = 256 << 20;

#[derive(Args)]
pub(crate) struct EvalArgs {
    /// Model: a run's folder (its newest checkpoint), a checkpoint's folder, a Hugging Face directory, an adapter's
    /// folder, or a model on the hub. A run is evaluated as it evaluates itself, with its data, sequence length,
    /// micro-batches, precision and device, unless a flag overrides them.
    model: PathBuf,
    #[command(flatten)]
    which: Which,
    /// Dataset that `storm data pack` wrote. Default: that of the run.
    #[arg(long)]
    data: Option<PathBuf>,
    /// Part of the dataset to evaluate on.
    #[arg(long, value_enum, default_value_t = SplitArg::HeldOut)]
    split: SplitArg,
    /// Tokens per sequence. Default: as in the run; without a run, 1024.
    #[arg(long, value_parser = positive)]
    seq: Option<usize>,
    /// What to do with samples longer than --seq. Default: as in the run; without a run, `drop`.
    #[arg(long, value_enum)]
    overlong: Option<OverlongArg>,
    /// Sequences or pictures per batch. Default: as in the run; without a run, 4 sequences or 256 pictures.
    #[arg(long, value_parser = positive)]
    batch: Option<usize>,
    /// Number of batches to evaluate. Default: as many as an evaluation of the run has; all batches without a run, with
    /// --split training, and with --skip-rows or --leave-rows.
    #[arg(long, value_parser = positive)]
    batches: Option<usize>,
    /// Rows to skip at the start of the part, such as those that evaluations of the run read.
    #[arg(long, default_value_t = 0, value_name = "ROWS")]
    skip_rows: u64,
    /// Rows to leave out at the end of the part, such as those that predictions read.
    #[arg(long, default_value_t = 0, value_name = "ROWS")]
    leave_rows: u64,
    /// Device to compute on. Default: as in the run; without a run, `auto`.
    #[arg(long, value_enum)]
    device: Option<DeviceArg>,
    /// Device memory to use at most: 8GiB. A larger model is streamed from host memory. Default: the card's memory less
    /// 2 %.
    #[arg(long, value_parser = size::parse)]
    vram: Option<u64>,
    /// Host memory to use at most: 32GiB. Default: what is available, with some headroom.
    #[arg(long, value_parser = size::parse)]
    ram: Option<u64>,
    /// Arithmetic. Default: that of the run; without a run, f32.
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
    /// Accept data that was packed with a tokenizer other than the model's.
    #[arg(long)]
    other_tokenizer: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SplitArg {
    /// Held-out data, which training does not read.
    HeldOut,
    /// Training data.
    Training,
}

/// The resolved options of an evaluation.
struct Evaluated {
    data: PathBuf,
    seq: usize,
    overlong: OverlongArg,
    batch: usize,
    /// Batches whose loss is rounded together, like the micro-batches of a step.
    group: usize,
    batches_max: u64,
    dtype: DType,
    products: Products,
    /// As in the run; only used on the CPU.
    cpu_products: Bf16Products,
    chunk_rows: usize,
    /// As in the run, whose losses include it.
    label_smoothing: f32,
    device: DeviceArg,
}

impl Evaluated {
    fn new(args: &EvalArgs, source: &AnySource) -> Result<Evaluated> {
        let run = Recorded::of_folder(source.run_folder().unwrap_or(&args.model))?;
        let given = args.batches.map(|batches| batches as u64);
        let Some(run) = run else {
            let Some(data) = args.data.clone() else {
                let problem = format!(
                    "{} is not the folder of a run; give --data, a dataset that `storm data pack` made",
                    args.model.display()
                );
                return Err(UsageError(problem).into());
            };
            return Ok(Evaluated {
                data,
                seq: args.seq.unwrap_or(1024),
                overlong: args.overlong.unwrap_or(OverlongArg::Drop),
                batch: args.batch.unwrap_or(match source {
                    AnySource::Language(_) => 4,
                    AnySource::Image(_) => IMAGE_BATCH,
                }),
                group: 1,
                batches_max: given.unwrap_or(u64::MAX),
                dtype: args.dtype.unwrap_or(DtypeArg::F32).into(),
                products: Products::AsStored,
                cpu_products: Bf16Products::Fma,
                chunk_rows: DEFAULT_CHUNK_ROWS,
                label_smoothing: 0.0,
                device: args.device.unwrap_or(DeviceArg::Auto),
            });
        };
        let is_as_in_run = args.batch.is_none() && args.batches.is_none();
        let group = if is_as_in_run { run.accumulate } else { 1 };
        let of_run = match args.split {
            SplitArg::HeldOut => {
                let sequences = run.eval_steps.saturating_mul((run.batch * run.accumulate) as u64);
                sequences.div_ceil(args.batch.unwrap_or(run.batch) as u64)
            }
            SplitArg::Training => u64::MAX,
        };
        Ok(Evaluated {
            data: args.data.clone().unwrap_or(run.data),
            seq: args.seq.unwrap_or(run.seq),
            overlong: args.overlong.unwrap_or(run.overlong),
            batch: args.batch.unwrap_or(run.batch),
            group,
            batches_max: given.unwrap_or(if args.is_between() { u64::MAX } else { of_run }),
            dtype: match args.dtype {
                Some(dtype) => dtype.into(),
                None => Precision::from(run.precision).compute(),
            },
            products: match args.dtype {
                Some(_) => Products::AsStored,
                None => Precision::from(run.precision).products(),
            },
            cpu_products: run.cpu_products.into(),
            chunk_rows: run.chunk_rows,
            label_smoothing: run.label_smoothing,
            device: args.device.unwrap_or(run.device),
        })
    }
}

impl EvalArgs {
    /// Whether the options select a range of rows.
    fn is_between(&self) -> bool {
        self.skip_rows > 0 || self.leave_rows > 0
    }

    /// Options for evaluating the held-out part of a dataset, all of it or `batches`, with a model opened elsewhere.
    pub(crate) fn of_data(
        model: PathBuf,
        data: PathBuf,
        seq: usize,
        batches: Option<usize>,
    ) -> EvalArgs {
        EvalArgs {
            model,
            which: Which::default(),
            data: Some(data),
            split: SplitArg::HeldOut,
            seq: Some(seq),
            overlong: None,
            batch: Some(4),
            batches,
            skip_rows: 0,
            leave_rows: 0,
            device: None,
            vram: None,
            ram: None,
            dtype: None,
            other_tokenizer: false,
            json: true,
        }
    }
}

/// The result of an evaluation.
pub(crate) struct Measured {
    pub(crate) loss: f64,
    /// Fraction of images whose class got the highest score, for an image classifier.
    accuracy: Option<f64>,
    /// Label smoothing in the loss; if there is any, the loss has no perplexity.
    label_smoothing: f32,
    targets: u64,
    split: Split,
    seconds: f64,
}

pub(crate) fn run(args: &EvalArgs) -> Result<()> {
    let source = AnySource::open(&args.model, &args.which)?;
    let measured = measure(args, &source)?;
    let unit = source.model().unit();
    let Measured { loss, accuracy, label_smoothing, targets, split, seconds } = measured;
    let perplexity = (accuracy.is_none() && label_smoothing == 0.0).then(|| loss.exp());
    if args.json {
        let mut object = serde_json::json!({
            "loss": loss,
            unit.name(): targets,
            "split": split.name(),
            "seconds": seconds,
        });
        if let Some(accuracy) = accuracy {
            object["accuracy"] = accuracy.into();
        }
        if let Some(perplexity) = perplexity {
            object["perplexity"] = perplexity.into();
        }
        if label_smoothing > 0.0 {
            object["label_smoothing"] = label_smoothing.into();
        }
        println!("{object}");
        return Ok(());
    }
    let one = if unit == Unit::Images { "an image" } else { "a token" };
    println!("loss        {loss:.4} {one}, of {targets} {} {unit}", split.name());
    if label_smoothing > 0.0 {
        println!("            with the run's label smoothing of {label_smoothing}");
    }
    if let Some(accuracy) = accuracy {
        println!("accuracy    {:.2} %", 100.0 * accuracy);
    }
    if let Some(perplexity) = perplexity {
        println!("perplexity  {perplexity:.2}");
    }
    println!("time        {seconds:.1} s, {:.0} {unit}/s", targets as f64 / seconds);
    Ok(())
}

pub(crate) fn measure(args: &EvalArgs, source: &AnySource) -> Result<Measured> {
    let evaluated = Evaluated::new(args, source)?;
    let asked = Asked {
        device: evaluated.device,
        vram_bytes: args.vram,
        ram_bytes: args.ram,
        disk: DiskArgs::default(),
        hardware: None,
        threads: None,
        products: evaluated.cpu_products,
    };
    let style = if args.json { Style::Quiet } else { Style::People };
    let machine = Machine::new(&asked, source.model().parameter_count(), style)?;
    match machine.kind {
        DeviceKind::Cpu => evaluate::<CpuPlanDevice>(args, &evaluated, source, &machine),
        DeviceKind::Cuda => evaluate::<CudaPlanDevice>(args, &evaluated, source, &machine),
    }
}

/// The data to evaluate on.
struct Data {
    source: Box<dyn BatchSource>,
    rows: u64,
    /// How to build the model for this data.
    build: BuildOptions,
}

impl SplitArg {
    fn split(self) -> Split {
        match self {
            SplitArg::HeldOut => Split::Held,
            SplitArg::Training => Split::Train,
        }
    }
}

fn text(args: &EvalArgs, evaluated: &Evaluated, source: &ModelSource) -> Result<Data> {
    let Evaluated { seq, overlong, batch, dtype, products, chunk_rows, label_smoothing, .. } =
        *evaluated;
    let config = &source.config;
    let dataset = Arc::new(Dataset::open(&evaluated.data)?);
    if let Some(directory) = &source.files {
        let weights = Weights { directory, vocabulary: config.vocab_size };
        weights.check_dataset(&dataset, OtherTokenizer::of_switch(args.other_tokenizer))?;
    }
    let packing = match dataset.manifest().kind {
        Kind::Text => Packing::Single,
        Kind::Samples => Packing::Segments,
    };
    let split = args.split.split();
    let options =
        LoaderOptions { split, overlong: overlong.into(), ..LoaderOptions::evaluation(batch, seq) };
    let loader = LoaderSource::new(dataset, options)?;
    lengths::check(loader.loader(), split, overlong, config.max_positions)?;
    if let Some(words) = config.rotary_words(seq) {
        eprintln!("{}: {words}", args.model.display());
    }
    let build = BuildOptions {
        packing,
        output: ModelOutput::Loss { chunk_rows },
        label_smoothing,
        products,
        ..BuildOptions::training(batch, seq, dtype)
    };
    let rows = loader.loader().rows_per_epoch();
    Ok(Data { source: Box::new(loader), rows, build })
}

fn images(args: &EvalArgs, evaluated: &Evaluated, source: &ImageSource) -> Result<Data> {
    let Evaluated { batch, dtype, chunk_rows, label_smoothing, .. } = *evaluated;
    let set = train::open_images(&evaluated.data, &source.config)?;
    let part = args.split.split();
    let options = RecordLoaderOptions { part, ..RecordLoaderOptions::evaluation(batch, DATA_RAM) };
    let rows = set.records(part);
    let source = Box::new(RecordSource::new(set, options)?);
    let output = ModelOutput::Loss { chunk_rows };
    let usual = BuildOptions::training(batch, 1, dtype);
    let build = BuildOptions { output, label_smoothing, ..usual };
    Ok(Data { source, rows, build })
}

/// The number of batches to evaluate. If rows at the end are left out, counts only whole groups of batches.
fn batches_of(args: &EvalArgs, rows: u64, batch: u64, group: u64) -> Result<u64> {
    let (skipped, left) = (args.skip_rows, args.leave_rows);
    let looked_at = rows.saturating_sub(skipped).saturating_sub(left);
    let batches = match left {
        0 => looked_at.div_ceil(batch),
        _ => looked_at / (batch * group) * group,
    };
    if batches == 0 && args.is_between() {
        let problem = format!(
            "--skip-rows {skipped} and --leave-rows {left} leave nothing to evaluate: the part has {rows} rows, \
             {batch} in a batch"
        );
        return Err(UsageError(problem).into());
    }
    Ok(batches)
}

fn evaluate<D: Trains>(
    args: &EvalArgs,
    evaluated: &Evaluated,
    source: &AnySource,
    machine: &Machine,
) -> Result<Measured> {
    let Evaluated { batch, group, dtype, .. } = *evaluated;
    let model = source.model();
    let Data { source: mut data, rows, build } = match source {
        AnySource::Language(source) => text(args, evaluated, source)?,
        AnySource::Image(source) => images(args, evaluated, source)?,
    };
    let batches = batches_of(args, rows, batch as u64, group as u64)?.min(evaluated.batches_max);
    if args.skip_rows > 0 {
        let mut position = data.position();
        position["row"] = args.skip_rows.into();
        data.resume(&position)?;
    }
    let budget = Budget::new(machine.vram.bytes, machine.ram.bytes);
    let task = evaluation_task(&model, &build, group)?;
    let planned = plan(&task, &machine.profile, budget, &Forced::default()).with_context(|| {
        let model = args.model.display();
        format!("cannot plan an evaluation of {model}; a smaller --batch takes less memory")
    })?;
    progress::show("loading the model");
    let begun = Instant::now();
    let device = D::options(machine.cpu, budget, None, NO_TUNING, None, None);
    let weights = Loading::new(source, &model, dtype);
    let mut evaluation: Evaluation<D> =
        Evaluation::load(&model, &build, &weights, planned.plan.into(), device)?;
    let mut step = vec![AnyBatch::default(); group];
    for first in (0..batches).step_by(group) {
        progress::show(&format!("batch {} of {batches}", first + 1));
        let mut rows = 0;
        for batch in &mut step {
            rows += data.next_batch(batch)?;
        }
        if rows == 0 {
            break;
        }
        evaluation.add(&step)?;
    }
    progress::show("");
    let losses = evaluation.losses();
    let loss = losses
        .loss()
        .context("the data has no targets to predict; choose another --split or --data")?;
    let seconds = begun.elapsed().as_secs_f64();
    let (accuracy, targets, split) = (losses.accuracy(), losses.targets(), args.split.split());
    let label_smoothing = evaluated.label_smoothing;
    Ok(Measured { loss, accuracy, label_smoothing, targets, split, seconds })
}
