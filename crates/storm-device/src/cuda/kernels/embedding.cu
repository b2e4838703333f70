// Rows of a table, and their gradient by sorted segments. Storage types: E, and G for the gradient.
#include "common.cuh"

/// Row `ids[i]` of `table` (table_rows, width) to row `i` of `out`. A block per row. An id that is
/// no row of the table gives NaN, which reaches the loss.
extern "C" __global__ void embedding(const int* ids, const E* table, E* out, i64 table_rows,
                                     i64 width) {
    const i64 row = blockIdx.x;
    const int id = ids[row];
    const bool known = id >= 0 && id < table_rows;
    const Row<const E> from = row_of(table, known ? id : 0, width);
    const Row<E> to = row_of(out, row, width);
    for (i64 i = i64(threadIdx.x) * PACK; i < width; i += i64(blockDim.x) * PACK) {
        if (known) {
            write_pack(to, i, read_pack(from, i));
        } else {
            float values[PACK];
#pragma unroll
            for (int j = 0; j < PACK; j++) values[j] = not_a_number();
            write8(to, i, values);
        }
    }
}

constexpr int WARPS = 4;
constexpr int COLUMNS = WARP * PACK;
/// Rows of dy that a warp has in flight.
constexpr int UNROLL = 4;

/// Adds the rows of `dy` to the rows of `table` that their ids name. `order` has the rows sorted by
/// (id, row). Grid (rows, blocks of 256 columns): the block of a segment's first place sums the
/// segment, each warp every fourth row of it; other blocks have nothing to do.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    embedding_grad(const E* dy, const int* ids, const int* order, G* table, i64 rows,
                   i64 table_rows, i64 width) {
    __shared__ float sums[WARPS][COLUMNS];
    const i64 start = blockIdx.x;
    const int id = ids[order[start]];
    if (start > 0 && ids[order[start - 1]] == id) return;
    if (id < 0 || id >= table_rows) return;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 column = i64(blockIdx.y) * COLUMNS + lane * PACK;

    float sum[PACK] = {};
    // A place past the segment ends it: ids are sorted.
    for (i64 place = start + warp;; place += UNROLL * WARPS) {
        int row[UNROLL];
        bool inside[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            const i64 at = place + k * WARPS;
            row[k] = at < rows ? order[at] : -1;
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) inside[k] = row[k] >= 0 && ids[row[k]] == id;
        if (!inside[0]) break;
        Pack<E> packs[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (inside[k]) packs[k] = read_pack(row_of(dy, row[k], width), column);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (!inside[k]) break;
            float values[PACK];
            unpack(packs[k], values);
#pragma unroll
            for (int j = 0; j < PACK; j++) sum[j] += values[j];
        }
    }
#pragma unroll
    for (int j = 0; j < PACK; j++) sums[warp][lane * PACK + j] = sum[j];
    __syncthreads();
    for (int i = threadIdx.x; i < COLUMNS; i += WARPS * WARP) {
        const i64 own = i64(blockIdx.y) * COLUMNS + i;
        if (own >= width) break;
        float total = 0.0f;
#pragma unroll
        for (int from = 0; from < WARPS; from++) total += sums[from][i];
        G& out = table[id * width + own];
        out = from_float<G>(total + to_float(out));
    }
}
