// What norms of channels share: blocks of rows and their partial results, and the passes over rows. Storage types: E of
// activations, W of weight and bias.
//
// A block has 256 rows and 64 channels. A thread has a pack of channels in a group of eight rows; groups are combined as a tree
// in shared memory. The shape of the sums is that of `storm_graph`'s `ops/batch_norm.rs`.
#pragma once
#include "common.cuh"

/// Rows of a group: a thread's.
constexpr int GROUP = 8;
/// Groups of a block.
constexpr int GROUPS = 32;
/// Rows of a block.
constexpr int ROWS = GROUP * GROUPS;
/// Channels of a block.
constexpr int CHANNELS = 64;
/// Packs of a row of the block.
constexpr int PACKS = CHANNELS / PACK;
constexpr int THREADS = PACKS * GROUPS;
/// Rows in flight per thread.
constexpr int UNROLL = 4;
/// The same where a thread also has sums: more would not fit into registers.
constexpr int SUM_UNROLL = 2;
/// Blocks of a multiprocessor, so that one loads while another sums.
constexpr int BLOCKS = EXACT<E> ? 1 : 2;

// ---- partial results --------------------------------------------------------------------------

/// Two numbers and how many rows they are of: a mean and the squared distances from it, or two sums.
struct Part {
    float first, second;
    int rows;
};

/// `a` and `b` as one.
template <bool STATISTICS> __device__ inline Part combined(Part a, const Part& b) {
    if (b.rows == 0) return a;
    if (a.rows == 0) return b;
    if (STATISTICS) {
        const float share = float(b.rows) / float(a.rows + b.rows);
        const float distance = b.first - a.first;
        a.first += distance * share;
        a.second += b.second + distance * distance * (float(a.rows) * share);
    } else {
        a.first += b.first;
        a.second += b.second;
    }
    a.rows += b.rows;
    return a;
}

__device__ inline int clamped(i64 rows, int most) {
    return rows < 0 ? 0 : rows < most ? int(rows) : most;
}

/// What each group of a block has for each of its channels.
struct Groups {
    float first[GROUPS][CHANNELS], second[GROUPS][CHANNELS];
};

/// Combines the groups, of which `rows` rows are in the tensor, into the first.
template <bool STATISTICS> __device__ inline void combine_groups(Groups& groups, i64 rows) {
    __syncthreads();
#pragma unroll
    for (int stride = 1; stride < GROUPS; stride *= 2) {
        for (int i = threadIdx.x; i < GROUPS / (2 * stride) * CHANNELS; i += THREADS) {
            const int a = i / CHANNELS * 2 * stride, b = a + stride, channel = i % CHANNELS;
            const int span = GROUP * stride;
            const Part both = combined<STATISTICS>(
                {groups.first[a][channel], groups.second[a][channel], clamped(rows - i64(a) * GROUP, span)},
                {groups.first[b][channel], groups.second[b][channel], clamped(rows - i64(b) * GROUP, span)});
            groups.first[a][channel] = both.first;
            groups.second[a][channel] = both.second;
        }
        __syncthreads();
    }
}

/// What a thread has of its group and its pack of channels.
__device__ inline void write_group(Groups& groups, const float (&first)[PACK], const float (&second)[PACK]) {
    const int pack = threadIdx.x % PACKS, group = threadIdx.x / PACKS;
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        groups.first[group][pack * PACK + j] = first[j];
        groups.second[group][pack * PACK + j] = second[j];
    }
}

/// Mean and squared distances of rows `first ..` below `rows`, in the group of the thread, into `groups`.
__device__ inline void group_of_rows(const E* x, i64 first, i64 rows, i64 column, i64 width, Groups& groups) {
    const int own = clamped(rows - first, GROUP);
    float sums[PACK] = {}, squares[PACK] = {};
    if (own > 0 && column < width) {
        Pack<E> packs[GROUP];
#pragma unroll
        for (int k = 0; k < GROUP; k++) {
            packs[k] = read_pack(row_of(x, first + (k < own ? k : 0), width), column);
        }
        // Distances are from the first row. The rows past the end are that row again.
        float start[PACK], values[PACK];
        unpack(packs[0], start);
#pragma unroll
        for (int k = 1; k < GROUP; k++) {
            unpack(packs[k], values);
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                const float distance = values[j] - start[j];
                sums[j] += distance;
                squares[j] += distance * distance;
            }
        }
#pragma unroll
        for (int j = 0; j < PACK; j++) {
            const float shift = sums[j] / float(own);
            const float left = squares[j] - sums[j] * shift;
            // Rounding may leave less than nothing.
            squares[j] = left < 0.0f ? 0.0f : left;
            sums[j] = start[j] + shift;
        }
    }
    write_group(groups, sums, squares);
}

