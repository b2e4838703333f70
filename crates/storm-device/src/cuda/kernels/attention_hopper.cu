// Attention for Hopper (sm_90a only: wgmma), bf16 storage, f32 accumulation: the same functions,
// arguments and rules as attention.cu, faster. attention_delta is taken from there.
//
// Compile with -DHEAD_DIM=64|128, -DCAUSAL=0|1, -DSEGMENTS=0|1, and -DWINDOW=1 for a window.
//
// attention_hopper_forward and attention_hopper_grad_q go over (sequence and head, query tile) items:
// as many blocks as the card has multiprocessors take items in turn, so that the copies for an item
// hide behind the end of the one before. Which block takes an item changes nothing in its result.
#include "attention_hopper.cuh"

namespace {

// The two computing groups take turns: one waits for its turn, the other passes it on.
__device__ __forceinline__ void turn_wait(int group) {
    asm volatile("bar.sync %0, 256;\n" ::"r"(3 + group) : "memory");
}

__device__ __forceinline__ void turn_pass(int to_group) {
    asm volatile("bar.arrive %0, 256;\n" ::"r"(3 + to_group) : "memory");
}

// The item that this block takes in a round. Items are sorted, longest first; every other round runs
// backwards, so that all blocks get about the same.
__device__ __forceinline__ int item_of(int round) {
    return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

} // namespace

// ---- forward ------------------------------------------------------------------------------------

// y and log_sum_exp (natural logarithm). `rows` is B·Hq.
//
// Items: B·Hq·⌈T/128⌉. Grid (min(items, multiprocessors)), with SEGMENTS (items); block 384; dynamic
// shared memory (2·128 + 4·128)·D·2 + 80 bytes: 196688 for D = 128, 98384 for D = 64.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_hopper_forward(const bf16 *__restrict__ qkv, const int *__restrict__ segments, bf16 *__restrict__ y,
                             float *__restrict__ log_sum_exp, int rows, int seq, int q_heads, int kv_heads,
                             float scale WITH_WINDOW) {
    extern __shared__ __align__(1024) char shared[];
    constexpr int QUERIES = 128, KEYS = 128, TILE = KEYS * D * 2, SLOTS = 2;
    const unsigned q_tile = shared_address(shared), k_tiles = q_tile + TILE, v_tiles = k_tiles + SLOTS * TILE;
    constexpr int OUT_AT = (1 + 2 * SLOTS) * TILE;
    // Eight bytes per slot each.
    const unsigned k_full = q_tile + OUT_AT + TILE, v_full = k_full + 16, k_empty = k_full + 32, v_empty = k_full + 48;
    const unsigned q_full = k_full + 64, q_empty = k_full + 72;

    const int q_tiles = (seq + QUERIES - 1) / QUERIES, items = rows * q_tiles;
    const int stride = (q_heads + 2 * kv_heads) * D, y_stride = q_heads * D;
    auto query_begin = [&](int item) { return (q_tiles - 1 - item / rows) * QUERIES; };

    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(k_full + slot * 8, GROUP);
            barrier_init(v_full + slot * 8, GROUP);
            barrier_init(k_empty + slot * 8, COMPUTE_WARPS);
            barrier_init(v_empty + slot * 8, COMPUTE_WARPS);
        }
        barrier_init(q_full, GROUP);
        barrier_init(q_empty, COMPUTE_WARPS);
    }
    int2 range = make_int2(0, seq);
    if (SEGMENTS) {
        const int q_begin = query_begin(blockIdx.x), q_end = min(seq, q_begin + QUERIES);
        range = segment_range(segments + static_cast<long long>(blockIdx.x % rows / q_heads) * seq, q_begin, q_end,
                              WINDOW ? max(0, q_begin + 1 - window) : 0, CAUSAL ? q_end : seq);
    }
    const int range_begin = range.x / KEYS;
    // The first key tile of an item, and how many there are.
    auto first_tile = [&](int q_begin) { return WINDOW ? max(range.x, q_begin + 1 - window) / KEYS : range_begin; };
    auto key_tiles = [&](int q_begin) {
        const int end = CAUSAL ? min(range.y, q_begin + QUERIES) : range.y;
        return (end + KEYS - 1) / KEYS - first_tile(q_begin);
    };
    __syncthreads();

    if (threadIdx.x < GROUP) {
        registers_for_copying<24>();
        int n = 0; // key tiles so far
        for (int round = 0; round * gridDim.x < items; round++) {
            const int item = item_of(round);
            if (item >= items) break;
            const int q_begin = query_begin(item), row = item % rows, head = row % q_heads;
            const bf16 *sequence = qkv + static_cast<long long>(row / q_heads) * seq * stride;
            barrier_wait(q_empty, round % 2 ^ 1);
            panels_load<QUERIES>(q_tile, sequence + static_cast<long long>(q_begin) * stride + head * D, stride,
                                 seq - q_begin);
            barrier_arrive_after_copies(q_full);
            const int tile_begin = first_tile(q_begin);
            const bf16 *keys = sequence + (q_heads + head / (q_heads / kv_heads)) * D +
                               static_cast<long long>(tile_begin) * KEYS * stride;
            const int tiles = key_tiles(q_begin);
            for (int i = 0; i < tiles; i++, n++) {
                const int slot = n % SLOTS, phase = n / SLOTS % 2, left = seq - (tile_begin + i) * KEYS;
                barrier_wait(k_empty + slot * 8, phase ^ 1);
                panels_load<KEYS>(k_tiles + slot * TILE, keys, stride, left);
                barrier_arrive_after_copies(k_full + slot * 8);
                barrier_wait(v_empty + slot * 8, phase ^ 1);
                panels_load<KEYS>(v_tiles + slot * TILE, keys + kv_heads * D, stride, left);
                barrier_arrive_after_copies(v_full + slot * 8);
                keys += static_cast<long long>(KEYS) * stride;
            }
        }
        copies_commit();
        copies_wait<0>();
    } else {
        registers_for_computing<240>();
        const int group = threadIdx.x / GROUP - 1, lane = threadIdx.x % 32, warp_row = threadIdx.x % GROUP / 32 * 16;
        const unsigned q_rows = q_tile + group * (64 * 128);
        const float scale_log2 = scale * LOG2_E;
        // The groups take turns at starting products, so that one's softmax meets the other's products.
        if (group == 1) turn_pass(0);

        int n = 0; // key tiles so far
        for (int round = 0; round * gridDim.x < items; round++) {
            const int item = item_of(round);
            if (item >= items) break;
            const int group_row = query_begin(item) + group * 64, tiles = key_tiles(query_begin(item));
            const int batch = item % rows / q_heads, tile_begin = first_tile(query_begin(item));
            const int *ids = SEGMENTS ? segments + static_cast<long long>(batch) * seq : nullptr;

            float sums[D / 2], scores[KEYS / 2], maximum[2], total[2], rescale[2];
            unsigned weights[KEYS / 16][4];
            clear(sums);
            maximum[0] = maximum[1] = MINUS_INFINITY;
            total[0] = total[1] = 0.0f;

            // Scores to weights, the row maxima and sums brought up to date.
            auto softmax = [&](int tile) {
                const int key_begin = tile * KEYS;
                if (key_begin + KEYS > seq || (CAUSAL && key_begin + KEYS - 1 > group_row) ||
                    (WINDOW && group_row + 63 - key_begin >= window) ||
                    (SEGMENTS && mixed<KEYS>(ids, group_row + warp_row, key_begin, seq)))
                    hide<Rows::Queries>(scores, group_row + warp_row + lane / 4, key_begin, seq, ids PASS_WINDOW);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float high = maximum[r];
#pragma unroll
                    for (int i = 2 * r; i < KEYS / 2; i += 4) high = fmaxf(high, fmaxf(scores[i], scores[i + 1]));
                    high = quad_max(high);
                    // A query that has seen nothing yet keeps weights of zero.
                    const float offset = high == MINUS_INFINITY ? 0.0f : high * scale_log2;
                    rescale[r] = exp_2(maximum[r] * scale_log2 - offset);
                    maximum[r] = high;
                    float sum = 0.0f;
#pragma unroll
                    for (int i = 2 * r; i < KEYS / 2; i += 4) {
                        scores[i] = exp_2(scores[i] * scale_log2 - offset);
                        scores[i + 1] = exp_2(scores[i + 1] * scale_log2 - offset);
                        sum += scores[i] + scores[i + 1];
                    }
                    total[r] = total[r] * rescale[r] + sum;
                }
            };

            tile_wait(q_full, round % 2);
            tile_wait(k_full + n % SLOTS * 8, n / SLOTS % 2);
            turn_wait(group);
            products_begin();
            scores_of<QUERIES>(scores, q_rows, k_tiles + n % SLOTS * TILE);
            products_commit();
            turn_pass(1 - group);
            products_wait<0>();
            arrived(scores);
            tile_release(k_empty + n % SLOTS * 8);
            softmax(tile_begin);
            pack_all(weights, scores);

#pragma unroll 1
            for (int i = 1; i < tiles; i++) {
                const int before = n % SLOTS, before_phase = n / SLOTS % 2;
                n++;
                const int slot = n % SLOTS;
                tile_wait(k_full + slot * 8, n / SLOTS % 2);
                turn_wait(group);
                products_begin();
                scores_of<QUERIES>(scores, q_rows, k_tiles + slot * TILE);
                products_commit();
                tile_wait(v_full + before * 8, before_phase);
                products_begin();
                accumulate(sums, weights, v_tiles + before * TILE);
                products_commit();
                turn_pass(1 - group);
                products_wait<1>();
                arrived(scores);
                tile_release(k_empty + slot * 8);
                softmax(tile_begin + i);
                products_wait<0>();
                arrived(sums);
                tile_release(v_empty + before * 8);
#pragma unroll
                for (int j = 0; j < D / 2; j++) sums[j] *= rescale[j / 2 % 2];
                pack_all(weights, scores);
            }
            tile_release(q_empty);
            tile_wait(v_full + n % SLOTS * 8, n / SLOTS % 2);
            products_begin();
            accumulate(sums, weights, v_tiles + n % SLOTS * TILE);
            products_commit();
            products_wait<0>();
            arrived(sums);
            tile_release(v_empty + n % SLOTS * 8);
            n++;

#pragma unroll
            for (int r = 0; r < 2; r++) {
                total[r] = quad_sum(total[r]);
                const int row = group_row + warp_row + lane / 4 + 8 * r;
                if (lane % 4 == 0 && row < seq)
                    log_sum_exp[static_cast<long long>(item % rows) * seq + row] =
                        maximum[r] * scale + __log2f(total[r]) * LN_2;
            }
            panels_store<QUERIES>(shared + OUT_AT, group * 64, sums, 1.0f / total[0], 1.0f / total[1],
                                  y + (static_cast<long long>(batch) * seq + group_row) * y_stride + item % q_heads * D,
                                  y_stride, seq - group_row, 1 + group);
        }
    }
}

