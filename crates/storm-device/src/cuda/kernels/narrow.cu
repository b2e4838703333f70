// Products with a single column: out (m) = a (m × k) · b (k) + bias + addend. cuBLASLt has algorithms for them that take
// some numbers of rows only. Storage types: A of the operands, B of the rest.
#include "common.cuh"

/// A warp for each row, whose elements are `step` apart; rows are `stride` apart. `bias` has one value; it and `addend` may
/// be null, and `addend` may be `out`.
extern "C" __global__ void single_column(const A* __restrict__ a, const A* __restrict__ b, const B* bias, const B* addend,
                                         B* out, i64 m, i64 k, i64 stride, i64 step) {
    const int lane = threadIdx.x % WARP;
    const i64 row = i64(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= m) return;
    float sum = 0.0f;
    for (i64 i = lane; i < k; i += WARP) sum = fmaf(to_float(a[row * stride + i * step]), to_float(b[i]), sum);
    sum = warp_sum(sum);
    if (lane != 0) return;
    if (bias != nullptr) sum += to_float(bias[0]);
    if (addend != nullptr) sum += to_float(addend[row]);
    out[row] = from_float<B>(sum);
}
