// Layer norm and RMS norm over the width of a row, with the residual sum fused in.
// Storage type: E. LAYER: 1 for a layer norm, 0 for an RMS norm.
//
// A row is held in registers between the passes over it, PACKS packs a thread: by one warp, with
// several rows in a block, or by a whole block.
#include "common.cuh"

/// Which part of which row a thread has.
template <bool ONE_WARP> struct Share {
    int threads, lane, group, groups;

    __device__ Share()
        : threads(ONE_WARP ? WARP : blockDim.x), lane(ONE_WARP ? threadIdx.x % WARP : threadIdx.x),
          group(ONE_WARP ? threadIdx.x / WARP : 0), groups(ONE_WARP ? blockDim.x / WARP : 1) {}

    __device__ i64 place(int k) const { return (i64(k) * threads + lane) * PACK; }
};

/// Sum over the threads of a row.
template <bool ONE_WARP> __device__ inline float row_sum(float x, float (&slots)[WARP]) {
    return ONE_WARP ? warp_sum(x) : block_sum(x, slots);
}

template <int PACKS, bool ONE_WARP>
__device__ inline void norm(const E* x, const E* delta, const E* weight, const E* bias, E* y,
                            float* rstd, float* mean, E* sum, i64 rows, i64 width, float epsilon) {
    __shared__ float slots[2][WARP];
    const Share<ONE_WARP> share;
    const i64 row = i64(blockIdx.x) * share.groups + share.group;
    if (row >= rows) return; // a whole warp, or no thread of it
    Pack<E> packs[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        packs[k] = read_pack(row_of(x, row, width), share.place(k));
    }
    if (delta != nullptr) {
        Pack<E> deltas[PACKS];
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            deltas[k] = read_pack(row_of(delta, row, width), share.place(k));
        }
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            float a[PACK], b[PACK];
            unpack(packs[k], a);
            unpack(deltas[k], b);
#pragma unroll
            for (int j = 0; j < PACK; j++) a[j] += b[j];
            // The norm is of the sum as stored.
            packs[k] = packed<E>(a);
            write_pack(row_of(sum, row, width), share.place(k), packs[k]);
        }
    }

    const float per_element = 1.0f / float(width);
    float center = 0.0f;
    if (LAYER) {
        float total = 0.0f;
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            float values[PACK];
            unpack(packs[k], values);
#pragma unroll
            for (int j = 0; j < PACK; j++) total += values[j];
        }
        center = per_element * row_sum<ONE_WARP>(total, slots[0]);
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        float values[PACK];
        unpack(packs[k], values);
#pragma unroll
        for (int j = 0; j < PACK; j++) {
            const float centered = values[j] - center;
            // Past the end an RMS norm sees zeros; a layer norm must not see their distance.
            if (!LAYER || share.place(k) + j < width) squares += centered * centered;
        }
    }
    const float variance = per_element * row_sum<ONE_WARP>(squares, slots[1]);
    const float inverse = 1.0f / sqrtf(variance + epsilon);
    if (share.lane == 0) {
        rstd[row] = inverse;
        if (LAYER) mean[row] = center;
    }

    const Row<const E> weights = row_of(weight, 0, width), biases = row_of(bias, 0, width);
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (share.place(k) >= width) break;
        float values[PACK], scale[PACK], offset[PACK] = {};
        unpack(packs[k], values);
        read8(weights, share.place(k), scale);
        if (LAYER && bias != nullptr) read8(biases, share.place(k), offset);
#pragma unroll
        for (int j = 0; j < PACK; j++) {
            values[j] = (values[j] - center) * inverse * scale[j] + offset[j];
        }
        write8(row_of(y, row, width), share.place(k), values);
    }
}

