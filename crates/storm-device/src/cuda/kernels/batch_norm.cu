// Norms of channels over a batch: statistics, one pass forward, two passes backward. Storage types: E of activations, W of
// weight and bias.
#include "channels.cuh"

/// Lanes that share the blocks of a channel, and channels of a block that finishes.
constexpr int LANES = 128;
constexpr int FINISHED = 8;

// ---- partial results --------------------------------------------------------------------------

/// Writes a row of `partials` (blocks, 2 · width).
__device__ inline void write_partials(const Groups& groups, float* partials, i64 width) {
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
    const i64 column = i64(blockIdx.y) * CHANNELS + threadIdx.x % PACKS * PACK;
    const i64 start = i64(blockIdx.x) * ROWS;
    group_of_rows(x, start + threadIdx.x / PACKS * GROUP, rows, column, width, groups);
    combine_groups<true>(groups, rows - start);
    write_partials(groups, partials, width);
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

/// Grid (blocks of rows, blocks of channels). `addend` may be null.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    batch_norm(const E* x, const E* addend, const float* mean, const float* variance, const W* weight, const W* bias, E* y,
               i64 rows, i64 width, float epsilon, int relu) {
    const i64 column = i64(blockIdx.y) * CHANNELS + threadIdx.x % PACKS * PACK;
    if (column >= width) return;
    const Affine affine(mean, variance, weight, bias, column, width, epsilon);
    normalize_rows(affine, x, addend, y, i64(blockIdx.x) * ROWS, rows, column, width, relu);
}

// ---- the gradient -----------------------------------------------------------------------------

/// Partial sums, and with `addend` its gradient. Grid (blocks of rows, blocks of channels).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    batch_norm_grad_sums(const E* dy, const E* x, const E* addend, const float* mean, const float* variance,
                         const W* weight, const W* bias, float* partials, E* d_addend, i64 rows, i64 width, float epsilon,
                         int relu) {
    __shared__ Groups groups;
    const i64 column = i64(blockIdx.y) * CHANNELS + threadIdx.x % PACKS * PACK;
    const i64 start = i64(blockIdx.x) * ROWS;
    Affine affine;
    if (column < width) affine = Affine(mean, variance, weight, bias, column, width, epsilon);
    const i64 first = start + threadIdx.x / PACKS * GROUP;
    gradient_sums(affine, dy, x, addend, d_addend, first, rows, column, width, relu, groups);
    combine_groups<false>(groups, rows - start);
    write_partials(groups, partials, width);
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

/// dx from dz and the `sums` of all rows (2 · width), in place of `x`. `relu` if dz is still dy, and the ReLU depends on `x` alone. Grid (blocks
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
