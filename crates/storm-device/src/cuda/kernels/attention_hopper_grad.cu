// The gradient of causal attention in one kernel, for Hopper (sm_90a only: wgmma); see attention_hopper.cuh.
//
// A block of threads has up to two blocks of 128 keys of one key head and goes over the queries that see them, for all
// query heads that share it: dV += Pᵀ·dY and dK += dSᵀ·Q stay in registers. What each block of keys adds to dQ = dS·K
// goes to f32 sums in global memory. Two threads of the copying group add it, by the copy engine, while the computing
// groups go on. The order of these additions is fixed, so that the result is the same in every run: each tile of
// queries has a counter of the key blocks that have added to it, and each key block waits for its turn.
//
// The order of the steps makes these waits short. Let there be n blocks of keys, and as many of queries, of which the
// first h = n / 2 are early and the others late. Item p has the late keys n − 1 − p and, if p < h, the early keys p:
//
// - Phase 0: late keys, and the queries from the same place on. Later keys come earlier in the turns of a tile.
// - Phase 1: early keys with the early queries, the last one first. Earlier keys come earlier.
// - Phase 2: early keys with the late queries, going round from h + p on. Queries h + j get keys j, j − 1, …, 0, and then
//   those of the highest number downwards.
//
// If all items of a key head run side by side, they meet no tile at the same time: in phases 0 and 1 together, each has
// n - h + 1 steps per query head, and in phase 2 each is at another tile. The last keys to add to a tile do not: they
// fetch the sums and write the gradient. That is one tile per phase of early keys and query head for each block.
//
// An item waits only for items of the same key head, which must all fit on the card at once, and for those before it,
// since memory for sums is used in a ring. Blocks take items by a counter, so that lower items never wait to begin.
//
// Compile with -DHEAD_DIM=64|128.
#define CAUSAL 1
#define SEGMENTS 0
#include "attention_hopper.cuh"

namespace {

// A tile of queries: what makes the sums of a computing group, 64 × 64, the same for both sizes of heads.
constexpr int KEYS = 128, QUERIES = D == 128 ? 64 : 128, TILES_OF_BLOCK = KEYS / QUERIES;
constexpr int SLOTS = 2, COPYING = 64;

// Shared memory: K, V, slots of Q, slots of dY, two slots of dS (key, query), slots of sums, log-sum-exp and delta of a
// slot's queries, barriers.
constexpr int OWN = KEYS * D * 2, TILE = QUERIES * D * 2, SCORES = KEYS * QUERIES * 2, SUMS = QUERIES * D * 4;
constexpr int V_AT = OWN, Q_AT = 2 * OWN, DY_AT = Q_AT + SLOTS * TILE, SCORES_AT = DY_AT + SLOTS * TILE;
constexpr int SUMS_AT = SCORES_AT + 2 * SCORES, ROWS_AT = SUMS_AT + SLOTS * SUMS;
constexpr int BARRIERS_AT = ROWS_AT + SLOTS * 2 * QUERIES * 4;

// ---- order --------------------------------------------------------------------------------------

// Where a block of threads is in its item.
struct Walk {
    int blocks, half, q_tiles, heads, late, early;
    int phase, head, place, tile;

    __device__ __forceinline__ Walk(int item, int seq, int heads)
        : blocks((seq + KEYS - 1) / KEYS), half(blocks / 2), q_tiles((seq + QUERIES - 1) / QUERIES), heads(heads),
          late(blocks - 1 - item), early(item) {}

    // The blocks of keys, one after another.
    __device__ __forceinline__ int parts() const { return early < half ? 2 : 1; }
    __device__ __forceinline__ void begin(int part) {
        phase = part;
        head = 0;
        begin_head();
    }
    __device__ __forceinline__ void begin_head() {
        place = 0;
        tile = (phase == 0 ? late : phase == 1 ? half - 1 : half + early) * TILES_OF_BLOCK;
    }

