//! `storm verify`: checks, one line each, PASS or FAIL with the figure.

mod claims;
mod data;
mod queues;
mod sheet;

use crate::{UsageError, hardware, progress, train};
use anyhow::Result;
use clap::{Args, ValueEnum};
use serde_json::json;
use sheet::Sheet;
use storm_device::cuda::{CudaDevice, CudaPlanDevice, CudaPlanOptions, GraphUse, OwnProduct};
use storm_verify::{verify_models, verify_ops, verify_plans, verify_row_chunks};

#[derive(Args)]
pub(crate) struct VerifyArgs {
    /// Device to check. On the CPU only --data can be checked; all other checks compare a GPU with the CPU.
    #[arg(long, value_enum, default_value_t = DeviceArg::Cuda)]
    device: DeviceArg,
    /// Check every op on random shapes in f32 and bf16 against the CPU, that a second run gives the same bits, that matrix
    /// products computed in chunks of rows do, and, on Hopper, that those of STORM's own kernels have the library's bits.
    #[arg(long)]
    ops: bool,
    /// Check the gradients of small models of every family, and that training is repeatable bit for bit.
    #[arg(long)]
    models: bool,
    /// Check that training under random plans and under the planner's own gives the same bits as with everything
    /// resident, with random delays in every queue.
    #[arg(long)]
    plans: bool,
    /// Check the device's queues: small plans with random delays and slowed copies against plain arithmetic, a budget
    /// that is too small, and a kernel that fails.
    #[arg(long)]
    queues: bool,
    /// Measure what STORM claims of training under a budget: that copies are hidden, that host memory is exact, and
    /// that memory and time match the prediction.
    #[arg(long)]
    claims: bool,
    #[command(flatten)]
    data: data::DataArgs,
    /// Hardware profile to plan with: a built-in card, or a file that `storm probe` wrote. Default: the profile of the
    /// card.
    #[arg(long)]
    hardware: Option<String>,
    /// For --plans: number of random plans over all model families.
    #[arg(long, default_value_t = 50)]
    plan_count: usize,
    /// For --ops and --queues: number of random cases.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// For --models: number of runs to compare.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..))]
    runs: u32,
    /// For --models: steps of each run.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Print one JSON object with every check instead of tables.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum DeviceArg {
    /// The first NVIDIA GPU.
    Cuda,
    /// The CPU, for --data only.
    Cpu,
}

pub(crate) fn run(args: &VerifyArgs) -> Result<()> {
    let chosen = [args.ops, args.models, args.plans, args.queues, args.claims].contains(&true);
    if let DeviceArg::Cpu = args.device {
        return on_cpu(args, chosen);
    }
    // By default, all checks that write no data.
    let all = !chosen && !args.data.is_asked_for();
    let mut sheet = Sheet::new(args.json, &CudaDevice::new(0, 1)?.card().name);
    if args.ops || all {
        ops(args, &mut sheet)?;
    }
    if args.models || all {
        models(args, &mut sheet)?;
    }
    if args.plans || all {
        plans(args, &mut sheet)?;
    }
    if args.claims || all {
        sheet.head(&format!("\n{:<36} {:<26} verdict", "claim", "bar"));
        claims::all(args.hardware.as_deref(), |claim| {
            progress::show("");
            sheet.claim(claim);
        })?;
    }
    if args.data.is_asked_for() {
        let hardware = args.hardware.as_deref();
        data::check(&args.data, train::DeviceArg::Cuda, hardware, &mut sheet)?;
    }
    // Last, because it ends with a kernel that fails, after which this process cannot use the card.
    if args.queues || all {
        sheet.head(&format!("\n{:<36} verdict", "queues"));
        for check in queues::all(args.seeds)? {
            let verdict = if check.passed { "PASS" } else { "FAIL" };
            let line = format!("{:<36} {verdict} {}", check.what, check.figure);
            let object = json!({"what": check.what, "figure": check.figure.to_string()});
            sheet.row("queues", check.passed, object, &line);
        }
    }
    sheet.finish()
}

/// The CPU is the reference of other checks, so only `--data` applies to it.
fn on_cpu(args: &VerifyArgs, chosen: bool) -> Result<()> {
    if chosen || !args.data.is_asked_for() {
        let problem = "--device cpu can be checked with --data alone: other checks compare a GPU with the CPU";
        return Err(UsageError(problem.to_owned()).into());
    }
    let mut sheet = Sheet::new(args.json, "CPU device");
    data::check(&args.data, train::DeviceArg::Cpu, args.hardware.as_deref(), &mut sheet)?;
    sheet.finish()
}

fn open(bytes: usize) -> Result<CudaDevice, storm_device::DeviceError> {
    CudaDevice::new(0, bytes)
}

