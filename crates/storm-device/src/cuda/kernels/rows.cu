// Products of few rows, bf16: out (rows × n) = x (rows × k) · weightᵀ + bias + addend. Text that is generated reads every
// weight once a token, so the weights must stream at the speed of memory.
//
// Weights are copied to shared memory ahead of their use, whole lines of 128 bytes of a weight row at a time. Copies that
// are on their way need no registers, so a multiprocessor has more than 100 KB of them, which is what covers the latency of
// memory. Every warp has stages of its own and waits for nothing but its own copies.
//
// Tensor cores compute, with the roles turned around: weight rows are the rows of a tile, and the rows of x are its
// columns, eight of them at the cost of one. Which elements of k an mma takes together does not matter as long as both sides
// agree, so a lane uses 16 bytes as they lie in memory. The eight warps of a block take turns along the k of its weight
// rows, and their sums are added in order.
//
// An element is computed in the same way however many rows there are: the result does not depend on how a text
// is cut into pieces. Compile with -DTILES: tiles of eight rows of x. k is a multiple of 8 and fits in an
// int, and everything starts on 16 bytes.
#include "common.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int TILE = 8;
/// Weight rows of a block, `WEIGHT_ROWS` in dispatch/rows.rs. Few for one tile, so that there are blocks for all
/// multiprocessors. With more tiles x is read so often that each of its elements has to serve more weights.
constexpr int WEIGHT_ROWS = TILES == 1 ? 8 : 16;
/// A stage has 64 elements of k, a line of memory, of each weight row: eight packs.
constexpr int STAGE = 64, STAGE_PACKS = STAGE / PACK;
/// Stages of a warp that are on their way together.
constexpr int STAGES = TILES == 1 ? 4 : 3;
/// Blocks that registers leave room for on a multiprocessor.
constexpr int BLOCKS = TILES == 1 ? 5 : 2;
/// Weight rows that one instruction of a warp copies, and instructions for a stage.
constexpr int COPY_ROWS = WARP / STAGE_PACKS, COPIES = WEIGHT_ROWS / COPY_ROWS;
/// The first blocks, about as many as run at once, fetch that many stages early: all of them if the grid has no more blocks.
constexpr int FETCHED_BLOCKS = 660, FETCHED_STAGES = 8;

/// What a warp has in shared memory.
union Memory {
    /// The upper and lower half of a row's packs trade places in odd rows: see `place_of`.
    uint4 stages[STAGES][WEIGHT_ROWS][STAGE_PACKS];
    /// One more, so that the lanes of a warp fall into different banks.
    float sums[TILES * TILE][WEIGHT_ROWS + 1];
};

/// Where a pack of a weight row lies. Eight lanes that read together have four neighbouring packs of an even row and of the
/// odd row after it: they must lie in different banks.
__device__ __forceinline__ int place_of(int row, int pack) { return pack ^ (row % 2 * (STAGE_PACKS / 2)); }

/// Begins to copy 16 bytes, or to write zeros if they are not `inside`.
__device__ __forceinline__ void copy_pack(uint4* to, const bf16* from, bool inside) {
    const u32 address = u32(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
}

/// Ends a group of copies, which may be empty.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until all groups of this thread but the last `STAGES - 1` have arrived.
__device__ __forceinline__ void wait_for_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
}

/// Brings what lies there into the second-level cache, which all multiprocessors share.
__device__ __forceinline__ void fetch(const bf16* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

__device__ __forceinline__ void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

} // namespace

