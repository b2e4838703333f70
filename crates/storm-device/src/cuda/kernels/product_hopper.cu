// Products of bf16 matrices on Hopper (sm_90a only: wgmma), with the bits of the library's own algorithms: an element
// is one chain over k in steps of 16, in f32, rounded once.
//
// Two blocks of a cluster compute 256 × 256 elements. Each has 128 rows of A, and loads half of the 256 columns of B for
// both. In a block, one thread lets the copy engine fill a ring of slots, 64 of k at a time, and two warp groups multiply
// 64 rows each. Their sums take half of the registers, so a tile is rounded at once and kept as bf16: it is written
// while the tensor cores work on the next one, a sixteenth at a time, spread over the slots of that tile. All
// multiprocessors write at the same time: at the first slots alone, memory could not keep up with gated units.
//
// Compile with -DA_TURNED=0|1 (A is stored (k, m), not (m, k)), -DB_TURNED=0|1 (B is stored (n, k), not (k, n)),
// -DBIAS=0|1 and -DADDEND=0|1, and with -DUNIT=1|2|3, or 0, to compute a gated unit with SiLU as well, with the bits of
// its own kernel. 1: the columns are its gates and ups, and a block loads either gates or ups for both. 2: the product is
// the gradient of what the unit makes; those of gates and ups overwrite them. 3: the same, and what the unit makes is
// written in place of the product.
#include "activations.cuh"
#include "warp_groups.cuh"
#include "wgmma.cuh"

namespace {

static_assert(UNIT == 0 || !(BIAS || ADDEND), "a unit has no bias");

constexpr int ROWS = 128, COLUMNS = 256, INNER = 64;
// Columns of a tile in each half of the matrix, if it has halves.
constexpr int WIDTH = UNIT == 1 ? COLUMNS / 2 : COLUMNS;
// A panel is 64 rows of 128 bytes. Slots: two panels of A, four of B.
constexpr int PANEL = 64 * 128, SLOT = 6 * PANEL, SLOTS = 4;
constexpr int PARTS = 16;
// Tiles are computed in groups of this many rows of pairs, so that what they read stays in the second-level cache.
constexpr int GROUP_ROWS = 8;

// How a tensor lies in memory, as the driver encodes it for the copy engine.
struct alignas(64) Map {
    unsigned long long words[16];
};

// Copies a box whose first element is (x, y), in the order of memory, to shared memory.
__device__ __forceinline__ void box_load(unsigned to, const Map &map, unsigned barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
                 "[%2];\n" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}

// The same, to both blocks of the cluster: to the same place, and to the barrier at the same place.
__device__ __forceinline__ void box_load_for_both(unsigned to, const Map &map, unsigned barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;\n" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(static_cast<unsigned short>(3))
                 : "memory");
}

__device__ __forceinline__ void expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the barrier at the same place in a block of the cluster. With a scope of the cluster, this would wait for
// everything that the thread has written to global memory.
__device__ __forceinline__ void arrive_in(int block, unsigned barrier) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}\n" ::"r"(barrier),
                 "r"(block)
                 : "memory");
}

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n" ::: "memory");
}

#define FLOATS_128(how, x)                                                                                             \
    FLOATS_64(how, x), FLOATS_16(how, x, 64), FLOATS_16(how, x, 80), FLOATS_16(how, x, 96), FLOATS_16(how, x, 112)
#define NAMES_128                                                                                                      \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
    "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"     \
    "%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,"     \
    "%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,"    \
    "%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}"

// c (64 × 256) = a (64 × 16) · b, plus c where `adds` is not 0. One instruction for both cases: with two, the compiler
// gives up running products side by side.
__device__ __forceinline__ void multiply(float (&c)[128], unsigned long long a, unsigned long long b, int adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " NAMES_128 ", %128, %129, p, 1, 1, %131, %132;\n}\n"
                 : FLOATS_128("+f", c)
                 : "l"(a), "l"(b), "r"(adds), "n"(A_TURNED), "n"(1 - B_TURNED));
}

