// Matrices in 8 or 4 bits: rows of codes, then a bf16 scale for each group of them. `QuantizedRow` of storm-graph has the form.
//
// With E: bf16 or float, the other side of a conversion.
#include "common.cuh"

constexpr i64 GROUP = 128;
constexpr float CODE_MAX = 127.0f;

/// The smallest bf16 that is not below a number that is not negative. NaN stays NaN, one and the same.
__device__ inline bf16 rounded_up(float value) {
    if (value != value) return bf16{0x7fc0};
    const u32 bits = __float_as_uint(value);
    return bf16{(unsigned short)((bits >> 16) + ((bits & 0xffffu) != 0))};
}

// ---- 8 bits -----------------------------------------------------------------------------------

/// A warp per group: four values a lane.
extern "C" __global__ void quantize(const E* x, unsigned char* out, i64 rows, i64 columns, i64 groups, i64 scales_at,
                                    i64 row_bytes) {
    const i64 warp = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    if (warp >= rows * groups) return;
    const int lane = threadIdx.x % WARP;
    const i64 row = warp / groups, group = warp % groups;
    unsigned char* to = out + row * row_bytes;
    // As integers, magnitudes are in order, with NaN above all numbers.
    u32 largest = 0;
    float values[4];
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const i64 column = group * GROUP + part * WARP + lane;
        values[part] = column < columns ? to_float(x[row * columns + column]) : 0.0f;
        largest = max(largest, __float_as_uint(values[part]) & 0x7fffffffu);
    }
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
    const bf16 stored = rounded_up(__fdiv_rn(__uint_as_float(largest), CODE_MAX));
    const float scale = to_float(stored);
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const i64 column = group * GROUP + part * WARP + lane;
        // Codes end where scales begin; what is between is zero.
        if (column >= (group + 1 == groups ? scales_at : columns)) continue;
        const bool has_codes = scale > 0.0f && scale <= -LOWEST;
        const float nearest = has_codes ? rintf(__fdiv_rn(values[part], scale)) : 0.0f;
        to[column] = (unsigned char)(signed char)fminf(fmaxf(nearest, -CODE_MAX), CODE_MAX);
    }
    if (lane == 0) {
        reinterpret_cast<bf16*>(to + scales_at)[group] = stored;
        // The last group clears what follows the scales.
        if (group + 1 == groups)
            for (i64 at = scales_at + 2 * groups; at < row_bytes; at++) to[at] = 0;
    }
}

/// Eight values per thread. Rows and codes are aligned to 16 bytes.
extern "C" __global__ void dequantize(const unsigned char* rows, E* out, i64 row_count, i64 columns, i64 packs,
                                      i64 scales_at, i64 row_bytes) {
    const i64 thread = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (thread >= row_count * packs) return;
    const i64 row = thread / packs, column = thread % packs * PACK;
    const unsigned char* from = rows + row * row_bytes;
    const float scale = to_float(reinterpret_cast<const bf16*>(from + scales_at)[column / GROUP]);
    const uint2 codes = *reinterpret_cast<const uint2*>(from + column);
    float values[PACK];
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        const u32 word = i < 4 ? codes.x : codes.y;
        values[i] = float((signed char)(word >> (8 * (i % 4)))) * scale;
    }
    write_pack(row_of(out, row, columns), column, packed<E>(values));
}

// ---- 4 bits: code points of NF4 -------------------------------------------------------------------

constexpr i64 NF4_GROUP = 64;
constexpr int NF4_POINTS = 16;

/// What the codes stand for come first.
struct Points {
    float values[128];
};

/// How many middles between neighbouring points a value is above.
__device__ inline u32 nf4_code(const Points& points, float value) {
    u32 code = 0;
#pragma unroll
    for (int i = 0; i + 1 < NF4_POINTS; i++) {
        const float middle = __fmul_rn(0.5f, __fadd_rn(points.values[i], points.values[i + 1]));
        code += value > middle;
    }
    return code;
}

/// A warp per group: two neighbouring values a lane, which share a byte.
extern "C" __global__ void quantize_nf4(const E* x, unsigned char* out, i64 rows, i64 columns, i64 groups, i64 scales_at,
                                        i64 row_bytes, Points points) {
    const i64 warp = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    if (warp >= rows * groups) return;
    const int lane = threadIdx.x % WARP;
    const i64 row = warp / groups, group = warp % groups, column = group * NF4_GROUP + 2 * lane;
    unsigned char* to = out + row * row_bytes;
    float values[2];
#pragma unroll
    for (int i = 0; i < 2; i++) values[i] = column + i < columns ? to_float(x[row * columns + column + i]) : 0.0f;
    float largest = fmaxf(fabsf(values[0]), fabsf(values[1]));
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
    const bf16 stored = rounded_up(largest);
    const float scale = to_float(stored);
    u32 byte = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (column + i < columns) {
            const float value = scale > 0.0f ? __fdiv_rn(values[i], scale) : 0.0f;
            byte |= nf4_code(points, value) << (4 * (1 - i));
        }
    }
    // Codes end where scales begin; what is between is zero.
    if (column / 2 < scales_at) to[column / 2] = (unsigned char)byte;
    if (lane == 0) {
        reinterpret_cast<bf16*>(to + scales_at)[group] = stored;
        // The last group clears what follows the scales.
        if (group + 1 == groups)
            for (i64 at = scales_at + 2 * groups; at < row_bytes; at++) to[at] = 0;
    }
}

/// Eight values per thread.
extern "C" __global__ void dequantize_nf4(const unsigned char* rows, E* out, i64 row_count, i64 columns, i64 packs,
                                          i64 scales_at, i64 row_bytes, Points points) {
    __shared__ float table[NF4_POINTS];
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < NF4_POINTS; i++) table[i] = points.values[i];
    }
    __syncthreads();
    const i64 thread = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (thread >= row_count * packs) return;
    const i64 row = thread / packs, column = thread % packs * PACK;
    const unsigned char* from = rows + row * row_bytes;
    const float scale = to_float(reinterpret_cast<const bf16*>(from + scales_at)[column / NF4_GROUP]);
    const u32 codes = *reinterpret_cast<const u32*>(from + column / 2);
    float values[PACK];
#pragma unroll
    for (int i = 0; i < PACK; i++) values[i] = __fmul_rn(table[codes >> (8 * (i / 2) + 4 * (1 - i % 2)) & 15], scale);
    write_pack(row_of(out, row, columns), column, packed<E>(values));
}
