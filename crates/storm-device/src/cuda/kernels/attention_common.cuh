// Shared by the attention kernels: where things lie, tiles in shared memory, tensor-core fragments.
//
// Queries, keys and values lie packed per token, (B, T, (Hq + 2·Hkv)·D): Hq query heads, Hkv key
// heads, Hkv value heads. Query head h uses key and value head h / (Hq / Hkv). y and dy are
// (B, T, Hq·D); log_sum_exp and delta are (B, Hq, T) f32; segments is (B, T) i32.
#pragma once
#include "tensor_cores.cuh"

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define MINUS_INFINITY __int_as_float(0xff800000)

// With -DWINDOW=1, which goes with -DCAUSAL=1, kernels have one more argument: a query sees `window` keys at most,
// its own included. It must be less than the sequence.
#ifndef WINDOW
#define WINDOW 0
#endif
#if WINDOW
#define WITH_WINDOW , int window
#define PASS_WINDOW , window
#else
#define WITH_WINDOW
#define PASS_WINDOW
[[maybe_unused]] constexpr int window = 0;
#endif

// ---- tiles ---------------------------------------------------------------------------------------

// Tiles travel by groups of chunks: as many rows at a time as there are threads for a group each.

// Where the calling thread starts to copy a tile that begins at `from`.
template <int D> __device__ __forceinline__ const bf16 *tile_source(const bf16 *from, int stride) {
    constexpr int CHUNKS = GROUP_CHUNKS<D>;
    return from + static_cast<long long>(threadIdx.x / CHUNKS) * stride + threadIdx.x % CHUNKS * 8;
}

// Starts copying a tile from the thread's `source`; rows from `valid_rows` on become zeros. `stride` is
// that of a token.
template <int ROWS, int D, int THREADS>
__device__ __forceinline__ void tile_load(unsigned tile, const bf16 *source, int stride, int valid_rows) {
    constexpr int CHUNKS = GROUP_CHUNKS<D>, STEP = THREADS / CHUNKS;
    static_assert(THREADS % CHUNKS == 0 && STEP % 8 == 0 && (ROWS % STEP == 0 || ROWS < STEP), "tile shape");
    const int first = threadIdx.x / CHUNKS;
    if (ROWS < STEP && first >= ROWS) return;
    const unsigned to = tile + tile_offset<D>(first, threadIdx.x % CHUNKS);
#pragma unroll
    for (int i = 0; i < (ROWS + STEP - 1) / STEP; i++) {
        const bool valid = first + i * STEP < valid_rows;
#pragma unroll
        for (int group = 0; group < D / 8 / CHUNKS; group++)
            copy_16(to + i * STEP * (D * 2) + group * CHUNKS * 16, source + group * CHUNKS * 8, valid);
        source += STEP * stride;
    }
}

// Writes a tile from shared memory to global memory; rows from `valid_rows` on are left alone.
template <int ROWS, int D, int THREADS>
__device__ __forceinline__ void tile_store(int thread, const char *tile, bf16 *to, int stride, int valid_rows) {
    constexpr int CHUNKS = GROUP_CHUNKS<D>, STEP = THREADS / CHUNKS;
    static_assert(THREADS % CHUNKS == 0 && STEP % 8 == 0 && ROWS % STEP == 0, "tile shape");
    const int chunk = thread % CHUNKS, first = thread / CHUNKS;
    const char *from = tile + tile_offset<D>(first, chunk);
    to += static_cast<long long>(first) * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
        if (first + i * STEP < valid_rows) {
#pragma unroll
            for (int group = 0; group < D / 8 / CHUNKS; group++)
                *reinterpret_cast<uint4 *>(to + group * CHUNKS * 8) =
                    *reinterpret_cast<const uint4 *>(from + i * STEP * (D * 2) + group * CHUNKS * 16);
        }
        to += STEP * stride;
    }
}

// threadIdx.x and blockIdx, read once more: what follows from these need not stay in registers through a
// kernel's main loop.
__device__ __forceinline__ int thread_again() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(x));
    return x;
}

__device__ __forceinline__ int2 block_again() {
    int2 place;
    asm volatile("mov.u32 %0, %%ctaid.x;\nmov.u32 %1, %%ctaid.y;\n" : "=r"(place.x), "=r"(place.y));
    return place;
}

// ---- fragments -----------------------------------------------------------------------------------

// Two neighbouring 16×8 accumulators as one 16×16 A operand.
__device__ __forceinline__ void pack_fragment(unsigned (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack(left[0], left[1]);
    a[1] = pack(left[2], left[3]);
    a[2] = pack(right[0], right[1]);
    a[3] = pack(right[2], right[3]);
}

// Rounds a 16×8 accumulator, times `factor`, into a tile at (row, 8·chunk).
template <int D>
__device__ __forceinline__ void accumulator_to_tile(int thread, char *tile, int row, int chunk, const float (&c)[4],
                                                    float top_factor, float bottom_factor) {
    const int lane = thread % 32, in_row = lane / 4, in_chunk = lane % 4 * 4;
    *reinterpret_cast<unsigned *>(tile + tile_offset<D>(row + in_row, chunk) + in_chunk) =
        pack(c[0] * top_factor, c[1] * top_factor);
    *reinterpret_cast<unsigned *>(tile + tile_offset<D>(row + in_row + 8, chunk) + in_chunk) =
        pack(c[2] * bottom_factor, c[3] * bottom_factor);
}

__device__ __forceinline__ float exp_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// Maximum and sum over the four lanes that hold a row of accumulators.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// ---- segments -----------------------------------------------------------------------------------

// The smallest range of tokens in [begin, end) that holds every token whose segment number lies
// between the smallest and the largest of tokens [own_begin, own_end). Called by a whole block.
__device__ __forceinline__ int2 segment_range(const int *ids, int own_begin, int own_end, int begin, int end) {
    __shared__ int low, high, first, last;
    if (threadIdx.x == 0) {
        low = first = 0x7fffffff;
        high = last = 0x80000000;
    }
    __syncthreads();
    for (int i = own_begin + threadIdx.x; i < own_end; i += blockDim.x) {
        atomicMin(&low, ids[i]);
        atomicMax(&high, ids[i]);
    }
    __syncthreads();
    int own_first = 0x7fffffff, own_last = 0x80000000;
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
        if (low <= ids[i] && ids[i] <= high) {
            own_first = min(own_first, i);
            own_last = i;
        }
    }
    atomicMin(&first, own_first);
    atomicMax(&last, own_last);
    __syncthreads();
    return first <= last ? make_int2(first, last + 1) : make_int2(begin, begin);
}
