//! Arguments that benchmarks of real models share.

use crate::base::BaseArg;
use crate::codec::CodecArg;
use crate::disk_tier::{self, DiskArgs, DiskTier};
use crate::forced::ForcedArgs;
use crate::lora::LoraArg;
use crate::precision::{MomentsArg, PrecisionArg, check_fp8};
use crate::size::{self, positive};
use crate::{UsageError, hardware, host_memory, memory_limits, tuning};
use anyhow::Result;
use clap::{ArgAction, Args, ValueEnum};
use std::path::PathBuf;
use storm_device::cpu::{Bf16Products, probe_cpu};
use storm_model::{ModelConfig, preset};
use storm_plan::{Budget, HardwareProfile};
use storm_train::{Batch, OptimizerOptions, StepSize, TrainOptions};

/// Larger than the trainer's default, for speed.
const CHUNK_ROWS: usize = 2048;

#[derive(Args)]
pub(crate) struct RunArgs {
    /// Preset; `storm model list` lists them.
    #[arg(long, default_value = "qwen2.5-1.5b")]
    pub(crate) model: String,
    /// Sequences per micro-batch.
    #[arg(long, default_value_t = 16, value_parser = positive)]
    pub(crate) batch: usize,
    /// Micro-batches per step (gradient accumulation).
    #[arg(long, default_value_t = 8, value_parser = positive)]
    pub(crate) accumulate: usize,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 1024, value_parser = positive)]
    pub(crate) seq: usize,
    /// Device to train on.
    #[arg(long, value_enum, default_value_t = DeviceArg::Cuda)]
    pub(crate) device: DeviceArg,
    /// Number formats of parameters, gradients, optimizer state and matrix products.
    #[arg(long, value_enum, default_value_t = PrecisionArg::Bf16Stochastic)]
    pub(crate) precision: PrecisionArg,
    /// How both moments of the optimizer are stored.
    #[arg(long, value_enum, default_value_t = MomentsArg::Full)]
    pub(crate) moments: MomentsArg,
    /// How activations are stored until the backward pass.
    #[arg(long, value_enum, default_value_t = CodecArg::None)]
    pub(crate) activation_codec: CodecArg,
    /// Rows (tokens) of logits to compute at a time.
    #[arg(long, default_value_t = CHUNK_ROWS, value_parser = positive)]
    pub(crate) chunk_rows: usize,
    /// Number of steps to time.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) steps: u32,
    /// Untimed steps before them. With --vram, the last one checks the hardware profile, which is corrected if it is
    /// off; with 0, the profile is not checked.
    #[arg(long, default_value_t = 1)]
    pub(crate) warmup: u32,
    /// Train LoRA adapters beside frozen weights, as in a config file: `rank=16, targets="all-linear"`.
    #[arg(long)]
    pub(crate) lora: Option<LoraArg>,
    /// How the frozen weights of a LoRA run are stored.
    #[arg(long, value_enum, default_value_t = BaseArg::Bf16)]
    pub(crate) base: BaseArg,
    /// Number of layers; a few are enough to try a large model on a small card. Default: the preset's.
    #[arg(long, value_parser = positive)]
    pub(crate) layers: Option<usize>,
    /// Host memory that a plan may use: 64GiB. Default: what this machine or its control group has available, less an
    /// eighth but at most 4 GiB.
    #[arg(long, value_parser = size::parse)]
    pub(crate) ram: Option<u64>,
    /// Folder on a local disk for optimizer state and frozen weights that do not fit in host memory.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) disk: Option<PathBuf>,
    /// Disk space that may be used: 200GB. Default: the free space less a tenth.
    #[arg(long, value_parser = size::parse)]
    pub(crate) disk_space: Option<u64>,
    /// Rated endurance of the drive in bytes written (TBW in its data sheet): 1200TB. Default: estimated from what the
    /// drive reports, if it does.
    #[arg(long, value_parser = size::parse)]
    pub(crate) disk_endurance: Option<u64>,
    /// Run even if a run at this speed would use more than a tenth of the drive's rated endurance in 30 days. If false,
    /// STORM asks at a terminal and refuses elsewhere.
    #[arg(long, value_name = "BOOL", default_value_t = false, action = ArgAction::Set)]
    pub(crate) accept_wear: bool,
    /// Hardware profile to plan with on a GPU: a built-in one (`storm plan --hardware list` names them) or a file that
    /// `storm probe` wrote. Default: the profile of the card. The CPU is always measured.
    #[arg(long)]
    pub(crate) hardware: Option<String>,
    /// Make copies take this many times as long, to simulate a slower bus: 1 to 100.
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR", value_parser = slowdown)]
    pub(crate) slow_copies: f64,
    /// Compute on this many multiprocessors of the card, to simulate a smaller one. Cards round the number up to a
    /// multiple (of 8 on an H200).
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    pub(crate) multiprocessors: Option<usize>,
    /// On a GPU, seconds to spend on finding the fastest algorithms for matrix products. They are kept for the next
    /// run, and do not change results.
    #[arg(long, default_value_t = tuning::SECONDS_MAX, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) tune: f64,
    #[command(flatten)]
    pub(crate) forced: ForcedArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceArg {
    Cpu,
    Cuda,
}

fn slowdown(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if (1.0..=100.0).contains(&factor) => Ok(factor),
        _ => Err("must be a number from 1 to 100".to_owned()),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be a number of seconds from 0 to 3600".to_owned()),
    }
}

