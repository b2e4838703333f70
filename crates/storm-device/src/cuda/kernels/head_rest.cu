// The last columns of logits, which are too few for a product of the library: it is several times slower on matrices whose
// rows are not whole packs. Storage types: A of logits, hidden rows and weights, B of the weight's gradient.
#include "common.cuh"

/// Threads of a block of `rest_weight_gradient`: as many columns as groups of rows.
constexpr int SIDE = 32;

/// logits (rows × rest) = hidden (rows × width) · weight (rest × width)ᵀ. A warp for each logit.
extern "C" __global__ void rest_logits(const A* __restrict__ hidden, const A* __restrict__ weight, A* logits, i64 rows,
                                       i64 width, i64 rest) {
    const int lane = threadIdx.x % WARP;
    const i64 index = i64(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (index >= rows * rest) return;
    const A* const x = hidden + index / rest * width;
    const A* const w = weight + index % rest * width;
    float sum = 0.0f;
    for (i64 i = lane; i < width; i += WARP) sum = fmaf(to_float(x[i]), to_float(w[i]), sum);
    sum = warp_sum(sum);
    if (lane == 0) logits[index] = from_float<A>(sum);
}

/// out (rows × width) = d_logits (rows × rest) · weight (rest × width). A thread for each element.
extern "C" __global__ void rest_hidden_gradient(const A* __restrict__ d_logits, const A* __restrict__ weight, A* out,
                                                i64 rows, i64 width, i64 rest) {
    const i64 index = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= rows * width) return;
    const A* const dy = d_logits + index / width * rest;
    const A* const w = weight + index % width;
    float sum = 0.0f;
    for (i64 j = 0; j < rest; j++) sum = fmaf(to_float(dy[j]), to_float(w[j * width]), sum);
    out[index] = from_float<A>(sum);
}

/// out (rest × width) = d_logits (rows × rest)ᵀ · hidden (rows × width), added to `out` with `accumulate`. A block for
/// each 32 columns of a row of `out`: each of its warps sums every 32nd row, and the first adds up the warps in order.
extern "C" __global__ void __launch_bounds__(SIDE* SIDE)
    rest_weight_gradient(const A* __restrict__ d_logits, const A* __restrict__ hidden, B* out, i64 rows, i64 width,
                         i64 rest, int accumulate) {
    __shared__ float sums[SIDE][SIDE];
    const int group = threadIdx.x / SIDE, lane = threadIdx.x % SIDE;
    const i64 column = i64(blockIdx.x) * SIDE + lane;
    const i64 of = blockIdx.y;
    float sum = 0.0f;
    if (column < width) {
#pragma unroll 4
        for (i64 row = group; row < rows; row += SIDE)
            sum = fmaf(to_float(d_logits[row * rest + of]), to_float(hidden[row * width + column]), sum);
    }
    sums[group][lane] = sum;
    __syncthreads();
    if (group != 0 || column >= width) return;
    for (int other = 1; other < SIDE; other++) sum += sums[other][lane];
    B* const to = out + of * width + column;
    if (accumulate) sum += to_float(*to);
    *to = from_float<B>(sum);
}
