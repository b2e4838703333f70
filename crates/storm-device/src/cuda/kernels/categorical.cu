// Categorical distributions in groups of neighbours: probabilities, samples, divergence. Storage type: E.
#include "common.cuh"

/// The largest logit of a group, and the sum of e to the others less it.
struct Scale {
    float most, sum;
};

__device__ inline Scale scale_of(const E* logits, int classes) {
    float most = LOWEST, sum = 0.0f;
    for (int i = 0; i < classes; i++) most = fmaxf(most, to_float(logits[i]));
    for (int i = 0; i < classes; i++) sum += expf(to_float(logits[i]) - most);
    return {most, sum};
}

/// A thread per group.
extern "C" __global__ void categorical(const E* logits, E* out, float uniform, i64 groups, int classes) {
    const i64 group = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (group >= groups) return;
    logits += group * classes, out += group * classes;
    const Scale scale = scale_of(logits, classes);
    const float factor = (1.0f - uniform) / scale.sum, least = uniform / float(classes);
    for (int i = 0; i < classes; i++) {
        out[i] = from_float<E>(expf(to_float(logits[i]) - scale.most) * factor + least);
    }
}

/// A thread per group.
extern "C" __global__ void categorical_grad(const E* dy, const E* logits, E* out, float uniform, i64 groups,
                                            int classes) {
    const i64 group = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (group >= groups) return;
    dy += group * classes, logits += group * classes, out += group * classes;
    const Scale scale = scale_of(logits, classes);
    float mean = 0.0f;
    for (int i = 0; i < classes; i++) {
        mean += expf(to_float(logits[i]) - scale.most) / scale.sum * to_float(dy[i]);
    }
    for (int i = 0; i < classes; i++) {
        const float share = expf(to_float(logits[i]) - scale.most) / scale.sum;
        out[i] = from_float<E>((1.0f - uniform) * share * (to_float(dy[i]) - mean));
    }
}

/// A thread per group. Differences are taken one by one, as on the CPU: the same class for the same probabilities.
extern "C" __global__ void sample_class(const E* probabilities, const int* random, E* out, int stream, i64 groups,
                                        int classes) {
    const i64 group = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (group >= groups) return;
    const uint4 drawn = Random(random, PURPOSE_SAMPLING, stream).words(u64(group) / 4);
    const u32 words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
    u32 word = words[0];
#pragma unroll
    for (int i = 1; i < 4; i++) word = group % 4 == i ? words[i] : word;
    probabilities += group * classes, out += group * classes;
    float left = float(word >> 8) / 16777216.0f;
    int chosen = classes - 1;
    for (int i = 0; i < classes; i++) out[i] = from_float<E>(0.0f);
    for (int i = 0; i < classes; i++) {
        left = __fsub_rn(left, to_float(probabilities[i]));
        if (left < 0.0f) {
            chosen = i;
            break;
        }
    }
    out[chosen] = from_float<E>(1.0f);
}

/// A block per row.
extern "C" __global__ void divergence(const E* posterior, const E* prior, float* out, i64 width, float free) {
    __shared__ float slots[WARP];
    const i64 row = blockIdx.x;
    float sum = 0.0f;
    for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
        const float q = to_float(posterior[row * width + i]), p = to_float(prior[row * width + i]);
        sum += q * logf(q / p);
    }
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) out[row] = sum < free ? free : sum;
}

/// A thread per element.
extern "C" __global__ void divergence_grad(const float* d_divergence, const float* divergence, const E* posterior,
                                           const E* prior, E* d_posterior, E* d_prior, i64 elements, i64 width,
                                           float free, float posterior_weight, float prior_weight) {
    const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= elements) return;
    const float gradient = divergence[i / width] <= free ? 0.0f : d_divergence[i / width];
    const float ratio = to_float(posterior[i]) / to_float(prior[i]);
    d_posterior[i] = from_float<E>(gradient * posterior_weight * (logf(ratio) + 1.0f));
    d_prior[i] = from_float<E>(-gradient * prior_weight * ratio);
}
