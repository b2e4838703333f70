// Stands in for the toolkit's header of that name, so that no include path is needed.
#pragma once
struct __nv_bfloat16 {
    unsigned short bits;
};
__device__ inline float __bfloat162float(__nv_bfloat16 x) {
    return __uint_as_float((unsigned)x.bits << 16);
}
__device__ inline __nv_bfloat16 __float2bfloat16(float x) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(0.0f), "f"(x));
    return __nv_bfloat16{(unsigned short)both};
}
