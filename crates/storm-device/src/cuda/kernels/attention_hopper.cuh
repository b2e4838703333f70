// What the attention kernels for Hopper share (sm_90a only: wgmma): tiles, barriers between warp groups, products.
//
// Compile with -DHEAD_DIM=64|128, -DCAUSAL=0|1, -DSEGMENTS=0|1, and -DWINDOW=1 for a window.
//
// Every block is one warp group that copies tiles, and two that compute with 64 rows each. Tiles pass
// through a ring of slots: a slot's `full` barrier signals that a tile has landed, its `empty`
// barrier that both computing groups have read it. Products are asynchronous: what a group computes
// on scores hides behind its own later products, and behind those of the other group.
//
// The compiler takes a product's sums as ready at once. Nothing may touch them before the wait: main
// loops are not unrolled, since that would copy sums still being made, and `arrived` follows each wait.
#pragma once
#include "attention_common.cuh"
#include "warp_groups.cuh"
#include "wgmma.cuh"

constexpr int D = HEAD_DIM;
static_assert(D == 64 || D == 128, "head size");
constexpr int THREADS = 3 * GROUP, COMPUTE_WARPS = 8;
constexpr int D_STEPS = D / 16;

// ---- tiles --------------------------------------------------------------------------------------

// A tile is ROWS tokens as D/64 panels of (ROWS, 64) bf16. In a panel, whose rows have 128 bytes, the
// 16-byte chunk c lies at c ^ (row % 8): what the hardware calls 128-byte swizzle.
template <int ROWS> __device__ __forceinline__ unsigned panel_offset(int row, int chunk) {
    return chunk / 8 * (ROWS * 128) + row * 128 + ((chunk % 8 ^ row % 8) << 4);
}

// Starts copying a tile by the block's first THREADS threads; rows from `valid_rows` on become zeros.
template <int ROWS, int THREADS = GROUP>
__device__ __forceinline__ void panels_load(unsigned tile, const bf16 *from, int stride, int valid_rows) {
    constexpr int CHUNKS = D / 8, STEP = THREADS / CHUNKS;
    static_assert(STEP % 4 == 0 && ROWS % (2 * STEP) == 0, "tile shape");
    const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x % THREADS / CHUNKS;
    const bf16 *source = from + static_cast<long long>(first) * stride + chunk * 8;
    const unsigned to = tile + panel_offset<ROWS>(first, chunk);
    // Steps of 4 rows meet either half of a swizzle of 8, whose chunks differ in one bit.
    [[maybe_unused]] const unsigned other = to ^ 4 << 4;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
        copy_16((STEP % 8 != 0 && i % 2 ? other : to) + i * STEP * 128, source, first + i * STEP < valid_rows);
        source += STEP * stride;
    }
}

// Rounds accumulators (64 × D) of a warp group, times a factor per row, into rows `row`… of a tile, and
// writes them to global memory, except from `valid_rows` on. `barrier` is the group's own.
template <int ROWS>
__device__ __forceinline__ void panels_store(char *tile, int row, const float (&sums)[D / 2], float top, float bottom,
                                             bf16 *to, int stride, int valid_rows, int barrier) {
    const int thread = threadIdx.x % GROUP, lane = thread % 32, own = row + thread / 32 * 16 + lane / 4;
    asm volatile("bar.sync %0, 128;\n" ::"r"(barrier) : "memory");
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        char *place = tile + lane % 4 * 4;
        *reinterpret_cast<unsigned *>(place + panel_offset<ROWS>(own, n)) = pack(sums[n * 4] * top, sums[n * 4 + 1] * top);
        *reinterpret_cast<unsigned *>(place + panel_offset<ROWS>(own + 8, n)) =
            pack(sums[n * 4 + 2] * bottom, sums[n * 4 + 3] * bottom);
    }
    asm volatile("bar.sync %0, 128;\n" ::"r"(barrier) : "memory");
    constexpr int CHUNKS = D / 8, STEP = GROUP / CHUNKS;
    const int chunk = thread % CHUNKS;
