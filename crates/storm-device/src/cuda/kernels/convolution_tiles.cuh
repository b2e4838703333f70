// Convolutions of bf16 images (B, H, W, C) on tensor cores, without columns in memory: each block computes a tile of
// the result and copies what the windows of its positions cover straight from the image. Channels that a sum runs over
// are a multiple of 8, so that a copy of 16 bytes lies in one tap of the window. Sums are f32, in one fixed order.
//
// A source that includes this has defined `Sums<ROWS, COLUMNS>`: the accumulators of a block of THREADS threads for a
// tile of so many rows and columns. `add` adds the product of a slab of 64 in two tiles (row, 64), so many bytes after
// two addresses; `add_turned` that of tiles (64, row), stored as panels of 64 columns; `each` calls a function with (row, column, value, value of the
// column after it). SMALL_TILE_BLOCKS is how many blocks with a tile of 64 a multiprocessor should run at a time.
#pragma once

extern __shared__ __align__(1024) char shared[];

namespace {

constexpr int SLAB = 64;
/// A row of a tile or a panel.
constexpr int ROW_BYTES = SLAB * 2;
/// Chunks of 16 bytes in it.
constexpr int CHUNKS = SLAB / PACK;

/// Where the chunk of a row lies in a tile that is a series of panels of 64 columns.
template <int ROWS> __device__ __forceinline__ unsigned panels_offset(int row, int chunk) {
    return chunk / CHUNKS * (ROWS * ROW_BYTES) + tile_offset<SLAB>(row, chunk % CHUNKS);
}

/// Of the taps whose distance from `first` grows by `direction`, those inside of a plane.
__device__ __forceinline__ Range taps_inside(int first, int taps, int direction, int extent) {
    const int before = direction > 0 ? -first : first - extent + 1, behind = direction > 0 ? extent - first : first + 1;
    const int start = min(max(before, 0), taps);
    return {start, max(min(behind, taps), start)};
}

/// At most 31.
__device__ __forceinline__ u32 bits_below(int count) { return (1u << count) - 1; }

/// A bit for each tap of a window that lies in the image, of at most 31. `tap_rows` has the first of each row of taps.
__device__ __forceinline__ u32 taps_seen(int top, int left, int taps_h, int taps_w, int direction, int height, int width,
                                         u32 tap_rows) {
    const Range down = taps_inside(top, taps_h, direction, height), across = taps_inside(left, taps_w, direction, width);
    // Those across, repeated for each row of taps that lies in the image.
    const u32 rows = tap_rows & bits_below(down.end * taps_w) & ~bits_below(down.start * taps_w);
    return (bits_below(across.end) & ~bits_below(across.start)) * rows;
}

/// Divides numbers below 2³¹ by a fixed number: what `Divisor` in dispatch/convolution_tiles.rs makes.
struct Divisor {
    u32 factor, shift;

    __device__ __forceinline__ int quotient(int x) const { return int((__umulhi(u32(x), factor) + u32(x)) >> shift); }
};

/// Calls `with` with each chunk of a tile of ROWS × COLUMNS that this thread has: its row and its number.
template <int ROWS, int COLUMNS, class With> __device__ __forceinline__ void own_chunks(With with) {
    constexpr int ROW_CHUNKS = COLUMNS / PACK;
#pragma unroll
    for (int row = threadIdx.x / ROW_CHUNKS; row < ROWS; row += THREADS / ROW_CHUNKS) with(row, threadIdx.x % ROW_CHUNKS);
}

} // namespace

// ---- forward, and the gradient of the input -------------------------------------------------------

// What a convolution reads at each position, as `walk` in dispatch/convolution_tiles.rs lists it. The positions of an
// image are `rows` × `columns`. Position (i, j) with tap (a, b) reads the pixel at i · step + origin + a · direction,
// and likewise across, or zeros outside of the image; the tap's weights are those number tap_start + a · tap_step_h +
// b · tap_step_w; tap_rows has a bit for the first tap of each row of taps. It writes the pixel at i · out_step + out_start of an image of out_height × out_width. There are at most 31 taps.
#define WALK                                                                                                           \
    int images, int height, int width, int channels, int rows, int columns, int step_h, int step_w, int origin_h,     \
        int origin_w, int direction, int taps_h, int taps_w, int tap_start, int tap_step_h, int tap_step_w,           \
        int weight_taps, int outputs, int out_height, int out_width, int out_start_h, int out_start_w, int out_step_h, \
        int out_step_w, u32 by_columns, u32 by_columns_shift, u32 by_rows, u32 by_rows_shift, \
        u32 tap_rows

