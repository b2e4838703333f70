// Images (B, H, W, C) with a window that moves over them, for convolutions and pools. Storage type: E.
//
// The grid's second extent is images, as far as it goes; its first covers the work of one image, which fits in 31 bits.
// A thread has PACK channels where these are a multiple of PACK, else one channel.
#pragma once
#include "common.cuh"

/// `geometry` in dispatch/pool.rs lists the same.
#define PLANES                                                                                                         \
    int images, int height, int width, int high, int wide, int channels, int kernel_h, int kernel_w, int stride_h,    \
        int stride_w, int padding_h, int padding_w
#define PLANES_GIVEN                                                                                                   \
    Planes { images, height, width, high, wide, channels, kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w }

struct Planes {
    int images;
    /// Of an image, and positions of the window in it.
    int height, width, high, wide;
    int channels;
    int kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w;

    __device__ i64 pixels() const { return i64(height) * width; }
    __device__ i64 positions() const { return i64(high) * wide; }
    __device__ int taps() const { return kernel_h * kernel_w; }
};

/// What a thread works on in each image.
struct Place {
    int row, column;
    /// Part of what lies there.
    int part;
    bool inside;

    /// Of a plane with `parts` parts at each of its positions.
    __device__ Place(int rows, int columns, int parts) {
        const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
        const u32 at = i / u32(parts);
        part = int(i % u32(parts));
        row = int(at / u32(columns));
        column = int(at % u32(columns));
        inside = row < rows;
    }
};

/// A range of integers.
struct Range {
    int start, end;
};

/// Rows (or columns) of the plane that the window covers at a position.
__device__ inline Range covered(int position, int stride, int padding, int kernel, int extent) {
    const int start = position * stride - padding;
    return {start < 0 ? 0 : start, start + kernel < extent ? start + kernel : extent};
}

/// Positions at which the window covers a row (or column) of the plane.
__device__ inline Range covering(int at, int stride, int padding, int kernel, int positions) {
    const int last = (at + padding) / stride, before = at + padding - kernel + 1;
    return {before <= 0 ? 0 : (before + stride - 1) / stride, last + 1 < positions ? last + 1 : positions};
}

__device__ inline void load_lanes(const E* from, float (&x)[PACK]) { unpack(load_pack(from), x); }
__device__ inline void load_lanes(const E* from, float (&x)[1]) { x[0] = to_float(*from); }
__device__ inline void store_lanes(E* to, const float (&x)[PACK]) { store_pack(to, packed<E>(x)); }
__device__ inline void store_lanes(E* to, const float (&x)[1]) { *to = from_float<E>(x[0]); }
