// Norms of channels over a batch: statistics, one pass forward, two passes backward. Storage types: E of activations, W of
// weight and bias.
//
// A block has 256 rows and 64 channels. A thread has a pack of channels in a group of eight rows; groups are combined as a tree
// in shared memory. The shape of the sums is that of `storm_graph`'s `ops/batch_norm.rs`.
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
/// Lanes that share the blocks of a channel, and channels of a block that finishes.
constexpr int LANES = 128;
constexpr int FINISHED = 8;
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

/// Combines the groups, of which `rows` rows are in the tensor, and writes a row of `partials` (blocks, 2 · width).
template <bool STATISTICS>
__device__ inline void combine_groups(Groups& groups, i64 rows, float* partials, i64 width) {
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
    const i64 channel = i64(blockIdx.y) * CHANNELS + threadIdx.x;
    if (threadIdx.x < CHANNELS && channel < width) {
        float* const row = partials + i64(blockIdx.x) * 2 * width;
        row[channel] = groups.first[0][threadIdx.x];
        row[width + channel] = groups.second[0][threadIdx.x];
    }
}

/// Combines the blocks of a channel: lane by lane, then the lanes. Every thread of a channel gets the result.
template <bool STATISTICS>
__device__ inline Part combine_blocks(const float* partials, i64 rows, i64 width) {
    __shared__ Part parts[LANES][FINISHED];
    const int own = threadIdx.x % FINISHED, lane = threadIdx.x / FINISHED;
    const i64 channel = i64(blockIdx.x) * FINISHED + own;
    const i64 blocks = (rows + ROWS - 1) / ROWS;
    Part part = {0.0f, 0.0f, 0};
    if (channel < width) {
#pragma unroll 4
        for (i64 block = lane; block < blocks; block += LANES) {
            const float* const row = partials + block * 2 * width;
            part = combined<STATISTICS>(part, {row[channel], row[width + channel], clamped(rows - block * ROWS, ROWS)});
        }
    }
    parts[lane][own] = part;
    __syncthreads();
    for (int stride = 1; stride < LANES; stride *= 2) {
        if (lane % (2 * stride) == 0) {
            parts[lane][own] = combined<STATISTICS>(parts[lane][own], parts[lane + stride][own]);
        }
        __syncthreads();
    }
    return parts[0][own];
}

// ---- statistics -------------------------------------------------------------------------------

/// Grid (blocks of rows, blocks of channels). Does nothing in an evaluation.
extern "C" __global__ void __launch_bounds__(THREADS)
    batch_statistics(const E* x, const int* phase, float* partials, i64 rows, i64 width) {
    __shared__ Groups groups;
    if (phase[0] == 0) return;
    const int pack = threadIdx.x % PACKS, group = threadIdx.x / PACKS;
    const i64 column = i64(blockIdx.y) * CHANNELS + pack * PACK;
    const i64 block_start = i64(blockIdx.x) * ROWS, first = block_start + group * GROUP;
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
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        groups.first[group][pack * PACK + j] = sums[j];
        groups.second[group][pack * PACK + j] = squares[j];
    }
    combine_groups<true>(groups, rows - block_start, partials, width);
}

/// Grid: blocks of eight channels. In an evaluation the running statistics are passed on.
extern "C" __global__ void __launch_bounds__(LANES* FINISHED)
    batch_statistics_finish(const float* partials, const int* phase, const float* running_mean,
                            const float* running_variance, float* mean, float* variance, float* unbiased, i64 rows,
                            i64 width) {
    const i64 channel = i64(blockIdx.x) * FINISHED + threadIdx.x;
    const bool writes = threadIdx.x < FINISHED && channel < width;
    if (phase[0] == 0) {
        if (writes) {
            mean[channel] = running_mean[channel];
            variance[channel] = unbiased[channel] = running_variance[channel];
        }
        return;
    }
    const Part part = combine_blocks<true>(partials, rows, width);
    if (writes) {
        mean[channel] = part.first;
        variance[channel] = part.second / float(rows);
        unbiased[channel] = part.second / float(rows > 1 ? rows - 1 : 1);
    }
}

// ---- the norm ---------------------------------------------------------------------------------

