// Sums over rows, over all elements, and over scalars. Storage type: E.
#include "common.cuh"

/// Loads in flight per thread.
constexpr int UNROLL = 4;

// ---- sums over rows: partial sums of blocks of rows, then the blocks ----------------------------

/// Warps of `column_partials`; each takes every eighth row of the block's.
constexpr int WARPS = 8;
/// Columns of a block: a pack per lane.
constexpr int COLUMNS = WARP * PACK;

/// Grid (blocks of `rows_per_block` rows, blocks of 256 columns): one row of `partials`
/// (blocks, width) per block of rows.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    column_partials(const E* x, float* partials, i64 rows, i64 width, int rows_per_block) {
    __shared__ float sums[WARPS][COLUMNS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 column = i64(blockIdx.y) * COLUMNS + lane * PACK;
    const i64 first = i64(blockIdx.x) * rows_per_block;
    const int own_rows = int(minimum(rows - first, rows_per_block));
    float sum[PACK] = {};
    Row<const E> from = row_of(x, first + warp, width);
    for (int row = warp; row < own_rows;) {
        Pack<E> packs[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++, row += WARPS, from.start += WARPS * width) {
            if (row >= own_rows) from.width = 0; // all zeros
            packs[k] = read_pack(from, column);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            float values[PACK];
            unpack(packs[k], values);
#pragma unroll
            for (int j = 0; j < PACK; j++) sum[j] += values[j];
        }
    }
#pragma unroll
    for (int j = 0; j < PACK; j++) sums[warp][lane * PACK + j] = sum[j];
    __syncthreads();
    // A column per thread.
    const i64 own = i64(blockIdx.y) * COLUMNS + threadIdx.x;
    if (own >= width) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) total += sums[i][threadIdx.x];
    partials[blockIdx.x * width + own] = total;
}

/// Adds up `columns` columns of `partials` (blocks, partial_width) from `first` on into `out`, and to what is there where
/// `adds` is 1. A second row of the grid does the same for the other three. Grid: blocks of 32 columns; 32 × 32 threads.
extern "C" __global__ void __launch_bounds__(WARP* WARP)
    column_finish(const float* partials, i64 blocks, i64 partial_width, i64 columns, E* out, i64 first, int adds,
                  E* other_out, i64 other_first, int other_adds) {
    if (blockIdx.y == 1) out = other_out, first = other_first, adds = other_adds;
    __shared__ float sums[WARP][WARP + 1];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 column = i64(blockIdx.x) * WARP + lane;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 4
        for (i64 block = warp; block < blocks; block += WARP) {
            sum += partials[block * partial_width + first + column];
        }
    }
    sums[lane][warp] = sum;
    __syncthreads();
    // A column per warp.
    const float total = warp_sum(sums[warp][lane]);
    const i64 own = i64(blockIdx.x) * WARP + warp;
    if (lane == 0 && own < columns) {
        out[own] = from_float<E>(adds ? total + to_float(out[own]) : total);
    }
}

// ---- sums over all elements ---------------------------------------------------------------------

/// One of `partials` per block: the sum of `f` over `per_block` elements.
template <class F>
__device__ inline void partial_sum(i64 block, const E* x, float* partials, i64 elements, int per_block, F f) {
    __shared__ float slots[WARP];
    const i64 first = block * per_block;
    const Row<const E> part = flat(x + first, minimum(elements - first, per_block));
    float sum = 0.0f;
    for (i64 start = 0; start < part.width; start += i64(UNROLL) * blockDim.x * PACK) {
        Pack<E> packs[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            packs[k] = read_pack(part, start + (i64(k) * blockDim.x + threadIdx.x) * PACK);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            float values[PACK];
            unpack(packs[k], values);
#pragma unroll
            for (int j = 0; j < PACK; j++) sum += f(values[j]);
        }
    }
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) partials[block] = sum;
}

