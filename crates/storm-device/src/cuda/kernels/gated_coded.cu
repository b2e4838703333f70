// Gated units whose operand waits for the backward pass in 8 bits. Storage type: E.
//
// The code of a row is the row of its gates, then that of its ups, each in the form of `QuantizedRow` of storm-graph: codes,
// then a bf16 scale for each group of 128. Grid: (rows, packs of a row in blocks), a pack of eight columns a thread. A group is 16
// neighbouring lanes.
#include "activations.cuh"
#include "common.cuh"

constexpr i64 GROUP = 128;
constexpr int GROUP_LANES = GROUP / PACK;
constexpr float CODE_MAX = 127.0f;
constexpr u32 INFINITE = 0x7f800000u;

/// Where the code of a half row lies.
struct Form {
    i64 width, scales_at, bytes;
};

/// The first column of this thread.
__device__ inline i64 first_column() {
    return (i64(blockIdx.y) * blockDim.x + threadIdx.x) * PACK;
}

/// Whether none of the warp's columns is in a row. A warp stays or leaves as a whole: lanes compare their values.
__device__ inline bool warp_is_outside(i64 i, i64 width) {
    return i - threadIdx.x % WARP * PACK >= width;
}

/// The largest magnitude of a pack as the bits of an f32. As integers, magnitudes are in order, with NaN above all numbers.
__device__ inline u32 largest_magnitude(const Pack<bf16>& pack) {
    constexpr u32 BOTH = 0x7fff7fffu;
    const u32 largest = __vmaxu2(__vmaxu2(pack.words.x & BOTH, pack.words.y & BOTH),
                                 __vmaxu2(pack.words.z & BOTH, pack.words.w & BOTH));
    return max(largest & 0xffff0000u, largest << 16);
}
__device__ inline u32 largest_magnitude(const Pack<float>& pack) {
    float x[PACK];
    unpack(pack, x);
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < PACK; j++) largest = max(largest, __float_as_uint(x[j]) & 0x7fffffffu);
    return largest;
}

/// A magnitude divided by the largest code, rounded in a way that does not change the next larger bf16. The quotient of a
/// bf16 is either a bf16 itself or far from one, by 2⁻¹⁵ of its size. A factor just below 1/127 errs by less, downwards.
__device__ inline float part_of_largest(u32 largest) {
    if (EXACT<E>) return __fdiv_rn(__uint_as_float(largest), CODE_MAX);
    return __fmul_rn(__uint_as_float(largest), 0x1.020408p-7f);
}

/// The smallest bf16 that is not below the largest magnitude of the group divided by the largest code. Not finite if one
/// of the values is not.
__device__ inline bf16 scale_of_group(const Pack<E>& pack) {
    u32 largest = largest_magnitude(pack);
#pragma unroll
    for (int step = GROUP_LANES / 2; step > 0; step /= 2)
        largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, step));
    if (largest > INFINITE) return bf16{0x7fc0};
    const u32 bits = __float_as_uint(part_of_largest(largest));
    return bf16{(unsigned short)((bits >> 16) + ((bits & 0xffffu) != 0))};
}

/// Four codes, of which only the lowest byte counts, in one word.
__device__ inline u32 four_codes(const u32 (&codes)[PACK], int first) {
    const u32 low = __byte_perm(codes[first], codes[first + 1], 0x0040);
    const u32 high = __byte_perm(codes[first + 2], codes[first + 3], 0x0040);
    return __byte_perm(low, high, 0x5410);
}

/// At 1.5 · 2²³ the last place of an f32 is one: a sum is rounded to a whole number, ties to even, which is in its low bits.
constexpr float WHOLE = 12582912.0f;
/// And at 1.5 · 2¹¹ it is 2⁻¹².
constexpr float FINE = 3072.0f;

/// A value divided by its scale and rounded to the nearest code, ties to even, in the low byte. Neither the scale nor its
/// inverse is subnormal.
__device__ inline u32 code_of(float x, float scale, float inverse) {
    if (EXACT<E>) {
        // A quotient and its remainder give the rounded quotient that a division gives.
        const float quotient = __fmul_rn(x, inverse);
        return __float_as_uint(__fadd_rn(fmaf(fmaf(-quotient, scale, x), inverse, quotient), WHOLE));
    }
    // The quotient of two bf16 is either in the middle between two codes or 2⁻¹¹ away from it, so rounding to steps of 2⁻¹²
    // corrects the error of the inverse where it counts.
    return __float_as_uint(__fadd_rn(fmaf(x, inverse, FINE), WHOLE - FINE));
}