/// dx of the rows `rows_per_block · block ..`, and the sums over these rows that the gradients of
/// weight and bias are made of: a row of `partials` (blocks, width or 2·width), where not null.
/// With PREFETCH the next rows are on their way while these are summed; blocks of 1024 threads do not
/// have the registers for it. A block that has a row at a time takes TOGETHER rows between barriers; the
/// order of every sum is the same for any number.
template <int PACKS, bool ONE_WARP, bool PREFETCH, int TOGETHER>
__device__ inline void norm_grad(const E* dy, const E* x, const E* weight, const float* rstd,
                                 const float* mean, const E* addend, E* dx, float* partials,
                                 i64 rows, i64 width, int rows_per_block, int partial_width) {
    // Two sets, used in turn: one barrier for each set of rows is enough.
    __shared__ float slots[2][TOGETHER][2][WARP];
    const Share<ONE_WARP> share;
    const i64 first = i64(blockIdx.x) * rows_per_block + share.group;
    const i64 end = minimum(rows, i64(blockIdx.x + 1) * rows_per_block);
    const float per_element = 1.0f / float(width);

    Pack<E> weights[PACKS];
    float d_weight[PACKS][PACK] = {}, d_bias[PACKS][PACK] = {};
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        weights[k] = read_pack(row_of(weight, 0, width), share.place(k));
    }
    Pack<E> next_dy[TOGETHER][PACKS], next_x[TOGETHER][PACKS];
    float next_rstd[TOGETHER] = {}, next_mean[TOGETHER] = {};
    auto fetch = [&](i64 from) {
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) {
            const i64 row = from + r * share.groups;
            if (row >= end) break;
#pragma unroll
            for (int k = 0; k < PACKS; k++) {
                next_dy[r][k] = read_pack(row_of(dy, row, width), share.place(k));
                next_x[r][k] = read_pack(row_of(x, row, width), share.place(k));
            }
            next_rstd[r] = rstd[row];
            if (LAYER) next_mean[r] = mean[row];
        }
    };
    if (PREFETCH && first < end) fetch(first);
    int set = 0;
    const i64 step = i64(TOGETHER) * share.groups;
    for (i64 start = first; start < end; start += step) {
        if (!PREFETCH) fetch(start);
        Pack<E> this_dy[TOGETHER][PACKS], this_x[TOGETHER][PACKS], addends[TOGETHER][PACKS];
        float inverse[TOGETHER], center[TOGETHER], along[TOGETHER], offset[TOGETHER];
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) {
            inverse[r] = next_rstd[r], center[r] = next_mean[r];
#pragma unroll
            for (int k = 0; k < PACKS; k++) this_dy[r][k] = next_dy[r][k], this_x[r][k] = next_x[r][k];
            const i64 row = start + r * share.groups;
            if (addend != nullptr && row < end) {
#pragma unroll
                for (int k = 0; k < PACKS; k++) {
                    addends[r][k] = read_pack(row_of(addend, row, width), share.place(k));
                }
            }
        }
        if (PREFETCH && start + step < end) fetch(start + step);

