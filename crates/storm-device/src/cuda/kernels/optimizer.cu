// Updates of parameters, in place. Storage types: P of the parameter, G of the gradient, M of the
// moments.
//
// Operations are rounded one by one, as the CPU does (no contraction): with the same random bits
// the result is the same to the bit.
#include "optimizer_common.cuh"

// With OBSERVES, `adamw` has a last argument, which takes the sums of each block.
#ifdef OBSERVES
#define OBSERVED_PARAMETER , float* observed
#define OBSERVED_ARGUMENT(x) , x
#else
#define OBSERVED_PARAMETER
#define OBSERVED_ARGUMENT(x)
#endif

/// A pack per thread, of the tensor's block number `block`. scalars: learning rate, 1 − beta1^t, 1 − beta2^t. `master`,
/// `clip` and `seed` may be null; a clip of 0, or corrections of 0, leave everything as it is.
/// `first_element`: where in the parameter the elements here begin.
__device__ inline void adamw_block(i64 block, P* parameter, const G* gradient, M* first_moment,
                                   M* second_moment, float* master, const float* scalars,
                                   const float* clip, const int* seed, i64 elements, float beta1,
                                   float beta2, float epsilon, float weight_decay,
                                   int stochastic_parameter, int stochastic_moments, int stream,
                                   i64 first_element OBSERVED_PARAMETER) {
    const i64 i = (block * blockDim.x + threadIdx.x) * PACK;
#ifndef OBSERVES
    if (i >= elements) return; // those that observe meet at the end: what is not there is zero
#endif
    const float factor = clip != nullptr ? *clip : 1.0f;
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

    const Factors factors(scalars, factor, beta1, beta2, epsilon, weight_decay);
#ifdef OBSERVES
    const bool is_observed = observes(block);
    float before[PACK];
    if (is_observed) {
#pragma unroll
        for (int j = 0; j < PACK; j++) before[j] = factors.change(first[j], __fsqrt_rn(second[j]));
    }
#endif
    float change[PACK];
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        factors.moments(g[j], first[j], second[j]);
        change[j] = factors.change(first[j], __fsqrt_rn(second[j]));
    }
#ifdef OBSERVES
    Observation observation;
    if (is_observed) observation.set(change, before, value);
    observation.write(observed + 4 * block);
#endif
#pragma unroll
    for (int j = 0; j < PACK; j++) value[j] = factors.value(value[j], change[j]);
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

extern "C" __global__ void __launch_bounds__(256)
    adamw(P* parameter, const G* gradient, M* first_moment, M* second_moment, float* master,
          const float* scalars, const float* clip, const int* seed, i64 elements, float beta1,
          float beta2, float epsilon, float weight_decay, int stochastic_parameter,
          int stochastic_moments, int stream, i64 first_element OBSERVED_PARAMETER) {
    adamw_block(blockIdx.x, parameter, gradient, first_moment, second_moment, master, scalars, clip,
                seed, elements, beta1, beta2, epsilon, weight_decay, stochastic_parameter,
                stochastic_moments, stream, first_element OBSERVED_ARGUMENT(observed));
}

/// What differs between the tensors of `adamw_several`.
struct AdamWTensors {
    P* parameter[TENSORS_MAX];
    const G* gradient[TENSORS_MAX];
    M* first_moment[TENSORS_MAX];
    M* second_moment[TENSORS_MAX];
    float* master[TENSORS_MAX];
    i64 elements[TENSORS_MAX];
    i64 first_element[TENSORS_MAX];
#ifdef OBSERVES
    float* observed[TENSORS_MAX];
#endif
    float weight_decay[TENSORS_MAX];
    int stream[TENSORS_MAX];
    int first_block[TENSORS_MAX];
    int count;
};
#ifdef OBSERVES
constexpr int WORDS = 8;
#else
constexpr int WORDS = 7;
#endif
static_assert(sizeof(AdamWTensors) == (WORDS * 8 + 3 * 4) * TENSORS_MAX + 8, "as the host fills it");

/// `adamw` over several tensors.
extern "C" __global__ void __launch_bounds__(256)
    adamw_several(const __grid_constant__ AdamWTensors tensors, const float* scalars,
                  const float* clip, const int* seed, float beta1, float beta2, float epsilon,
                  int stochastic_parameter, int stochastic_moments) {
    const int t = tensor_of_block(tensors.first_block, tensors.count);
    adamw_block(blockIdx.x - tensors.first_block[t], tensors.parameter[t], tensors.gradient[t],
                tensors.first_moment[t], tensors.second_moment[t], tensors.master[t], scalars, clip,
                seed, tensors.elements[t], beta1, beta2, epsilon, tensors.weight_decay[t],
                stochastic_parameter, stochastic_moments, tensors.stream[t],
                tensors.first_element[t] OBSERVED_ARGUMENT(tensors.observed[t]));
}

#ifndef OBSERVES
/// A pack per thread, as above. `momentum` may be null, too.
extern "C" __global__ void __launch_bounds__(256)
    sgd(P* parameter, const G* gradient, M* momentum, float* master, const float* scalars, const float* clip,
        const int* seed, i64 elements, float share, int nesterov, float weight_decay, int stochastic_parameter,
        int stochastic_moments, int stream, i64 first_element) {
    const i64 i = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= elements) return;
    const float factor = clip != nullptr ? *clip : 1.0f;
    float value[PACK], g[PACK], moved[PACK] = {};
    const Pack<G> gradients = read_pack(flat(gradient, elements), i);
    if (momentum != nullptr) read8(flat<const M>(momentum, elements), i, moved);
    if (master != nullptr) {
        read8(flat<const float>(master, elements), i, value);
    } else {
        read8(flat<const P>(parameter, elements), i, value);
    }
    unpack(gradients, g);
    const float rate = scalars[0];
    if (factor == 0.0f || scalars[1] == 0.0f) return; // only now, so that nothing waits for it
    const float keep = __fsub_rn(1.0f, __fmul_rn(rate, weight_decay));
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        const float clipped = __fmul_rn(g[j], factor);
        if (momentum == nullptr) {
            value[j] = __fsub_rn(__fmul_rn(value[j], keep), __fmul_rn(rate, clipped));
        } else {
            const float whole = __fadd_rn(clipped, __fmul_rn(weight_decay, value[j]));
            moved[j] = __fadd_rn(__fmul_rn(share, moved[j]), whole);
            const float along = nesterov ? __fadd_rn(whole, __fmul_rn(share, moved[j])) : moved[j];
            value[j] = __fsub_rn(value[j], __fmul_rn(rate, along));
        }
    }
    if (master != nullptr) write8(flat(master, elements), i, value);
    if (stochastic_parameter || stochastic_moments) {
        Bits bits[PACK];
        bits_of(Random(seed, PURPOSE_ROUNDING, stream), first_element + i, bits);
#pragma unroll
        for (int j = 0; j < PACK; j++) {
            value[j] = rounded<P>(stochastic_parameter, value[j], bits[j].parameter);
            moved[j] = rounded<M>(stochastic_moments, moved[j], bits[j].first);
        }
    }
    write8(flat(parameter, elements), i, value);
    if (momentum != nullptr) write8(flat(momentum, elements), i, moved);
}
#endif
