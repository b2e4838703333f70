//! Every CUDA kernel compiles for every architecture that STORM supports, and keeps its values in
//! registers; attention's blocks fit their multiprocessors. Needs NVRTC, not a GPU: `cargo xtask
//! test` provides it from its Python environment and sets STORM_REQUIRE_NVRTC.
//!
//! To compile everything takes ten minutes of a core, and gives the same until a source, a header or
//! NVRTC changes. So compiled.txt has a hash of what each source's results depend on. A source with
//! that hash is compiled once; any other for all architectures and definitions, and the test says
//! what to record. `STORM_LONG_TESTS=1` compiles everything.

mod cubin;

use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use storm_device::cuda::{
    AttentionBlock, KernelCache, KernelSource, all_kernels, attention_blocks, compile,
    require_nvrtc,
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

/// What tests compile.
struct Results {
    compiled: Vec<Compiled>,
    /// Sources whose results are recorded. Each was compiled once.
    recorded: Vec<&'static str>,
    /// What compiled.txt should have.
    lines: Vec<String>,
}

/// Compiled once for all tests; none without NVRTC.
fn compiled() -> Option<&'static Results> {
    static ALL: OnceLock<Option<Results>> = OnceLock::new();
    ALL.get_or_init(|| {
        if let Err(error) = require_nvrtc() {
            let required = std::env::var_os("STORM_REQUIRE_NVRTC").is_some();
            assert!(!required, "{error}");
            eprintln!("not checked: {error}");
            return None;
        }
        let kernels: &'static [_] = all_kernels().leak();
        let cache = KernelCache::of_user().expect("NVRTC is there");
        let mut jobs: BTreeMap<&str, Vec<_>> = BTreeMap::new();
        for (source, definitions) in kernels {
            let architectures = match source.only_for {
                Some(architecture) => vec![architecture],
                None if source.name == ATTENTION.0 => [&ARCHITECTURES[..], &[ATTENTION.1]].concat(),
                None => ARCHITECTURES.to_vec(),
            };
            let job = |architecture| (*source, definitions.as_slice(), architecture);
            jobs.entry(source.name).or_default().extend(architectures.into_iter().map(job));
        }
        let (mut recorded, mut lines) = (Vec::new(), Vec::new());
        for (&name, jobs) in &mut jobs {
            let mut hasher = blake3::Hasher::new();
            for &(source, definitions, architecture) in &*jobs {
                hasher.update(cache.key(source, architecture, definitions).as_bytes());
            }
            for line in records_of(name) {
                hasher.update(line.as_bytes());
            }
            lines.push(format!("{name} {}", hasher.finalize()));
            let is_recorded = COMPILED.lines().any(|line| Some(line) == lines.last().map(|l| &**l));
            if is_recorded && std::env::var_os("STORM_LONG_TESTS").is_none() {
                jobs.truncate(1);
                recorded.push(name);
            }
        }
        let jobs: Vec<_> = jobs.into_values().flatten().collect();
        let compile = |&(source, values, arch)| compile_one(source, values, arch);
        Some(Results { compiled: jobs.par_iter().map(compile).collect(), recorded, lines })
    })
    .as_ref()
}

/// A hash for each source: what its results, and what the other files record of them, depend on.
const COMPILED: &str = include_str!("compiled.txt");

/// The lines about a source in the other files.
fn records_of(source: &str) -> impl Iterator<Item = &'static str> {
    let blocks = BLOCKS.lines().filter(move |_| source == ATTENTION.0);
    RECORDED.lines().filter(move |line| source_of(line) == Some(source)).chain(blocks)
}

/// Of a line like `sm_90 norm.cu E=bf16,LAYER=0 norm_grad 8`.
fn source_of(line: &str) -> Option<&str> {
    line.split(' ').nth(1).filter(|_| !line.starts_with('#'))
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
    let Some(results) = compiled() else { return };
    assert!(results.compiled.len() >= results.lines.len(), "a source is not compiled");
    let problems: Vec<String> = results
        .compiled
        .iter()
        .filter_map(|Compiled { what, cubin, .. }| match cubin {
            Ok(cubin) if cubin.starts_with(b"\x7fELF") => None,
            Ok(_) => Some(format!("{what}: not machine code")),
            Err(error) => Some(error.clone()),
        })
        .collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    let recorded: Vec<&str> = COMPILED.lines().filter(|line| !line.starts_with('#')).collect();
    // Only true if the other tests pass, too.
    assert!(results.lines == recorded, "compiled.txt should have:\n{}", results.lines.join("\n"));
}

/// What may be in local memory: kernel and bytes a line, for the pinned NVRTC.
const RECORDED: &str = include_str!("local_memory.txt");

/// Spilled registers cost bandwidth and say so nowhere else. A kernel that begins to spill, or
/// spills more, fails; so does a line of the list that is no longer true.
#[test]
fn kernels_spill_no_more_than_is_recorded() {
    let Some(results) = compiled() else { return };
    let mut found: BTreeMap<String, u32> = BTreeMap::new();
    for Compiled { what, cubin, .. } in &results.compiled {
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
    let is_known = |line: &str| source_of(line).is_some_and(|it| results.recorded.contains(&it));
    let stale = recorded.iter().filter(|&(kernel, &bytes)| {
        found.get(*kernel).is_none_or(|&found| found < bytes) && !is_known(kernel)
    });
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
    let Some(results) = compiled() else { return };
    if results.recorded.contains(&ATTENTION.0) {
        return;
    }
    let mut found: BTreeMap<(&str, usize, &str), Taken> = BTreeMap::new();
    let attention = |compiled: &&Compiled| compiled.source == ATTENTION.0;
    for compiled in results.compiled.iter().filter(attention) {
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