#pragma unroll
    for (int i = 0; i < 64 / STEP; i++) {
        const int r = thread / CHUNKS + i * STEP;
        if (r < valid_rows)
            *reinterpret_cast<uint4 *>(to + static_cast<long long>(r) * stride + chunk * 8) =
                *reinterpret_cast<const uint4 *>(tile + panel_offset<ROWS>(row + r, chunk));
    }
}

// ---- waiting for tiles --------------------------------------------------------------------------

// Waits for a tile, and makes it visible to the tensor cores, which read past the ordinary path.
__device__ __forceinline__ void tile_wait(unsigned barrier, int phase) {
    barrier_wait(barrier, phase);
    tiles_fence();
}

__device__ __forceinline__ void tile_release(unsigned barrier) {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// ---- products -----------------------------------------------------------------------------------

// scores (64 × n) = 64 rows of one tile (of A_ROWS) by the n rows of another, both (·, D).
template <int A_ROWS, int N>
__device__ __forceinline__ void scores_of(float (&scores)[N], unsigned rows, unsigned columns) {
    product(scores, matrix(rows, 16), matrix(columns, 16));
#pragma unroll
    for (int k = 1; k < D_STEPS; k++)
        product_add(scores, matrix(rows + k / 4 * (A_ROWS * 128) + k % 4 * 32, 16),
                    matrix(columns + k / 4 * (N * 2 * 128) + k % 4 * 32, 16));
}

// sums (64 × D) += weights (64 × 16·STEPS) · a tile.
template <int STEPS>
__device__ __forceinline__ void accumulate(float (&sums)[D / 2], const unsigned (&weights)[STEPS][4], unsigned tile) {
#pragma unroll
    for (int k = 0; k < STEPS; k++) product_add(sums, weights[k], matrix(tile + k * 2048, STEPS * 16 * 128));
}

// Accumulators as A operands.
template <int N> __device__ __forceinline__ void pack_all(unsigned (&to)[N / 8][4], const float (&from)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) to[i / 4][i % 4] = pack(from[2 * i], from[2 * i + 1]);
}

// As in attention.cu, for 64 rows by 2·N columns: the thread's own rows are row and row + 8, and
// `first` is the first column.
enum class Rows { Queries, Keys };

template <Rows ROWS, int N>
__device__ __forceinline__ void hide(float (&scores)[N], int row, int first, int seq, const int *ids WITH_WINDOW) {
    const int lane = threadIdx.x % 32, column = first + lane % 4 * 2, limit = row - column, left = seq - column;
    int row_ids[2], column_ids[N / 16]; // of columns lane, lane + 32, …
    if (SEGMENTS) {
#pragma unroll
        for (int r = 0; r < 2; r++) row_ids[r] = ids[min(row + 8 * r, seq - 1)];
#pragma unroll
        for (int i = 0; i < N / 16; i++) column_ids[i] = ids[min(first + i * 32 + lane, seq - 1)];
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int place = i / 4 * 8 + i % 2, r = i / 2 % 2;
        bool seen = ROWS == Rows::Keys || CAUSAL || place < left;
        if (CAUSAL) seen = ROWS == Rows::Queries ? place - 8 * r <= limit : place - 8 * r >= limit;
        if (WINDOW)
            seen = seen && (ROWS == Rows::Queries ? place - 8 * r > limit - window : place - 8 * r < limit + window);
        if (SEGMENTS) {
            const int id = __shfl_sync(0xffffffff, column_ids[place / 32], place % 32 + lane % 4 * 2);
            seen = seen && id == row_ids[r];
        }
        scores[i] = seen ? scores[i] : MINUS_INFINITY;
    }
}

// Whether the warp's 16 rows and COLUMNS columns, all before `seq`, belong to several segments.
template <int COLUMNS> __device__ __forceinline__ bool mixed(const int *ids, int warp_row, int column, int seq) {
    const int lane = threadIdx.x % 32, first = ids[min(warp_row, seq - 1)];
    bool differs = ids[min(warp_row + lane % 16, seq - 1)] != first;
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 32) differs = differs || ids[min(column + i + lane, seq - 1)] != first;
    return __any_sync(0xffffffff, differs);
}