// ---- the norm ---------------------------------------------------------------------------------

/// What normalizes a pack of channels.
struct Affine {
    float mean[PACK], rstd[PACK], scale[PACK], bias[PACK];

    __device__ Affine() {}

    __device__ Affine(const float* means, const float* variances, const W* weight, const W* biases, i64 column, i64 width,
                      float epsilon) {
        float variance[PACK], weights[PACK];
        read8(row_of(means, 0, width), column, mean);
        read8(row_of(variances, 0, width), column, variance);
        read8(row_of(weight, 0, width), column, weights);
        read8(row_of(biases, 0, width), column, bias);
#pragma unroll
        for (int j = 0; j < PACK; j++) {
            rstd[j] = 1.0f / sqrtf(variance[j] + epsilon);
            scale[j] = weights[j] * rstd[j];
        }
    }

    /// Before the addend. The same operations wherever it is computed: the backward pass sees the same sign.
    __device__ float value(float x, int j) const { return fmaf(x - mean[j], scale[j], bias[j]); }
};

/// Normalizes a block of rows from `block_start` on, below `rows`. `addend` may be null.
__device__ inline void normalize_rows(const Affine& affine, const E* x, const E* addend, E* y, i64 block_start, i64 rows,
                                      i64 column, i64 width, int relu) {
    const i64 first = block_start + threadIdx.x / PACKS;
#pragma unroll
    for (int start = 0; start < GROUP; start += UNROLL) {
        Pack<E> packs[UNROLL], addends[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            const i64 row = first + i64(start + k) * GROUPS;
            if (row >= rows) break;
            packs[k] = read_pack(row_of(x, row, width), column);
            if (addend != nullptr) addends[k] = read_pack(row_of(addend, row, width), column);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            const i64 row = first + i64(start + k) * GROUPS;
            if (row >= rows) break;
            float values[PACK], more[PACK] = {};
            unpack(packs[k], values);
            if (addend != nullptr) unpack(addends[k], more);
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                float value = affine.value(values[j], j);
                if (addend != nullptr) value += more[j];
                // A NaN must reach the loss.
                values[j] = relu && value < 0.0f ? 0.0f : value;
            }
            write8(row_of(y, row, width), column, values);
        }
    }
}

/// Sums of dz and of dz · x̂ over the rows of the thread's group, `first ..` below `rows`, where dz is dy without what the ReLU
/// turned off. With `addend`, dz is also its gradient and is written to `d_addend`.
__device__ inline void gradient_sums(const Affine& affine, const E* dy, const E* x, const E* addend, E* d_addend, i64 first,
                                     i64 rows, i64 column, i64 width, int relu, Groups& groups) {
    const int own = clamped(rows - first, GROUP);
    float sums[PACK] = {}, products[PACK] = {};
    if (own > 0 && column < width) {
#pragma unroll
        for (int start = 0; start < GROUP; start += SUM_UNROLL) {
            Pack<E> gradients[SUM_UNROLL], packs[SUM_UNROLL], addends[SUM_UNROLL];
#pragma unroll
            for (int k = 0; k < SUM_UNROLL; k++) {
                if (start + k >= own) break;
                const i64 row = first + start + k;
                gradients[k] = read_pack(row_of(dy, row, width), column);
                packs[k] = read_pack(row_of(x, row, width), column);
                if (addend != nullptr) addends[k] = read_pack(row_of(addend, row, width), column);
            }
#pragma unroll
            for (int k = 0; k < SUM_UNROLL; k++) {
                if (start + k >= own) break;
                float dz[PACK], values[PACK], more[PACK] = {};
                unpack(gradients[k], dz);
                unpack(packs[k], values);
                if (addend != nullptr) unpack(addends[k], more);
#pragma unroll
                for (int j = 0; j < PACK; j++) {
                    float value = affine.value(values[j], j);
                    if (addend != nullptr) value += more[j];
                    if (relu && !(value > 0.0f)) dz[j] = 0.0f;
                    sums[j] += dz[j];
                    products[j] += dz[j] * ((values[j] - affine.mean[j]) * affine.rstd[j]);
                }
                if (addend != nullptr) write8(row_of(d_addend, first + start + k, width), column, dz);
            }
        }
    }
    write_group(groups, sums, products);
}
