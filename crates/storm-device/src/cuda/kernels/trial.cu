// What a trial of matrix products needs beside the products: operands, and whether two results are the same.
#include "common.cuh"

/// Spreads the bits of a number over all of its bits.
__device__ inline u64 mixed(u64 x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
}

/// Random values around 0, bell-shaped as activations and weights are: zeros or constants would take less power,
/// and the card would run them faster than real numbers.
__device__ inline float value(i64 i, u64 seed) {
    const u64 bits = mixed(u64(i) + seed * 0x9e3779b97f4a7c15ull);
    float sum = 0.0f;
    for (int part = 0; part < 4; part++) sum += float((bits >> (16 * part)) & 0xffff) / 65536.0f - 0.5f;
    return sum;
}

template <class T> __device__ inline void fill(T* to, i64 elements, u64 seed) {
    const i64 step = i64(gridDim.x) * blockDim.x;
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += step)
        to[i] = from_float<T>(value(i, seed));
}

extern "C" __global__ void fill_bf16(bf16* to, i64 elements, i64 seed) { fill(to, elements, u64(seed)); }
extern "C" __global__ void fill_f32(float* to, i64 elements, i64 seed) { fill(to, elements, u64(seed)); }

/// Codes of 8-bit floats, truncated: the largest magnitude is below 256.
extern "C" __global__ void fill_e4m3(unsigned char* to, i64 elements, i64 seed) {
    const i64 step = i64(gridDim.x) * blockDim.x;
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += step) {
        const u32 bits = __float_as_uint(128.0f * value(i, u64(seed)));
        const int exponent = int(bits >> 23 & 0xff) - 120;
        const u32 magnitude = exponent > 0 ? u32(exponent) << 3 | (bits >> 20 & 7) : 0;
        to[i] = (unsigned char)(magnitude | (bits >> 24 & 0x80));
    }
}

/// Adds a digest of `halves` 16-bit words and their places to `sum`. Addition of integers has no order.
extern "C" __global__ void digest(const unsigned short* from, i64 halves, u64* sum) {
    const i64 step = i64(gridDim.x) * blockDim.x;
    u64 mine = 0;
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < halves; i += step)
        mine += mixed((u64(i) << 16) | from[i]);
    atomicAdd(sum, mine);
}
