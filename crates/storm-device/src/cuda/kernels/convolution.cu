// Columns of convolutions: a row of columns is what a window covers, in the order (kh, kw, channel), and zeros up to a
// multiple of PACK. Storage type: E.
#include "planes.cuh"

/// Writes columns. Channels are a multiple of PACK: a thread copies a pack of them from each row and column of a window.
extern "C" __global__ void fill_columns(const E* __restrict__ x, E* __restrict__ columns, PLANES) {
    const Planes p = PLANES_GIVEN;
    const Place at(p.high, p.wide, p.channels / PACK);
    if (!at.inside) return;
    const int top = at.row * p.stride_h - p.padding_h, left = at.column * p.stride_w - p.padding_w;
    for (int image = blockIdx.y; image < p.images; image += gridDim.y) {
        const E* from = x + image * p.pixels() * p.channels + at.part * PACK;
        const i64 row = image * p.positions() + i64(at.row) * p.wide + at.column;
        E* to = columns + row * p.taps() * p.channels + at.part * PACK;
        for (int h = top; h < top + p.kernel_h; h++) {
#pragma unroll 3
            for (int w = left; w < left + p.kernel_w; w++) {
                Pack<E> pack = {};
                if (u32(h) < u32(p.height) && u32(w) < u32(p.width)) {
                    pack = load_pack(from + (i64(h) * p.width + w) * p.channels);
                }
                store_pack(to, pack);
                to += p.channels;
            }
        }
    }
}

/// The same for any number of channels: a thread has a pack of a row of columns.
extern "C" __global__ void fill_columns_any(const E* __restrict__ x, E* __restrict__ columns, PLANES) {
    const Planes p = PLANES_GIVEN;
    const int covered = p.taps() * p.channels, packs = (covered + PACK - 1) / PACK;
    const Place at(p.high, p.wide, packs);
    if (!at.inside) return;
    const int top = at.row * p.stride_h - p.padding_h, left = at.column * p.stride_w - p.padding_w;
    const int first = at.part * PACK, tap = first / p.channels;
    for (int image = blockIdx.y; image < p.images; image += gridDim.y) {
        const E* from = x + image * p.pixels() * p.channels;
        const i64 row = image * p.positions() + i64(at.row) * p.wide + at.column;
        int kh = tap / p.kernel_w, kw = tap % p.kernel_w, channel = first % p.channels;
        float values[PACK];
#pragma unroll
        for (int j = 0; j < PACK; j++) {
            const int h = top + kh, w = left + kw;
            const bool inside = first + j < covered && u32(h) < u32(p.height) && u32(w) < u32(p.width);
            values[j] = inside ? to_float(from[(i64(h) * p.width + w) * p.channels + channel]) : 0.0f;
            if (++channel == p.channels) {
                channel = 0;
                if (++kw == p.kernel_w) kw = 0, kh++;
            }
        }
        store_pack(columns + (row * packs + at.part) * PACK, packed<E>(values));
    }
}

/// Adds up what columns hold of each position of the input, in the order (kh, kw), and `addend`, which may be null or `out`.
template <int LANES>
__device__ inline void gather(const E* __restrict__ columns, const E* addend, E* out, const Planes& p) {
    const Place at(p.height, p.width, p.channels / LANES);
    if (!at.inside) return;
    const i64 stride = (i64(p.taps()) * p.channels + PACK - 1) / PACK * PACK;
    const Range rows = covering(at.row, p.stride_h, p.padding_h, p.kernel_h, p.high);
    const Range places = covering(at.column, p.stride_w, p.padding_w, p.kernel_w, p.wide);
    for (int image = blockIdx.y; image < p.images; image += gridDim.y) {
        const E* from = columns + image * p.positions() * stride + at.part * LANES;
        float sums[LANES] = {};
        // From the last position to the first: the first row of a window is the last that covers this one.
        for (int oh = rows.end - 1; oh >= rows.start; oh--) {
            const int kh = at.row + p.padding_h - oh * p.stride_h;
#pragma unroll 3
            for (int ow = places.end - 1; ow >= places.start; ow--) {
                const int kw = at.column + p.padding_w - ow * p.stride_w;
                const i64 row = i64(oh) * p.wide + ow;
                float x[LANES];
                load_lanes(from + row * stride + i64(kh * p.kernel_w + kw) * p.channels, x);
#pragma unroll
                for (int j = 0; j < LANES; j++) sums[j] += x[j];
            }
        }
        const i64 pixel = image * p.pixels() + i64(at.row) * p.width + at.column;
        const i64 place = pixel * p.channels + at.part * LANES;
        if (addend) {
            float x[LANES];
            load_lanes(addend + place, x);
#pragma unroll
            for (int j = 0; j < LANES; j++) sums[j] += x[j];
        }
        store_lanes(out + place, sums);
    }
}

extern "C" __global__ void gather_columns(const E* columns, const E* addend, E* out, PLANES) {
    gather<PACK>(columns, addend, out, PLANES_GIVEN);
}

extern "C" __global__ void gather_columns_any(const E* columns, const E* addend, E* out, PLANES) {
    gather<1>(columns, addend, out, PLANES_GIVEN);
}

// ---- beside products on tensor cores, convolution_tiles.cuh -----------------------------------------

/// A weight (outputs, taps, channels) as (channels, taps, outputs). Grid (⌈channels / 32⌉, ⌈outputs / 32⌉, taps).
extern "C" __global__ void turn_weight(const E* __restrict__ weight, E* __restrict__ out, int outputs, int taps,
                                       int channels) {
    __shared__ E tile[WARP][WARP + 2];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int channel = blockIdx.x * WARP, output = blockIdx.y * WARP, tap = blockIdx.z;
    for (int i = warp; i < WARP && output + i < outputs; i += warps) {
        if (channel + lane < channels) tile[i][lane] = weight[(i64(output + i) * taps + tap) * channels + channel + lane];
    }
    __syncthreads();
    for (int i = warp; i < WARP && channel + i < channels; i += warps) {
        if (output + lane < outputs) out[(i64(channel + i) * taps + tap) * outputs + output + lane] = tile[lane][i];
    }
}

/// The sum of `count` parts in their order, into `out` or onto what is there. Elements are a multiple of PACK.
extern "C" __global__ void sum_parts(const float* __restrict__ parts, E* __restrict__ out, i64 elements, int count,
                                     int accumulate) {
    const i64 i = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= elements) return;
    float sums[PACK];
    unpack(load_pack(parts + i), sums);
    for (int part = 1; part < count; part++) {
        float x[PACK];
        unpack(load_pack(parts + part * elements + i), x);
#pragma unroll
        for (int j = 0; j < PACK; j++) sums[j] = __fadd_rn(sums[j], x[j]);
    }
    if (accumulate) {
        float x[PACK];
        unpack(load_pack(out + i), x);
#pragma unroll
        for (int j = 0; j < PACK; j++) sums[j] = __fadd_rn(sums[j], x[j]);
    }
    store_pack(out + i, packed<E>(sums));
}