extern "C" __global__ void __launch_bounds__(512)
    sum_partials(const E* x, float* partials, i64 elements, int per_block) {
    partial_sum(blockIdx.x, x, partials, elements, per_block, [](float x) { return x; });
}

extern "C" __global__ void __launch_bounds__(512)
    square_partials(const E* x, float* partials, i64 elements, int per_block) {
    partial_sum(blockIdx.x, x, partials, elements, per_block, [](float x) { return x * x; });
}

/// What differs between the tensors of `square_partials_several`.
struct SquaredTensors {
    const E* x[TENSORS_MAX];
    float* partials[TENSORS_MAX];
    i64 elements[TENSORS_MAX];
    int first_block[TENSORS_MAX];
    int count;
};
static_assert(sizeof(SquaredTensors) == (3 * 8 + 4) * TENSORS_MAX + 8, "as the host fills it");

/// `square_partials` over several tensors.
extern "C" __global__ void __launch_bounds__(512)
    square_partials_several(const __grid_constant__ SquaredTensors tensors, int per_block) {
    const int t = tensor_of_block(tensors.first_block, tensors.count);
    partial_sum(blockIdx.x - tensors.first_block[t], tensors.x[t], tensors.partials[t],
                tensors.elements[t], per_block, [](float x) { return x * x; });
}

/// Adds up the partial sums. One block.
__device__ inline void finish_sum(const float* partials, float* out, i64 count) {
    __shared__ double slots[WARP];
    double sum = 0.0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) sum += double(partials[i]);
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) *out = float(sum);
}

extern "C" __global__ void __launch_bounds__(1024)
    sum_finish(const float* partials, float* out, i64 count) {
    finish_sum(partials, out, count);
}

/// What differs between the tensors of `sum_finish_several`.
struct FinishedSums {
    const float* partials[TENSORS_MAX];
    float* out[TENSORS_MAX];
    i64 parts[TENSORS_MAX];
    int first_block[TENSORS_MAX];
    int count;
};
static_assert(sizeof(FinishedSums) == (3 * 8 + 4) * TENSORS_MAX + 8, "as the host fills it");

/// `sum_finish` over several tensors, a block each.
extern "C" __global__ void __launch_bounds__(1024)
    sum_finish_several(const __grid_constant__ FinishedSums sums) {
    const int t = tensor_of_block(sums.first_block, sums.count);
    finish_sum(sums.partials[t], sums.out[t], sums.parts[t]);
}

// ---- the norm of all gradients ------------------------------------------------------------------

/// Adds `count` ≤ 16 scalars, in order, to `running`, which starts at 0 if `is_first`; writes the
/// root to `norm` if it is not null. One thread: launches follow each other on the stream.
extern "C" __global__ void global_norm(double* running, float* norm, int is_first, int count,
                                       const float* p0, const float* p1, const float* p2,
                                       const float* p3, const float* p4, const float* p5,
                                       const float* p6, const float* p7, const float* p8,
                                       const float* p9, const float* p10, const float* p11,
                                       const float* p12, const float* p13, const float* p14,
                                       const float* p15) {
    const float* const parts[16] = {p0, p1, p2,  p3,  p4,  p5,  p6,  p7,
                                    p8, p9, p10, p11, p12, p13, p14, p15};
    float values[16];
#pragma unroll
    for (int i = 0; i < 16; i++) values[i] = i < count ? *parts[i] : 0.0f;
    double sum = is_first ? 0.0 : *running;
#pragma unroll
    for (int i = 0; i < 16; i++) sum += double(values[i]);
    *running = sum;
    if (norm != nullptr) *norm = float(sqrt(sum));
}

/// A norm that is not finite gives 0, which cancels the update.
extern "C" __global__ void clip_scale(const float* norm, float* out, float max_norm) {
    const float value = *norm;
    // False for NaN as well.
    const bool finite = fabsf(value) < __int_as_float(0x7f800000);
    *out = !finite ? 0.0f : value > max_norm ? __fdiv_rn(max_norm, value) : 1.0f;
}