constexpr int TILE_ROWS = 128, STAGES = 3;

// y = convolution of x with `weight` (outputs, weight_taps, channels), plus `bias` and `addend`, which may be null; `addend` may be `y`.
// Grid (⌈positions / 128⌉, ⌈outputs / TILE_COLUMNS⌉), dynamic shared memory STAGES · (128 + TILE_COLUMNS) · 128 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_COLUMNS == 64 ? SMALL_TILE_BLOCKS : 2)
    convolve(const bf16 *__restrict__ x, const bf16 *__restrict__ weight, const bf16 *__restrict__ bias,
             const bf16 *addend, bf16 *y, WALK) {
    constexpr int A_BYTES = TILE_ROWS * ROW_BYTES, STAGE_BYTES = A_BYTES + TILE_COLUMNS * ROW_BYTES;
    constexpr int STEP = THREADS / CHUNKS, A_COPIES = TILE_ROWS / STEP, B_COPIES = TILE_COLUMNS / STEP;
    const unsigned stages = shared_address(shared);
    const int first_row = blockIdx.x * TILE_ROWS, first_column = blockIdx.y * TILE_COLUMNS;
    const int chunk = threadIdx.x % CHUNKS, lead = threadIdx.x / CHUNKS;
    const int positions = images * rows * columns;
    const Divisor columns_of{by_columns, by_columns_shift}, rows_of{by_rows, by_rows_shift};

    // Of each row that this thread copies: where the first tap of its window lies, and which taps lie in the image.
    const bf16 *windows[A_COPIES];
    u32 seen[A_COPIES];
#pragma unroll
    for (int i = 0; i < A_COPIES; i++) {
        const int position = first_row + lead + i * STEP;
        const int line = columns_of.quotient(position), image = rows_of.quotient(line);
        const int top = (line - image * rows) * step_h + origin_h, left = (position - line * columns) * step_w + origin_w;
        windows[i] = x + i64((image * height + top) * width + left) * channels;
        const u32 taps = taps_seen(top, left, taps_h, taps_w, direction, height, width, tap_rows);
        seen[i] = position < positions ? taps : 0;
    }
    const bf16 *weights[B_COPIES];
#pragma unroll
    for (int i = 0; i < B_COPIES; i++) {
        const int output = first_column + lead + i * STEP;
        weights[i] = weight + i64(output * weight_taps + tap_start) * channels;
    }
    // The pack of channels that this thread copies, and its tap.
    const int packs = channels / PACK, slabs = (taps_h * taps_w * packs + CHUNKS - 1) / CHUNKS;
    int pack_at = chunk, tap_w = 0, tap_h = 0;
    auto find_tap = [&]() {
        while (pack_at >= packs) {
            pack_at -= packs;
            if (++tap_w == taps_w) tap_w = 0, tap_h++;
        }
    };
    find_tap();

    auto copy_slab = [&](int slot) {
        const unsigned a = stages + slot * STAGE_BYTES + tile_offset<SLAB>(lead, chunk), b = a + A_BYTES;
        // Past the last tap, nothing is seen.
        const u32 tap = tap_h < taps_h ? 1u << (tap_h * taps_w + tap_w) : 0u;
        const int from = (tap_h * width + tap_w) * direction * channels + pack_at * PACK;
#pragma unroll
        for (int i = 0; i < A_COPIES; i++) {
            copy_16(a + i * STEP * ROW_BYTES, windows[i] + from, seen[i] & tap);
        }
        const int at = (tap_h * tap_step_h + tap_w * tap_step_w) * channels + pack_at * PACK;
#pragma unroll
        for (int i = 0; i < B_COPIES; i++) {
            copy_16(b + i * STEP * ROW_BYTES, weights[i] + at, tap && first_column + lead + i * STEP < outputs);
        }
        pack_at += CHUNKS;
        find_tap();
    };

    Sums<TILE_ROWS, TILE_COLUMNS> sums;
#pragma unroll
    for (int slab = 0; slab < STAGES - 1; slab++) {
        copy_slab(slab);
        copies_commit();
    }
    int slot = 0;
#pragma unroll 1
    for (int slab = 0; slab < slabs; slab++) {
        copies_wait<STAGES - 2>();
        sums.tiles_ready();
        __syncthreads();
        // Into the slot that all warps have read in the round before. Slabs past the end are zeros.
        copy_slab(slot == 0 ? STAGES - 1 : slot - 1);
        copies_commit();
        sums.add(stages, stages + A_BYTES, slot * STAGE_BYTES);
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
    copies_wait<0>();
    __syncthreads();

    // The tile goes through shared memory, so that the addend is read and the result written in whole packs.
    // Where the values of a position begin; negative past the last position.
    const bool dense = out_step_h == 1 && out_step_w == 1;
    auto out_pixel = [&](int row) {
        const int position = first_row + row;
        if (position >= positions) return i64(-1);
        if (dense) return i64(position) * outputs;
        const int line = columns_of.quotient(position), image = rows_of.quotient(line);
        const int i = line - image * rows, j = position - line * columns;
        const i64 h = image * out_height + i * out_step_h + out_start_h;
        return (h * out_width + j * out_step_w + out_start_w) * outputs;
    };
    const bool whole = outputs % PACK == 0;
    if (addend) {
        own_chunks<TILE_ROWS, TILE_COLUMNS>([&](int row, int chunk) {
            const int column = first_column + chunk * PACK;
            const i64 pixel = out_pixel(row);
            if (pixel < 0 || column >= outputs) return;
            char *place = shared + panels_offset<TILE_ROWS>(row, chunk);
            if (whole) {
                *reinterpret_cast<uint4 *>(place) = *reinterpret_cast<const uint4 *>(addend + pixel + column);
            } else {
                for (int j = 0; j < PACK && column + j < outputs; j++)
                    reinterpret_cast<bf16 *>(place)[j] = addend[pixel + column + j];
            }
        });
        __syncthreads();
    }
    auto place_of = [&](int row, int at) {
        return reinterpret_cast<u32 *>(shared + panels_offset<TILE_ROWS>(row, at / PACK) + at % PACK * 2);
    };
    if (bias || addend) {
        sums.each([&](int row, int at, float low, float high) {
            const int output = first_column + at;
            if (bias) {
                if (output < outputs) low += to_float(bias[output]);
                if (output + 1 < outputs) high += to_float(bias[output + 1]);
            }
            u32 *place = place_of(row, at);
            if (addend) low += __uint_as_float(*place << 16), high += __uint_as_float(*place & 0xffff0000u);
            *place = pack(low, high);
        });
    } else {
        sums.each([&](int row, int at, float low, float high) { *place_of(row, at) = pack(low, high); });
    }
    __syncthreads();
    own_chunks<TILE_ROWS, TILE_COLUMNS>([&](int row, int chunk) {
        const int column = first_column + chunk * PACK;
        const i64 pixel = out_pixel(row);
        if (pixel < 0 || column >= outputs) return;
        const char *place = shared + panels_offset<TILE_ROWS>(row, chunk);
        if (whole) {
            *reinterpret_cast<uint4 *>(y + pixel + column) = *reinterpret_cast<const uint4 *>(place);
        } else {
            for (int j = 0; j < PACK && column + j < outputs; j++)
                y[pixel + column + j] = reinterpret_cast<const bf16 *>(place)[j];
        }
    });
}

// ---- gradient of the weight -----------------------------------------------------------------------

/// What a window covers at a position: the pixel under its first tap, and a bit for each tap that lies in the image.
struct Covered {
    int pixel;
    u32 taps;
};

/// The bit of every position that counts, whatever its window covers.
constexpr u32 COUNTS = 1u << 31;

// parts (splits, outputs, taps · channels) f32: the sum over the positions of each split. A split has `per_split`
// positions, a multiple of 64; a window has at most 31 taps. Grid (⌈taps · channels / 128⌉, ⌈outputs / TILE_OUTPUTS⌉,
// splits), dynamic shared memory STAGES · (TILE_OUTPUTS + 128) · 128 bytes.
template <int TILE_OUTPUTS>
__device__ __forceinline__ void weight_gradient(const bf16 *__restrict__ dy, const bf16 *__restrict__ x,
                                                float *__restrict__ parts, int outputs, int per_split,
                                                Divisor columns_of, Divisor rows_of, u32 tap_rows, const Planes &p) {
    constexpr int COLUMNS = 128, A_BYTES = TILE_OUTPUTS * ROW_BYTES, STAGE_BYTES = A_BYTES + COLUMNS * ROW_BYTES;
    constexpr int ROW_CHUNKS = COLUMNS / PACK, STEP = THREADS / ROW_CHUNKS, COPIES = SLAB / STEP;
    __shared__ Covered table[2][SLAB];
    const unsigned stages = shared_address(shared);
    const int chunk = threadIdx.x % ROW_CHUNKS, lead = threadIdx.x / ROW_CHUNKS;
    const int width = p.taps() * p.channels, first_column = blockIdx.x * COLUMNS, first_output = blockIdx.y * TILE_OUTPUTS;
    const int positions = p.images * p.high * p.wide, begin = blockIdx.z * per_split, end = min(begin + per_split, positions);

    // What this thread copies of each position: a pack of dy, and a pack of channels under one tap.
    const int output = first_output + chunk * PACK, column = first_column + chunk * PACK, tap = column / p.channels;
    const bool has_a = chunk < TILE_OUTPUTS / PACK;
    const u32 output_bit = has_a && output < outputs ? COUNTS : 0, tap_bit = column < width ? 1u << tap : 0;
    const bf16 *gradients = dy + i64(begin + lead) * outputs + output;
    const int further = (tap / p.kernel_w * p.width + tap % p.kernel_w) * p.channels + column % p.channels;
    const bf16 *source = x + further;

    // Some threads write down what the windows of the next slab cover.
    auto write_table = [&](int slab) {
        if (threadIdx.x >= SLAB) return;
        const int position = begin + slab * SLAB + threadIdx.x;
        const int line = columns_of.quotient(position), image = rows_of.quotient(line);
        const int top = (line - image * p.high) * p.stride_h - p.padding_h;
        const int left = (position - line * p.wide) * p.stride_w - p.padding_w;
        const u32 taps = taps_seen(top, left, p.kernel_h, p.kernel_w, 1, p.height, p.width, tap_rows);
        table[slab % 2][threadIdx.x] = {(image * p.height + top) * p.width + left, position < end ? taps | COUNTS : 0};
    };
    auto copy_slab = [&](int slab, int slot) {
        const unsigned a = stages + slot * STAGE_BYTES + panels_offset<SLAB>(lead, chunk), b = a + A_BYTES;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const Covered covered = table[slab % 2][lead + i * STEP];
            if (has_a) copy_16(a + i * STEP * ROW_BYTES, gradients + i64(i * STEP) * outputs, covered.taps & output_bit);
            copy_16(b + i * STEP * ROW_BYTES, source + i64(covered.pixel) * p.channels, covered.taps & tap_bit);
        }
        gradients += i64(SLAB) * outputs;
    };

    Sums<TILE_OUTPUTS, COLUMNS> sums;
    const int slabs = (end - begin + SLAB - 1) / SLAB;
#pragma unroll
    for (int slab = 0; slab < STAGES - 1; slab++) {
        write_table(slab);
        __syncthreads();
        copy_slab(slab, slab);
        copies_commit();
    }
    int slot = 0;
#pragma unroll 1
    for (int slab = 0; slab < slabs; slab++) {
        const int next = slab + STAGES - 1;
        write_table(next);
        copies_wait<STAGES - 2>();
        sums.tiles_ready();
        __syncthreads();
        copy_slab(next, slot == 0 ? STAGES - 1 : slot - 1);
        copies_commit();
        sums.add_turned(stages, stages + A_BYTES, slot * STAGE_BYTES);
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
    float *own = parts + i64(blockIdx.z) * outputs * width;
    sums.each([&](int row, int at, float low, float high) {
        const int o = first_output + row, c = first_column + at;
        // Channels are even in number, and so is the width.
        if (o < outputs && c < width) *reinterpret_cast<float2 *>(own + i64(o) * width + c) = make_float2(low, high);
    });
}

#define WEIGHT_GRADIENT(NAME, TILE_OUTPUTS, BLOCKS)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
        NAME(const bf16 *__restrict__ dy, const bf16 *__restrict__ x, float *__restrict__ parts, int outputs,          \
             int per_split, u32 by_columns, u32 by_columns_shift, u32 by_rows, u32 by_rows_shift, u32 tap_rows,        \
             PLANES) {                                                                                                 \
        const Divisor columns_of{by_columns, by_columns_shift}, rows_of{by_rows, by_rows_shift};                       \
        weight_gradient<TILE_OUTPUTS>(dy, x, parts, outputs, per_split, columns_of, rows_of, tap_rows, PLANES_GIVEN);  \
    }

WEIGHT_GRADIENT(convolve_weight_grad_64, 64, SMALL_TILE_BLOCKS)
WEIGHT_GRADIENT(convolve_weight_grad_128, 128, 2)
