// Norms of groups of channels of each sample. Storage types: E of activations, W of weight and bias.
#include "channels.cuh"

/// Combines what the groups of rows have into what the blocks before had, for a thread's channel. All threads take part.
template <bool STATISTICS> __device__ inline Part next_block(Groups& groups, Part before, i64 rows) {
    combine_groups<STATISTICS>(groups, rows);
    const int channel = threadIdx.x % CHANNELS;
    const Part both = combined<STATISTICS>(
        before, {groups.first[0][channel], groups.second[0][channel], clamped(rows, ROWS)});
    __syncthreads(); // before the groups of the next block are written
    return both;
}

/// Two numbers of a channel of the block's sample, into its row of `partials`.
__device__ inline void write_channel(const Part& part, float* partials, i64 partial_width, i64 width) {
    const i64 channel = i64(blockIdx.y) * CHANNELS + threadIdx.x;
    if (threadIdx.x < CHANNELS && channel < width) {
        float* const row = partials + i64(blockIdx.x) * partial_width;
        row[channel] = part.first;
        row[width + channel] = part.second;
    }
}

/// Statistics of the channels of a sample: a row of `partials` (samples, 2 · width). Grid (samples, blocks of channels).
extern "C" __global__ void __launch_bounds__(THREADS)
    group_statistics(const E* x, float* partials, i64 rows, i64 width) {
    __shared__ Groups groups;
    const i64 column = i64(blockIdx.y) * CHANNELS + threadIdx.x % PACKS * PACK;
    const E* const sample = x + i64(blockIdx.x) * rows * width;
    // Rows of a sample start on a pack if all rows do.
    Part part = {0.0f, 0.0f, 0};
    for (i64 start = 0; start < rows; start += ROWS) {
        group_of_rows(sample, start + threadIdx.x / PACKS * GROUP, rows, column, width, groups);
        part = next_block<true>(groups, part, rows - start);
    }
    write_channel(part, partials, 2 * width, width);
}

/// Mean and one over the deviation of each group, from those of its channels. A thread per group of a sample.
extern "C" __global__ void __launch_bounds__(256)
    group_statistics_finish(const float* partials, float* mean, float* rstd, i64 samples, int rows, i64 width, int groups,
                            float epsilon) {
    const i64 own = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (own >= samples * groups) return;
    const int size = int(width) / groups;
    const float* const row = partials + own / groups * 2 * width;
    const i64 first = own % groups * size;
    Part part = {0.0f, 0.0f, 0};
    for (i64 channel = first; channel < first + size; channel++) {
        part = combined<true>(part, {row[channel], row[width + channel], rows});
    }
    mean[own] = part.first;
    rstd[own] = 1.0f / sqrtf(part.second / float(part.rows) + epsilon);
}

/// What normalizes a pack of channels of a sample.
__device__ inline Affine of_sample(const float* mean, const float* rstd, const W* weight, const W* bias, i64 column,
                                   i64 width, int groups) {
    Affine affine;
    const int size = int(width) / groups;
    float weights[PACK];
    read8(row_of(weight, 0, width), column, weights);
    read8(row_of(bias, 0, width), column, affine.bias);
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        const i64 group = column + j < width ? (column + j) / size : 0;
        affine.mean[j] = mean[group];
        affine.rstd[j] = rstd[group];
        affine.scale[j] = weights[j] * affine.rstd[j];
    }
    return affine;
}

/// Grid (blocks of rows of all samples, blocks of channels): `blocks` of them belong to a sample. `addend` may be null.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    group_norm(const E* x, const E* addend, const float* mean, const float* rstd, const W* weight, const W* bias, E* y,
               i64 rows, i64 width, int groups, int blocks, int relu) {
    const i64 column = i64(blockIdx.y) * CHANNELS + threadIdx.x % PACKS * PACK;
    if (column >= width) return;
    const i64 sample = blockIdx.x / blocks, start = sample * rows, block = blockIdx.x % blocks;
    const Affine affine =
        of_sample(mean + sample * groups, rstd + sample * groups, weight, bias, column, width, groups);
    normalize_rows(affine, x, addend, y, start + block * ROWS, start + rows, column, width, relu);
}

