// The largest value or the mean of each window, and their gradients as gathers: each position of the input looks at the
// windows that cover it. Storage type: E.
#include "planes.cuh"

/// Whether a later element of a window replaces the largest so far: PyTorch's order, in which the last NaN wins.
__device__ inline bool beats(float x, float largest) { return x > largest || x != x; }

template <int LANES>
__device__ inline void pool_largest(const E* __restrict__ x, E* __restrict__ y, const Planes& p) {
    const Place at(p.high, p.wide, p.channels / LANES);
    if (!at.inside) return;
    const Range rows = covered(at.row, p.stride_h, p.padding_h, p.kernel_h, p.height);
    const Range columns = covered(at.column, p.stride_w, p.padding_w, p.kernel_w, p.width);
    for (int image = blockIdx.y; image < p.images; image += gridDim.y) {
        const E* from = x + image * p.pixels() * p.channels + at.part * LANES;
        float largest[LANES];
        bool first = true;
        for (int h = rows.start; h < rows.end; h++) {
            for (int w = columns.start; w < columns.end; w++) {
                float values[LANES];
                load_lanes(from + (i64(h) * p.width + w) * p.channels, values);
#pragma unroll
                for (int j = 0; j < LANES; j++) {
                    if (first || beats(values[j], largest[j])) largest[j] = values[j];
                }
                first = false;
            }
        }
        const i64 position = image * p.positions() + i64(at.row) * p.wide + at.column;
        store_lanes(y + position * p.channels + at.part * LANES, largest);
    }
}

template <int LANES>
__device__ inline void pool_largest_grad(const E* __restrict__ dy, const E* __restrict__ x, E* __restrict__ dx,
                                         const Planes& p) {
    const Place at(p.height, p.width, p.channels / LANES);
    if (!at.inside) return;
    const Range high = covering(at.row, p.stride_h, p.padding_h, p.kernel_h, p.high);
    const Range wide = covering(at.column, p.stride_w, p.padding_w, p.kernel_w, p.wide);
    for (int image = blockIdx.y; image < p.images; image += gridDim.y) {
        const E* from = x + image * p.pixels() * p.channels + at.part * LANES;
        const E* gradients = dy + image * p.positions() * p.channels + at.part * LANES;
        float sums[LANES] = {};
        for (int oh = high.start; oh < high.end; oh++) {
            for (int ow = wide.start; ow < wide.end; ow++) {
                const Range rows = covered(oh, p.stride_h, p.padding_h, p.kernel_h, p.height);
                const Range columns = covered(ow, p.stride_w, p.padding_w, p.kernel_w, p.width);
                float largest[LANES];
                bool mine[LANES];
                bool first = true;
                for (int h = rows.start; h < rows.end; h++) {
                    for (int w = columns.start; w < columns.end; w++) {
                        float values[LANES];
                        load_lanes(from + (i64(h) * p.width + w) * p.channels, values);
#pragma unroll
                        for (int j = 0; j < LANES; j++) {
                            if (first || beats(values[j], largest[j])) {
                                largest[j] = values[j];
                                mine[j] = h == at.row && w == at.column;
                            }
                        }
                        first = false;
                    }
                }
                float gradient[LANES];
                load_lanes(gradients + (i64(oh) * p.wide + ow) * p.channels, gradient);
#pragma unroll
                for (int j = 0; j < LANES; j++) sums[j] += mine[j] ? gradient[j] : 0.0f;
            }
        }
        const i64 pixel = image * p.pixels() + i64(at.row) * p.width + at.column;
        store_lanes(dx + pixel * p.channels + at.part * LANES, sums);
    }
}

/// The same for windows that do not overlap, in place of `x`. A thread has the cell from the start of a window to that
/// of the next: it reads the window before it writes the cell. Cells without a window are past the last one.
template <int LANES>
__device__ inline void pool_largest_grad_in_place(const E* __restrict__ dy, E* x, const Planes& p) {
    const int cells_high = (p.height + p.padding_h + p.stride_h - 1) / p.stride_h;
    const int cells_wide = (p.width + p.padding_w + p.stride_w - 1) / p.stride_w;
    const Place at(cells_high, cells_wide, p.channels / LANES);
    if (!at.inside) return;
    const bool has_window = at.row < p.high && at.column < p.wide;
    const Range rows = covered(at.row, p.stride_h, p.padding_h, p.kernel_h, p.height);
    const Range columns = covered(at.column, p.stride_w, p.padding_w, p.kernel_w, p.width);
    const Range cell_rows = covered(at.row, p.stride_h, p.padding_h, p.stride_h, p.height);
    const Range cell_columns = covered(at.column, p.stride_w, p.padding_w, p.stride_w, p.width);
    for (int image = blockIdx.y; image < p.images; image += gridDim.y) {
        E* plane = x + image * p.pixels() * p.channels + at.part * LANES;
        float largest[LANES], gradient[LANES] = {};
        int winner[LANES];
#pragma unroll
        for (int j = 0; j < LANES; j++) winner[j] = -1;
        if (has_window) {
            for (int h = rows.start; h < rows.end; h++) {
                for (int w = columns.start; w < columns.end; w++) {
                    const int pixel = h * p.width + w;
                    float values[LANES];
                    load_lanes(plane + i64(pixel) * p.channels, values);
#pragma unroll
                    for (int j = 0; j < LANES; j++) {
                        if (winner[j] < 0 || beats(values[j], largest[j])) {
                            largest[j] = values[j];
                            winner[j] = pixel;
                        }
                    }
                }
            }
            const i64 position = image * p.positions() + i64(at.row) * p.wide + at.column;
            load_lanes(dy + position * p.channels + at.part * LANES, gradient);
        }
        for (int h = cell_rows.start; h < cell_rows.end; h++) {
            for (int w = cell_columns.start; w < cell_columns.end; w++) {
                const int pixel = h * p.width + w;
                float values[LANES];
#pragma unroll
                for (int j = 0; j < LANES; j++) values[j] = 0.0f + (winner[j] == pixel ? gradient[j] : 0.0f);
                store_lanes(plane + i64(pixel) * p.channels, values);
            }
        }
    }
}

