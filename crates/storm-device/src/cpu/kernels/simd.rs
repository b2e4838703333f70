//! Choice of instruction set, and a macro that compiles a loop once for each of them.
//!
//! The crate is built for the baseline of its architecture.
//! [`simd_dispatch!`](crate::simd_dispatch) also compiles the same body with wider vectors, and
//! picks a version at run time. Rust never contracts or reorders floating-point operations, so all
//! versions give the same bits. For a fused multiply-add, a body uses `f32::mul_add`. It is fused
//! everywhere, by a slow library call where the hardware has no such instruction.

use std::sync::atomic::{AtomicU8, Ordering};

/// An instruction set for which the kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Isa {
    /// The instructions of the build's target.
    Portable = 1,
    /// x86-64 with AVX2 and FMA.
    Avx2 = 2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512 = 3,
}

/// 0 until the first call of [`isa`].
static CURRENT: AtomicU8 = AtomicU8::new(0);

impl Isa {
    /// All instruction sets, slowest first.
    pub const ALL: [Isa; 3] = [Isa::Portable, Isa::Avx2, Isa::Avx512];

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }
}

/// The instruction set in use: the widest available, unless [`force_isa`] set another.
#[inline]
pub fn isa() -> Isa {
    match CURRENT.load(Ordering::Relaxed) {
        1 => Isa::Portable,
        2 => Isa::Avx2,
        3 => Isa::Avx512,
        _ => detect(),
    }
}

#[cold]
fn detect() -> Isa {
    let mut available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    let widest = available.next_back().unwrap_or(Isa::Portable);
    CURRENT.store(widest as u8, Ordering::Relaxed);
    widest
}

/// Makes all kernels of the process use `isa` from now on. Only speed changes, not results. This
/// exists so that tests can prove it.
///
/// # Panics
/// If this machine lacks the instructions.
pub fn force_isa(isa: Isa) {
    assert!(isa.is_available(), "{isa:?} is not available here");
    CURRENT.store(isa as u8, Ordering::Relaxed);
}

/// Defines a function whose body is compiled for every [`Isa`] and dispatched at run time.
///
/// Type parameters go in square brackets: `pub fn scale[T: Element](x: &mut [T], by: f32) { … }`.
/// Everything called in the body must be `#[inline(always)]` to be compiled with it. Closures of
/// iterator chains over slices are fine in practice.
///
/// Unit tests have only the portable version, because the others take most of the time to compile
/// this crate. The tests in `tests/` run all versions.
#[macro_export]
macro_rules! simd_dispatch {
    ($(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident $([$($generic:ident : $bound:path),+ $(,)?])?
        ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block
    )+) => {$(
        $(#[$meta])*
        $vis fn $name $(<$($generic: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body $(<$($generic: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(all(target_arch = "x86_64", not(test)))]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx512 $(<$($generic: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            #[cfg(all(target_arch = "x86_64", not(test)))]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx2 $(<$($generic: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            match $crate::cpu::kernels::simd::isa() {
                #[cfg(all(target_arch = "x86_64", not(test)))]
                // SAFETY: `isa` returns only an instruction set that this machine has.
                $crate::cpu::kernels::simd::Isa::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(all(target_arch = "x86_64", not(test)))]
                // SAFETY: as above.
                $crate::cpu::kernels::simd::Isa::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    )+};
}

/// Lanes of a vectorized reduction. Part of the semantics: it fixes the order of the additions.
pub const LANES: usize = 16;

/// Σ f(i) for i in 0..n in a fixed order that vectorizes: lane `l` sums i ≡ l (mod 16) in order,
/// then the lanes are added pairwise.
#[inline(always)]
pub fn lane_sum(n: usize, mut f: impl FnMut(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = n / LANES * LANES;
    let mut start = 0;
    while start < whole {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(start + lane);
        }
        start += LANES;
    }
    for (lane, sum) in lanes[..n - whole].iter_mut().enumerate() {
        *sum += f(whole + lane);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}
