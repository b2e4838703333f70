//! Every CUDA kernel compiles for every architecture that STORM supports, and keeps its values in
//! registers; attention's blocks fit their multiprocessors. Needs NVRTC, not a GPU: `cargo xtask test` provides it from its Python environment
//! and sets STORM_REQUIRE_NVRTC.

mod cubin;

use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use storm_device::cuda::{
    AttentionBlock, KernelSource, all_kernels, attention_blocks, compile, require_nvrtc,
};

/// Ampere data center, Ada, Hopper, Blackwell desktop.
const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_89", "sm_90", "sm_120"];

/// Attention's tiles are cut for cards with little shared memory, so it is also compiled for Ampere
/// desktop.
const ATTENTION: (&str, &str) = ("attention.cu", "sm_86");

/// One source, compiled for one architecture with one set of definitions.
struct Compiled {
    /// `sm_90 norm.cu E=bf16,LAYER=0`.
    what: String,
    source: &'static str,
    architecture: &'static str,
    definitions: &'static [(&'static str, String)],
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
        let kernels: &'static [_] = all_kernels().leak();
        let mut jobs = Vec::new();
        for (source, definitions) in kernels {
            let architectures = match source.only_for {
                Some(architecture) => vec![architecture],
                None if source.name == ATTENTION.0 => [&ARCHITECTURES[..], &[ATTENTION.1]].concat(),
                None => ARCHITECTURES.to_vec(),
            };
            let job = |architecture| (*source, definitions.as_slice(), architecture);
            jobs.extend(architectures.into_iter().map(job));
        }
        let jobs = jobs.par_iter();
        Some(jobs.map(|&(source, values, arch)| compile_one(source, values, arch)).collect())
    })
    .as_deref()
}

fn compile_one(
    source: KernelSource,
    definitions: &'static [(&'static str, String)],
    architecture: &'static str,
) -> Compiled {
    // Bytes of shared memory follow from the rest.
    let named = definitions.iter().filter(|(name, _)| !name.ends_with("_SHARED"));
    let values: Vec<String> = named.map(|(name, value)| format!("{name}={value}")).collect();
    let what = format!("{architecture} {} {}", source.name, values.join(","));
    let cubin = compile(source, architecture, definitions).map_err(|error| error.to_string());
    Compiled { what, source: source.name, architecture, definitions, cubin }
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let Some(all) = compiled() else { return };
    assert!(all.len() > 80, "only {} are compiled", all.len());
    let problems: Vec<String> = all
        .iter()
        .filter_map(|Compiled { what, cubin, .. }| match cubin {
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
    for Compiled { what, cubin, .. } in all {
        let Ok(cubin) = cubin else { continue }; // the test above says so
        let kernels = cubin::kernels(cubin).unwrap_or_else(|| panic!("{what}: no kernel list"));
        assert!(!kernels.is_empty(), "{what}: no kernels");
        // Names with a dollar are parts of the kernels that call them.
        for kernel in kernels.into_iter().filter(|kernel| !kernel.name.starts_with('$')) {
            found.insert(format!("{what} {}", kernel.name), kernel.frame_bytes);
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

/// What blocks of attention.cu take, and how many a multiprocessor has.
const BLOCKS: &str = include_str!("attention_blocks.txt");

/// Shared memory of a multiprocessor. A block has 1 KB less at most, and costs 1 KB more than it
/// asks for.
fn shared_memory(architecture: &str) -> usize {
    let kilobytes = match architecture {
        "sm_80" => 164,
        "sm_90" => 228,
        "sm_86" | "sm_89" | "sm_120" => 100,
        _ => panic!("{architecture}: shared memory is not known"),
    };
    kilobytes * 1024
}

/// Registers of a multiprocessor.
const REGISTERS: usize = 65_536;

/// A block with its kernel's registers and static shared memory.
#[derive(Clone, Copy)]
struct Taken {
    registers: usize,
    shared_bytes: usize,
    blocks: usize,
    warps: usize,
}

fn taken(compiled: &Compiled, kernel: &cubin::Kernel, block: AttentionBlock) -> Taken {
    let room = shared_memory(compiled.architecture);
    // Cubins count the system's own 1 KB from sm_90 on.
    let counted = matches!(compiled.architecture, "sm_90" | "sm_120");
    let own = kernel.shared_bytes - if counted { 1024 } else { 0 };
    let shared_bytes = block.shared_bytes + own;
    let what = &compiled.what;
    assert!(shared_bytes + 1024 <= room, "{what} {}: {shared_bytes} bytes", block.name);
    let (registers, warps) = (kernel.registers as usize, block.threads as usize / 32);
    let by_registers = REGISTERS / (registers.next_multiple_of(8) * 32 * warps);
    let blocks = by_registers.min(room / (shared_bytes + 1024));
    Taken { registers, shared_bytes, blocks, warps: blocks * warps }
}

/// Eight warps at least hide what the others wait for. The file has, for each architecture, head
/// size and kernel, the most registers and bytes of all masks, and the fewest blocks and warps.
#[test]
fn attention_fills_multiprocessors_as_recorded() {
    let Some(all) = compiled() else { return };
    let mut found: BTreeMap<(&str, usize, &str), Taken> = BTreeMap::new();
    for compiled in all.iter().filter(|compiled| compiled.source == ATTENTION.0) {
        let Ok(cubin) = &compiled.cubin else { continue }; // the first test says so
        let value = |name: &str| {
            let definition = compiled.definitions.iter().find(|definition| definition.0 == name);
            definition.and_then(|(_, value)| value.parse::<usize>().ok()).expect("a number")
        };
        let dim = value("HEAD_DIM");
        let kernels = cubin::kernels(cubin).expect("a kernel list");
        for block in attention_blocks(dim, value("SEGMENTS") == 1) {
            let kernel = kernels.iter().find(|kernel| kernel.name == block.name);
            let taken = taken(compiled, kernel.expect("a kernel"), block);
            let key = (compiled.architecture, dim, block.name);
            let most = found.entry(key).or_insert(taken);
            most.registers = most.registers.max(taken.registers);
            most.shared_bytes = most.shared_bytes.max(taken.shared_bytes);
            most.blocks = most.blocks.min(taken.blocks);
            most.warps = most.warps.min(taken.warps);
        }
    }
    let line = |((architecture, dim, kernel), taken): (&(&str, usize, &str), &Taken)| {
        let Taken { registers, shared_bytes, blocks, warps } = taken;
        assert!(*warps >= 8, "{architecture} {dim} {kernel}: {warps} warps");
        format!("{architecture} {dim} {kernel} {registers} {shared_bytes} {blocks} {warps}")
    };
    let found: Vec<String> = found.iter().map(line).collect();
    let recorded: Vec<&str> = BLOCKS.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(found == recorded, "attention_blocks.txt should have:\n{}", found.join("\n"));
}
