//! Every CUDA kernel compiles for every architecture that STORM supports. Needs NVRTC, not a GPU:
//! `cargo xtask test` provides it from its Python environment and sets STORM_REQUIRE_NVRTC.

use rayon::prelude::*;
use storm_device::cuda::{all_kernels, compile, require_nvrtc};

/// Ampere data center, Ada, Hopper, Blackwell desktop.
const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_89", "sm_90", "sm_120"];

#[test]
fn every_kernel_compiles_for_every_architecture() {
    if let Err(error) = require_nvrtc() {
        let required = std::env::var_os("STORM_REQUIRE_NVRTC").is_some();
        assert!(!required, "{error}");
        eprintln!("not checked: {error}");
        return;
    }
    let kernels = all_kernels();
    assert!(kernels.len() > 20, "only {} kernels are listed", kernels.len());
    let jobs: Vec<_> = kernels
        .iter()
        .flat_map(|kernel| match kernel.0.only_for {
            Some(arch) => vec![(kernel, arch)],
            None => ARCHITECTURES.map(|arch| (kernel, arch)).to_vec(),
        })
        .collect();
    let problems: Vec<String> = jobs
        .par_iter()
        .filter_map(|((source, definitions), arch)| match compile(*source, arch, definitions) {
            Ok(cubin) if cubin.starts_with(b"\x7fELF") => None,
            Ok(_) => Some(format!("{} for {arch}: not machine code", source.name)),
            Err(error) => Some(error.to_string()),
        })
        .collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}