template <int LANES>
__device__ inline void pool_mean(const E* __restrict__ x, E* __restrict__ y, const Planes& p) {
    const Place at(p.high, p.wide, p.channels / LANES);
    if (!at.inside) return;
    const Range rows = covered(at.row, p.stride_h, p.padding_h, p.kernel_h, p.height);
    const Range columns = covered(at.column, p.stride_w, p.padding_w, p.kernel_w, p.width);
    const float size = float(i64(p.kernel_h) * p.kernel_w);
    for (int image = blockIdx.y; image < p.images; image += gridDim.y) {
        const E* from = x + image * p.pixels() * p.channels + at.part * LANES;
        float sums[LANES] = {};
        for (int h = rows.start; h < rows.end; h++) {
#pragma unroll 4
            for (int w = columns.start; w < columns.end; w++) {
                float values[LANES];
                load_lanes(from + (i64(h) * p.width + w) * p.channels, values);
#pragma unroll
                for (int j = 0; j < LANES; j++) sums[j] += values[j];
            }
        }
#pragma unroll
        for (int j = 0; j < LANES; j++) sums[j] = __fdiv_rn(sums[j], size);
        const i64 position = image * p.positions() + i64(at.row) * p.wide + at.column;
        store_lanes(y + position * p.channels + at.part * LANES, sums);
    }
}

template <int LANES>
__device__ inline void pool_mean_grad(const E* __restrict__ dy, E* __restrict__ dx, const Planes& p) {
    const Place at(p.height, p.width, p.channels / LANES);
    if (!at.inside) return;
    const Range high = covering(at.row, p.stride_h, p.padding_h, p.kernel_h, p.high);
    const Range wide = covering(at.column, p.stride_w, p.padding_w, p.kernel_w, p.wide);
    const float size = float(i64(p.kernel_h) * p.kernel_w);
    for (int image = blockIdx.y; image < p.images; image += gridDim.y) {
        const E* gradients = dy + image * p.positions() * p.channels + at.part * LANES;
        float sums[LANES] = {};
        for (int oh = high.start; oh < high.end; oh++) {
            for (int ow = wide.start; ow < wide.end; ow++) {
                float gradient[LANES];
                load_lanes(gradients + (i64(oh) * p.wide + ow) * p.channels, gradient);
#pragma unroll
                for (int j = 0; j < LANES; j++) sums[j] += gradient[j];
            }
        }
#pragma unroll
        for (int j = 0; j < LANES; j++) sums[j] = __fdiv_rn(sums[j], size);
        const i64 pixel = image * p.pixels() + i64(at.row) * p.width + at.column;
        store_lanes(dx + pixel * p.channels + at.part * LANES, sums);
    }
}

extern "C" __global__ void max_pool(const E* x, E* y, PLANES) { pool_largest<PACK>(x, y, PLANES_GIVEN); }
extern "C" __global__ void max_pool_any(const E* x, E* y, PLANES) { pool_largest<1>(x, y, PLANES_GIVEN); }

extern "C" __global__ void max_pool_grad(const E* dy, const E* x, E* dx, PLANES) {
    pool_largest_grad<PACK>(dy, x, dx, PLANES_GIVEN);
}
extern "C" __global__ void max_pool_grad_any(const E* dy, const E* x, E* dx, PLANES) {
    pool_largest_grad<1>(dy, x, dx, PLANES_GIVEN);
}

extern "C" __global__ void max_pool_grad_in_place(const E* dy, E* x, PLANES) {
    pool_largest_grad_in_place<PACK>(dy, x, PLANES_GIVEN);
}
extern "C" __global__ void max_pool_grad_in_place_any(const E* dy, E* x, PLANES) {
    pool_largest_grad_in_place<1>(dy, x, PLANES_GIVEN);
}

extern "C" __global__ void average_pool(const E* x, E* y, PLANES) { pool_mean<PACK>(x, y, PLANES_GIVEN); }
extern "C" __global__ void average_pool_any(const E* x, E* y, PLANES) { pool_mean<1>(x, y, PLANES_GIVEN); }

extern "C" __global__ void average_pool_grad(const E* dy, E* dx, PLANES) { pool_mean_grad<PACK>(dy, dx, PLANES_GIVEN); }
extern "C" __global__ void average_pool_grad_any(const E* dy, E* dx, PLANES) { pool_mean_grad<1>(dy, dx, PLANES_GIVEN); }
