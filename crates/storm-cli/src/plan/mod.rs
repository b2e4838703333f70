//! `storm plan`: what a training step would do within a memory budget, before anything runs.

mod args;
mod infeasible;
mod json;
mod ranks;
mod request;
mod saving;
mod table;
mod trace;
mod words;

use crate::hardware;
use anyhow::Result;
pub(crate) use args::PlanArgs;
pub(crate) use infeasible::explained;
pub(crate) use ranks::link_words;
pub(crate) use request::{Answer, Request};
pub(crate) use saving::{DeviceMemory, Saving};

pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    if args.hardware.as_deref() == Some("list") {
        return hardware::list(args.json);
    }
    let request = Request::new(args)?;
    let answer = match request.answer(args.what_if) {
        Ok(answer) => answer,
        Err(error) => return Err(explained(&request, error, args.json)),
    };
    if let Some(path) = &args.trace {
        trace::write(path, &answer.planned.plan, &request.profile)?;
    }
    if args.json {
        println!("{:#}", json::answer(&request, &answer));
        return Ok(());
    }
    let mut text = shown(&request, &answer);
    if let Some(path) = &args.trace {
        text.push_str(&format!("\n\nThe simulated step is in {}.", path.display()));
    }
    println!("{text}");
    Ok(())
}

/// A plan in tables and sentences.
pub(crate) fn shown(request: &Request, answer: &Answer) -> String {
    table::text(request, answer)
}

/// A plan as JSON.
pub(crate) fn object(request: &Request, answer: &Answer) -> serde_json::Value {
    json::answer(request, answer)
}
