//! `cargo xtask bench cpu`: compares STORM with PyTorch eager, with the same model on the same
//! cores.
//!
//! The two take turns, so changes in the machine's speed affect both.

use std::process::Command;
use std::thread::available_parallelism;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::args::Args;
use crate::process::{cargo, output, run as run_command};
use crate::python::Environment;
use crate::workspace::{release_dir, root};

/// What to measure. Both sides get the same settings, except `cpu_products`.
struct Settings {
    rounds: usize,
    steps: usize,
    warmup: usize,
    threads: usize,
    precision: String,
    cpu_products: String,
    ratio_min: Option<f64>,
}

/// What one side prints after one turn, as one line of JSON.
struct Measurement {
    tokens_per_second: f64,
    step_ms: f64,
    step_ms_min: f64,
    /// The whole line, for values that only one side prints.
    json: Value,
}

pub(crate) fn run(mut args: Args) -> Result<()> {
    match args.word().as_deref() {
        Some("cpu") => {}
        _ => bail!("say what to measure: `cargo xtask bench cpu`"),
    }
    let settings = Settings {
        rounds: args.value("--rounds")?.unwrap_or(3),
        steps: args.value("--steps")?.unwrap_or(20),
        warmup: args.value("--warmup")?.unwrap_or(3),
        threads: match args.value("--threads")? {
            Some(threads) => threads,
            None => available_parallelism()?.get(),
        },
        precision: args.value("--precision")?.unwrap_or_else(|| "f32".to_owned()),
        cpu_products: args.value("--cpu-products")?.unwrap_or_else(|| "fma".to_owned()),
        ratio_min: args.value("--min-ratio")?,
    };
    args.finish()?;
    let counts = [settings.rounds, settings.steps, settings.threads];
    ensure!(!counts.contains(&0), "rounds, steps and threads start at 1");

    let environment = Environment::new();
    environment.ensure()?;
    run_command(cargo().args(["build", "--release", "-p", "storm-cli"]))?;

    let mut storm_rounds = Vec::new();
    let mut torch_rounds = Vec::new();
    for round in 1..=settings.rounds {
        eprintln!("round {round} of {}: STORM", settings.rounds);
        let mut storm = Command::new(release_dir().join("storm"));
        storm.current_dir(root()).args(["bench", "cpu", "--json"]);
        storm.args(["--cpu-products", &settings.cpu_products]);
        storm_rounds.push(measure(storm, &settings)?);

        eprintln!("round {round} of {}: PyTorch", settings.rounds);
        let mut torch = environment.python();
        torch.arg(root().join("python/bench_gpt.py"));
        torch_rounds.push(measure(torch, &settings)?);
    }

    let particulars = &torch_rounds[0].json;
    println!("\n{}", environment_line(&settings, particulars)?);
    println!("{:8} {:>10} {:>10} {:>10}  each round", "", "tokens/s", "step ms", "min ms");
    print_rounds("STORM", &storm_rounds);
    print_rounds("PyTorch", &torch_rounds);
    let speed = |rounds: &[Measurement]| median(rounds.iter().map(|m| m.tokens_per_second));
    let ratio = speed(&storm_rounds) / speed(&torch_rounds);
    println!("ratio    {ratio:.2}  (STORM's median tokens/s over PyTorch's)");
    match settings.ratio_min {
        Some(min) if ratio < min => bail!("the ratio {ratio:.2} is below {min}"),
        _ => Ok(()),
    }
}

fn measure(mut command: Command, settings: &Settings) -> Result<Measurement> {
    let options = [
        ("--threads", settings.threads),
        ("--steps", settings.steps),
        ("--warmup", settings.warmup),
    ];
    for (name, value) in options {
        command.arg(name).arg(value.to_string());
    }
    command.args(["--precision", &settings.precision]);
    // The libraries of both sides must use the same number of threads.
    let threads = settings.threads.to_string();
    command.env("OMP_NUM_THREADS", &threads);
    command.env("RAYON_NUM_THREADS", &threads);
    parse(&output(&mut command)?)
}

fn parse(text: &str) -> Result<Measurement> {
    let line = text.lines().rev().find(|line| line.starts_with('{'));
    let line = line.context("the benchmark printed no line of JSON")?;
    let json: Value = serde_json::from_str(line).context("the benchmark's JSON")?;
    let number = |key: &str| {
        let value = json[key].as_f64();
        value.with_context(|| format!("the benchmark's JSON has no number `{key}`"))
    };
    Ok(Measurement {
        tokens_per_second: number("tokens_per_second")?,
        step_ms: number("step_ms")?,
        step_ms_min: number("step_ms_min")?,
        json,
    })
}

fn print_rounds(name: &str, rounds: &[Measurement]) {
    let each: Vec<String> =
        rounds.iter().map(|round| format!("{:.0}", round.tokens_per_second)).collect();
    let fastest = rounds.iter().map(|round| round.step_ms_min);
    println!(
        "{name:8} {:>10.0} {:>10.1} {:>10.1}  {}",
        median(rounds.iter().map(|round| round.tokens_per_second)),
        median(rounds.iter().map(|round| round.step_ms)),
        fastest.fold(f64::INFINITY, f64::min),
        each.join(" ")
    );
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    }
}

fn environment_line(settings: &Settings, torch: &Value) -> Result<String> {
    let rustc = output(Command::new("rustc").arg("--version"))?;
    let rustc = rustc.split_whitespace().nth(1).unwrap_or("?").to_owned();
    Ok(format!(
        "{}, {} threads, {}, STORM {} ({} products, rustc {rustc}), PyTorch {} ({} AdamW), {} rounds of {} steps",
        cpu_model(),
        settings.threads,
        settings.precision,
        env!("CARGO_PKG_VERSION"),
        settings.cpu_products,
        torch["torch"].as_str().unwrap_or("?"),
        torch["optimizer"].as_str().unwrap_or("?"),
        settings.rounds,
        settings.steps,
    ))
}

fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|line| line.starts_with("model name"));
    let model = line.and_then(|line| line.split(':').nth(1));
    model.map_or_else(|| format!("{} CPU", std::env::consts::ARCH), |model| model.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_and_even_counts() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), 2.5);
    }

    #[test]
    fn reads_the_last_line_of_json() {
        let text =
            "warming up\n{\"tokens_per_second\": 10, \"step_ms\": 2.5, \"step_ms_min\": 2}\n";
        let measurement = parse(text).unwrap();
        assert_eq!(measurement.tokens_per_second, 10.0);
        assert_eq!(measurement.step_ms, 2.5);
        assert_eq!(measurement.step_ms_min, 2.0);
    }

    #[test]
    fn names_what_is_missing() {
        let error = |text| format!("{:#}", parse(text).err().unwrap());
        assert!(error("nothing").contains("no line of JSON"));
        assert!(error("{\"tokens_per_second\": 1}").contains("`step_ms`"));
    }
}