/// Grid: blocks of `WEIGHT_ROWS` weight rows. `bias` and `addend` may be null.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    rows_product(const bf16* x, const bf16* weight, const bf16* bias, const bf16* addend, bf16* out, int rows, i64 n,
                 i64 k) {
    __shared__ Memory memory[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int group = lane / 4, quarter = lane % 4;
    const i64 first = i64(blockIdx.x) * WEIGHT_ROWS;
    // Stages warp, warp + WARPS, … are this warp's.
    const int width = int(k), stages = (width + STAGE - 1) / STAGE;
    const int count = stages > warp ? (stages - warp + WARPS - 1) / WARPS : 0;
    const auto element_of = [&](int stage) { return (warp + stage * WARPS) * STAGE; };
    // Rows past the end are computed as the last one, and dropped.
    const auto row_of_weight = [&](int row) { return weight + minimum(first + row, n - 1) * k; };

    let_next_kernel_begin();
    // The kernel before may have made the weights, so nothing is read yet; but as a rule it has not, and they are brought
    // near while it ends. Four lanes have the 32-byte sectors of a row's line.
    if (blockIdx.x < FETCHED_BLOCKS) {
        const int some = gridDim.x <= FETCHED_BLOCKS ? FETCHED_STAGES : STAGES;
        for (int stage = 0; stage < some && stage < count; stage++) {
            const int i = min(element_of(stage) + quarter * (STAGE / 4), width - PACK);
#pragma unroll
            for (int row = 0; row < WEIGHT_ROWS; row += TILE) fetch(row_of_weight(row + group) + i);
        }
    }
    wait_for_kernels_before();

    // The lane's pack of a stage in each row that it copies.
    const int copied_row = lane / STAGE_PACKS, copied_pack = lane % STAGE_PACKS;
    const bf16* from[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++) from[i] = row_of_weight(copied_row + i * COPY_ROWS);
    const auto begin_stage = [&](int stage, int slot) {
        if (stage < count) {
            const int element = element_of(stage) + copied_pack * PACK;
            const bool inside = element < width;
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const int row = copied_row + i * COPY_ROWS;
                uint4* const to = &memory[warp].stages[slot][row][place_of(row, copied_pack)];
                copy_pack(to, from[i] + (inside ? element : 0), inside);
            }
        }
        end_group();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) begin_stage(stage, stage);

    float sum[TILES][4] = {};
    int slot = 0;
    for (int stage = 0; stage < count; stage++) {
        // Packs `quarter` and `quarter + 4` of the stage.
        uint4 of_x[TILES][2];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int row = tile * TILE + group;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int element = element_of(stage) + (quarter + 4 * half) * PACK;
                of_x[tile][half] = make_uint4(0, 0, 0, 0);
                if (row < rows && element < width) of_x[tile][half] = load_pack(x + row * k + element).words;
            }
        }
        wait_for_group();
        // The copies of the other lanes have arrived, too.
        __syncwarp();
        uint4 upper[2], lower[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int place = place_of(group, quarter + 4 * half);
            upper[half] = memory[warp].stages[slot][group][place];
            lower[half] = make_uint4(0, 0, 0, 0);
            if (WEIGHT_ROWS > TILE) lower[half] = memory[warp].stages[slot][group + WEIGHT_ROWS - TILE][place];
        }
        // All lanes have read before the slot is written again.
        __syncwarp();
        begin_stage(stage + STAGES, slot);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 &a = upper[half], &b = lower[half];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const uint4& c = of_x[tile][half];
                mma(sum[tile], a.x, b.x, a.y, b.y, c.x, c.y);
                mma(sum[tile], a.z, b.z, a.w, b.w, c.z, c.w);
            }
        }
    }

    // No copies are on their way any more: the memory is free.
    __syncwarp();
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int row = tile * TILE + 2 * quarter;
        memory[warp].sums[row][group] = sum[tile][0];
        memory[warp].sums[row + 1][group] = sum[tile][1];
        if (WEIGHT_ROWS > TILE) {
            memory[warp].sums[row][group + WEIGHT_ROWS - TILE] = sum[tile][2];
            memory[warp].sums[row + 1][group + WEIGHT_ROWS - TILE] = sum[tile][3];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * WEIGHT_ROWS; i += THREADS) {
        const int row = i / WEIGHT_ROWS, column = i % WEIGHT_ROWS;
        if (first + column >= n) continue;
        float value = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) value += memory[w].sums[row][column];
        if (bias != nullptr) value += to_float(bias[first + column]);
        const i64 place = row * n + first + column;
        if (addend != nullptr) value += to_float(addend[place]);
        out[place] = from_float<bf16>(value);
    }
}
