// Tiles in shared memory, and products of them on tensor cores (mma.sync, sm_80 and up).
#pragma once
#include "common.cuh"

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

// A tile is ROWS tokens of D bf16 each. Its rows have groups of 8 chunks of 16 bytes, or of 4 where 8 do not divide
// them. A chunk's place within its group is turned by the row, so that the 8 rows of a matrix fragment fall into
// different banks.
template <int D> constexpr int GROUP_CHUNKS = D % 64 == 0 ? 8 : 4;

template <int D> __device__ __forceinline__ unsigned tile_offset(int row, int chunk) {
    static_assert(D % 32 == 0, "tile width");
    const int turn = GROUP_CHUNKS<D> == 8 ? row & 7 : row >> 1 & 3;
    return row * (D * 2) + ((chunk ^ turn) << 4);
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
// Row r (a multiple of 8) is reached by adding r rows.
template <int D> __device__ __forceinline__ unsigned fragment_address(unsigned tile, int row) {
    const int lane = threadIdx.x % 32;
    return tile + tile_offset<D>(row + lane % 16, lane / 16);
}

// The same for a B operand stored (n, k), loaded with matrices_load.
template <int D> __device__ __forceinline__ unsigned fragment_address_nk(unsigned tile, int row) {
    const int lane = threadIdx.x % 32;
    return tile + tile_offset<D>(row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// The address of the fragment 16·k columns further.
template <int D> __device__ __forceinline__ unsigned column_step(unsigned address, int k) {
    constexpr int STEPS = GROUP_CHUNKS<D> / 2;
    return (address ^ (k % STEPS << 5)) + k / STEPS * (STEPS * 32);
}

__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