    // Goes to the next tile with the same keys; false if there is none.
    __device__ __forceinline__ bool next() {
        tile++;
        if (TILES_OF_BLOCK > 1 && tile % TILES_OF_BLOCK != 0 && tile < q_tiles) return true;
        if (++place == (phase == 1 ? half - early : blocks - (phase == 0 ? late : half))) {
            if (++head == heads) {
                if (phase != 1) return false;
                phase = 2;
                head = 0;
            }
            begin_head();
        } else if (phase == 1) {
            tile = (half - 1 - place) * TILES_OF_BLOCK;
        } else if (tile >= q_tiles) {
            tile = half * TILES_OF_BLOCK;
        }
        return true;
    }

    __device__ __forceinline__ int keys() const { return phase == 0 ? late : early; }
    // The block of queries.
    __device__ __forceinline__ int block() const { return tile / TILES_OF_BLOCK; }

    // Of phase 2: how many early keys come before. With one more tile than keys, a tile has a round without any.
    __device__ __forceinline__ int early_before() const {
        const int round = blocks - half, without = (block() - half + 1) % round;
        return place - (round > half && without < place);
    }
    // How many keys come before.
    __device__ __forceinline__ int turn() const {
        return phase == 0 ? block() - late : phase == 1 ? early : block() - half + 1 + early_before();
    }
    // Whether these keys are the first to add to the tile, and the last.
    __device__ __forceinline__ bool first() const { return phase == 0 ? block() == late : phase == 1 && early == 0; }
    __device__ __forceinline__ bool last() const {
        return phase == 0 ? blocks == 1 : phase == 1 ? block() == early : early_before() == half - 1;
    }
};

// ---- sums in global memory ----------------------------------------------------------------------

// Lets the copy engine see what other threads have seen before, and the reverse.
__device__ __forceinline__ void engine_fence() { asm volatile("fence.proxy.async;\n" ::: "memory"); }

__device__ __forceinline__ void turn_wait(const int *counter, int turn) {
    int now;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(now) : "l"(counter) : "memory");
    } while (now != turn);
    engine_fence();
}

__device__ __forceinline__ void turn_end(int *counter) {
    engine_fence();
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;\n" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void sums_fetch(unsigned to, const float *from, unsigned barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n" ::"r"(barrier), "n"(SUMS) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
                 "l"(from), "n"(SUMS), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void sums_set(float *to, unsigned from) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(from), "n"(SUMS) : "memory");
}

__device__ __forceinline__ void sums_add(float *to, unsigned from) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(to), "r"(from),
                 "n"(SUMS)
                 : "memory");
}

} // namespace

// Clears the counters.
extern "C" __global__ void attention_hopper_grad_begin(int *counters, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) counters[i] = 0;
}

