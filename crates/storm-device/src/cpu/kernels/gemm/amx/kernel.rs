//! The operands of a kernel call, and the choice between the tiles of a core and their emulation.

use super::emulated;
#[cfg(target_arch = "x86_64")]
use super::hardware::{self, Tiles};
use half::bf16;
use std::sync::atomic::{AtomicBool, Ordering};

/// Rows of sums that a kernel computes.
pub(super) const ROWS: usize = 32;
/// Columns of sums that a kernel computes.
pub(super) const COLUMNS: usize = 32;
/// Products of an element that one instruction sums.
pub(super) const STEP: usize = 32;

/// Operands of one call, for 32 × 32 sums. Strides are in elements.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    /// Steps of 32 products.
    pub(super) steps: usize,
    /// A(r, p) = `a[r * a_row + p]`.
    pub(super) a: *const bf16,
    pub(super) a_row: usize,
    /// For each step, two pieces of 16 columns. In a piece, the 16 columns of each pair of products
    /// are side by side.
    pub(super) b: *const bf16,
    /// Sum(r, j) = `sums[r * sums_row + j]`.
    pub(super) sums: *mut f32,
    pub(super) sums_row: usize,
    /// Add to the sums instead of overwriting them.
    pub(super) resume: bool,
}

/// Set by [`force_emulation`].
static EMULATED: AtomicBool = AtomicBool::new(false);

/// Whether bf16 products with the sums of AMX can run on this processor's tiles.
///
/// # Errors
/// The reason why they are emulated, which is roughly a hundred times slower.
pub fn amx_availability() -> Result<(), &'static str> {
    #[cfg(target_arch = "x86_64")]
    return hardware::availability();
    #[cfg(not(target_arch = "x86_64"))]
    Err("this processor has no AMX")
}

/// Switches emulation of AMX on or off for the process. Only speed changes, not results. This
/// exists so that tests can prove it.
pub fn force_emulation(emulate: bool) {
    EMULATED.store(emulate, Ordering::Relaxed);
}

/// Computes sums on the calling thread.
pub(super) enum Kernel {
    #[cfg(target_arch = "x86_64")]
    Tiles(Tiles),
    Emulated,
}

impl Kernel {
    /// The tiles, if this process may use them and emulation is not forced.
    pub(super) fn new() -> Kernel {
        #[cfg(target_arch = "x86_64")]
        if !EMULATED.load(Ordering::Relaxed) && hardware::availability().is_ok() {
            // SAFETY: availability was just checked.
            return Kernel::Tiles(unsafe { Tiles::configure() });
        }
        Kernel::Emulated
    }

    /// Computes sums.
    ///
    /// # Safety
    /// All addresses of the operands must be valid.
    pub(super) unsafe fn multiply(&self, operands: &Operands) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Kernel::Tiles(tiles) => tiles.multiply(operands),
                Kernel::Emulated => emulated::multiply(operands),
            }
        }
    }
}
