//! `storm doctor`: what of this machine can be used, what is missing, and how to get it.

mod disk;
mod gpu;
mod host;

use anyhow::{Result, bail};
use clap::Args;
use serde_json::json;
use std::path::PathBuf;

#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// Directory for runs and data: its free space and the speed of its disk are checked.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Something that was looked at.
struct Finding {
    name: &'static str,
    state: State,
    what: String,
    /// How to make it better.
    remedy: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Good,
    /// Works, but slower or with less room than it could.
    Limited,
    Missing,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Good => "ok",
            State::Limited => "limited",
            State::Missing => "missing",
        }
    }
}

impl Finding {
    fn good(name: &'static str, what: String) -> Finding {
        Finding { name, state: State::Good, what, remedy: None }
    }

    fn limited(name: &'static str, what: String, remedy: &str) -> Finding {
        Finding { name, state: State::Limited, what, remedy: Some(remedy.to_owned()) }
    }

    fn missing(name: &'static str, what: String, remedy: &str) -> Finding {
        Finding { name, state: State::Missing, what, remedy: Some(remedy.to_owned()) }
    }
}

pub(crate) fn run(args: &DoctorArgs) -> Result<()> {
    let mut host = host::look();
    host.extend(disk::look(&args.dir));
    let gpu = gpu::look();
    let ready = |findings: &[Finding]| findings.iter().all(|found| found.state != State::Missing);
    let (cpu_ready, gpu_ready) = (ready(&host), ready(&host) && ready(&gpu));
    match args.json {
        true => print_json(cpu_ready, gpu_ready, &host, &gpu)?,
        false => print(cpu_ready, gpu_ready, &host, &gpu),
    }
    match cpu_ready {
        true => Ok(()),
        false => bail!("this machine cannot train, not even on the CPU; see what is missing above"),
    }
}

/// What keeps the GPU from being used and what to do about it, a line each, with a line break before it.
pub(crate) fn gpu_remedies() -> String {
    let missing = gpu::look().into_iter().filter(|found| found.state == State::Missing);
    let line = |found: Finding| {
        format!("\n  {}: {}; {}", found.name, found.what, found.remedy.unwrap_or_default())
    };
    missing.map(line).collect()
}

fn print(cpu_ready: bool, gpu_ready: bool, host: &[Finding], gpu: &[Finding]) {
    let verdict = |ready| if ready { "ready" } else { "not ready" };
    for (title, findings) in [("machine", host), ("GPU", gpu)] {
        println!("{title}");
        for found in findings {
            println!("  {:<8} {:<14} {}", found.state.name(), found.name, found.what);
            if let Some(remedy) = &found.remedy {
                println!("{:26}{remedy}", "");
            }
        }
        println!();
    }
    println!("training on the CPU: {}", verdict(cpu_ready));
    println!("training on a GPU:   {}", verdict(gpu_ready));
}

fn print_json(cpu_ready: bool, gpu_ready: bool, host: &[Finding], gpu: &[Finding]) -> Result<()> {
    let list = |findings: &[Finding]| -> Vec<serde_json::Value> {
        let one = |found: &Finding| {
            let (name, state) = (found.name, found.state.name());
            json!({"name": name, "state": state, "what": found.what, "remedy": found.remedy})
        };
        findings.iter().map(one).collect()
    };
    let value = json!({
        "cpu_ready": cpu_ready,
        "gpu_ready": gpu_ready,
        "machine": list(host),
        "gpu": list(gpu),
    });
    println!("{}", serde_json::to_string_pretty(&value)?);
    Ok(())
}
