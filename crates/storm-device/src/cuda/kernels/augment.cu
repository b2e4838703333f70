// Random changes of pictures, and their normalization. Storage type: E.
//
// What happens to a picture is decided as in `storm_graph`'s `augment.rs`, and products and sums are rounded one by one, as on the
// CPU: the same bits.
#include "common.cuh"

/// The pixel that is shown at `at` places after `padding` places before the first of `count`; −1 if it is black.
__device__ inline int border_pixel(int at, int padding, int count, int reflect) {
    const int place = at - padding;
    if (place >= 0 && place < count) return place;
    if (!reflect) return -1;
    return place < 0 ? -place : 2 * (count - 1) - place;
}

/// A thread per pixel.
extern "C" __global__ void augment(const unsigned char* images, const int* samples, const int* phase, E* out, i64 pixels,
                                   int height, int width, int channels, int padding, int reflect, int flip, int cutout,
                                   float factor0, float factor1, float factor2, float factor3, float summand0,
                                   float summand1, float summand2, float summand3) {
    const i64 pixel = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (pixel >= pixels) return;
    const float factors[4] = {factor0, factor1, factor2, factor3};
    const float summands[4] = {summand0, summand1, summand2, summand3};
    const i64 size = i64(height) * width, image = pixel / size;
    const int place = int(pixel % size), row = place / width, column = place % width;
    int from_row = row, from_column = column;
    bool cut = false;
    if (phase[0] != 0) {
        const int* const sample = samples + image * 3;
        const int seed[3] = {phase[1], phase[2], sample[2]};
        const uint4 drawn =
            Random(seed, PURPOSE_AUGMENTATION, 0).words(u64(u32(sample[0])) | u64(u32(sample[1])) << 32);
        const u64 range = 2 * u64(padding) + 1;
        const int top = int(u64(drawn.y) * range >> 32), left = int(u64(drawn.z) * range >> 32);
        const int hole_row = int((drawn.w >> 16) * u32(height) >> 16);
        const int hole_column = int((drawn.w & 0xffffu) * u32(width) >> 16);
        const int below = row + cutout / 2 - hole_row, right = column + cutout / 2 - hole_column;
        cut = below >= 0 && below < cutout && right >= 0 && right < cutout;
        if (flip && drawn.x >> 31 == 1) from_column = width - 1 - column;
        from_row = border_pixel(row + top, padding, height, reflect);
        from_column = border_pixel(from_column + left, padding, width, reflect);
    }
    const bool black = from_row < 0 || from_column < 0;
    const unsigned char* const from =
        images + (image * size + (black ? 0 : i64(from_row) * width + from_column)) * channels;
#pragma unroll
    for (int channel = 0; channel < 4; channel++) {
        if (channel >= channels) break;
        const float value = black ? 0.0f : float(from[channel]);
        const float normalized = __fadd_rn(__fmul_rn(value, factors[channel]), summands[channel]);
        out[pixel * channels + channel] = from_float<E>(cut ? 0.0f : normalized);
    }
}
