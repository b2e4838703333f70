//! `storm verify`: proofs, one line each, PASS or FAIL with the figure.

mod claims;
mod queues;

use crate::{hardware, progress};
use anyhow::{Result, bail};
use claims::{Claim, Verdict};
use clap::{Args, ValueEnum};
use storm_device::cuda::{CudaDevice, CudaPlanDevice, CudaPlanOptions};
use storm_verify::{verify_models, verify_ops, verify_plans, verify_row_chunks};

#[derive(Args)]
pub(crate) struct VerifyArgs {
    /// What to check against the CPU device: the first NVIDIA GPU.
    #[arg(long, value_enum, default_value_t = DeviceArg::Cuda)]
    device: DeviceArg,
    /// Check every op on random shapes, f32 and bf16, that a second run gives the same bits, and that
    /// products by chunks of rows do.
    #[arg(long)]
    ops: bool,
    /// Check the gradients of small models of every family, and that training repeats bit by bit.
    #[arg(long)]
    models: bool,
    /// Check that training under random plans, and under the planner's own, gives the bits of everything
    /// resident, with random delays in every queue.
    #[arg(long)]
    plans: bool,
    /// Check the queues of the device: small plans with random delays and slowed copies against plain
    /// arithmetic, a budget that is too small, and a kernel that fails.
    #[arg(long)]
    queues: bool,
    /// Measure what is claimed of training under a budget: that copies hide, host memory is exact, and
    /// memory and time are as predicted.
    #[arg(long)]
    claims: bool,
    /// The card's profile, for the planner: a built-in card or a file that `storm probe` wrote.
    #[arg(long)]
    hardware: Option<String>,
    /// Random plans over all families.
    #[arg(long, default_value_t = 50)]
    plan_count: usize,
    /// Random shapes per op.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Runs of the same training.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..))]
    runs: u32,
    /// Steps of each.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
}

#[derive(Clone, Copy, ValueEnum)]
enum DeviceArg {
    /// The first NVIDIA GPU.
    Cuda,
}

pub(crate) fn run(args: &VerifyArgs) -> Result<()> {
    let DeviceArg::Cuda = args.device;
    // Without a choice, everything.
    let all = ![args.ops, args.models, args.plans, args.queues, args.claims].contains(&true);
    let open = |bytes| CudaDevice::new(0, bytes);
    println!("{}", CudaDevice::new(0, 1)?.card().name);
    let mut failed = 0;
    if args.ops || all {
        println!("\n{:<18} {:<5} {:>6} {:>10}  verdict", "op", "dtype", "nodes", "error");
        for report in verify_ops(args.seeds, open)? {
            let (op, dtype, nodes) = (report.op, report.dtype.to_string(), report.nodes);
            let verdict = match (&report.unstable, report.passed()) {
                (Some(place), _) => format!("FAIL not repeatable: {place}"),
                (None, true) => "PASS".to_owned(),
                (None, false) => format!("FAIL {}", report.place),
            };
            println!("{op:<18} {dtype:<5} {nodes:>6} {:>9.1}%  {verdict}", 100.0 * report.worst);
            failed += usize::from(!report.passed());
        }
        println!("error: of what rounding allows");
        println!("\n{:<18} {:>20}  rows in chunks", "product", "rows × out × in");
        for report in verify_row_chunks(open)? {
            let (rows, outputs, inputs) = report.shape;
            let shape = format!("{rows} × {outputs} × {inputs}");
            let verdict = match report.differs_at.is_empty() {
                true => "PASS same bits".to_owned(),
                false => format!("FAIL other bits in chunks of {:?}", report.differs_at),
            };
            println!("{:<18} {shape:>20}  {verdict}", report.op);
            failed += usize::from(!report.differs_at.is_empty());
        }
    }
    if args.models || all {
        let (runs, steps) = (args.runs as usize, args.steps as usize);
        let reports = verify_models(runs, steps, open, progress::show)?;
        progress::show("");
        println!(
            "\n{:<8} {:<15} {:>12} {:>10}  verdict",
            "family", "precision", "gradients", "repeats"
        );
        for report in reports {
            let precision = format!("{:?}", report.precision);
            let (runs, steps) = report.runs;
            let repeats = format!("{runs} × {steps}");
            let verdict = match (report.repeatable, report.passed()) {
                (_, true) => "PASS".to_owned(),
                (false, _) => "FAIL not repeatable".to_owned(),
                (true, false) => format!("FAIL {}", report.worst_tensor),
            };
            println!(
                "{:<8} {precision:<15} {:>12.2e} {repeats:>10}  {verdict}",
                report.family, report.gradient_error
            );
            failed += usize::from(!report.passed());
        }
    }
    if args.plans || all {
        let profile = hardware::named_or_found(args.hardware.as_deref())?;
        let device =
            |seed| CudaPlanOptions { chaos_seed: Some(seed), ..CudaPlanOptions::default() };
        let reports = verify_plans::<_, CudaPlanDevice>(
            args.plan_count,
            10,
            &profile,
            open,
            device,
            progress::show,
        )?;
        progress::show("");
        println!(
            "\n{:<8} {:<15} {:>6} {:>6}  bits of everything resident",
            "family", "precision", "plans", "steps"
        );
        for report in reports {
            let verdict = match report.passed() {
                true => "PASS".to_owned(),
                false => format!("FAIL {}", report.differing.join(", ")),
            };
            let precision = format!("{:?}", report.precision);
            let (family, plans, steps) = (report.family, report.plans, report.steps);
            println!("{family:<8} {precision:<15} {plans:>6} {steps:>6}  {verdict}");
            failed += usize::from(!report.passed());
        }
    }
    if args.claims || all {
        println!("\n{:<36} {:<26} verdict", "claim", "bar");
        claims::all(args.hardware.as_deref(), |claim| {
            progress::show("");
            let Claim { what, bar, figure, verdict } = claim;
            let verdict = match verdict {
                Verdict::Pass => format!("PASS {figure}"),
                Verdict::Fail => format!("FAIL {figure}"),
                Verdict::Skipped(reason) => format!("SKIP {reason}"),
            };
            println!("{what:<36} {bar:<26} {verdict}");
            failed += usize::from(matches!(claim.verdict, Verdict::Fail));
        })?;
    }
    // Last: it ends with a kernel that fails, after which this process cannot use the card.
    if args.queues || all {
        println!("\n{:<36} verdict", "queues");
        for check in queues::all(args.seeds)? {
            let verdict = if check.passed { "PASS" } else { "FAIL" };
            println!("{:<36} {verdict} {}", check.what, check.figure);
            failed += usize::from(!check.passed);
        }
    }
    if failed > 0 {
        bail!("{failed} checks failed");
    }
    Ok(())
}
