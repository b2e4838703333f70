// Kernels that do nothing useful, of one thread each: they show what a stream does when it is held up
// or fails.
#include "common.cuh"

__device__ inline u64 now_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

/// Lasts at least so long.
extern "C" __global__ void delay(i64 nanoseconds) {
    const u64 start = now_ns();
    while (now_ns() - start < u64(nanoseconds)) __nanosleep(200);
}

/// Fails.
extern "C" __global__ void trap() { asm volatile("trap;"); }