__device__ inline float inverse_of(float scale) {
    if (EXACT<E>) return __frcp_rn(scale);
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
    return inverse;
}

/// The nearest code of each value, ties to even.
__device__ inline uint2 codes_of(const float (&x)[PACK], float scale) {
    if (!(scale > 0.0f && scale < __uint_as_float(INFINITE))) return make_uint2(0, 0);
    u32 codes[PACK];
    if (scale > 0x1p-60f && scale < 0x1p60f) {
        const float inverse = inverse_of(scale);
#pragma unroll
        for (int j = 0; j < PACK; j++) codes[j] = code_of(x[j], scale, inverse);
    } else {
#pragma unroll
        for (int j = 0; j < PACK; j++) codes[j] = __float_as_uint(__fadd_rn(__fdiv_rn(x[j], scale), WHOLE));
    }
    return make_uint2(four_codes(codes, 0), four_codes(codes, 4));
}

/// The values of eight codes.
__device__ inline void values_of(uint2 codes, float scale, float (&x)[PACK]) {
    // As the low bits of a float near 2²³, where the last place is one.
    const u32 shifted[2] = {codes.x ^ 0x80808080u, codes.y ^ 0x80808080u};
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        const u32 bits = __byte_perm(shifted[j / 4], 0x4b000000u, 0x7440 | j % 4);
        x[j] = __fmul_rn(__uint_as_float(bits) - 8388736.0f, scale);
    }
}

/// Writes the codes of a pack of a half row, and the scale once for each group.
__device__ inline void write_code(unsigned char* to, const Form& form, i64 i, const Pack<E>& pack,
                                  const float (&x)[PACK]) {
    const bf16 stored = scale_of_group(pack);
    // Codes end where scales begin; what is between is zero.
    if (i < form.scales_at) *reinterpret_cast<uint2*>(to + i) = codes_of(x, to_float(stored));
    if (i % GROUP != 0 || i >= form.width) return;
    bf16* const scales = reinterpret_cast<bf16*>(to + form.scales_at);
    const i64 group = i / GROUP;
    scales[group] = stored;
    // The last group clears what follows the scales.
    if (i + GROUP >= form.width) {
        const i64 places = (form.bytes - form.scales_at) / 2;
        for (i64 place = group + 1; place < places; place++) scales[place] = bf16{0};
    }
}

__device__ inline void read_code(const unsigned char* from, const Form& form, i64 i, float (&x)[PACK]) {
    const uint2 codes = *reinterpret_cast<const uint2*>(from + i);
    const bf16 scale = reinterpret_cast<const bf16*>(from + form.scales_at)[i / GROUP];
    values_of(codes, to_float(scale), x);
}

/// The values of a pack as they come back from 8 bits.
__device__ inline void rounded(const Pack<E>& pack, float (&x)[PACK]) {
    const float scale = to_float(scale_of_group(pack));
    unpack(pack, x);
    values_of(codes_of(x, scale), scale, x);
}

/// gate_up (rows, 2·width), out (rows, width), code (rows, 2·form.bytes).
template <class F>
__device__ inline void gated_coded(const E* gate_up, E* out, unsigned char* code, const Form& form) {
    take_turn();
    const i64 width = form.width, row = blockIdx.x, i = first_column();
    if (warp_is_outside(i, width)) return;
    const bool aligned = width % PACK == 0;
    const Row<const E> gate_row = {gate_up + 2 * row * width, width, aligned};
    const Row<const E> up_row = {gate_row.start + width, width, aligned};
    const Pack<E> gate_pack = read_pack(gate_row, i), up_pack = read_pack(up_row, i);
    float gate[PACK], up[PACK];
    unpack(gate_pack, gate);
    unpack(up_pack, up);
    unsigned char* const row_code = code + 2 * row * form.bytes;
    write_code(row_code, form, i, gate_pack, gate);
    write_code(row_code + form.bytes, form, i, up_pack, up);
#pragma unroll
    for (int j = 0; j < PACK; j++) gate[j] = F::at(gate[j]).value * up[j];
    write8(row_of(out, row, width), i, gate);
}

