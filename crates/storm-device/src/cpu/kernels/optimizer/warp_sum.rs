//! Sums of 256 numbers in the order of a warp on CUDA: first the eight numbers of a thread, then the 32 threads, both by
//! halves.
//!
//! The numbers come as 16 vectors of 16 lanes. To add lanes of two vectors, both are merged into one, which has the sums
//! of the first in half of its lanes and those of the second in the other half. So the work halves at each level.

/// Lanes of a vector.
pub(super) const LANES: usize = 16;
/// Numbers of a warp.
pub(super) const WARP_ELEMENTS: usize = 256;

pub(super) type Vector = [f32; LANES];

/// How two vectors are merged.
pub(super) trait Merge {
    /// Adds lanes that are `DISTANCE` apart, which is 1, 2 or 4. The sums of `a` come to the lanes whose number has that
    /// bit clear, those of `b` to the others.
    fn merge<const DISTANCE: usize>(a: &Vector, b: &Vector) -> Vector;
}

/// In plain Rust.
pub(super) struct Plain;

impl Merge for Plain {
    #[inline(always)]
    fn merge<const DISTANCE: usize>(a: &Vector, b: &Vector) -> Vector {
        let mut sums = [0.0; LANES];
        for lane in 0..LANES {
            sums[lane] = match lane & DISTANCE {
                0 => a[lane] + a[lane + DISTANCE],
                _ => b[lane - DISTANCE] + b[lane],
            };
        }
        sums
    }
}

/// The sum.
#[inline(always)]
pub(super) fn warp_sum<X: Merge>(numbers: &[f32; WARP_ELEMENTS]) -> f32 {
    let vectors = numbers.as_chunks::<LANES>().0;
    let (low, high) = (half::<X>(&vectors[..8]), half::<X>(&vectors[8..]));
    // Each lane has a thread: bit 3 is the lowest of its number, bits 0 to 2 are the next.
    let mut threads = [0.0; LANES];
    for lane in 0..LANES {
        threads[lane] = low[lane] + high[lane];
    }
    let mut pairs = [0.0; LANES / 2];
    for (at, pair) in pairs.iter_mut().enumerate() {
        let lane = at / 4 * 8 + at % 4;
        *pair = threads[lane] + threads[lane + 4];
    }
    let even = (pairs[0] + pairs[2]) + (pairs[1] + pairs[3]);
    let odd = (pairs[4] + pairs[6]) + (pairs[5] + pairs[7]);
    even + odd
}

/// The sums of half of the threads, each in a lane.
#[inline(always)]
fn half<X: Merge>(v: &[Vector]) -> Vector {
    let [a, b] = [X::merge::<4>(&v[0], &v[4]), X::merge::<4>(&v[1], &v[5])];
    let [c, d] = [X::merge::<4>(&v[2], &v[6]), X::merge::<4>(&v[3], &v[7])];
    X::merge::<1>(&X::merge::<2>(&a, &c), &X::merge::<2>(&b, &d))
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, Merge, Vector};
    use std::arch::x86_64::*;

    /// With AVX-512. Use it only where that is available.
    pub(in super::super) struct Avx512;

    impl Merge for Avx512 {
        #[inline(always)]
        fn merge<const DISTANCE: usize>(a: &Vector, b: &Vector) -> Vector {
            // SAFETY: available, see above.
            unsafe { merge_512::<DISTANCE>(a, b) }
        }
    }

    /// For each lane, which lane of `a` (0 to 15) or `b` (16 to 31) is the first, or second, term of its sum.
    const fn terms<const DISTANCE: usize>(second: bool) -> [i32; LANES] {
        let mut from = [0; LANES];
        let mut lane = 0;
        while lane < LANES {
            let of_a = lane & DISTANCE == 0;
            let first = if of_a { lane } else { LANES + lane - DISTANCE };
            from[lane] = (first + if second { DISTANCE } else { 0 }) as i32;
            lane += 1;
        }
        from
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn merge_512<const DISTANCE: usize>(a: &Vector, b: &Vector) -> Vector {
        let (first, second) = const { (terms::<DISTANCE>(false), terms::<DISTANCE>(true)) };
        let mut sums = [0.0; LANES];
        // SAFETY: every address has 16 elements of 32 bits.
        unsafe {
            let (a, b) = (_mm512_loadu_ps(a.as_ptr()), _mm512_loadu_ps(b.as_ptr()));
            let (first, second) = (first.as_ptr().cast(), second.as_ptr().cast());
            let first = _mm512_permutex2var_ps(a, _mm512_loadu_si512(first), b);
            let second = _mm512_permutex2var_ps(a, _mm512_loadu_si512(second), b);
            _mm512_storeu_ps(sums.as_mut_ptr(), _mm512_add_ps(first, second));
        }
        sums
    }

    /// With AVX2. Use it only where that is available.
    pub(in super::super) struct Avx2;

    impl Merge for Avx2 {
        #[inline(always)]
        fn merge<const DISTANCE: usize>(a: &Vector, b: &Vector) -> Vector {
            // SAFETY: available, see above.
            unsafe { merge_256::<DISTANCE>(a, b) }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn merge_256<const DISTANCE: usize>(a: &Vector, b: &Vector) -> Vector {
        let mut sums = [0.0; LANES];
        let halves = a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0);
        for ((a, b), sums) in halves.zip(sums.as_chunks_mut::<8>().0) {
            // SAFETY: every address has 8 elements.
            unsafe {
                let (a, b) = (_mm256_loadu_ps(a.as_ptr()), _mm256_loadu_ps(b.as_ptr()));
                let (first, second) = match DISTANCE {
                    4 => {
                        (_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
                    }
                    2 => {
                        let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
                        let (low, high) = (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
                        (_mm256_castpd_ps(low), _mm256_castpd_ps(high))
                    }
                    _ => (
                        _mm256_blend_ps::<0b1010_1010>(a, _mm256_moveldup_ps(b)),
                        _mm256_blend_ps::<0b1010_1010>(_mm256_movehdup_ps(a), b),
                    ),
                };
                _mm256_storeu_ps(sums.as_mut_ptr(), _mm256_add_ps(first, second));
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernels::simd::Isa;
    use storm_graph::random::Random;

    /// The definition.
    fn by_halves(values: &[f32]) -> f32 {
        match values.split_at(values.len() / 2) {
            ([], last) => last[0],
            (low, high) => {
                let sums: Vec<f32> = low.iter().zip(high).map(|(a, b)| a + b).collect();
                by_halves(&sums)
            }
        }
    }

    #[test]
    fn every_instruction_set_adds_in_the_order_of_a_warp() {
        let mut random = Random(7);
        let numbers = std::array::from_fn(|_| random.unit() as f32 - 0.3);
        let threads: Vec<f32> = numbers.chunks_exact(8).map(by_halves).collect();
        let expected = by_halves(&threads);
        assert_eq!(warp_sum::<Plain>(&numbers), expected);
        #[cfg(target_arch = "x86_64")]
        if Isa::Avx2.is_available() {
            assert_eq!(warp_sum::<Avx2>(&numbers), expected);
        }
        #[cfg(target_arch = "x86_64")]
        if Isa::Avx512.is_available() {
            assert_eq!(warp_sum::<Avx512>(&numbers), expected);
        }
    }
}
