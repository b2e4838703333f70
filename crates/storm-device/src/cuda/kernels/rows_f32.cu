// Products of few rows in f32, where tensor cores would cut the operands: out (rows × n) = x (rows × k) · weightᵀ + bias +
// addend. A block has four rows of the weight and up to four of x; its warps share k. The result does not depend on
// how many rows there are. k is a multiple of 4, and everything starts on 16 bytes.
#include "common.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP, WEIGHT_ROWS = 4, ROWS = 4, WIDTH = 4;

__device__ __forceinline__ float4 load_four(const float* from) { return *reinterpret_cast<const float4*>(from); }

__device__ __forceinline__ float add_products(float sum, const float4& a, const float4& b) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    return fmaf(a.w, b.w, sum);
}

} // namespace

/// Grid: blocks of four weight rows, blocks of four rows of x. `bias` and `addend` may be null.
extern "C" __global__ void __launch_bounds__(THREADS)
    rows_product_f32(const float* x, const float* weight, const float* bias, const float* addend, float* out, int rows,
                     i64 n, i64 k) {
    __shared__ float sums[WARPS][ROWS][WEIGHT_ROWS];
    take_turn();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 first = i64(blockIdx.x) * WEIGHT_ROWS;
    const int first_row = blockIdx.y * ROWS;
    // Rows past the end are computed as the last one, and dropped.
    const float *weights[WEIGHT_ROWS], *inputs[ROWS];
#pragma unroll
    for (int j = 0; j < WEIGHT_ROWS; j++) weights[j] = weight + minimum(first + j, n - 1) * k;
#pragma unroll
    for (int r = 0; r < ROWS; r++) inputs[r] = x + minimum(first_row + r, rows - 1) * k;

    float sum[ROWS][WEIGHT_ROWS] = {};
    for (i64 i = (i64(warp) * WARP + lane) * WIDTH; i < k; i += THREADS * WIDTH) {
        float4 w[WEIGHT_ROWS];
#pragma unroll
        for (int j = 0; j < WEIGHT_ROWS; j++) w[j] = load_four(weights[j] + i);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float4 input = load_four(inputs[r] + i);
#pragma unroll
            for (int j = 0; j < WEIGHT_ROWS; j++) sum[r][j] = add_products(sum[r][j], w[j], input);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int j = 0; j < WEIGHT_ROWS; j++) {
            const float total = warp_sum(sum[r][j]);
            if (lane == 0) sums[warp][r][j] = total;
        }
    }
    __syncthreads();
    const int row = threadIdx.x / WEIGHT_ROWS, column = threadIdx.x % WEIGHT_ROWS;
    if (row >= ROWS || first_row + row >= rows || first + column >= n) return;
    float value = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) value += sums[w][row][column];
    if (bias != nullptr) value += bias[first + column];
    const i64 place = (first_row + row) * n + first + column;
    if (addend != nullptr) value += addend[place];
    out[place] = value;
}
