//! Updates that are observed: the update of a block and its sums, in one pass.

#[cfg(all(target_arch = "x86_64", not(test)))]
use super::warp_sum::{Avx2, Avx512};
use super::warp_sum::{Merge, Plain, WARP_ELEMENTS, warp_sum};
use super::{Factors, Stored, within};
use crate::cpu::kernels::element::Element;
#[cfg(all(target_arch = "x86_64", not(test)))]
use crate::cpu::kernels::simd::{Isa, isa};
use storm_graph::{OBSERVED_SUMS, is_observed};

/// Sums of warps that a block of threads on CUDA adds up.
const WARPS: usize = 32;

/// Which runs of a block are observed.
#[derive(Clone, Copy)]
pub(super) enum Seen {
    /// Those that `is_observed` names, in this block of a tensor.
    Shared(usize),
    All,
}

impl Seen {
    fn has(self, run: usize) -> bool {
        match self {
            Seen::Shared(block) => is_observed(block, run),
            Seen::All => true,
        }
    }
}

/// Parameter, gradient, first and second moment.
pub(super) type Block<'a, P, G, M> = (&'a mut [P], &'a [G], &'a mut [M], &'a mut [M]);

/// Updates a block, rounding to nearest, and returns the sums over what is seen of it, added in the order of a CUDA block.
/// With `LIMITED`, first moments are limited to `bound` times the root of their second moments.
pub(super) fn observed_update<P: Stored, G: Element, M: Stored, const LIMITED: bool>(
    factors: Factors,
    bound: f32,
    seen: Seen,
    block: Block<'_, P, G, M>,
) -> [f32; OBSERVED_SUMS] {
    // Not `simd_dispatch!`, because the way to merge vectors depends on the instruction set, too.
    #[cfg(all(target_arch = "x86_64", not(test)))]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn avx512<P: Stored, G: Element, M: Stored, const LIMITED: bool>(
        factors: Factors,
        bound: f32,
        seen: Seen,
        block: Block<'_, P, G, M>,
    ) -> [f32; OBSERVED_SUMS] {
        update::<Avx512, P, G, M, LIMITED>(factors, bound, seen, block)
    }

    #[cfg(all(target_arch = "x86_64", not(test)))]
    #[target_feature(enable = "avx2,fma")]
    fn avx2<P: Stored, G: Element, M: Stored, const LIMITED: bool>(
        factors: Factors,
        bound: f32,
        seen: Seen,
        block: Block<'_, P, G, M>,
    ) -> [f32; OBSERVED_SUMS] {
        update::<Avx2, P, G, M, LIMITED>(factors, bound, seen, block)
    }

    #[cfg(all(target_arch = "x86_64", not(test)))]
    match isa() {
        // SAFETY: `isa` returns only an instruction set that this machine has.
        Isa::Avx512 => return unsafe { avx512::<P, G, M, LIMITED>(factors, bound, seen, block) },
        // SAFETY: as above.
        Isa::Avx2 => return unsafe { avx2::<P, G, M, LIMITED>(factors, bound, seen, block) },
        Isa::Portable => {}
    }
    update::<Plain, P, G, M, LIMITED>(factors, bound, seen, block)
}

