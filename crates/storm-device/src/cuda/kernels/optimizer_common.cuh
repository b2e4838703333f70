// What updates of parameters share: random bits of an element, stochastic rounding, the arithmetic of AdamW.
//
// Operations are rounded one by one, as the CPU does (no contraction).
#pragma once
#include "common.cuh"

/// Random bits of one element: for the parameter and its two moments.
struct Bits {
    u32 parameter, first, second;
};

/// The value with `bits` added below the last kept place, cut off.
template <class T> __device__ inline float cut(float value, u32 bits) {
    if (EXACT<T> || !(fabsf(value) < __int_as_float(0x7f800000))) return value;
    return __uint_as_float((__float_as_uint(value) + bits) & 0xffff0000u);
}

/// What a stochastic rounding stores, or the value for a later rounding to nearest.
template <class T> __device__ inline float rounded(bool stochastic, float value, u32 bits) {
    return stochastic ? cut<T>(value, bits) : value;
}

/// Bits of elements `i .. i + 8` of the whole parameter, where `i` is even: two words each.
__device__ inline void bits_of(const Random& random, i64 i, Bits (&bits)[PACK]) {
#pragma unroll
    for (int pair = 0; pair < PACK / 2; pair++) {
        const uint4 words = random.words(u64(i) / 2 + pair);
        bits[2 * pair] = {words.x & 0xffffu, words.x >> 16, words.y & 0xffffu};
        bits[2 * pair + 1] = {words.z & 0xffffu, words.z >> 16, words.w & 0xffffu};
    }
}

/// The factors of one AdamW update. scalars: learning rate, 1 − beta1^t, 1 − beta2^t.
struct Factors {
    float clip, beta1, beta2, rest1, rest2, epsilon, keep, step, second_scale;

    __device__ Factors(const float* scalars, float clip, float beta1, float beta2, float epsilon,
                       float weight_decay)
        : clip(clip), beta1(beta1), beta2(beta2), rest1(__fsub_rn(1.0f, beta1)),
          rest2(__fsub_rn(1.0f, beta2)), epsilon(epsilon),
          keep(__fsub_rn(1.0f, __fmul_rn(scalars[0], weight_decay))),
          step(__fdiv_rn(scalars[0], scalars[1])),
          second_scale(__fdiv_rn(1.0f, __fsqrt_rn(scalars[2]))) {}

    /// The new moments of an element.
    __device__ void moments(float gradient, float& first, float& second) const {
        const float clipped = __fmul_rn(gradient, clip);
        first = __fadd_rn(__fmul_rn(beta1, first), __fmul_rn(rest1, clipped));
        second = __fadd_rn(__fmul_rn(beta2, second), __fmul_rn(__fmul_rn(rest2, clipped), clipped));
    }

    /// The new value.
    __device__ float value(float value, float change) const { return __fsub_rn(__fmul_rn(value, keep), change); }

    /// What is subtracted, besides the decay: from the new first moment and the root of the new second one.
    __device__ float change(float first, float root) const {
        const float denominator = __fadd_rn(__fmul_rn(root, second_scale), epsilon);
        return __fdiv_rn(__fmul_rn(step, first), denominator);
    }
};

#ifdef OBSERVES
/// Whether the warp observes its elements, in the tensor's block number `block`: `is_observed` of storm-graph.
__device__ inline bool observes(i64 block) { return (int(block % 4) + threadIdx.x / WARP) % 4 == 0; }

/// What a thread of a warp that observes adds to the sums: squares of the change, its products with the change before,
/// squares of that, and squares of the values.
struct Observation {
    float own[4] = {};

    __device__ void set(const float (&change)[PACK], const float (&before)[PACK], const float (&value)[PACK]) {
        own[0] = sum_of_products(change, change);
        own[1] = sum_of_products(change, before);
        own[2] = sum_of_products(before, before);
        own[3] = sum_of_products(value, value);
    }

    /// The sums over a block of 256 threads, all of which come here.
    __device__ void write(float* sums) const {
        __shared__ float slots[4][WARP];
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const float sum = block_sum(own[s], slots[s]);
            if (threadIdx.x == 0) sums[s] = sum;
        }
    }

    __device__ static float sum_of_products(const float (&a)[PACK], const float (&b)[PACK]) {
        float x[PACK];
#pragma unroll
        for (int j = 0; j < PACK; j++) x[j] = __fmul_rn(a[j], b[j]);
        return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
    }
};
#endif