/// What normalizes a pack of channels.
struct Affine {
    float mean[PACK], rstd[PACK], scale[PACK], bias[PACK];

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

/// Grid (blocks of rows, blocks of channels). `addend` may be null.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    batch_norm(const E* x, const E* addend, const float* mean, const float* variance, const W* weight, const W* bias, E* y,
               i64 rows, i64 width, float epsilon, int relu) {
    const i64 column = i64(blockIdx.y) * CHANNELS + threadIdx.x % PACKS * PACK;
    if (column >= width) return;
    const Affine affine(mean, variance, weight, bias, column, width, epsilon);
    const i64 first = i64(blockIdx.x) * ROWS + threadIdx.x / PACKS;
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

// ---- the gradient -----------------------------------------------------------------------------

/// Sums of dz and of dz · x̂, where dz is dy without what the ReLU turned off. With `addend`, dz is also its gradient and is
/// written to `d_addend`. Grid (blocks of rows, blocks of channels).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    batch_norm_grad_sums(const E* dy, const E* x, const E* addend, const float* mean, const float* variance,
                         const W* weight, const W* bias, float* partials, E* d_addend, i64 rows, i64 width, float epsilon,
                         int relu) {
    __shared__ Groups groups;
    const int pack = threadIdx.x % PACKS, group = threadIdx.x / PACKS;
    const i64 column = i64(blockIdx.y) * CHANNELS + pack * PACK;
    const i64 block_start = i64(blockIdx.x) * ROWS, first = block_start + group * GROUP;
    const int own = clamped(rows - first, GROUP);
    float sums[PACK] = {}, products[PACK] = {};
    if (own > 0 && column < width) {
        const Affine affine(mean, variance, weight, bias, column, width, epsilon);
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
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        groups.first[group][pack * PACK + j] = sums[j];
        groups.second[group][pack * PACK + j] = products[j];
    }
    combine_groups<false>(groups, rows - block_start, partials, width);
}

/// The sums of all blocks, into the row after theirs. Grid: blocks of eight channels.
extern "C" __global__ void __launch_bounds__(LANES* FINISHED)
    batch_norm_grad_finish(float* partials, i64 rows, i64 width) {
    const Part part = combine_blocks<false>(partials, rows, width);
    const i64 channel = i64(blockIdx.x) * FINISHED + threadIdx.x;
    if (threadIdx.x < FINISHED && channel < width) {
        float* const sums = partials + (rows + ROWS - 1) / ROWS * 2 * width;
        sums[channel] = part.first;
        sums[width + channel] = part.second;
    }
}

/// dx from dz and the `sums` of all rows (2 · width). `relu` if dz is still dy, and the ReLU depends on `x` alone. Grid (blocks
/// of rows, blocks of channels).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    batch_norm_grad(const E* dz, const E* x, const float* mean, const float* variance, const W* weight, const W* bias,
                    const float* sums, E* dx, i64 rows, i64 width, float epsilon, int relu) {
    const i64 column = i64(blockIdx.y) * CHANNELS + threadIdx.x % PACKS * PACK;
    if (column >= width) return;
    const Affine affine(mean, variance, weight, bias, column, width, epsilon);
    float mean_dz[PACK], mean_product[PACK];
    // The second half may start anywhere.
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        const bool inside = column + j < width;
        mean_dz[j] = inside ? sums[column + j] / float(rows) : 0.0f;
        mean_product[j] = inside ? sums[width + column + j] / float(rows) : 0.0f;
    }
    const i64 first = i64(blockIdx.x) * ROWS + threadIdx.x / PACKS;
#pragma unroll
    for (int start = 0; start < GROUP; start += UNROLL) {
        Pack<E> gradients[UNROLL], packs[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            const i64 row = first + i64(start + k) * GROUPS;
            if (row >= rows) break;
            gradients[k] = read_pack(row_of(dz, row, width), column);
            packs[k] = read_pack(row_of(x, row, width), column);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            const i64 row = first + i64(start + k) * GROUPS;
            if (row >= rows) break;
            float values[PACK], gradient[PACK];
            unpack(packs[k], values);
            unpack(gradients[k], gradient);
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                if (relu && !(affine.value(values[j], j) > 0.0f)) gradient[j] = 0.0f;
                const float along = (values[j] - affine.mean[j]) * affine.rstd[j] * mean_product[j];
                gradient[j] = affine.scale[j] * (gradient[j] - mean_dz[j] - along);
            }
            write8(row_of(dx, row, width), column, gradient);
        }
    }
}
