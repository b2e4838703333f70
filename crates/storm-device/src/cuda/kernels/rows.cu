// Products of few rows, bf16: out (rows × n) = x (rows × k) · weightᵀ + bias + addend. Text that is generated reads every
// weight once a token, so the weights must stream at the speed of memory.
//
// Tensor cores compute them, with the roles turned around: 16 rows of the weight are the rows of a tile, and the rows of x
// are its columns, eight of them at the cost of one. A lane loads 16 bytes of a weight at once; which
// elements of k an mma takes together does not matter as long as both sides agree, so these 16 bytes are used as they
// come. The eight warps of a block share the k of 16 weight rows, and their sums are added in order.
//
// An element is computed in the same way however many rows there are: the result does not depend on how a text
// is cut into pieces. Compile with -DTILES: tiles of eight rows of x. k is a multiple of 8, and everything starts on
// 16 bytes.
#include "common.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int WEIGHT_ROWS = 16, TILE = 8, STEP = 32;
/// Steps of 32 elements whose loads are in flight together.
constexpr int DEPTH = 4;
/// Steps that are fetched early by grids of at most so many blocks, all of which run at once.
constexpr int FETCHED_STEPS = 16, FETCHED_BLOCKS = 512;

/// Weights pass by once: they are not kept near the multiprocessor.
__device__ __forceinline__ uint4 load_weight(const bf16* from) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
    return words;
}

/// Brings what lies there into the second-level cache, which all multiprocessors share.
__device__ __forceinline__ void fetch(const bf16* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

__device__ __forceinline__ void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// 32 elements of k, of which this lane has those from `i` on: of 16 weight rows with each of the `rows` rows of x.
__device__ __forceinline__ void add_step(float (&sum)[TILES][4], const uint4& upper, const uint4& lower, const bf16* x,
                                         int rows, i64 k, i64 i) {
    const int group = threadIdx.x % WARP / 4;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int row = tile * TILE + group;
        uint4 c = make_uint4(0, 0, 0, 0);
        if (row < rows) c = load_pack(x + row * k + i).words;
        mma(sum[tile], upper.x, lower.x, upper.y, lower.y, c.x, c.y);
        mma(sum[tile], upper.z, lower.z, upper.w, lower.w, c.z, c.w);
    }
}

} // namespace

/// Grid: blocks of 16 weight rows. `bias` and `addend` may be null.
extern "C" __global__ void __launch_bounds__(THREADS)
    rows_product(const bf16* x, const bf16* weight, const bf16* bias, const bf16* addend, bf16* out, int rows, i64 n,
                 i64 k) {
    // One more, so that the lanes of a warp fall into different banks.
    __shared__ float sums[WARPS][TILES * TILE][WEIGHT_ROWS + 1];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int group = lane / 4, quarter = lane % 4;
    const i64 first = i64(blockIdx.x) * WEIGHT_ROWS;
    // Rows past the end are computed as the last one, and dropped.
    const bf16* const upper = weight + minimum(first + group, n - 1) * k;
    const bf16* const lower = weight + minimum(first + group + 8, n - 1) * k;
    const i64 steps = (k + STEP - 1) / STEP, steps_of_warp = (steps + WARPS - 1) / WARPS;
    const i64 begin = warp * steps_of_warp, end = minimum(steps, begin + steps_of_warp);
    const i64 whole = minimum(end, k / STEP);

    let_next_kernel_begin();
    // Weights do not depend on the kernel before: they are fetched while it ends. What a large grid could
    // fetch would not stay in the cache.
    const i64 fetched = minimum(end, begin + (gridDim.x <= FETCHED_BLOCKS ? FETCHED_STEPS : DEPTH));
    for (i64 i = begin; i < fetched; i++) {
        const i64 place = minimum(i * STEP + quarter * PACK, k - PACK);
        fetch(upper + place);
        fetch(lower + place);
    }
    wait_for_kernels_before();

    float sum[TILES][4] = {};
    i64 step = begin;
    for (; step + DEPTH <= whole; step += DEPTH) {
        uint4 a[DEPTH], b[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const i64 i = (step + d) * STEP + quarter * PACK;
            a[d] = load_weight(upper + i);
            b[d] = load_weight(lower + i);
        }
#pragma unroll
        for (int d = 0; d < DEPTH; d++) add_step(sum, a[d], b[d], x, rows, k, (step + d) * STEP + quarter * PACK);
    }
    // The rest, fewer than that many steps or with a part of one: weights past the end meet zeros.
    for (; step < end; step += DEPTH) {
        uint4 a[DEPTH], b[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const i64 i = (step + d) * STEP + quarter * PACK;
            const i64 inside = step + d < end && i < k ? i : 0;
            a[d] = load_weight(upper + inside);
            b[d] = load_weight(lower + inside);
        }
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const i64 i = (step + d) * STEP + quarter * PACK;
            add_step(sum, a[d], b[d], x, step + d < end && i < k ? rows : 0, k, i);
        }
    }

#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int row = tile * TILE + 2 * quarter;
        sums[warp][row][group] = sum[tile][0];
        sums[warp][row + 1][group] = sum[tile][1];
        sums[warp][row][group + 8] = sum[tile][2];
        sums[warp][row + 1][group + 8] = sum[tile][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * WEIGHT_ROWS; i += THREADS) {
        const int row = i / WEIGHT_ROWS, column = i % WEIGHT_ROWS;
        if (first + column >= n) continue;
        float value = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) value += sums[w][row][column];
        if (bias != nullptr) value += to_float(bias[first + column]);
        const i64 place = row * n + first + column;
        if (addend != nullptr) value += to_float(addend[place]);
        out[place] = from_float<bf16>(value);
    }
}