impl RunArgs {
    /// The defaults of the command line, for a step of this size.
    pub(crate) fn new(model: &str, batch: usize, accumulate: usize, seq: usize) -> RunArgs {
        RunArgs {
            model: model.to_owned(),
            batch,
            accumulate,
            seq,
            device: DeviceArg::Cuda,
            precision: PrecisionArg::Bf16Stochastic,
            moments: MomentsArg::Full,
            activation_codec: CodecArg::None,
            chunk_rows: CHUNK_ROWS,
            steps: 4,
            warmup: 1,
            lora: None,
            base: BaseArg::Bf16,
            layers: None,
            ram: None,
            disk: None,
            disk_space: None,
            disk_endurance: None,
            accept_wear: false,
            hardware: None,
            slow_copies: 1.0,
            multiprocessors: None,
            tune: 0.0,
            forced: ForcedArgs::default(),
        }
    }

    pub(crate) fn config(&self) -> Result<ModelConfig> {
        let mut config = preset(&self.model)?;
        if let Some(layers) = self.layers {
            config.layer_count = layers;
        }
        let config = self.lora.iter().try_fold(config, |config, lora| lora.apply_to(config))?;
        let config = self.base.apply_to(config)?;
        self.activation_codec.check(&config)?;
        let step = StepSize::MicroBatches(self.accumulate);
        check_fp8(&(&config).into(), &self.options(), step)?;
        Ok(config)
    }

    pub(crate) fn options(&self) -> TrainOptions {
        let (moments, usual) = (self.moments.into(), OptimizerOptions::default());
        let max_norm = self.forced.max_norm(usual.max_norm);
        TrainOptions {
            chunk_rows: self.chunk_rows,
            optimizer: OptimizerOptions { moments, max_norm, ..usual },
            activation_codec: self.activation_codec.into(),
            ..TrainOptions::new(self.batch, self.seq, self.precision.into())
        }
    }

    pub(crate) fn tokens_per_step(&self) -> usize {
        self.batch * self.seq * self.accumulate
    }

    /// Random tokens from a fixed seed.
    pub(crate) fn batches(&self, config: &ModelConfig) -> Result<Vec<Batch>> {
        let step = StepSize::MicroBatches(self.accumulate);
        let unit_bytes = host_memory::of_unit(&config.into());
        let bytes = host_memory::of_step(step, &self.options(), unit_bytes);
        host_memory::check_step(bytes, memory_limits::host(self.ram)?.bytes)?;
        Ok((0..self.accumulate).map(|index| self.random_batch(config.vocab_size, index)).collect())
    }

    fn random_batch(&self, vocabulary: usize, index: usize) -> Batch {
        let mut state =
            0x2545_f491_4f6c_dd1d_u64 ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut token = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % vocabulary as u64) as i32
        };
        let rows = self.batch * self.seq;
        let tokens = (0..rows).map(|_| token()).collect();
        let targets = (0..rows).map(|_| token()).collect();
        Batch::new(tokens, targets, self.seq)
    }

    /// The hardware profile for planning on a device with this much memory.
    pub(crate) fn profile(&self, vram_bytes: u64) -> Result<HardwareProfile> {
        let mut profile = match self.device {
            DeviceArg::Cpu if self.slow_copies != 1.0 || self.multiprocessors.is_some() => {
                let problem = "--slow-copies and --multiprocessors need --device cuda";
                return Err(UsageError(problem.to_owned()).into());
            }
            DeviceArg::Cpu => probe_cpu(vram_bytes, self.threads()?, Bf16Products::Fma)?,
            DeviceArg::Cuda => hardware::named_or_found(self.hardware.as_deref())?,
        };
        // The first steps show how much slower this makes the card, and correct the profile.
        if let Some(count) = self.multiprocessors {
            profile.name = format!("{count} multiprocessors of {}", profile.name);
            profile.multiprocessors = profile.multiprocessors.and(u32::try_from(count).ok());
        }
        if self.slow_copies > 1.0 {
            profile.name = format!("{}, copies {} times slower", profile.name, self.slow_copies);
            for link in &mut profile.links {
                link.to_near_bandwidth /= self.slow_copies;
                link.to_far_bandwidth /= self.slow_copies;
                link.duplex_bandwidth /= self.slow_copies;
            }
        }
        Ok(profile)
    }

    /// This much device memory, and the host memory that is given or available.
    pub(crate) fn budget(&self, vram_bytes: u64) -> Result<Budget> {
        let ram_bytes = memory_limits::host(self.ram)?.bytes;
        let threads = self.threads()?.unwrap_or(0);
        Ok(Budget::new(vram_bytes, ram_bytes.saturating_sub(host_memory::of_threads(threads))))
    }

    /// Disk that optimizer state and frozen weights may use.
    pub(crate) fn open_disk(&self) -> Result<Option<DiskTier>> {
        disk_tier::open(DiskArgs {
            folder: self.disk.as_deref(),
            space_bytes: self.disk_space,
            endurance_bytes: self.disk_endurance,
            drives: None,
        })
    }

    /// Threads of the CPU device. `None` on a GPU.
    pub(crate) fn threads(&self) -> Result<Option<usize>> {
        let ram_bytes = memory_limits::host(self.ram)?.bytes;
        Ok(match self.device {
            DeviceArg::Cpu => Some(host_memory::threads(None, ram_bytes)?),
            DeviceArg::Cuda => None,
        })
    }

    /// Refuses flags that only apply under a plan.
    pub(crate) fn check_unplanned(&self) -> Result<()> {
        let mut flags = self.forced.words();
        if self.slow_copies != 1.0 {
            flags.push_str(" --slow-copies");
        }
        if self.multiprocessors.is_some() {
            flags.push_str(" --multiprocessors");
        }
        if self.disk.is_some() || self.disk_space.or(self.disk_endurance).is_some() {
            flags.push_str(" --disk");
        }
        match flags.trim() {
            "" => Ok(()),
            flags => {
                let problem = format!("{flags}: give --vram too, there is no plan without it");
                Err(UsageError(problem).into())
            }
        }
    }
}
