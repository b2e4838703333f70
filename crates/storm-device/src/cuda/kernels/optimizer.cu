// Updates of parameters, in place. Storage types: P of the parameter, G of the gradient, M of the
// moments.
//
// Operations are rounded one by one, as the CPU does (no contraction): with the same random bits
// the result is the same to the bit.
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

/// A pack per thread. scalars: learning rate, 1 − beta1^t, 1 − beta2^t. `master`, `clip` and
/// `seed` may be null; a clip of 0, or corrections of 0, leave everything as it is. `first_element`:
/// where in the parameter the elements here begin.
extern "C" __global__ void __launch_bounds__(256)
    adamw(P* parameter, const G* gradient, M* first_moment, M* second_moment, float* master,
          const float* scalars, const float* clip, const int* seed, i64 elements, float beta1,
          float beta2, float epsilon, float weight_decay, int stochastic_parameter,
          int stochastic_moments, int stream, i64 first_element) {
    const i64 i = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= elements) return;
    const float factor = clip != nullptr ? *clip : 1.0f;
    const float rate = scalars[0];
    float value[PACK], g[PACK], first[PACK], second[PACK];
    const Pack<G> gradients = read_pack(flat(gradient, elements), i);
    const Pack<M> firsts = read_pack(flat<const M>(first_moment, elements), i);
    const Pack<M> seconds = read_pack(flat<const M>(second_moment, elements), i);
    // Last: a choice of types is a wait for what was chosen.
    if (master != nullptr) {
        read8(flat<const float>(master, elements), i, value);
    } else {
        read8(flat<const P>(parameter, elements), i, value);
    }
    unpack(gradients, g);
    unpack(firsts, first);
    unpack(seconds, second);
    if (factor == 0.0f || scalars[1] == 0.0f) return; // only now, so that nothing waits for it

    const float keep = __fsub_rn(1.0f, __fmul_rn(rate, weight_decay));
    const float step = __fdiv_rn(rate, scalars[1]);
    const float second_scale = __fdiv_rn(1.0f, __fsqrt_rn(scalars[2]));
    const float rest1 = __fsub_rn(1.0f, beta1), rest2 = __fsub_rn(1.0f, beta2);
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        const float clipped = __fmul_rn(g[j], factor);
        first[j] = __fadd_rn(__fmul_rn(beta1, first[j]), __fmul_rn(rest1, clipped));
        second[j] = __fadd_rn(__fmul_rn(beta2, second[j]),
                              __fmul_rn(__fmul_rn(rest2, clipped), clipped));
        const float denominator =
            __fadd_rn(__fmul_rn(__fsqrt_rn(second[j]), second_scale), epsilon);
        value[j] = __fsub_rn(__fmul_rn(value[j], keep),
                             __fdiv_rn(__fmul_rn(step, first[j]), denominator));
    }
    if (master != nullptr) write8(flat(master, elements), i, value);
    if (stochastic_parameter || stochastic_moments) {
        Bits bits[PACK];
        bits_of(Random(seed, PURPOSE_ROUNDING, stream), first_element + i, bits);
#pragma unroll
        for (int j = 0; j < PACK; j++) {
            value[j] = rounded<P>(stochastic_parameter, value[j], bits[j].parameter);
            first[j] = rounded<M>(stochastic_moments, first[j], bits[j].first);
            second[j] = rounded<M>(stochastic_moments, second[j], bits[j].second);
        }
    }
    write8(flat(parameter, elements), i, value);
    write8(flat(first_moment, elements), i, first);
    write8(flat(second_moment, elements), i, second);
}

/// A pack per thread, as above.
extern "C" __global__ void __launch_bounds__(256)
    sgd(P* parameter, const G* gradient, const float* scalars, const float* clip, const int* seed,
        i64 elements, float weight_decay, int stochastic_parameter, int stream,
        i64 first_element) {
    const i64 i = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= elements) return;
    const float factor = clip != nullptr ? *clip : 1.0f;
    float value[PACK], g[PACK];
    read8(flat<const P>(parameter, elements), i, value);
    read8(flat(gradient, elements), i, g);
    const float rate = scalars[0];
    if (factor == 0.0f) return; // only now, so that nothing waits for it
    const float keep = __fsub_rn(1.0f, __fmul_rn(rate, weight_decay));
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        value[j] = __fsub_rn(__fmul_rn(value[j], keep), __fmul_rn(rate, __fmul_rn(g[j], factor)));
    }
    if (stochastic_parameter) {
        Bits bits[PACK];
        bits_of(Random(seed, PURPOSE_ROUNDING, stream), first_element + i, bits);
#pragma unroll
        for (int j = 0; j < PACK; j++) value[j] = rounded<P>(true, value[j], bits[j].parameter);
    }
    write8(flat(parameter, elements), i, value);
}
