// Products of tiles in shared memory by whole warp groups (wgmma, sm_90a).
#pragma once
#include "tensor_cores.cuh"

// ---- products -----------------------------------------------------------------------------------

// A matrix in a tile, for the tensor cores: 8 rows of 128 bytes follow each other without gaps;
// `panel_bytes` leads to the next 64 columns of an operand stored (k, n).
__device__ __forceinline__ unsigned long long matrix(unsigned address, int panel_bytes) {
    return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
           static_cast<unsigned long long>(panel_bytes >> 4) << 16 | static_cast<unsigned long long>(1024 >> 4) << 32 |
           1ull << 62;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory");
}

// Keeps the compiler from reading accumulators before the wait that precedes this.
template <int N> __device__ __forceinline__ void arrived(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

#define FLOATS_4(how, x, i) how(x[i]), how(x[i + 1]), how(x[i + 2]), how(x[i + 3])
#define FLOATS_16(how, x, i)                                                                                           \
    FLOATS_4(how, x, i), FLOATS_4(how, x, i + 4), FLOATS_4(how, x, i + 8), FLOATS_4(how, x, i + 12)
#define FLOATS_32(how, x) FLOATS_16(how, x, 0), FLOATS_16(how, x, 16)
#define FLOATS_64(how, x) FLOATS_32(how, x), FLOATS_16(how, x, 32), FLOATS_16(how, x, 48)
#define NAMES_32                                                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31}"
#define NAMES_64                                                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"    \
    "%57,%58,%59,%60,%61,%62,%63}"

// Makes tiles that ordinary instructions have written visible to products, which read past the ordinary path.
__device__ __forceinline__ void tiles_fence() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// Five functions for each n. `product`: c (64 × n) = a · b. `product_add`: c += a · b. Here a (64 × 16)
// and b (n × 16) lie in tiles, (row, k); or a is in registers and b stored (k, n). `product_turned` and
// `product_add_turned` have both stored (k, row). Those that do not add do not read c: the compiler must see
// that, or it gives up running products side by side. Operands in registers must be made anew in every round of a
// loop: ptxas 13.0 overwrites those it should keep.
#define PRODUCTS(COUNT, N, A_1, A_4)                                                                                   \
    [[maybe_unused]] __device__ __forceinline__ void product(float (&c)[COUNT], unsigned long long a,                  \
                                                             unsigned long long b) {                                   \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                    \
                     "k16.f32.bf16.bf16 " NAMES_##COUNT ", " A_1 ", p, 1, 1, 0, 0;\n}\n"                               \
                     : FLOATS_##COUNT("=f", c)                                                                         \
                     : "l"(a), "l"(b));                                                                                \
    }                                                                                                                  \
    __device__ __forceinline__ void product_add(float (&c)[COUNT], unsigned long long a, unsigned long long b) {       \
        asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                    \
                     "k16.f32.bf16.bf16 " NAMES_##COUNT ", " A_1 ", p, 1, 1, 0, 0;\n}\n"                               \
                     : FLOATS_##COUNT("+f", c)                                                                         \
                     : "l"(a), "l"(b));                                                                                \
    }                                                                                                                  \
    [[maybe_unused]] __device__ __forceinline__ void product_add(float (&c)[COUNT], const unsigned (&a)[4],            \
                                                                 unsigned long long b) {                               \
        asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                    \
                     "k16.f32.bf16.bf16 " NAMES_##COUNT ", " A_4 ", p, 1, 1, 1;\n}\n"                                   \
                     : FLOATS_##COUNT("+f", c)                                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                            \
    }                                                                                                                  \
    [[maybe_unused]] __device__ __forceinline__ void product_turned(float (&c)[COUNT], unsigned long long a,           \
                                                                    unsigned long long b) {                            \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                    \
                     "k16.f32.bf16.bf16 " NAMES_##COUNT ", " A_1 ", p, 1, 1, 1, 1;\n}\n"                               \
                     : FLOATS_##COUNT("=f", c)                                                                         \
                     : "l"(a), "l"(b));                                                                                \
    }                                                                                                                  \
    [[maybe_unused]] __device__ __forceinline__ void product_add_turned(float (&c)[COUNT], unsigned long long a,       \
                                                                        unsigned long long b) {                        \
        asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                    \
                     "k16.f32.bf16.bf16 " NAMES_##COUNT ", " A_1 ", p, 1, 1, 1, 1;\n}\n"                               \
                     : FLOATS_##COUNT("+f", c)                                                                         \
                     : "l"(a), "l"(b));                                                                                \
    }

PRODUCTS(32, 64, "%32, %33", "{%32,%33,%34,%35}, %36")
PRODUCTS(64, 128, "%64, %65", "{%64,%65,%66,%67}, %68")

// Zeros, each in a register of its own: the compiler would otherwise share one, and then give up running
// products side by side.
template <int N> __device__ __forceinline__ void clear(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("mov.f32 %0, 0f00000000;\n" : "=f"(sums[i]));
}
