//! Runs many cases in parallel, and prints how they ended.

use crate::outcome::Verdict;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

/// Failures shown again at the end. Each is also shown when it occurs.
const SHOWN: usize = 10;

/// Cases between two lines of progress.
const PROGRESS: usize = 1000;

/// Whether the whole campaign was asked for.
pub(crate) fn is_long() -> bool {
    std::env::var_os("STORM_LONG_TESTS").is_some()
}

/// Whether all cases are wanted: for the whole campaign, or to find one of them by its name.
pub(crate) fn is_whole() -> bool {
    is_long() || std::env::var_os("STORM_FAULT_CASE").is_some()
}

/// Seed of all random choices.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("STORM_FAULT_SEED").ok();
    given.map_or(1, |text| text.parse().expect("STORM_FAULT_SEED is a number"))
}

/// One attack on `storm`.
pub(crate) struct Case<T> {
    /// Identifies the case, so that it can be run again alone.
    pub(crate) name: String,
    pub(crate) what: T,
}

/// Runs all cases, or the one that `STORM_FAULT_CASE` names. If that ends with a slash, runs all
/// cases whose names begin with it. `check` returns how a case ended, or what is wrong.
///
/// # Panics
/// A case failed.
pub(crate) fn attack<T: Sync>(
    test: &str,
    cases: Vec<Case<T>>,
    check: impl Fn(&T) -> Result<Verdict, String> + Sync,
) {
    let only = std::env::var("STORM_FAULT_CASE").ok();
    let is_chosen = |case: &Case<T>| match only.as_deref() {
        Some(only) if only.ends_with('/') => case.name.starts_with(only),
        Some(only) => case.name == only,
        None => true,
    };
    let cases: Vec<Case<T>> = cases.into_iter().filter(is_chosen).collect();
    let (next, columns) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let failures = Mutex::new(Vec::new());
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(case) = cases.get(number) else { break };
            if number > 0 && number.is_multiple_of(PROGRESS) {
                eprintln!("{test}: {number} of {} cases", cases.len());
            }
            match check(&case.what) {
                Ok(verdict) => {
                    *columns.lock().unwrap().entry(verdict.column()).or_insert(0u64) += 1;
                }
                Err(problem) => {
                    let report = report(test, &case.name, &problem);
                    eprintln!("{report}");
                    failures.lock().unwrap().push(report);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..available_parallelism().map_or(1, Into::into) {
            scope.spawn(work);
        }
    });
    let (columns, failures) = (columns.into_inner().unwrap(), failures.into_inner().unwrap());
    let mut line = format!("{test}: {} cases", cases.len());
    for (column, count) in &columns {
        write!(line, ", {count} {column}").unwrap();
    }
    println!("{line}, {} failures", failures.len());
    let shown = failures[..failures.len().min(SHOWN)].join("\n");
    assert!(failures.is_empty(), "{} of {} cases failed:\n{shown}", failures.len(), cases.len());
}

fn report(test: &str, case: &str, problem: &str) -> String {
    format!(
        "{test} {case}: {problem}\n    again: STORM_FAULT_SEED={} STORM_FAULT_CASE={case} \
         cargo test -p storm-cli --test faults {test}",
        seed()
    )
}
