//! Helper for the comparisons with PyTorch in `python/tests`.
//!
//! `storm-parity JOB.json` runs the [`Job`] in the file. Numbers go to stdout as one line of JSON;
//! tensors go to the safetensors file or Hugging Face directory that the job names.

mod images;
mod job;
mod run;
mod tensors;

use anyhow::{Context, Result, bail};
use job::Job;
use serde_json::Value;
use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run_file() {
        Ok(numbers) => {
            println!("{numbers}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_file() -> Result<Value> {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(path), None) = (arguments.next().map(PathBuf::from), arguments.next()) else {
        bail!("usage: storm-parity JOB.json");
    };
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read the job {}", path.display()))?;
    let job: Job = serde_json::from_str(&text)
        .with_context(|| format!("{} does not hold a job", path.display()))?;
    run::run(&job)
}
