//! The tiles of AMX: whether this process may use them, their configuration, and their kernel.
//!
//! Rust has no stable intrinsics for them, so the instructions are in assembly.

use super::kernel::{COLUMNS, Operands, ROWS};
use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, _xgetbv};
use std::sync::OnceLock;

/// Rows of a tile.
const TILE_ROWS: usize = 16;
/// Bytes of a row of a tile.
const TILE_ROW_BYTES: usize = 64;
/// Tiles of a core.
const TILES: usize = 8;

/// The system call `arch_prctl`, and its code to request permission for a component of a core's
/// state.
const SYS_ARCH_PRCTL: usize = 158;
const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
/// Numbers of the state components for tile data and tile configuration.
const TILE_DATA: usize = 18;
const TILE_CONFIG: usize = 17;

/// Whether this process may use AMX for bf16, or why not. The first call requests permission from
/// the system.
pub(super) fn availability() -> Result<(), &'static str> {
    static AVAILABILITY: OnceLock<Result<(), &'static str>> = OnceLock::new();
    *AVAILABILITY.get_or_init(ask)
}

fn ask() -> Result<(), &'static str> {
    // Leaf 7: bit 22 is AMX-BF16, bit 24 AMX-TILE.
    let has_leaf = __cpuid_count(0, 0).eax >= 7;
    if !has_leaf || __cpuid_count(7, 0).edx & (1 << 22 | 1 << 24) != 1 << 22 | 1 << 24 {
        return Err("this processor has no AMX for bf16");
    }
    if !is_x86_feature_detected!("avx512bw") {
        return Err("this processor has AMX but not AVX-512");
    }
    if cfg!(not(target_os = "linux")) {
        return Err("only Linux is asked for AMX");
    }
    let result: isize;
    // SAFETY: the call changes no memory of this process. It permits all its threads to use tiles.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL as isize => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    if result != 0 {
        return Err("the system does not let this process use AMX");
    }
    // SAFETY: AVX-512 was detected, and its detection needs XGETBV.
    let enabled = unsafe { enabled_state() };
    if enabled >> TILE_CONFIG & 3 != 3 {
        return Err("the system has not enabled AMX");
    }
    Ok(())
}

/// A mask of the state components that the system has enabled.
///
/// # Safety
/// The processor must have XGETBV.
#[target_feature(enable = "xsave")]
unsafe fn enabled_state() -> u64 {
    // SAFETY: the caller's promise.
    unsafe { _xgetbv(0) }
}

/// The operand of `ldtilecfg`. All tiles have 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIGURATION: Configuration = {
    let mut configuration = Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [0; 16],
        rows: [0; 16],
    };
    let mut tile = 0;
    while tile < TILES {
        configuration.row_bytes[tile] = TILE_ROW_BYTES as u16;
        configuration.rows[tile] = TILE_ROWS as u8;
        tile += 1;
    }
    configuration
};

/// The configured tiles of the calling thread. They are released on drop, so that the system does
/// not have to save them afterwards.
pub(super) struct Tiles(());

impl Tiles {
    /// # Safety
    /// [`availability`] must have returned `Ok`.
    pub(super) unsafe fn configure() -> Tiles {
        // SAFETY: the configuration is valid. The rest is the caller's promise.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, readonly));
        }
        Tiles(())
    }

    /// Computes 32 × 32 sums: two tiles of A times two tiles of B, in four tiles of sums.
    ///
    /// # Safety
    /// All addresses of the operands must be valid.
    pub(super) unsafe fn multiply(&self, operands: &Operands) {
        let Operands { steps, a, a_row, b, sums, sums_row, resume } = *operands;
        const B_TILE_BYTES: usize = TILE_ROWS * TILE_ROW_BYTES;
        const { assert!(ROWS == 2 * TILE_ROWS && COLUMNS == 2 * TILE_ROWS) };
        // SAFETY: the caller guarantees the addresses. While `self` lives, tiles are configured.
        unsafe {
            asm!(
                "test {resume:e}, {resume:e}",
                "jz 3f",
                "tileloadd tmm0, [{c} + {c_row} * 1]",
                "tileloadd tmm1, [{c} + {c_row} * 1 + {tile_row}]",
                "tileloadd tmm2, [{c_half} + {c_row} * 1]",
                "tileloadd tmm3, [{c_half} + {c_row} * 1 + {tile_row}]",
                "jmp 4f",
                "3:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "4:",
                "test {steps}, {steps}",
                "jz 5f",
                "2:",
                "tileloadd tmm4, [{a} + {a_row} * 1]",
                "tileloadd tmm6, [{b} + {b_row} * 1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {b_row} * 1 + {b_tile}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a_half} + {a_row} * 1]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, {tile_row}",
                "add {a_half}, {tile_row}",
                "add {b}, 2 * {b_tile}",
                "dec {steps}",
                "jnz 2b",
                "5:",
                "tilestored [{c} + {c_row} * 1], tmm0",
                "tilestored [{c} + {c_row} * 1 + {tile_row}], tmm1",
                "tilestored [{c_half} + {c_row} * 1], tmm2",
                "tilestored [{c_half} + {c_row} * 1 + {tile_row}], tmm3",
                resume = in(reg) u32::from(resume),
                steps = inout(reg) steps => _,
                a = inout(reg) a => _,
                a_half = inout(reg) a.wrapping_add(TILE_ROWS * a_row) => _,
                a_row = in(reg) a_row * size_of::<u16>(),
                b = inout(reg) b => _,
                b_row = in(reg) TILE_ROW_BYTES,
                c = in(reg) sums,
                c_half = in(reg) sums.wrapping_add(TILE_ROWS * sums_row),
                c_row = in(reg) sums_row * size_of::<f32>(),
                tile_row = const TILE_ROW_BYTES,
                b_tile = const B_TILE_BYTES,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the tiles were configured, so the instruction exists.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