// ---- backward -----------------------------------------------------------------------------------

// The key and value parts of d_qkv.
//
// Grid (B·Hkv, ⌈T/128⌉), block 384, dynamic shared memory (2·128 + 6·64)·D·2 + 1584 bytes: 165424 for
// D = 128, 83504 for D = 64. Scores are transposed here (key × query).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_hopper_grad_kv(const bf16 *__restrict__ dy, const bf16 *__restrict__ qkv,
                             const float *__restrict__ log_sum_exp, const float *__restrict__ delta,
                             const int *__restrict__ segments, bf16 *__restrict__ d_qkv, int seq, int q_heads,
                             int kv_heads, float scale WITH_WINDOW) {
    extern __shared__ __align__(1024) char shared[];
    constexpr int KEYS = 128, QUERIES = 64, OWN = KEYS * D * 2, TILE = QUERIES * D * 2, SLOTS = 3;
    const unsigned k_tile = shared_address(shared), v_tile = k_tile + OWN;
    const unsigned q_tiles = v_tile + OWN, dy_tiles = q_tiles + SLOTS * TILE;
    // [slot][log-sum-exp, delta][query]
    constexpr int ROWS_AT = 2 * OWN + 2 * SLOTS * TILE;
    const float *rows = reinterpret_cast<const float *>(shared + ROWS_AT);
    const unsigned full = k_tile + ROWS_AT + SLOTS * 2 * QUERIES * 4, empty = full + SLOTS * 8;

    const int heads = q_heads / kv_heads;
    const int batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads;
    const int key_begin = blockIdx.y * KEYS;
    const int stride = (q_heads + 2 * kv_heads) * D, y_stride = q_heads * D;
    const bf16 *sequence = qkv + static_cast<long long>(batch) * seq * stride;
    const int *ids = SEGMENTS ? segments + static_cast<long long>(batch) * seq : nullptr;

    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(full + slot * 8, GROUP);
            barrier_init(empty + slot * 8, COMPUTE_WARPS);
        }
    }
    int2 range = make_int2(CAUSAL ? key_begin : 0, WINDOW ? min(seq, key_begin + KEYS - 1 + window) : seq);
    if (SEGMENTS) range = segment_range(ids, key_begin, min(seq, key_begin + KEYS), range.x, range.y);
    const int tile_begin = range.x / QUERIES, tile_end = (range.y + QUERIES - 1) / QUERIES;
    const int steps = (tile_end - tile_begin) * heads;
    __syncthreads();

    if (threadIdx.x < GROUP) {
        registers_for_copying<24>();
        const bf16 *keys = sequence + static_cast<long long>(key_begin) * stride + (q_heads + kv_head) * D;
        panels_load<KEYS>(k_tile, keys, stride, seq - key_begin);
        panels_load<KEYS>(v_tile, keys + kv_heads * D, stride, seq - key_begin);
        int tile = tile_begin, head = kv_head * heads, slot = 0, phase = 1;
        for (int step = 0; step < steps; step++) {
            const int first = tile * QUERIES;
            barrier_wait(empty + slot * 8, phase);
            panels_load<QUERIES>(q_tiles + slot * TILE, sequence + static_cast<long long>(first) * stride + head * D,
                                 stride, seq - first);
            panels_load<QUERIES>(dy_tiles + slot * TILE,
                                 dy + (static_cast<long long>(batch) * seq + first) * y_stride + head * D, y_stride,
                                 seq - first);
            const int query = first + threadIdx.x % QUERIES;
            const float *source = (threadIdx.x < QUERIES ? log_sum_exp : delta) +
                                  (static_cast<long long>(batch) * q_heads + head) * seq;
            copy_4(shared_address(rows) + (slot * 2 * QUERIES + threadIdx.x) * 4, source + min(query, seq - 1), query < seq);
            barrier_arrive_after_copies(full + slot * 8);
            if (++tile == tile_end) {
                tile = tile_begin;
                head++;
            }
            if (++slot == SLOTS) {
                slot = 0;
                phase ^= 1;
            }
        }
        copies_commit();
        copies_wait<0>();
    } else {
        registers_for_computing<240>();
        const int group = threadIdx.x / GROUP - 1, lane = threadIdx.x % 32;
        const int group_row = key_begin + group * 64, row = group_row + threadIdx.x % GROUP / 32 * 16 + lane / 4;
        const unsigned k_rows = k_tile + group * (64 * 128), v_rows = v_tile + group * (64 * 128);
        const float scale_log2 = scale * LOG2_E;

        float d_keys[D / 2], d_values[D / 2], scores[QUERIES / 2], d_weights[QUERIES / 2];
        unsigned weights[QUERIES / 16][4], d_scores[QUERIES / 16][4];
        clear(d_keys);
        clear(d_values);

        int tile = tile_begin, slot = 0, phase = 0, read_slot = -1;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const int query_begin = tile * QUERIES;
            tile_wait(full + slot * 8, phase);
            if (CAUSAL && query_begin + QUERIES <= group_row) {
                // All of these queries come before all of the group's keys.
                if (read_slot >= 0) {
                    products_wait<0>();
                    tile_release(empty + read_slot * 8);
                    read_slot = -1;
                }
                tile_release(empty + slot * 8);
            } else {
                const unsigned q_tile = q_tiles + slot * TILE, dy_tile = dy_tiles + slot * TILE;
                products_begin();
                scores_of<KEYS>(scores, k_rows, q_tile);
                products_commit();
                scores_of<KEYS>(d_weights, v_rows, dy_tile);
                products_commit();
                products_wait<1>();
                arrived(scores);
                arrived(d_keys);
                if (read_slot >= 0) tile_release(empty + read_slot * 8);
                read_slot = slot;

                // Queries past the end have dy = 0 and delta = 0: they add nothing.
                if ((CAUSAL && query_begin < group_row + 63) ||
                    (WINDOW && query_begin + QUERIES - 1 - group_row >= window) ||
                    (SEGMENTS && mixed<QUERIES>(ids, group_row + threadIdx.x % GROUP / 32 * 16, query_begin, seq)))
                    hide<Rows::Keys>(scores, row, query_begin, seq, ids PASS_WINDOW);
                const float *own_rows = rows + slot * 2 * QUERIES + lane % 4 * 2;
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
                products_begin();
                accumulate(d_values, weights, dy_tile);
                products_commit();
                accumulate(d_keys, d_scores, q_tile);
                products_commit();
                products_wait<1>();
                arrived(d_values);
            }
            if (++tile == tile_end) tile = tile_begin;
            if (++slot == SLOTS) {
                slot = 0;
                phase ^= 1;
            }
        }
        products_wait<0>();
        arrived(d_keys);
        arrived(d_values);

        bf16 *d_key_rows = d_qkv + (static_cast<long long>(batch) * seq + group_row) * stride + (q_heads + kv_head) * D;
        panels_store<KEYS>(shared, group * 64, d_keys, scale, scale, d_key_rows, stride, seq - group_row, 1 + group);
        panels_store<KEYS>(shared + OWN, group * 64, d_values, 1.0f, 1.0f, d_key_rows + kv_heads * D, stride,
                           seq - group_row, 1 + group);
    }
}

