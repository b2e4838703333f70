// Codes of 8-bit floats (E4M3), with one scale for a tensor, as `storm_graph::fp8` defines them.
//
// The scale needs the largest magnitude of the whole tensor, so there are two passes. The first leaves partial maxima, which
// every block of the second reduces for itself: a maximum has no order. The second begins at the end, which is still in the
// second-level cache.
#include "common.cuh"

/// Threads of a block.
constexpr int THREADS = 256;
constexpr int LARGEST_THREADS = 512;

/// A tile that a block transposes: 4 rows and 8 columns for each thread.
constexpr int TILE_ROWS = 128;
constexpr int TILE_COLUMNS = 64;

// ---- the scale ----------------------------------------------------------------------------------

__device__ inline u32 block_max(u32 x, u32 (&slots)[WARP]) {
    for (int step = WARP / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(ALL_LANES, x, step));
    if (threadIdx.x % WARP == 0) slots[threadIdx.x / WARP] = x;
    __syncthreads();
    x = threadIdx.x % WARP < blockDim.x / WARP ? slots[threadIdx.x % WARP] : 0;
    for (int step = WARP / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

/// The largest magnitude in each of as many parts as there are blocks, as the bits of a bf16: as integers, magnitudes are in
/// order, with NaN above all numbers.
extern "C" __global__ void __launch_bounds__(LARGEST_THREADS) largest(const bf16* x, i64 packs, u32* partials) {
    __shared__ u32 slots[WARP];
    const i64 step = i64(gridDim.x) * LARGEST_THREADS;
    u32 high = 0, low = 0;
    for (i64 i = i64(blockIdx.x) * LARGEST_THREADS + threadIdx.x; i < packs; i += step) {
        const uint4 pack = load_pack(x + i * PACK).words;
        const u32 words[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            high = max(high, words[j] & 0x7fff0000u);
            low = max(low, words[j] & 0x7fffu);
        }
    }
    const u32 all = block_max(max(high >> 16, low), slots);
    if (threadIdx.x == 0) partials[blockIdx.x] = all;
}

/// What values are multiplied by, and what codes are.
struct Scale {
    float factor, inverse;
};

/// Every thread of the block gets it.
__device__ inline Scale scale_of(const u32* partials, int count) {
    __shared__ u32 slots[WARP];
    u32 mine = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) mine = max(mine, partials[i]);
    const u32 bits = block_max(mine, slots) << 16;
    if (bits >= 0x7f800000u) return {not_a_number(), not_a_number()};
    if (bits == 0) return {1.0f, 1.0f};
    // 448 is 1.75 · 2^8.
    const int above = (bits & 0x007fffffu) > 0x00600000u;
    const int exponent = min(8 - (int(bits >> 23) - 127) - above, 63);
    return {__uint_as_float(u32(127 + exponent) << 23), __uint_as_float(u32(127 - exponent) << 23)};
}

/// Writes the row of the scale: `width` bytes after the codes.
__device__ inline void write_scale(unsigned char* row, i64 width, float scale) {
    u32* words = reinterpret_cast<u32*>(row);
    for (i64 i = threadIdx.x; i < width / 4; i += THREADS) words[i] = i == 0 ? __float_as_uint(scale) : 0;
}

// ---- codes ----------------------------------------------------------------------------------------

/// Two codes, `low` in the lower byte: to nearest, ties to even.
__device__ inline u32 two_codes(float low, float high) {
#if __CUDA_ARCH__ >= 890
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
#else
    u32 both = 0;
    for (int i = 0; i < 2; i++) {
        const u32 bits = __float_as_uint(i == 0 ? low : high), magnitude = bits & 0x7fffffffu;
        u32 code;
        if (magnitude > 0x7f800000u) {
            both |= 0x7fu << (8 * i);
            continue;
        }
        if (magnitude >= 0x43e00000u) {
            code = 0x7e;
        } else if (magnitude < 0x3c800000u) {
            // Multiples of 2^-9, which are the last bits of a sum with 2^14.
            code = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.0f)) & 0xffu;
        } else {
            code = ((magnitude + 0x0007ffffu + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
        }
        both |= (code | (bits >> 24 & 0x80u)) << (8 * i);
    }
    return both;
#endif
}

/// Eight codes of a pack.
__device__ inline uint2 codes_of(const Pack<bf16>& pack, float factor) {
    float x[PACK];
    unpack(pack, x);
#pragma unroll
    for (int i = 0; i < PACK; i++) x[i] *= factor;
    return make_uint2(two_codes(x[0], x[1]) | two_codes(x[2], x[3]) << 16,
                      two_codes(x[4], x[5]) | two_codes(x[6], x[7]) << 16);
}

/// Codes in rows. The width is a multiple of 16.
extern "C" __global__ void __launch_bounds__(THREADS)
    fp8_rows(const bf16* x, unsigned char* rows, i64 height, i64 width, const u32* partials, int count) {
    const Scale scale = scale_of(partials, count);
    const i64 step = i64(gridDim.x) * THREADS, elements = height * width;
    for (i64 piece = i64(blockIdx.x) * THREADS + threadIdx.x; piece < elements / (2 * PACK); piece += step) {
        const i64 i = elements - (piece + 1) * 2 * PACK;
        const Pack<bf16> first = load_pack(x + i), second = load_pack(x + i + PACK);
        const uint2 low = codes_of(first, scale.factor), high = codes_of(second, scale.factor);
        *reinterpret_cast<uint4*>(rows + i) = make_uint4(low.x, low.y, high.x, high.y);
    }
    if (blockIdx.x == 0) write_scale(rows + elements, width, scale.inverse);
}

/// Four rows of four codes become four columns of four.
__device__ inline void transpose(const u32 (&rows)[4], u32 (&columns)[4]) {
    const u32 upper[2] = {__byte_perm(rows[0], rows[1], 0x5140), __byte_perm(rows[0], rows[1], 0x7362)};
    const u32 lower[2] = {__byte_perm(rows[2], rows[3], 0x5140), __byte_perm(rows[2], rows[3], 0x7362)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        columns[2 * i] = __byte_perm(upper[i], lower[i], 0x5410);
        columns[2 * i + 1] = __byte_perm(upper[i], lower[i], 0x7632);
    }
}

/// Codes in columns and, with `ROWS`, in rows. Height and width are multiples of 16.
template <bool ROWS>
__device__ inline void columns_of(const bf16* x, unsigned char* rows, unsigned char* columns, i64 height, i64 width,
                                  const u32* partials, int count) {
    constexpr int WORDS = TILE_ROWS / 4;
    __shared__ u32 tile[TILE_COLUMNS][WORDS + 1];
    const Scale scale = scale_of(partials, count);
    const i64 across = (width + TILE_COLUMNS - 1) / TILE_COLUMNS, down = (height + TILE_ROWS - 1) / TILE_ROWS;
    const int pack = threadIdx.x % (TILE_COLUMNS / PACK), group = threadIdx.x / (TILE_COLUMNS / PACK);
    for (i64 left = across * down - blockIdx.x; left > 0; left -= gridDim.x) {
        const i64 index = left - 1;
        const i64 first_row = index / across * TILE_ROWS, first_column = index % across * TILE_COLUMNS;
        const i64 row = first_row + 4 * group, column = first_column + PACK * pack;
        if (row < height && column < width) {
            Pack<bf16> packs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) packs[i] = load_pack(x + (row + i) * width + column);
            u32 low[4], high[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint2 codes = codes_of(packs[i], scale.factor);
                low[i] = codes.x, high[i] = codes.y;
                if (ROWS) *reinterpret_cast<uint2*>(rows + (row + i) * width + column) = codes;
            }
            u32 turned[2][4];
            transpose(low, turned[0]);
            transpose(high, turned[1]);
            // Packs 0 to 3 and 4 to 7 would meet in the same banks.
            const int word = group ^ (pack & 4);
#pragma unroll
            for (int i = 0; i < PACK; i++) tile[PACK * pack + i][word] = turned[i / 4][i % 4];
        }
        __syncthreads();
        const int word = threadIdx.x % WORDS;
        for (int i = threadIdx.x / WORDS; i < TILE_COLUMNS; i += THREADS / WORDS) {
            if (first_column + i < width && first_row + 4 * word < height) {
                u32* to = reinterpret_cast<u32*>(columns + (first_column + i) * height + first_row);
                to[word] = tile[i][word ^ (i / PACK & 4)];
            }
        }
        __syncthreads();
    }
    if (blockIdx.x == 0) {
        if (ROWS) write_scale(rows + height * width, width, scale.inverse);
        write_scale(columns + height * width, height, scale.inverse);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fp8_columns(const bf16* x, unsigned char* columns, i64 height, i64 width, const u32* partials, int count) {
    columns_of<false>(x, nullptr, columns, height, width, partials, count);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fp8_both(const bf16* x, unsigned char* rows, unsigned char* columns, i64 height, i64 width, const u32* partials,
             int count) {
    columns_of<true>(x, rows, columns, height, width, partials, count);
}