#pragma unroll
        for (int r = 0; r < TOGETHER; r++) {
            along[r] = offset[r] = 0.0f;
            if (start + r * share.groups >= end) break;
#pragma unroll
            for (int k = 0; k < PACKS; k++) {
                float d[PACK], values[PACK], scale[PACK];
                unpack(this_dy[r][k], d);
                unpack(this_x[r][k], values);
                unpack(weights[k], scale);
                // Past the end dy and weight are zero.
#pragma unroll
                for (int j = 0; j < PACK; j++) {
                    const float normalized = (values[j] - center[r]) * inverse[r];
                    along[r] += d[j] * scale[j] * normalized;
                    if (LAYER) offset[r] += d[j] * scale[j];
                    d_weight[k][j] += d[j] * normalized;
                    if (LAYER) d_bias[k][j] += d[j];
                }
            }
            along[r] = warp_sum(along[r]);
            if (LAYER) offset[r] = warp_sum(offset[r]);
        }
        if (!ONE_WARP) {
            const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
            for (int r = 0; r < TOGETHER; r++) {
                if (lane == 0) {
                    slots[set][r][0][warp] = along[r];
                    if (LAYER) slots[set][r][1][warp] = offset[r];
                }
            }
            __syncthreads();
            const bool used = lane < blockDim.x / WARP;
#pragma unroll
            for (int r = 0; r < TOGETHER; r++) {
                along[r] = warp_sum(used ? slots[set][r][0][lane] : 0.0f);
                if (LAYER) offset[r] = warp_sum(used ? slots[set][r][1][lane] : 0.0f);
            }
            set ^= 1;
        }
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) {
            const i64 row = start + r * share.groups;
            if (row >= end) break;
            along[r] *= per_element;
            offset[r] *= per_element;
#pragma unroll
            for (int k = 0; k < PACKS; k++) {
                if (share.place(k) >= width) break;
                float d[PACK], values[PACK], scale[PACK], add[PACK] = {};
                unpack(this_dy[r][k], d);
                unpack(this_x[r][k], values);
                unpack(weights[k], scale);
                if (addend != nullptr) unpack(addends[r][k], add);
#pragma unroll
                for (int j = 0; j < PACK; j++) {
                    const float normalized = (values[j] - center[r]) * inverse[r];
                    d[j] = (d[j] * scale[j] - offset[r] - normalized * along[r]) * inverse[r] + add[j];
                }
                write8(row_of(dx, row, width), share.place(k), d);
            }
        }
    }

    if (partials == nullptr) return;
    const bool has_bias = partial_width > width;
    if constexpr (ONE_WARP) {
        // The warps' sums, added one warp after the other.
        __shared__ float sums[2][PACKS * WARP * PACK];
        for (int turn = 0; turn < share.groups; turn++) {
            if (turn == share.group) {
#pragma unroll
                for (int k = 0; k < PACKS; k++) {
#pragma unroll
                    for (int j = 0; j < PACK; j++) {
                        const int i = int(share.place(k)) + j;
                        sums[0][i] = d_weight[k][j] += turn == 0 ? 0.0f : sums[0][i];
                        if (LAYER) sums[1][i] = d_bias[k][j] += turn == 0 ? 0.0f : sums[1][i];
                    }
                }
            }
            __syncthreads();
        }
        if (share.group != share.groups - 1) return; // the last one has the totals
    }
    float* const out = partials + i64(blockIdx.x) * partial_width;
    const bool aligned = width % PACK == 0;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        write8(Row<float>{out, width, aligned}, share.place(k), d_weight[k]);
        if (LAYER && has_bias) {
            write8(Row<float>{out + width, width, aligned}, share.place(k), d_bias[k]);
        }
    }
}

// ---- kernels: rows up to 8 · threads · PACKS wide ----------------------------------------------

#define NORM(NAME, PACKS, ONE_WARP, THREADS, TOGETHER)                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) norm_##NAME(                             \
        const E* x, const E* delta, const E* weight, const E* bias, E* y, float* rstd,             \
        float* mean, E* sum, i64 rows, i64 width, float epsilon) {                                 \
        take_turn();                                                                               \
        norm<PACKS, ONE_WARP>(x, delta, weight, bias, y, rstd, mean, sum, rows, width, epsilon);   \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) norm_grad_##NAME(                        \
        const E* dy, const E* x, const E* weight, const float* rstd, const float* mean,            \
        const E* addend, E* dx, float* partials, i64 rows, i64 width, int rows_per_block,          \
        int partial_width) {                                                                       \
        norm_grad<PACKS, ONE_WARP, (THREADS < 1024), TOGETHER>(                                    \
            dy, x, weight, rstd, mean, addend, dx, partials, rows, width, rows_per_block,          \
            partial_width);                                                                        \
    }

NORM(warp_1, 1, true, 256, 1)
NORM(warp_2, 2, true, 256, 1)
NORM(block_256, 1, false, 256, 2)
NORM(block_512, 1, false, 512, (LAYER && !EXACT<E> ? 2 : 1))
NORM(block_1024, 1, false, 1024, 1)
NORM(block_1024_2, 2, false, 1024, 1)