// The two values of a word, the one at the lower address first.
__device__ __forceinline__ float left(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float right(unsigned word) { return __uint_as_float(word & 0xffff0000u); }

// Of four words in each of four lanes in a row, lane i gets word i of each: 16 bytes that lie together.
__device__ __forceinline__ void gather_words(unsigned (&words)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    auto exchange = [](unsigned &low_word, unsigned &high_word, bool is_high, int lanes) {
        const unsigned other = __shfl_xor_sync(0xffffffff, is_high ? low_word : high_word, lanes);
        (is_high ? low_word : high_word) = other;
    };
    exchange(words[0], words[1], odd, 1);
    exchange(words[2], words[3], odd, 1);
    exchange(words[0], words[2], high, 2);
    exchange(words[1], words[3], high, 2);
}

// A place in the ring of slots.
struct Turn {
    int slot = 0, phase;

    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// Where a block's part of a tile begins.
struct Place {
    int row, column;

    __device__ __forceinline__ Place(int tile, int pairs, int columns, int block) {
        const int group = tile / (GROUP_ROWS * columns), inside = tile % (GROUP_ROWS * columns);
        const int rows = min(GROUP_ROWS, pairs - group * GROUP_ROWS);
        row = ((group * GROUP_ROWS + inside % rows) * 2 + block) * ROWS;
        column = inside / rows * WIDTH;
    }
};

} // namespace

// out (m, n) = a · b + bias, rounded, and then + addend, rounded again: so do the library's algorithms. `addend` may be
// `out`. `unit` gets silu(gate) · up (m, n / 2), or has gates and ups (m, 2 n) and gets their gradients. Boxes of a and b
// have 64 columns, and 128 rows where k are the columns, else 64. k > 960, and n is a multiple of 8.
//
// Grid: an even number of blocks, in clusters of 2; block 384; dynamic shared memory 197760 bytes.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    product_hopper(const __grid_constant__ Map a, const __grid_constant__ Map b, const bf16 *bias,
                   const bf16 *addend, bf16 *out, bf16 *unit, int m, int n, int k) {
    extern __shared__ char shared[];
    // Of the blocks of a cluster, all have the same places in shared memory.
    const unsigned base = (shared_address(shared) + 1023) & ~1023u;
    // `full`: what was loaded is there. `empty`: the groups of both blocks have read it.
    const unsigned full = base + SLOTS * SLOT, empty = full + SLOTS * 8;
    int block;
    asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(block));
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(full + slot * 8, 1);
            barrier_init(empty + slot * 8, 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    cluster_barrier();
    // Columns of the whole matrix, or of one of its halves.
    const int width = UNIT == 1 ? n / 2 : n;
    const int pairs = (m + 2 * ROWS - 1) / (2 * ROWS), columns = (width + WIDTH - 1) / WIDTH;
    const int steps = (k + INNER - 1) / INNER, clusters = gridDim.x / 2;

    if (threadIdx.x < GROUP) {
        registers_for_copying<40>();
        if (threadIdx.x == 0) {
            Turn turn{0, 1};
            for (int tile = blockIdx.x / 2; tile < pairs * columns; tile += clusters) {
                const Place place(tile, pairs, columns, block);
                for (int step = 0; step < steps; step++, turn.next()) {
                    const unsigned to = base + turn.slot * SLOT, here = full + turn.slot * 8;
                    const int half = place.column + block * (UNIT == 1 ? width : COLUMNS / 2);
                    const unsigned half_to = to + (2 + 2 * block) * PANEL;
                    barrier_wait(empty + turn.slot * 8, turn.phase);
                    expect(here, SLOT);
                    if (A_TURNED) {
                        box_load(to, a, here, place.row, step * INNER);
                        box_load(to + PANEL, a, here, place.row + 64, step * INNER);
                    } else {
                        box_load(to, a, here, step * INNER, place.row);
                    }
                    if (B_TURNED) {
                        box_load_for_both(half_to, b, here, step * INNER, half);
                    } else {
                        box_load_for_both(half_to, b, here, half, step * INNER);
                        box_load_for_both(half_to + PANEL, b, here, half + 64, step * INNER);
                    }
                }
            }
        }
    } else {
        registers_for_computing<232>();
        const int group = __shfl_sync(0xffffffff, threadIdx.x / GROUP, 0) - 1, thread = threadIdx.x % GROUP;
        const int lane = thread % 32, own_row = group * 64 + thread / 32 * 16 + lane / 4;
        Turn turn{0, 0};
        int before = 0;
        float sums[128];
        clear(sums);
        // Of the tile before, two neighbors in a word. None yet: its rows are past the end.
        unsigned kept[64] = {};
        int kept_row = m, kept_column = 0;

        auto release = [&](int slot) {
            if (thread < 2) arrive_in(thread, empty + slot * 8);
        };
        // Part i: 32 columns of every second group of 8 rows. A thread has 16 bytes of it. Ups follow the gates.
        auto part_at = [&](int i, bool &exists) {
            const int in_half = i % (PARTS * WIDTH / COLUMNS) / 2 * 32, start = i / 2 * 32 < WIDTH ? 0 : width;
            const int row = kept_row + own_row + i % 2 * 8, column = kept_column + in_half + lane % 4 * 8;
            exists = row < m && column < width;
            return static_cast<long long>(row) * (UNIT == 1 ? 2 * width : width) + start + column;
        };
        // The same place among gates, in rows of gates and ups.
        auto gate_at = [&](int i) {
            const int row = kept_row + own_row + i % 2 * 8, column = kept_column + i / 2 * 32 + lane % 4 * 8;
            return static_cast<long long>(row) * (2 * width) + column;
        };
        uint4 added = {}, added_up = {};
        auto load_addend = [&](int i) {
            bool exists;
            const long long at = part_at(i, exists);
            if (ADDEND && exists) added = *reinterpret_cast<const uint4 *>(addend + at);
            if (UNIT > 1 && exists) {
                const bf16 *gates = unit + gate_at(i);
                added = *reinterpret_cast<const uint4 *>(gates);
                added_up = *reinterpret_cast<const uint4 *>(gates + width);
            }
        };
        auto write_part = [&](int i) {
            unsigned words[4], others[4] = {added.x, added.y, added.z, added.w};
            unsigned ups[4] = {added_up.x, added_up.y, added_up.z, added_up.w};
            if (i + 1 < PARTS) load_addend(i + 1);
#pragma unroll
            for (int j = 0; j < 4; j++) words[j] = kept[i / 2 * 8 + j * 2 + i % 2];
            gather_words(words);
#pragma unroll
            for (int j = 0; ADDEND && j < 4; j++)
                words[j] = pack(left(words[j]) + left(others[j]), right(words[j]) + right(others[j]));
#pragma unroll
            for (int j = 0; UNIT > 1 && j < 4; j++) {
                const Gated low = gated_gradient<SiluOf>(left(words[j]), left(others[j]), left(ups[j]));
                const Gated high = gated_gradient<SiluOf>(right(words[j]), right(others[j]), right(ups[j]));
                if (UNIT == 3) words[j] = pack(low.made, high.made);
                others[j] = pack(low.d_gate, high.d_gate);
                ups[j] = pack(low.d_up, high.d_up);
            }
            bool exists;
            const long long at = part_at(i, exists);
            if (UNIT > 1 && exists) {
                bf16 *gates = unit + gate_at(i);
                *reinterpret_cast<uint4 *>(gates) = make_uint4(others[0], others[1], others[2], others[3]);
                *reinterpret_cast<uint4 *>(gates + width) = make_uint4(ups[0], ups[1], ups[2], ups[3]);
            }
            if (exists) *reinterpret_cast<uint4 *>(out + at) = make_uint4(words[0], words[1], words[2], words[3]);
            if (UNIT == 1 && i >= PARTS / 2) {
                unsigned made[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const unsigned gates = kept[(i - PARTS / 2) / 2 * 8 + j * 2 + i % 2];
                    const unsigned ups = kept[i / 2 * 8 + j * 2 + i % 2];
                    made[j] = pack(SiluOf::at(left(gates)).value * left(ups), SiluOf::at(right(gates)).value * right(ups));
                }
                gather_words(made);
                // Row r begins at r · n in `out`, and at r · n / 2 here.
                const int row = kept_row + own_row + i % 2 * 8;
                if (exists)
                    *reinterpret_cast<uint4 *>(unit + (at - width - static_cast<long long>(row) * width)) =
                        make_uint4(made[0], made[1], made[2], made[3]);
            }
        };
        auto multiply_slot = [&](int step) {
            const unsigned slot = base + turn.slot * SLOT;
            const unsigned long long rows = matrix(slot + group * PANEL, 16);
            const unsigned long long to_columns = matrix(slot + 2 * PANEL, B_TURNED ? 16 : PANEL);
            barrier_wait(full + turn.slot * 8, turn.phase);
            products_begin();
#pragma unroll
            for (int i = 0; i < INNER / 16; i++) {
                multiply(sums, rows + i * (A_TURNED ? 2048 >> 4 : 32 >> 4),
                         to_columns + i * (B_TURNED ? 32 >> 4 : 2048 >> 4), step + i);
                if (i == 0) {
                    // With one product in the queue, the tensor cores need not wait while the slot before is given back.
                    products_commit();
                    products_wait<1>();
                    if (step > 0) release(before);
                    products_begin();
                }
            }
            products_commit();
            before = turn.slot;
            turn.next();
        };

        for (int tile = blockIdx.x / 2; tile < pairs * columns; tile += clusters) {
            int step = 0;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
#pragma unroll 1
                for (const int until = 1 + part * (steps - 1) / PARTS; step < until; step++) multiply_slot(step);
                write_part(part);
            }
#pragma unroll 1
            for (; step < steps; step++) multiply_slot(step);
            products_wait<0>();
            arrived(sums);
            release(before);
            const Place place(tile, pairs, columns, block);
            if (BIAS) {
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    const int column = place.column + i * 8 + lane % 4 * 2;
                    const unsigned two = column < n ? *reinterpret_cast<const unsigned *>(bias + column) : 0;
                    sums[4 * i] += left(two);
                    sums[4 * i + 1] += right(two);
                    sums[4 * i + 2] += left(two);
                    sums[4 * i + 3] += right(two);
                }
            }
#pragma unroll
            for (int i = 0; i < 64; i++) kept[i] = pack(sums[2 * i], sums[2 * i + 1]);
            kept_row = place.row;
            kept_column = place.column;
            load_addend(0);
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) write_part(part);
    }
    // The other block may still arrive at a barrier here.
    cluster_barrier();
}
