//! Chooses where text is generated: on which device, and with weights resident or streamed.

use crate::disk_tier::DiskArgs;
use crate::loading::Loading;
use crate::train::{Asked, DeviceArg, DeviceKind, Machine, Style, Trains, find_for};
use crate::tuning::NO_TUNING;
use crate::{UsageError, progress, size};
use anyhow::{Context, Result};
use clap::Args;
use std::sync::Arc;
use storm_device::cpu::{Bf16Products, CpuDevice, CpuPlanDevice};
use storm_device::cuda::{CudaDevice, CudaPlanDevice};
use storm_model::{DecodeOptions, ModelConfig, ParameterSource};
use storm_plan::{Budget, Forced, plan};
use storm_train::{Decoder, decoding_task};

/// Where to compute, and with how much memory.
#[derive(Args)]
pub(crate) struct PlaceArgs {
    /// Device to compute on.
    #[arg(long, value_enum, default_value_t = DeviceArg::Auto)]
    device: DeviceArg,
    /// Device memory to use at most: 8GiB. A larger model is streamed from host memory. Default: the card's memory less
    /// 2 %.
    #[arg(long, value_parser = size::parse)]
    vram: Option<u64>,
    /// Host memory to use at most: 32GiB. Default: what is available, with some headroom.
    #[arg(long, value_parser = size::parse)]
    ram: Option<u64>,
}

/// A model ready to generate text.
pub(crate) struct Loaded {
    pub(crate) decoder: Decoder,
    /// The chosen device and placement, for the user; `None` on the CPU with everything resident.
    pub(crate) words: Option<String>,
}

/// Device memory for kernels and driver, beyond what is in use right after opening the device.
const CODE_BYTES: u64 = 256 << 20;

/// Loads a model: resident in device memory if it fits, else streamed by a plan.
pub(crate) fn load(
    args: &PlaceArgs,
    config: &ModelConfig,
    options: &DecodeOptions,
    source: &impl ParameterSource,
) -> Result<Loaded> {
    let source = &Loading::new(source, config, options.dtype);
    let needed = Decoder::size_bytes(config, options)? as u64;
    // Allow large models on the CPU (0 parameters passes the check): slow is better than not at all for a short text.
    let kind = find_for(args.device, 0, Style::Quiet)?;
    let asked = |device| Asked {
        device,
        vram_bytes: args.vram,
        ram_bytes: args.ram,
        disk: DiskArgs::default(),
        hardware: None,
        threads: None,
        products: Bf16Products::Fma,
    };
    let parameters = config.parameter_count();
    if kind == DeviceKind::Cpu {
        if args.vram.is_none_or(|vram| needed <= vram) {
            check_ram(needed, args.ram)?;
            progress::show("loading the model");
            let decoder = Decoder::load(config, options, source, CpuDevice::new)?;
            progress::show("");
            return Ok(Loaded { decoder, words: None });
        }
        let machine = Machine::new(&asked(DeviceArg::Cpu), parameters, Style::Quiet)?;
        let vram = machine.vram.bytes;
        return streamed::<CpuPlanDevice>(config, options, source, &machine, vram, "cpu", needed);
    }
    let machine = Machine::new(&asked(DeviceArg::Cuda), parameters, Style::Quiet)?;
    let probe = CudaDevice::new(0, 1 << 20)?;
    let name = format!("cuda ({})", probe.card().name);
    let (in_use, free) = (probe.memory_in_use()?.bytes, probe.memory_free_bytes()?);
    drop(probe);
    let vram = machine.vram.bytes.min(free.saturating_add(in_use));
    if needed.saturating_add(in_use).saturating_add(CODE_BYTES) > vram {
        return streamed::<CudaPlanDevice>(config, options, source, &machine, vram, &name, needed);
    }
    progress::show("loading the model");
    let open = |bytes| CudaDevice::new(0, bytes);
    let decoder = Decoder::load(config, options, source, open)?;
    progress::show("");
    let words = format!(
        "device {name}: the model and its KV cache take {} of device memory",
        size::show(needed)
    );
    Ok(Loaded { decoder, words: Some(words) })
}

fn check_ram(needed: u64, ram: Option<u64>) -> Result<()> {
    match ram {
        Some(ram) if needed > ram => Err(UsageError(format!(
            "the model and its KV cache take {}, and --ram is {}; --dtype bf16 halves that, and a smaller --seq takes \
             less",
            size::show(needed),
            size::show(ram)
        ))
        .into()),
        _ => Ok(()),
    }
}

/// Loads a model that streams the weights that do not fit.
fn streamed<D: Trains + 'static>(
    config: &ModelConfig,
    options: &DecodeOptions,
    source: &impl ParameterSource,
    machine: &Machine,
    vram: u64,
    device: &str,
    needed: u64,
) -> Result<Loaded> {
    let budget = Budget::new(vram, machine.ram.bytes);
    let task = decoding_task(config, options)?;
    let planned = plan(&task, &machine.profile, budget, &Forced::default())
        .context("cannot plan text generation; a smaller --seq takes less memory")?;
    let words = format!(
        "device {device}: the model and its KV cache take {}, of which {} fit; weights are streamed from host memory, \
         about {:.2} s a token",
        size::show(needed),
        size::show(vram),
        planned.prediction.step_seconds
    );
    progress::show("loading the model");
    let device = D::options(machine.cpu, budget, None, NO_TUNING, None, None);
    let plan = Arc::new(planned.plan);
    let decoder = Decoder::streamed::<D>(config, options, source, plan, device)?;
    progress::show("");
    Ok(Loaded { decoder, words: Some(words) })
}
