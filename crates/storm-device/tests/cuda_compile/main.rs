//! Every CUDA kernel compiles for every architecture that STORM supports, and keeps its values in
//! registers. Needs NVRTC, not a GPU: `cargo xtask test` provides it from its Python environment
//! and sets STORM_REQUIRE_NVRTC.

mod cubin;

use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use storm_device::cuda::{KernelSource, all_kernels, compile, require_nvrtc};

/// Ampere data center, Ada, Hopper, Blackwell desktop.
const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_89", "sm_90", "sm_120"];

/// One source, compiled for one architecture with one set of definitions.
struct Compiled {
    /// `sm_90 norm.cu E=bf16,LAYER=0`.
    what: String,
    cubin: Result<Vec<u8>, String>,
}

/// Everything, compiled once for all tests; none without NVRTC.
fn compiled() -> Option<&'static [Compiled]> {
    static ALL: OnceLock<Option<Vec<Compiled>>> = OnceLock::new();
    ALL.get_or_init(|| {
        if let Err(error) = require_nvrtc() {
            let required = std::env::var_os("STORM_REQUIRE_NVRTC").is_some();
            assert!(!required, "{error}");
            eprintln!("not checked: {error}");
            return None;
        }
        let kernels = all_kernels();
        let jobs: Vec<_> = kernels
            .iter()
            .flat_map(|kernel| match kernel.0.only_for {
                Some(architecture) => vec![(kernel, architecture)],
                None => ARCHITECTURES.map(|architecture| (kernel, architecture)).to_vec(),
            })
            .collect();
        let jobs = jobs.par_iter();
        Some(jobs.map(|&((source, values), arch)| compile_one(*source, values, arch)).collect())
    })
    .as_deref()
}

fn compile_one(
    source: KernelSource,
    definitions: &[(&'static str, String)],
    architecture: &str,
) -> Compiled {
    let values: Vec<String> =
        definitions.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let what = format!("{architecture} {} {}", source.name, values.join(","));
    let cubin = compile(source, architecture, definitions);
    Compiled { what, cubin: cubin.map_err(|error| error.to_string()) }
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let Some(all) = compiled() else { return };
    assert!(all.len() > 80, "only {} are compiled", all.len());
    let problems: Vec<String> = all
        .iter()
        .filter_map(|Compiled { what, cubin }| match cubin {
            Ok(cubin) if cubin.starts_with(b"\x7fELF") => None,
            Ok(_) => Some(format!("{what}: not machine code")),
            Err(error) => Some(error.clone()),
        })
        .collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// What may be in local memory: kernel and bytes a line, for the pinned NVRTC.
const RECORDED: &str = include_str!("local_memory.txt");

/// Spilled registers cost bandwidth and say so nowhere else. A kernel that begins to spill, or
/// spills more, fails; so does a line of the list that is no longer true.
#[test]
fn kernels_spill_no_more_than_is_recorded() {
    let Some(all) = compiled() else { return };
    let mut found: BTreeMap<String, u32> = BTreeMap::new();
    for Compiled { what, cubin } in all {
        let Ok(cubin) = cubin else { continue }; // the test above says so
        let frames = cubin::frame_sizes(cubin).unwrap_or_else(|| panic!("{what}: no kernel list"));
        assert!(!frames.is_empty(), "{what}: no kernels");
        // Names with a dollar are parts of the kernels that call them.
        for (kernel, bytes) in frames.into_iter().filter(|(kernel, _)| !kernel.starts_with('$')) {
            found.insert(format!("{what} {kernel}"), bytes);
        }
    }
    let recorded: BTreeMap<&str, u32> = RECORDED
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let (kernel, bytes) = line.rsplit_once(' ').expect("a kernel and its bytes");
            (kernel, bytes.parse().expect("bytes"))
        })
        .collect();
    let allowed = |kernel: &str| recorded.get(kernel).copied().unwrap_or(0);
    let more = found.iter().filter(|&(kernel, &bytes)| bytes > allowed(kernel));
    let stale = recorded.iter().filter(|&(kernel, &bytes)| found.get(*kernel) < Some(&bytes));
    let problems: Vec<String> = more
        .map(|(kernel, bytes)| format!("{kernel} {bytes}   (recorded: {})", allowed(kernel)))
        .chain(stale.map(|(kernel, bytes)| format!("{kernel} {bytes}   is better now: update it")))
        .collect();
    assert!(
        problems.is_empty(),
        "local memory is not as in local_memory.txt:\n{}",
        problems.join("\n")
    );
}
