//! Transposes squares of 32-bit values in registers.

use std::arch::x86_64::*;

/// Transposes 16 × 16 values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn turn_16(r: [__m512; 16]) -> [__m512; 16] {
    let pd = |x| _mm512_castps_pd(x);
    let ps = |x| _mm512_castpd_ps(x);
    // First pairs of values of a column are joined, then quadruples within each 128-bit quarter.
    // Then the quarters are exchanged.
    let zero = _mm512_setzero_ps();
    let mut t = [zero; 16];
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // q[4g + j], quarter c = rows 4g..4g+4 of column 4c + j.
    let mut q = [zero; 16];
    for g in 0..4 {
        q[4 * g] = ps(_mm512_unpacklo_pd(pd(t[4 * g]), pd(t[4 * g + 2])));
        q[4 * g + 1] = ps(_mm512_unpackhi_pd(pd(t[4 * g]), pd(t[4 * g + 2])));
        q[4 * g + 2] = ps(_mm512_unpacklo_pd(pd(t[4 * g + 1]), pd(t[4 * g + 3])));
        q[4 * g + 3] = ps(_mm512_unpackhi_pd(pd(t[4 * g + 1]), pd(t[4 * g + 3])));
    }
    let mut turned = [zero; 16];
    for j in 0..4 {
        let low_even = _mm512_shuffle_f32x4::<0b10_00_10_00>(q[j], q[4 + j]);
        let low_odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(q[j], q[4 + j]);
        let high_even = _mm512_shuffle_f32x4::<0b10_00_10_00>(q[8 + j], q[12 + j]);
        let high_odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(q[8 + j], q[12 + j]);
        turned[j] = _mm512_shuffle_f32x4::<0b10_00_10_00>(low_even, high_even);
        turned[4 + j] = _mm512_shuffle_f32x4::<0b10_00_10_00>(low_odd, high_odd);
        turned[8 + j] = _mm512_shuffle_f32x4::<0b11_01_11_01>(low_even, high_even);
        turned[12 + j] = _mm512_shuffle_f32x4::<0b11_01_11_01>(low_odd, high_odd);
    }
    turned
}

/// Transposes 8 × 8 values.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn turn_8(r: [__m256; 8]) -> [__m256; 8] {
    let pd = |x| _mm256_castps_pd(x);
    let ps = |x| _mm256_castpd_ps(x);
    let zero = _mm256_setzero_ps();
    let mut t = [zero; 8];
    for i in 0..4 {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // q[4g + j], half c = rows 4g..4g+4 of column 4c + j.
    let mut q = [zero; 8];
    for g in 0..2 {
        q[4 * g] = ps(_mm256_unpacklo_pd(pd(t[4 * g]), pd(t[4 * g + 2])));
        q[4 * g + 1] = ps(_mm256_unpackhi_pd(pd(t[4 * g]), pd(t[4 * g + 2])));
        q[4 * g + 2] = ps(_mm256_unpacklo_pd(pd(t[4 * g + 1]), pd(t[4 * g + 3])));
        q[4 * g + 3] = ps(_mm256_unpackhi_pd(pd(t[4 * g + 1]), pd(t[4 * g + 3])));
    }
    let mut turned = [zero; 8];
    for j in 0..4 {
        turned[j] = _mm256_permute2f128_ps::<0x20>(q[j], q[4 + j]);
        turned[4 + j] = _mm256_permute2f128_ps::<0x31>(q[j], q[4 + j]);
    }
    turned
}
