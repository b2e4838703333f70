// Dropout, and its gradient, which is the same. Storage type: E.
#include "common.cuh"

/// A thread per block of random words. Elements are counted through the step, so that the first one of a micro-batch need not
/// begin such a block. `addend` may be null.
extern "C" __global__ void dropout(const E* x, const E* addend, const int* random, E* out, i64 elements, int threshold,
                                   float scale, int stream) {
    const u64 first = u64(u32(random[3])) * u64(elements);
    const u64 block = first / 4 + u64(blockIdx.x) * blockDim.x + threadIdx.x;
    const i64 start = i64(4 * block - first);
    if (start >= elements) return;
    const bool drops = random[4] != 0;
    const uint4 drawn = Random(random, PURPOSE_DROPOUT, stream).words(block);
    const u32 words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const i64 at = start + j;
        if (at < 0 || at >= elements) continue;
        float value = to_float(x[at]);
        // Product and sum are rounded one by one, as on the CPU.
        if (drops) value = words[j] >= u32(threshold) ? __fmul_rn(value, scale) : 0.0f;
        if (addend) value = __fadd_rn(value, to_float(addend[at]));
        out[at] = from_float<E>(value);
    }
}