fn ops(args: &VerifyArgs, sheet: &mut Sheet) -> Result<()> {
    sheet.head(&format!("\n{:<18} {:<5} {:>6} {:>10}  verdict", "op", "dtype", "nodes", "error"));
    for report in verify_ops(args.seeds, open)? {
        let (op, dtype, nodes) = (report.op, report.dtype.to_string(), report.nodes);
        let verdict = match (&report.unstable, report.passed()) {
            (Some(place), _) => format!("FAIL not repeatable: {place}"),
            (None, true) => "PASS".to_owned(),
            (None, false) => format!("FAIL {}", report.place),
        };
        let line =
            format!("{op:<18} {dtype:<5} {nodes:>6} {:>9.1}%  {verdict}", 100.0 * report.worst);
        let object = json!({"op": op, "dtype": dtype, "nodes": nodes, "error_share": report.worst});
        sheet.row("ops", report.passed(), object, &line);
    }
    sheet.head("error: percent of what rounding allows");
    sheet.head(&format!("\n{:<18} {:>20}  rows in chunks", "product", "rows × out × in"));
    for report in verify_row_chunks(open)? {
        let (rows, outputs, inputs) = report.shape;
        let shape = format!("{rows} × {outputs} × {inputs}");
        let passed = report.differs_at.is_empty();
        let verdict = match passed {
            true => "PASS same bits".to_owned(),
            false => format!("FAIL other bits in chunks of {:?}", report.differs_at),
        };
        let line = format!("{:<18} {shape:>20}  {verdict}", report.op);
        let object = json!({"op": report.op, "rows": rows, "outputs": outputs, "inputs": inputs});
        sheet.row("row_chunks", passed, object, &line);
    }
    own_products(sheet)
}

/// Products by STORM's own kernels against those of the library.
fn own_products(sheet: &mut Sheet) -> Result<()> {
    sheet.head(&format!("\n{:<22} {:>20}  kernel of STORM", "product", "rows × columns × sum"));
    let products = open(1)?.check_own_products()?;
    if products.is_empty() {
        sheet.head("not used: they need a Hopper card");
    }
    for OwnProduct { name, sizes: (rows, columns, terms), differing } in products {
        let shape = format!("{rows} × {columns} × {terms}");
        let verdict = match differing {
            0 => "PASS same bits as the library".to_owned(),
            count => format!("FAIL {count} elements differ from the library's"),
        };
        let line = format!("{name:<22} {shape:>20}  {verdict}");
        let object = json!({"product": name, "rows": rows, "columns": columns, "terms": terms});
        sheet.row("own_products", differing == 0, object, &line);
    }
    Ok(())
}

fn models(args: &VerifyArgs, sheet: &mut Sheet) -> Result<()> {
    let (runs, steps) = (args.runs as usize, args.steps as usize);
    let reports = verify_models(runs, steps, open, progress::show)?;
    progress::show("");
    sheet.head(&format!(
        "\n{:<8} {:<15} {:>12} {:>10}  verdict",
        "family", "precision", "gradients", "repeats"
    ));
    for report in reports {
        let precision = format!("{:?}", report.precision);
        let (runs, steps) = report.runs;
        let repeats = format!("{runs} × {steps}");
        let verdict = match (report.repeatable, report.passed()) {
            (_, true) => "PASS".to_owned(),
            (false, _) => "FAIL not repeatable".to_owned(),
            (true, false) => format!("FAIL {}", report.worst_tensor),
        };
        let line = format!(
            "{:<8} {precision:<15} {:>12.2e} {repeats:>10}  {verdict}",
            report.family, report.gradient_error
        );
        let object = json!({
            "family": report.family.to_string(), "precision": precision,
            "gradient_error": report.gradient_error, "runs": runs, "steps": steps,
        });
        sheet.row("models", report.passed(), object, &line);
    }
    Ok(())
}

/// Enough for the small products of these models.
const TUNE_SECONDS: f64 = 0.2;

fn plans(args: &VerifyArgs, sheet: &mut Sheet) -> Result<()> {
    let profile = hardware::named_or_found(args.hardware.as_deref())?;
    // The fastest algorithms must give the same bits as the library's choice, which the resident
    // model uses.
    let device = |seed| CudaPlanOptions {
        chaos_seed: Some(seed),
        tune_seconds: TUNE_SECONDS,
        // The resident model issues kernels one by one. Some plans do, too.
        graphs: if seed % 4 == 0 { GraphUse::Never } else { GraphUse::Everywhere },
        ..CudaPlanOptions::default()
    };
    let reports = verify_plans::<_, CudaPlanDevice>(
        args.plan_count,
        10,
        &profile,
        open,
        device,
        progress::show,
    )?;
    progress::show("");
    sheet.head(&format!(
        "\n{:<8} {:<15} {:>6} {:>6}  bits of everything resident",
        "family", "precision", "plans", "steps"
    ));
    for report in reports {
        let verdict = match report.passed() {
            true => "PASS".to_owned(),
            false => format!("FAIL {}", report.differing.join(", ")),
        };
        let precision = format!("{:?}", report.precision);
        let (family, plans, steps) = (report.family, report.plans, report.steps);
        let line = format!("{family:<8} {precision:<15} {plans:>6} {steps:>6}  {verdict}");
        let object = json!({
            "family": family.to_string(), "precision": precision, "plans": plans, "steps": steps,
        });
        sheet.row("plans", report.passed(), object, &line);
    }
    Ok(())
}