// d_qkv.
//
// `counters` has one for items, and then one for each tile of queries: (ring, Hq / Hkv, tiles). `sums` is laid out like
// these, a tile as (group, 8, 128 threads, 4) f32. `ring` key heads use them at a time.
//
// Grid (B·Hkv · (n − h)), of which n − h must fit on the card; block 384; dynamic shared memory BARRIERS_AT + 128 bytes:
// 230528 for D = 128, 231552 for D = 64.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_hopper_grad(const bf16 *__restrict__ dy, const bf16 *__restrict__ qkv,
                          const float *__restrict__ log_sum_exp, const float *__restrict__ delta,
                          bf16 *__restrict__ d_qkv, int *counters, float *sums, int ring, int seq, int q_heads,
                          int kv_heads, float scale) {
    extern __shared__ __align__(1024) char shared[];
    const unsigned base = shared_address(shared);
    const float *rows = reinterpret_cast<const float *>(shared + ROWS_AT);
    // `sums_full`: what a group computed lies in the slot, or has been read from it. `sums_empty`: the slot may be used.
    // `sums_here`: sums were fetched into it.
    const unsigned full = base + BARRIERS_AT, empty = full + SLOTS * 8, own_full = empty + SLOTS * 8;
    const unsigned own_empty = own_full + 8, sums_full = own_empty + 8, sums_empty = sums_full + SLOTS * 8;
    const unsigned sums_here = sums_empty + SLOTS * 8;
    int *ticket = reinterpret_cast<int *>(shared + BARRIERS_AT + 96);

    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(full + slot * 8, COPYING);
            barrier_init(empty + slot * 8, COMPUTE_WARPS);
            barrier_init(sums_full + slot * 8, COMPUTE_WARPS);
            barrier_init(sums_empty + slot * 8, 1);
            barrier_init(sums_here + slot * 8, 1);
        }
        barrier_init(own_full, COPYING);
        barrier_init(own_empty, COMPUTE_WARPS);
        *ticket = atomicAdd(counters, 1);
    }
    __syncthreads();
    // By shuffles, so that the compiler knows what is the same for a whole warp.
    const int taken = __shfl_sync(0xffffffff, *ticket, 0);
    const int heads = q_heads / kv_heads, blocks = (seq + KEYS - 1) / KEYS, items = blocks - blocks / 2;
    const int row = taken / items, batch = row / kv_heads, kv_head = row % kv_heads;
    const int stride = (q_heads + 2 * kv_heads) * D, y_stride = q_heads * D;
    Walk walk(taken % items, seq, heads);

    if (threadIdx.x < GROUP) {
        registers_for_copying<40>();
        if (threadIdx.x < COPYING) {
            const bf16 *sequence = qkv + static_cast<long long>(batch) * seq * stride;
            int slot = 0, phase = 1;
            for (int part = 0; part < walk.parts(); part++) {
                walk.begin(part);
                const int key_begin = walk.keys() * KEYS;
                const bf16 *keys = sequence + static_cast<long long>(key_begin) * stride + (q_heads + kv_head) * D;
                barrier_wait(own_empty, part ^ 1);
                panels_load<KEYS, COPYING>(base, keys, stride, seq - key_begin);
                panels_load<KEYS, COPYING>(base + V_AT, keys + kv_heads * D, stride, seq - key_begin);
                barrier_arrive_after_copies(own_full);
                do {
                    const int first = walk.tile * QUERIES, head = kv_head * heads + walk.head;
                    barrier_wait(empty + slot * 8, phase);
                    panels_load<QUERIES, COPYING>(base + Q_AT + slot * TILE,
                                                  sequence + static_cast<long long>(first) * stride + head * D, stride,
                                                  seq - first);
                    panels_load<QUERIES, COPYING>(base + DY_AT + slot * TILE,
                                                  dy + (static_cast<long long>(batch) * seq + first) * y_stride +
                                                      head * D,
                                                  y_stride, seq - first);
                    const long long at = (static_cast<long long>(batch) * q_heads + head) * seq;
#pragma unroll
                    for (int i = 0; i < QUERIES; i += COPYING) {
                        const int query = first + i + threadIdx.x;
                        const unsigned to = base + ROWS_AT + (slot * 2 * QUERIES + i + threadIdx.x) * 4;
                        copy_4(to, log_sum_exp + at + min(query, seq - 1), query < seq);
                        copy_4(to + QUERIES * 4, delta + at + min(query, seq - 1), query < seq);
                    }
                    barrier_arrive_after_copies(full + slot * 8);
                    if (++slot == SLOTS) {
                        slot = 0;
                        phase ^= 1;
                    }
                } while (walk.next());
            }
            copies_commit();
            copies_wait<0>();
        } else {
            // Each of two warps has a slot of sums.
            const int slot = threadIdx.x / 32 - COPYING / 32;
            const unsigned place = base + SUMS_AT + slot * SUMS;
            int step = 0, phase = 0;
            for (int part = 0; threadIdx.x % 32 == 0 && part < walk.parts(); part++) {
                walk.begin(part);
                do {
                    if (step++ % SLOTS != slot) continue;
                    const bool last = walk.last();
                    const int tile = (row % ring * heads + walk.head) * walk.q_tiles + walk.tile, turn = walk.turn();
                    // Every use of the ring before has counted all of the tile's keys.
                    const int wanted = row / ring * (walk.block() + 1) + turn;
                    int *counter = counters + 1 + tile;
                    float *tile_sums = sums + static_cast<long long>(tile) * (QUERIES * D);
                    if (last && turn > 0) {
                        turn_wait(counter, wanted);
                        sums_fetch(place, tile_sums, sums_here + slot * 8);
                    }
                    barrier_wait(sums_full + slot * 8, phase);
                    phase ^= 1;
                    if (!last) {
                        turn_wait(counter, wanted);
                        if (turn == 0)
                            sums_set(tile_sums, place);
                        else
                            sums_add(tile_sums, place);
                        asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
                        asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
                        barrier_arrive(sums_empty + slot * 8);
                        asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
                    } else {
                        barrier_arrive(sums_empty + slot * 8);
                    }
                    turn_end(counter);
                } while (walk.next());
            }
        }
    } else {
        registers_for_computing<232>();
        const int group = __shfl_sync(0xffffffff, threadIdx.x / GROUP, 0) - 1, lane = threadIdx.x % 32;
        const int warp_row = threadIdx.x % GROUP / 32 * 16;
        const unsigned k_rows = base + group * (64 * 128), v_rows = base + V_AT + group * (64 * 128);
        const float scale_log2 = scale * LOG2_E;
        int step = 0, here_phases = 0; // a bit for each slot

        for (int part = 0; part < walk.parts(); part++) {
            walk.begin(part);
            const int key_begin = walk.keys() * KEYS, group_row = key_begin + group * 64;
            float d_keys[D / 2], d_values[D / 2], scores[QUERIES / 2], d_weights[QUERIES / 2], d_queries[32];
            clear(d_keys);
            clear(d_values);

            // Ends a step: hands over its part of the gradient of queries, or writes the whole gradient.
            auto hand_over = [&](int step, int head, int tile, bool first, bool last) {
                const int thread = thread_again() % GROUP, slot = step % SLOTS;
                float4 *place = reinterpret_cast<float4 *>(shared + SUMS_AT + slot * SUMS + group * (SUMS / 2)) + thread;
                barrier_wait(sums_empty + slot * 8, step / SLOTS % 2 ^ 1);
                if (!last) {
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        place[i * GROUP] = make_float4(d_queries[4 * i], d_queries[4 * i + 1], d_queries[4 * i + 2],
                                                       d_queries[4 * i + 3]);
                    tiles_fence();
                } else {
                    if (!first) {
                        barrier_wait(sums_here + slot * 8, here_phases >> slot & 1);
                        here_phases ^= 1 << slot;
#pragma unroll
                        for (int i = 0; i < 8; i++) {
                            const float4 sum = place[i * GROUP];
                            d_queries[4 * i] += sum.x;
                            d_queries[4 * i + 1] += sum.y;
                            d_queries[4 * i + 2] += sum.z;
                            d_queries[4 * i + 3] += sum.w;
                        }
                    }
                    const int query = tile * QUERIES + (D == 64) * group * 64 + thread / 32 * 16 + thread % 32 / 4;
                    const int column = (kv_head * heads + head) * D + (D == 128) * group * 64 + thread % 4 * 2;
                    bf16 *to = d_qkv + (static_cast<long long>(batch) * seq + query) * stride + column;
                    const bool top = query < seq, bottom = query + 8 < seq;
#pragma unroll
                    for (int i = 0; i < 32; i += 4) {
                        if (top)
                            *reinterpret_cast<unsigned *>(to + 2 * i) = pack(d_queries[i] * scale, d_queries[i + 1] * scale);
                        if (bottom)
                            *reinterpret_cast<unsigned *>(to + 2 * i + 8 * stride) =
                                pack(d_queries[i + 2] * scale, d_queries[i + 3] * scale);
                    }
                }
                __syncwarp();
                tile_release(sums_full + slot * 8);
            };

            tile_wait(own_full, part);
            tile_wait(full + step % SLOTS * 8, step / SLOTS % 2);
            products_begin();
            scores_of<KEYS>(scores, k_rows, base + Q_AT + step % SLOTS * TILE);
            products_commit();
            bool more = true;
#pragma unroll 1
            while (more) {
                const int slot = step % SLOTS, query_begin = walk.tile * QUERIES;
                const unsigned q_tile = base + Q_AT + slot * TILE, dy_tile = base + DY_AT + slot * TILE;
                products_wait<0>();
                arrived(scores);
                products_begin();
                scores_of<KEYS>(d_weights, v_rows, dy_tile);
                products_commit();
                // Queries past the end have dy = 0 and delta = 0: they add nothing.
                if (query_begin < group_row + 63)
                    hide<Rows::Keys>(scores, group_row + warp_row + lane / 4, query_begin, seq, nullptr);
                const float *own_rows = rows + slot * 2 * QUERIES + lane % 4 * 2;
                unsigned weights[QUERIES / 16][4], d_scores[QUERIES / 16][4];
#pragma unroll
                for (int n = 0; n < QUERIES / 8; n++) {
                    const float2 lse = *reinterpret_cast<const float2 *>(own_rows + n * 8);
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        scores[n * 4 + i] = exp_2(scores[n * 4 + i] * scale_log2 - (i % 2 ? lse.y : lse.x) * LOG2_E);
                }
                pack_all(weights, scores);
                products_wait<0>();
                arrived(d_weights);
#pragma unroll
                for (int n = 0; n < QUERIES / 8; n++) {
                    const float2 del = *reinterpret_cast<const float2 *>(own_rows + QUERIES + n * 8);
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        d_weights[n * 4 + i] = scores[n * 4 + i] * (d_weights[n * 4 + i] - (i % 2 ? del.y : del.x));
                }
                pack_all(d_scores, d_weights);
                // Two slots: when a group writes to one, the other group has passed the barrier below since it read it.
                const int scores_at = SCORES_AT + step % 2 * SCORES, key = group * 64 + warp_row + lane / 4;
                char *to = shared + scores_at + lane % 4 * 4;
#pragma unroll
                for (int n = 0; n < QUERIES / 8; n++) {
                    *reinterpret_cast<unsigned *>(to + panel_offset<KEYS>(key, n)) = d_scores[n / 2][n % 2 * 2];
                    *reinterpret_cast<unsigned *>(to + panel_offset<KEYS>(key + 8, n)) = d_scores[n / 2][n % 2 * 2 + 1];
                }
                products_begin();
                accumulate(d_values, weights, dy_tile);
                products_commit();
                accumulate(d_keys, d_scores, q_tile);
                products_commit();
                tiles_fence();
                asm volatile("bar.sync 3, 256;\n" ::: "memory");
                // A group has half of the columns of 64 queries, or 64 of 128 queries.
                const unsigned of_queries = base + scores_at + (D == 64) * group * (KEYS * 128);
                const unsigned of_keys = base + (D == 128) * group * (KEYS * 128);
                products_begin();
                product_turned(d_queries, matrix(of_queries, 0), matrix(of_keys, 0));
#pragma unroll
                for (int k = 1; k < KEYS / 16; k++)
                    product_add_turned(d_queries, matrix(of_queries + k * 2048, 0), matrix(of_keys + k * 2048, 0));
                products_commit();

                const int own_head = walk.head, own_tile = walk.tile;
                const bool first = walk.first(), last = walk.last();
                more = walk.next();
                step++;
                if (more) tile_wait(full + step % SLOTS * 8, step / SLOTS % 2);
                products_wait<1>();
                arrived(d_keys);
                arrived(d_values);
                // After the last step these are scores of an old tile, which nothing reads.
                products_begin();
                scores_of<KEYS>(scores, k_rows, base + Q_AT + step % SLOTS * TILE);
                products_commit();
                products_wait<1>();
                arrived(d_queries);
                tile_release(empty + slot * 8);
                hand_over(step - 1, own_head, own_tile, first, last);
            }
            products_wait<0>();
            arrived(scores);

            // Both groups have read K and V: the results take their place.
            asm volatile("bar.sync 3, 256;\n" ::: "memory");
            bf16 *d_key_rows = d_qkv + (static_cast<long long>(batch) * seq + group_row) * stride + (q_heads + kv_head) * D;
            panels_store<KEYS>(shared, group * 64, d_keys, scale, scale, d_key_rows, stride, seq - group_row, 1 + group);
            panels_store<KEYS>(shared + V_AT, group * 64, d_values, 1.0f, 1.0f, d_key_rows + kv_heads * D, stride,
                               seq - group_row, 1 + group);
            __syncwarp();
            tile_release(own_empty);
        }
    }
}