/// Writes both gradients of a pack, and what the unit makes of it where that is asked for.
template <class F, bool OUTPUT>
__device__ inline void write_gradients(const float (&d)[PACK], float (&gate)[PACK], const float (&up)[PACK], E* output,
                                       E* gradient, i64 width, i64 row, i64 i) {
    const bool aligned = width % PACK == 0;
    E* const start = gradient + 2 * row * width;
    float d_gate[PACK], d_up[PACK];
    gated_gradients<F>(d, gate, up, d_gate, d_up);
    write8(Row<E>{start, width, aligned}, i, d_gate);
    write8(Row<E>{start + width, width, aligned}, i, d_up);
    if (OUTPUT) write8(row_of(output, row, width), i, gate);
}

/// Gradient from the code; `output` is `dy`.
template <class F, bool OUTPUT>
__device__ inline void coded_backward(const E* dy, E* output, const unsigned char* code, E* gradient,
                                      const Form& form) {
    const i64 width = form.width, row = blockIdx.x, i = first_column();
    if (i >= width) return;
    const Pack<E> dy_pack = read_pack(row_of(dy, row, width), i);
    const unsigned char* const row_code = code + 2 * row * form.bytes;
    float d[PACK], gate[PACK], up[PACK];
    read_code(row_code, form, i, gate);
    read_code(row_code + form.bytes, form, i, up);
    unpack(dy_pack, d);
    write_gradients<F, OUTPUT>(d, gate, up, output, gradient, width, row, i);
}

/// The same from gate_up itself, which the gradient overwrites.
template <class F, bool OUTPUT>
__device__ inline void rounded_backward(const E* dy, E* output, E* gate_up, i64 width) {
    const i64 row = blockIdx.x, i = first_column();
    if (warp_is_outside(i, width)) return;
    const bool aligned = width % PACK == 0;
    E* const start = gate_up + 2 * row * width;
    const Pack<E> dy_pack = read_pack(row_of(dy, row, width), i);
    const Pack<E> gate_pack = read_pack(Row<const E>{start, width, aligned}, i);
    const Pack<E> up_pack = read_pack(Row<const E>{start + width, width, aligned}, i);
    float d[PACK], gate[PACK], up[PACK];
    unpack(dy_pack, d);
    rounded(gate_pack, gate);
    rounded(up_pack, up);
    write_gradients<F, OUTPUT>(d, gate, up, output, gate_up, width, row, i);
}

#define CODED_KERNELS(name, F)                                                                              \
    extern "C" __global__ void name##_gated_coded(const E* gate_up, E* out, unsigned char* code, i64 width, \
                                                  i64 scales_at, i64 bytes) {                               \
        gated_coded<F>(gate_up, out, code, {width, scales_at, bytes});                                      \
    }                                                                                                       \
    extern "C" __global__ void name##_gated_coded_grad(const E* dy, const unsigned char* code, E* gradient, \
                                                       i64 width, i64 scales_at, i64 bytes) {               \
        coded_backward<F, false>(dy, nullptr, code, gradient, {width, scales_at, bytes});                   \
    }                                                                                                       \
    extern "C" __global__ void name##_gated_coded_grad_and_output(                                          \
        E* dy, const unsigned char* code, E* gradient, i64 width, i64 scales_at, i64 bytes) {               \
        coded_backward<F, true>(dy, dy, code, gradient, {width, scales_at, bytes});                         \
    }                                                                                                       \
    extern "C" __global__ void name##_gated_rounded_grad(const E* dy, E* gate_up, i64 width) {              \
        rounded_backward<F, false>(dy, nullptr, gate_up, width);                                            \
    }                                                                                                       \
    extern "C" __global__ void name##_gated_rounded_grad_and_output(E* dy, E* gate_up, i64 width) {         \
        rounded_backward<F, true>(dy, dy, gate_up, width);                                                  \
    }

CODED_KERNELS(silu, SiluOf)
CODED_KERNELS(gelu, GeluOf)
CODED_KERNELS(gelu_tanh, GeluTanhOf)
CODED_KERNELS(relu, ReluOf)