#[inline(always)]
fn update<X: Merge, P: Stored, G: Element, M: Stored, const LIMITED: bool>(
    factors: Factors,
    bound: f32,
    seen: Seen,
    (p, g, m, v): Block<'_, P, G, M>,
) -> [f32; OBSERVED_SUMS] {
    let mut sums = Sums { terms: [[0.0; WARP_ELEMENTS]; OBSERVED_SUMS], warps: Default::default() };
    let (whole_p, rest_p) = p.as_chunks_mut::<WARP_ELEMENTS>();
    let (whole_g, rest_g) = g.as_chunks::<WARP_ELEMENTS>();
    let (whole_m, rest_m) = m.as_chunks_mut::<WARP_ELEMENTS>();
    let (whole_v, rest_v) = v.as_chunks_mut::<WARP_ELEMENTS>();
    let whole = whole_p.iter_mut().zip(whole_g).zip(whole_m.iter_mut().zip(whole_v));
    let mut warp = 0;
    for ((p, g), (m, v)) in whole {
        let elements = (p, g, m, v);
        if seen.has(warp) {
            update_warp::<P, G, M, LIMITED, true>(factors, bound, elements, &mut sums.terms);
            sums.add::<X>(warp);
        } else {
            update_warp::<P, G, M, LIMITED, false>(factors, bound, elements, &mut sums.terms);
        }
        warp += 1;
    }
    if !rest_p.is_empty() {
        // Elements that add nothing to any sum. Second moments of 1 are never divided by zero.
        let mut p = padded(rest_p, 0.0);
        let (g, mut m, mut v) = (padded(rest_g, 0.0), padded(rest_m, 0.0), padded(rest_v, 1.0));
        let elements = (&mut p, &g, &mut m, &mut v);
        update_warp::<P, G, M, LIMITED, true>(factors, bound, elements, &mut sums.terms);
        if seen.has(warp) {
            sums.add::<X>(warp);
        }
        rest_p.copy_from_slice(&p[..rest_p.len()]);
        rest_m.copy_from_slice(&m[..rest_m.len()]);
        rest_v.copy_from_slice(&v[..rest_v.len()]);
    }
    sums.warps.map(by_halves)
}

/// Aligned, so that no vector crosses a cache line.
#[repr(align(64))]
struct Sums {
    /// Of the elements of a warp.
    terms: [[f32; WARP_ELEMENTS]; OBSERVED_SUMS],
    warps: [[f32; WARPS]; OBSERVED_SUMS],
}

impl Sums {
    #[inline(always)]
    fn add<X: Merge>(&mut self, warp: usize) {
        for (warps, terms) in self.warps.iter_mut().zip(&self.terms) {
            warps[warp] = warp_sum::<X>(terms);
        }
    }
}

#[inline(always)]
fn padded<E: Element>(values: &[E], with: f32) -> [E; WARP_ELEMENTS] {
    let mut padded = [E::from_f32(with); WARP_ELEMENTS];
    padded[..values.len()].copy_from_slice(values);
    padded
}

/// Parameter, gradient, first and second moment of a warp.
type Warp<'a, P, G, M> = (
    &'a mut [P; WARP_ELEMENTS],
    &'a [G; WARP_ELEMENTS],
    &'a mut [M; WARP_ELEMENTS],
    &'a mut [M; WARP_ELEMENTS],
);

/// With `SEEN`, writes the terms of the sums.
#[inline(always)]
fn update_warp<P: Stored, G: Element, M: Stored, const LIMITED: bool, const SEEN: bool>(
    factors: Factors,
    bound: f32,
    (p, g, m, v): Warp<'_, P, G, M>,
    [squares, products, earlier, weights]: &mut [[f32; WARP_ELEMENTS]; OBSERVED_SUMS],
) {
    for i in 0..WARP_ELEMENTS {
        let (value, first, second) = (p[i].to_f32(), m[i].to_f32(), v[i].to_f32());
        if SEEN {
            let root = second.sqrt();
            earlier[i] = factors.change(limited::<LIMITED>(first, bound, root), root);
            weights[i] = value * value;
        }
        let (first, second) = factors.moments(g[i].to_f32(), first, second);
        let root = second.sqrt();
        let first = limited::<LIMITED>(first, bound, root);
        let change = factors.change(first, root);
        if SEEN {
            squares[i] = change * change;
            products[i] = change * earlier[i];
            earlier[i] *= earlier[i];
        }
        p[i] = P::from_f32(value * factors.keep - change);
        m[i] = M::from_f32(first);
        v[i] = M::from_f32(second);
    }
}

#[inline(always)]
fn limited<const LIMITED: bool>(first: f32, bound: f32, root: f32) -> f32 {
    if LIMITED { within(first, bound * root) } else { first }
}

#[inline(always)]
fn by_halves(mut values: [f32; WARPS]) -> f32 {
    let mut half = WARPS / 2;
    while half > 0 {
        let (low, high) = values.split_at_mut(half);
        low.iter_mut().zip(high).for_each(|(low, high)| *low += *high);
        half /= 2;
    }
    values[0]
}
