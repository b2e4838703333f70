// Convolutions on Hopper's tensor cores (sm_90a only: wgmma). Compile with -DTILE_COLUMNS=64|128.
#define E bf16
#include "planes.cuh"
#include "wgmma.cuh"

constexpr int THREADS = 256, SMALL_TILE_BLOCKS = 3;

/// Two warp groups: each has 64 rows of a tile of 128, or half of the columns of a tile of 64.
template <int ROWS, int COLUMNS> struct Sums {
    static_assert(ROWS == 64 || ROWS == 128, "tile");
    static constexpr int OWN = ROWS == 128 ? COLUMNS : COLUMNS / 2;
    /// 64 × OWN values of the group, 4 in each thread for 16 × 8.
    float values[OWN / 2];

    __device__ Sums() { clear(values); }

    __device__ static int group() { return threadIdx.x / 128; }
    __device__ static int own_row() { return ROWS == 128 ? group() * 64 : 0; }
    __device__ static int own_column() { return ROWS == 128 ? 0 : group() * OWN; }

    /// After a thread's copies of a slab have landed, before the barrier.
    __device__ static void tiles_ready() { tiles_fence(); }

    __device__ void add(unsigned a, unsigned b, int further) {
        const u64 rows = matrix(a + own_row() * 128, 16) + (further >> 4);
        const u64 columns = matrix(b + own_column() * 128, 16) + (further >> 4);
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) product_add(values, rows + k * (32 >> 4), columns + k * (32 >> 4));
        finish();
    }

    __device__ void add_turned(unsigned a, unsigned b, int further) {
        constexpr int PANEL = 64 * 128;
        const u64 rows = matrix(a + own_row() / 64 * PANEL, PANEL) + (further >> 4);
        const u64 columns = matrix(b + own_column() / 64 * PANEL, PANEL) + (further >> 4);
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) product_add_turned(values, rows + k * (2048 >> 4), columns + k * (2048 >> 4));
        finish();
    }

    __device__ void finish() {
        products_commit();
        products_wait<0>();
        arrived(values);
    }

    template <class With> __device__ void each(With with) {
        const int lane = threadIdx.x % 32, row = own_row() + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
        for (int n = 0; n < OWN / 8; n++) {
            const int column = own_column() + n * 8 + lane % 4 * 2;
            with(row, column, values[n * 4], values[n * 4 + 1]);
            with(row + 8, column, values[n * 4 + 2], values[n * 4 + 3]);
        }
    }
};

#include "convolution_tiles.cuh"