/// Sums of the channels of a sample, into its row of `partials` (samples, 2 · width + 2 · groups), and with `addend` its gradient.
/// Grid (samples, blocks of channels).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    group_norm_grad_sums(const E* dy, const E* x, const E* addend, const float* mean, const float* rstd, const W* weight,
                         const W* bias, float* partials, E* d_addend, i64 rows, i64 width, int groups, int relu) {
    __shared__ Groups shared;
    const i64 column = i64(blockIdx.y) * CHANNELS + threadIdx.x % PACKS * PACK;
    const i64 sample = blockIdx.x, begin = sample * rows;
    Affine affine;
    if (column < width) {
        affine = of_sample(mean + sample * groups, rstd + sample * groups, weight, bias, column, width, groups);
    }
    Part part = {0.0f, 0.0f, 0};
    for (i64 start = 0; start < rows; start += ROWS) {
        const i64 first = begin + start + threadIdx.x / PACKS * GROUP;
        gradient_sums(affine, dy, x, addend, d_addend, first, begin + rows, column, width, relu, shared);
        part = next_block<false>(shared, part, rows - start);
    }
    write_channel(part, partials, 2 * (width + groups), width);
}

/// Sums of each group, from those of its channels and their weights. A thread per group of a sample.
extern "C" __global__ void __launch_bounds__(256)
    group_norm_grad_finish(float* partials, const W* weight, i64 samples, i64 width, int groups) {
    const i64 own = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (own >= samples * groups) return;
    const int size = int(width) / groups;
    float* const row = partials + own / groups * 2 * (width + groups);
    const i64 group = own % groups;
    float sum = 0.0f, product = 0.0f;
    for (i64 channel = group * size; channel < (group + 1) * size; channel++) {
        sum += to_float(weight[channel]) * row[channel];
        product += to_float(weight[channel]) * row[width + channel];
    }
    row[2 * width + group] = sum;
    row[2 * width + groups + group] = product;
}

/// dx from dz. `relu` if dz is still dy, and the ReLU depends on `x` alone. Grid as in `group_norm`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    group_norm_grad(const E* dz, const E* x, const float* mean, const float* rstd, const W* weight, const W* bias,
                    const float* partials, E* dx, i64 rows, i64 width, int groups, int blocks, int relu) {
    const i64 column = i64(blockIdx.y) * CHANNELS + threadIdx.x % PACKS * PACK;
    if (column >= width) return;
    const i64 sample = blockIdx.x / blocks, begin = sample * rows;
    const Affine affine =
        of_sample(mean + sample * groups, rstd + sample * groups, weight, bias, column, width, groups);
    const float* const sums = partials + sample * 2 * (width + groups) + 2 * width;
    const int size = int(width) / groups;
    const float count = float(rows * size);
    float mean_dz[PACK], mean_product[PACK];
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        const i64 group = column + j < width ? (column + j) / size : 0;
        mean_dz[j] = sums[group] / count;
        mean_product[j] = sums[groups + group] / count;
    }
    const i64 first = begin + i64(blockIdx.x % blocks) * ROWS + threadIdx.x / PACKS;
    for (int k = 0; k < GROUP; k++) {
        const i64 row = first + i64(k) * GROUPS;
        if (row >= begin + rows) break;
        float values[PACK], gradient[PACK];
        read8(row_of(x, row, width), column, values);
        read8(row_of(dz, row, width), column, gradient);
#pragma unroll
        for (int j = 0; j < PACK; j++) {
            if (relu && !(affine.value(values[j], j) > 0.0f)) gradient[j] = 0.0f;
            const float along = (values[j] - affine.mean[j]) * affine.rstd[j] * mean_product[j];
            gradient[j] = affine.scale[j] * gradient[j] - affine.rstd[j] * (mean_dz[j] + along);
        }
        write8(row_of(dx, row, width), column, gradient);
    }
}
