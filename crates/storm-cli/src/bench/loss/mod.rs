//! `storm bench loss`: what a change of options does to the loss, over several seeds.

mod child;
mod compare;
mod draw;

use super::outputs::Output;
use crate::UsageError;
use anyhow::Result;
use child::{Runs, Variant};
use clap::Args;
use compare::{Comparison, Curve};
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

#[derive(Args)]
pub(crate) struct LossArgs {
    /// Config of a run; it must set `eval-every`.
    config: PathBuf,
    /// A variant to compare with the config: flags of `storm train` in quotes, such as "--base int8". May be given
    /// several times.
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true, required = true)]
    change: Vec<String>,
    /// Number of seeds to run each variant with: 0, 1, 2, …
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: u64,
    /// Number of runs to make at the same time. Several small runs fill a card better than one; each needs memory of its own, so
    /// the config should set `vram`. Does not change results.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=64))]
    at_once: u64,
    /// Folder of the runs. Finished runs in it are not repeated; unfinished ones are resumed.
    #[arg(long, default_value = "runs/loss")]
    runs: PathBuf,
    /// Draw the losses and their differences to this file.
    #[arg(long, value_name = "FILE.svg")]
    svg: Option<PathBuf>,
    /// Print one line of JSON per variant instead of a table.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &LossArgs) -> Result<()> {
    let variants = variants(&args.change)?;
    let output = Output::create(args.svg.as_deref(), "picture")?;
    let runs = Runs::new(&args.config, &args.runs)?;
    let curves = run_all(&runs, &variants, args)?;
    let (base, others) = curves.split_first().expect("the config as it is");
    let compared: Vec<Comparison> =
        others.iter().map(|other| Comparison::new(base, other)).collect::<Result<_>>()?;
    match args.json {
        true => print_json(&variants, base, &compared),
        false => print_table(&variants, base, &compared),
    }
    if let Some(output) = output {
        let svg = draw::draw(&variants, &curves)?;
        output.write(|out| out.write_all(svg.as_bytes()))?;
    }
    Ok(())
}

/// The curves of each variant, by seed.
fn run_all(runs: &Runs<'_>, variants: &[Variant], args: &LossArgs) -> Result<Vec<Vec<Curve>>> {
    let total = args.seeds as usize * variants.len();
    let next = AtomicUsize::new(0);
    let has_failed = AtomicBool::new(false);
    let work = || {
        let mut made = Vec::new();
        while !has_failed.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= total {
                break;
            }
            let (seed, variant) = (number / variants.len(), &variants[number % variants.len()]);
            eprintln!("run {} of {total}: {}, seed {seed}", number + 1, variant.name);
            let curve = runs.curve(variant, seed as u64);
            has_failed.fetch_or(curve.is_err(), Ordering::Relaxed);
            made.push((number, curve?));
        }
        Ok(made)
    };
    let made: Vec<Result<Vec<(usize, Curve)>>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..args.at_once).map(|_| scope.spawn(work)).collect();
        workers.into_iter().map(|worker| worker.join().expect("no panic")).collect()
    });
    let mut made = made.into_iter().collect::<Result<Vec<_>>>()?.concat();
    made.sort_by_key(|(number, _)| *number);
    let mut curves: Vec<Vec<Curve>> = vec![Vec::new(); variants.len()];
    for (number, curve) in made {
        curves[number % variants.len()].push(curve);
    }
    Ok(curves)
}

fn variants(changes: &[String]) -> Result<Vec<Variant>> {
    let mut variants = vec![Variant::unchanged()];
    for change in changes {
        let variant = Variant::new(change);
        if variant.flags.is_empty() || variants.iter().any(|known| known.flags == variant.flags) {
            let problem = format!("--change \"{change}\" is empty or repeats another");
            return Err(UsageError(problem).into());
        }
        variants.push(variant);
    }
    Ok(variants)
}

fn print_table(variants: &[Variant], base: &[Curve], compared: &[Comparison]) {
    let width = variants.iter().map(|variant| variant.name.len()).max().unwrap_or(0);
    println!(
        "{:width$} {:>10} {:>11} {:>12} {:>12} {:>12}  each seed",
        "", "held-out", "difference", "first loss", "curve above", "curve below"
    );
    let spread = compare::spread(base);
    println!(
        "{:width$} {:>10.4} {:>11} {:>12.4} {:>12} {:>12}  seeds differ by {:.2} %",
        variants[0].name,
        compare::mean_held_out(base),
        "",
        compare::mean_first(base),
        "",
        "",
        100.0 * spread
    );
    for (variant, compared) in variants[1..].iter().zip(compared) {
        let each: Vec<String> = compared
            .each
            .iter()
            .map(|difference| format!("{:+.2} %", 100.0 * difference))
            .collect();
        println!(
            "{:width$} {:>10.4} {:>+9.2} % {:>+10.3} % {:>10.2} % {:>10.2} %  {}",
            variant.name,
            compared.held_out,
            100.0 * compared.difference(),
            100.0 * compared.first,
            100.0 * compared.above,
            100.0 * compared.below,
            each.join(" ")
        );
    }
}

fn print_json(variants: &[Variant], base: &[Curve], compared: &[Comparison]) {
    let line = serde_json::json!({
        "variant": variants[0].name,
        "held_out_loss": compare::mean_held_out(base),
        "first_loss": compare::mean_first(base),
        "seeds_differ": compare::spread(base),
    });
    println!("{line}");
    for (variant, compared) in variants[1..].iter().zip(compared) {
        let line = serde_json::json!({
            "variant": variant.name,
            "held_out_loss": compared.held_out,
            "difference": compared.difference(),
            "difference_of_each_seed": compared.each,
            "difference_of_first_loss": compared.first,
            "smoothed_curve_above_max": compared.above,
            "smoothed_curve_below_max": compared.below,
        });
        println!("{line}");
    }
}
