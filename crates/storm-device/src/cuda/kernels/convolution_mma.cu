// Convolutions on tensor cores by mma.sync (sm_80 and up). Compile with -DTILE_COLUMNS=64|128.
#define E bf16
#include "planes.cuh"
#include "tensor_cores.cuh"

constexpr int THREADS = 256, SMALL_TILE_BLOCKS = 2;

/// Eight warps, each with a part of the tile.
template <int ROWS, int COLUMNS> struct Sums {
    static constexpr int WARPS_DOWN = ROWS == 128 && COLUMNS == 64 ? 4 : 2, WARPS_ACROSS = 8 / WARPS_DOWN;
    static constexpr int OWN_ROWS = ROWS / WARPS_DOWN, OWN_COLUMNS = COLUMNS / WARPS_ACROSS;
    static constexpr int M = OWN_ROWS / 16, N = OWN_COLUMNS / 8;
    float values[M][N][4];

    __device__ Sums() {
#pragma unroll
        for (int i = 0; i < M * N * 4; i++) values[i / 4 / N][i / 4 % N][i % 4] = 0.0f;
    }

    __device__ static int own_row() { return threadIdx.x / 32 % WARPS_DOWN * OWN_ROWS; }
    __device__ static int own_column() { return threadIdx.x / 32 / WARPS_DOWN * OWN_COLUMNS; }

    __device__ static void tiles_ready() {}

    __device__ void add(unsigned a, unsigned b, int further) {
        a += further, b += further;
        const unsigned rows = fragment_address<64>(a, own_row()), columns = fragment_address_nk<64>(b, own_column());
#pragma unroll
        for (int k = 0; k < 4; k++) {
            unsigned left[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) matrices_load(left[m], (rows ^ (k << 5)) + m * 16 * 128);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                unsigned right[4];
                matrices_load(right, (columns ^ (k << 5)) + n * 8 * 128);
                multiply(n, left, right);
            }
        }
    }

    __device__ void add_turned(unsigned a, unsigned b, int further) {
        // Panels of 64 columns; a warp's rows or columns begin at a multiple of 32 and do not leave a panel.
        constexpr int PANEL = 64 * 128;
        a += further + own_row() / 64 * PANEL, b += further + own_column() / 64 * PANEL;
        const unsigned rows = fragment_address_nk<64>(a, 0) ^ (own_row() % 64 / 8 << 4);
        const unsigned columns = fragment_address<64>(b, 0) ^ (own_column() % 64 / 8 << 4);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            unsigned left[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) matrices_load_transposed(left[m], (rows ^ (m << 5)) + k * 16 * 128);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                unsigned right[4];
                matrices_load_transposed(right, (columns ^ (n << 4)) + k * 16 * 128);
                multiply(n, left, right);
            }
        }
    }

    /// Adds products to columns n and n + 1 of fragments.
    __device__ void multiply(int n, const unsigned (&left)[M][4], const unsigned (&right)[4]) {
#pragma unroll
        for (int m = 0; m < M; m++) {
            multiply_add(values[m][n], left[m], right[0], right[1]);
            multiply_add(values[m][n + 1], left[m], right[2], right[3]);
        }
    }

    template <class With> __device__ void each(With with) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                const int row = own_row() + m * 16 + lane / 4, column = own_column() + n * 8 + lane % 4 * 2;
                with(row, column, values[m][n][0], values[m][n][1]);
                with(row + 8, column, values[m][n][2], values[m][n][3]);
            }
    }
};

#include "convolution_tiles.cuh"
