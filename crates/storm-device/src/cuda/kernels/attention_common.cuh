// Shared by the attention kernels: where things lie, tiles in shared memory, tensor-core fragments.
//
// Queries, keys and values lie packed per token, (B, T, (Hq + 2·Hkv)·D): Hq query heads, Hkv key
// heads, Hkv value heads. Query head h uses key and value head h / (Hq / Hkv). y and dy are
// (B, T, Hq·D); log_sum_exp and delta are (B, Hq, T) f32; segments is (B, T) i32.
#pragma once
#include "common.cuh"

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

// ---- shared memory, asynchronous copies ---------------------------------------------------------

__device__ __forceinline__ unsigned shared_address(const void *pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory; zeros, and no access, where `valid` is false.
__device__ __forceinline__ void copy_16(unsigned to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

// 4 bytes from global to shared memory; zeros where `valid` is false.
__device__ __forceinline__ void copy_4(unsigned to, const void *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from),
                 "r"(valid ? 4 : 0)
                 : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most `LEFT` of the newest groups of this thread's copies are under way.
template <int LEFT> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(LEFT) : "memory");
}

// A tile is ROWS tokens of D bf16 each. Within a row the 16-byte chunk c lies at c ^ (row % 8), so
// that the 8 rows of a matrix fragment fall into different banks.
template <int D> __device__ __forceinline__ unsigned tile_offset(int row, int chunk) {
    return row * (D * 2) + ((chunk ^ (row & 7)) << 4);
}

// Where the calling thread starts to copy a tile that begins at `from`.
template <int D, int THREADS> __device__ __forceinline__ const bf16 *tile_source(const bf16 *from, int stride) {
    return from + static_cast<long long>(threadIdx.x / (D / 8)) * stride + threadIdx.x % (D / 8) * 8;
}

// Starts copying a tile from the thread's `source`; rows from `valid_rows` on become zeros. `stride` is
// that of a token.
template <int ROWS, int D, int THREADS>
__device__ __forceinline__ void tile_load(unsigned tile, const bf16 *source, int stride, int valid_rows) {
    constexpr int CHUNKS = D / 8;
    constexpr int STEP = THREADS / CHUNKS;
    static_assert(THREADS % CHUNKS == 0 && STEP % 8 == 0 && ROWS % STEP == 0, "tile shape");
    const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
    const unsigned to = tile + tile_offset<D>(first, chunk);
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
        copy_16(to + i * STEP * (D * 2), source, first + i * STEP < valid_rows);
        source += STEP * stride;
    }
}

// Writes a tile from shared memory to global memory; rows from `valid_rows` on are left alone.
template <int ROWS, int D, int THREADS>
__device__ __forceinline__ void tile_store(int thread, const char *tile, bf16 *to, int stride, int valid_rows) {
    constexpr int CHUNKS = D / 8;
    constexpr int STEP = THREADS / CHUNKS;
    const int chunk = thread % CHUNKS, first = thread / CHUNKS;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
        const int row = first + i * STEP;
        if (row < valid_rows) {
            const uint4 value = *reinterpret_cast<const uint4 *>(tile + tile_offset<D>(row, chunk));
            *reinterpret_cast<uint4 *>(to + static_cast<long long>(row) * stride + chunk * 8) = value;
        }
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

// ---- tensor-core fragments ----------------------------------------------------------------------

// Four 8×8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void matrices_load(unsigned (&to)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void matrices_load_transposed(unsigned (&to)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// c (16 × 8, f32) += a (16 × 16) · b (16 × 8).
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Address from which a lane loads its part of a 16×16 fragment whose rows are `row`… of a tile:
// with matrices_load an A operand, with matrices_load_transposed a B operand stored (k, n).
// Column step k (of 16) is reached by `address ^ (k << 5)`, row r (a multiple of 8) by adding r rows.
template <int D> __device__ __forceinline__ unsigned fragment_address(unsigned tile, int row) {
    const int lane = threadIdx.x % 32;
    return tile + tile_offset<D>(row + lane % 16, lane / 16);
}

// The same for a B operand stored (n, k), loaded with matrices_load.
template <int D> __device__ __forceinline__ unsigned fragment_address_nk(unsigned tile, int row) {
    const int lane = threadIdx.x % 32;
    return tile + tile_offset<D>(row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

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
