//! Choice of instruction set, and a macro that compiles a loop once for each of them.
//!
//! The crate is built for the baseline of its architecture.
//! [`simd_dispatch!`](crate::simd_dispatch) also compiles the same body with wider vectors, and
//! picks a version at run time. Rust never contracts or reorders floating-point operations, so all
//! versions give the same bits. For a fused multiply-add, a body uses `f32::mul_add`. It is fused
//! everywhere, by a slow library call where the hardware has no such instruction.

use super::element::Element;
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

/// Σ f(elements) over operands of the same length, one element of each at a time, in a fixed order
/// that vectorizes: lane `l` sums the elements i ≡ l (mod 16) in order, then the lanes are added
/// pairwise.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn lane_sum<E: Element, const N: usize>(
    operands: [&[E]; N],
    mut f: impl FnMut([f32; N]) -> f32,
) -> f32 {
    let length = operands.first().map_or(0, |operand| operand.len());
    assert!(operands.iter().all(|operand| operand.len() == length), "lengths differ");
    let mut lanes = [0.0f32; LANES];
    let parts = operands.map(|operand| operand.as_chunks::<LANES>());
    for at in 0..length / LANES {
        // Whole vectors are read before f is applied: bounds of elements that are read one by one
        // are checked, which keeps the compiler from using vectors.
        let mut vectors = [[0.0f32; LANES]; N];
        for (vector, (whole, _)) in vectors.iter_mut().zip(parts) {
            *vector = E::widen(whole[at]);
        }
        let mut terms = [0.0f32; LANES];
        for (lane, term) in terms.iter_mut().enumerate() {
            // Not `map`, which the compiler does not turn into vectors here.
            let mut elements = [0.0f32; N];
            for (element, vector) in elements.iter_mut().zip(&vectors) {
                *element = vector[lane];
            }
            *term = f(elements);
        }
        for (sum, term) in lanes.iter_mut().zip(terms) {
            *sum += term;
        }
    }
    for (at, sum) in lanes[..length % LANES].iter_mut().enumerate() {
        *sum += f(parts.map(|(_, rest)| rest[at].to_f32()));
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

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    /// The definition, one element at a time.
    fn in_order(terms: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        terms.iter().enumerate().for_each(|(i, term)| lanes[i % LANES] += term);
        let mut width = LANES / 2;
        while width > 0 {
            (0..width).for_each(|lane| lanes[lane] += lanes[lane + width]);
            width /= 2;
        }
        lanes[0]
    }

    fn check<E: Element>(random: &mut storm_graph::random::Random) {
        for length in [0, 1, 15, 16, 17, 31, 32, 100, 384] {
            let mut values = || {
                let value = |r: usize| E::from_f32(r as f32 / 997.0 - 3.0);
                (0..length).map(|_| value(random.below(6000))).collect::<Vec<E>>()
            };
            let (a, b, c) = (values(), values(), values());
            let at = |i: usize| [&a, &b, &c].map(|operand| operand[i].to_f32());
            let terms = |f: fn([f32; 3]) -> f32| (0..length).map(|i| f(at(i))).collect::<Vec<_>>();
            let f: fn([f32; 3]) -> f32 = |[a, b, c]| a * b * ((c - 0.5) * 1.1);
            assert_eq!(lane_sum([&a, &b, &c], f).to_bits(), in_order(&terms(f)).to_bits());
            let squares = in_order(&terms(|[a, ..]| a * a));
            assert_eq!(lane_sum([&a], |[a]| a * a).to_bits(), squares.to_bits());
        }
    }

    #[test]
    fn sums_of_lanes_have_the_order_of_their_definition() {
        let mut random = storm_graph::random::Random(7);
        check::<f32>(&mut random);
        check::<bf16>(&mut random);
    }

    #[test]
    #[should_panic(expected = "lengths differ")]
    fn operands_of_different_lengths_are_refused() {
        lane_sum([&[1.0f32; 16][..], &[1.0; 17]], |[a, b]| a * b);
    }
}