// The query part of d_qkv. `rows` is B·Hq.
//
// Items: B·Hq·⌈T/128⌉. Grid (min(items, multiprocessors)), with SEGMENTS (items); block 384; dynamic
// shared memory (3·128 + 6·64)·D·2 + 64 bytes: 196672 for D = 128, 98368 for D = 64.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_hopper_grad_q(const bf16 *__restrict__ dy, const bf16 *__restrict__ qkv,
                            const float *__restrict__ log_sum_exp, const float *__restrict__ delta,
                            const int *__restrict__ segments, bf16 *__restrict__ d_qkv, int rows, int seq, int q_heads,
                            int kv_heads, float scale WITH_WINDOW) {
    extern __shared__ __align__(1024) char shared[];
    constexpr int QUERIES = 128, KEYS = 64, OWN = QUERIES * D * 2, TILE = KEYS * D * 2, SLOTS = 3;
    const unsigned q_tile = shared_address(shared), dy_tile = q_tile + OWN;
    constexpr int OUT_AT = 2 * OWN;
    const unsigned k_tiles = q_tile + 3 * OWN, v_tiles = k_tiles + SLOTS * TILE;
    const unsigned full = v_tiles + SLOTS * TILE, empty = full + SLOTS * 8;
    const unsigned own_full = full + 48, own_empty = full + 56;

    const int q_tiles = (seq + QUERIES - 1) / QUERIES, items = rows * q_tiles;
    const int stride = (q_heads + 2 * kv_heads) * D, y_stride = q_heads * D;
    auto query_begin = [&](int item) { return (q_tiles - 1 - item / rows) * QUERIES; };

    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(full + slot * 8, GROUP);
            barrier_init(empty + slot * 8, COMPUTE_WARPS);
        }
        barrier_init(own_full, GROUP);
        barrier_init(own_empty, COMPUTE_WARPS);
    }
    int2 range = make_int2(0, seq);
    if (SEGMENTS) {
        const int q_begin = query_begin(blockIdx.x), q_end = min(seq, q_begin + QUERIES);
        range = segment_range(segments + static_cast<long long>(blockIdx.x % rows / q_heads) * seq, q_begin, q_end,
                              WINDOW ? max(0, q_begin + 1 - window) : 0, CAUSAL ? q_end : seq);
    }
    const int range_begin = range.x / KEYS;
    auto first_tile = [&](int q_begin) { return WINDOW ? max(range.x, q_begin + 1 - window) / KEYS : range_begin; };
    // Key tiles, from `tile_begin` on, that queries before `q_end` see.
    auto key_tiles = [&](int q_end, int tile_begin) {
        const int end = CAUSAL ? min(range.y, q_end) : range.y;
        return (end + KEYS - 1) / KEYS - tile_begin;
    };
    __syncthreads();

    if (threadIdx.x < GROUP) {
        registers_for_copying<24>();
        int slot = 0, phase = 1;
        for (int round = 0; round * gridDim.x < items; round++) {
            const int item = item_of(round);
            if (item >= items) break;
            const int q_begin = query_begin(item), head = item % q_heads, batch = item % rows / q_heads;
            const bf16 *sequence = qkv + static_cast<long long>(batch) * seq * stride;
            barrier_wait(own_empty, round % 2 ^ 1);
            panels_load<QUERIES>(q_tile, sequence + static_cast<long long>(q_begin) * stride + head * D, stride,
                                 seq - q_begin);
            panels_load<QUERIES>(dy_tile, dy + (static_cast<long long>(batch) * seq + q_begin) * y_stride + head * D,
                                 y_stride, seq - q_begin);
            barrier_arrive_after_copies(own_full);
            const int tile_begin = first_tile(q_begin);
            const bf16 *keys = sequence + (q_heads + head / (q_heads / kv_heads)) * D +
                               static_cast<long long>(tile_begin) * KEYS * stride;
            const int tiles = key_tiles(q_begin + QUERIES, tile_begin);
            for (int i = 0; i < tiles; i++) {
                const int left = seq - (tile_begin + i) * KEYS;
                barrier_wait(empty + slot * 8, phase);
                panels_load<KEYS>(k_tiles + slot * TILE, keys, stride, left);
                panels_load<KEYS>(v_tiles + slot * TILE, keys + kv_heads * D, stride, left);
                barrier_arrive_after_copies(full + slot * 8);
                keys += static_cast<long long>(KEYS) * stride;
                if (++slot == SLOTS) {
                    slot = 0;
                    phase ^= 1;
                }
            }
        }
        copies_commit();
        copies_wait<0>();
    } else {
        registers_for_computing<240>();
        const int group = threadIdx.x / GROUP - 1, lane = threadIdx.x % 32, warp_row = threadIdx.x % GROUP / 32 * 16;
        const unsigned q_rows = q_tile + group * (64 * 128), dy_rows = dy_tile + group * (64 * 128);
        const float scale_log2 = scale * LOG2_E;
        int slot = 0, phase = 0;
        auto next_slot = [&]() {
            if (++slot == SLOTS) {
                slot = 0;
                phase ^= 1;
            }
        };

        for (int round = 0; round * gridDim.x < items; round++) {
            const int item = item_of(round);
            if (item >= items) break;
            const int group_row = query_begin(item) + group * 64, row = group_row + warp_row + lane / 4;
            const int batch = item % rows / q_heads, tile_begin = first_tile(query_begin(item));
            const int *ids = SEGMENTS ? segments + static_cast<long long>(batch) * seq : nullptr;

            float offset[2], row_delta[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const bool valid = row + 8 * r < seq;
                const long long place = static_cast<long long>(item % rows) * seq + row + 8 * r;
                offset[r] = valid ? log_sum_exp[place] * LOG2_E : 0.0f;
                row_delta[r] = valid ? delta[place] : 0.0f;
            }
            float d_queries[D / 2], scores[KEYS / 2], d_weights[KEYS / 2];
            unsigned d_scores[KEYS / 16][4];
            clear(d_queries);
            tile_wait(own_full, round % 2);

            // The last tiles may lie after all of the group's queries.
            const int tiles = key_tiles(query_begin(item) + QUERIES, tile_begin);
            const int own_tiles = min(tiles, key_tiles(group_row + 64, tile_begin));
            int read_slot = -1;
#pragma unroll 1
            for (int i = 0; i < own_tiles; i++) {
                const unsigned k_tile = k_tiles + slot * TILE, v_tile = v_tiles + slot * TILE;
                tile_wait(full + slot * 8, phase);
                products_begin();
                scores_of<QUERIES>(scores, q_rows, k_tile);
                products_commit();
                scores_of<QUERIES>(d_weights, dy_rows, v_tile);
                products_commit();
                products_wait<1>();
                arrived(scores);
                arrived(d_queries);
                if (read_slot >= 0) tile_release(empty + read_slot * 8);
                read_slot = slot;

                // Keys past the end must be hidden: their weight may be infinite.
                const int key_begin = (tile_begin + i) * KEYS;
                if (key_begin + KEYS > seq || (CAUSAL && key_begin + KEYS - 1 > group_row) ||
                    (WINDOW && group_row + 63 - key_begin >= window) ||
                    (SEGMENTS && mixed<KEYS>(ids, group_row + warp_row, key_begin, seq)))
                    hide<Rows::Queries>(scores, row, key_begin, seq, ids PASS_WINDOW);
#pragma unroll
                for (int j = 0; j < KEYS / 2; j++) scores[j] = exp_2(scores[j] * scale_log2 - offset[j / 2 % 2]);
                products_wait<0>();
                arrived(d_weights);
                if (i == own_tiles - 1) tile_release(own_empty);
#pragma unroll
                for (int j = 0; j < KEYS / 2; j++) d_weights[j] = scores[j] * (d_weights[j] - row_delta[j / 2 % 2]);
                pack_all(d_scores, d_weights);
                products_begin();
                accumulate(d_queries, d_scores, k_tile);
                products_commit();
                next_slot();
            }
            products_wait<0>();
            arrived(d_queries);
            tile_release(empty + read_slot * 8);
            for (int i = own_tiles; i < tiles; i++) {
                barrier_wait(full + slot * 8, phase);
                tile_release(empty + slot * 8);
                next_slot();
            }
            panels_store<QUERIES>(shared + OUT_AT, group * 64, d_queries, scale, scale,
                                  d_qkv + (static_cast<long long>(batch) * seq + group_row) * stride + item % q_heads * D,
                                  stride, seq - group_row, 1 + group);
        }
    }
}
