// AdamW with moments in 8 bits, in place. Storage types: P of the parameter, G of the gradient. `storm_graph::moments` has the
// form of the moments and the reasons.
//
// Operations are rounded one by one, as the CPU does (no contraction): with the same random bits
// the result is the same to the bit.
#include "optimizer_common.cuh"

/// Elements that share a scale.
constexpr int GROUP = 128;
/// Threads of a group, a pack each.
constexpr int GROUP_THREADS = GROUP / PACK;
/// A group in memory: four codes in a word, then the scale.
constexpr int GROUP_WORDS = GROUP / 4 + 1;
constexpr int THREADS = 256;

/// The code of the level just below or just above a value, given a guess of the one below.
__device__ inline int rounded_code(const float* levels, int last, float guess, float value, u32 bits) {
    int low = int(guess);
    low = low < last ? low : last - 1;
    const float below = levels[low], above = levels[low + 1];
    const float share = __fmul_rn(__fadd_rn(float(bits), 0.5f), 1.0f / 65536.0f);
    return low + (__fsub_rn(value, below) > __fmul_rn(share, __fsub_rn(above, below)));
}

/// The value, or the nearest that is no larger than `most`.
__device__ inline float within(float value, float most) {
    return value > most ? most : value < -most ? -most : value;
}

/// The largest of a group.
__device__ inline float largest_of_group(float value) {
#pragma unroll
    for (int distance = GROUP_THREADS / 2; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

/// A pack per thread and 16 threads per group, whole warps to the end. As `adamw`; `bound` is the most that a first moment
/// can be as a multiple of the root of its second moment.
extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_int8(P* parameter, const G* gradient, u32* first_moment, u32* second_moment,
               float* master, const float* scalars, const float* clip, const int* seed,
               i64 elements, float beta1, float beta2, float epsilon, float weight_decay,
               float bound, int stochastic_parameter, int stream, i64 first_element
#ifdef OBSERVES
               ,
               float* observed
#endif
    ) {
    __shared__ float first_levels[128], second_levels[256];
    const int thread = threadIdx.x;
    if (thread < 128) {
        const float z = __fdiv_rn(float(thread), 127.0f);
        first_levels[thread] = __fdiv_rn(z, __fsub_rn(2.0f, z));
    }
    const float fourth = __fdiv_rn(float(thread), 255.0f);
    const float square = __fmul_rn(fourth, fourth);
    second_levels[thread] = __fmul_rn(square, square);
    __syncthreads();

    const i64 i = (i64(blockIdx.x) * THREADS + thread) * PACK;
    const i64 group = i / GROUP;
    const bool is_stored = group * GROUP < elements;
    u32* firsts = first_moment + group * GROUP_WORDS;
    u32* seconds = second_moment + group * GROUP_WORDS;
    const int word = int(i % GROUP) / 4;
    const float factor = clip != nullptr ? *clip : 1.0f;
    float value[PACK], g[PACK], first[PACK], second[PACK];
    u32 first_codes[2] = {0, 0}, second_codes[2] = {0, 0};
    float first_scale = 0.0f, second_scale = 0.0f;
    if (is_stored) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            first_codes[half] = firsts[word + half];
            second_codes[half] = seconds[word + half];
        }
        first_scale = __uint_as_float(firsts[GROUP_WORDS - 1]);
        second_scale = __uint_as_float(seconds[GROUP_WORDS - 1]);
    }
    read8(flat(gradient, elements), i, g);
    if (master != nullptr) {
        read8(flat<const float>(master, elements), i, value);
    } else {
        read8(flat<const P>(parameter, elements), i, value);
    }
    if (factor == 0.0f || scalars[1] == 0.0f) return; // the same in every thread

    const Factors factors(scalars, factor, beta1, beta2, epsilon, weight_decay);
    float first_largest = 0.0f, second_largest = 0.0f;
#ifdef OBSERVES
    const bool is_observed = observes(blockIdx.x);
    float before[PACK];
#endif
    float change[PACK];
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        const int code = int((signed char)(first_codes[j / 4] >> (8 * (j % 4))));
        const float magnitude = __fmul_rn(first_levels[min(abs(code), 127)], first_scale);
        first[j] = code < 0 ? -magnitude : magnitude;
        second[j] = __fmul_rn(second_levels[second_codes[j / 4] >> (8 * (j % 4)) & 0xffu], second_scale);
#ifdef OBSERVES
        if (is_observed) {
            const float root_before = __fsqrt_rn(second[j]);
            const float limited = within(first[j], __fmul_rn(bound, root_before));
            before[j] = i + j < elements ? factors.change(limited, root_before) : 0.0f;
        }
#endif
        factors.moments(g[j], first[j], second[j]);
        const float root = __fsqrt_rn(second[j]);
        first[j] = within(first[j], __fmul_rn(bound, root));
        change[j] = factors.change(first[j], root);
        // The last group may be shorter than others.
        if (i + j >= elements) first[j] = second[j] = change[j] = 0.0f;
        first_largest = fmaxf(first_largest, fabsf(first[j]));
        second_largest = fmaxf(second_largest, second[j]);
    }
#ifdef OBSERVES
    Observation observation;
    if (is_observed) observation.set(change, before, value);
    observation.write(observed + 4 * i64(blockIdx.x));
#endif
#pragma unroll
    for (int j = 0; j < PACK; j++) value[j] = factors.value(value[j], change[j]);
    if (master != nullptr) write8(flat(master, elements), i, value);
    first_scale = largest_of_group(first_largest);
    second_scale = largest_of_group(second_largest);

    Bits bits[PACK];
    bits_of(Random(seed, PURPOSE_ROUNDING, stream), first_element + i, bits);
    first_codes[0] = first_codes[1] = second_codes[0] = second_codes[1] = 0;
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        value[j] = rounded<P>(stochastic_parameter, value[j], bits[j].parameter);
        if (first_scale != 0.0f) {
            const float y = __fdiv_rn(fabsf(first[j]), first_scale);
            const float guess = __fmul_rn(__fdiv_rn(__fadd_rn(y, y), __fadd_rn(1.0f, y)), 127.0f);
            const int code = rounded_code(first_levels, 127, guess, y, bits[j].first);
            first_codes[j / 4] |= u32((first[j] < 0.0f ? -code : code) & 0xff) << (8 * (j % 4));
        }
        if (second_scale != 0.0f) {
            const float y = __fdiv_rn(second[j], second_scale);
            const float guess = __fmul_rn(__fsqrt_rn(__fsqrt_rn(y)), 255.0f);
            const int code = rounded_code(second_levels, 255, guess, y, bits[j].second);
            second_codes[j / 4] |= u32(code) << (8 * (j % 4));
        }
    }
    write8(flat(parameter, elements), i, value);
    if (!is_stored) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        firsts[word + half] = first_codes[half];
        seconds[word + half] = second_codes[half];
    }
    if (word == 0) {
        firsts[GROUP_WORDS - 1] = __float_as_uint(first_scale);
        seconds[GROUP_WORDS - 1] = __float_as_uint(second_scale);
    }
}
